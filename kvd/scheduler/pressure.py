"""The process's footprint against its limits: when memory is short the daemon gives up what it can, then refuses work.

Theory of operation. The budget bounds pages. What the process takes from the machine is more: weights, scratch, mlx's
buffers, the interpreter, and whatever leaks. So once a second the footprint is measured. Above the *soft* limit mlx's
freed buffers go back and idle pages are evicted, as many bytes as it is above. Above the *hard* limit new work is
refused besides, with both figures and when to come again: a client that waits is better than a machine that swaps. What
runs goes on, and what makes room (evict, unpin, delete, rollback) is never refused. Work is taken again once the
footprint is down to the soft limit; the gap keeps the answer from changing every second.

Pages that are evicted give their memory back where frames are mappings of their own (CPUs); in the slabs of a GPU that
shares memory only when a slab is empty. The memory of a GPU of its own is not counted.

Pure but for `measure`. Owner: the engine thread. May import kvd.errors and siblings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from kvd.ops.footprint import process_footprint_bytes
from kvd.scheduler.errors import MemoryPressure
from kvd.scheduler.requests import JobRequest, TurnRequest

SOFT_PERCENT: Final = 95
"""The soft limit, as a part of the hard one."""

RETRY_S: Final = 2.0
"""When a refused request is told to come again: two looks at the footprint later."""

NEED_MEMORY: Final = ("fork", "pin", "prefetch", "import")
"""Operations beside turns that are refused."""


class Pressure:
    """Owner: the engine thread. `EngineCore` has one.

    Args:
        hard_bytes: the hard limit; None for no limit.
        measure: the footprint now, in bytes.

    Attributes:
        hard_bytes: as given.
        footprint_bytes: when it was last measured.
        level: `none`; `soft`, more than the soft limit; `hard`, work is refused.
        episodes: how often work began to be refused.
        refusals: requests that were refused.
    """

    def __init__(self, hard_bytes: int | None = None, measure: Callable[[], int] = process_footprint_bytes) -> None:
        self.hard_bytes = hard_bytes
        self._measure = measure
        self.footprint_bytes = 0
        self.level: Literal["none", "soft", "hard"] = "none"
        self.episodes = 0
        self.refusals = 0

    @property
    def soft_bytes(self) -> int | None:
        """The soft limit; None for none."""
        return None if self.hard_bytes is None else self.hard_bytes * SOFT_PERCENT // 100

    def look(self) -> int:
        """Measure.

        Returns:
            Bytes to give up, 0 when the footprint is within the soft limit.
        """
        self.footprint_bytes = self._measure()
        if self.hard_bytes is None or self.soft_bytes is None:
            return 0
        above = max(0, self.footprint_bytes - self.soft_bytes)
        if self.footprint_bytes > self.hard_bytes:
            self.episodes += self.level != "hard"
            self.level = "hard"
        elif not above:
            self.level = "none"
        elif self.level == "none":
            self.level = "soft"
        return above

    def refusal(self, request: TurnRequest | JobRequest) -> MemoryPressure | None:
        """Why a request is not to start now; None when it may."""
        if self.level != "hard" or (isinstance(request, JobRequest) and request.operation not in NEED_MEMORY):
            return None
        self.refusals += 1
        return MemoryPressure(
            f"memory is short: the daemon takes {self.footprint_bytes} bytes of the machine, {self.hard_bytes} are its "
            f"limit; requests are taken again at {self.soft_bytes}",
            retry_after_s=RETRY_S,
            footprint_bytes=self.footprint_bytes,
            footprint_limit_bytes=self.hard_bytes,
            soft_limit_bytes=self.soft_bytes,
        )
