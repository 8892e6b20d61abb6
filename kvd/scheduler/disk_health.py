"""How the disk fares, as the answers of the store tell: well, slow, or refusing, and since when it is well again.

Theory of operation. A write, a record or a read that the disk (or the quota) refused makes it `refuses`, until one of
the same kind succeeds: a disk that cannot be written may well be read. Pages and records that were refused are tried
again by the engine, ever more rarely but at least twice a minute, so that state ends by itself when the disk heals. One
that took longer than `SLOW_S` makes it `slow`, until one took less. The reason goes to everybody, so it says what kind
of thing was refused, never whose.

Owner: the engine thread; single values may be read by others. May import kvd.store.
"""

from __future__ import annotations

from typing import Final, Literal

from kvd.store.errors import DiskFault, QuotaExceeded
from kvd.store.swap_ops import AppendRecordOp, ForkLogOp, ReadPageOp, ReadTailOp, SwapResult, WritePageOp

SLOW_S: Final = 2.0
"""A page or record that takes longer than this is felt by whoever waits for it."""

State = Literal["ok", "slow", "refuses"]


class DiskHealth:
    """What the last answers said.

    Attributes:
        episodes: how often the disk began to refuse something.
    """

    def __init__(self) -> None:
        self.episodes = 0
        self._refused: dict[str, str] = {}
        self._slow = ""

    def note(self, result: SwapResult) -> None:
        """An operation was answered."""
        match result.op:
            case WritePageOp():
                kind = "pages"
            case AppendRecordOp() | ForkLogOp():
                kind = "records"
            case ReadPageOp() | ReadTailOp():
                kind = "reads"
            case _:
                return
        if isinstance(result.error, DiskFault | QuotaExceeded):
            self.episodes += not self._refused
            refused = result.error
            why = f"{kind}: {refused.nameless}" if isinstance(refused, DiskFault) else refused.message
            self._refused[kind] = why
        elif result.error is None:
            self._refused.pop(kind, None)
        self._slow = f"the last one took {result.seconds:.1f} s" if result.seconds > SLOW_S else ""

    @property
    def state(self) -> State:
        """In one word."""
        return "refuses" if self._refused else "slow" if self._slow else "ok"

    @property
    def reason(self) -> str | None:
        """Why it is not `ok`; names no agent and no namespace."""
        return "; ".join(tuple(self._refused.values())) or self._slow or None

    def facts(self) -> dict[str, object]:
        """For health and log."""
        return {"disk": self.state, "disk_reason": self.reason}


__all__ = ["SLOW_S", "DiskHealth"]
