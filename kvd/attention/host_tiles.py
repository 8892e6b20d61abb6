"""Tiles on the host: BLAS products and numpy softmax over memory shared with mlx.

May import mlx, numpy, kvd.quant, kvd.attention.
"""

from __future__ import annotations

import math
from typing import Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.attention.gather import TileSpan, dequantised, side_shape
from kvd.attention.interface import PageSource, Segment
from kvd.quant.codec import F32Array


class Scratch:
    """Buffers that tiles are dequantised into, kept from call to call.

    Fresh arrays of a megabyte come from new mappings, and touching those for the first time costs as much as filling
    them. Owner: one backend, on one thread; what `take` returned is overwritten by the next `take` of the same name.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, F32Array] = {}

    def take(self, name: str, *shape: int) -> F32Array:
        """A C-contiguous float32 array of `shape` with arbitrary content."""
        needed = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < needed:
            buffer = np.empty(needed, np.float32)
            self._buffers[name] = buffer
        return buffer[:needed].reshape(shape)


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

    def fold(self, scratch: Scratch, keys: F32Array, values: F32Array, mask: npt.NDArray[np.bool_] | None) -> None:
        """Take a tile in: keys [kv_heads, n, k_dim], values [kv_heads, n, v_dim], mask bool [queries, n] or None."""
        kv_heads, rows, _ = self.q.shape
        n = keys.shape[1]
        scores = scratch.take("scores", rows, n)
        product = scratch.take("product", rows, values.shape[-1])
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
            self.out[head] += np.matmul(scores, values[head], out=product)
            self.top[head] = top


class HostState:
    """Attention of one row over one segment in progress.

    Args:
        queries: mx [1, heads, L, k_dim], conditioned if the segment's keys are.
        kv_heads: KV heads.
        v_dim: width of a value head.
        scale: factor of the scores.
        block_queries: queries of a block.
        scratch: the backend's buffers.
    """

    def __init__(
        self,
        queries: mx.array,
        kv_heads: int,
        v_dim: int,
        scale: float,
        block_queries: int,
        scratch: Scratch,
    ) -> None:
        shared = queries if queries.dtype == mx.float32 else queries.astype(mx.float32)
        # A view of mlx's buffer; it is only read, and the scaled copies below outlive it.
        self._q: F32Array = np.array(shared, copy=False)[0]
        self._block_queries = block_queries
        self._v_dim = v_dim
        self._blocks = self._make_blocks(kv_heads, np.float32(scale))
        self._scratch = scratch
        self._keys = self._values = scratch.take("none", kv_heads, 0, 0)

    def load(self, pages: PageSource, segment: Segment, layer_index: int, span: TileSpan) -> None:
        """Dequantise a tile; the following `fold` calls use it."""
        self._keys = self._dequantise(pages, segment, layer_index, "k", span)
        self._values = self._dequantise(pages, segment, layer_index, "v", span)

    def fold(self, block: int, low: int, high: int, mask: npt.NDArray[np.bool_] | None) -> None:
        """Fold tokens [low, high) of the loaded tile into block number `block`."""
        self._blocks[block].fold(self._scratch, self._keys[:, low:high], self._values[:, low:high], mask)

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

    def _dequantise(
        self, pages: PageSource, segment: Segment, layer_index: int, side: Literal["k", "v"], span: TileSpan
    ) -> F32Array:
        heads, dim = side_shape(pages, segment, layer_index, side)
        out = self._scratch.take(side, heads, span.end - span.start, dim)
        return dequantised(pages, segment, layer_index, side, span.start, span.end, out=out)

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
