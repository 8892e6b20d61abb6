"""Streams that wait and clients that leave: pings, the end of work that nobody waits for, and the response itself.

May import starlette and kvd.gateway.errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvd.gateway.errors import ClientGone

T = TypeVar("T")


class End(Enum):
    """What `Paced.next` returns when there is nothing more."""

    END = "end"


END = End.END


class Waited(Protocol):
    """What events come from: it can be waited for without taking one."""

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the next event, the end or an error can be taken; False when nothing came in so long."""

    @property
    def has_event(self) -> bool:
        """Whether an event can be taken without waiting."""


class Paced(Generic[T]):
    """Events of a generator, and a sign whenever nothing was said for too long. Owner: one request.

    Silence is counted from `spoke`, not from the last event: a long prompt or a queue has many that the client is not
    told of. Whoever asks for the next event takes it himself: a task that did so would be a turn of the loop more
    between the daemon's text and the client, and one before the daemon is asked.

    Args:
        events: closed with this.
        source: what they come from.
        every_s: the longest silence.
    """

    def __init__(self, events: AsyncGenerator[T, None], source: Waited, every_s: float) -> None:
        self._events = events
        self._source = source
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self.spoke()

    def spoke(self) -> None:
        """Something was said just now."""
        self._until_s = self._loop.time() + self._every_s

    async def next(self) -> T | Literal[End.END] | None:
        """The next event; None when it has been silent too long, from when on it counts anew; `END` at the end."""
        left_s = self._until_s - self._loop.time()
        if left_s <= 0 or not await self._source.wait(left_s):
            self.spoke()
            return None
        return await anext(self._events, END)

    async def ready(self) -> T | None:
        """The next event if it is there already."""
        return await anext(self._events) if self._source.has_event else None

    async def aclose(self) -> None:
        """Leave: the generator is closed."""
        await self._events.aclose()


class Attended:
    """Work for a client that may leave, as a `with` block of one task: what is awaited in it is cancelled then.

    The work stays in the request's own task: only the look-out has one, which first runs when the work waits. Its
    cancellation is told from others as `asyncio.timeout` does.

    Args:
        receive: of the request, whose body has been read.

    Raises:
        ClientGone: at the end of the block, when the client closed its connection and so cancelled what was awaited.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._lookout: asyncio.Task[None] | None = None
        self._is_over = False
        self._is_gone = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._begun = asyncio.get_running_loop().call_soon(self._look_out)  # a task costs more than a call
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self._is_over = True
        self._begun.cancel()
        if self._lookout is not None:
            self._lookout.cancel()
        if self._is_gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from error

    def _look_out(self) -> None:
        self._lookout = asyncio.ensure_future(_gone(self._receive))
        self._lookout.add_done_callback(self._left)

    def _left(self, lookout: asyncio.Task[None]) -> None:
        if lookout.cancelled():
            return
        lookout.exception()  # seen: where there was one, the client is as good as gone
        if not self._is_over:
            self._is_gone = True
            self._task.cancel()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection.

    Raises:
        ClientGone: it did.
    """
    with Attended(request.receive):
        return await work


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
        super().__init__(source, headers=kept)
        self._source = source
        self._close: Callable[[], None] | None = close
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a client that leaves ends it."""
        over = None if self._over is None else asyncio.ensure_future(self._close_early())
        try:
            with suppress(ClientGone), Attended(receive):
                await self.stream_response(send)
        finally:
            if over is not None:
                over.cancel()
                await asyncio.gather(over, return_exceptions=True)
            await self._source.aclose()
            self._close_once()

    async def stream_response(self, send: Send) -> None:
        """Send head and body; nothing is sent for events that say nothing."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._source:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _close_early(self) -> None:
        if self._over is not None:
            await self._over()
            self._close_once()

    def _close_once(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()


__all__ = ["END", "Attended", "End", "EventStream", "Paced", "Waited", "unless_gone"]
