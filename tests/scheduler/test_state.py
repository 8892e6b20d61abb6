"""The queue: every request is answered once, in order and fairly, whatever is cancelled or drained."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.ids import RequestId
from kvd.scheduler.state import (
    MAX_PASSED,
    MAX_PREEMPTIONS,
    CancelWanted,
    DrainWanted,
    DropQueued,
    Finished,
    Preempt,
    Preempted,
    Prioritise,
    Priority,
    RefuseBusy,
    RefuseDraining,
    Resume,
    Scheduler,
    SchedulerInstruction,
    Start,
    StopRunning,
    Submitted,
    TellQueued,
)

AGENTS = st.lists(st.sampled_from("abc"), max_size=2, unique=True).map(tuple)
SUBMIT = st.tuples(
    st.just("submit"), AGENTS, st.sampled_from("xy"), st.sampled_from(["interactive", "background"]), st.booleans()
)
ACTIONS = st.lists(
    st.one_of(
        SUBMIT,
        st.tuples(st.just("cancel"), st.integers(1, 40)),
        st.tuples(st.just("finish"), st.integers(0, 3)),
        st.tuples(st.just("preempt"), st.integers(0, 3)),
        st.just(("drain",)),
    ),
    max_size=80,
)


class Book:
    """What became of each request, checked as it happens.

    Args:
        max_queued: requests that may wait.
        max_running: requests that may run at once.
    """

    def __init__(self, max_queued: int, max_running: int) -> None:
        self.scheduler = Scheduler(max_queued=max_queued, max_running=max_running)
        self.max_queued = max_queued
        self.max_running = max_running
        self.submitted: dict[int, Submitted] = {}
        self.running: set[int] = set()
        self.started: list[int] = []
        self.ended: list[int] = []
        self.draining = False
        self.asked: set[int] = set()
        self.parked: set[int] = set()
        self.leaving: set[int] = set()
        self.preemptions: dict[int, int] = {}
        self.raised: set[int] = set()

    def submit(
        self,
        *agents: Hashable,
        client: Hashable = None,
        priority: Priority = "interactive",
        first: bool = False,
    ) -> RequestId:
        """The next request comes in."""
        event = Submitted(RequestId(len(self.submitted) + 1), first, agents, client, priority)
        self.submitted[event.request] = event
        self.carry_out(self.scheduler.handle(event))
        return event.request

    def finish(self, request: int) -> None:
        """A running request ends, or one that was cancelled while it was preempted."""
        self.asked.discard(request)
        (self.running if request in self.running else self.leaving).remove(request)
        self.ended.append(request)
        self.carry_out(self.scheduler.handle(Finished(RequestId(request))))

    def preempt(self, request: int) -> None:
        """A running request gives way."""
        self.running.remove(request)
        self.parked.add(request)
        self.asked.discard(request)
        self.preemptions[request] = self.preemptions.get(request, 0) + 1
        self.carry_out(self.scheduler.handle(Preempted(RequestId(request))))

    def drop(self, request: int) -> None:
        """Cancel a request."""
        self.carry_out(self.scheduler.handle(CancelWanted(RequestId(request))))

    def drain(self) -> None:
        """Take nothing more."""
        self.draining = True
        self.carry_out(self.scheduler.handle(DrainWanted()))

    def carry_out(self, instructions: tuple[SchedulerInstruction, ...]) -> None:
        """Do what the scheduler says, if it may say so."""
        for instruction in instructions:
            match instruction:
                case Start(request):
                    mine = set(self.submitted[request].agents)
                    assert request not in self.started
                    busy = self.running | self.parked | self.leaving
                    assert all(mine.isdisjoint(self.submitted[other].agents) for other in busy)
                    self.started.append(request)
                    self.running.add(request)
                case Resume(request):
                    self.parked.remove(request)
                    self.running.add(request)
                case Preempt(request, wanted):
                    assert request in self.running
                    assert (request in self.asked) != wanted
                    assert self.submitted[request].priority == "background"
                    assert not wanted or request not in self.raised
                    assert not wanted or self.preemptions.get(request, 0) < MAX_PREEMPTIONS
                    (self.asked.add if wanted else self.asked.discard)(request)
                case Prioritise(request, priority):
                    assert request in self.running | self.parked
                    assert (request in self.raised) != (priority == "interactive")
                    (self.raised.add if priority == "interactive" else self.raised.discard)(request)
                case DropQueued(request):
                    assert request not in self.started
                    self.ended.append(request)
                case RefuseBusy(request, queued):
                    assert queued >= self.max_queued
                    self.ended.append(request)
                case RefuseDraining(request):
                    assert self.draining
                    self.ended.append(request)
                case StopRunning(request) if request in self.parked:
                    self.parked.remove(request)
                    self.leaving.add(request)
                case StopRunning(request):
                    assert request in self.running
                case TellQueued(request, position):
                    assert self.scheduler.line[position - 1] == request
        assert set(self.scheduler.running) == self.running
        assert len(self.running) <= self.max_running
        assert self.scheduler.counts == (len(self.running), len(self.scheduler.queued))
        assert set(self.scheduler.preempted) == self.parked
        assert self.raised & (self.running | self.parked) == self.awaited & (self.running | self.parked)
        at_work = self.running or self.parked or self.leaving
        assert self.scheduler.is_idle == (not at_work and not self.scheduler.queued)
        assert len(self.asked) <= len(self.scheduler.line), "somebody gives way for nobody"

    @property
    def awaited(self) -> set[int]:
        """Background requests that an interactive one of their agents waits for, be it through others."""
        present = [self.submitted[n] for n in {*self.running, *self.parked, *self.leaving, *self.scheduler.queued}]
        theirs = [each for each in present if not each.first]
        urgent = {each.request for each in theirs if each.priority == "interactive"}
        for _ in theirs:
            urgent |= {
                each.request
                for each in theirs
                for later in theirs
                if later.request in urgent and later.request > each.request and {*each.agents} & {*later.agents}
            }
        return {int(request) for request in urgent if self.submitted[request].priority == "background"}


@given(max_queued=st.integers(1, 5), max_running=st.integers(1, 3), actions=ACTIONS)
def test_every_request_is_answered_once(max_queued: int, max_running: int, actions: list[tuple[object, ...]]) -> None:
    """Each ends once: finished, dropped or refused; those of one agent run one by one, in the order they came (P33)."""
    book = Book(max_queued, max_running)
    for action in actions:
        match action:
            case ("submit", tuple() as agents, str() as client, ("interactive" | "background") as priority, first):
                book.submit(*agents, client=client, priority=priority, first=first is True)
            case ("cancel", int() as number) if number in book.submitted:
                book.drop(number)
            case ("finish", int() as number) if book.running:
                book.finish(sorted(book.running)[number % len(book.running)])
            case ("preempt", int() as number) if book.asked or book.running:
                victims = sorted(book.asked or book.running)  # for memory anybody may be preempted
                book.preempt(victims[number % len(victims)])
            case ("drain",):
                book.drain()
        idle = max_running - len(book.running)
        assert not idle or not book.parked, "a place is free for one that was preempted"
        at_work = book.running | book.parked | book.leaving
        busy = {agent for request in at_work for agent in book.submitted[request].agents}
        for waiting in book.scheduler.queued:
            agents = set(book.submitted[waiting].agents)
            assert not idle or not busy.isdisjoint(agents), "a place is free and nothing stands in the way"
            busy |= agents
    while book.running or book.leaving:
        book.finish(min(book.running | book.leaving))
    assert sorted(book.ended) == sorted(book.submitted)
    for agent in "abc":
        line = [n for n in book.started if agent in book.submitted[n].agents and not book.submitted[n].first]
        assert line == sorted(line)


def test_others_do_not_wait_for_an_agents_line() -> None:
    """Two requests to one agent never run together; a third, to another agent, starts at once beside the first."""
    book = Book(4, 2)
    book.submit("a")
    book.submit("a")
    book.submit("b")
    assert book.scheduler.running == (1, 3)
    assert book.scheduler.queued == (2,)
    book.finish(3)
    assert book.scheduler.running == (1,)
    book.finish(1)
    assert book.scheduler.running == (2,)


def test_a_fork_keeps_both_its_agents_to_itself() -> None:
    """A fork of `a` to `b` runs beside neither; what comes later for either waits for it."""
    book = Book(4, 4)
    book.submit("a")
    book.submit("a", "b")
    book.submit("b")
    assert book.scheduler.running == (1,)
    book.finish(1)
    assert book.scheduler.running == (2,)
    book.finish(2)
    assert book.scheduler.running == (3,)


def test_a_cancelled_request_makes_way_for_its_line() -> None:
    """The request that kept another of its agents waiting is gone: the other starts without anything ending."""
    book = Book(4, 2)
    book.submit("a")
    book.submit("a", "b")
    book.submit("b")
    book.drop(2)
    assert book.scheduler.running == (1, 3)


def test_clients_take_turns() -> None:
    """A client with a long line of agents does not shut out one that asks for one."""
    book = Book(9, 1)
    for agent in "abcd":
        book.submit(agent, client="many")
    book.submit("e", client="one")
    book.submit("f", client="one")
    for _ in range(6):
        book.finish(*book.scheduler.running)
    assert book.started == [1, 5, 2, 6, 3, 4]


def test_agents_of_one_client_take_turns() -> None:
    """Of one client's agents the one that was served longest ago is next."""
    book = Book(9, 1)
    for agent in "aaab":
        book.submit(agent, client="x")
    for _ in range(4):
        book.finish(*book.scheduler.running)
    assert book.started == [1, 4, 2, 3]


def test_background_waits_for_interactive_but_not_for_ever() -> None:
    """Interactive requests go first; after `MAX_PASSED` of them the background one has its turn all the same."""
    book = Book(9, 1)
    book.submit("a")
    late = book.submit("b", priority="background")
    for _ in range(MAX_PASSED + 1):
        book.submit("c")
        book.submit("d", priority="background") if len(book.submitted) == 3 else None
        if late in book.started:
            break
        book.finish(*book.scheduler.running)
    assert late not in book.started[:-1]
    book.finish(*book.scheduler.running)
    assert late in book.started
    assert book.started.index(late) <= MAX_PASSED + 2


def test_the_engines_own_work_goes_first_but_not_beside_its_agent() -> None:
    """A retry of a save waits for the agent's running turn alone, before all that waits."""
    book = Book(1, 1)
    book.submit("a")
    book.submit("b")
    book.submit("a", first=True)
    assert book.scheduler.queued == (3, 2)
    book.finish(1)
    assert book.scheduler.running == (3,)


def test_a_background_request_gives_way_and_goes_on_before_others() -> None:
    """The last that started is asked; it goes on before other background requests, and after interactive ones."""
    book = Book(9, 2)
    book.submit("a", priority="background")
    book.submit("b", priority="background")
    book.submit("c", priority="background")
    assert not book.asked
    book.submit("d")
    assert book.asked == {2}
    book.preempt(2)
    assert book.running == {1, 4}
    assert book.scheduler.line == (2, 3)
    book.submit("b")
    book.submit("e")
    assert book.asked == {1}, "what waits for a busy agent asks nobody"
    book.drop(5)
    book.finish(4)
    assert book.running == {1, 6}
    assert not book.asked
    book.finish(1)
    assert book.running == {2, 6}
    book.finish(6)
    assert book.running == {2, 3}


def test_who_stands_before_an_interactive_request_of_its_agent_counts_as_interactive() -> None:
    """P13: a nudge in the background that its own agent's question waits for is not put behind other agents' questions.

    Running it gives way to nobody, preempted it goes on before them, and in the queue it asks others to give way.
    """
    book = Book(9, 1)
    nudge = book.submit("a", priority="background")
    book.submit("b")
    assert book.asked == {nudge}
    question = book.submit("a")
    assert not book.asked
    assert book.raised == {nudge}
    book.drop(question)
    assert book.asked == {nudge}
    assert not book.raised
    book.preempt(nudge)
    question = book.submit("a")
    book.submit("c")
    assert book.raised == {nudge}
    assert book.scheduler.line == (nudge, question, 5)
    book.finish(2)
    assert book.running == {nudge}
    book.finish(nudge)
    book.finish(*book.running)
    book.finish(*book.running)
    book.submit("d", priority="background")
    waiting = book.submit("e", priority="background")
    assert not book.asked
    book.submit("e")
    assert book.asked == {6}
    book.preempt(6)
    assert book.running == {waiting}


def test_a_priority_goes_through_a_fork() -> None:
    """A question to the copy waits for the fork, which waits for the nudge: all three are waited for."""
    book = Book(9, 1)
    book.submit("x")
    nudge = book.submit("a", priority="background")
    book.submit("a", "b", priority="background")
    book.submit("c")
    book.submit("b")
    assert book.scheduler.line == (nudge, 3, 4, 5)


def test_the_engines_own_work_raises_nobody() -> None:
    """A save waits for the turn of its agent; nobody waits for the save."""
    book = Book(9, 1)
    slow = book.submit("a", priority="background")
    book.submit("a", first=True)
    book.submit("b")
    assert book.asked == {slow}


def test_a_request_that_needs_no_slot_any_more_asks_nobody() -> None:
    """Cancelled, or served by a slot that came free: who was asked to give way need not."""
    book = Book(9, 1)
    book.submit("a", priority="background")
    late = book.submit("b")
    assert book.asked == {1}
    book.drop(late)
    assert not book.asked


def test_preempted_requests_are_not_overtaken_for_ever() -> None:
    """After `MAX_PASSED` interactive ones the one that was preempted goes on, asked a bounded number of times."""
    book = Book(9, 1)
    slow = book.submit("a", priority="background")
    for number in range((MAX_PASSED + 3) * (MAX_PREEMPTIONS + 1)):
        book.submit(f"quick-{number}")
        if slow in book.asked:
            book.preempt(slow)
        if slow in book.running and slow not in book.asked:
            break
        book.finish(*book.running - {slow})
    assert book.preemptions[slow] <= MAX_PREEMPTIONS
    assert slow in book.running


def test_what_is_cancelled_while_preempted_ends_without_a_slot() -> None:
    """It has to commit what it computed; its agent is busy until then."""
    book = Book(9, 1)
    book.submit("a", priority="background")
    book.submit("b")
    book.preempt(1)
    book.submit("a")
    book.drop(1)
    book.drop(1)
    book.finish(2)
    assert book.scheduler.queued == (3,)
    book.finish(1)
    assert book.running == {3}


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


def test_only_a_running_request_can_finish() -> None:
    """An end that does not fit is our bug, and nothing changes."""
    scheduler = Scheduler(max_queued=1)
    scheduler.handle(Submitted(RequestId(1)))
    with pytest.raises(ValueError, match=r"request 2 finished but \[1\] are running"):
        scheduler.handle(Finished(RequestId(2)))
    assert scheduler.running == (1,)
