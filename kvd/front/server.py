"""`RpcServer`: the listening socket and the sessions of those who connected."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from kvd.errors import Busy
from kvd.front.api import PeerInfo, Service
from kvd.front.errors import PeerRefused
from kvd.front.limits import FrontLimits
from kvd.front.listen import Listener, listen
from kvd.front.peer import PeerCredentials, peer_credentials
from kvd.front.session import Log, Session

READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class FrontStatistics:
    """The server at a glance; counts are since its start.

    Attributes:
        connections: open now.
        calls_in_flight: running now, those of lost connections included.
        calls: begun.
        internal_errors: calls that failed by a bug.
        protocol_errors: connections closed because the peer broke the protocol.
        refused_peers: connections closed because the peer is another user.
        slow_readers: connections closed because the peer did not read.
    """

    connections: int
    calls_in_flight: int
    calls: int
    internal_errors: int
    protocol_errors: int
    refused_peers: int
    slow_readers: int


class RpcServer:
    """Serves one `Service` on one Unix socket. Owner: the daemon; all methods run on one event loop.

    Args:
        service: carries out the methods.
        socket_path: where to listen; may be None when `sock` is given.
        limits: every bound.
        logger: structured logger; None takes structlog's.
        on_connections_changed: called with the number of open connections whenever it changes.
        sock: a listening socket made by launchd or systemd; it is served as it is and its file never unlinked.
        credentials: asks who is at the other end.
        uid: the only user id that is served; None means this process's.
    """

    def __init__(
        self,
        service: Service,
        *,
        socket_path: str | os.PathLike[str] | None,
        limits: FrontLimits | None = None,
        logger: Log | None = None,
        on_connections_changed: Callable[[int], None] | None = None,
        sock: socket.socket | None = None,
        credentials: Callable[[socket.socket], PeerCredentials] = peer_credentials,
        uid: int | None = None,
    ) -> None:
        if socket_path is None and sock is None:
            raise ValueError("RpcServer needs a socket path or a listening socket")
        self.service = service
        self.limits = limits or FrontLimits()
        self.log: Log = logger if logger is not None else structlog.get_logger("kvd.front")
        self.is_closing = False
        self.held_bytes = 0
        self.received = memoryview(bytearray(READ_BYTES))
        self._path = None if socket_path is None else Path(socket_path)
        self._inherited = sock
        self._on_connections_changed = on_connections_changed
        self._credentials = credentials
        self._uid = os.getuid() if uid is None else uid
        self._listener: Listener | None = None
        self._server: asyncio.Server | None = None
        self._sessions: set[Session] = set()
        self._orphans: set[asyncio.Task[None]] = set()
        self._accepted = 0
        self._counts: Counter[str] = Counter()
        self._nobody = asyncio.Event()
        self._nobody.set()

    async def start(self) -> None:
        """Listen and serve.

        Raises:
            SocketRefused: the path cannot be used; nothing was changed.
            SocketInUse: a daemon answers there; nothing was changed.
        """
        if self._inherited is not None:
            self._inherited.setblocking(False)
            sock = self._inherited
        else:
            assert self._path is not None
            self._listener = listen(self._path, backlog_connections=self.limits.backlog_connections)
            sock = self._listener.socket
        # From 3.13 on asyncio would unlink the path by itself, an inherited one too; here only `Listener` does.
        options: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: Session(self), sock=sock, backlog=self.limits.backlog_connections, **options
        )

    async def close(self, grace_s: float) -> None:
        """Stop listening, let running calls end, cancel those that take longer than `grace_s`, close everything.

        New requests are answered `draining`. May be called again, with no effect.
        """
        if self.is_closing:
            return
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.unlink()
        for session in list(self._sessions):
            if not session.calls:
                session.end(None)
        await self._wait_for_calls(grace_s)
        for session in list(self._sessions):
            for call in list(session.calls.values()):
                call.cancel()
        await self._wait_for_calls(self.limits.settle_s)
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in list(self._sessions):
            session.end(None)
        if not await self._wait_for_sessions(self.limits.linger_s):
            for session in list(self._sessions):
                session.abort()
            await self._nobody.wait()

    def statistics(self) -> FrontStatistics:
        """Figures of this moment."""
        return FrontStatistics(
            connections=len(self._sessions),
            calls_in_flight=len(self._tasks()),
            calls=self._counts["calls"],
            internal_errors=self._counts["internal_errors"],
            protocol_errors=self._counts["protocol_errors"],
            refused_peers=self._counts["refused_peers"],
            slow_readers=self._counts["slow_readers"],
        )

    # ---- sessions call these ----

    def admit(self, session: Session, connection: socket.socket) -> PeerInfo:
        """Register a session, if its peer may be served.

        Raises:
            PeerRefused: another user, or the platform does not tell.
            Busy: too many connections.
        """
        self._accepted += 1
        try:
            peer = self._credentials(connection)
            if peer.uid != self._uid:
                raise PeerRefused("the peer is another user", uid=peer.uid, pid=peer.pid, connection=self._accepted)
        except PeerRefused:
            self.count("refused_peers")
            raise
        if len(self._sessions) >= self.limits.max_connections:
            most = self.limits.max_connections
            text = f"{most} connections are open, which is the most this daemon takes"
            raise Busy(text, retry_after_s=self.limits.busy_retry_after_s, max_connections=most)
        self._sessions.add(session)
        self._nobody.clear()
        self._tell()
        return PeerInfo(connection=self._accepted, pid=peer.pid, uid=peer.uid)

    def left(self, session: Session) -> None:
        """The session's connection is gone; its calls are cancelled and end on their own."""
        if session not in self._sessions:
            return
        self._sessions.remove(session)
        for call in session.calls.values():
            if call.task is not None and not call.task.done():
                self._orphans.add(call.task)
                call.task.add_done_callback(self._orphans.discard)
        if not self._sessions:
            self._nobody.set()
        self._tell()

    def count(self, what: str) -> None:
        """Count an occurrence for the statistics."""
        self._counts[what] += 1

    def _tell(self) -> None:
        if self._on_connections_changed is not None:
            self._on_connections_changed(len(self._sessions))

    def _tasks(self) -> set[asyncio.Task[None]]:
        running = {call.task for session in self._sessions for call in session.calls.values() if call.task is not None}
        return running | self._orphans

    async def _wait_for_calls(self, timeout_s: float) -> None:
        tasks = self._tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def _wait_for_sessions(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._nobody.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
