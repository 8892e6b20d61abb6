"""Keys grouped along tokens: bytes depend on the keys alone, groups close from stored values, cuts reopen them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

from kvd.bench.ppl import ppl
from kvd.errors import InvalidParams
from kvd.quant.codec import decode, encode, from_bf16_bits, to_bf16_bits
from kvd.quant.errors import NonFiniteValues
from kvd.quant.simulate import GroupedKeysCache
from kvd.quant.spec import LayerFormat, PageFormat, PageLayout, SideFormat
from kvd.quant.token_groups import GROUP_TOKENS, KeyPage, open_side, read_keys, shorten, write_keys

SIDE = SideFormat(4, 64, axis="tokens")
DIMS = (64, 96, 128, 256)


def keys_like_a_model(seed: int = 0, heads: int = 2, tokens: int = 256, dim: int = 64) -> np.ndarray:
    """Keys with outlier channels and a first token far from all others (an attention sink)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((heads, tokens, dim), dtype=np.float32)
    x[..., ::13] = x[..., ::13] * 3 + 20
    x[:, 0] *= -9
    return x


def filled(keys: np.ndarray, chunk: int, side: SideFormat = SIDE) -> KeyPage:
    """A page that got `keys` in chunks."""
    page = KeyPage.empty(keys.shape[0], keys.shape[2], side)
    for start in range(0, keys.shape[1], chunk):
        write_keys(page, keys[:, start : start + chunk], start, side)
    return page


def page_bytes(page: KeyPage) -> list[bytes]:
    """All bytes of a page, open area included."""
    return [part.tobytes() for part in (page.codes, page.scales, page.biases, page.first, *page.open_rows)]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200, 256])
def test_bytes_do_not_depend_on_chunks(dim: int, tokens: int) -> None:
    """Chunks of 1, 7, 64 or all at once give identical bytes, open rows too: a whole group takes both roundings."""
    keys = keys_like_a_model(tokens=tokens, dim=dim)
    expected = page_bytes(filled(keys, 512))
    for chunk in (1, 7, 64):
        assert page_bytes(filled(keys, chunk)) == expected


def test_a_group_closes_from_its_stored_rows() -> None:
    """Restored equals not restored: who gets 40 rows from a log and 24 new keys closes to the same 4-bit bytes."""
    keys = keys_like_a_model()[:, :64]
    restored = KeyPage.empty(2, 64, SIDE)
    before = filled(keys[:, :40], 512)
    restored.first[...] = before.first
    for new, old in zip(restored.open_rows, before.open_rows, strict=True):
        new[:, :40] = old[:, :40]
    write_keys(restored, keys[:, 40:], 40, SIDE)
    assert page_bytes(restored) == page_bytes(filled(keys, 512))


def test_closed_values_are_near_in_each_channel() -> None:
    """A closed group reads back within about a step of its 8-bit rows, in each channel's own scale."""
    keys = keys_like_a_model(tokens=128)
    page = filled(keys, 512)
    rows = decode(*encode(keys[:, 64:], open_side(64)), open_side(64))
    read = read_keys(page, 128, SIDE)[:, 64:]
    step = np.abs(from_bf16_bits(page.scales[:, 1]))[:, None]
    spread = rows.max(axis=1, keepdims=True) - rows.min(axis=1, keepdims=True)
    np.testing.assert_allclose(step, spread / 15, rtol=0.15)
    # half a step; at the end of the range far from the bias up to one, which the scale gave up to have 0 on its grid
    assert (np.abs(read - rows) <= 1.1 * step).all()
    assert np.sqrt(np.square((read - rows) / step).mean()) < 0.4  # 0.29 for uniform rounding


def test_outlier_channels_leave_the_others_alone() -> None:
    """The reason for the axis: the error in ordinary channels is a fifth of that of groups along the head dimension."""
    keys = keys_like_a_model(tokens=256)
    ordinary = np.ones(64, bool)
    ordinary[::13] = False
    along_tokens = read_keys(filled(keys, 512), 256, SIDE)
    side = SideFormat(4, 64)
    along_head = decode(*encode(keys, side), side)
    errors = [np.square((read - keys)[:, 1:, ordinary]).mean() for read in (along_tokens, along_head)]
    assert errors[0] < errors[1] / 25


def test_the_first_token_is_kept_apart() -> None:
    """Token 0 reads back as bf16, open or closed, and another first token changes no other byte of the closed group."""
    keys = keys_like_a_model(tokens=64)
    exact = from_bf16_bits(to_bf16_bits(keys[:, :1]))
    for tokens in (1, 40, 64):
        np.testing.assert_array_equal(read_keys(filled(keys[:, :tokens], 512), tokens, SIDE)[:, :1], exact)
    other = keys.copy()
    other[:, 0] = 1000.0
    one, two = filled(keys, 512), filled(other, 512)
    assert page_bytes(one)[:3] == page_bytes(two)[:3]
    assert (one.first != two.first).any()


@pytest.mark.parametrize(
    ("held", "tokens"), [(256, 250), (256, 1), (200, 64), (130, 100), (64, 63), (70, 70), (70, 66)]
)
def test_a_cut_reopens_the_group(held: int, tokens: int) -> None:
    """After a cut tokens read as before it, to 8 bits; twice the same cut gives the same bytes; exact at borders."""
    keys = keys_like_a_model(tokens=held)
    page, twin = filled(keys, 512), filled(keys, 7)
    before = read_keys(page, held, SIDE)[:, :tokens]
    shorten(page, held, tokens, SIDE)
    shorten(twin, held, tokens, SIDE)
    assert page_bytes(page) == page_bytes(twin)
    after = read_keys(page, tokens, SIDE)
    kept = tokens // GROUP_TOKENS * GROUP_TOKENS
    if tokens // GROUP_TOKENS == held // GROUP_TOKENS or tokens == kept:
        kept = tokens
    np.testing.assert_array_equal(after[:, :kept], before[:, :kept])
    step = (before.max(axis=-1) - before.min(axis=-1))[..., None] / 255
    assert (np.abs(after - before) <= step + 2**-8 * np.abs(before).max(axis=-1, keepdims=True)).all()


def test_writing_goes_on_after_a_cut() -> None:
    """The page of a shortened space takes new keys: the reopened group closes again over old and new ones."""
    keys = keys_like_a_model(tokens=256)
    page = filled(keys, 512)
    shorten(page, 256, 100, SIDE)
    rows = decode(*(part[:, :36].copy() for part in page.open_rows), open_side(64))
    write_keys(page, keys[:, 100:140], 100, SIDE)
    read = read_keys(page, 140, SIDE)
    step = np.abs(from_bf16_bits(page.scales[:, 1]))[:, None]
    assert (np.abs(read[:, 64:100] - rows) <= 1.1 * step).all()
    np.testing.assert_array_equal(read[:, :64], read_keys(filled(keys, 512), 256, SIDE)[:, :64])


def test_bytes_of_a_full_page() -> None:
    """A full page takes what `q4` keys take, and 2 bytes a channel for the first token; the open area is beside it."""
    page = KeyPage.empty(3, 64, SIDE)
    assert page.held_bytes(256) == 256 * SideFormat(4, 64).token_bytes(3, 64) + 3 * 64 * 2
    assert page.held_bytes(0) == 0
    assert page.held_bytes(65) == 64 * 3 * 36 + 3 * 64 * 2 + SideFormat(8, 64).token_bytes(3, 64)


@pytest.mark.parametrize("place", [0, 5, 64])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 3.4e38])
def test_what_is_not_finite_is_refused(place: int, wrong: float) -> None:
    """NaN, infinity and values that round beyond bf16 raise, also as the first token, which no scale covers (P8)."""
    keys = keys_like_a_model(tokens=70)
    keys[1, place, 3] = wrong
    with pytest.raises(NonFiniteValues):
        filled(keys, 512)


def test_what_does_not_fit_is_refused() -> None:
    """A page has 256 tokens and its own shape; nothing is written when keys do not fit."""
    page = filled(keys_like_a_model(tokens=200), 512)
    before = page_bytes(page)
    for keys, first in ((keys_like_a_model(tokens=57), 200), (keys_like_a_model(heads=1, tokens=1), 200)):
        with pytest.raises(InvalidParams, match="do not fit"):
            write_keys(page, keys, first, SIDE)
    for held, tokens in ((200, 201), (257, 1), (200, -1)):
        with pytest.raises(InvalidParams):
            shorten(page, held, tokens, SIDE)
    assert page_bytes(page) == before


def test_codecs_refuse_each_others_axis() -> None:
    """No side is silently coded along the wrong axis, and pages with such sides cannot be laid out yet."""
    keys = keys_like_a_model(tokens=64)
    with pytest.raises(InvalidParams, match="codec of their own"):
        encode(keys, SIDE)
    with pytest.raises(InvalidParams, match="codec of their own"):
        decode(*encode(keys, SideFormat(4)), SIDE)
    with pytest.raises(InvalidParams, match="along tokens"):
        KeyPage.empty(1, 64, SideFormat(4))
    with pytest.raises(InvalidParams, match="64 raw values"):
        SideFormat(4, 32, axis="tokens")
    page_format = PageFormat("q4t", (LayerFormat(SIDE, SideFormat(4)),))
    with pytest.raises(InvalidParams, match="not supported yet"):
        PageLayout(layer_indices=(0,), kv_heads=1, k_dim=64, v_dim=64, page_format=page_format)


def test_the_simulated_cache_reads_pages() -> None:
    """Over page borders and odd chunks the cache answers what pages read, values by the ordinary codec."""
    keys, values = keys_like_a_model(tokens=300), keys_like_a_model(1, tokens=300)
    cache = GroupedKeysCache(LayerFormat(SIDE, SideFormat(4)))
    for start, end in ((0, 10), (10, 250), (250, 299), (299, 300)):
        got = cache.update_and_fetch(*(mx.array(x[None, :, start:end]) for x in (keys, values)))
    expected = [read_keys(filled(keys[:, :256], 512), 256, SIDE), read_keys(filled(keys[:, 256:], 512), 44, SIDE)]
    np.testing.assert_array_equal(np.array(got[0])[0], np.concatenate(expected, axis=1))
    np.testing.assert_array_equal(np.array(got[1])[0], decode(*encode(values, SideFormat(4)), SideFormat(4)))
    key_bytes = 2 * (256 * 36 + 128) + 2 * (44 * 68 + 128)
    assert (cache.offset, cache.encoded_bytes) == (300, key_bytes + 300 * 2 * 36)


def test_bench_ppl_measures_the_codec(tiny_model_dir: Path) -> None:
    """`kvd bench ppl --formats q4t`: perplexity through the codec, its bytes between q4's pages and q8's."""
    done = CliRunner().invoke(
        ppl,
        [
            "--model",
            str(tiny_model_dir),
            "--formats",
            "q4,q4t,q8",
            "--windows",
            "1",
            "--window-tokens",
            "257",
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    q4, q4t, q8 = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert q4["bytes_per_token"] < q4t["bytes_per_token"] < 1.02 * q4["bytes_per_token"] < q8["bytes_per_token"]
    assert q4t["ratio"] == pytest.approx(1, abs=0.1)
