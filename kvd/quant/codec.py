"""The codec: float32 values to codes, bf16 scales and bf16 biases, and back. Every backend must match it.

Theory of operation. Groups of `side.group` values along the head dimension share a scale and a bias, as in MLX's affine
quantisation: value = code * scale + bias. The scale's sign is chosen so that the group's value of largest magnitude
gets an exact code, and the bias is that value (or 0 when its code is 0). Two things differ from `mx.quantize` on
float32 input, on purpose:

- scale and bias are rounded to bf16 *first* and codes are computed against the rounded values, so what is stored is the
  best code for what will be read back;
- the arithmetic is plain IEEE float32 in a fixed order (subtract, multiply by the reciprocal, round to nearest even),
  element by element, so the bytes of a token depend on its values alone: not on threads, chunk sizes or neighbours.

Codes are packed little end first into uint32 words, as `mx.dequantize` reads them. May import numpy, spec and errors.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidParams
from kvd.quant.errors import NonFiniteValues
from kvd.quant.spec import SideFormat

F32Array = npt.NDArray[np.float32]
U32Array = npt.NDArray[np.uint32]
U16Array = npt.NDArray[np.uint16]

CODEC_VERSION: Final = 1
"""Raised when the same values would give other bytes: calibrations and page keys of another version are stale."""

_SMALLEST_SCALE: Final = np.float32(1e-7)
"""Floor of |scale| (the one `mx.quantize` uses), so that a constant group has a finite reciprocal."""


class Encoded(NamedTuple):
    """Quantised values of some tokens.

    Attributes:
        codes: uint32 [heads, tokens, words].
        scales: uint16 [heads, tokens, groups], bf16 bits.
        biases: uint16 [heads, tokens, groups], bf16 bits.
    """

    codes: U32Array
    scales: U16Array
    biases: U16Array


def to_bf16_bits(x: F32Array) -> U16Array:
    """Round finite float32 to bf16 (nearest, ties to even).

    Args:
        x: float32, any shape; NaN is not supported.

    Returns:
        The upper 16 bits of each rounded value, same shape.
    """
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bf16_bits(bits: U16Array) -> F32Array:
    """Widen bf16 bits to float32, exactly; same shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode(x: F32Array, side: SideFormat) -> Encoded:
    """Quantise values.

    Args:
        x: float32 [heads, tokens, dim]; any strides; `dim` a multiple of `side.group`.
        side: bits and group.

    Returns:
        Codes, scales and biases (see `Encoded`), freshly allocated.

    Raises:
        InvalidParams: `x` is not three-dimensional, `dim` does not divide into groups, or groups run along tokens.
        NonFiniteValues: `x` holds NaN or infinity, or a group's scale or bias does not fit bf16.
    """
    _check_axis(side)
    if x.ndim != 3 or x.shape[-1] % side.group:
        raise InvalidParams(f"values must be [heads, tokens, n * {side.group}], not {x.shape}", shape=list(x.shape))
    heads, tokens, dim = x.shape
    groups = np.ascontiguousarray(x, dtype=np.float32).reshape(heads, tokens, dim // side.group, side.group)
    work, scales, biases = affine(groups, side.bits)
    return Encoded(pack(work.reshape(heads, tokens, dim), side.bits), scales, biases)


def affine(groups: F32Array, bits: int, *, apart: int = 0) -> tuple[F32Array, U16Array, U16Array]:
    """Codes of groups whichever axis they run along: the arithmetic that all page formats share.

    Args:
        groups: float32 [..., group].
        bits: 2, 4 or 8.
        apart: the first values of each group that are stored elsewhere: they do not widen the range; their code is 0.

    Returns:
        Whole-valued float32 codes [..., group]; scales and biases uint16 [...], bf16 bits.

    Raises:
        NonFiniteValues: `groups` holds NaN or infinity, or a scale or bias does not fit bf16.
    """
    levels = np.float32((1 << bits) - 1)
    scales, biases = _scale_and_bias(groups[..., apart:] if apart else groups, levels)
    scale, bias = from_bf16_bits(scales), from_bf16_bits(biases)
    work = groups - bias[..., None]
    work *= (np.float32(1) / scale)[..., None]
    np.rint(work, out=work)
    np.clip(work, np.float32(0), levels, out=work)
    if apart:
        work[..., :apart] = 0
    return work, scales, biases


def decode(
    codes: U32Array, scales: U16Array, biases: U16Array, side: SideFormat, *, out: F32Array | None = None
) -> F32Array:
    """Read quantised values back: float32(code) * scale + bias, two roundings.

    Args:
        codes: uint32 [heads, tokens, words].
        scales: uint16 [heads, tokens, groups], bf16 bits.
        biases: as `scales`.
        side: bits and group.
        out: C-contiguous float32 [heads, tokens, dim] to write into; None allocates.

    Returns:
        float32 [heads, tokens, dim], C-contiguous (`out` if given).

    Raises:
        InvalidParams: groups run along tokens.
    """
    _check_axis(side)
    values = unpack(codes, side.bits, out=out)
    heads, tokens, dim = values.shape
    grouped = values.reshape(heads, tokens, dim // side.group, side.group)
    grouped *= from_bf16_bits(scales)[..., None]
    grouped += from_bf16_bits(biases)[..., None]
    return values


def unpack(codes: U32Array, bits: int, *, out: F32Array | None = None) -> F32Array:
    """Codes as whole-valued float32: uint32 [..., words] to [..., words * 32 / bits], in value order.

    A table from octet to its values in float32 (2 KB at 4 bits, 4 KB at 2) does shift, mask, interleave and conversion
    in one pass; separate numpy passes take three times as long.
    """
    octets = np.ascontiguousarray(codes).view(np.uint8)
    if out is None:
        out = np.empty((*octets.shape[:-1], octets.shape[-1] * 8 // bits), np.float32)
    if bits == 8:
        np.copyto(out, octets)
    else:
        table = _octet_table(bits)
        # mode="clip" skips numpy's bounds buffer; an octet is always in range of 256 entries.
        np.take(table, octets, out=out.view(table.dtype), mode="clip")
    return out


def _check_axis(side: SideFormat) -> None:
    """Raise InvalidParams unless tokens of `side` stand alone (see `kvd.quant.token_groups` for the others)."""
    if side.axis != "head_dim":
        raise InvalidParams("groups along tokens have a codec of their own", axis=side.axis)


@functools.cache
def _octet_table(bits: int) -> npt.NDArray[Any]:
    """256 entries of 8 / bits float32 values, each entry seen as one wide element (float64 or complex128)."""
    shifts = np.arange(0, 8, bits)
    values = ((np.arange(256)[:, None] >> shifts) & ((1 << bits) - 1)).astype(np.float32)
    return values.view(np.float64 if bits == 4 else np.complex128)[:, 0].copy()


def _scale_and_bias(groups: F32Array, levels: np.float32) -> tuple[U16Array, U16Array]:
    """bf16 scale and bias of each group [..., group]; raises NonFiniteValues."""
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        magnitude = np.maximum((high - low) / levels, _SMALLEST_SCALE)
        low_is_edge = np.abs(low) > np.abs(high)
        scale = np.where(low_is_edge, magnitude, -magnitude)
        edge = np.where(low_is_edge, low, high)
        edge_code = np.rint(edge / scale)
        exact = edge_code != 0
        scale = np.where(exact, edge / np.where(exact, edge_code, np.float32(1)), scale)
        bias = np.where(exact, edge, np.float32(0))
    if not (np.isfinite(scale).all() and np.isfinite(bias).all()):
        raise NonFiniteValues("keys or values are not finite; the model's activations overflowed")
    scales, biases = to_bf16_bits(scale), to_bf16_bits(bias)
    if ((scales & 0x7F80) == 0x7F80).any() or ((biases & 0x7F80) == 0x7F80).any():
        raise NonFiniteValues("a scale or bias does not fit bf16; the model's activations overflowed")
    return scales, biases


def pack(codes: F32Array, bits: int) -> U32Array:
    """Pack whole-valued float32 codes [..., dim] into uint32 [..., dim * bits / 32].

    Neighbours are merged inside wider words (one contiguous pass each) instead of by strided slices, which are several
    times slower in numpy.
    """
    octets = codes.astype(np.uint8)
    if bits == 4:
        pairs = octets.view("<u2")
        octets = ((pairs >> np.uint16(4)) | pairs).astype(np.uint8)
    elif bits == 2:
        quads = octets.view("<u4")
        quads = quads | (quads >> np.uint32(6))
        octets = (quads | (quads >> np.uint32(12))).astype(np.uint8)
    return octets.view("<u4").astype(np.uint32, copy=False)
