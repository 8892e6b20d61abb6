"""The attention backend `cuda`: decoding straight from packed pages, prefill over dequantised ones.

A decode step is one kernel for all rows (`kernels.decode`). A chunk dequantises the tokens it can see into contiguous
arrays, a layer at a time, and uses mlx's fused attention where it has one for the shape; elsewhere queries in blocks,
so that scores never exceed a bound. Everything is lazy: nothing waits for the GPU inside a step.

The log-sum-exp of a long chunk is not computed (fused attention does not return it, and nobody merges it): it is NaN.
May import mlx, numpy, kvd.attention, kvd.errors, kvd.ids, kvd.quant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.attention.cuda import kernels
from kvd.attention.cuda.kernels import Bits, Stream
from kvd.attention.cuda.pool import DevicePool
from kvd.attention.errors import BackendUnavailable
from kvd.attention.interface import AttentionOutput, PageSource, Row, Segment, merge, with_sinks
from kvd.errors import InternalError
from kvd.ids import FrameId
from kvd.quant.spec import PAGE_TOKENS, PageLayout

FUSED_WIDTHS: Final = (64, 80, 96, 128)
"""Head widths for which mlx attends in one fused kernel on this kind of GPU, K and V alike."""

SCORE_ELEMENTS: Final = 1 << 26
"""Most scores that exist at once where attention is not fused."""

LEAST_CAPABILITY: Final = 9
"""Major compute capability: the kernels take up to 227 KiB of shared memory a multiprocessor (Hopper)."""

LSE_ELEMENTS: Final = 1 << 22
"""The log-sum-exp of a chunk is computed up to so many scores (self-tests, short prompts)."""

LAUNCHES_AHEAD: Final = 4
"""After so many decode launches the device is set to work, while the host builds the rest of the step."""

IntArray = npt.NDArray[np.int64]

_KEPT_TABLES: Final = 16

_right_layouts: Final[dict[int, PageLayout]] = {}
"""Layouts that `_checked` found right, by id; kept alive here, so that an id stays theirs."""


class _Plan(NamedTuple):
    """Tables of a launch.

    Attributes:
        streams: bits, layout, addresses of frames, spans.
        longest: tokens of the longest row.
        tables: the block tables it was made from.
    """

    streams: tuple[tuple[Bits, PageLayout, mx.array, mx.array], ...]
    longest: int
    tables: tuple[tuple[FrameId, ...], ...]


class CudaBackend:
    """Attention over pages in device memory (implements `AttentionBackend`).

    Raises:
        BackendUnavailable: mlx has no CUDA device here.
    """

    name = "cuda"

    def __init__(self) -> None:
        if not (hasattr(mx, "cuda") and mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu):
            raise BackendUnavailable("mlx computes on no CUDA device here")
        if int(mx.device_info().get("compute_capability_major", 0)) < LEAST_CAPABILITY:
            raise BackendUnavailable(f"the cuda kernels are laid out for compute capability {LEAST_CAPABILITY} and up")
        self._counters = mx.zeros((64,), mx.int32)
        self._after = mx.zeros((4,), mx.float32)
        mx.eval(self._counters, self._after)
        self._launches = 0
        self._plans: dict[tuple[object, ...], _Plan] = {}
        # Tables of a step are the same in all layers: by identity of the block tables, which are kept alive with them.
        self._tables: dict[tuple[int, ...], tuple[mx.array, object]] = {}
        self._spans: dict[tuple[int, ...], tuple[mx.array, object]] = {}

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
        """See `AttentionBackend.attend`; the result is lazy, in order with later writes to the pool."""
        if not isinstance(pages, DevicePool):
            raise InternalError(f"pages of {type(pages).__name__} are not in device memory")
        length = queries.shape[2]
        if length == 1:
            return with_sinks(self._decode(pages, queries, layer_index, rows, scale, window), sinks)
        results = []
        for index, row in enumerate(rows):
            one = queries[index : index + 1]
            results.append(self._prefill(pages, one, layer_index, row, scale, window, sinks))
        if len(results) == 1:
            return results[0]
        return AttentionOutput(mx.concatenate([r.out for r in results]), mx.concatenate([r.lse for r in results]))

    def append(
        self,
        pages: PageSource,
        keys: mx.array,
        values: mx.array,
        *,
        layer_index: int,
        targets: Sequence[tuple[tuple[FrameId, ...], int]],
    ) -> None:
        """See `DeviceWriter.append`."""
        if not isinstance(pages, DevicePool):
            raise InternalError(f"pages of {type(pages).__name__} are not in device memory")
        layout = _checked(pages.layout(targets[0][0][0]))
        layer_format = layout.page_format.layers[layout.layer_indices.index(layer_index)]
        starts = self.whole_numbers([start for _, start in targets])
        frames = self.frame_table(pages, [table for table, _ in targets])
        stream = Stream(frames, pages.places(layout, layer_index), starts)
        bits = Bits(layer_format.k.bits, layer_format.v.bits)
        pages.append(keys, values.astype(keys.dtype), bits, stream, starts)

    # ---- decode ------------------------------------------------------------------------------------------------------

    def _decode(
        self,
        pages: DevicePool,
        queries: mx.array,
        layer_index: int,
        rows: Sequence[Row],
        scale: float,
        window: int | None,
    ) -> AttentionOutput:
        """One query a row; no sinks."""
        kinds = {tuple((segment.layer_format, id(segment.conditioning)) for segment in row.segments) for row in rows}
        if len(kinds) > 1:
            parts = [
                self._decode(pages, queries[i : i + 1], layer_index, [row], scale, window) for i, row in enumerate(rows)
            ]
            return AttentionOutput(mx.concatenate([p.out for p in parts]), mx.concatenate([p.lse for p in parts]))
        columns = [[row.segments[at] for row in rows] for at in range(len(rows[0].segments))]
        alike = all(column[0].conditioning is columns[0][0].conditioning for column in columns)
        launches = [columns] if alike and len(columns) <= 2 else [[column] for column in columns]
        return merge_lazily(
            [self._launch(pages, queries, layer_index, launch, rows, scale, window) for launch in launches]
        )

    def _launch(
        self,
        pages: DevicePool,
        queries: mx.array,
        layer_index: int,
        columns: Sequence[Sequence[Segment]],
        rows: Sequence[Row],
        scale: float,
        window: int | None,
    ) -> AttentionOutput:
        """One kernel over one or two segments of every row, all with the same conditioning."""
        plan = self._plan(pages, columns, rows, window)
        streams = [
            (bits, Stream(frames, pages.places(layout, layer_index), spans))
            for bits, layout, frames, spans in plan.streams
        ]
        layout = plan.streams[0][1]
        conditioning = columns[0][0].conditioning
        conditioned = queries if conditioning is None else conditioning.condition_queries(queries).astype(queries.dtype)
        cells = len(rows) * queries.shape[1]
        if cells > self._counters.size:
            self._counters = mx.zeros((cells,), mx.int32)
            mx.eval(self._counters)
        out, lse = kernels.decode(
            conditioned,
            streams,
            kv_heads=layout.kv_heads,
            v_dim=layout.v_dim,
            longest=plan.longest,
            scale=scale,
            counters=self._counters,
            order=pages.order,
            after=self._after,
        )
        self._after = lse
        pages.readers = [lse]  # later launches take it as an input, so the last one stands for all
        self._launches += 1
        if self._launches % LAUNCHES_AHEAD == 0:
            mx.async_eval(out)  # type: ignore[no-untyped-call]
        if conditioning is not None:
            lse = lse + scale * conditioning.centre_term(queries)
        return AttentionOutput(out, lse)

    def _plan(
        self, pages: DevicePool, columns: Sequence[Sequence[Segment]], rows: Sequence[Row], window: int | None
    ) -> _Plan:
        """Tables of a launch; the same for all layers of a group in a step, so found again by what they are made of."""
        key = (
            id(pages),
            pages.epoch,
            window,
            *(
                (id(segment.block_table), segment.layer_format, segment.runs, row.query_start)
                for column in columns
                for segment, row in zip(column, rows, strict=True)
            ),
        )
        found = self._plans.get(key)
        if found is not None:
            return found
        streams = []
        longest = 0
        for column in columns:
            spans = [_seen(segment, row, window) for segment, row in zip(column, rows, strict=True)]
            longest += max(1, *(end - begin for begin, end in spans))
            bits = Bits(column[0].layer_format.k.bits, column[0].layer_format.v.bits)
            frames = self.frame_table(pages, [segment.block_table for segment in column])
            numbers = self.whole_numbers([number for span in spans for number in span])
            streams.append((bits, _layout(pages, column), frames, numbers))
        if len(self._plans) >= _KEPT_TABLES:
            del self._plans[next(iter(self._plans))]
        # the tables are kept, so that their ids stay theirs
        plan = self._plans[key] = _Plan(tuple(streams), longest, tuple(s.block_table for c in columns for s in c))
        return plan

    def frame_table(self, pages: DevicePool, tables: Sequence[tuple[FrameId, ...]]) -> mx.array:
        """uint64 [B, pages] in device memory: addresses of the frames of block tables, made once for equal objects."""
        key = (id(pages), pages.epoch, *(id(table) for table in tables))
        found = self._tables.get(key)
        if found is None:
            width = max(2, *(len(table) for table in tables))
            host = np.zeros((len(tables), width), np.uint64)
            for at, table in enumerate(tables):
                host[at, : len(table)] = [pages.device_address(frame) for frame in table]
            found = _kept(self._tables, key, mx.array(host), tuple(tables))
        return found[0]

    def whole_numbers(self, values: Sequence[int]) -> mx.array:
        """int32, at least 4 more than given, in device memory; made once for the numbers of a step."""
        key = tuple(values)
        found = self._spans.get(key)
        if found is None:
            found = _kept(self._spans, key, mx.array([*values, 0, 0, 0, 0], mx.int32), None)
        return found[0]

    # ---- prefill -----------------------------------------------------------------------------------------------------

    def _prefill(
        self,
        pages: DevicePool,
        queries: mx.array,
        layer_index: int,
        row: Row,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        *,
        lse: bool = False,
    ) -> AttentionOutput:
        """A chunk of one row over all its segments; its log-sum-exp is computed if wanted or cheap."""
        segments = [segment for segment in row.segments if segment.tokens]
        conditioning = segments[0].conditioning
        if any(segment.conditioning is not conditioning for segment in segments):
            parts = [
                self._prefill(
                    pages, queries, layer_index, replace(row, segments=(each,)), scale, window, None, lse=True
                )
                for each in segments
            ]
            return with_sinks(merge(parts), sinks)
        length = queries.shape[2]
        layout = _checked(pages.layout(segments[0].block_table[0]))
        keys, values, positions = [], [], []
        for segment in segments:
            if segment.tail is not None:
                raise BackendUnavailable("the cuda backend reads open tails from frames")
            where = np.concatenate([np.arange(run.start, run.start + run.tokens) for run in segment.runs])
            first = 0
            if window is not None:
                first = int(np.searchsorted(where, row.query_start - window + 1)) // PAGE_TOKENS * PAGE_TOKENS
            stream = Stream(
                self.frame_table(pages, [segment.block_table]),
                pages.places(pages.layout(segment.block_table[0]), layer_index),
                self._after,
            )
            k, v = kernels.dequantise(
                Bits(segment.layer_format.k.bits, segment.layer_format.v.bits),
                stream,
                first,
                segment.tokens - first,
                kv_heads=layout.kv_heads,
                k_dim=layout.k_dim,
                v_dim=layout.v_dim,
                dtype=queries.dtype,
                order=pages.order,
            )
            keys.append(k)
            values.append(v)
            positions.append(where[first:])
        k = keys[0] if len(keys) == 1 else mx.concatenate(keys, axis=2)
        v = values[0] if len(values) == 1 else mx.concatenate(values, axis=2)
        where = positions[0] if len(positions) == 1 else np.concatenate(positions)
        plain = len(segments) == 1 and window is None and len(segments[0].runs) == 1
        conditioned = queries if conditioning is None else conditioning.condition_queries(queries).astype(queries.dtype)
        # conditioned scores lack the centre's term, which only a sink does not share
        inner = None if conditioning is not None else sinks
        heads, tokens = queries.shape[1], k.shape[2]
        block = length if _is_fused(queries.dtype, layout) else max(1, SCORE_ELEMENTS // (heads * tokens))
        outs = []
        for start in range(0, length, block):
            end = min(start + block, length)
            mask: str | mx.array
            stop = tokens
            if plain:
                mask, stop = "causal", tokens - (length - end)
            else:
                mask = mx.array(_visible(where, row.query_start + start, end - start, window))
            outs.append(
                mx.fast.scaled_dot_product_attention(
                    conditioned[:, :, start:end], k[:, :, :stop], v[:, :, :stop], scale=scale, mask=mask, sinks=inner
                )
            )
        out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)
        pages.readers = [*pages.readers, out]
        outside = None if conditioning is None else sinks
        if outside is None and not lse and heads * length * tokens > LSE_ELEMENTS:
            return AttentionOutput(out, mx.full((1, heads, length), mx.nan))
        rows_at_once = max(1, LSE_ELEMENTS // (heads * tokens))
        parts_of_lse = []
        for start in range(0, length, rows_at_once):
            part = conditioned[:, :, start : start + rows_at_once]
            seen = mx.array(_visible(where, row.query_start + start, part.shape[2], window))
            parts_of_lse.append(_log_sum_exp(part, k, seen, scale))
        total = mx.concatenate(parts_of_lse, axis=2)
        if conditioning is not None:
            total = total + scale * conditioning.centre_term(queries)
        if inner is not None:
            total = mx.logaddexp(total, inner.astype(mx.float32)[None, :, None])
        return with_sinks(AttentionOutput(out, total), outside)


def merge_lazily(parts: Sequence[AttentionOutput]) -> AttentionOutput:
    """`interface.merge`, of one part without evaluating it."""
    return parts[0] if len(parts) == 1 else merge(parts)


def _kept(
    kept: dict[tuple[int, ...], tuple[mx.array, object]], key: tuple[int, ...], host: mx.array, alive: object
) -> tuple[mx.array, object]:
    """Put a device copy of `host` into a small table, the oldest entry of which goes."""
    if len(kept) >= _KEPT_TABLES:
        del kept[next(iter(kept))]
    # not evaluated here, which would wait for the device: the step that uses it does
    entry = kept[key] = (kernels.on_device(host), (host, alive))
    return entry


def _layout(pages: DevicePool, column: Sequence[Segment]) -> PageLayout:
    """Layout of the pages of some segments of one format."""
    for segment in column:
        if segment.tail is not None:
            raise BackendUnavailable("the cuda backend reads open tails from frames")
        if segment.block_table:
            return _checked(pages.layout(segment.block_table[0]))
    raise InternalError("no row of the batch has a page")


def _checked(layout: PageLayout) -> PageLayout:
    """The layout, if the kernels can read and write it; raises BackendUnavailable.

    Asked for in every layer of a step, so what was found right is known by identity: hashing formats costs more than
    a launch.
    """
    if _right_layouts.get(id(layout)) is layout:
        return layout
    for layer_format in set(layout.page_format.layers):
        kernels.check_side(layer_format.k, layout.k_dim)
        kernels.check_side(layer_format.v, layout.v_dim)
    if len(_right_layouts) >= _KEPT_TABLES:
        _right_layouts.clear()
    _right_layouts[id(layout)] = layout
    return layout


def _seen(segment: Segment, row: Row, window: int | None) -> tuple[int, int]:
    """Tokens [begin, end) of a segment that a query at the row's start sees: a window hides a prefix."""
    if window is None:
        return 0, segment.tokens
    first = row.query_start - window + 1
    hidden = sum(min(max(first - run.start, 0), run.tokens) for run in segment.runs)
    return hidden, segment.tokens


def _is_fused(dtype: mx.Dtype, layout: PageLayout) -> bool:
    return dtype in (mx.bfloat16, mx.float16) and layout.k_dim == layout.v_dim and layout.k_dim in FUSED_WIDTHS


def _visible(where: IntArray, start: int, count: int, window: int | None) -> npt.NDArray[np.bool_]:
    """bool [count, tokens]: what queries at positions start.. see of keys at positions `where`."""
    ages = np.arange(start, start + count)[:, None] - where[None]
    seen: npt.NDArray[np.bool_] = ages >= 0
    return seen if window is None else seen & (ages < window)


def _log_sum_exp(queries: mx.array, keys: mx.array, seen: mx.array, scale: float) -> mx.array:
    """float32 [1, heads, L] of scores mx [1, heads, L, tokens]."""
    heads, kv_heads = queries.shape[1], keys.shape[1]
    repeated = mx.repeat(keys, heads // kv_heads, axis=1) if heads != kv_heads else keys
    scores = scale * (queries.astype(mx.float32) @ repeated.astype(mx.float32).swapaxes(-1, -2))
    return mx.logsumexp(mx.where(seen, scores, -mx.inf), axis=-1)


__all__ = ["CudaBackend"]
