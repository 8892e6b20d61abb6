"""The scheduler as a pure state machine: events in, instructions out. No thread, clock, array or file.

One request runs at a time here; the queue is real: bounded, in order, with cancellation at any place. Batching
widens `running` to a set without changing the events.

May import kvd.ids and kvd.errors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvd.ids import RequestId


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request came in; `first`: the engine's own, ahead of all that wait, refused to nobody."""

    request: RequestId
    first: bool = False


@dataclass(frozen=True, slots=True)
class CancelWanted:
    """Its client cancelled it or went away."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Finished:
    """The running request ended, however."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class DrainWanted:
    """No new work from here on; what is queued is still done."""


SchedulerEvent = Submitted | CancelWanted | Finished | DrainWanted


@dataclass(frozen=True, slots=True)
class Start:
    """Begin this request."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class TellQueued:
    """Tell the client its place in the queue (1 is next)."""

    request: RequestId
    position: int


@dataclass(frozen=True, slots=True)
class StopRunning:
    """End the running request at its next step boundary, keeping what it computed."""

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


SchedulerInstruction = Start | TellQueued | StopRunning | DropQueued | RefuseBusy | RefuseDraining


class Scheduler:
    """Owner: the engine thread; `handle` is the only mutator.

    Args:
        max_queued: requests that may wait; one more is refused.
    """

    def __init__(self, *, max_queued: int) -> None:
        self._max_queued = max_queued
        self._queue: deque[RequestId] = deque()
        self._running: RequestId | None = None
        self._draining = False

    @property
    def running(self) -> RequestId | None:
        """The request being worked on."""
        return self._running

    @property
    def queued(self) -> tuple[RequestId, ...]:
        """Waiting requests in order."""
        return tuple(self._queue)

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return self._running is None and not self._queue

    def handle(self, event: SchedulerEvent) -> tuple[SchedulerInstruction, ...]:
        """Take one event, return what to do, in order."""
        match event:
            case Submitted(request, first):
                return self._submit(request, first=first)
            case CancelWanted(request):
                return self._cancel(request)
            case Finished(request):
                if request != self._running:
                    raise ValueError(f"request {request} finished but {self._running} is running")
                self._running = None
                return self._start_next()
            case DrainWanted():
                self._draining = True
                return ()

    def _submit(self, request: RequestId, *, first: bool) -> tuple[SchedulerInstruction, ...]:
        if first and not self.is_idle:
            self._queue.appendleft(request)
            return ()
        if self._draining and not first:
            return (RefuseDraining(request),)
        if self._running is None and not self._queue:
            self._running = request
            return (Start(request),)
        if len(self._queue) >= self._max_queued:
            return (RefuseBusy(request, len(self._queue)),)
        self._queue.append(request)
        return (TellQueued(request, len(self._queue)),)

    def _cancel(self, request: RequestId) -> tuple[SchedulerInstruction, ...]:
        if request == self._running:
            return (StopRunning(request),)
        if request in self._queue:
            self._queue.remove(request)
            return (DropQueued(request),)
        return ()  # it ended while the cancellation was on its way

    def _start_next(self) -> tuple[SchedulerInstruction, ...]:
        if not self._queue:
            return ()
        self._running = self._queue.popleft()
        return (Start(self._running),)
