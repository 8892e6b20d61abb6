"""Tiles on the host: BLAS products and numpy softmax over memory shared with mlx.

Many queries multiply with dequantised tiles. With few (a decode step) dequantising would cost more than the products:
scaling and shifting touch every value of a tile, while scores are few. So they multiply with the bare codes, and scale
and bias, which are the same for a whole group of values, are applied to the products: q.(s c + b) = s (q.c) + b sum(q).

May import mlx, numpy, kvd.quant, kvd.attention.
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.attention.gather import dequantised, gather, side_shape
from kvd.attention.interface import HostPages, Segment
from kvd.attention.masks import TileSpan
from kvd.quant.codec import F32Array, from_bf16_bits, unpack

BARE_ROWS: Final = 8
"""Up to so many queries per KV head multiply with bare codes."""


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


class _Bare(NamedTuple):
    """One side of a tile, not dequantised.

    Attributes:
        codes: float32 [kv_heads, tokens, dim], whole numbers.
        scales: float32 [kv_heads, groups, tokens].
        biases: as `scales`.
    """

    codes: F32Array
    scales: F32Array
    biases: F32Array

    def part(self, low: int, high: int) -> _Bare:
        """Tokens [low, high)."""
        return _Bare(self.codes[:, low:high], self.scales[:, :, low:high], self.biases[:, :, low:high])


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

    def fold_bare(self, keys: _Bare, values: _Bare, mask: npt.NDArray[np.bool_] | None) -> None:
        """As `fold` for few rows, with tiles that are not dequantised."""
        kv_heads, rows, k_dim = self.q.shape
        n, v_dim = values.codes.shape[1:]
        k_group, v_group = k_dim // keys.scales.shape[1], v_dim // values.scales.shape[1]
        sums = self.q.reshape(kv_heads, rows, -1, k_group).sum(axis=-1)
        scores: F32Array = np.matmul(sums, keys.biases)
        for group, at in enumerate(range(0, k_dim, k_group)):
            # The tile comes first: BLAS is twice as slow with a few rows times a wide matrix.
            product = np.matmul(keys.codes[..., at : at + k_group], self.q[..., at : at + k_group].swapaxes(1, 2))
            scores += product.swapaxes(1, 2) * keys.scales[:, group, None]
        if mask is not None:
            np.copyto(scores.reshape(kv_heads, self.repeats, -1, n), -np.inf, where=mask)
        top = np.maximum(self.top, scores.max(axis=-1))
        anchor = np.where(np.isneginf(top), np.float32(0), top)
        scores -= anchor[..., None]
        np.exp(scores, out=scores)
        keep = np.exp(self.top - anchor)
        self.total = self.total * keep + scores.sum(axis=-1)
        self.out *= keep[..., None]
        shifts = np.matmul(scores, values.biases.swapaxes(1, 2))
        for group, at in enumerate(range(0, v_dim, v_group)):
            weights = scores * values.scales[:, group, None]
            self.out[..., at : at + v_group] += np.matmul(weights, values.codes[..., at : at + v_group])
            self.out[..., at : at + v_group] += shifts[..., group, None]
        self.top = top


class HostState:
    """Attention of one row over one segment in progress.

    Args:
        queries: mx [1, heads, L, k_dim], conditioned if the segment's keys are.
        kv_heads: KV heads.
        v_dim: width of a value head.
        scale: factor of the scores.
        block_queries: queries of a block.
        scratch: the backend's buffers.
        bare: multiply with bare codes; None decides by the number of queries.
    """

    def __init__(
        self,
        queries: mx.array,
        kv_heads: int,
        v_dim: int,
        scale: float,
        block_queries: int,
        scratch: Scratch,
        *,
        bare: bool | None = None,
    ) -> None:
        shared = queries if queries.dtype == mx.float32 else queries.astype(mx.float32)
        # A view of mlx's buffer; it is only read, and the scaled copies below outlive it.
        self._q: F32Array = np.array(shared, copy=False)[0]
        self._block_queries = block_queries
        self._v_dim = v_dim
        self._blocks = self._make_blocks(kv_heads, np.float32(scale))
        self._scratch = scratch
        self._keys = self._values = scratch.take("none", kv_heads, 0, 0)
        few = self._q.shape[0] // kv_heads * min(block_queries, self._q.shape[1]) <= BARE_ROWS
        self._takes_bare = bare if bare is not None else few
        self._bare: tuple[_Bare, _Bare] | None = None

    def load(self, pages: HostPages, segment: Segment, layer_index: int, span: TileSpan) -> None:
        """Unpack a tile and, for more than a few queries, dequantise it; the following `fold` calls use it."""
        if self._takes_bare:
            keys = self._unpack(pages, segment, layer_index, "k", span)
            self._bare = keys, self._unpack(pages, segment, layer_index, "v", span)
            return
        self._keys = self._dequantise(pages, segment, layer_index, "k", span)
        self._values = self._dequantise(pages, segment, layer_index, "v", span)

    def fold(self, block: int, low: int, high: int, mask: npt.NDArray[np.bool_] | None) -> None:
        """Fold tokens [low, high) of the loaded tile into block number `block`."""
        if self._bare is not None:
            keys, values = self._bare
            self._blocks[block].fold_bare(keys.part(low, high), values.part(low, high), mask)
            return
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
        self, pages: HostPages, segment: Segment, layer_index: int, side: Literal["k", "v"], span: TileSpan
    ) -> F32Array:
        heads, dim = side_shape(pages, segment, layer_index, side)
        out = self._scratch.take(side, heads, span.end - span.start, dim)
        return dequantised(pages, segment, layer_index, side, span.start, span.end, out=out)

    def _unpack(
        self, pages: HostPages, segment: Segment, layer_index: int, side: Literal["k", "v"], span: TileSpan
    ) -> _Bare:
        encoded = gather(pages, segment, layer_index, side, span.start, span.end)
        heads, dim = side_shape(pages, segment, layer_index, side)
        side_format = segment.layer_format.k if side == "k" else segment.layer_format.v
        codes = unpack(encoded.codes, side_format.bits, out=self._scratch.take(side, heads, span.tokens, dim))
        scales, biases = (
            np.ascontiguousarray(from_bf16_bits(bits).swapaxes(1, 2)) for bits in (encoded.scales, encoded.biases)
        )
        return _Bare(codes, scales, biases)

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
