"""Streams that wait and clients that leave: pings, the end of work that nobody waits for, and the response itself.

May import starlette and kvd.gateway.errors.
"""

from __future__ import annotations

import asyncio
from collections import deque
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
    told of. One task takes all events, as they come: a task for each would cost more than saying it.

    Args:
        events: closed with this.
        every_s: the longest silence.
    """

    def __init__(self, events: AsyncGenerator[T, None], every_s: float) -> None:
        self._events = events
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._taken: deque[T] = deque()
        self._taking: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.spoke()

    def spoke(self) -> None:
        """Something was said just now."""
        self._until_s = self._loop.time() + self._every_s

    async def next(self) -> T | Literal[End.END] | None:
        """The next event; None when it has been silent too long, from when on it counts anew; `END` at the end."""
        if self._taking is None:
            self._taking = asyncio.ensure_future(self._take())
        while (left_s := self._until_s - self._loop.time()) > 0:
            if self._taken:
                return self._taken.popleft()
            if self._taking.done():
                self._taking.result()
                return END
            await self._wait(left_s)
        self.spoke()
        return None

    def ready(self) -> T | None:
        """The next event if it is there already."""
        return self._taken.popleft() if self._taken else None

    async def aclose(self) -> None:
        """Leave: the generator is closed, also while it is waited for."""
        if self._taking is not None:
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)
        await self._events.aclose()

    async def _take(self) -> None:
        try:
            async for event in self._events:
                self._taken.append(event)
                self._wake()
        finally:
            # when this task is done, which is after this
            self._loop.call_soon(self._wake)

    async def _wait(self, timeout_s: float) -> None:
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Wait until the client has closed its connection; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events from a generator that is closed at the end, however that comes.

    Args:
        source: bytes of whole events.
        headers: besides those of the media type.
        close: called once, at the end, also where the generator was never begun.
        over: when it returns `close` is called though the client may not have read what it was sent. The generator
            ends by itself then; until the client reads on, or its connection ends, it cannot.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        close: Callable[[], None],
        *,
        over: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        # proxies must neither keep events back nor store them
        kept = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(_not_empty(source), headers=kept)
        self._source = source
        self._close: Callable[[], None] | None = close
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that leaves ends it."""
        sending = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(_gone(receive))
        over = asyncio.ensure_future(self._close_early())
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            tasks = (sending, gone, over)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._source.aclose()
            self._close_once()

    async def _close_early(self) -> None:
        if self._over is not None:
            await self._over()
            self._close_once()

    def _close_once(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()


async def _not_empty(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(source):
        async for data in source:
            if data:
                yield data


__all__ = ["END", "End", "EventStream", "Paced", "unless_gone"]
