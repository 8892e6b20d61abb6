"""What every attention backend is asked and what it answers. The signature is fixed.

Theory of operation. A *segment* is a stream of tokens in pages of one format. A *row* is one sequence of the batch: its
segments and where its queries start. Block tables and lengths are per row, so nothing is padded or copied between
requests. Keys are cached after RoPE, so the order of keys does not matter; the mask does: key position p is visible to
query position t when p <= t and, under a window, t - p < window. Positions are those of the segment's `runs`: where a
sequence is split into a high and a low precision segment, the tokens of one segment do not follow each other, those of
the running chunk included. Each result carries its log-sum-exp, so partial results over different segments (or formats,
or devices) merge exactly.

How pages are stored is between a pool and the backends that read it: `PageSource` says only what a frame holds, and
each backend narrows it (on CPU to `HostPages`). A segment's open tail may lie in arrays of its own (`TailArrays`),
since some pools cannot append to a page in place.

May import mlx, numpy, kvd.errors, kvd.ids, kvd.quant, kvd.store.frame_pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import mlx.core as mx
import numpy.typing as npt

from kvd.errors import InternalError
from kvd.ids import FrameId
from kvd.quant.conditioning import LayerConditioning
from kvd.quant.spec import LayerFormat, PageLayout
from kvd.store.frame_pool import LayerArrays

TailArray = npt.NDArray[Any] | mx.array
"""An array of the open tail, where its pool keeps it."""


class Run(NamedTuple):
    """Tokens of a segment that follow each other in the sequence.

    Attributes:
        start: position in the sequence of the first.
        tokens: how many.
    """

    start: int
    tokens: int


class TailSide(NamedTuple):
    """Keys or values of an open tail; tokens beyond those of `TailArrays` mean nothing.

    Attributes:
        codes: uint32 [kv_heads, capacity, words].
        scales: uint16 [kv_heads, capacity, groups], bf16 bits.
        biases: as `scales`.
    """

    codes: TailArray
    scales: TailArray
    biases: TailArray


class TailArrays(NamedTuple):
    """The open tail of one layer of a segment in arrays of its own, outside the pool.

    Attributes:
        k: keys.
        v: values.
        tokens: tokens that are valid.
    """

    k: TailSide
    v: TailSide
    tokens: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stream of tokens in pages of one format, as one layer sees it.

    Attributes:
        block_table: frames of its pages in order, the last may be partly filled; at least ceil(paged_tokens / 256).
        runs: positions of its tokens, in order, ascending; one run for a uniform segment (it starts at a multiple of
            256 where older pages of a sliding group are not mapped, else at 0).
        layer_format: how K and V of this layer are quantised.
        conditioning: operators of the layer's key conditioning; None for raw keys.
        tail: its last tokens, when they are not in a frame of the block table.
    """

    block_table: tuple[FrameId, ...]
    runs: tuple[Run, ...]
    layer_format: LayerFormat
    conditioning: LayerConditioning | None = None
    tail: TailArrays | None = None

    def __post_init__(self) -> None:
        """Raises InternalError when runs overlap or descend, or the tail has more tokens than they have."""
        end = 0
        for run in self.runs:
            if run.start < end or run.tokens < 0:
                raise InternalError(f"runs of a segment must ascend: {self.runs}")
            end = run.start + run.tokens
        if self.paged_tokens < 0:
            raise InternalError(f"the open tail has more tokens than the segment's {self.tokens}")

    @property
    def tokens(self) -> int:
        """Tokens to attend over, the open tail included."""
        return sum(run.tokens for run in self.runs)

    @property
    def paged_tokens(self) -> int:
        """Tokens in frames of the block table; those after them are in `tail`."""
        return self.tokens - (0 if self.tail is None else self.tail.tokens)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a batch.

    Attributes:
        segments: everything its queries may see, the tokens of the current chunk included (already quantised).
        query_start: position of its first query.
    """

    segments: tuple[Segment, ...]
    query_start: int


class AttentionOutput(NamedTuple):
    """Result of attention.

    Attributes:
        out: mx [B, heads, L, v_dim], in the queries' dtype.
        lse: mx float32 [B, heads, L], natural log of the softmax denominator with *true* scores (the centre term of
            conditioned keys included); -inf where a query sees nothing. A backend whose chunk needs no merge may
            leave it out: NaN.
    """

    out: mx.array
    lse: mx.array


class PageSource(Protocol):
    """Handle of a pool. What a frame's memory is, only the pool and the backends that can read it know."""

    def layout(self, frame: FrameId) -> PageLayout:
        """Layout of the page in a frame."""


@runtime_checkable
class HostPages(PageSource, Protocol):
    """A pool in host memory (`FramePool`): its arrays are numpy views."""

    def layer(self, frame: FrameId, layer_index: int) -> LayerArrays:
        """Arrays of one layer in one frame."""

    def address(self, frame: FrameId) -> int:
        """Where the frame's memory begins; its tensors follow as its layout says."""


_HOST_POOLS: set[type] = set()
"""Types of pools that were found to be in host memory."""


def host_pages(pages: PageSource) -> HostPages:
    """Narrow a pool's handle to one in host memory.

    Raises:
        InternalError: the pool is not in host memory; a backend was given pages it cannot read.
    """
    if type(pages) not in _HOST_POOLS:  # a check by protocol takes longer than a small kernel
        if not isinstance(pages, HostPages):
            raise InternalError(f"pages of {type(pages).__name__} are not in host memory")
        _HOST_POOLS.add(type(pages))
    return cast("HostPages", pages)


class AttentionBackend(Protocol):
    """One way to compute attention over pages. Stateless between calls; called by the engine thread only."""

    @property
    def name(self) -> str:
        """What `--attention` and reports call it."""

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
        """Attention of `queries` over each row's segments.

        Args:
            pages: the pool, of a kind this backend can read.
            queries: mx [B, heads, L, k_dim], after RoPE; head h uses KV head h // (heads / kv_heads).
            layer_index: index of the layer in the model.
            rows: one per batch row.
            scale: factor of the scores.
            window: tokens a query sees, itself included; None for all before it.
            sinks: mx [heads], scores of a virtual key without value that joins each softmax; None for none.

        Returns:
            Output and log-sum-exp, evaluated: nothing of the pool or a tail is read after the call returns.

        Raises:
            InternalError: the backend cannot read this kind of pool.
        """


@runtime_checkable
class DeviceWriter(Protocol):
    """A backend that quantises new tokens into its pool itself: nothing of a step passes through the host."""

    def append(
        self,
        pages: PageSource,
        keys: mx.array,
        values: mx.array,
        *,
        layer_index: int,
        targets: Sequence[tuple[tuple[FrameId, ...], int]],
    ) -> None:
        """Write tokens of each row; lazy, in order with later calls of this backend on this pool.

        What does not fit its format raises at the end of the step, from the pool's `check_appended`.

        Args:
            pages: the pool.
            keys: mx [rows, kv_heads, n, k_dim], conditioned.
            values: mx [rows, kv_heads, n, v_dim].
            layer_index: index of the layer in the model.
            targets: per row its block table, and the place of its first new token counted in that table's pages.
        """


def merge(parts: Sequence[AttentionOutput]) -> AttentionOutput:
    """Combine attention over disjoint sets of keys into attention over their union.

    out = sum_i out_i * exp(lse_i - lse), lse = log sum_i exp(lse_i); evaluated before it returns.

    Args:
        parts: results for the same queries; at least one.
    """
    if len(parts) == 1:
        mx.eval(parts[0])
        return parts[0]
    stacked = mx.stack([part.lse for part in parts])
    lse = mx.logsumexp(stacked, axis=0)
    # A query that sees nothing in any part has lse = -inf; its weights are 0, not NaN.
    anchor = mx.where(lse == -mx.inf, mx.zeros_like(lse), lse)
    weights = mx.exp(stacked - anchor)[..., None]
    out = mx.zeros(parts[0].out.shape, mx.float32)
    for part, weight in zip(parts, weights, strict=True):
        out = out + part.out.astype(mx.float32) * weight
    merged = AttentionOutput(out.astype(parts[0].out.dtype), lse)
    mx.eval(merged)
    return merged


def with_sinks(part: AttentionOutput, sinks: mx.array | None) -> AttentionOutput:
    """Let a sink per head join the softmax: it takes weight but adds no value.

    Args:
        part: result without sinks, true log-sum-exp.
        sinks: mx [heads] or None.
    """
    if sinks is None:
        return part
    sink = sinks.astype(mx.float32)[None, :, None]
    lse = mx.logaddexp(part.lse, sink)
    shrink = mx.exp(part.lse - lse)[..., None]
    return AttentionOutput((part.out.astype(mx.float32) * shrink).astype(part.out.dtype), lse)


def row_by_row(
    queries: mx.array,
    rows: Sequence[Row],
    sinks: mx.array | None,
    attend_row: Callable[[mx.array, Row], Sequence[AttentionOutput]],
) -> AttentionOutput:
    """A batch computed one row after the other.

    Args:
        queries: mx [B, heads, L, k_dim].
        rows: one per batch row.
        sinks: mx [heads] or None; they join each row once, after its parts are merged.
        attend_row: a row's queries mx [1, heads, L, k_dim] and the row to results over disjoint parts of its tokens.
    """
    results: list[AttentionOutput] = []
    for index, row in enumerate(rows):
        one = queries if len(rows) == 1 else queries[index : index + 1]
        results.append(with_sinks(merge(attend_row(one, row)), sinks))
    if len(results) == 1:
        return results[0]
    return AttentionOutput(mx.concatenate([r.out for r in results]), mx.concatenate([r.lse for r in results]))
