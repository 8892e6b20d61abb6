"""The compiled codec writes the codec's bytes, where they belong, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.native import KernelUnavailable
from kvd.quant.codec import encode
from kvd.quant.errors import NonFiniteValues
from kvd.quant.spec import SideFormat, group_for

HEADS, TOKENS, CAPACITY, FIRST = 3, 37, 64, 9


def encoder(side: SideFormat, dim: int):
    """The compiled codec of a side; skipped where it cannot run."""
    native = pytest.importorskip("kvd.quant.native_codec", reason="llvmlite is not installed")
    try:
        return native.SideEncoder(side, dim, CAPACITY)
    except KernelUnavailable as error:
        pytest.skip(str(error))


def values(kind: str, dim: int) -> np.ndarray:
    """float32 [heads, tokens, dim] that try a corner of the arithmetic."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((HEADS, TOKENS, dim)).astype(np.float32)
    if kind == "wide":
        x *= np.exp(rng.standard_normal(x.shape) * 6).astype(np.float32)
    elif kind == "whole":
        x = np.round(x)
    elif kind == "constant":
        x[0], x[1], x[2] = 0.0, -0.0, 3.25
        x[0, 1] = 1e-9
    elif kind == "tiny":
        x = np.abs(x) * np.float32(1e-30)
    elif kind == "negative":
        x = -np.abs(x)
    return x


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", ["normal", "wide", "whole", "constant", "tiny", "negative"])
def test_the_bytes_are_the_codecs(dim: int, bits: int, kind: str) -> None:
    """One codec defines the truth: codes, scales and biases are equal bit for bit; neighbours are not touched."""
    side = SideFormat(bits, group_for(dim))
    x = values(kind, dim)
    strided = np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)  # as models hand them over: tokens outermost
    right = encode(x, side)
    for source in (x, strided):
        codes = np.full((HEADS, CAPACITY, side.words(dim)), 0xABABABAB, np.uint32)
        scales = np.full((HEADS, CAPACITY, side.groups(dim)), 0xABAB, np.uint16)
        biases = scales.copy()
        encoder(side, dim).write(source, tuple(a.ctypes.data for a in (codes, scales, biases)), FIRST)
        for mine, expected, untouched in (
            (codes, right[0], 0xABABABAB),
            (scales, right[1], 0xABAB),
            (biases, right[2], 0xABAB),
        ):
            np.testing.assert_array_equal(mine[:, FIRST : FIRST + TOKENS], expected)
            assert (mine[:, :FIRST] == untouched).all()
            assert (mine[:, FIRST + TOKENS :] == untouched).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize("place", [(0, 0, 0), (2, TOKENS - 1, 63)])
def test_what_is_not_finite_is_refused(bad: float, place: tuple[int, int, int]) -> None:
    """The same values are refused as by the codec, wherever they stand; the next call is not affected."""
    side = SideFormat(4, 64)
    x = values("normal", 64)
    page = np.zeros((HEADS, CAPACITY, 8), np.uint32), *np.zeros((2, HEADS, CAPACITY, 1), np.uint16)
    mine = encoder(side, 64)
    x[place] = bad
    with pytest.raises(NonFiniteValues):
        encode(x, side)
    with pytest.raises(NonFiniteValues):
        mine.write(x, tuple(a.ctypes.data for a in page), 0)
    mine.write(values("normal", 64), tuple(a.ctypes.data for a in page), 0)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_token_of_each_of_several_pages(bits: int) -> None:
    """What a batch writes in one call is what each row would write alone; rows that are left out write nothing."""
    side = SideFormat(bits, 64)
    rows = np.ascontiguousarray(values("normal", 64).swapaxes(0, 1))  # float32 [rows, heads, dim]
    words = side.words(64)
    shape = np.dtype([("codes", np.uint32, (HEADS, CAPACITY, words)), ("sides", np.uint16, (2, HEADS, CAPACITY))])
    pages = np.full(4 * shape.itemsize, 0xAB, np.uint8).view(shape)
    offsets = (0, shape.fields["sides"][1], shape.fields["sides"][1] + 2 * HEADS * CAPACITY)
    places = [(0, 0, 5), (2, 1, 0), (3, 3, CAPACITY - 1)]  # row of the values, page, place
    base = pages.ctypes.data
    addressed = [(row, base + page * shape.itemsize, token) for row, page, token in places]
    encoder(side, 64).write_tokens(rows, offsets, addressed)
    right = np.full(4 * shape.itemsize, 0xAB, np.uint8).view(shape)
    for row, page, token in places:
        codes, scales, biases = encode(rows[row][:, None], side)
        right[page]["codes"][:, token] = codes[:, 0]
        right[page]["sides"][0, :, token], right[page]["sides"][1, :, token] = scales[:, 0, 0], biases[:, 0, 0]
    assert pages.tobytes() == right.tobytes()
    rows[2, 1, 7] = np.nan
    with pytest.raises(NonFiniteValues):
        encoder(side, 64).write_tokens(rows, offsets, addressed)
