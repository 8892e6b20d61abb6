"""What `events.subscribe` tells, typed, and how a subscription goes on where it was. Pure; shared by both clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvd_client.errors import DaemonUnreachable, KvdClientError, RemoteError

EVENT_KINDS = (
    "turn_queued",
    "turn_begun",
    "hit",
    "miss",
    "turn_preempted",
    "turn_resumed",
    "turn_ended",
    "operation",
    "eviction",
    "fault",
    "prefetch",
    "swap_out",
    "page_lost",
    "page_files_lost",
    "disk",
    "memory",
    "budget",
    "reload",
    "draining",
)
"""Kinds that a subscription can be narrowed to; `subscribed`, `gap` and `away` come with any."""

_COMMON = ("type", "seq", "time_s", "agent", "namespace")

FIRST_WAIT_S, MOST_WAIT_S = 0.2, 2.0
"""Before the first try to subscribe again, and between later ones at most."""


@dataclass(frozen=True, slots=True)
class DaemonEvent:
    """Something that happened in the daemon.

    Attributes:
        type: one of `EVENT_KINDS`, or of the subscription itself: `subscribed` (it begins, or begins again), `gap`
            (events were lost) and, made by the client, `away` (the daemon is gone; it is tried again).
        seq: its number, larger for later ones; of `away` that of the last event.
        time_s: the daemon's wall clock, seconds since the epoch; 0 of `away`.
        agent, namespace: whose; None for the daemon as a whole.
        data: everything else, as `docs/protocol.md` says.
    """

    type: str
    seq: int = 0
    time_s: float = 0.0
    agent: str | None = None
    namespace: str | None = None
    data: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, event: Mapping[str, object]) -> DaemonEvent:
        """From the wire; never raises: a field that does not fit is as if it were not there."""
        seq, time_s = event.get("seq"), event.get("time_s")
        agent, namespace = event.get("agent"), event.get("namespace")
        return cls(
            type=str(event.get("type")),
            seq=seq if type(seq) is int else 0,
            time_s=float(time_s) if isinstance(time_s, int | float) else 0.0,
            agent=agent if isinstance(agent, str) else None,
            namespace=namespace if isinstance(namespace, str) else None,
            data={key: value for key, value in event.items() if key not in _COMMON},
        )

    def to_map(self) -> dict[str, object]:
        """As one flat map, for JSON."""
        whose = {"agent": self.agent, "namespace": self.namespace} if self.agent is not None else {}
        return {"type": self.type, "seq": self.seq, "time_s": self.time_s, **whose, **self.data}


class Course:
    """Where a subscription is, and what it does when the daemon goes. Owner: the subscription.

    Args:
        params: of the call; `since` is replaced by what was seen.
        reconnect: go on with the next daemon.
    """

    def __init__(self, params: Mapping[str, object], *, reconnect: bool) -> None:
        self._params = dict(params)
        self._reconnect = reconnect
        self._wait_s = FIRST_WAIT_S
        self.is_away = False
        since = params.get("since")
        self.seq = since if type(since) is int else 0

    @property
    def params(self) -> dict[str, object]:
        """Parameters of the next call."""
        return self._params | ({"since": self.seq} if self.seq else {})

    def take(self, event: Mapping[str, object]) -> DaemonEvent:
        """An event came."""
        typed = DaemonEvent.of(event)
        self.is_away, self._wait_s = False, FIRST_WAIT_S
        if typed.type != "subscribed" or not self.seq:
            self.seq = max(self.seq, typed.seq) if typed.type != "gap" else typed.seq
        return typed

    def lost(self, error: KvdClientError | None) -> DaemonEvent | None:
        """The daemon is gone (None: it stopped); the event that says so, None when that was said already.

        Raises:
            KvdClientError: it is not to be tried again.
        """
        if error is not None and not (self._reconnect and _can_heal(error)):
            raise error
        if self.is_away:
            return None
        self.is_away = True
        return DaemonEvent("away", self.seq, data={"reason": "it stopped" if error is None else error.message})

    @property
    def goes_on(self) -> bool:
        """Whether it goes on when the daemon has stopped."""
        return self._reconnect

    def next_wait_s(self) -> float:
        """How long to wait before the next try."""
        wait_s = self._wait_s
        self._wait_s = min(MOST_WAIT_S, 2 * wait_s)
        return wait_s


def _can_heal(error: KvdClientError) -> bool:
    """Whether another try may go well: nobody is there, or who is there cannot yet."""
    names = ("not_ready", "draining", "busy", "slow_reader", "protocol", "cancelled")
    return isinstance(error, DaemonUnreachable) or (isinstance(error, RemoteError) and error.name in names)


__all__ = ["EVENT_KINDS", "Course", "DaemonEvent"]
