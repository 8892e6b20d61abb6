"""HTTP connections: uvicorn's, with deadlines for clients that do not send the end of a head or do not read.

Theory of operation. `Patience` is what both kinds have in common: it looks at a connection after each piece that came
(does a head lack its end?) and whenever more is to be sent than the system takes. `Patient` reads HTTP with h11, which
is Python, `Swift` with httptools, which is llhttp in C: of what lies between a request and its first text reading the
head was the largest part, and writing one the next. Where httptools is not installed, `Patient` does the same.

May import uvicorn and h11.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""
HEAD_S = 10.0
"""Request line and headers are there in so long, from the connection's first moment or a later request's first byte."""
WRITE_S = 30.0
"""A client that has taken nothing of what waits for it for so long is gone, or means no good: its connection ends."""
NO_LINGER = struct.pack("ii", 1, 0)
"""`struct linger`: closing resets the connection."""
MAX_REQUESTS = 512
"""Connections with which requests are still answered; beyond, with a bare 503."""
MAX_CONNECTIONS = 2 * MAX_REQUESTS
"""Connections that are kept open; more are closed at once."""


class Patience(asyncio.Protocol):
    """An HTTP connection whose client is waited for, but not for ever. Owner: the event loop.

    uvicorn ends connections that are idle between requests; one that never sends the end of its first line, or of its
    headers, would stay. So would one that does not read: what is sent to it, a stream or an answer after which its
    connection is to be closed, waits for the client. No byte is waited with beyond what the system takes, so that is
    noticed at the first one. Bodies have a deadline of their own (`kvd.gateway.bodies`).

    Goes before one of uvicorn's protocols, whose attributes it uses.
    """

    head_s = HEAD_S
    write_s = WRITE_S
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    connections: set[Any]
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def lacks_head(self) -> bool:
        """Whether what came last was a part of a head whose end is not there, or no part of a message at all."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Look whether the head is there."""
        super().data_received(data)
        if self.lacks_head():
            self._wait_for_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left."""
        self._stop_waiting()
        self._is_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is sent to."""
        super().pause_writing()
        self._wait_for_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """It has read everything."""
        self._is_read()
        super().resume_writing()

    def _wait_for_reader(self, unread_bytes: int) -> None:
        self._unread = self.loop.call_later(self.write_s, self._look_at_reader, unread_bytes)

    def _look_at_reader(self, before_bytes: int) -> None:
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes < before_bytes:  # slow is no crime: a phone on a bad line, a large picture
            self._wait_for_reader(unread_bytes)
        else:
            self._unread = None
            sock = self.transport.get_extra_info("socket")
            if sock is not None:  # or the system would go on offering it what is left
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            self.transport.abort()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _wait_for_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.head_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()


class Patient(Patience, H11Protocol):
    """Reads with h11."""

    def lacks_head(self) -> bool:
        """It stays idle until a head is whole."""
        return self.conn.their_state is h11.IDLE


def quickest() -> type[asyncio.Protocol]:
    """The kind of connection to serve with here."""
    try:
        from kvd.gateway.swift import Swift
    except ImportError:  # httptools is compiled, and not for every machine
        return Patient
    return Swift


__all__ = ["HEAD_S", "MAX_CONNECTIONS", "MAX_HEAD_BYTES", "MAX_REQUESTS", "WRITE_S", "Patience", "Patient", "quickest"]
