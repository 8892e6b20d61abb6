"""Memory of dropped frames, kept for the next ones: a page that comes in while another goes needs no new memory.

Theory of operation. Memory fresh from the system costs a fault for each of its 4 KB, two to three milliseconds for a
page of 2.4 MB, where copying the page takes a tenth of that; and swapping in means giving up one frame for each that is
made. So a few dropped mappings are kept, `KEPT_BYTES` at most and no more than a sixteenth of the budget, the latest
first. They count as mapped memory. One that somebody still holds a view of is never kept: the view keeps it alive, and
nobody's bytes ever appear in it.

May import numpy and kvd.store.frame_pool.
"""

from __future__ import annotations

import sys
from typing import Final

from kvd.store.frame_pool import AnonymousMappings, OctetArray

KEPT_BYTES: Final = 128 << 20
"""As much as the pages of an agent of some thousand tokens."""

_OWN_REFERENCES: Final = 3
"""To memory that nobody has a view of, seen from `release`: its argument, the caller's name, and the question's."""


class RecycledMappings:
    """Implements `FrameAllocator`. Called by the engine thread only.

    Args:
        budget_bytes: of the pool.

    Attributes:
        kept_bytes: mapped memory that serves no frame.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._fresh = AnonymousMappings()
        self._most_bytes = min(KEPT_BYTES, budget_bytes // 16)
        self._kept: list[tuple[OctetArray, int]] = []
        self._slab_bytes: dict[int, int] = {}  # by address, of memory that serves a frame
        self.kept_bytes = 0

    def allocate(self, n_bytes: int, *, zeroed: bool = True) -> tuple[OctetArray, int]:
        """See `FrameAllocator.allocate`."""
        for index in range(len(self._kept) - 1, -1, -1):
            octets, slab_bytes = self._kept[index]
            if octets.size == n_bytes:
                del self._kept[index]
                self.kept_bytes -= slab_bytes
                if zeroed:
                    octets[:] = 0
                break
        else:
            octets, slab_bytes = self._fresh.allocate(n_bytes)
        self._slab_bytes[int(octets.ctypes.data)] = slab_bytes
        return octets, slab_bytes

    def release(self, octets: OctetArray) -> None:
        """See `FrameAllocator.release`."""
        slab_bytes = self._slab_bytes.pop(int(octets.ctypes.data))
        if slab_bytes > self._most_bytes or sys.getrefcount(octets) > _OWN_REFERENCES:
            return
        self._kept.append((octets, slab_bytes))
        self.kept_bytes += slab_bytes
        while self.kept_bytes > self._most_bytes:  # the oldest may be of a format that is not used any more
            _, gone_bytes = self._kept.pop(0)
            self.kept_bytes -= gone_bytes


__all__ = ["KEPT_BYTES", "RecycledMappings"]
