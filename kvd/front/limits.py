"""Every bound of the server in one place."""

from __future__ import annotations

from dataclasses import dataclass

from kvd_client.wire import SERVER_LIMITS, WireLimits

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Bounds that keep the daemon's memory finite whatever its clients do.

    Attributes:
        wire: bounds of one message.
        max_connections: connections at a time; one more is told `busy` and closed.
        max_calls: calls in flight on a connection; one more is answered `busy`.
        max_held_bytes: unfinished messages and the requests of calls in flight, all connections together; beyond it,
            what makes a connection hold more than `free_held_bytes` is refused with `busy`.
        free_held_bytes: what a connection may always hold, so that clients of small requests are served whatever
            others do.
        max_unread_bytes: what may wait for a peer that does not read, before its connection is closed.
        busy_retry_after_s: advice sent with `busy`.
        linger_s: how long a connection that is being closed may take to read its last messages.
        settle_s: how long cancelled calls may take to end when the server closes.
        backlog_connections: connections the kernel keeps before they are accepted.
    """

    wire: WireLimits = SERVER_LIMITS
    max_connections: int = 256
    max_calls: int = 1024
    max_held_bytes: int = 256 * MIB
    free_held_bytes: int = MIB
    max_unread_bytes: int = 8 * MIB
    busy_retry_after_s: float = 1.0
    linger_s: float = 5.0
    settle_s: float = 2.0
    backlog_connections: int = 128
