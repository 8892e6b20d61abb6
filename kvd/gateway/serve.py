"""Run the gateway: a listening socket, uvicorn, and the end of it.

The socket is made here, so that port 0 works and the address can be told before the first request. A gateway that
`kvd serve` started ends with it: it holds the reading end of a pipe that nobody writes to, which ends when the other
process does, however that dies. May import uvicorn, kvd.ops.loops and siblings.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn

from kvd.gateway.app import Gateway
from kvd.gateway.around import Log
from kvd.gateway.connections import MAX_HEAD_BYTES, MAX_REQUESTS, quickest
from kvd.gateway.errors import CannotListen
from kvd.gateway.settings import GatewaySettings
from kvd.ops.loops import new_loop

BACKLOG = 256
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
    with listening(settings.host, settings.port) as sock, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(settings, log, sock, ready, with_parent))


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
        raise CannotListen(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address with --listen "
            "(kvd serve: --http), or end what listens there"
        ) from None
    return sock


def base_url(sock: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
        proxy_headers=False,  # nothing depends on who asks but what he sends
        log_config=None,
        log_level="warning",
        access_log=False,  # each request has its own line
        server_header=False,
        timeout_graceful_shutdown=STOP_GRACE_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        http=quickest(),
        limit_concurrency=MAX_REQUESTS,
        loop="none",  # it runs in ours
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
            "no_api_keys",
            access=f"every user and program of this machine may use the model and all agents of {settings.namespace}",
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
