"""A process whose address space has a free page out of reach of all others, which then links and runs a kernel.

`python -m tests.native.scattered` prints the kernel's result. What a 32-bit offset cannot reach, LLVM answers by ending
the process.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from kvd.native import build, emit

REACH = 1 << 31


def library() -> ctypes.CDLL:
    """The C library, for mappings at addresses that Python's `mmap` does not tell."""
    c = ctypes.CDLL(None, use_errno=True)
    c.mmap.restype = ctypes.c_void_p
    c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return c


def scatter() -> None:
    """Fill every hole of the address space down to a wall of twice the reach, then free the highest page again.

    The system gives the highest hole that is large enough: one section lands there, the next one below the wall.
    """
    c, flags = library(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE

    def reserve(size: int) -> int:
        at = c.mmap(None, size, 0, flags, -1, 0)
        assert at not in (None, ctypes.c_void_p(-1).value), "no address space left"
        return int(at)

    wall = reserve(2 * REACH)
    above = []
    while (at := reserve(mmap.PAGESIZE)) > wall:
        above.append(at)
    assert above
    assert c.munmap(max(above), mmap.PAGESIZE) == 0


def main() -> None:
    """Link a kernel that has a constant, and run it."""
    build._linker()

    def write(e: emit.Emitter) -> None:
        x = e.arguments["x"]
        with e.loop(0, e.arguments["count"]) as i:
            e.store(e.load(x, i, emit.F32) * e.constant(emit.F32, 2.5), x, i)

    arguments = {"x": build.Address, "count": build.Integer}
    scatter()
    kernel = build.compile_kernel("far", write, arguments, parameters=(), sources=(__name__,))
    x = np.arange(4, dtype=np.float32)
    kernel(x.ctypes.data, 4)
    print(x.tolist())


if __name__ == "__main__":
    main()
