"""Frames inside a few large mlx arrays, for GPUs that share memory with the CPU: kernels and numpy see the same bytes.

Theory of operation. A Metal kernel reads memory only through the arrays that are bound to it, and at most 31 can be
bound; so frames lie in up to 16 *slabs*, evaluated mlx arrays that are made when first needed and given up when empty,
and a kernel gets all slabs and a block table of (slab, offset). A frame is a first-fit range in units of 16 KiB, so
formats of different size share one budget. Host code (codec, swap, log) goes on writing through numpy views of a slab.

Host writes and GPU reads do not race: `AttentionBackend.attend` returns evaluated results, so no kernel that reads a
slab is under way when the engine thread writes, drops or fills a frame again; and a kernel that starts later sees what
was
written before, since the buffers are in shared storage. mlx does not know of these writes; it never reads a slab except
as an input of such a kernel and never reuses its buffer while the slab is held here.

A frame that fits no slab (a raised budget, fragmentation) gets a mapping of its own: right, but no kernel can read it;
`locate` says so, the backend computes such rows another way, and `outside_frames` counts them.

May import mlx, numpy, kvd.errors, kvd.store.frame_pool.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np

from kvd.errors import InternalError
from kvd.store.frame_pool import AnonymousMappings, OctetArray

SLABS: Final = 16
"""Most slabs: with queries, tables and outputs they stay below Metal's 31 buffers."""

UNIT_BYTES: Final = 16 << 10
"""Frames start at multiples of this inside a slab: the system's page on Apple Silicon."""


class Place(NamedTuple):
    """Where a frame lies.

    Attributes:
        slab: index of its slab.
        offset_bytes: from the slab's beginning.
    """

    slab: int
    offset_bytes: int


class _Slab:
    """One slab: its array, its view, its free ranges (offset to length, in units, ascending, never adjacent)."""

    def __init__(self, units: int) -> None:
        self.array = mx.zeros((units * UNIT_BYTES // 4,), mx.uint32)
        mx.eval(self.array)
        self.octets: OctetArray = np.array(self.array, copy=False).view(np.uint8)
        if not self.octets.flags.writeable:
            raise InternalError("mlx arrays are not writable through numpy here; slabs cannot be used")
        self.address = int(self.octets.ctypes.data)
        self.units = units
        self.free: list[tuple[int, int]] = [(0, units)]

    def take(self, units: int) -> int | None:
        """First range that fits, or None."""
        for index, (start, length) in enumerate(self.free):
            if length >= units:
                self.free[index : index + 1] = [(start + units, length - units)] if length > units else []
                return start
        return None

    def give(self, start: int, units: int) -> None:
        """Return a range, joined with its free neighbours."""
        joined: list[tuple[int, int]] = []
        for at, length in sorted([*self.free, (start, units)]):
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((at, length))
        self.free = joined

    @property
    def empty(self) -> bool:
        """Whether no frame lies in it."""
        return self.free == [(0, self.units)]


class UnifiedSlabs:
    """Memory for frames that kernels can read (implements `FrameAllocator`).

    Args:
        budget_bytes: payload bytes that all frames together may have.
        largest_frame_bytes: payload of the largest frame; each slab has room for one more, so that equal frames always
            fit.
    """

    def __init__(self, budget_bytes: int, largest_frame_bytes: int) -> None:
        self._slab_units = -(-budget_bytes // (SLABS * UNIT_BYTES)) + _units(largest_frame_bytes)
        self._slabs: list[_Slab | None] = [None] * SLABS
        self._places: dict[int, tuple[int, int, int]] = {}  # address: slab, first unit, units
        self._mappings = AnonymousMappings()
        self._outside: set[int] = set()

    @property
    def outside_frames(self) -> int:
        """Frames that fitted no slab."""
        return len(self._outside)

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs that exist."""
        return sum(slab.array.nbytes for slab in self._slabs if slab is not None)

    kept_bytes = 0

    def allocate(self, n_bytes: int, *, zeroed: bool = True) -> tuple[OctetArray, int]:
        """See `FrameAllocator.allocate`."""
        units = _units(n_bytes)
        if units <= self._slab_units:
            # Slabs that exist come first: a new one is made only when they are full.
            order = sorted(range(SLABS), key=lambda index: self._slabs[index] is None)
            for index in order:
                slab = self._slabs[index]
                if slab is None:
                    slab = self._slabs[index] = _Slab(self._slab_units)
                start = slab.take(units)
                if start is not None:
                    octets = slab.octets[start * UNIT_BYTES : start * UNIT_BYTES + n_bytes]
                    if zeroed:
                        octets[:] = 0
                    self._places[int(octets.ctypes.data)] = (index, start, units)
                    return octets, units * UNIT_BYTES
        octets, slab_bytes = self._mappings.allocate(n_bytes)
        self._outside.add(int(octets.ctypes.data))
        return octets, slab_bytes

    def release(self, octets: OctetArray) -> None:
        """See `FrameAllocator.release`; an empty slab goes back to the system.

        Raises:
            InternalError: the memory was not allocated here, or is back already.
        """
        address = int(octets.ctypes.data)
        if address in self._outside:
            self._outside.remove(address)
            return
        place = self._places.pop(address, None)
        if place is None:
            raise InternalError("memory of a frame is released that was not allocated here")
        index, start, units = place
        slab = self._slabs[index]
        assert slab is not None
        slab.give(start, units)
        if slab.empty:
            self._slabs[index] = None
            del slab
            mx.clear_cache()  # mlx keeps freed buffers for reuse; this one is to be gone

    def set_budget(self, budget_bytes: int) -> None:
        """Slabs stay as large as the first budget made them."""

    def trim(self) -> int:
        """Nothing to do: a slab goes when its last frame does."""
        return 0

    def locate(self, address: int) -> Place | None:
        """Where the frame that begins at an address lies; None when it is in no slab."""
        place = self._places.get(address)
        return None if place is None else Place(place[0], place[1] * UNIT_BYTES)

    def arrays(self) -> list[mx.array]:
        """16 arrays uint32: each slab, or any other where there is none; empty when there is no slab at all."""
        made = [slab.array for slab in self._slabs if slab is not None]
        return [made[0] if slab is None else slab.array for slab in self._slabs] if made else []


def _units(n_bytes: int) -> int:
    return -(-n_bytes // UNIT_BYTES)
