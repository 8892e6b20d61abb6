"""Tokens of a segment out of host pages and its open tail, packed or dequantised.

May import mlx, numpy, kvd.quant, kvd.attention.interface.
"""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.attention.interface import HostPages, Segment, TailArray, TailSide
from kvd.quant.codec import Encoded, F32Array, decode
from kvd.quant.spec import PAGE_TOKENS, SideFormat


def gather(
    pages: HostPages, segment: Segment, layer_index: int, side: Literal["k", "v"], start: int, end: int
) -> Encoded:
    """Codes, scales and biases of tokens [start, end) as contiguous arrays [kv_heads, end - start, ...].

    Args:
        pages: the pool.
        segment: the tokens; its block table and tail cover `end`.
        layer_index: index of the layer in the model.
        side: keys or values.
        start: first token, anywhere in a page or the tail.
        end: one past the last token.
    """
    parts: list[Encoded] = []
    paged_tokens = segment.paged_tokens
    stop = min(end, paged_tokens)
    if start < stop:
        for page in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            layer = pages.layer(segment.block_table[page], layer_index)
            arrays = layer.k if side == "k" else layer.v
            low, high = max(start - page * PAGE_TOKENS, 0), min(stop - page * PAGE_TOKENS, PAGE_TOKENS)
            parts.append(Encoded(arrays.codes[:, low:high], arrays.scales[:, low:high], arrays.biases[:, low:high]))
    if segment.tail is not None and end > paged_tokens:
        tail = segment.tail.k if side == "k" else segment.tail.v
        parts.append(_tail_part(tail, max(start - paged_tokens, 0), end - paged_tokens))
    if len(parts) == 1:
        codes, scales, biases = parts[0]
        return Encoded(np.ascontiguousarray(codes), np.ascontiguousarray(scales), np.ascontiguousarray(biases))
    return Encoded(
        np.concatenate([part.codes for part in parts], axis=1),
        np.concatenate([part.scales for part in parts], axis=1),
        np.concatenate([part.biases for part in parts], axis=1),
    )


def _tail_part(tail: TailSide, low: int, high: int) -> Encoded:
    """Tokens [low, high) of an open tail, as views where it is in host memory."""
    return Encoded(_host(tail.codes)[:, low:high], _host(tail.scales)[:, low:high], _host(tail.biases)[:, low:high])


def _host(array: TailArray) -> npt.NDArray[Any]:
    """A numpy view of an array; an mlx array is evaluated."""
    return np.array(array, copy=False) if isinstance(array, mx.array) else array


def side_shape(pages: HostPages, segment: Segment, layer_index: int, side: Literal["k", "v"]) -> tuple[int, int]:
    """(KV heads, head width) of one side of a segment that has at least one token."""
    side_format = segment.layer_format.k if side == "k" else segment.layer_format.v
    if segment.block_table:
        layer = pages.layer(segment.block_table[0], layer_index)
        heads, _, words = (layer.k if side == "k" else layer.v).codes.shape
    else:
        assert segment.tail is not None
        heads, _, words = (segment.tail.k if side == "k" else segment.tail.v).codes.shape
    return heads, words * 32 // side_format.bits


def dequantised(
    pages: HostPages,
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
