"""The scheduler as a pure state machine: events in, instructions out. No thread, clock, array or file.

Theory of operation. Up to `max_running` requests run at once, of different agents: requests that name the same agent
run one after the other, in the order they came (a fork names two agents). Who starts next, among the first of each
agent's line: the engine's own work, then whoever was passed over `MAX_PASSED` times, then `interactive` before
`background`; between equals the client that was served longest ago, then the agent that was, then the order of arrival.
So nobody waits for ever: a request is overtaken by a bounded number of later ones.

Inheritance. Requests of one agent keep their order, so an `interactive` one may stand behind a `background` one of its
agent. Whatever is ahead of it in that line, running or waiting, counts as interactive until it does so no more: others
would otherwise hold it up, and through it the request that somebody waits for. The engine is told (`Prioritise`), since
places in RAM go by priority, too. The engine's own work raises nobody.

Preemption. While an `interactive` request could start but for a slot, a running `background` one, the last that
started, is asked to give way. At its next step boundary it is `Preempted`: it leaves its slot and keeps its agents, so
that nobody sees a turn half done, and is *parked*: it stands before all other background requests, and goes on, not
from the start, with `Resume`. After `MAX_PREEMPTIONS` it is asked no more. A turn that gave way for memory
(`kvd.scheduler.reserving`) is parked in the same way.

May import kvd.ids and kvd.errors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Literal

from kvd.ids import RequestId

Priority = Literal["interactive", "background"]

MAX_PASSED = 32
"""A request that so many later ones have overtaken goes first."""


MAX_PREEMPTIONS = 4
"""A request that was preempted so often runs to its end: each time costs it a swap-out and a swap-in."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request came in.

    Attributes:
        request: its id.
        first: the engine's own, ahead of all that wait, refused to nobody.
        agents: agents it works on, alone; none: only the order of arrival counts.
        client: whom it is fair to.
        priority: `background` waits for `interactive`.
    """

    request: RequestId
    first: bool = False
    agents: tuple[Hashable, ...] = ()
    client: Hashable = None
    priority: Priority = "interactive"


@dataclass(frozen=True, slots=True)
class CancelWanted:
    """Its client cancelled it or went away."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running request has left its slot and waits to go on."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Finished:
    """A running request, or a preempted one that was cancelled, ended, however."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class DrainWanted:
    """No new work from here on; what is queued is still done."""


SchedulerEvent = Submitted | CancelWanted | Preempted | Finished | DrainWanted


@dataclass(frozen=True, slots=True)
class Start:
    """Begin this request."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with this preempted request."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Preempt:
    """Ask a running request to give way at its next step boundary; `wanted` False: it need not any more."""

    request: RequestId
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class Prioritise:
    """A request that has started counts as this from here on: somebody came who waits for it, or waits no more."""

    request: RequestId
    priority: Priority


@dataclass(frozen=True, slots=True)
class TellQueued:
    """Tell the client its place in the queue (1 is next)."""

    request: RequestId
    position: int


@dataclass(frozen=True, slots=True)
class StopRunning:
    """End a running or preempted request at its next step boundary, keeping what it computed."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class DropQueued:
    """Answer a request that never started with `cancelled`."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class RefuseBusy:
    """The queue is full."""

    request: RequestId
    queued: int


@dataclass(frozen=True, slots=True)
class RefuseDraining:
    """The daemon is going down."""

    request: RequestId


SchedulerInstruction = (
    Start | Resume | Prioritise | Preempt | TellQueued | StopRunning | DropQueued | RefuseBusy | RefuseDraining
)


class Scheduler:
    """Owner: the engine thread; `handle` is the only mutator.

    Args:
        max_queued: requests that may wait; one more is refused.
        max_running: requests that run at once.

    Attributes:
        max_running: as given.
    """

    def __init__(self, *, max_queued: int, max_running: int = 1) -> None:
        self._max_queued = max_queued
        self.max_running = max_running
        self._queue: list[Submitted] = []
        self._running: dict[RequestId, Submitted] = {}
        self._parked: dict[RequestId, Submitted] = {}
        self._leaving: dict[RequestId, Submitted] = {}
        self._asked: set[RequestId] = set()
        self._raised: frozenset[RequestId] = frozenset()  # background requests that count as interactive
        self._told_raised: frozenset[RequestId] = frozenset()
        self._preemptions: dict[RequestId, int] = {}
        self._passed: dict[RequestId, int] = {}
        self._served: dict[tuple[str, Hashable], int] = {}
        self._starts = 0
        self._draining = False

    @property
    def running(self) -> tuple[RequestId, ...]:
        """The requests being worked on, in the order they started."""
        return tuple(self._running)

    @property
    def preempted(self) -> tuple[RequestId, ...]:
        """Requests that gave way and wait to go on."""
        return tuple(self._parked)

    @property
    def queued(self) -> tuple[RequestId, ...]:
        """Requests that wait to start, in their places: the engine's own, interactive ones, the others."""
        return tuple(request for request in self.line if request not in self._parked)

    @property
    def line(self) -> tuple[RequestId, ...]:
        """All that wait for a slot, in their places; preempted ones come before others of their priority."""
        waiting = [*self._parked.values(), *self._queue]
        return tuple(
            entry.request for entry in sorted(waiting, key=lambda each: (not each.first, self._is_background(each)))
        )

    @property
    def counts(self) -> tuple[int, int]:
        """How many run and how many wait; may be read from any thread."""
        return len(self._running), len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not (self._running or self._queue or self._parked or self._leaving)

    def handle(self, event: SchedulerEvent) -> tuple[SchedulerInstruction, ...]:
        """Take one event, return what to do, in order.

        Raises:
            ValueError: a request finished that does not run; nothing changed.
        """
        match event:
            case Submitted():
                return self._submit(event)
            case CancelWanted(request):
                return self._cancel(request)
            case Preempted(request):
                if request not in self._running:
                    raise ValueError(f"request {request} gave way but {list(self._running)} are running")
                self._parked[request] = self._running.pop(request)
                self._asked.discard(request)
                self._preemptions[request] = self._preemptions.get(request, 0) + 1
                return self._start_next()
            case Finished(request):
                if request not in self._running and request not in self._leaving:
                    raise ValueError(f"request {request} finished but {list(self._running)} are running")
                self._running.pop(request, None)
                self._leaving.pop(request, None)
                self._preemptions.pop(request, None)
                self._asked.discard(request)
                return self._start_next()
            case DrainWanted():
                self._draining = True
                return ()

    def _submit(self, entry: Submitted) -> tuple[SchedulerInstruction, ...]:
        if self._draining and not entry.first:
            return (RefuseDraining(entry.request),)
        if entry.first:
            self._queue.insert(0, entry)
            return self._start_next()
        self._queue.append(entry)
        started = self._start_next()
        if entry not in self._queue:
            return started
        waiting = len(self._queue)
        if waiting > self._max_queued:
            self._queue.remove(entry)
            return (*started, RefuseBusy(entry.request, waiting - 1), *self._start_next())
        return (*started, TellQueued(entry.request, self.line.index(entry.request) + 1))

    def _cancel(self, request: RequestId) -> tuple[SchedulerInstruction, ...]:
        if request in self._running:
            return (StopRunning(request),)
        if request in self._parked:
            # what is left to do is to commit, which takes no slot; until then its agents are its own
            self._leaving[request] = self._parked.pop(request)
            self._passed.pop(request, None)
            return (StopRunning(request), *self._start_next())
        if request in self._leaving:
            return ()
        for entry in self._queue:
            if entry.request == request:
                self._queue.remove(entry)
                self._passed.pop(request, None)
                return (DropQueued(request), *self._start_next())  # it may have stood before others of its agents
        return ()  # it ended while the cancellation was on its way

    # ---- who is next ------------------------------------------------------------------------------------------------

    def _start_next(self) -> tuple[SchedulerInstruction, ...]:
        """Start what may start, one after the other, and ask for slots for what could."""
        self._raise_who_is_waited_for()
        instructions: list[SchedulerInstruction] = []
        while len(self._running) < self.max_running:
            entry = min(self._heads(), key=self._rank, default=None)
            if entry is None:
                break
            instructions.append(Resume(entry.request) if entry.request in self._parked else Start(entry.request))
            self._begin(entry)
        return (*instructions, *self._tell_raised(), *self._ask_to_give_way())

    def _raise_who_is_waited_for(self) -> None:
        """See which background requests stand before an interactive one of their agents, be it through others."""
        awaited: set[Hashable] = set()
        raised: set[RequestId] = set()
        ahead = (*self._leaving.values(), *self._running.values(), *self._parked.values(), *self._queue)
        for entry in reversed(ahead):
            if entry.first:
                continue
            if entry.priority == "background" and not awaited.isdisjoint(entry.agents):
                raised.add(entry.request)
            if entry.priority == "interactive" or entry.request in raised:
                awaited.update(entry.agents)
        self._raised = frozenset(raised)

    def _tell_raised(self) -> Iterator[Prioritise]:
        """What has changed for requests that have started."""
        started = (*self._running, *self._parked)
        raised = frozenset(request for request in started if request in self._raised)
        for request in started:
            if (request in raised) != (request in self._told_raised):
                yield Prioritise(request, "interactive" if request in raised else "background")
        self._told_raised = raised

    def _is_background(self, entry: Submitted) -> bool:
        return entry.priority == "background" and entry.request not in self._raised

    def _ask_to_give_way(self) -> tuple[Preempt, ...]:
        """Ask as many background requests as there are interactive ones that could start but for a slot."""
        heads = [entry for entry in self._heads() if not (self._is_background(entry) or entry.first)]
        able = [
            request
            for request, entry in reversed(self._running.items())
            if self._is_background(entry) and self._preemptions.get(request, 0) < MAX_PREEMPTIONS
        ]
        # who was asked may be about to leave: it stays asked before others are
        able.sort(key=lambda request: request not in self._asked)
        asked = set(able[: len(heads)])
        changed = [Preempt(request, wanted=False) for request in self._running if request in self._asked - asked]
        changed += [Preempt(request) for request in able if request in asked - self._asked]
        self._asked = asked
        return tuple(changed)

    def _heads(self) -> Iterator[Submitted]:
        """Those that wait, in order, and that nothing running or waiting before them concerns an agent of."""
        yield from self._parked.values()
        others = (*self._running.values(), *self._leaving.values(), *self._parked.values())
        busy = {agent for entry in others for agent in entry.agents}
        for entry in self._queue:
            if busy.isdisjoint(entry.agents):
                yield entry
            busy.update(entry.agents)

    def _rank(self, entry: Submitted) -> tuple[bool, bool, bool, bool, int, int]:
        """Less is sooner; `min` takes the first of equals, so the order of arrival decides."""
        overdue = self._passed.get(entry.request, 0) >= MAX_PASSED
        served = [self._served.get(("agent", agent), 0) for agent in entry.agents]
        return (
            not entry.first,
            not overdue,
            self._is_background(entry) and not overdue,
            entry.request not in self._parked,
            0 if overdue else self._served.get(("client", entry.client), 0),
            0 if overdue else max(served, default=0),
        )

    def _begin(self, entry: Submitted) -> None:
        line = [*self._parked.values(), *self._queue]
        for other in line[: line.index(entry)]:
            self._passed[other.request] = self._passed.get(other.request, 0) + (not entry.first)
        self._passed.pop(entry.request, None)
        self._running[entry.request] = entry
        if self._parked.pop(entry.request, None) is not None:
            return  # it was served when it started
        self._queue.remove(entry)
        if entry.first:
            return
        self._starts += 1
        self._served[("client", entry.client)] = self._starts
        self._served.update({("agent", agent): self._starts for agent in entry.agents})
        present = [*self._queue, *self._running.values(), *self._parked.values(), *self._leaving.values()]
        known: set[tuple[str, Hashable]] = {("client", each.client) for each in present}
        known |= {("agent", agent) for each in present for agent in each.agents}
        self._served = {key: start for key, start in self._served.items() if key in known}
