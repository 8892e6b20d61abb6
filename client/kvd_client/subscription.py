"""A subscription to the daemon's events over a connection of its own, blocking."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Self

from kvd_client.errors import CallTimeout, KvdClientError, remote_error
from kvd_client.events import Course, DaemonEvent
from kvd_client.transport import Transport
from kvd_client.wire import StreamReceived

METHOD = "events.subscribe"


class Subscription:
    """Iterate it for events; it is also a context manager. Made by `Client.subscribe` only.

    It has a connection of its own: one that is not read for long holds up nobody, the daemon keeps nothing for it but
    says how many events it missed (`gap`). The iteration ends when the daemon stops or `close` is called, which may be
    from another thread; with `reconnect` it goes on with the next daemon, after an `away` event.

    Attributes:
        seq: number of the last event that was taken, for a later `since`; 0 before there was one.
    """

    def __init__(self, connect: Callable[[], Transport], params: Mapping[str, object], *, reconnect: bool) -> None:
        self._connect = connect
        self._course = Course(params, reconnect=reconnect)
        self._closed = threading.Event()
        self._transport: Transport | None = None
        self._id = 0
        self._open()

    @property
    def seq(self) -> int:
        """See the class."""
        return self._course.seq

    def __iter__(self) -> Iterator[DaemonEvent]:
        while (event := self.next()) is not None:
            yield event

    def next(self, timeout_s: float | None = None) -> DaemonEvent | None:
        """The next event; None when there will be none.

        Raises:
            CallTimeout: none within `timeout_s`; it may be asked again.
            RemoteError: the daemon refused.
            DaemonUnreachable: it went away, and `reconnect` was not asked for.
        """
        error: KvdClientError | None
        while not self._closed.is_set():
            try:
                transport = self._transport or self._open()
                message = transport.next_message(self._id, timeout_s)
                if isinstance(message, StreamReceived):
                    return self._course.take(message.event)
                error = None if message.error is None else remote_error(message.error)
            except CallTimeout:
                raise
            except KvdClientError as caught:
                error = caught
            if self._closed.is_set():
                return None
            self._drop()
            if error is None and not self._course.goes_on:
                return None
            told = self._course.lost(error)
            if told is not None:
                return told
            self._closed.wait(self._course.next_wait_s())
        return None

    def close(self) -> None:
        """End it; from any thread, repeatedly."""
        self._closed.set()
        self._drop()

    def _open(self) -> Transport:
        transport = self._connect()
        try:
            self._id = transport.send_request(METHOD, self._course.params, None)
        except BaseException:
            transport.close()
            raise
        self._transport = transport
        if self._closed.is_set():  # meanwhile, by another thread, which saw no connection
            self._drop()
        return transport

    def _drop(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()
