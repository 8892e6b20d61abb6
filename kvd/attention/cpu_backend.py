"""The backend for Linux CPUs: compiled kernels that read packed pages in place.

Decoding (a few query positions) runs `kvd.attention.cpu_decode`, which never dequantises; longer steps run
`kvd.attention.cpu_prefill`, whose work items are spread over as many threads as BLAS has. A thread's scratch is kept
from call to call. Results do not depend on the number of threads: an item is computed by one thread, in one order.

May import mlx, numpy, kvd.native, kvd.quant, kvd.attention.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.attention.cpu_decode import DecodeShape, decode_kernel, side_shape
from kvd.attention.cpu_prefill import PrefillShape, prefill_kernel
from kvd.attention.interface import (
    AttentionOutput,
    HostPages,
    PageSource,
    Row,
    Run,
    Segment,
    TailArrays,
    host_pages,
    row_by_row,
)
from kvd.attention.masks import positions_of
from kvd.native.blas import blas
from kvd.native.mathematics import LOG2_E
from kvd.quant.spec import PAGE_TOKENS, LayerFormat, PageLayout

DECODE_QUERIES: Final = 2
"""Up to so many query positions the decode kernel is asked for each; beyond, dequantising once is cheaper."""

DECODE_ROWS: Final = 8
"""Query heads of one decode call at most: more do not fit the registers."""

PREFILL_ROWS: Final = 512
"""Queries of a prefill work item at most, all heads: their scores over a page are half a megabyte."""

MAX_BLOCK: Final = 128
"""Query positions of a prefill work item at most."""

SHORT_STEP: Final = 32
SHORT_BLOCK: Final = 8
"""A step of up to so many query positions is cut finer, so that threads have equal shares of few KV heads."""

PARALLEL_PRODUCTS: Final = 32 * 512
"""From so many pairs of query and token on a step is spread over threads; starting one takes about 50 us."""

_LN_2: Final = np.float32(math.log(2))

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


class _Pages(NamedTuple):
    """Pages of one segment as kernels see them.

    Attributes:
        table: int64 [kv_heads, pages, 6], addresses of k codes, scales, biases, v codes, scales, biases.
        kv_heads: KV heads.
        v_dim: width of a value.
        held: arrays that must live as long as the addresses are used.
    """

    table: Integers
    kv_heads: int
    v_dim: int
    held: tuple[Any, ...]


class CpuBackend:
    """Attention over pages in host memory by compiled kernels (implements `AttentionBackend`).

    Owner: the engine thread.

    Raises:
        KernelUnavailable: no BLAS; a processor that cannot run the kernels shows at the first `attend`.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._blas = blas()
        self._threads = self._blas.threads if self._blas.can_change_threads else 1
        self._scratch: dict[int, Floats] = {}
        self._places: WeakKeyDictionary[PageLayout, dict[int, Integers]] = WeakKeyDictionary()
        self._kernels: dict[Any, tuple[Callable[..., None], Floats]] = {}

    def attend(
        self,
        pages: PageSource,
        queries: mx.array,
        *,
        layer_index: int,
        rows: Sequence[Row],
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> AttentionOutput:
        """See `AttentionBackend.attend`."""
        host = host_pages(pages)

        def attend_row(one: mx.array, row: Row) -> list[AttentionOutput]:
            return [
                self._attend_segment(host, one, layer_index, row.query_start, segment, scale, window)
                for whole in row.segments
                for segment in _split(whole)
            ]

        return row_by_row(queries, rows, sinks, attend_row)

    def _attend_segment(
        self,
        host: HostPages,
        queries: mx.array,
        layer_index: int,
        query_start: int,
        segment: Segment,
        scale: float,
        window: int | None,
    ) -> AttentionOutput:
        """One row over one segment: queries mx [1, heads, L, k_dim]; no sinks."""
        conditioned = queries if segment.conditioning is None else segment.conditioning.condition_queries(queries)
        q = _host_array(conditioned)
        out, top, total = self._run(host, q, layer_index, query_start, segment, scale, window)
        seen = total > 0
        lse = np.where(seen, top + np.log2(np.where(seen, total, np.float32(1))), -np.inf) * _LN_2
        made = mx.array(lse[None])
        if segment.conditioning is not None:
            made = made + scale * segment.conditioning.centre_term(queries)
        answer = mx.array(out[None]).swapaxes(1, 2)
        return AttentionOutput(answer if queries.dtype == mx.float32 else answer.astype(queries.dtype), made)

    def attend_host(
        self,
        pages: PageSource,
        queries: Floats,
        *,
        layer_index: int,
        query_start: int,
        segment: Segment,
        scale: float,
        window: int | None = None,
    ) -> Floats:
        """`attend` for one sequence of one segment, from numpy to numpy.

        Args:
            pages: the pool.
            queries: float32 [L, heads, k_dim], after RoPE, conditioned already if the segment's keys are.
            layer_index: index of the layer in the model.
            query_start: position of the first query.
            segment: everything the queries may see; no open tail of its own.
            scale: factor of the scores.
            window: tokens a query sees, itself included; None for all before it.

        Returns:
            float32 [L, heads, v_dim], which the next call may overwrite.
        """
        q = queries.swapaxes(0, 1)
        return self._run(host_pages(pages), q, layer_index, query_start, segment, scale, window)[0]

    def _run(
        self,
        host: HostPages,
        q: Floats,
        layer_index: int,
        query_start: int,
        segment: Segment,
        scale: float,
        window: int | None,
    ) -> tuple[Floats, Floats, Floats]:
        """Queries float32 [heads, L, k_dim] to output [L, heads, v_dim], greatest scores and sums [heads, L]."""
        pages = self._pages(host, segment, layer_index)
        low, high = _visible(segment, query_start, q.shape[1], window)
        run = self._decode if q.shape[1] <= DECODE_QUERIES else self._prefill
        return run(pages, segment.layer_format, q, low, high, scale * LOG2_E)

    def _pages(self, host: HostPages, segment: Segment, layer_index: int) -> _Pages:
        """Addresses of the pages of a part of a segment (see `_split`)."""
        if segment.tail is not None:
            return _tail_pages(segment)
        frames = segment.block_table[: -(-segment.tokens // PAGE_TOKENS)]
        layout = host.layout(frames[0])
        known = self._places.setdefault(layout, {})
        places = known.get(layer_index)
        if places is None:
            tensors = layout.layer_tensors(layer_index)
            offsets = np.array([tensor.offset_bytes for tensor in tensors], np.int64)
            lengths = np.array([tensor.tensor_bytes // layout.kv_heads for tensor in tensors], np.int64)
            places = known[layer_index] = offsets + np.arange(layout.kv_heads)[:, None, None] * lengths
        bases = np.array([host.address(frame) for frame in frames], np.int64)
        return _Pages(bases[:, None] + places, layout.kv_heads, layout.v_dim, ())

    def _decode(
        self, pages: _Pages, layer_format: LayerFormat, q: Floats, low: Integers, high: Integers, factor: float
    ) -> tuple[Floats, Floats, Floats]:
        """Output [L, heads, v_dim], greatest scores and sums [heads, L], position by position."""
        heads, length, k_dim = q.shape
        kernel, scratch = self._decode_kernel(layer_format, heads // pages.kv_heads, k_dim, pages.v_dim)
        out = np.empty((length, heads, pages.v_dim), np.float32)
        top, total = np.empty((2, length, heads), np.float32)
        for i in range(length):
            one = np.ascontiguousarray(q[:, i])
            seen_low, seen_high = int(low[i]), int(high[i])
            first, stop = seen_low // PAGE_TOKENS, -(-seen_high // PAGE_TOKENS)
            if seen_low >= seen_high:
                stop = first
            seen = np.full((stop - first, 2), (0, PAGE_TOKENS), np.int64)
            if stop > first:
                seen[0, 0], seen[-1, 1] = seen_low - first * PAGE_TOKENS, seen_high - (stop - 1) * PAGE_TOKENS
            kernel(
                pages.kv_heads,
                stop - first,
                pages.table.shape[1],
                pages.table.ctypes.data + first * pages.table.strides[1],
                seen.ctypes.data,
                one.ctypes.data,
                factor,
                scratch,
                out[i].ctypes.data,
                top[i].ctypes.data,
                total[i].ctypes.data,
            )
        return out, top.T, total.T

    def _decode_kernel(
        self, layer_format: LayerFormat, repeats: int, k_dim: int, v_dim: int
    ) -> tuple[Callable[..., None], int]:
        """The kernel of a shape and the address of its scratch."""
        key = (layer_format, repeats, k_dim, v_dim)
        found = self._kernels.get(key)
        if found is None:
            rows = next(n for n in range(min(repeats, DECODE_ROWS), 0, -1) if repeats % n == 0)
            k, v = layer_format.k, layer_format.v
            shape = DecodeShape(side_shape(k.bits, k.group, k_dim), side_shape(v.bits, v.group, v_dim), rows, repeats)
            scratch = np.empty(shape.scratch_floats, np.float32)
            found = self._kernels[key] = (decode_kernel(shape), scratch)
        return found[0], found[1].ctypes.data

    def _prefill(
        self, pages: _Pages, layer_format: LayerFormat, q: Floats, low: Integers, high: Integers, factor: float
    ) -> tuple[Floats, Floats, Floats]:
        """Output [L, heads, v_dim], greatest scores and sums [heads, L]."""
        heads, length, k_dim = q.shape
        repeats = heads // pages.kv_heads
        block = max(1, min(SHORT_BLOCK if length <= SHORT_STEP else MAX_BLOCK, PREFILL_ROWS // repeats))
        k, v = layer_format.k, layer_format.v
        sides = side_shape(k.bits, k.group, k_dim), side_shape(v.bits, v.group, pages.v_dim)
        shape = PrefillShape(*sides, repeats, block)
        kernel = prefill_kernel(shape)
        out = np.empty((length, heads, pages.v_dim), np.float32)
        top, total = np.empty((heads, length), np.float32), np.empty((heads, length), np.float32)
        items = pages.kv_heads * -(-length // block)
        is_long = length * pages.table.shape[1] * PAGE_TOKENS >= PARALLEL_PRODUCTS
        threads = min(self._threads, items) if is_long else 1

        def work(thread: int) -> None:
            kernel(
                thread,
                items,
                threads,
                length,
                heads,
                pages.table.shape[1],
                pages.table.ctypes.data,
                low.ctypes.data,
                high.ctypes.data,
                q.ctypes.data,
                q.strides[0] // 4,
                q.strides[1] // 4,
                factor,
                scratch[thread],
                out.ctypes.data,
                top.ctypes.data,
                total.ctypes.data,
                self._blas.sgemm,
            )

        scratch = [self._scratch_of(thread, shape.scratch_floats).ctypes.data for thread in range(threads)]
        with self._blas.one_thread():
            _run_threads(work, threads)
        return out, top, total

    def _scratch_of(self, thread: int, floats: int) -> Floats:
        """A thread's scratch; what is in it means nothing."""
        held = self._scratch.get(thread)
        if held is None or held.size < floats:
            held = self._scratch[thread] = np.empty(floats, np.float32)
        return held


def _run_threads(work: Callable[[int], None], threads: int) -> None:
    """`work` for each number below `threads`, one of them here; all have ended on return.

    Raises:
        BaseException: the first that any of them raised.
    """
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    others = [threading.Thread(target=guarded, args=(number,), name="kvd-attention") for number in range(1, threads)]
    started: list[threading.Thread] = []
    try:
        for other in others:
            other.start()
            started.append(other)
        guarded(0)
    finally:
        for other in started:
            other.join()
    if failures:
        raise failures[0]


def _host_array(queries: mx.array) -> Floats:
    """mx [1, heads, L, dim] as float32 numpy [heads, L, dim] whose last axis is contiguous; a view where possible."""
    queries = queries.astype(mx.float32)
    mx.eval(queries)
    array: Floats = np.array(queries, copy=False)[0]
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def _split(segment: Segment) -> list[Segment]:
    """The tokens in frames and those in an open tail, as segments of their own; parts without tokens are left out."""
    if segment.tail is None:
        return [segment] if segment.runs and segment.tokens else []
    if not segment.tail.tokens:
        return [replace(segment, tail=None)] if segment.tokens else []
    paged, rest = _cut_runs(segment.runs, segment.paged_tokens)
    parts = [replace(segment, runs=paged, tail=None)] if segment.paged_tokens else []
    return [*parts, replace(segment, block_table=(), runs=rest)]


def _cut_runs(runs: Sequence[Run], tokens: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The runs of the first `tokens` tokens and those of the others."""
    before: list[Run] = []
    after: list[Run] = []
    for start, count in runs:
        here = min(max(tokens, 0), count)
        before += [Run(start, here)] if here else []
        after += [Run(start + here, count - here)] if count > here else []
        tokens -= here
    return tuple(before), tuple(after)


def _tail_pages(segment: Segment) -> _Pages:
    """Addresses of an open tail outside the pool, copied into whole pages."""
    assert segment.tail is not None
    arrays = _padded(segment.tail)
    kv_heads, v_dim = len(arrays[3]), arrays[3].shape[2] * 32 // segment.layer_format.v.bits
    strides = np.array([array.strides for array in arrays], np.int64)
    heads = np.array([array.ctypes.data for array in arrays]) + np.arange(kv_heads)[:, None] * strides[:, 0]
    begins = np.arange(0, arrays[0].shape[1], PAGE_TOKENS)[:, None] * strides[:, 1]
    return _Pages(np.ascontiguousarray(heads[:, None] + begins), kv_heads, v_dim, tuple(arrays))


def _padded(tail: TailArrays) -> list[npt.NDArray[Any]]:
    """A tail's six arrays, as long as whole pages: kernels read whole blocks of tokens."""
    arrays: list[npt.NDArray[Any]] = []
    for side in (tail.k, tail.v):
        for part in side:
            source = np.array(part)[:, : tail.tokens]
            tokens = -(-tail.tokens // PAGE_TOKENS) * PAGE_TOKENS
            page = np.zeros((source.shape[0], tokens, source.shape[2]), source.dtype)
            page[:, : tail.tokens] = source
            arrays.append(page)
    return arrays


def _visible(segment: Segment, query_start: int, queries: int, window: int | None) -> tuple[Integers, Integers]:
    """Which of the segment's tokens each query sees: int64 [queries] first and one past the last.

    Positions ascend within a segment, so what a query sees is one range of its tokens.
    """
    positions = np.arange(query_start, query_start + queries, dtype=np.int64)
    oldest = np.zeros(queries, np.int64) if window is None else positions - (window - 1)
    if len(segment.runs) == 1:
        start, tokens = segment.runs[0]
        high = np.minimum(np.maximum(positions + (1 - start), 0), tokens)
        return np.minimum(np.maximum(oldest - start, 0), high), high
    known = positions_of(segment.runs)
    high = np.searchsorted(known, positions, "right").astype(np.int64)
    return np.minimum(np.searchsorted(known, oldest).astype(np.int64), high), high


__all__ = ["CpuBackend"]
