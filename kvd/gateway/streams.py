"""Streams that wait and clients that leave: pings, the end of work that nobody waits for, and the response itself.

May import starlette and kvd.gateway.errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvd.gateway.errors import ClientGone

T = TypeVar("T")


class End(Enum):
    """What `Paced.next` returns when there is nothing more."""

    END = "end"


END = End.END


class Paced(Generic[T]):
    """Events of a generator, and a sign whenever nothing was said for too long. Owner: one request.

    Silence is counted from `spoke`, not from the last event: a long prompt or a queue has many that the client is not
    told of.

    Args:
        events: closed with this.
        every_s: the longest silence.
    """

    def __init__(self, events: AsyncGenerator[T, None], every_s: float) -> None:
        self._events = events
        self._every_s = every_s
        self._clock = asyncio.get_running_loop().time
        self._waiting: asyncio.Task[T] | None = None
        self.spoke()

    def spoke(self) -> None:
        """Something was said just now."""
        self._until_s = self._clock() + self._every_s

    async def next(self) -> T | Literal[End.END] | None:
        """The next event; None when it has been silent too long, from when on it counts anew; `END` at the end."""
        if self._waiting is None:
            self._waiting = asyncio.ensure_future(_next(self._events))
        left_s = self._until_s - self._clock()
        if left_s > 0:
            await asyncio.wait({self._waiting}, timeout=left_s)
        if left_s <= 0 or not self._waiting.done():
            self.spoke()
            return None
        task, self._waiting = self._waiting, None
        try:
            return task.result()
        except StopAsyncIteration:
            return END

    async def aclose(self) -> None:
        """Leave: the generator is closed, also while it is waited for."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await self._events.aclose()


async def _next(events: AsyncGenerator[T, None]) -> T:
    return await anext(events)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Wait until the client has closed its connection; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events from a generator that is closed at the end, however that comes.

    Args:
        source: bytes of whole events.
        headers: besides those of the media type.
        close: called at the end, also where the generator was never begun.
    """

    media_type = "text/event-stream"

    def __init__(
        self, source: AsyncGenerator[bytes, None], headers: Mapping[str, str], close: Callable[[], None]
    ) -> None:
        # proxies must neither keep events back nor store them
        kept = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(_not_empty(source), headers=kept)
        self._source = source
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that leaves ends it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()
            self._close()


async def _not_empty(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(source):
        async for data in source:
            if data:
                yield data


__all__ = ["END", "End", "EventStream", "Paced", "unless_gone"]
