"""What the RPC server asks of the daemon: one method, `Service.call`. The server knows sockets, the service knows kvd.

May import kvd.errors only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvd.errors import KvdError


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Who is at the other end of a connection.

    Attributes:
        connection: number of the connection since start.
        pid: process id of the peer, None where the platform does not tell.
        uid: user id of the peer (always ours: others are refused before a byte is read).
    """

    connection: int
    pid: int | None
    uid: int


class CallContext(Protocol):
    """One call in flight. Methods are safe to call from the event loop thread only."""

    @property
    def peer(self) -> PeerInfo:
        """The caller's process."""

    @property
    def cancelled(self) -> bool:
        """True once the client cancelled the call or its connection is gone."""

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Run `callback` once, on the loop, when the call is cancelled (at once if it is already)."""

    def emit(self, event: Mapping[str, object]) -> None:
        """Send a stream event `[2, "stream", [id, event]]`.

        Bounded: when the client does not read and the connection's send buffer exceeds its limit, text events are
        coalesced or the connection is closed with `slow_reader`; the caller is never blocked.
        """

    async def until_read(self) -> None:
        """Wait until the client has read so far that nothing waits for it here, or the call is cancelled.

        A call that tells more than its client may want to read waits between its events; so nothing piles up.
        """

    def error_map(self, error: KvdError) -> dict[str, object]:
        """The error as the client sees it, for a result that says how a part of the call failed."""


class Service(Protocol):
    """The daemon as the server sees it."""

    def at_once(self, method: str) -> Callable[[Mapping[str, object]], object] | None:
        """What answers the method, given its parameters, without waiting for anything; None: `call` does.

        Such an answer takes no task and no further turn of the loop: that is most of what a small call costs. It
        raises as `call` does.
        """

    async def call(self, method: str, params: Mapping[str, object], context: CallContext) -> object:
        """Carry out one method and return its msgpack-able result.

        Raises:
            KvdError: mapped to a wire error by the server. Anything else becomes `internal` and is logged.
        """
