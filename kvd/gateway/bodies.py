"""Bodies of requests on their way: so long, and so many bytes of all of them together.

A body is kept until its request is answered, here and in the daemon, whose own bound ends a connection: the gateway's
one connection carries everybody's turns, so the gateway refuses before the daemon would. Small bodies are always taken:
those who send large ones do not keep the others out. May import starlette's types and siblings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import suppress
from typing import Any

from starlette.types import Message, Receive

from kvd.gateway.errors import ApiError

SMALL_BYTES = 64 * 1024
"""A body is taken so far whatever others hold."""
DRAIN_S = 2.0
"""How long the rest of a refused body may take."""
HELD_RETRY_S = 1.0


class Bodies:
    """What all requests hold together. Owner: the event loop; `take` and `give` are the only ones that change it.

    Args:
        most_bytes: of all bodies together.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def take(self, held_bytes: int, more_bytes: int) -> None:
        """A body that has `held_bytes` grows.

        Raises:
            ApiError: there is no room for it; nothing was taken.
        """
        if held_bytes + more_bytes > SMALL_BYTES and self.held_bytes + more_bytes > self._most_bytes:
            raise ApiError(
                "rate_limit",
                f"requests of {self.held_bytes} bytes are being answered, of {self._most_bytes} at most",
                retry_after_s=HELD_RETRY_S,
            )
        self.held_bytes += more_bytes

    def give(self, held_bytes: int) -> None:
        """A request is answered, and its body gone."""
        self.held_bytes -= held_bytes


class _Rest:
    """What is left of a coroutine that was begun by hand.

    Args:
        coroutine: begun; it waits.
        waits_for: what it gave its task to wait for.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Message], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Message]:
        while True:
            try:
                try:
                    sent = yield self._waits_for
                except BaseException as error:
                    self._waits_for = self._coroutine.throw(error)
                else:
                    self._waits_for = self._coroutine.send(sent)
            except StopIteration as done:
                message: Message = done.value
                return message


class Body:
    """A request's body on its way. Owner: the request.

    An answer that comes while the client still sends is lost when the connection is closed on what was not read: the
    client then sees a reset instead of its 401 or 413. So the rest is read and dropped, within bounds, before an error.

    Args:
        receive: of the connection.
        bodies: what all hold together.
        within_s: the whole body is there in so long, or the request is refused.
    """

    def __init__(self, receive: Receive, bodies: Bodies, within_s: float) -> None:
        self._receive = receive
        self._bodies = bodies
        self._within_s = within_s
        self._deadline_s: float | None = None
        self._held_bytes = 0
        self._ended = False
        self._is_late = False

    @property
    def has_rest(self) -> bool:
        """Whether some of it was not read: it must not be taken for the connection's next request, nor awaited."""
        return self._is_late or not self._ended

    async def receive(self) -> Message:
        """The next message of the connection.

        Raises:
            ApiError: the body takes too long, or all bodies together too much room.
        """
        if self._ended:  # what is awaited now is that the client leaves
            return await self._receive()
        if self._deadline_s is None:
            self._deadline_s = asyncio.get_running_loop().time() + self._within_s
        step = self._next()
        try:
            waits_for = step.send(None)
        except StopIteration as done:  # it was there, as nearly always: that took no deadline
            return self._taken(done.value)
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await _Rest(step, waits_for)
        except TimeoutError:
            self._ended = self._is_late = True
            raise ApiError("slow", f"the request's body was not there within {self._within_s:g} s") from None
        return self._taken(message)

    def _taken(self, message: Message) -> Message:
        more_bytes = len(message.get("body", b""))
        self._bodies.take(self._held_bytes, more_bytes)
        self._held_bytes += more_bytes
        return message

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._ended = True
        return message

    async def drain(self, most_bytes: int) -> None:
        """Read what is left, so many bytes and so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                read_bytes = 0
                while not self._ended and read_bytes <= most_bytes:
                    read_bytes += len((await self._next()).get("body", b""))

    def close(self) -> None:
        """The request is answered."""
        self._bodies.give(self._held_bytes)
        self._held_bytes = 0


__all__ = ["Bodies", "Body"]
