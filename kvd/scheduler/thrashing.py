"""Whether agents push each other's pages out faster than they use them, and how many may run then. Pure: no clock.

Theory of operation. A turn needs pages; those that are not there are faults; those of them that a pool a little larger
would have kept are *refaults* (`kvd.vm.transfers`). The refault rate is the part of all pages needed lately that were
refaults. (As a part of the faults it could not show whether a cure works: with agents that take turns every fault is a
refault, many or few.) Lately means the last `WINDOW_PAGES` pages needed, and nothing older than `WINDOW_TICKS`
seconds: without faults for so long, nobody thrashes.

Above `HIGH_RATE`, with `LEAST_REFAULTS` at least, the pool thrashes until the rate is below `LOW_RATE`. While it does,
each turn that ends lowers the number of turns that may hold pages together by one, from those that did, never below 1:
what is not held can be loaded for who comes next. When it does not, each turn that ends and each second raises it by
one, up to all. Who is let in meanwhile is decided by `kvd.scheduler.reserving`.

May import nothing from kvd.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

HIGH_RATE = 0.5
LOW_RATE = 0.25
LEAST_REFAULTS = 16
"""Fewer refaults than these are no sign of anything: one agent that came back after all others."""

WINDOW_PAGES = 512
WINDOW_TICKS = 10


@dataclass(frozen=True, slots=True)
class _Entry:
    """One turn's pages, and the tick at its end."""

    needed: int
    refaults: int
    tick: int


class Thrashing:
    """Owner: the engine thread.

    Args:
        most: turns that may hold pages together when nothing is wrong.

    Attributes:
        limit: turns that may hold pages together now.
        is_thrashing: whether the pool thrashes.
        refault_rate: part of the pages needed lately that were refaults, 0 to 1.
        episodes: how often thrashing began.
    """

    def __init__(self, *, most: int) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, not {most}")
        self._most = most
        self._window: deque[_Entry] = deque()
        self._tick = 0
        self.limit = most
        self.is_thrashing = False
        self.refault_rate = 0.0
        self.episodes = 0

    def allow(self, most: int) -> None:
        """So many turns may hold pages together when nothing is wrong, from here on."""
        self.limit = most if self.limit == self._most else min(self.limit, most)
        self._most = most

    def turn_ended(self, *, needed: int, refaults: int, together: int) -> None:
        """A turn ended.

        Args:
            needed: pages needed since the last one ended.
            refaults: of these, refaults.
            together: turns that held pages, itself included.
        """
        if needed or refaults:
            self._window.append(_Entry(needed, refaults, self._tick))
        self._judge()
        if self.is_thrashing:
            self.limit = max(1, min(self.limit, together) - 1)
        else:
            self._recover()

    def tick(self) -> None:
        """A second passed."""
        self._tick += 1
        self._judge()
        if not self.is_thrashing:
            self._recover()

    def _recover(self) -> None:
        self.limit = min(self._most, self.limit + 1)

    def _judge(self) -> None:
        while self._window and self._tick - self._window[0].tick > WINDOW_TICKS:
            self._window.popleft()
        needed = sum(each.needed for each in self._window)
        while len(self._window) > 1 and needed - self._window[0].needed >= WINDOW_PAGES:
            needed -= self._window.popleft().needed
        refaults = sum(each.refaults for each in self._window)
        # a page may be pushed out and come back within one turn, so there may be more of them than pages needed
        self.refault_rate = min(1.0, refaults / needed) if needed else float(refaults > 0)
        if self.is_thrashing:
            self.is_thrashing = self.refault_rate >= LOW_RATE
        elif self.refault_rate >= HIGH_RATE and refaults >= LEAST_REFAULTS:
            self.is_thrashing = True
            self.episodes += 1
