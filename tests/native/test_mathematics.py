"""What kernels share: powers of two, sigmoids, codes in words, sums over lanes, control flow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="compiled kernels need llvmlite")

from kvd.model.block_kernels import gate_kernel, norm_kernel, rope_kernel
from kvd.native import mathematics as maths
from kvd.native import products
from kvd.native.build import Address, compile_kernel, processor
from kvd.native.emit import F32, I32, I64, Emitter, vector

pytestmark = pytest.mark.skipif(not processor().has_fma, reason="this processor has no fused multiply-add")

LANES = 8


def run(name: str, body: Callable[[Emitter], None], *arrays: np.ndarray) -> None:
    """Compile a kernel over arrays `a0`, `a1`, … and run it once."""
    arguments = {f"a{i}": Address for i in range(len(arrays))}
    kernel = compile_kernel(name, body, arguments, parameters=(), sources=(maths.__name__, __name__), cache=None)
    kernel(*(array.ctypes.data for array in arrays))


def test_powers_of_two() -> None:
    """Relative error below 3e-7 over the whole range; what is lower gives a tiny positive number."""
    x = np.concatenate([np.linspace(-126, 126, 8000), [-1e30, -500, 0, -0.0, 1, -1, 0.5, -0.5]]).astype(np.float32)
    y = np.empty_like(x)

    def body(e: Emitter) -> None:
        with e.loop(0, len(x), LANES) as i:
            e.store(maths.exp2(e, e.load(e.arguments["a0"], i, F32, LANES)), e.arguments["a1"], i)

    run("exp2", body, x, y)
    right = np.exp2(np.maximum(x.astype(np.float64), -126))
    assert np.abs(y / right - 1).max() < 3e-7


@pytest.mark.parametrize("name", ["silu", "gelu"])
@pytest.mark.parametrize("count", [1, 15, 16, 4007])
def test_gates(name: str, count: int) -> None:
    """gate(a) * b at any length, also for values whose exponential overflows; the rest of memory is untouched."""
    a = (np.random.default_rng(0).standard_normal(count + 1) * 20).astype(np.float32)
    a[: min(count, 3)] = [1000, -1000, 0][: min(count, 3)]
    b = np.random.default_rng(1).standard_normal(count + 1).astype(np.float32)
    x = a[:count].astype(np.float64)
    with np.errstate(over="ignore"):
        u = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        right = x / (1 + np.exp(-(x if name == "silu" else u))) * b[:count]
    last = a[count]
    gate_kernel(name)(a.ctypes.data, b.ctypes.data, count)  # type: ignore[arg-type]
    np.testing.assert_allclose(a[:count], right, rtol=2e-6, atol=1e-6)
    assert a[count] == last


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_in_words(bits: int) -> None:
    """A code that is cut out, times its weight, is the code; the last one of a word is not negative."""
    words = np.random.default_rng(0).integers(0, 2**32, LANES, dtype=np.uint32)
    words[0] = 0xFFFFFFFF
    codes = 32 // bits
    out = np.empty((codes, LANES), np.float32)

    def body(e: Emitter) -> None:
        held = e.load(e.arguments["a0"], 0, I32, LANES)
        for number in range(codes):
            e.store(maths.masked_code(e, held, number, bits), e.arguments["a1"], number * LANES)

    run(f"codes{bits}", body, words, out)
    weights = np.array([maths.code_weight(number, bits) for number in range(codes)])[:, None]
    right = (words[None] >> (np.arange(codes, dtype=np.uint32) * np.uint32(bits))[:, None]) & ((1 << bits) - 1)
    np.testing.assert_array_equal(out * weights, right)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_sums_over_lanes(width: int) -> None:
    """Neighbouring lanes of several vectors are added, in order."""
    x = np.random.default_rng(0).integers(0, 9, (width, LANES)).astype(np.float32)
    out = np.empty(LANES, np.float32)

    def body(e: Emitter) -> None:
        rows = [e.load(e.arguments["a0"], i * LANES, F32, LANES) for i in range(width)]
        e.store(maths.sum_lanes(e, rows, width), e.arguments["a1"], 0)

    run(f"sums{width}", body, x, out)
    np.testing.assert_array_equal(out, x.reshape(-1, width).sum(1))


def test_control_flow() -> None:
    """Loops with steps, conditions and variables do what they would do in Python."""
    out = np.zeros(4, np.int64)

    def body(e: Emitter) -> None:
        total, odd = e.slot(e.index(0)), e.slot(e.index(0))
        with e.loop(3, 20, 4) as i:  # 3, 7, 11, 15, 19
            total.set(total.get() + i)
            with e.when(i > 10):
                odd.set(odd.get() + 1)
        e.store(total.get(), e.arguments["a0"], 0)
        e.store(odd.get(), e.arguments["a0"], 1)
        with e.loop(5, 5) as i:
            e.store(i, e.arguments["a0"], 2)
        with e.either(e.index(1) < 2) as (yes, no):
            with yes:
                e.store(e.index(7), e.arguments["a0"], 3)
            with no:
                e.store(e.index(8), e.arguments["a0"], 3)

    run("control", body, out)
    np.testing.assert_array_equal(out, [55, 3, 0, 7])


def test_folding_and_spreading() -> None:
    """Greatest, least and summed lanes; a scalar in all lanes."""
    x = np.array([3, -7, 2, 9, 0, 1, -1, 4], np.float32)
    out = np.zeros(3 + LANES, np.float32)

    def body(e: Emitter) -> None:
        held = e.load(e.arguments["a0"], 0, F32, LANES)
        for place, how in enumerate(("add", "max", "min")):
            e.store(e.fold(held, how), e.arguments["a1"], place)
        e.store(e.splat(e.load(e.arguments["a0"], 3, F32), LANES), e.arguments["a1"], 3)
        assert str(held.type) == str(vector(F32, LANES))
        assert e.index(3).type == I64

    run("fold", body, x, out)
    np.testing.assert_array_equal(out, [11, 9, -7, *[9] * LANES])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize(("columns", "inner"), [(7, 64), (48, 576), (1, 1024), (33, 16)])
def test_products_of_a_few_rows(rows: int, columns: int, inner: int) -> None:
    """x weight^T against float64, at every number of rows, also where a row is shorter than the unrolled step."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, inner)).astype(np.float32)
    weight = rng.standard_normal((columns, inner)).astype(np.float32)
    assert products.fits(rows, inner)
    right = x.astype(np.float64) @ weight.T.astype(np.float64)
    # sums of 1,024 products reach 100, and with 8 lanes each is rounded 128 times
    np.testing.assert_allclose(products.times(x, weight), right, atol=4e-5)


def test_products_that_do_not_fit_are_told() -> None:
    """More rows, or rows that are no whole number of vectors, are somebody else's business."""
    assert not products.fits(products.MOST_ROWS + 1, 64)
    assert not products.fits(1, 64 + 1)


@pytest.mark.parametrize("width", [16, 64, 96, 576, 640])
def test_norms(width: int) -> None:
    """x / sqrt(mean(x^2) + epsilon) * weight, also in place, row by row."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((5, width)).astype(np.float32), rng.standard_normal(width).astype(np.float32)
    right = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * weight
    out = np.empty_like(x)
    norm_kernel(width)(x.ctypes.data, weight.ctypes.data, out.ctypes.data, 5, 1e-3)
    np.testing.assert_allclose(out, right, rtol=2e-6, atol=1e-6)
    norm_kernel(width)(x.ctypes.data, weight.ctypes.data, x.ctypes.data, 5, 1e-3)
    np.testing.assert_array_equal(x, out)


@pytest.mark.parametrize("dim", [32, 64, 96, 256])
def test_rotary_embedding(dim: int) -> None:
    """Value i of a head turns with value i + dim / 2, every head of a token by the same angles."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2, dim)).astype(np.float32)
    angles = rng.standard_normal((3, dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = x[..., : dim // 2].copy(), x[..., dim // 2 :].copy()
    rope_kernel(dim)(x.ctypes.data, cos.ctypes.data, sin.ctypes.data, 3, 2)
    np.testing.assert_allclose(x[..., : dim // 2], low * cos[:, None] - high * sin[:, None], atol=1e-6)
    np.testing.assert_allclose(x[..., dim // 2 :], low * sin[:, None] + high * cos[:, None], atol=1e-6)
