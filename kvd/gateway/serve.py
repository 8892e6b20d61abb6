"""Run the gateway: a listening socket, uvicorn, and the end of it.

The socket is made here, so that port 0 works and the address can be told before the first request. A gateway that
`kvd serve` started ends with it: it holds the reading end of a pipe that nobody writes to, which ends when the other
process does, however that dies. May import uvicorn, h11 and siblings.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvd.gateway.app import Gateway
from kvd.gateway.around import Log
from kvd.gateway.errors import CannotListen
from kvd.gateway.settings import GatewaySettings

BACKLOG = 256
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
STOP_GRACE_S = 5
"""Running requests get so long when the gateway stops; then they are cancelled, and the daemon keeps what it made."""


def run(settings: GatewaySettings, log: Log, *, ready: Callable[[str], None], with_parent: bool = False) -> None:
    """Serve until SIGTERM, SIGINT or, `with_parent`, the end of standard input.

    Args:
        settings: validated.
        log: gets one line a request.
        ready: told the base URL, once connections are accepted.
        with_parent: end when the process at the other end of standard input does.

    Raises:
        CannotListen: the address cannot be listened on.
    """
    with listening(settings.host, settings.port) as sock:
        asyncio.run(_serve(settings, log, sock, ready, with_parent))


def listening(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        CannotListen: the address is taken, or not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return sock


def base_url(sock: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Patient(H11Protocol):
    """An HTTP connection whose client is waited for, but not for ever. Owner: the event loop.

    uvicorn ends connections that are idle between requests; one that never sends the end of its first line, or of its
    headers, would stay. So would one that does not read: what is sent to it, a stream or an answer after which its
    connection is to be closed, waits for the client. No byte is waited with beyond what the system takes, so that is
    noticed at the first one. Bodies have a deadline of their own (`kvd.gateway.bodies`).
    """

    head_s = HEAD_S
    write_s = WRITE_S
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

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
        if self.conn.their_state is h11.IDLE:
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


class Server(uvicorn.Server):
    """uvicorn, which first ends the streams that would never end by themselves.

    Args:
        gateway: served.
    """

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(server_config(gateway))
        self._gateway = gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End."""
        self._gateway.stop()
        await super().shutdown(sockets)


def server_config(gateway: Gateway) -> uvicorn.Config:
    """How uvicorn runs a gateway."""
    return uvicorn.Config(
        gateway.app,
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,  # each request has its own line
        server_header=False,
        timeout_graceful_shutdown=STOP_GRACE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        http=Patient,
        limit_concurrency=MAX_REQUESTS,
        loop="asyncio",
        ws="none",
    )


async def _serve(
    settings: GatewaySettings, log: Log, sock: socket.socket, ready: Callable[[str], None], with_parent: bool
) -> None:
    gateway = Gateway(settings, log)
    server = Server(gateway)

    def stop(signum: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn takes these over while it serves, and raises again what it got when it is done: then they are ours, and a
    # wanted end is no death by a signal
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    if not settings.keys:
        log.warning(
            "no_api_keys", access="every user and program of this machine may use the model and everybody's agents"
        )
    watch = asyncio.create_task(_end_with_parent(server)) if with_parent else None
    try:
        ready(base_url(sock))
        await server.serve(sockets=[sock])
    finally:
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


async def _end_with_parent(server: uvicorn.Server) -> None:
    """Stop the server when standard input ends."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    fd = sys.stdin.fileno()

    def readable() -> None:
        with suppress(BlockingIOError):
            if not os.read(fd, 4096):
                ended.set()

    loop.add_reader(fd, readable)
    try:
        await ended.wait()
        server.should_exit = True
    finally:
        loop.remove_reader(fd)


__all__ = ["Server", "base_url", "listening", "run", "server_config"]
