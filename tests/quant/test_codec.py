"""The codec: layout and meaning of MLX's affine quantisation, bf16 scales, every token by itself."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import InvalidParams
from kvd.quant.codec import decode, encode, from_bf16_bits, to_bf16_bits
from kvd.quant.errors import NonFiniteValues
from kvd.quant.spec import SideFormat

SIDES = [SideFormat(bits, group) for bits in (2, 4, 8) for group in (32, 64)]


def values(seed: int = 0, heads: int = 3, tokens: int = 17, dim: int = 64) -> np.ndarray:
    """Values with an offset and outlier channels, as keys have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((heads, tokens, dim), dtype=np.float32) + 0.5
    x[..., ::13] *= 9
    return x


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_mlx_reads_what_the_codec_writes(side: SideFormat) -> None:
    """`mx.dequantize` on our codes gives what `decode` gives, up to one rounding."""
    encoded = encode(values(), side)
    scales, biases = (mx.array(from_bf16_bits(part)) for part in encoded[1:])
    theirs = mx.dequantize(mx.array(encoded.codes), scales, biases, group_size=side.group, bits=side.bits)
    ours = decode(*encoded, side)
    np.testing.assert_allclose(ours, np.array(theirs), rtol=3e-7, atol=1e-6)
    assert ours.dtype == np.float32


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_the_error_is_about_that_of_mlx(side: SideFormat) -> None:
    """Rounding scale and bias to bf16 hardly adds error against MLX with float32 scales.

    At 8 bits it adds most: the scale's rounding, times 255, is up to half a step.
    """
    x = values(tokens=256)
    packed, scales, biases = mx.quantize(mx.array(x), group_size=side.group, bits=side.bits)
    theirs = np.array(mx.dequantize(packed, scales, biases, group_size=side.group, bits=side.bits))
    ours = decode(*encode(x, side), side)
    assert np.square(ours - x).mean() <= (1.2 if side.bits == 8 else 1.06) * np.square(theirs - x).mean()


def test_codes_are_nearest_to_the_stored_scale_and_bias() -> None:
    """Codes are computed against the *rounded* scale and bias: no other code reads back closer."""
    side = SideFormat(4)
    x = values(tokens=64)
    encoded = encode(x, side)
    read = decode(*encoded, side)
    step = from_bf16_bits(encoded.scales).repeat(side.group, axis=-1)
    codes = np.rint((read - from_bf16_bits(encoded.biases).repeat(side.group, axis=-1)) / step)
    for change in (-1, 1):
        other_is_legal = (codes + change >= 0) & (codes + change <= 15)
        other = read + change * step
        closer = np.abs(other - x) < np.abs(read - x) - 1e-5
        assert not (closer & other_is_legal).any()


def test_shapes_and_types() -> None:
    """Codes [heads, tokens, words] in uint32, scales and biases [heads, tokens, groups] as bf16 bits."""
    encoded = encode(values(heads=2, tokens=5, dim=128), SideFormat(4))
    assert (encoded.codes.shape, encoded.codes.dtype) == ((2, 5, 16), np.uint32)
    assert (encoded.scales.shape, encoded.scales.dtype) == ((2, 5, 2), np.uint16)
    assert (encoded.biases.shape, encoded.biases.dtype) == ((2, 5, 2), np.uint16)
    assert all(part.flags.owndata or part.base is not None for part in encoded)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from(SIDES))
@settings(max_examples=25, deadline=None)
def test_a_token_is_encoded_by_itself(seed: int, cut: int, side: SideFormat) -> None:
    """Cutting a chunk anywhere gives the same bytes: chunk sizes and neighbours change nothing."""
    x = values(seed, tokens=41)
    whole = encode(x, side)
    parts = [encode(x[:, :cut], side), encode(x[:, cut:], side)]
    for one, split in zip(whole, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(one, np.concatenate(split, axis=1))


def test_strides_do_not_matter() -> None:
    """A transposed view encodes to the same bytes as its contiguous copy."""
    x = values(tokens=8).transpose(1, 0, 2)
    for view, copy in zip(encode(x, SideFormat(4)), encode(np.ascontiguousarray(x), SideFormat(4)), strict=True):
        np.testing.assert_array_equal(view, copy)


@pytest.mark.parametrize("side", SIDES, ids=str)
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.5, 1e-30])
def test_a_constant_group_reads_back(side: SideFormat, constant: float) -> None:
    """Equal values have no range; they read back within bf16's precision."""
    x = np.full((1, 2, 64), constant, np.float32)
    np.testing.assert_allclose(decode(*encode(x, side), side), x, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_values_that_cannot_be_stored_are_refused(bad: float) -> None:
    """NaN, infinity and ranges beyond float32 raise a typed error instead of writing nonsense."""
    x = values()
    x[1, 3, 5], x[1, 3, 6] = bad, -bad
    with pytest.raises(NonFiniteValues):
        encode(x, SideFormat(4))


@pytest.mark.parametrize("shape", [(3, 64), (1, 2, 3, 64), (1, 2, 48)])
def test_impossible_shapes_are_refused(shape: tuple[int, ...]) -> None:
    """Anything but [heads, tokens, n * group] is the caller's mistake."""
    with pytest.raises(InvalidParams):
        encode(np.zeros(shape, np.float32), SideFormat(4))


def test_bf16_rounds_to_nearest_even() -> None:
    """Rounding agrees with mlx's on ties, negative values, denormals and large values."""
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0xBF808001, 0x00000001, 0x7F7F0000, 0x3F7FFFFF], np.uint32)
    x = np.concatenate([bits.view(np.float32), np.random.default_rng(1).standard_normal(999, dtype=np.float32)])
    theirs = np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16))
    np.testing.assert_array_equal(to_bf16_bits(x), theirs)
    np.testing.assert_array_equal(to_bf16_bits(from_bf16_bits(theirs)), theirs)


def test_decode_writes_into_a_given_buffer() -> None:
    """`out` is filled and returned: no backend needs a copy of its own codec."""
    for side in SIDES:
        encoded = encode(values(), side)
        out = np.full((3, 17, 64), np.nan, np.float32)
        assert decode(*encoded, side, out=out) is out
        np.testing.assert_array_equal(out, decode(*encoded, side))
