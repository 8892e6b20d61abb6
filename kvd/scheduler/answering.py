"""Requests from their arrival to their one answer: deadlines, places in line, log lines, clients' callbacks.

What a client's callback does wrong is logged and harms nobody.

Owner: the engine thread. May import kvd.errors, kvd.ids, kvd.ops.logs and siblings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvd.errors import Busy, Cancelled, KvdError
from kvd.ids import RequestId
from kvd.ops.logs import RequestLine
from kvd.scheduler.messages import BY_CLIENT, HeldRequest, guarded
from kvd.scheduler.places import MIN_RETRY_S, Place, Places, estimated_wait_s
from kvd.scheduler.requests import AgentRef, JobRequest, Reply, TurnRequest

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

TYPICAL_WEIGHT = 0.2
"""Weight of the last request in what a request typically takes."""


class Answering:
    """Owner: the engine thread.

    Args:
        on_request_done: called with the canonical log line of each request.

    Attributes:
        requests: those that have not been answered; other threads may look.
        core: the engine's parts, once they are built.
        at_once: requests that run at once.
    """

    def __init__(self, on_request_done: Callable[[RequestLine], None]) -> None:
        self.requests: dict[RequestId, HeldRequest] = {}
        self.core: EngineCore | None = None
        self.at_once = 1
        self._on_request_done = on_request_done
        self._places = Places()
        self._typical_s = 0.0

    # ---- arrival ----------------------------------------------------------------------------------------------------

    def take(self, request: TurnRequest | JobRequest, reply: Reply) -> HeldRequest:
        """A request came in."""
        now_s = self._now_s()
        if isinstance(request, TurnRequest):
            request = replace(request, emit=guarded(request.emit, self.callback_failed))
        held = self.requests[request.request_id] = HeldRequest(request, reply, now_s)
        if isinstance(request, TurnRequest) and request.timeout_s is not None:
            held.deadline_s = now_s + request.timeout_s
        if isinstance(request, TurnRequest) and self.core is not None:
            self.core.journal.turn_queued(request)
        return held

    def waits(self, ref: AgentRef) -> bool:
        """Whether a turn of the agent has not been answered yet."""
        return any(isinstance(each.request, TurnRequest) and each.request.ref == ref for each in self.requests.values())

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def overdue(self) -> Mapping[RequestId, str]:
        """Requests whose deadline has passed, and why they end."""
        late = [(number, held) for number, held in self.requests.items() if held.deadline_s is not None]
        now_s = self._now_s()
        return {
            number: f"timed out after {held.deadline_s - held.submitted_s:g} s"
            for number, held in late
            if held.deadline_s is not None and now_s >= held.deadline_s
        }

    def patience_s(self, most_s: float) -> float:
        """How long the engine may sleep: until the next deadline, and `most_s` at most."""
        deadlines = [held.deadline_s for held in self.requests.values() if held.deadline_s is not None]
        return min([most_s, *(max(0.0, deadline - self._now_s()) for deadline in deadlines)])

    def tell_places(self, version: Hashable, line: Callable[[], tuple[RequestId, ...]]) -> None:
        """Tell those whose place changed, as often as they may be told.

        Args:
            version: differs from the last call's when a place may have changed.
            line: requests that wait for a slot, in their places.
        """
        for request, place in self._places.due(version, self._now_s(), lambda: self._all_places(line())).items():
            self.tell_place(request, place)

    def tell_place(self, request: RequestId, place: Place) -> None:
        """Tell a request where it stands."""
        assert self.core is not None
        held = self.requests[request]
        if not isinstance(held.request, TurnRequest):
            return
        self._places.note(request, place, self._now_s())
        at_once = self.at_once if place.waits_for == "slot" else self.core.reservations.holding
        wait_s = estimated_wait_s(place.position, self._typical_s, at_once)
        held.request.emit(
            {"type": "queued", "position": place.position, "wait_s": wait_s, "waits_for": place.waits_for}
        )

    def _all_places(self, line: tuple[RequestId, ...]) -> Mapping[RequestId, Place]:
        assert self.core is not None
        places = {request: Place(number + 1, "slot") for number, request in enumerate(line)}
        for request, held in self.requests.items():
            if request not in places and held.state is not None and held.state.residence is not None:
                position = self.core.reservations.place(held.state.residence.reservation)
                if position is not None:
                    places[request] = Place(position, "memory")
        return places

    # ---- answers ----------------------------------------------------------------------------------------------------

    def answer(self, request_id: RequestId, result: object, error: KvdError | None) -> None:
        """Give a request its answer and its log line."""
        held = self.requests.pop(request_id)
        try:
            if self.core is not None and not held.internal:
                line = held.line(self.core.clock(), result, error)
                self.core.journal.ended(held, line, result, error)
                self._on_request_done(line)
        except Exception as caught:
            self.callback_failed(caught)
        self.reply(held, result, error)

    def turn_away(self, request: TurnRequest | JobRequest, reply: Reply, error: KvdError) -> None:
        """Answer a request that came when the engine had ended, with its log line; from any thread."""
        assert self.core is not None
        now_s = self.core.clock()
        held = HeldRequest(request, reply, now_s)
        try:
            if not held.internal:
                self._on_request_done(held.line(now_s, None, error))
        except Exception as caught:
            self.callback_failed(caught)
        self.reply(held, None, error)

    def reply(self, held: HeldRequest, result: object, error: KvdError | None) -> None:
        """Call a request's callback."""
        try:
            held.answer(result, error)
        except Exception as caught:
            self.callback_failed(caught)

    def refuse_busy(self, request_id: RequestId, queued: int) -> None:
        """The queue is full: come back when what is in it may be done."""
        retry_after_s = max(MIN_RETRY_S, estimated_wait_s(queued + 1, self._typical_s, self.at_once))
        error = Busy(f"{queued} requests are queued already", retry_after_s=retry_after_s, queued=queued)
        self.answer(request_id, None, error)

    def drop_queued(self, request_id: RequestId) -> None:
        """It was cancelled before it started."""
        reason = self.requests[request_id].stop_reason
        message = "cancelled while queued" if reason == BY_CLIENT else f"{reason}, while it was queued"
        self.answer(request_id, None, Cancelled(f"{message}; nothing was computed"))

    def note_typical(self, held: HeldRequest) -> None:
        """A request that had started ended: so long they take, without the time they were preempted."""
        seconds = self._now_s() - held.started_s
        if held.state is not None:
            seconds -= held.state.times.preempted_s
        self._typical_s += TYPICAL_WEIGHT * (seconds - self._typical_s)

    def callback_failed(self, caught: Exception) -> None:
        """A client's callback raised."""
        assert self.core is not None
        self.core.log("callback_failed", error=f"{type(caught).__name__}: {caught}")

    def _now_s(self) -> float:
        assert self.core is not None
        return self.core.clock()


def post(
    loop: asyncio.AbstractEventLoop,
    settle: Callable[[object, KvdError | None], None],
    result: object,
    error: KvdError | None,
) -> None:
    """Carry a reply from the engine thread to the loop; a loop that is gone (forced exit) has no one to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle, result, error)


def emitter(
    take: Callable[[Mapping[str, object]], None], *, all_events: bool = True, agent: str | None = None
) -> Callable[[Mapping[str, object]], None]:
    """What the engine calls with a turn's events, which `take` gets on the loop; `agent`: each says whose it is."""
    loop = asyncio.get_running_loop()
    whose = {} if agent is None else {"agent": agent}

    def emit(event: Mapping[str, object]) -> None:
        # a client that wants no stream still gets the one event its clock needs
        if all_events or event["type"] == "first_token":
            # asyncio is not thread safe: events cross from the engine thread through the loop's own door
            loop.call_soon_threadsafe(take, {**event, **whose})

    return emit
