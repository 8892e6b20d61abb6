"""The inbox: one round ends, however fast others ask; look-ups never hold up work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from kvd.ids import RequestId
from kvd.scheduler.core import EngineCore
from kvd.scheduler.inbox import LOOK_S, Inbox
from kvd.scheduler.messages import Call, Cancel, Drain, Stop


class Clock:
    """Stands still until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """A manual clock."""
    return Clock()


@pytest.fixture
def inbox(clock: Clock) -> Inbox:
    """An empty inbox."""
    return Inbox(clock)


def look(function: Callable[[EngineCore], object] = lambda core: None) -> Call:
    """A look-up."""
    return Call(function, Future())


def test_work_keeps_its_order_and_passes_look_ups(inbox: Inbox) -> None:
    """A cancellation does not stand behind the look-ups that came before it (P34)."""
    calls = [look(), look()]
    for message in (calls[0], Cancel(RequestId(1), "x"), calls[1], Drain()):
        inbox.put(message)
    assert inbox.take() == [Cancel(RequestId(1), "x"), Drain()]
    assert list(inbox.looks()) == calls
    assert inbox.take() == []


def test_a_round_of_look_ups_ends_with_its_time(inbox: Inbox, clock: Clock) -> None:
    """Those for whom no time is left are seen to in the next round, in their order, and at least one is in each."""
    calls = [look() for _ in range(4)]
    for call in calls:
        inbox.put(call)
    inbox.take()
    seen = []
    for call in inbox.looks():
        seen.append(call)
        clock.now_s += LOOK_S / 2
    assert seen == calls[:2]
    for call in inbox.looks():
        seen.append(call)
        clock.now_s += 10 * LOOK_S
    assert seen == calls[:3]


def test_look_ups_that_are_left_are_not_slept_on(inbox: Inbox, clock: Clock) -> None:
    """A wait returns at once while somebody waits for an answer."""
    inbox.put(look())
    inbox.put(look())
    inbox.take()
    for _ in inbox.looks():
        clock.now_s += LOOK_S
    assert inbox.take(wait_s=1e6) == []
    assert len(list(inbox.looks())) == 1


def test_what_is_left_at_the_end_is_all_there(inbox: Inbox) -> None:
    """An engine that goes down finds everybody it owes an answer, look-ups it had set aside too."""
    calls = [look(), look()]
    inbox.put(calls[0])
    inbox.take()
    inbox.put(calls[1])
    inbox.put(Stop())
    assert list(inbox.rest()) == [*calls, Stop()]
    inbox.put(Stop())
    assert inbox.get() == Stop()
