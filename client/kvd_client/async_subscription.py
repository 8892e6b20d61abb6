"""A subscription to the daemon's events over a connection of its own, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Self

from kvd_client.async_transport import AsyncTransport
from kvd_client.errors import CallTimeout, KvdClientError, remote_error
from kvd_client.events import Course, DaemonEvent
from kvd_client.subscription import METHOD
from kvd_client.wire import StreamReceived

MOST_WAITING = 256
"""Events that wait in this process for a task that does not take them; beyond it, the connection is not read."""


class AsyncSubscription:
    """As `Subscription`: iterate it with `async for`, or enter it. Made by `AsyncClient.subscribe` only.

    It connects when it is first iterated or entered. One task at a time takes events.

    Attributes:
        seq: number of the last event that was taken, for a later `since`; 0 before there was one.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[AsyncTransport]], params: Mapping[str, object], *, reconnect: bool
    ) -> None:
        self._connect = connect
        self._course = Course(params, reconnect=reconnect)
        self._closed = False
        self._was_open = False
        self._transport: AsyncTransport | None = None
        self._id = 0

    @property
    def seq(self) -> int:
        """See the class."""
        return self._course.seq

    async def __aiter__(self) -> AsyncIterator[DaemonEvent]:
        while (event := await self.next()) is not None:
            yield event

    async def next(self, timeout_s: float | None = None) -> DaemonEvent | None:
        """The next event; None when there will be none.

        Raises:
            CallTimeout: none within `timeout_s`; it may be asked again.
            RemoteError: the daemon refused.
            DaemonUnreachable: it went away, and `reconnect` was not asked for.
        """
        error: KvdClientError | None
        while not self._closed:
            try:
                transport = self._transport or await self._open()
                message = await transport.next_message(self._id, timeout_s)
                if isinstance(message, StreamReceived):
                    return self._course.take(message.event)
                error = None if message.error is None else remote_error(message.error)
            except CallTimeout:
                raise
            except KvdClientError as caught:
                if not self._was_open and not self._closed:
                    raise
                error = caught
            if self._closed:
                return None
            await self._drop()
            if error is None and not self._course.goes_on:
                return None
            told = self._course.lost(error)
            if told is not None:
                return told
            await asyncio.sleep(self._course.next_wait_s())
        return None

    async def close(self) -> None:
        """End it; repeatedly."""
        self._closed = True
        await self._drop()

    async def _open(self) -> AsyncTransport:
        transport = await self._connect()
        if self._closed:  # meanwhile, by another task, which saw no connection
            await transport.close()
            return transport
        transport.most_waiting = MOST_WAITING
        self._transport = transport
        self._id = transport.send_request(METHOD, self._course.params)
        self._was_open = True
        return transport

    async def _drop(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def __aenter__(self) -> Self:
        if self._transport is None:
            await self._open()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()
