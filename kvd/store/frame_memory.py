"""Memory of dropped frames, kept for the next ones: a page that comes in while another goes needs no new memory.

Theory of operation. Memory fresh from the system costs a fault for each of its 4 KB, two to three milliseconds for a
page of 2.4 MB, where copying the page takes a tenth of that; and swapping in means giving up one frame for each that is
made. So a few dropped mappings are kept, `KEPT_BYTES` at most and no more than a sixteenth of the budget, the latest
first. They count as mapped memory and go when memory is short. What is kept is the mapping alone: each frame gets an
array of its own over it, all views of the frame keep that array alive, and only when it is gone may the mapping serve
another frame. A mapping that somebody still has a view of is let go of: nobody's bytes ever appear in it. (Reference
counts would not tell who holds one: interpreters count borrowed names differently.)

May import numpy, kvd.store.fragment and kvd.store.frame_pool.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvd.store.fragment import anonymous_memory
from kvd.store.frame_pool import OctetArray

KEPT_BYTES: Final = 128 << 20
"""As much as the pages of an agent of some thousand tokens."""


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Memory of one frame.

    Attributes:
        memory: all of it.
        n_bytes: of the frame.
        octets: the frame's array; dead once the frame and every view of it are gone.
    """

    memory: mmap.mmap
    n_bytes: int
    octets: weakref.ref[OctetArray]

    @property
    def slab_bytes(self) -> int:
        return len(self.memory)


class RecycledMappings:
    """Implements `FrameAllocator`. Called by the engine thread only.

    Args:
        budget_bytes: of the pool.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._most_bytes = _most_bytes(budget_bytes)
        self._kept: list[_Mapping] = []
        self._in_use: dict[int, _Mapping] = {}  # by address, of memory that serves a frame

    @property
    def kept_bytes(self) -> int:
        """Mapped memory that serves no frame and that nobody has a view of."""
        self._forget_viewed()
        return sum(each.slab_bytes for each in self._kept)

    def allocate(self, n_bytes: int, *, zeroed: bool = True) -> tuple[OctetArray, int]:
        """See `FrameAllocator.allocate`."""
        self._forget_viewed()
        for index in range(len(self._kept) - 1, -1, -1):
            if self._kept[index].n_bytes == n_bytes:
                memory = self._kept.pop(index).memory
                octets = np.frombuffer(memory, np.uint8, n_bytes)
                if zeroed:
                    octets[:] = 0
                break
        else:
            memory = anonymous_memory(-(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            octets = np.frombuffer(memory, np.uint8, n_bytes)
        self._in_use[int(octets.ctypes.data)] = _Mapping(memory, n_bytes, weakref.ref(octets))
        return octets, len(memory)

    def release(self, octets: OctetArray) -> None:
        """See `FrameAllocator.release`."""
        self._kept.append(self._in_use.pop(int(octets.ctypes.data)))
        self._keep_at_most(self._most_bytes)

    def set_budget(self, budget_bytes: int) -> None:
        """See `FrameAllocator.set_budget`."""
        self._most_bytes = _most_bytes(budget_bytes)
        self._keep_at_most(self._most_bytes)

    def trim(self) -> int:
        """See `FrameAllocator.trim`."""
        freed_bytes, self._kept = self.kept_bytes, []
        return freed_bytes

    def _forget_viewed(self) -> None:
        self._kept = [each for each in self._kept if each.octets() is None]

    def _keep_at_most(self, most_bytes: int) -> None:
        over_bytes = sum(each.slab_bytes for each in self._kept) - most_bytes
        while over_bytes > 0:  # the oldest may be of a format that is not used any more
            over_bytes -= self._kept.pop(0).slab_bytes


def _most_bytes(budget_bytes: int) -> int:
    return min(KEPT_BYTES, budget_bytes // 16)


__all__ = ["KEPT_BYTES", "RecycledMappings"]
