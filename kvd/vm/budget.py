"""Budget arithmetic in bytes: what is resident, what is in flight, and what may still be had.

Theory of operation. The budget is cut in three:

    budget = usable + copy reserve + flight reserve

- *flight reserve*: writing a page to swap copies its bytes, reading one needs a buffer. If frames could fill the whole
  budget, a full pool of dirty pages could never be written and so never be evicted. At least one page of the largest
  format is kept; more, up to the transfers allowed at once, while that stays below a sixteenth of the budget.
- *copy reserve*: one page per cache group, so that a fork or rollback inside a page can be carried out at once even
  when demand has filled everything usable. Afterwards eviction wins the reserve back before anything else grows.
- *usable*: what ordinary frames may fill. A demand that exceeds it can never be met.

Nothing is counted by number of pages, since formats differ in size. May import nothing from kvd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FLIGHT_SHARE: Final = 16
"""The flight reserve grows beyond one page only while it stays below this part of the budget."""


class Budget:
    """Byte accounts of the pool. Owned by the page table, which alone books into it.

    Args:
        budget_bytes: everything kvd may hold for pages.
        max_transfers: writes and loads that may be in flight at once.

    Attributes:
        resident_bytes: bytes of all frames.
        in_flight_bytes: bytes copied for writes under way and buffers of loads under way.
        peak_resident_bytes: the most `resident_bytes` has been.
        peak_total_bytes: the most that frames and copies in flight have been together.
        converging: a smaller budget was set and what is held still exceeds it.
    """

    def __init__(self, budget_bytes: int, *, max_transfers: int) -> None:
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        self.in_flight_bytes = 0
        self.peak_resident_bytes = 0
        self.peak_total_bytes = 0
        self.converging = False
        self._max_transfers = max_transfers
        self._largest_page_bytes = 0
        self._copy_reserve_bytes = 0

    # ---- limits -----------------------------------------------------------------------------------------------------

    def set_formats(self, formats: Iterable[tuple[int, ...]]) -> None:
        """State the page bytes per group of every live space; the reserves follow."""
        distinct = set(formats)
        self._largest_page_bytes = max((max(sizes) for sizes in distinct), default=0)
        self._copy_reserve_bytes = max((sum(sizes) for sizes in distinct), default=0)

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget; `converging` holds until what is held fits again."""
        self.budget_bytes = budget_bytes
        self.converging = True
        self.settle()

    def settle(self) -> None:
        """End `converging` once frames leave the flight reserve free again."""
        if self.resident_bytes <= self.frame_limit_bytes and self.total_bytes <= self.budget_bytes:
            self.converging = False

    @property
    def total_bytes(self) -> int:
        """Frames and copies in flight together."""
        return self.resident_bytes + self.in_flight_bytes

    @property
    def flight_reserve_bytes(self) -> int:
        """Bytes kept for copies of pages on their way."""
        one = self._largest_page_bytes
        return max(one, min(one * self._max_transfers, self.budget_bytes // FLIGHT_SHARE))

    @property
    def frame_limit_bytes(self) -> int:
        """The most that frames may take, copies of partial pages included."""
        return self.budget_bytes - self.flight_reserve_bytes

    @property
    def _usable_bytes(self) -> int:
        return self.frame_limit_bytes - self._copy_reserve_bytes

    @property
    def usable_bytes(self) -> int:
        """The most that a demand may take; never negative."""
        return max(0, self._usable_bytes)

    # ---- what may be had now ----------------------------------------------------------------------------------------

    def shortage_bytes(self, want_bytes: int) -> int:
        """Bytes that must be freed before `want_bytes` more of frames fit; zero or less when they fit."""
        return self.resident_bytes + want_bytes - self._usable_bytes

    def copy_shortage_bytes(self, want_bytes: int) -> int:
        """As `shortage_bytes`, for copies of partial pages, which may use the copy reserve."""
        return max(
            self.resident_bytes + want_bytes - self.frame_limit_bytes,
            self.total_bytes + want_bytes - self.budget_bytes,
        )

    def can_map(self, page_bytes: int) -> bool:
        """True when an empty frame of `page_bytes` may be mapped."""
        return self._fits(frame_bytes=page_bytes, copy_bytes=0)

    def can_load(self, page_bytes: int) -> bool:
        """True when a frame of `page_bytes` and its read buffer may be had."""
        return self._fits(frame_bytes=page_bytes, copy_bytes=page_bytes)

    def can_write(self, page_bytes: int) -> bool:
        """True when a resident page of `page_bytes` may be copied for swap.

        A budget that shrank below what is resident leaves no room for any copy, but only writing makes pages
        evictable: then one write at a time may exceed it.
        """
        if self.converging and self.in_flight_bytes == 0:
            return True
        return self._flight_fits(self.resident_bytes, page_bytes)

    def _fits(self, *, frame_bytes: int, copy_bytes: int) -> bool:
        resident = self.resident_bytes + frame_bytes
        return resident <= self._usable_bytes and self._flight_fits(resident, copy_bytes)

    def _flight_fits(self, resident_bytes: int, copy_bytes: int) -> bool:
        # What is left of the copy reserve must stay free: a transfer may not take a later copy's place.
        committed = max(resident_bytes, min(resident_bytes, self._usable_bytes) + self._copy_reserve_bytes)
        return committed + self.in_flight_bytes + copy_bytes <= self.budget_bytes

    # ---- booking ----------------------------------------------------------------------------------------------------

    def book(self, *, resident_bytes: int = 0, in_flight_bytes: int = 0) -> None:
        """Add (or, negative, give back) bytes."""
        self.resident_bytes += resident_bytes
        self.in_flight_bytes += in_flight_bytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)
        self.peak_total_bytes = max(self.peak_total_bytes, self.total_bytes)
