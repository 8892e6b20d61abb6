"""The model-side cache: quantise on write, exact positions, replay, rollback, windows, and the six lazy failures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvd.attention import ReferenceBackend, UnsupportedMask
from kvd.errors import InternalError, InvalidParams
from kvd.ids import Fingerprint, FrameId
from kvd.model.cache import PagedHandle, SequenceCache
from kvd.model.dispatch import dispatching
from kvd.model.errors import UnsupportedModel
from kvd.model.page_writer import NumpyWriter, page_writer
from kvd.model.spec import LayerSpec, ModelCacheSpec
from kvd.quant.codec import decode, encode
from kvd.quant.errors import NonFiniteValues
from kvd.quant.spec import PAGE_TOKENS, SideFormat
from kvd.store.frame_pool import FramePool
from tests.model.paged import (
    DIM,
    HEADS,
    KV_HEADS,
    all_bytes,
    frames_of,
    ids_of,
    plain_logits,
    relative_error,
    replay,
    sequence_over,
    small_llama,
    small_spec,
    step,
)

WINDOW = 300


@pytest.fixture
def model() -> Iterator[Any]:
    """A small llama with the dispatcher in place."""
    made = small_llama()
    with dispatching(made):
        yield made


@pytest.fixture
def hybrid() -> Iterator[Any]:
    """A llama with two sliding layers and a full one, with the dispatcher in place."""
    made = small_llama(3, window=WINDOW)
    with dispatching(made):
        yield made


def keys(tokens: int, seed: int = 0, heads: int = KV_HEADS) -> mx.array:
    """Random mx [1, heads, tokens, DIM]."""
    return mx.array(np.random.default_rng(seed).standard_normal((1, heads, tokens, DIM), dtype=np.float32))


# ---- equality with the plain model ----------------------------------------------------------------------------------


def test_8_bit_pages_are_close_to_no_cache(model: Any) -> None:
    """Chunks across page borders over q8 pages give nearly the logits of the model without a cache."""
    pool, spec = FramePool(1 << 28), small_spec()
    sequence = sequence_over(pool, spec)
    ids = ids_of(600)
    parts = [step(model, sequence, ids[a:b]) for a, b in ((0, 250), (250, 260), (260, 599), (599, 600))]
    right = plain_logits(model, ids)
    assert relative_error(np.concatenate(parts), right) < 0.02
    assert sequence.tokens == 600


@pytest.mark.parametrize("name", ["q4", "k8v4", "q4c"])
def test_coarse_formats_still_resemble_the_model(model: Any, name: str) -> None:
    """P32: every format works end to end; conditioning is applied to keys and queries alike."""
    sequence = sequence_over(FramePool(1 << 28), small_spec(), name=name)
    ids = ids_of(300)
    mine = np.concatenate([step(model, sequence, ids[:200]), step(model, sequence, ids[200:])])
    right = plain_logits(model, ids)
    assert np.corrcoef(mine.ravel(), right.ravel())[0, 1] > 0.97


def test_attention_sees_what_was_stored(model: Any) -> None:
    """P29: the reference over the frames and the served path agree, so no unquantised cache hides anywhere."""
    ids = ids_of(280)
    served = sequence_over(FramePool(1 << 28), small_spec(), name="q2")
    oracle = sequence_over(FramePool(1 << 28), small_spec(), name="q2", backend=ReferenceBackend())
    mine = [step(model, one, ids[:270]) for one in (served, oracle)]
    np.testing.assert_allclose(mine[0], mine[1], atol=5e-3 * np.abs(mine[1]).max())


@pytest.mark.parametrize("tokens", [200, 700])
def test_hybrid_models_keep_groups_apart(hybrid: Any, tokens: int) -> None:
    """P31: sliding and full layers have their own block tables; chunks around the window agree with the plain model."""
    sequence = sequence_over(FramePool(1 << 28), small_spec(3, window=WINDOW))
    ids = ids_of(tokens)
    parts = [step(hybrid, sequence, ids[:150]), step(hybrid, sequence, ids[150:-1]), step(hybrid, sequence, ids[-1:])]
    right = plain_logits(hybrid, ids)
    assert relative_error(np.concatenate(parts), right) < 0.02


def test_sliding_groups_need_only_their_window(hybrid: Any) -> None:
    """Old pages of a sliding group may be unmapped and dropped: the next tokens are the same, bit for bit."""
    ids = ids_of(720)
    results = []
    for drop in (False, True):
        pool, spec = FramePool(1 << 28), small_spec(3, window=WINDOW)
        sequence = sequence_over(pool, spec)
        step(hybrid, sequence, ids[:700])
        if drop:
            table = frames_of(0, 4)
            sequence.set_block_table(0, table[1:], first_page=1)
            pool.drop(table[0])
        results.append(step(hybrid, sequence, ids[700:]))
    np.testing.assert_array_equal(*results)


def test_unmapping_the_window_is_refused(hybrid: Any) -> None:
    """A step that would miss tokens of the window, or of a full group, does not start."""
    sequence = sequence_over(FramePool(1 << 28), small_spec(3, window=WINDOW))
    step(hybrid, sequence, ids_of(700))
    for group, first_page in ((0, 2), (1, 1)):
        sequence.set_block_table(group, frames_of(group, 4)[first_page:], first_page=first_page)
        with pytest.raises(InternalError):
            sequence.begin_step(1)
        sequence.set_block_table(group, frames_of(group, 4))


# ---- positions, bytes, replay ---------------------------------------------------------------------------------------


def test_a_replay_needs_the_window_of_the_token_it_computes() -> None:
    """It begins one token earlier than a step would, and so does what it sees: a page too few is refused."""
    sequence = sequence_over(FramePool(1 << 28), small_spec(3, window=101))
    sequence.tokens = 356
    for group in (0, 1):
        sequence.set_block_table(group, frames_of(group, 4))
    sequence.set_block_table(0, frames_of(0, 4)[1:], first_page=1)
    with pytest.raises(InternalError, match="maps tokens 256 to 1024"):
        sequence.begin_replay()  # token 355 sees tokens from 255 on
    sequence.begin_step(1)  # token 356 sees tokens from 256 on
    sequence.abort_step()
    sequence.set_block_table(0, frames_of(0, 4))
    sequence.begin_replay()


@pytest.mark.parametrize(("start", "count"), [(0, 3), (250, 6), (256, 256), (100, 500), (255, 1)])
def test_tokens_land_at_their_positions(start: int, count: int) -> None:
    """K and V of positions start.. are the codec's bytes at those tokens of those pages; nothing else changes."""
    pool, spec = FramePool(1 << 28), small_spec(1)
    sequence = sequence_over(pool, spec, name="q4")
    sequence.tokens = start
    sequence.begin_step(count)
    k, v = keys(count, 1), keys(count, 2)
    sequence.layer_caches[0].update_and_fetch(k, v)
    sequence.end_step()
    side = sequence.layouts[0].page_format.layers[0].k
    table = frames_of(0, 4)
    for x, which in ((k, "k"), (v, "v")):
        expected = encode(np.array(x)[0], side)
        stored = [getattr(pool.layer(frame, 0), which) for frame in table]
        for part in ("codes", "scales", "biases"):
            whole = np.concatenate([getattr(arrays, part) for arrays in stored], axis=1)
            np.testing.assert_array_equal(whole[:, start : start + count], getattr(expected, part))
            assert not whole[:, :start].any()
            assert not whole[:, start + count :].any()


def test_equal_steps_give_equal_bytes(model: Any) -> None:
    """With the same step partition two sequences have the same bytes and logits, wherever their frames are."""
    pool, spec = FramePool(1 << 28), small_spec()
    one, two = sequence_over(pool, spec), sequence_over(pool, spec, first_frame=500)
    ids = ids_of(400)
    for a, b in ((0, 300), (300, 301), (301, 400)):
        np.testing.assert_array_equal(step(model, one, ids[a:b]), step(model, two, ids[a:b]))
    assert all_bytes(pool, spec) == [pool.export(frame) for frame in frames_of(0, 4, 500)]


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 400])
def test_replay_gives_the_logits_and_changes_no_byte(model: Any, tokens: int) -> None:
    """EXACT: the last token's logits again, from KV that exists; offset, bytes and token count stay."""
    pool, spec = FramePool(1 << 28), small_spec()
    sequence = sequence_over(pool, spec)
    ids = ids_of(tokens)
    if tokens > 1:
        step(model, sequence, ids[:-1])
    last = step(model, sequence, ids[-1:])[-1]
    before = all_bytes(pool, spec)
    np.testing.assert_array_equal(replay(model, sequence, ids[-1]), last)
    assert all_bytes(pool, spec) == before
    assert sequence.tokens == tokens
    assert sequence.layer_caches[0].offset == tokens


def test_truncate_and_write_again(model: Any) -> None:
    """Rollback to any token, then the same tokens in the same step: same bytes as if it had never gone on."""
    pool, spec = FramePool(1 << 28), small_spec()
    sequence = sequence_over(pool, spec)
    ids = ids_of(420)
    step(model, sequence, ids[:300])
    first = step(model, sequence, ids[300:420])
    before = all_bytes(pool, spec)
    sequence.truncate(420)
    sequence.truncate(300)
    step(model, sequence, ids_of(120, seed=9))
    sequence.truncate(300)
    np.testing.assert_array_equal(step(model, sequence, ids[300:420]), first)
    assert all_bytes(pool, spec) == before


def test_a_failed_step_does_not_count(model: Any) -> None:
    """NaN in the model raises and leaves the token count; after the cause is gone the step works."""
    pool, spec = FramePool(1 << 28), small_spec()
    sequence = sequence_over(pool, spec)
    ids = ids_of(40)
    step(model, sequence, ids[:30])
    good = model.layers[1].self_attn.v_proj.weight
    model.layers[1].self_attn.v_proj.weight = good * mx.nan
    sequence.begin_step(10)
    with pytest.raises(NonFiniteValues):
        model(mx.array([ids[30:]]), cache=sequence.layer_caches)
    sequence.abort_step()
    assert sequence.tokens == 30
    model.layers[1].self_attn.v_proj.weight = good
    fresh = sequence_over(FramePool(1 << 28), spec)
    step(model, fresh, ids[:30])
    np.testing.assert_array_equal(step(model, sequence, ids[30:]), step(model, fresh, ids[30:]))


# ---- the duck type --------------------------------------------------------------------------------------------------


def test_offset_follows_the_step() -> None:
    """`offset` is the position of the next token: before and after `update_and_fetch`, between steps, in a replay."""
    sequence = sequence_over(FramePool(1 << 28), small_spec(1))
    cache = sequence.layer_caches[0]
    sequence.begin_step(5)
    assert cache.offset == 0
    handles = cache.update_and_fetch(keys(5), keys(5))
    assert cache.offset == 5
    assert handles[0] == PagedHandle((1, KV_HEADS, 5, DIM), mx.float32)
    assert cache.state == []
    sequence.end_step()
    assert cache.offset == 5
    sequence.begin_replay()
    assert cache.offset == 4
    cache.update_and_fetch(keys(1), keys(1))
    assert cache.offset == 5
    sequence.end_step()


def test_masks_are_words_until_a_model_insists() -> None:
    """None for a token, `causal` for a chunk; an array is the causal (and windowed) one and is accepted back."""
    sequence = sequence_over(FramePool(1 << 28), small_spec(2, window=6))
    sliding, full = sequence.layer_caches
    sequence.tokens = 8
    assert sliding.make_mask(1, window_size=6) is None
    assert full.make_mask(3) == "causal"
    ages = np.arange(8, 11)[:, None] - np.arange(11)[None]
    np.testing.assert_array_equal(np.array(full.make_mask(3, return_array=True)), ages >= 0)
    mask = sliding.make_mask(3, return_array=True, window_size=6)
    np.testing.assert_array_equal(np.array(mask), (ages >= 0) & (ages < 6))
    sequence.begin_step(3)
    sliding.update_and_fetch(keys(3), keys(3))
    assert sliding.attend(keys(3, heads=HEADS), scale=0.1, mask=mask).shape == (1, HEADS, 3, DIM)


def test_foreign_masks_and_windows_are_refused() -> None:
    """A mask the cache did not make, no mask for a chunk, or another window than the layer's: a loud error."""
    sequence = sequence_over(FramePool(1 << 28), small_spec(1))
    cache = sequence.layer_caches[0]
    sequence.begin_step(3)
    cache.update_and_fetch(keys(3), keys(3))
    for mask in (mx.ones((3, 3), dtype=mx.bool_), None, "full"):
        with pytest.raises(UnsupportedMask):
            cache.attend(keys(3, heads=HEADS), scale=0.1, mask=mask)
    with pytest.raises(UnsupportedMask):
        cache.make_mask(3, window_size=128)


def test_models_that_compute_on_fetched_arrays_fail_at_once() -> None:
    """Handles are no arrays: arithmetic on them, or attention without the dispatcher, raises instead of being wrong."""
    sequence = sequence_over(FramePool(1 << 28), small_spec())
    sequence.begin_step(3)
    handle, _ = sequence.layer_caches[0].update_and_fetch(keys(3), keys(3))
    with pytest.raises(TypeError):
        handle * 2  # type: ignore[operator]
    sequence.abort_step()
    sequence.begin_step(3)
    with pytest.raises(TypeError):
        small_llama()(mx.array([[1, 2, 3]]), cache=sequence.layer_caches)


def test_the_step_protocol_is_checked(model: Any) -> None:
    """Steps do not nest, have frames, are of the announced length, and every layer writes; nothing counts otherwise."""
    sequence = sequence_over(FramePool(1 << 28), small_spec(), pages=1)
    cache = sequence.layer_caches[0]
    with pytest.raises(InternalError):
        cache.update_and_fetch(keys(2), keys(2))
    for wrong in (sequence.end_step, sequence.begin_replay, lambda: sequence.begin_step(0)):
        with pytest.raises(InternalError):
            wrong()
    with pytest.raises(InternalError):
        sequence.begin_step(PAGE_TOKENS + 1)
    sequence.begin_step(2)
    for wrong in (lambda: sequence.begin_step(1), sequence.begin_replay, lambda: sequence.truncate(0)):
        with pytest.raises(InternalError):
            wrong()
    with pytest.raises(InternalError):
        cache.update_and_fetch(keys(3), keys(3))
    with pytest.raises(InternalError):
        cache.update_and_fetch(mx.concatenate([keys(2)] * 2), mx.concatenate([keys(2)] * 2))
    cache.update_and_fetch(keys(2), keys(2))
    with pytest.raises(InternalError, match="wrote nothing"):
        sequence.end_step()
    assert sequence.tokens == 0
    step(model, sequence, ids_of(PAGE_TOKENS))
    with pytest.raises(InternalError):
        sequence.truncate(PAGE_TOKENS + 1)


def test_frames_of_another_format_are_refused() -> None:
    """A block table names existing frames of the group's own format."""
    pool = FramePool(1 << 28)
    sequence = sequence_over(pool, small_spec(), name="q4")
    sequence_over(pool, small_spec(), name="q8", first_frame=500)
    with pytest.raises(InternalError):
        sequence.set_block_table(0, frames_of(0, 1, 500))
    with pytest.raises(InternalError):
        sequence.set_block_table(0, [FrameId(77_777)])


def test_what_has_no_pages_is_refused() -> None:
    """Layers with recurrent state, layouts that do not fit, and conditioned formats without constants."""
    pool, spec = FramePool(1 << 28), small_spec()
    good = sequence_over(pool, spec, name="q4c")
    arguments: dict[str, Any] = {"pool": pool, "backend": good.backend}
    with pytest.raises(InvalidParams, match="conditioning"):
        SequenceCache(spec=spec, layouts=good.layouts, **arguments)
    with pytest.raises(InvalidParams):
        SequenceCache(spec=spec, layouts=[], **arguments)
    states = type(spec)("m", spec.fingerprint, (*spec.layers, LayerSpec("state", 1, 64, 64)), HEADS, 4096, 128, 0)
    with pytest.raises(UnsupportedModel):
        SequenceCache(spec=states, layouts=good.layouts, **arguments)


# ---- the six lazy-evaluation failures of the paper ------------------------------------------------------------------


def test_lazy_1_the_cache_is_not_empty_after_prefill(model: Any) -> None:
    """Failure 1, "cache appears empty": KV is in the frames although nobody evaluated the model's output."""
    pool, spec = FramePool(1 << 28), small_spec()
    sequence = sequence_over(pool, spec)
    sequence.begin_step(100)
    logits = model(mx.array([ids_of(100)]), cache=sequence.layer_caches)
    sequence.end_step()
    before = all_bytes(pool, spec)
    for layer in range(2):
        arrays = pool.layer(frames_of(0, 4)[0], layer)
        assert arrays.k.scales[:, :100].all()
        assert arrays.v.scales[:, :100].all()
    mx.eval(logits)
    assert all_bytes(pool, spec) == before


def test_lazy_2_memory_does_not_grow_over_steps(model: Any) -> None:
    """Failure 2, "memory grows": after many steps no graph or array of earlier ones is alive (P23)."""
    sequence = sequence_over(FramePool(1 << 28), small_spec())
    for _ in range(3):
        step(model, sequence, ids_of(4))
    gc.collect()
    before = mx.get_active_memory()
    for _ in range(60):
        step(model, sequence, ids_of(4))
    gc.collect()
    assert mx.get_active_memory() - before < 64 << 10


def test_lazy_3_reloaded_pages_are_not_zero(model: Any) -> None:
    """Failure 3, "zeros after reload": bytes exported, dropped and filled into new frames serve the same logits."""
    pool, spec = FramePool(1 << 28), small_spec()
    sequence = sequence_over(pool, spec)
    ids = ids_of(400)
    step(model, sequence, ids[:-1])
    last = step(model, sequence, ids[-1:])[-1]
    table, layout = frames_of(0, 4), sequence.layouts[0]
    saved = [pool.export(frame) for frame in table]
    moved = [FrameId(50 + page) for page in range(4)]
    for old, new, payload in zip(table, moved, saved, strict=True):
        pool.drop(old)
        pool.create(new, layout)
        pool.fill(new, payload)
    sequence.set_block_table(0, moved)
    np.testing.assert_array_equal(replay(model, sequence, ids[-1]), last)


def test_lazy_4_scales_and_biases_are_stored_with_their_codes() -> None:
    """Failure 4, "corrupted quantisation": after the call frames decode to the input; nothing is left to evaluate."""
    pool = FramePool(1 << 28)
    sequence = sequence_over(pool, small_spec(1))
    k = keys(40)
    lazy = k * 1.0 + 0.0
    sequence.begin_step(40)
    sequence.layer_caches[0].update_and_fetch(lazy, lazy)
    arrays = pool.layer(frames_of(0, 4)[0], 0).k
    side = sequence.layouts[0].page_format.layers[0].k
    lazy += 100.0
    mx.eval(lazy)
    read = decode(arrays.codes[:, :40], arrays.scales[:, :40], arrays.biases[:, :40], side)
    np.testing.assert_allclose(read, np.array(k)[0], atol=0.03)


def test_lazy_5_loaded_pages_have_their_types(model: Any) -> None:
    """Failure 5, "attention NaNs": a payload of another format cannot enter a frame; loaded ones attend finitely."""
    pool, spec = FramePool(1 << 28), small_spec()
    sequence = sequence_over(pool, spec, name="q4")
    other = sequence_over(pool, spec, name="q8", first_frame=500)
    ids = ids_of(300)
    step(model, other, ids)
    frame = frames_of(0, 4)[0]
    with pytest.raises(InvalidParams):
        pool.fill(frame, pool.export(frames_of(0, 4, 500)[0]))
    step(model, sequence, ids)
    pool.fill(frame, pool.export(frame))
    arrays = pool.layer(frame, 1)
    assert (arrays.k.codes.dtype, arrays.k.scales.dtype) == (np.uint32, np.uint16)
    assert np.isfinite(replay(model, sequence, ids[-1])).all()


def test_lazy_6_steps_of_two_sequences_interleave(model: Any) -> None:
    """Failure 6, "batch hangs": steps of two sequences, interleaved, give each what it gets alone, at once (P28)."""
    pool, spec = FramePool(1 << 28), small_spec()
    pair = [sequence_over(pool, spec), sequence_over(pool, spec, first_frame=500)]
    alone = [sequence_over(FramePool(1 << 28), spec) for _ in pair]
    texts = [ids_of(300, seed) for seed in (1, 2)]
    for a, b in ((0, 270), (270, 271), (271, 300)):
        together = [step(model, sequence, ids[a:b]) for sequence, ids in zip(pair, texts, strict=True)]
        for mine, sequence, ids in zip(together, alone, texts, strict=True):
            np.testing.assert_array_equal(mine, step(model, sequence, ids[a:b]))


def test_two_geometries_of_one_format_do_not_mix() -> None:
    """A format's id says nothing of heads and widths: writers and backends look places up by layout."""
    for kv_heads in (1, 4, 2):
        layer = LayerSpec("full", kv_heads, DIM, DIM)
        layout = ModelCacheSpec("m", Fingerprint("0" * 32), (layer, layer), 4, 4096, 8, 0).groups[0]
        pages = layout.layout(layout.format("q8"))
        pool = FramePool(1 << 24)
        pool.create(FrameId(0), pages)
        x = np.random.default_rng(kv_heads).standard_normal((kv_heads, 40, DIM), dtype=np.float32)
        for writer in (page_writer(pages.page_format.layers[1], DIM, DIM), NumpyWriter(pages.page_format.layers[1])):
            writer.write(pool, FrameId(0), 1, x, -x, 100)
            arrays = pool.layer(FrameId(0), 1)
            np.testing.assert_array_equal(arrays.k.codes[:, 100:140], encode(x, SideFormat(8, 64)).codes)
            np.testing.assert_array_equal(arrays.v.scales[:, 100:140], encode(-x, SideFormat(8, 64)).scales)
            pool.view(FrameId(0))[:] = 0


def test_tokens_that_do_not_fit_a_page_are_refused() -> None:
    """The compiled writer checks before it writes: other heads, other widths, beyond the end."""
    pool, spec = FramePool(1 << 24), small_spec()
    layout = spec.groups[0].layout(spec.groups[0].format("q8"))
    pool.create(FrameId(0), layout)
    writer = page_writer(layout.page_format.layers[0], DIM, DIM)
    good = np.zeros((2, 4, DIM), np.float32)
    for keys, values, first in (
        (np.zeros((3, 4, DIM), np.float32), good, 0),
        (good, np.zeros((2, 4, 2 * DIM), np.float32), 0),
        (good, good, PAGE_TOKENS - 3),
    ):
        with pytest.raises((InternalError, ValueError)):
            writer.write(pool, FrameId(0), 0, keys, values, first)
    assert not pool.view(FrameId(0)).any()
