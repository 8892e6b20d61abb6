"""Compiled kernels for what a transformer block does between its products: norms, rotary embedding, gates.

All work in place or from one array into another, on float32 rows. May import kvd.native.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from kvd.native import mathematics as maths
from kvd.native.build import Address, Integer, Number, compile_kernel, processor
from kvd.native.emit import F32, Emitter, Value, vector

Gate = Literal["silu", "gelu"]

GATE_ARGUMENTS: Final = {"gate": Address, "up": Address, "count": Integer}
"""gate(a) * b over float32 [count] twice; the result replaces the first."""

NORM_ARGUMENTS: Final = {"x": Address, "weight": Address, "out": Address, "rows": Integer, "epsilon": Number}
"""x / sqrt(mean(x^2) + epsilon) * weight, row by row: float32 [rows, width] and [width]; `out` may be `x`."""

ROPE_ARGUMENTS: Final = {"x": Address, "cos": Address, "sin": Address, "tokens": Integer, "heads": Integer}
"""Rotary embedding in place: float32 [tokens, heads, dim], [tokens, dim / 2] twice."""

_GELU_CUBIC: Final = 0.044715
_GELU_SCALE: Final = 2 * math.sqrt(2 / math.pi)
_CHAINS: Final = 4


@functools.cache
def gate_kernel(name: Gate) -> Callable[..., None]:
    """The compiled gate; see `GATE_ARGUMENTS`.

    silu(x) = x sigmoid(x). gelu is the tanh approximation, x (1 + tanh(u)) / 2 = x sigmoid(2 u) with u = sqrt(2 / pi)
    (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016).

    Raises:
        KernelUnavailable: this processor cannot run it.
    """
    lanes = processor().lanes
    return _compiled(f"gate_{name}", functools.partial(_write_gate, name, lanes), GATE_ARGUMENTS, (name, lanes))


@functools.cache
def norm_kernel(width: int) -> Callable[..., None]:
    """The compiled root-mean-square norm of rows of a width; see `NORM_ARGUMENTS` (Zhang and Sennrich, 2019).

    Raises:
        KernelUnavailable: this processor cannot run it.
    """
    lanes = _dividing(width)
    return _compiled("norm", functools.partial(_write_norm, width, lanes), NORM_ARGUMENTS, (width, lanes))


@functools.cache
def rope_kernel(dim: int) -> Callable[..., None]:
    """The compiled rotary embedding of heads of a width, value i turning with value i + dim / 2; see `ROPE_ARGUMENTS`.

    Raises:
        KernelUnavailable: this processor cannot run it.
    """
    lanes = _dividing(dim // 2)
    return _compiled("rope", functools.partial(_write_rope, dim, lanes), ROPE_ARGUMENTS, (dim, lanes))


def _compiled(
    name: str, write: Callable[[Emitter], None], arguments: Mapping[str, Any], parameters: tuple[object, ...]
) -> Callable[..., None]:
    return compile_kernel(name, write, arguments, parameters=parameters, sources=(maths.__name__, __name__))


def _dividing(width: int) -> int:
    """Lanes of the widest vector that divides a width."""
    return math.gcd(width, processor().lanes)


def _write_gate(name: str, lanes: int, e: Emitter) -> None:
    gate, up, count = (e.arguments[each] for each in GATE_ARGUMENTS)
    whole = count // lanes * lanes
    with e.loop(0, whole, lanes) as i:
        e.store(_gated(e, name, e.load(gate, i, F32, lanes)) * e.load(up, i, F32, lanes), gate, i)
    with e.loop(whole, count) as i:
        e.store(_gated(e, name, e.load(gate, i, F32)) * e.load(up, i, F32), gate, i)


def _gated(e: Emitter, name: str, x: Value) -> Value:
    if name == "silu":
        return x * maths.sigmoid(e, x)
    cubic = e.fma(x * x * x, e.constant(x.type, _GELU_CUBIC), x)
    return x * maths.sigmoid(e, cubic * _GELU_SCALE)


def _write_norm(width: int, lanes: int, e: Emitter) -> None:
    x, weight, out, rows, epsilon = (e.arguments[each] for each in NORM_ARGUMENTS)
    step = lanes * _CHAINS
    whole = width // step * step
    with e.loop(0, rows) as row:
        source, target = e.at(x, row * width, F32), e.at(out, row * width, F32)
        sums = [e.slot(e.constant(vector(F32, lanes), 0.0)) for _ in range(_CHAINS)]
        with e.loop(0, whole, step) as i:
            for chain, each in enumerate(sums):
                value = e.load(source, i + chain * lanes, F32, lanes)
                each.set(e.fma(value, value, each.get()))
        with e.loop(whole, width, lanes) as i:
            value = e.load(source, i, F32, lanes)
            sums[0].set(e.fma(value, value, sums[0].get()))
        total = sums[0].get()
        for each in sums[1:]:
            total = total + each.get()
        mean = e.fold(total) * (1 / width)
        scale = e.splat(e.constant(F32, 1.0) / e.intrinsic("llvm.sqrt", mean + epsilon), lanes)
        with e.loop(0, width, lanes) as i:
            e.store(e.load(source, i, F32, lanes) * scale * e.load(weight, i, F32, lanes), target, i)


def _write_rope(dim: int, lanes: int, e: Emitter) -> None:
    x, cos, sin, tokens, heads = (e.arguments[each] for each in ROPE_ARGUMENTS)
    half = dim // 2
    with e.loop(0, tokens) as token, e.loop(0, heads) as head:
        row = e.at(x, (token * heads + head) * dim, F32)
        with e.loop(0, half, lanes) as i:
            c, s = (e.load(table, token * half + i, F32, lanes) for table in (cos, sin))
            low, high = e.load(row, i, F32, lanes), e.load(row, i + half, F32, lanes)
            e.store(e.fma(low, c, -(high * s)), row, i)
            e.store(e.fma(low, s, high * c), row, i + half)


__all__ = [
    "GATE_ARGUMENTS",
    "NORM_ARGUMENTS",
    "ROPE_ARGUMENTS",
    "Gate",
    "gate_kernel",
    "norm_kernel",
    "rope_kernel",
]
