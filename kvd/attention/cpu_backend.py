"""The backend for Linux CPUs: compiled kernels that read packed pages in place.

Decoding (a few query positions) runs `kvd.attention.cpu_decode`, which never dequantises, for all rows of a batch at
once (`kvd.attention.cpu_rows`); longer steps run `kvd.attention.cpu_prefill`, row by row. Work items of both are spread
over as many threads as BLAS has. A thread's scratch is kept from call to call. Results do not depend on the number of
threads: an item is computed by one thread, in one order.

May import mlx, numpy, kvd.native, kvd.quant, kvd.attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.attention.cpu_decode import DecodeShape, decode_kernel, side_shape
from kvd.attention.cpu_prefill import PrefillShape, prefill_kernel
from kvd.attention.cpu_rows import Pieces, Span, StepPlan, cut, decode, plan_step, run_threads, visible
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
    with_sinks,
)
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
        self._kernels: dict[Any, tuple[Callable[..., None], int]] = {}

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
        if len(rows) > 1 and queries.shape[2] <= DECODE_QUERIES and _alike(host, rows):
            answer = with_sinks(self._attend_rows(host, queries, layer_index, rows, scale, window), sinks)
            mx.eval(answer)
            return answer

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
        return _output(out[None], top[None], total[None], queries, segment, scale)

    def plan_host(self, pages: PageSource, *, rows: Sequence[Row], length: int, window: int | None = None) -> StepPlan:
        """Prepare `attend_host` for the layers of a cache group.

        Args:
            pages: the pool.
            rows: one segment each, in pages of one layout; no open tails.
            length: queries of each row.
            window: tokens a query sees, itself included; None for all before it.

        Returns:
            A plan, valid as long as no frame of the rows is dropped or mapped otherwise: that of one step.
        """
        host = host_pages(pages)
        layout = host.layout(rows[0].segments[0].block_table[0])
        return self._plan(host, layout, rows, length, window)

    def attend_host(
        self, plan: StepPlan, queries: Floats, *, layer_index: int, layer_format: LayerFormat, scale: float
    ) -> Floats:
        """`attend` from numpy to numpy.

        Args:
            plan: of the step.
            queries: float32 [rows * L, heads, k_dim], after RoPE, conditioned already if the rows' keys are.
            layer_index: index of the layer in the model.
            layer_format: how it is quantised.
            scale: factor of the scores.

        Returns:
            float32 [rows * L, heads, v_dim].
        """
        if plan.pieces is not None:
            return self._decode_plan(plan, queries, layer_index, layer_format, scale)[0]
        places, layout = self._places_of(plan.layout, layer_index), plan.layout
        parts = []
        for number, (part, (low, high)) in enumerate(zip(plan.ranges, plan.visible, strict=True)):
            pages = _Pages(plan.bases[part, None] + places, layout.kv_heads, layout.v_dim, ())
            q = queries[number * plan.length : (number + 1) * plan.length].swapaxes(0, 1)
            parts.append(self._prefill(pages, layer_format, q, low, high, scale * LOG2_E)[0])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _plan(
        self, host: HostPages, layout: PageLayout, rows: Sequence[Row], length: int, window: int | None
    ) -> StepPlan:
        return plan_step(
            host.address,
            layout,
            rows,
            length=length,
            window=window,
            is_decode=length <= DECODE_QUERIES,
            threads=self._threads,
        )

    def _decode_plan(
        self, plan: StepPlan, q: Floats, layer_index: int, layer_format: LayerFormat, scale: float
    ) -> tuple[Floats, Floats, Floats]:
        """Queries float32 [rows * L, heads, k_dim] to output, greatest scores and sums of each."""
        assert plan.pieces is not None
        table = plan.bases[:, None] + self._places_of(plan.layout, layer_index)
        v_dim = plan.layout.v_dim
        return self._decode_pieces(plan.pieces, table, v_dim, layer_format, q, scale * LOG2_E)

    def _attend_rows(
        self,
        host: HostPages,
        queries: mx.array,
        layer_index: int,
        rows: Sequence[Row],
        scale: float,
        window: int | None,
    ) -> AttentionOutput:
        """Several rows of few queries that are alike (see `_alike`), in one go: mx [B, heads, L, k_dim]; no sinks."""
        segment, (batch, heads, length, k_dim) = rows[0].segments[0], queries.shape
        plan = self._plan(host, host.layout(segment.block_table[0]), rows, length, window)
        conditioned = queries if segment.conditioning is None else segment.conditioning.condition_queries(queries)
        laid = conditioned.astype(mx.float32).swapaxes(1, 2).reshape(batch * length, heads, k_dim)
        mx.eval(laid)
        q: Floats = np.ascontiguousarray(np.array(laid, copy=False))
        out, top, total = self._decode_plan(plan, q, layer_index, segment.layer_format, scale)
        top, total = (each.reshape(batch, length, heads).swapaxes(1, 2) for each in (top, total))
        return _output(out.reshape(batch, length, heads, -1), top, total, queries, segment, scale)

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
        low, high = visible(segment, query_start, q.shape[1], window)
        run = self._decode if q.shape[1] <= DECODE_QUERIES else self._prefill
        return run(pages, segment.layer_format, q, low, high, scale * LOG2_E)

    def _pages(self, host: HostPages, segment: Segment, layer_index: int) -> _Pages:
        """Addresses of the pages of a part of a segment (see `_split`)."""
        if segment.tail is not None:
            return _tail_pages(segment)
        frames = segment.block_table[: -(-segment.tokens // PAGE_TOKENS)]
        layout = host.layout(frames[0])
        bases = np.array([host.address(frame) for frame in frames], np.int64)
        return _Pages(bases[:, None] + self._places_of(layout, layer_index), layout.kv_heads, layout.v_dim, ())

    def _places_of(self, layout: PageLayout, layer_index: int) -> Integers:
        """Where a layer's tensors lie in a frame: int64 [kv_heads, 1, 6]."""
        known = self._places.setdefault(layout, {})
        places = known.get(layer_index)
        if places is None:
            tensors = layout.layer_tensors(layer_index)
            offsets = np.array([tensor.offset_bytes for tensor in tensors], np.int64)
            lengths = np.array([tensor.tensor_bytes // layout.kv_heads for tensor in tensors], np.int64)
            places = known[layer_index] = offsets + np.arange(layout.kv_heads)[:, None, None] * lengths
        return places

    def _decode(
        self, pages: _Pages, layer_format: LayerFormat, q: Floats, low: Integers, high: Integers, factor: float
    ) -> tuple[Floats, Floats, Floats]:
        """Output [L, heads, v_dim], greatest scores and sums [heads, L], position by position."""
        spans = [Span(0, int(first), int(stop)) for first, stop in zip(low, high, strict=True)]
        values = q.shape[2] + pages.v_dim
        pieces = cut(spans, kv_heads=pages.kv_heads, values=values, threads=self._threads)
        laid = np.ascontiguousarray(q.swapaxes(0, 1))
        out, top, total = self._decode_pieces(pieces, pages.table, pages.v_dim, layer_format, laid, factor)
        return out, top.T, total.T

    def _decode_pieces(
        self, pieces: Pieces, table: Integers, v_dim: int, layer_format: LayerFormat, q: Floats, factor: float
    ) -> tuple[Floats, Floats, Floats]:
        """Queries float32 [queries, heads, k_dim] to output, greatest scores and sums of each."""
        kernel, floats = self._decode_kernel(layer_format, q.shape[1] // len(table), q.shape[2], v_dim)

        def scratch(thread: int) -> int:
            return scratches[thread]

        scratches = [self._scratch_of(thread, floats).ctypes.data for thread in range(len(pieces.shares))]
        return decode(kernel, scratch, pieces, table, q, v_dim=v_dim, factor=factor)

    def _decode_kernel(
        self, layer_format: LayerFormat, repeats: int, k_dim: int, v_dim: int
    ) -> tuple[Callable[..., None], int]:
        """The kernel of a shape and how much scratch it needs, in floats."""
        key = (layer_format, repeats, k_dim, v_dim)
        found = self._kernels.get(key)
        if found is None:
            rows = next(n for n in range(min(repeats, DECODE_ROWS), 0, -1) if repeats % n == 0)
            k, v = layer_format.k, layer_format.v
            shape = DecodeShape(side_shape(k.bits, k.group, k_dim), side_shape(v.bits, v.group, v_dim), rows, repeats)
            found = self._kernels[key] = (decode_kernel(shape), shape.scratch_floats)
        return found

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
            run_threads(work, threads)
        return out, top, total

    def _scratch_of(self, thread: int, floats: int) -> Floats:
        """A thread's scratch; what is in it means nothing."""
        held = self._scratch.get(thread)
        if held is None or held.size < floats:
            held = self._scratch[thread] = np.empty(floats, np.float32)
        return held


def _host_array(queries: mx.array) -> Floats:
    """mx [1, heads, L, dim] as float32 numpy [heads, L, dim] whose last axis is contiguous; a view where possible."""
    queries = queries.astype(mx.float32)
    mx.eval(queries)
    array: Floats = np.array(queries, copy=False)[0]
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def _alike(host: HostPages, rows: Sequence[Row]) -> bool:
    """Whether rows are one segment each, not empty, in pages of one layout, with the same constants and no tails."""
    if any(len(row.segments) != 1 or row.segments[0].tail is not None or not row.segments[0].tokens for row in rows):
        return False
    first, *others = (row.segments[0] for row in rows)
    layout = host.layout(first.block_table[0]).format_id
    return all(
        segment.conditioning is first.conditioning and host.layout(segment.block_table[0]).format_id == layout
        for segment in others
    )


def _output(
    out: Floats, top: Floats, total: Floats, queries: mx.array, segment: Segment, scale: float
) -> AttentionOutput:
    """Kernel results [B, L, heads, v_dim] and twice [B, heads, L] in the interface's terms; the queries are raw."""
    seen = total > 0
    lse = mx.array(np.where(seen, top + np.log2(np.where(seen, total, np.float32(1))), -np.inf) * _LN_2)
    if segment.conditioning is not None:
        lse = lse + scale * segment.conditioning.centre_term(queries)
    answer = mx.array(out).swapaxes(1, 2)
    return AttentionOutput(answer if queries.dtype == mx.float32 else answer.astype(queries.dtype), lse)


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


__all__ = ["CpuBackend"]
