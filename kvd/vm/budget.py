"""Budget arithmetic in bytes: what is resident, what is in flight, and what may still be had.

Theory of operation. The budget is cut in three:

    budget = usable + copy reserve + flight reserve

- *flight reserve*: writing a page to swap copies its bytes. If frames could fill the whole budget, a full pool of dirty
  pages could never be written and so never be evicted. At least one page of the largest format is kept; more, up to the
  copies allowed at once, while that stays below a sixteenth of the budget. A page on its way in has a buffer and gets
  the memory of its frame only when that is full: one of the two is there at a time, but for the page that is being
  copied from one to the other. So all pages that come in take their frames, and together one copy.
- *copy reserve*: one page per cache group, so that a fork or rollback inside a page can be carried out at once even
  when demand has filled everything usable. Afterwards eviction wins the reserve back before anything else grows.
- *usable*: what ordinary frames may fill. A demand that exceeds it can never be met.

Two *marks* lie below `usable`. When frames fill more than the high one, idle pages are evicted in the background until
they fill no more than the low one (`kvd.vm.reclaim`); so a demand that comes finds frames, and need not wait for a page
to be written first. The gaps are parts of `usable`, in whole pages of all groups: a pool that is so small that a part
of it is less than that has no gap, and keeps what it can.

A *namespace* may have a quota: what its pages should take of the frames. It binds nobody who runs; whoever demands more
pushes out idle pages of its own namespace first, never those of others (`kvd.vm.transfers`).

Nothing is counted by number of pages, since formats differ in size. May import kvd.ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvd.ids import DEFAULT_NAMESPACE, Namespace

FLIGHT_SHARE: Final = 16
"""The flight reserve grows beyond one page only while it stays below this part of the budget."""

HIGH_FREE_PERCENT: Final = 2
LOW_FREE_PERCENT: Final = 5
"""Parts of what is usable that are free at the two marks."""

PIN_PART: Final = 0.5
"""Of what is usable, pins hold at most this unless another limit is set."""

MAX_PIN_PART: Final = 0.9
"""Of what is usable, pins hold at most this whatever limit is set: somebody has to run."""


class Budget:
    """Byte accounts of the pool. Owned by the page table, which alone books into it.

    Args:
        budget_bytes: everything kvd may hold for pages.
        max_copies: pages that may be copied at once: for writes under way, and one for loads.
        high_free_percent: part of what is usable that is free at the high mark.
        low_free_percent: the same at the low mark; at least as much.
        pin_limit: what pins may hold, in bytes (int) or as a part of what is usable (float).

    Attributes:
        resident_bytes: bytes of all frames.
        copied_bytes: bytes copied for writes under way.
        peak_resident_bytes: the most `resident_bytes` has been.
        namespaces: bytes of frames by the namespace whose pages they hold.
        quotas: of these, the most that a namespace should have; those without a quota share the rest.
        peak_total_bytes: the most that frames and copies in flight have been together.
        converging: a smaller budget was set and what is held still exceeds it.
        reclaiming: pages go in the background, since the high mark was exceeded and the low one is not reached yet.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        max_copies: int,
        high_free_percent: int = HIGH_FREE_PERCENT,
        low_free_percent: int = LOW_FREE_PERCENT,
        pin_limit: int | float = PIN_PART,
    ) -> None:
        if not 0 <= high_free_percent <= low_free_percent <= 100:
            raise ValueError(f"0 <= high <= low <= 100 percent free, not {high_free_percent} and {low_free_percent}")
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        self.copied_bytes = 0
        self._loading: Counter[int] = Counter()  # pages on their way in, by their bytes
        self.peak_resident_bytes = 0
        self.namespaces: dict[Namespace, int] = {}
        self.quotas: dict[Namespace, int] = {}
        self.peak_total_bytes = 0
        self.converging = False
        self.reclaiming = False
        self._max_copies = max_copies
        self._free_percents = high_free_percent, low_free_percent
        self._pin_limit = pin_limit
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
    def in_flight_bytes(self) -> int:
        """Bytes beside frames: copies for writes under way, and the largest of the pages that come in."""
        return self.copied_bytes + max(self._loading, default=0)

    @property
    def total_bytes(self) -> int:
        """Frames and copies in flight together."""
        return self.resident_bytes + self.in_flight_bytes

    @property
    def flight_reserve_bytes(self) -> int:
        """Bytes kept for copies of pages on their way."""
        one = self._largest_page_bytes
        return max(one, min(one * self._max_copies, self.budget_bytes // FLIGHT_SHARE))

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

    @property
    def high_mark_bytes(self) -> int:
        """Frames beyond this are too many: idle pages go in the background."""
        return self._mark_bytes(self._free_percents[0])

    @property
    def low_mark_bytes(self) -> int:
        """Down to this they go."""
        return self._mark_bytes(self._free_percents[1])

    @property
    def pin_limit_bytes(self) -> int:
        """What pins may hold together."""
        limit = self._pin_limit
        wanted = limit if isinstance(limit, int) else int(self.usable_bytes * limit)
        return min(wanted, int(self.usable_bytes * MAX_PIN_PART))

    def pin_quota_bytes(self, namespace: Namespace) -> int:
        """What of it pins of one namespace may hold: as large a part of its quota, or all of it."""
        quota_bytes = self.quotas.get(namespace)
        if quota_bytes is None:
            return self.pin_limit_bytes
        part = PIN_PART if isinstance(self._pin_limit, int) else min(self._pin_limit, MAX_PIN_PART)
        return min(self.pin_limit_bytes, int(quota_bytes * part))

    def _mark_bytes(self, free_percent: int) -> int:
        unit = self._copy_reserve_bytes
        return self.usable_bytes - (self.usable_bytes * free_percent // 100 // unit * unit if unit else 0)

    # ---- what may be had now ----------------------------------------------------------------------------------------

    def shortage_bytes(self, want_bytes: int) -> int:
        """Bytes that must be freed before `want_bytes` more of frames fit; zero or less when they fit."""
        return self.resident_bytes + want_bytes - self._usable_bytes

    def quota_shortage_bytes(self, namespace: Namespace, want_bytes: int) -> int:
        """Bytes of a namespace that must be freed before `want_bytes` more of it fit its quota; 0 or less: none."""
        quota_bytes = self.quotas.get(namespace)
        return 0 if quota_bytes is None else self.namespaces.get(namespace, 0) + want_bytes - quota_bytes

    def prefetch_shortage_bytes(self, want_bytes: int) -> int:
        """As `shortage_bytes`, for what nobody demands: it stays below the mark, or others would go for it at once."""
        mark_bytes = self.low_mark_bytes if self.reclaiming else self.high_mark_bytes
        return self.resident_bytes + want_bytes - min(self._usable_bytes, mark_bytes)

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
        """True when a page of `page_bytes` may come in."""
        copy_bytes = page_bytes - max(self._loading, default=0)
        return self._fits(frame_bytes=page_bytes, copy_bytes=max(0, copy_bytes))

    def can_write(self, page_bytes: int) -> bool:
        """True when a resident page of `page_bytes` may be copied for swap.

        A budget that shrank below what is resident leaves no room for any copy, but only writing makes pages
        evictable: then one write at a time may exceed it.
        """
        if self.converging and self.copied_bytes == 0:
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

    def book(
        self,
        *,
        resident_bytes: int = 0,
        copied_bytes: int = 0,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> None:
        """Add (or, negative, give back) bytes of a page of a namespace."""
        self.resident_bytes += resident_bytes
        if resident_bytes:
            left_bytes = self.namespaces.pop(namespace, 0) + resident_bytes
            if left_bytes:
                self.namespaces[namespace] = left_bytes
        self.copied_bytes += copied_bytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)
        self.peak_total_bytes = max(self.peak_total_bytes, self.total_bytes)

    def load_begins(self, page_bytes: int) -> None:
        """A page is on its way in."""
        self._loading[page_bytes] += 1
        self.peak_total_bytes = max(self.peak_total_bytes, self.total_bytes)

    def load_ends(self, page_bytes: int) -> None:
        """It is there, or is not coming."""
        self._loading[page_bytes] -= 1
        if not self._loading[page_bytes]:
            del self._loading[page_bytes]
