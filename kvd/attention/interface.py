"""What every attention backend is asked and what it answers. The signature is fixed.

Theory of operation. A *segment* is a run of tokens in pages of one format. A *row* is one sequence of the batch: its
segments and where its queries start. Block tables and lengths are per row, so nothing is padded or copied between
requests. Keys are cached after RoPE, so the order of keys does not matter; the mask does: key position p is visible to
query position t when p <= t and, under a window, t - p < window. Each result carries its log-sum-exp, so partial
results over different segments (or formats, or devices) merge exactly.

May import mlx, numpy, kvd.ids, kvd.quant, kvd.store.frame_pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx

from kvd.ids import FrameId
from kvd.quant.conditioning import LayerConditioning
from kvd.quant.spec import LayerFormat
from kvd.store.frame_pool import LayerArrays


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in pages of one format, as one layer sees it.

    Attributes:
        block_table: frames of its pages in order; the last may be partly filled. At least ceil(tokens / 256).
        tokens: tokens to attend over.
        layer_format: how K and V of this layer are quantised.
        conditioning: operators of the layer's key conditioning; None for raw keys.
        positions_start: position in the sequence of the segment's first token (a multiple of 256 for a sliding group
            whose older pages are not mapped, else 0).
    """

    block_table: tuple[FrameId, ...]
    tokens: int
    layer_format: LayerFormat
    conditioning: LayerConditioning | None = None
    positions_start: int = 0


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
            conditioned keys included); -inf where a query sees nothing.
    """

    out: mx.array
    lse: mx.array


class PageSource(Protocol):
    """Where backends find a layer's arrays; `FramePool` on CPU."""

    def layer(self, frame: FrameId, layer_index: int) -> LayerArrays:
        """Arrays of one layer in one frame."""


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
            pages: the pool.
            queries: mx [B, heads, L, k_dim], after RoPE; head h uses KV head h // (heads / kv_heads).
            layer_index: index of the layer in the model.
            rows: one per batch row.
            scale: factor of the scores.
            window: tokens a query sees, itself included; None for all before it.
            sinks: mx [heads], scores of a virtual key without value that joins each softmax; None for none.

        Returns:
            Output and log-sum-exp, evaluated: nothing of the pool is read after the call returns.
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
