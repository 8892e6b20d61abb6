"""The codec as a compiled kernel: the same bytes as `kvd.quant.codec.encode`, written straight into pages.

The arithmetic is the codec's, operation for operation, in IEEE float32 without fusing; its test compares bytes. Numpy
needs about ten passes over the values and as many temporary arrays; this reads them once. May import numpy, kvd.native,
kvd.quant.spec, codec and errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvd.native import mathematics as maths
from kvd.native.build import Address, Integer, compile_kernel, processor
from kvd.native.emit import F32, I16, I32, I64, Emitter, Value, vector
from kvd.native.errors import KernelUnavailable
from kvd.quant.codec import F32Array, encode
from kvd.quant.errors import NonFiniteValues
from kvd.quant.spec import SideFormat

_SMALLEST_SCALE: Final = float(np.float32(1e-7))
"""As in the codec."""

ARGUMENTS: Final = {
    "heads": Integer,
    "tokens": Integer,
    "values": Address,
    "value_head": Integer,
    "value_token": Integer,
    "codes": Address,
    "scales": Address,
    "biases": Address,
    "capacity": Integer,
    "bad": Address,
}
"""Arguments of the kernel:

- heads, tokens: how many.
- values: float32, head h and token t at h * value_head + t * value_token (in floats), `dim` values.
- codes, scales, biases: where the first head's first token goes; heads are `capacity` tokens apart.
- bad: int64, set to 1 when a value is not finite or a scale or bias does not fit bf16; what was written then means
  nothing.
"""


@functools.cache
def encode_kernel(bits: int, group: int, dim: int) -> Callable[..., None]:
    """The compiled encoder of a side.

    Raises:
        KernelUnavailable: this processor cannot run it.
    """
    shape = (bits, group, dim, min(processor().lanes, group))
    return compile_kernel(
        "encode", functools.partial(_write, *shape), ARGUMENTS, parameters=shape, sources=(maths.__name__, __name__)
    )


class SideEncoder:
    """Encodes tokens of one side of one layer into pages.

    Args:
        side: bits and group.
        dim: values of a token.
        capacity: tokens a head has room for in a page.

    Raises:
        KernelUnavailable: this processor cannot run the kernel.
    """

    def __init__(self, side: SideFormat, dim: int, capacity: int) -> None:
        self._kernel = encode_kernel(side.bits, side.group, dim)
        self._capacity = capacity
        self._token_bytes = (4 * side.words(dim), 2 * side.groups(dim), 2 * side.groups(dim))
        self._bad = np.zeros(1, np.int64)
        self._bad_at = self._bad.ctypes.data
        self._check(side, dim)

    def _check(self, side: SideFormat, dim: int) -> None:
        """Compare with the codec on this processor: other bytes would be other pages.

        Raises:
            KernelUnavailable: they differ.
        """
        x = np.random.default_rng(3).standard_normal((1, 8, dim)).astype(np.float32)
        right = encode(x, side)
        mine = [np.zeros((1, self._capacity, each.shape[2]), each.dtype) for each in right]
        self.write(x, (mine[0].ctypes.data, mine[1].ctypes.data, mine[2].ctypes.data), 0)
        if any((a[:, :8] != b).any() for a, b in zip(mine, right, strict=True)):
            raise KernelUnavailable("the compiled codec gives other bytes than the codec on this processor")

    def write(self, values: F32Array, addresses: tuple[int, int, int], first_token: int) -> None:
        """Encode values into a page.

        Args:
            values: float32 [heads, tokens, dim], the last axis contiguous.
            addresses: of the page's codes, scales and biases of this side.
            first_token: place in the page of the first token.

        Raises:
            NonFiniteValues: NaN or infinity, or a scale or bias that does not fit bf16; the page's bytes of these
                tokens mean nothing.
        """
        heads, tokens, _ = values.shape
        self._encode((heads, tokens), values.ctypes.data, values.strides[:2], [(0, 0, first_token)], addresses)

    def write_tokens(
        self, values: F32Array, offsets: tuple[int, int, int], places: Sequence[tuple[int, int, int]]
    ) -> None:
        """Encode one token of each of several pages.

        Args:
            values: float32 [rows, heads, dim], the last axis contiguous.
            offsets: of codes, scales and biases of this side in a page.
            places: per token its row in `values`, the address of its page, and its place there.

        Raises:
            NonFiniteValues: as `write`, for any of them.
        """
        heads = values.shape[1]
        self._encode((heads, 1), values.ctypes.data, (values.strides[1], 0), places, offsets, values.strides[0])

    def _encode(
        self,
        shape: tuple[int, int],
        source: int,
        strides: tuple[int, ...],
        places: Sequence[tuple[int, int, int]],
        offsets: tuple[int, int, int],
        row_bytes: int = 0,
    ) -> None:
        """The kernel for each place: (row, address, first token); a row is (heads, tokens) of `shape`."""
        (heads, tokens), (codes, scales, biases) = shape, offsets
        code_bytes, scale_bytes, bias_bytes = self._token_bytes
        head_step, token_step = strides[0] // 4, strides[1] // 4
        self._bad[0] = 0
        for row, address, first_token in places:
            self._kernel(
                heads,
                tokens,
                source + row * row_bytes,
                head_step,
                token_step,
                address + codes + first_token * code_bytes,
                address + scales + first_token * scale_bytes,
                address + biases + first_token * bias_bytes,
                self._capacity,
                self._bad_at,
            )
            if self._bad[0]:
                raise NonFiniteValues(
                    "keys or values are not finite, or do not fit bf16; the model's activations overflowed"
                )


def _write(bits: int, group: int, dim: int, lanes: int, e: Emitter) -> None:
    """The kernel's body; `lanes` values are a vector."""
    a = e.arguments
    groups, levels = dim // group, float((1 << bits) - 1)
    kind, integers = vector(F32, lanes), vector(I32, lanes)
    trouble = e.slot(e.constant(F32, 0.0))
    worst = e.slot(e.constant(I32, 0))
    with e.loop(0, a["heads"]) as head, e.loop(0, a["tokens"]) as token:
        source = head * a["value_head"] + token * a["value_token"]
        place = head * a["capacity"] + token
        for number in range(groups):
            starts = range(number * group, (number + 1) * group, lanes)
            vectors = [e.load(a["values"], source + start, F32, lanes) for start in starts]
            low, high = vectors[0], vectors[0]
            for each in vectors[1:]:
                low, high = e.minimum(each, low), e.maximum(each, high)
            for each in vectors:  # 0 for every finite number, NaN for all others
                trouble.set(trouble.get() + e.fold(each - each))
            scale, bias = _scale_and_bias(e, e.fold(low, "min"), e.fold(high, "max"), levels)
            scale_bits, bias_bits = (_to_bf16(e, each) for each in (scale, bias))
            for each in (scale_bits, bias_bits):
                exponent = each & 0x7F80
                worst.set(e.select(exponent > worst.get(), exponent, worst.get()))
            e.store(e.narrow(scale_bits, I16), a["scales"], place * groups + number)
            e.store(e.narrow(bias_bits, I16), a["biases"], place * groups + number)
            inverse = e.splat(e.constant(F32, 1.0) / e.bitcast(scale_bits << 16, F32), lanes)
            offset = e.splat(e.bitcast(bias_bits << 16, F32), lanes)
            zero, most = e.constant(kind, 0.0), e.constant(kind, levels)
            packed = []
            for start, each in zip(starts, vectors, strict=True):
                code = e.intrinsic("llvm.rint", (each - offset) * inverse)
                whole = e.to_int(e.minimum(e.maximum(code, zero), most))
                shifts = [bits * ((start + lane) % (32 // bits)) for lane in range(lanes)]
                packed.append(whole << e.constant(integers, shifts))
            words = _join(e, packed, 32 // bits)
            e.store(words, a["codes"], place * (dim * bits // 32) + number * (group * bits // 32))
    nothing = trouble.get().equals(0.0)  # false for NaN
    with e.either(nothing) as (fine, bad):
        with fine, e.when(worst.get() >= 0x7F80):
            e.store(e.constant(I64, 1), a["bad"], 0)
        with bad:
            e.store(e.constant(I64, 1), a["bad"], 0)


def _scale_and_bias(e: Emitter, low: Value, high: Value, levels: float) -> tuple[Value, Value]:
    """Scale and bias of a group, before rounding to bf16; see `kvd.quant.codec`."""
    smallest, zero = e.constant(F32, _SMALLEST_SCALE), e.constant(F32, 0.0)
    magnitude = e.maximum((high - low) / levels, smallest)
    low_is_edge = e.intrinsic("llvm.fabs", low) > e.intrinsic("llvm.fabs", high)
    scale = e.select(low_is_edge, magnitude, -magnitude)
    edge = e.select(low_is_edge, low, high)
    edge_code = e.intrinsic("llvm.rint", edge / scale)
    inexact = edge_code.equals(0.0)
    divisor = e.select(inexact, e.constant(F32, 1.0), edge_code)
    return e.select(inexact, scale, edge / divisor), e.select(inexact, zero, edge)


def _to_bf16(e: Emitter, x: Value) -> Value:
    """bf16 bits (nearest, ties to even) in the low half of a 32-bit integer."""
    bits = e.bitcast(x, I32)
    return (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16


def _join(e: Emitter, vectors: list[Value], codes: int) -> Value:
    """Or `codes` neighbouring lanes into one word; words in order."""
    width = codes
    while width > 1:
        if len(vectors) == 1:
            vectors = [vectors[0], vectors[0]]
            lanes = vectors[0].type.count
            even, odd = list(range(0, lanes, 2)), list(range(1, lanes, 2))
            vectors = [e.shuffle(vectors[0], even) | e.shuffle(vectors[0], odd)]
        else:
            lanes = vectors[0].type.count
            even, odd = list(range(0, 2 * lanes, 2)), list(range(1, 2 * lanes, 2))
            vectors = [
                e.shuffle(vectors[i], even, vectors[i + 1]) | e.shuffle(vectors[i], odd, vectors[i + 1])
                for i in range(0, len(vectors), 2)
            ]
        width //= 2
    while len(vectors) > 1:
        both = 2 * vectors[0].type.count
        vectors = [e.shuffle(vectors[i], range(both), vectors[i + 1]) for i in range(0, len(vectors), 2)]
    return vectors[0]


__all__ = ["ARGUMENTS", "SideEncoder", "encode_kernel"]
