"""Tiles as mlx operations, for GPUs (and for CPU when asked).

May import mlx, numpy, kvd.quant, kvd.attention.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.attention.gather import gather
from kvd.attention.interface import HostPages, Segment
from kvd.attention.masks import TileSpan
from kvd.quant.codec import Encoded
from kvd.quant.spec import LayerFormat, SideFormat

PACKED_QUERIES: Final = 8
"""Up to so many queries Metal multiplies with the packed tile itself (`mx.quantized_matmul`). With CUDA the
transposed product of several packed matrices is wrong by as much as its values (mlx 0.32.4, seen on an H200)."""


class _Tile:
    """A packed tile of one side on the device."""

    def __init__(self, encoded: Encoded, side: SideFormat) -> None:
        self.codes = mx.array(encoded.codes)
        self.scales = mx.array(encoded.scales).view(mx.bfloat16).astype(mx.float32)
        self.biases = mx.array(encoded.biases).view(mx.bfloat16).astype(mx.float32)
        self.side = side

    def values(self) -> mx.array:
        """float32 [kv_heads, tokens, dim], lazy."""
        return mx.dequantize(self.codes, self.scales, self.biases, group_size=self.side.group, bits=self.side.bits)

    def packed_product(self, x: mx.array, low: int, high: int, *, transpose: bool) -> mx.array:
        """X times tokens [low, high) of the tile (transposed or not) without dequantising; lazy."""
        return mx.quantized_matmul(
            x,
            self.codes[:, low:high],
            self.scales[:, low:high],
            self.biases[:, low:high],
            transpose=transpose,
            group_size=self.side.group,
            bits=self.side.bits,
        )


class DeviceState:
    """Attention of one row over one segment in progress.

    Args:
        queries: mx [1, heads, L, k_dim], conditioned if the segment's keys are.
        layer_format: formats of K and V.
        kv_heads: KV heads.
        v_dim: width of a value head.
        scale: factor of the scores.
        block_queries: queries of a block.
        packed: multiply with packed tiles; None: a few queries on Metal do.
    """

    def __init__(
        self,
        queries: mx.array,
        layer_format: LayerFormat,
        kv_heads: int,
        v_dim: int,
        scale: float,
        block_queries: int,
        *,
        packed: bool | None = None,
    ) -> None:
        self._q = queries[0].astype(mx.float32) * scale
        self._format = layer_format
        self._block_queries = block_queries
        few = queries.shape[2] <= PACKED_QUERIES
        on_metal = mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu
        self._packed = packed if packed is not None else few and on_metal
        self._tiles: tuple[_Tile, _Tile] | None = None
        self._dense: tuple[mx.array, mx.array] | None = None
        self._states: dict[int, tuple[Any, Any, Any]] = {}
        self._kv_heads = kv_heads
        self._v_dim = v_dim

    def load(self, pages: HostPages, segment: Segment, layer_index: int, span: TileSpan) -> None:
        """Bring a tile to the device; the following `fold` calls use it. Work on earlier tiles is evaluated first."""
        mx.eval(list(self._states.values()))
        keys = _Tile(gather(pages, segment, layer_index, "k", span.start, span.end), self._format.k)
        values = _Tile(gather(pages, segment, layer_index, "v", span.start, span.end), self._format.v)
        self._tiles = (keys, values)
        self._dense = None if self._packed else (keys.values(), values.values())

    def fold(self, block: int, low: int, high: int, mask: npt.NDArray[np.bool_] | None) -> None:
        """Fold tokens [low, high) of the loaded tile into block number `block`; lazy until the next tile."""
        q = self._block(block)
        scores = self._product_keys(q, low, high)
        if mask is not None:
            grouped = scores.reshape(self._kv_heads, -1, *mask.shape)
            scores = mx.where(mx.array(mask), -mx.inf, grouped).reshape(scores.shape)
        top = scores.max(axis=-1)
        before = self._states.get(block)
        if before is not None:
            top = mx.maximum(top, before[0])
        anchor = mx.where(top == -mx.inf, mx.zeros_like(top), top)
        weights = mx.exp(scores - anchor[..., None])
        total = weights.sum(axis=-1)
        out = self._product_values(weights, low, high)
        if before is not None:
            keep = mx.exp(before[0] - anchor)
            total = total + before[1] * keep
            out = out + before[2] * keep[..., None]
        self._states[block] = (top, total, out)

    def finish(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """(out mx [1, heads, L, v_dim] in `dtype`, lse mx float32 [1, heads, L]), evaluated."""
        heads, length, _ = self._q.shape
        outs, lses = [], []
        for block in range(-(-length // self._block_queries)):
            top, total, out = self._states.get(block) or self._unseen(block)
            safe = mx.where(total > 0, total, mx.ones_like(total))
            outs.append((out / safe[..., None]).reshape(heads, -1, out.shape[-1]))
            lses.append((mx.log(total) + top).reshape(heads, -1))
        result = (mx.concatenate(outs, axis=1)[None].astype(dtype), mx.concatenate(lses, axis=1)[None])
        mx.eval(result)
        return result

    def _unseen(self, block: int) -> tuple[Any, Any, Any]:
        """State of a block that saw no token: maximum -inf, denominator and numerator 0."""
        rows = self._block(block).shape[:2]
        return mx.full(rows, -mx.inf), mx.zeros(rows), mx.zeros((*rows, self._v_dim))

    def _block(self, block: int) -> mx.array:
        """Queries of a block, stacked by KV head: mx [kv_heads, rows, k_dim]."""
        _, length, dim = self._q.shape
        part = self._q[:, block * self._block_queries : min((block + 1) * self._block_queries, length)]
        return part.reshape(self._kv_heads, -1, dim)

    def _product_keys(self, q: mx.array, low: int, high: int) -> mx.array:
        assert self._tiles is not None
        if self._dense is None:
            return self._tiles[0].packed_product(q, low, high, transpose=True)
        return q @ self._dense[0][:, low:high].swapaxes(-1, -2)

    def _product_values(self, weights: mx.array, low: int, high: int) -> mx.array:
        assert self._tiles is not None
        if self._dense is None:
            return self._tiles[1].packed_product(weights, low, high, transpose=False)
        return weights @ self._dense[1][:, low:high]
