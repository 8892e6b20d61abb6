"""The backend that runs anywhere: the context in tiles, softmax merged online, never a score matrix of all of it.

Theory of operation. For each tile (a multiple of 256 tokens) the packed pages of one layer are gathered into contiguous
arrays, dequantised, multiplied with the queries and folded into a running (maximum, denominator, output) per query, as
in flash attention (Dao et al., 2022, algorithm 1). Queries of one KV head are stacked (grouped-query attention by
reshape), so K and V are never repeated. Tiles that no query of a block sees are skipped; masks exist only where a tile
overlaps the chunk's diagonal or a window's edge. Peak scratch is O(heads * block * tile), independent of the context.

Two strategies share the walk over tiles:

- `host`: products by BLAS and softmax by numpy, on memory shared with mlx without a copy. On CPU mlx's elementwise
  functions are scalar: `mx.exp` takes 25 times as long as numpy's for the same numbers.
- `device`: mlx operations only; with few queries on a GPU `mx.quantized_matmul` reads the packed tile itself. Each tile
  is evaluated before the next one is gathered, so lazily built graphs cannot pile up.

A step of up to 32 queries has small scores, so its tiles can be long: on a device 8192 tokens (few operations), on the
host as many as keep the dequantised tile in the processor's cache.

May import mlx, numpy, kvd.quant, kvd.attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import mlx.core as mx

from kvd.attention.device_tiles import DeviceState
from kvd.attention.gather import side_shape
from kvd.attention.host_tiles import HostState, Scratch
from kvd.attention.interface import (
    AttentionOutput,
    HostPages,
    PageSource,
    Row,
    Segment,
    host_pages,
    row_by_row,
)
from kvd.attention.masks import hidden, tile_spans, visible_range
from kvd.quant.spec import PAGE_TOKENS

Strategy = Literal["host", "device"]

SHORT_STEP_QUERIES: Final = 32
"""Up to so many queries a step is short: long tiles, one query block."""

DEVICE_SHORT_TILE_TOKENS: Final = 8192
HOST_SHORT_TILE_BYTES: Final = 3 << 19
"""Dequantised K and V of a short step's tile on the host: about what the second-level cache of a core holds."""

PREFILL_TILE_TOKENS: Final = 512
PREFILL_BLOCK_QUERIES: Final = 256


class MlxBackend:
    """Tiled attention over pages (implements `AttentionBackend`).

    Args:
        strategy: how tiles are computed; None takes `host` when mlx's default device is the CPU, else `device`.
    """

    name = "mlx"

    def __init__(self, strategy: Strategy | None = None) -> None:
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        self.strategy: Strategy = strategy if strategy is not None else ("host" if on_cpu else "device")
        self._scratch = Scratch()

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
                self._attend_segment(host, one, layer_index, row, segment, scale, window)
                for segment in row.segments
                if segment.tokens
            ]

        result = row_by_row(queries, rows, sinks, attend_row)
        mx.eval(result.out)
        return result

    def _attend_segment(
        self,
        pages: HostPages,
        queries: mx.array,
        layer_index: int,
        row: Row,
        segment: Segment,
        scale: float,
        window: int | None,
    ) -> AttentionOutput:
        """One row over one segment: queries mx [1, heads, L, k_dim]; no sinks."""
        length = queries.shape[2]
        short = length <= SHORT_STEP_QUERIES
        block_queries = length if short else PREFILL_BLOCK_QUERIES
        conditioned = queries if segment.conditioning is None else segment.conditioning.condition_queries(queries)
        kv_heads, v_dim = side_shape(pages, segment, layer_index, "v")
        state: HostState | DeviceState
        if self.strategy == "host":
            token_bytes = 4 * kv_heads * (queries.shape[-1] + v_dim)
            fitting = HOST_SHORT_TILE_BYTES // token_bytes // PAGE_TOKENS * PAGE_TOKENS
            tile_tokens = max(fitting, PREFILL_TILE_TOKENS) if short else PREFILL_TILE_TOKENS
            state = HostState(conditioned, kv_heads, v_dim, scale, block_queries, self._scratch)
        else:
            tile_tokens = DEVICE_SHORT_TILE_TOKENS if short else PREFILL_TILE_TOKENS
            state = DeviceState(conditioned, segment.layer_format, kv_heads, v_dim, scale, block_queries)
        first = 0 if window is None else row.query_start - window + 1
        for span in tile_spans(segment, tile_tokens, first, row.query_start + length - 1):
            state.load(pages, segment, layer_index, span)
            for block in range(-(-length // block_queries)):
                start = row.query_start + block * block_queries
                count = min(block_queries, length - block * block_queries)
                low, high, masked = visible_range(span, start, count, window)
                if low < high:
                    mask = hidden(span, low, high, start, count, window) if masked else None
                    state.fold(block, low, high, mask)
        out, lse = state.finish(queries.dtype)
        if segment.conditioning is not None:
            # Lazy: nobody pays for it unless results are merged, sinks exist or the caller reads lse.
            lse = lse + scale * segment.conditioning.centre_term(queries)
        return AttentionOutput(out, lse)
