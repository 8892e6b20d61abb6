"""The oracle: everything dequantised, keys restored to their raw form, softmax in float64 over the whole context.

Slow and large on purpose; it shares no arithmetic with the other backends beyond the codec. Conditioned keys are undone
with explicit Hadamard matrices, so it also proves that conditioning drops out. May import mlx, numpy, kvd.quant,
kvd.attention.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.attention.gather import dequantised
from kvd.attention.interface import AttentionOutput, HostPages, PageSource, Row, Segment, host_pages

F64Array = npt.NDArray[np.float64]


class ReferenceBackend:
    """Attention in float64 numpy (implements `AttentionBackend`)."""

    name = "reference"

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
        q = np.array(queries.astype(mx.float32)).astype(np.float64)
        sink = None if sinks is None else np.array(sinks.astype(mx.float32)).astype(np.float64)
        parts = [_attend_row(host, q[index], layer_index, row, scale, window, sink) for index, row in enumerate(rows)]
        out = mx.array(np.stack([part[0] for part in parts]).astype(np.float32)).astype(queries.dtype)
        lse = mx.array(np.stack([part[1] for part in parts]).astype(np.float32))
        mx.eval(out, lse)
        return AttentionOutput(out, lse)


def _attend_row(
    pages: HostPages,
    q: F64Array,
    layer_index: int,
    row: Row,
    scale: float,
    window: int | None,
    sink: F64Array | None,
) -> tuple[F64Array, F64Array]:
    """One row: q [heads, L, k_dim] to out [heads, L, v_dim] and lse [heads, L]."""
    segments = [segment for segment in row.segments if segment.tokens]
    keys = np.concatenate([raw_keys(pages, segment, layer_index) for segment in segments], axis=1)
    values = np.concatenate(
        [dequantised(pages, segment, layer_index, "v", 0, segment.tokens) for segment in segments], axis=1
    ).astype(np.float64)
    positions = np.concatenate([np.arange(run.start, run.start + run.tokens) for s in segments for run in s.runs])
    heads, length, _ = q.shape
    repeats = heads // keys.shape[0]
    scores = scale * (q @ np.repeat(keys, repeats, axis=0).swapaxes(-1, -2))
    ages = (row.query_start + np.arange(length))[:, None] - positions[None]
    visible = ages >= 0
    if window is not None:
        visible &= ages < window
    scores = np.where(visible, scores, -np.inf)
    if sink is not None:
        scores = np.concatenate([np.broadcast_to(sink[:, None, None], (heads, length, 1)), scores], axis=-1)
        values = np.concatenate([np.zeros_like(values[:, :1]), values], axis=1)
    top = scores.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0]) + top[..., 0]
    out = (weights @ np.repeat(values, repeats, axis=0)) / np.where(total > 0, total, 1.0)
    return out, lse


def raw_keys(pages: HostPages, segment: Segment, layer_index: int) -> F64Array:
    """Keys of a segment as the model made them, up to quantisation: float64 [kv_heads, tokens, k_dim]."""
    keys = dequantised(pages, segment, layer_index, "k", 0, segment.tokens).astype(np.float64)
    if segment.conditioning is None:
        return keys
    rotated = keys @ _hadamard_matrix(keys.shape[-1])
    centre, scale = segment.conditioning.centre, segment.conditioning.scale
    return rotated * scale[:, None].astype(np.float64) + centre[:, None]


@functools.cache
def _hadamard_matrix(dim: int) -> F64Array:
    """Block-diagonal orthonormal Sylvester-Hadamard matrix [dim, dim]; symmetric, its own inverse."""
    block = dim & -dim
    matrix = np.ones((1, 1))
    while matrix.shape[0] < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(dim // block), matrix / np.sqrt(block))
