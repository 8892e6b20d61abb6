"""Notices an engine that does not come round any more, and keeps the service manager's watchdog from being fooled.

Theory of operation. The engine notes the time each time round its loop; it sleeps a second at most, so the longest
time without news is one step of the model. A stall is far longer than that. It is reported once when it begins and
once when it ends, in the log and in `health`; while it lasts the service manager gets no sign of life from a healthy
event loop, so its watchdog restarts the daemon, and the agents resume from what is durable.

Imports the standard library and kvd.ops.lifecycle only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvd.ops.lifecycle import Notifier

STALL_S = 60.0
"""Longer than any step that was measured, on a machine that swaps, too."""

LOOK_S = 5.0


class Log(Protocol):
    """Takes an event with its facts."""

    def __call__(self, event: str, *, level: str = "warning", **facts: object) -> None: ...


class StallWatch:
    """Owner: the event loop; `look` alone changes it.

    Args:
        idle_s: seconds since the engine last came round.
        notifier: of the service manager.
        log: is told when a stall begins and ends.
        limit_s: a stall is longer; with a watchdog, its time counts if that is less.
    """

    def __init__(self, idle_s: Callable[[], float], notifier: Notifier, log: Log, *, limit_s: float = STALL_S) -> None:
        self._idle_s = idle_s
        self._notifier = notifier
        self._log = log
        interval_s = notifier.watchdog_interval_s
        self.limit_s = limit_s if interval_s is None else min(limit_s, 2 * interval_s)
        self.look_every_s = LOOK_S if interval_s is None else min(LOOK_S, interval_s)
        self._longest_s = 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has given no news for too long, as of the last look."""
        return self._longest_s > 0

    def look(self) -> None:
        """Compare, report a change, and feed the watchdog if the engine moves."""
        idle_s = self._idle_s()
        if idle_s < self.limit_s:
            if self._longest_s:
                self._log("engine_moves_again", level="info", stalled_s=round(self._longest_s, 1))
            self._longest_s = 0.0
            self._notifier.watchdog()
            return
        if not self._longest_s:
            self._log("engine_stalled", idle_s=round(idle_s, 1), limit_s=self.limit_s)
            self._notifier.status(f"the engine has not moved for {idle_s:.0f} s")
        self._longest_s = idle_s

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await sleep(self.look_every_s)


__all__ = ["StallWatch"]
