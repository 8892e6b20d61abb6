"""A few rows times a matrix: what a decode step is made of, at the speed of memory.

Theory of operation. With one row, a product reads each weight once and does nothing else worth counting, so it takes
as long as reading takes. BLAS's matrix-vector product reads several matrix rows side by side to reuse the vector,
which the processor's prefetchers follow badly: 13 GB/s on one core of the machine this was written on, where a kernel
that walks through the matrix as it lies in memory reads 30. The same walk serves a few rows: each weight is loaded
once and multiplied with all of them, and the sums over lanes are made for all rows at once. One thread does it all: a
second one adds little to reading, and waiting for it costs more than it gives on a machine that has other work. May
import numpy, llvmlite and this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from kvd.native import mathematics as maths
from kvd.native.build import Address, Integer, compile_kernel, processor
from kvd.native.emit import F32, I32, PTR, Emitter, Value, vector

Floats = npt.NDArray[np.float32]

ARGUMENTS: Final = {"columns": Integer, "inner": Integer, "x": Address, "weight": Address, "out": Address}
"""Arguments of the kernel:

- columns: rows of the matrix, columns of the result.
- inner: length of a row, a multiple of the lanes.
- x: float32 [inner / lanes, rows, lanes]: lanes of all rows side by side.
- weight: float32 [columns, inner].
- out: float32 [columns, rows]: the result transposed.
"""

_CHAINS: Final = 4
"""Independent sums of a single row: a multiply-add takes four cycles until the next may use its result."""


MOST_ROWS: Final = 16
"""Rows that `times` takes at most. With 16, BLAS on two threads is a third faster on an idle machine; but its threads
wait for each other by spinning, and beside another busy process a step then takes thirty times as long."""


class _Tile(NamedTuple):
    """What a loop takes together.

    Attributes:
        columns: rows of the matrix; one is read fastest by itself, more need fewer loads of x.
        rows: rows of x. The product of both is the sums in registers.
        ahead: so many loops ahead the matrix is prefetched where several of its rows are read: left alone, that is
            slower.
        spread: the prefetches are shared out among the passes over a tile's columns, so that memory is at work during
            all of them, not only while the first one reads.
    """

    columns: int
    rows: int
    ahead: int
    spread: bool


_TILES: Final = {2: _Tile(1, 2, 0, False), 4: _Tile(4, 2, 1, True), 8: _Tile(3, 4, 1, True), 16: _Tile(3, 4, 1, True)}
"""By rows of x, for 16 registers: twelve sums, three vectors of the matrix, one of x. One column and eight rows load x
for each multiply-add; against that 8 rows take 0.77 and 16 rows 0.54 of the time (AVX2, memory that gives 12 GB/s)."""

_WIDE_TILES: Final = {
    2: _Tile(1, 2, 0, False),
    4: _Tile(1, 4, 0, False),
    8: _Tile(3, 8, 2, False),
    16: _Tile(4, 4, 2, False),
}
"""The same for 32 registers of 16 lanes: with 8 rows of x, loading these takes longer than reading the matrix."""

_WIDE_LANES: Final = 16


def fits(rows: int, inner: int) -> bool:
    """Whether `times` takes a product of that size."""
    return rows <= MOST_ROWS and inner % processor().lanes == 0


def times(x: Floats, weight: Floats) -> Floats:
    """x weight^T.

    Args:
        x: float32 [rows, inner], C-contiguous; see `fits`.
        weight: float32 [columns, inner], C-contiguous.

    Returns:
        float32 [rows, columns].

    Raises:
        KernelUnavailable: this processor cannot run the kernel.
    """
    rows, inner = x.shape
    columns = len(weight)
    padded = 1 << (rows - 1).bit_length()
    if padded > 1:
        lanes = processor().lanes
        wide = (np.empty if rows == padded else np.zeros)((inner // lanes, padded, lanes), np.float32)
        wide[:, :rows] = x.reshape(rows, -1, lanes).swapaxes(0, 1)
        x = wide
    out = np.empty((columns, padded), np.float32)
    product_kernel(padded)(columns, inner, x.ctypes.data, weight.ctypes.data, out.ctypes.data)
    return out.reshape(1, columns) if padded == 1 else np.ascontiguousarray(out[:, :rows].T)


@functools.cache
def product_kernel(rows: int) -> Callable[..., None]:
    """The compiled kernel for a number of rows, a power of two; see `ARGUMENTS`.

    Raises:
        KernelUnavailable: this processor cannot run it.
    """
    lanes = processor().lanes
    return compile_kernel(
        "product",
        functools.partial(_write, rows, lanes),
        ARGUMENTS,
        parameters=(rows, lanes),
        sources=(maths.__name__, __name__),
    )


def _write(rows: int, lanes: int, e: Emitter) -> None:
    columns, inner, x, weight, out = (e.arguments[name] for name in ARGUMENTS)
    if rows == 1:
        with e.loop(0, columns) as column:
            e.store(_one_row(e, lanes, inner, x, e.at(weight, column * inner, F32)), out, column)
        return
    side = _tile(rows, lanes).columns
    whole = columns // side * side
    with e.loop(0, whole, side) as column:
        _columns(e, (rows, lanes), column, side)
    with e.loop(whole, columns) as column:
        _columns(e, (rows, lanes), column, 1)


def _columns(e: Emitter, shape: tuple[int, int], column: Value, side: int) -> None:
    """`side` columns of the result, from as many rows of the matrix."""
    rows, lanes = shape
    _, inner, x, weight, out = (e.arguments[name] for name in ARGUMENTS)
    tile = _tile(rows, lanes)
    bases = [e.at(weight, (column + number) * inner, F32) for number in range(side)]
    distance = side * tile.ahead
    later = [e.at(weight, (column + number + distance) * inner, F32) for number in range(side if side > 1 else 0)]
    passes = rows // tile.rows if tile.spread else 1
    for first in range(0, rows, tile.rows):
        sums = [[e.slot(e.constant(vector(F32, lanes), 0.0)) for _ in range(tile.rows)] for _ in bases]
        turn = first // tile.rows
        asked_for = later[turn::passes] if turn < passes else []
        with e.loop(0, inner, lanes) as i:
            weights = [e.load(base, i, F32, lanes) for base in bases]
            for base in asked_for:
                _prefetch(e, e.at(base, i, F32))
            for place in range(tile.rows):
                value = e.load(x, i * rows + (first + place) * lanes, F32, lanes)
                for each, mine in zip(weights, sums, strict=True):
                    mine[place].set(e.fma(each, value, mine[place].get()))
        for number, mine in enumerate(sums):
            e.store(_sums(e, [each.get() for each in mine]), out, (column + number) * rows + first)


def _tile(rows: int, lanes: int) -> _Tile:
    return (_WIDE_TILES if lanes == _WIDE_LANES else _TILES)[rows]


def _prefetch(e: Emitter, address: Value) -> None:
    """Ask for a cache line that is read soon; an address that is not mapped does no harm."""
    builder = e.builder
    kind, name = ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32]), "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    reading, into_all_caches, data = (ir.Constant(I32, value) for value in (0, 3, 1))
    builder.call(function, [address.raw, reading, into_all_caches, data])


def _one_row(e: Emitter, lanes: int, inner: Value, x: Value, base: Value) -> Value:
    """The product of one row with a row of the matrix."""
    sums = [e.slot(e.constant(vector(F32, lanes), 0.0)) for _ in range(_CHAINS)]
    step = lanes * _CHAINS
    whole = inner // step * step
    with e.loop(0, whole, step) as i:
        for chain, each in enumerate(sums):
            at = i + chain * lanes
            each.set(e.fma(e.load(base, at, F32, lanes), e.load(x, at, F32, lanes), each.get()))
    with e.loop(whole, inner, lanes) as i:
        sums[0].set(e.fma(e.load(base, i, F32, lanes), e.load(x, i, F32, lanes), sums[0].get()))
    total = sums[0].get()
    for each in sums[1:]:
        total = total + each.get()
    return e.fold(total)


def _sums(e: Emitter, vectors: list[Value]) -> Value:
    """The sum of each vector's lanes, as a vector of as many lanes as there are vectors."""
    lanes = vectors[0].type.count
    if len(vectors) > lanes:
        halves = [_sums(e, vectors[start : start + lanes]) for start in range(0, len(vectors), lanes)]
        while len(halves) > 1:
            halves = [
                e.shuffle(halves[i], range(2 * halves[i].type.count), halves[i + 1]) for i in range(0, len(halves), 2)
            ]
        return halves[0]
    count = len(vectors)
    joined = maths.sum_lanes(e, vectors, count)  # lanes / count partial sums of each
    while joined.type.count > count:
        width = joined.type.count
        joined = e.shuffle(joined, range(0, width, 2)) + e.shuffle(joined, range(1, width, 2))
    return joined


__all__ = ["ARGUMENTS", "MOST_ROWS", "fits", "product_kernel", "times"]
