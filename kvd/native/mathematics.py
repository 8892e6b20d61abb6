"""What kernels share: powers of two, bf16, codes inside packed words, sums over groups of lanes.

May import kvd.native.emit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kvd.native.emit import F32, I16, I32, Emitter, Value, vector

LOG2_E: Final = math.log2(math.e)
LOWEST: Final = -1e30
"""Score of what is not seen: finite, so that differences of two stay numbers, and below every true score."""

_EXP2: Final = (
    1.0,
    6.931471805599453e-1,
    2.402265069591007e-1,
    5.550410866482158e-2,
    9.618129107628477e-3,
    1.3333558146428443e-3,
    1.5403530393381609e-4,
)
"""Taylor coefficients ln(2)^n / n! of 2^x; on [-1/2, 1/2] the next term is below 2e-7 of the sum."""


def exp2(e: Emitter, x: Value) -> Value:
    """2 to the power of each lane (or of a scalar), relative error below 3e-7; below -126 it gives 2^-126, not 0.

    x = k + r with whole k and |r| <= 1/2: the polynomial gives 2^r, adding k to the exponent field the rest.
    """
    integers = vector(I32, x.type.count) if hasattr(x.type, "count") else I32
    x = e.maximum(x, e.constant(x.type, -126.0))
    whole = e.intrinsic("llvm.rint", x)
    rest = x - whole
    power = e.constant(x.type, _EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        power = e.fma(power, rest, e.constant(x.type, coefficient))
    exponent = (e.to_int(whole) + 127) << 23
    assert str(exponent.type) == str(integers)
    return power * e.bitcast(exponent, x.type)


def sigmoid(e: Emitter, x: Value) -> Value:
    """1 / (1 + exp(-x)), lane by lane."""
    one = e.constant(x.type, 1.0)
    return one / (one + exp2(e, e.minimum(x * -LOG2_E, e.constant(x.type, 126.0))))


def load_bf16(e: Emitter, base: Value, index: Value | int, lanes: int) -> Value:
    """`lanes` bf16 numbers of an array as float32."""
    bits = e.widen(e.load(base, index, I16, lanes), vector(I32, lanes))
    return e.bitcast(bits << 16, vector(F32, lanes))


def load_bf16_scalar(e: Emitter, base: Value, index: Value | int) -> Value:
    """One bf16 number of an array as float32."""
    return e.bitcast(e.widen(e.load(base, index, I16), I32) << 16, F32)


def masked_code(e: Emitter, words: Value, number: int, bits: int) -> Value:
    """Code `number` of each packed word as a float, times `code_weight(number, bits)`.

    Codes are not shifted down, only cut out: a power of two is free where the other factor is made (see `code_weight`).
    The last code would be negative as a signed integer, so that one is shifted.
    """
    last = 32 // bits - 1
    cut = words >> (bits * last) if number == last else words & (((1 << bits) - 1) << (bits * number))
    return e.to_float(cut)


def code_weight(number: int, bits: int) -> float:
    """What a masked code must be multiplied with to be the code's value."""
    return 1.0 if number == 32 // bits - 1 else 2.0 ** (-bits * number)


def sum_lanes(e: Emitter, rows: Sequence[Value], width: int) -> Value:
    """Sums over `width` neighbouring lanes of `width` vectors, as one vector: sums of the first vector first.

    Args:
        e: the emitter.
        rows: `width` vectors of n lanes (a power of two, a multiple of `width`).
        width: lanes of a group, a power of two.
    """
    while len(rows) > 1:
        lanes = rows[0].type.count
        even, odd = list(range(0, 2 * lanes, 2)), list(range(1, 2 * lanes, 2))
        rows = [
            e.shuffle(rows[i], even, rows[i + 1]) + e.shuffle(rows[i], odd, rows[i + 1]) for i in range(0, len(rows), 2)
        ]
        width //= 2
    assert width == 1
    return rows[0]


__all__ = [
    "LOG2_E",
    "LOWEST",
    "code_weight",
    "exp2",
    "load_bf16",
    "load_bf16_scalar",
    "masked_code",
    "sigmoid",
    "sum_lanes",
]
