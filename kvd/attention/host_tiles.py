"""Tiles on the host: BLAS products and numpy softmax over memory shared with mlx.

May import mlx, numpy, kvd.quant, kvd.attention.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.attention.gather import TileSpan, dequantised
from kvd.attention.interface import PageSource, Segment
from kvd.quant.codec import F32Array
from kvd.quant.spec import LayerFormat


class _Block:
    """Running softmax of a block of queries of all heads; rows = heads per KV head * queries of the block.

    Attributes:
        q: float32 [kv_heads, rows, k_dim], scaled.
        top: float32 [kv_heads, rows], running maximum.
        total: float32 [kv_heads, rows], running denominator relative to `top`.
        out: float32 [kv_heads, rows, v_dim], running numerator relative to `top`.
    """

    __slots__ = ("out", "q", "repeats", "top", "total")

    def __init__(self, q: F32Array, repeats: int, v_dim: int) -> None:
        self.q = q
        self.repeats = repeats
        self.top: F32Array = np.full(q.shape[:2], -np.inf, np.float32)
        self.total: F32Array = np.zeros(q.shape[:2], np.float32)
        self.out: F32Array = np.zeros((*q.shape[:2], v_dim), np.float32)

    def fold(self, keys: F32Array, values: F32Array, mask: npt.NDArray[np.bool_] | None) -> None:
        """Take a tile in: keys [kv_heads, n, k_dim], values [kv_heads, n, v_dim], mask bool [queries, n] or None."""
        kv_heads, rows, _ = self.q.shape
        n = keys.shape[1]
        scores = np.empty((rows, n), np.float32)
        for head in range(kv_heads):  # one head at a time: its scores stay in the second-level cache
            np.matmul(self.q[head], keys[head].T, out=scores)
            if mask is not None:
                np.copyto(scores.reshape(self.repeats, -1, n), -np.inf, where=mask)
            top = np.maximum(self.top[head], scores.max(axis=-1))
            # Rows that have seen nothing yet keep top = -inf; subtracting 0 there leaves exp(-inf) = 0.
            anchor = np.where(np.isneginf(top), np.float32(0), top)
            np.subtract(scores, anchor[:, None], out=scores)
            np.exp(scores, out=scores)
            keep = np.exp(self.top[head] - anchor)
            self.total[head] = self.total[head] * keep + scores.sum(axis=-1)
            self.out[head] *= keep[:, None]
            self.out[head] += scores @ values[head]
            self.top[head] = top


class HostState:
    """Attention of one row over one segment in progress.

    Args:
        queries: mx [1, heads, L, k_dim], conditioned if the segment's keys are.
        layer_format: formats of K and V.
        kv_heads: KV heads.
        v_dim: width of a value head.
        scale: factor of the scores.
        block_queries: queries of a block.
    """

    def __init__(
        self,
        queries: mx.array,
        layer_format: LayerFormat,
        kv_heads: int,
        v_dim: int,
        scale: float,
        block_queries: int,
    ) -> None:
        shared = queries if queries.dtype == mx.float32 else queries.astype(mx.float32)
        # A view of mlx's buffer; it is only read, and the scaled copies below outlive it.
        self._q: F32Array = np.array(shared, copy=False)[0]
        self._block_queries = block_queries
        self._v_dim = v_dim
        self._blocks = self._make_blocks(kv_heads, np.float32(scale))
        self._keys: F32Array = np.empty((kv_heads, 0, 0), np.float32)
        self._values: F32Array = self._keys

    def load(self, pages: PageSource, segment: Segment, layer_index: int, span: TileSpan) -> None:
        """Dequantise a tile; the following `fold` calls use it."""
        self._keys = dequantised(pages, segment, layer_index, "k", span.start, span.end)
        self._values = dequantised(pages, segment, layer_index, "v", span.start, span.end)

    def fold(self, block: int, low: int, high: int, mask: npt.NDArray[np.bool_] | None) -> None:
        """Fold tokens [low, high) of the loaded tile into block number `block`."""
        self._blocks[block].fold(self._keys[:, low:high], self._values[:, low:high], mask)

    def finish(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """(out mx [1, heads, L, v_dim] in `dtype`, lse mx float32 [1, heads, L]), owning their memory."""
        heads, length, _ = self._q.shape
        out: F32Array = np.empty((heads, length, self._v_dim), np.float32)
        lse: F32Array = np.empty((heads, length), np.float32)
        for number, block in enumerate(self._blocks):
            at = slice(number * self._block_queries, min((number + 1) * self._block_queries, length))
            total = np.where(block.total > 0, block.total, np.float32(1))
            out[:, at] = (block.out / total[..., None]).reshape(heads, -1, self._v_dim)
            with np.errstate(divide="ignore"):
                lse[:, at] = (np.log(block.total) + block.top).reshape(heads, -1)
        return mx.array(out[None]).astype(dtype), mx.array(lse[None])

    def _make_blocks(self, kv_heads: int, scale: np.float32) -> list[_Block]:
        """Scaled queries, stacked by KV head, cut into blocks."""
        heads, length, dim = self._q.shape
        grouped = self._q.reshape(kv_heads, heads // kv_heads, length, dim)
        blocks = []
        for start in range(0, length, self._block_queries):
            part = grouped[:, :, start : start + self._block_queries] * scale
            stacked = np.ascontiguousarray(part).reshape(kv_heads, -1, dim)
            blocks.append(_Block(stacked, heads // kv_heads, self._v_dim))
        return blocks
