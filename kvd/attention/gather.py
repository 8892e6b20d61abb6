"""Tiles: a run of a segment's tokens out of the pool's pages, packed or dequantised.

May import numpy, kvd.quant, kvd.attention.interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvd.attention.interface import PageSource, Segment
from kvd.quant.codec import Encoded, F32Array, decode
from kvd.quant.spec import PAGE_TOKENS, SideFormat
from kvd.store.frame_pool import SideArrays


@dataclass(frozen=True, slots=True)
class TileSpan:
    """Tokens [start, end) of a segment; `position` is the sequence position of `start`."""

    start: int
    end: int
    position: int


def tile_spans(segment: Segment, tile_tokens: int, first_visible: int, last_visible: int) -> Iterator[TileSpan]:
    """Cut what queries can see of a segment into tiles that start on page borders.

    Args:
        segment: the run of tokens.
        tile_tokens: tokens of a tile, a multiple of 256.
        first_visible: lowest position any query sees (0 without a window).
        last_visible: highest position any query sees.
    """
    stop = min(segment.tokens, last_visible + 1 - segment.positions_start)
    first = max(0, first_visible - segment.positions_start) // PAGE_TOKENS * PAGE_TOKENS
    for start in range(first, stop, tile_tokens):
        yield TileSpan(start, min(start + tile_tokens, stop), segment.positions_start + start)


def gather(
    pages: PageSource, segment: Segment, layer_index: int, side: Literal["k", "v"], start: int, end: int
) -> Encoded:
    """Codes, scales and biases of tokens [start, end) as contiguous arrays [kv_heads, end - start, ...].

    Args:
        pages: the pool.
        segment: the run of tokens; its block table covers `end`.
        layer_index: index of the layer in the model.
        side: keys or values.
        start: first token, anywhere in a page.
        end: one past the last token.
    """
    slices: list[tuple[SideArrays, int, int]] = []
    for page in range(start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
        layer = pages.layer(segment.block_table[page], layer_index)
        arrays = layer.k if side == "k" else layer.v
        low, high = max(start - page * PAGE_TOKENS, 0), min(end - page * PAGE_TOKENS, PAGE_TOKENS)
        slices.append((arrays, low, high))
    if len(slices) == 1:
        arrays, low, high = slices[0]
        return Encoded(
            np.ascontiguousarray(arrays.codes[:, low:high]),
            np.ascontiguousarray(arrays.scales[:, low:high]),
            np.ascontiguousarray(arrays.biases[:, low:high]),
        )
    return Encoded(
        np.concatenate([a.codes[:, low:high] for a, low, high in slices], axis=1),
        np.concatenate([a.scales[:, low:high] for a, low, high in slices], axis=1),
        np.concatenate([a.biases[:, low:high] for a, low, high in slices], axis=1),
    )


def side_shape(pages: PageSource, segment: Segment, layer_index: int, side: Literal["k", "v"]) -> tuple[int, int]:
    """(KV heads, head width) of one side of a segment that has at least one page."""
    layer = pages.layer(segment.block_table[0], layer_index)
    arrays, side_format = (layer.k, segment.layer_format.k) if side == "k" else (layer.v, segment.layer_format.v)
    heads, _, words = arrays.codes.shape
    return heads, words * 32 // side_format.bits


def dequantised(
    pages: PageSource,
    segment: Segment,
    layer_index: int,
    side: Literal["k", "v"],
    start: int,
    end: int,
    out: F32Array | None = None,
) -> F32Array:
    """Tokens [start, end) as float32 [kv_heads, end - start, dim] (conditioned keys stay conditioned).

    `out`, if given, is C-contiguous, of that shape, and returned.
    """
    side_format: SideFormat = segment.layer_format.k if side == "k" else segment.layer_format.v
    return decode(*gather(pages, segment, layer_index, side, start, end), side_format, out=out)
