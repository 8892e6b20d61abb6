"""The queue: every request is answered once, in order, whatever is cancelled or drained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.ids import RequestId
from kvd.scheduler.state import (
    CancelWanted,
    DrainWanted,
    DropQueued,
    Finished,
    RefuseBusy,
    RefuseDraining,
    Scheduler,
    SchedulerInstruction,
    Start,
    StopRunning,
    Submitted,
    TellQueued,
)

ACTIONS = st.lists(
    st.one_of(
        st.just(("submit", 0)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.just(("finish", 0)),
        st.just(("drain", 0)),
    ),
    max_size=80,
)


@given(max_queued=st.integers(1, 5), actions=ACTIONS)
def test_every_request_is_answered_once_and_in_order(max_queued: int, actions: list[tuple[str, int]]) -> None:
    """Each request ends once: finished, dropped or refused; they start in the order they came; the queue is bounded."""
    scheduler = Scheduler(max_queued=max_queued)
    submitted = 0
    draining = False
    started: list[int] = []
    ended: list[int] = []
    stopped: set[int] = set()

    def carry_out(instructions: tuple[SchedulerInstruction, ...]) -> None:
        for instruction in instructions:
            match instruction:
                case Start(request):
                    assert len(started) - sum(one in ended for one in started) == 0, "one request runs at a time"
                    started.append(request)
                case DropQueued(request):
                    assert request not in started
                    ended.append(request)
                case RefuseBusy(request, queued):
                    assert queued == max_queued
                    ended.append(request)
                case RefuseDraining(request):
                    assert draining
                    ended.append(request)
                case StopRunning(request):
                    assert request == scheduler.running
                    stopped.add(request)
                case TellQueued(request, position):
                    assert scheduler.queued[position - 1] == request

    for action, number in actions:
        running = scheduler.running
        if action == "submit":
            submitted += 1
            carry_out(scheduler.handle(Submitted(RequestId(submitted))))
        elif action == "cancel":
            carry_out(scheduler.handle(CancelWanted(RequestId(number))))
        elif action == "finish" and running is not None:
            ended.append(running)
            carry_out(scheduler.handle(Finished(running)))
        elif action == "drain":
            draining = True
            carry_out(scheduler.handle(DrainWanted()))
        assert len(scheduler.queued) <= max_queued
        assert scheduler.is_idle == (scheduler.running is None and not scheduler.queued)
    while scheduler.running is not None:
        ended.append(scheduler.running)
        carry_out(scheduler.handle(Finished(scheduler.running)))
    assert sorted(ended) == list(range(1, submitted + 1))
    assert started == sorted(started)
    assert stopped <= set(started)


def test_a_drain_does_what_is_queued_and_refuses_what_comes() -> None:
    """Draining finishes the queue; a request that comes later is told so (P2)."""
    scheduler = Scheduler(max_queued=2)
    assert scheduler.handle(Submitted(RequestId(1))) == (Start(RequestId(1)),)
    assert scheduler.handle(Submitted(RequestId(2))) == (TellQueued(RequestId(2), 1),)
    assert scheduler.handle(DrainWanted()) == ()
    assert scheduler.handle(Submitted(RequestId(3))) == (RefuseDraining(RequestId(3)),)
    assert scheduler.handle(Finished(RequestId(1))) == (Start(RequestId(2)),)
    assert scheduler.handle(Finished(RequestId(2))) == ()
    assert scheduler.is_idle


def test_only_the_running_request_can_finish() -> None:
    """An end that does not fit is our bug, and nothing changes."""
    scheduler = Scheduler(max_queued=1)
    scheduler.handle(Submitted(RequestId(1)))
    with pytest.raises(ValueError, match="request 2 finished but 1 is running"):
        scheduler.handle(Finished(RequestId(2)))
    assert scheduler.running == 1
