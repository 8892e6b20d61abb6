"""How much may be written to disk: a limit in bytes a minute, and what was written in the last one.

Theory of operation. The limit fills an account, by the second, up to what `BURST_S` seconds of it are; everything that
was written is taken off it, whatever wrote it. While the account is above zero pages may be written, and the last of
them may overdraw it: what is too much is paid back before the next one. So no minute sees more than the limit, one
burst and one page. Records of turns are taken off the account and never wait for it.

Decides only: the pager is told what it may write until it is told again. Pure but for the clock it is given.

May import nothing from kvd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

BURST_S: Final = 10.0
"""Seconds of the limit that a quiet time saves up: enough for the pages of a turn, little against a minute."""

MINUTE_S: Final = 60.0


class WriteGovernor:
    """Owner: the engine thread, which calls `tick` every second or so.

    Args:
        limit_bytes: what may be written in a minute; None: as much as there is.
        clock: seconds, monotonic.
    """

    def __init__(self, limit_bytes: int | None, clock: Callable[[], float]) -> None:
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._rate = 0.0 if limit_bytes is None else limit_bytes / MINUTE_S
        self._account = self._rate * BURST_S
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])
        """When it was looked, and how much had been written since start by then; the first is a minute old or more."""

    def tick(self, bytes_written: int) -> int | None:
        """Time has passed.

        Args:
            bytes_written: all that was written since start.

        Returns:
            Bytes of pages that may start to be written until the next call, none if it is not above zero; None: any.
        """
        now_s, (last_s, last_bytes) = self._clock(), self._seen[-1]
        self._seen.append((now_s, bytes_written))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - MINUTE_S:
            self._seen.popleft()
        if self.limit_bytes is None:
            return None
        earned = self._account + self._rate * (now_s - last_s) - (bytes_written - last_bytes)
        self._account = min(self._rate * BURST_S, earned)
        return int(self._account)

    def lift(self) -> None:
        """No limit from here on: the process ends, and what is not written now is lost with it."""
        self.limit_bytes = None

    @property
    def last_minute_bytes(self) -> int:
        """Written in the minute before the last tick, or since start."""
        return self._seen[-1][1] - self._seen[0][1]


__all__ = ["BURST_S", "WriteGovernor"]
