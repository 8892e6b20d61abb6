"""Streams that wait and clients that leave: pings, the end of work that nobody waits for, and the response itself.

May import starlette and kvd.gateway.errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvd.gateway.errors import ClientGone

T = TypeVar("T")


async def paced(events: AsyncGenerator[T, None], every_s: float) -> AsyncGenerator[T | None, None]:
    """Events as they come, and None whenever none came for so long. Closes `events`."""
    waiting: asyncio.Task[T] | None = None
    try:
        while True:
            if waiting is None:
                waiting = asyncio.ensure_future(_next(events))
            await asyncio.wait({waiting}, timeout=every_s)
            if not waiting.done():
                yield None
                continue
            task, waiting = waiting, None
            try:
                event = task.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await events.aclose()


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


__all__ = ["EventStream", "paced", "unless_gone"]
