"""`events.subscribe`: each subscription reads the ring of events at its reader's pace, on the event loop.

Theory of operation. A subscription is a call that goes on. It sends what is there, waits until the connection has
taken it, and asks the ring to be woken by the next event. So what waits in memory for a reader is a batch, and a reader
that does not read costs the ring's other readers, and the engine, nothing: it will get a gap. Woken, it lets `GATHER_S`
pass, so that an engine that tells much wakes the loop fifty times a second at most for each subscription.

Owner: the event loop. May import kvd.errors, kvd.front.api and siblings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvd.errors import Busy, Cancelled
from kvd.scheduler.event_ring import Batch, EventRing
from kvd.scheduler.journal import KINDS
from kvd.scheduler.params import Params

if TYPE_CHECKING:
    from kvd.front.api import CallContext

MAX_SUBSCRIPTIONS: Final = 64
"""At a time: each of them is told every event."""

BATCH_EVENTS: Final = 128
GATHER_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events a subscription wants.

    Attributes:
        kinds: their types; None for all.
        agent, namespace: of these alone; None for any. Events of no agent are always wanted.
    """

    kinds: frozenset[str] | None = None
    agent: str | None = None
    namespace: str | None = None

    @classmethod
    def of(cls, params: Params) -> Filter:
        """From a call's parameters.

        Raises:
            InvalidParams: naming what is allowed.
        """
        kinds = params.names_of("kinds", KINDS)
        if params.has("agent"):
            ref = params.ref()
            return cls(kinds, ref.agent, ref.namespace)
        return cls(kinds, None, params.namespace() if params.has("namespace") else None)

    def wants(self, event: Mapping[str, object]) -> bool:
        """Whether an event is told."""
        if self.kinds is not None and event["type"] not in self.kinds:
            return False
        if "agent" not in event:
            return True
        return self.agent in (None, event["agent"]) and self.namespace in (None, event["namespace"])


class Subscriptions:
    """All of them. Owner: the event loop.

    Attributes:
        count: how many there are.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Event] = set()
        self._is_closing = False

    def close(self) -> None:
        """The daemon stops: every subscription tells what is left and ends."""
        self._is_closing = True
        for news in self._waiting:
            news.set()

    async def serve(self, ring: EventRing, params: Params, context: CallContext) -> object:
        """One subscription, until it is cancelled or the daemon stops.

        Raises:
            InvalidParams: naming what is allowed.
            Busy: there are too many.
            Cancelled: by the client.
        """
        params.refuse_unknown("kinds", "agent", "namespace", "since")
        wanted, since = Filter.of(params), params.optional_integer("since")
        if self.count >= MAX_SUBSCRIPTIONS:
            raise Busy(
                f"there are {MAX_SUBSCRIPTIONS} subscriptions, which is the most this daemon serves",
                retry_after_s=5.0,
                max_subscriptions=MAX_SUBSCRIPTIONS,
            )
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def knock() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(news.set)

        context.on_cancel(news.set)
        self.count += 1
        self._waiting.add(news)
        try:
            return await self._run(ring, wanted, since, context, news, knock)
        finally:
            self.count -= 1
            self._waiting.discard(news)
            ring.forget(knock)

    async def _run(
        self,
        ring: EventRing,
        wanted: Filter,
        since: int | None,
        context: CallContext,
        news: asyncio.Event,
        knock: Callable[[], None],
    ) -> object:
        seq = ring.seq if since is None else since
        context.emit({"type": "subscribed", "seq": ring.seq, "time_s": ring.now_s(), "first_seq": ring.first_seq})
        is_first = True
        while True:
            if context.cancelled:
                raise Cancelled("the subscription was cancelled")
            batch = ring.read(seq, BATCH_EVENTS, is_first=is_first)
            seq, is_first = batch.seq, False
            _send(batch, wanted, ring, context)
            if batch.events:
                await asyncio.sleep(0)
                await context.until_read()
            elif self._is_closing:
                return {"reason": "stopping"}
            elif ring.wake_after(seq, knock):
                await news.wait()
                await self._let_more_come(context)
                news.clear()

    async def _let_more_come(self, context: CallContext) -> None:
        if not (self._is_closing or context.cancelled):
            await asyncio.sleep(GATHER_S)


def _send(batch: Batch, wanted: Filter, ring: EventRing, context: CallContext) -> None:
    if batch.gap is not None:
        gap = batch.gap
        context.emit({"type": "gap", "seq": gap.seq, "time_s": ring.now_s(), "lost": gap.lost, "reason": gap.reason})
    for event in batch.events:
        if wanted.wants(event):
            context.emit(event)


__all__ = ["BATCH_EVENTS", "MAX_SUBSCRIPTIONS", "Filter", "Subscriptions"]
