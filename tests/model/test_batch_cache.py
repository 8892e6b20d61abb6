"""Batches of sequences in one forward pass: rows are what they would be alone, join and leave, fail together.

Quantise-on-write turns a rounding error of a product into another code now and then, so logits of a batch and of its
rows alone are not equal to the bit: `TOLERANCE` is what that may do. With equal values in the pages rows are equal to
the bit, or nearly (`tests/attention/test_cpu_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from kvd.attention import AttentionBackend, MlxBackend, ReferenceBackend
from kvd.attention.select import BACKENDS, suitable_backends
from kvd.errors import InternalError
from kvd.ids import FrameId
from kvd.model import cpu_assist
from kvd.model.batch_cache import BatchCache
from kvd.model.cache import SequenceCache
from kvd.model.dispatch import dispatching
from kvd.model.forward import Forward, step
from kvd.model.spec import ModelCacheSpec
from kvd.quant.errors import NonFiniteValues
from kvd.store.frame_pool import FramePool
from tests.model import test_cpu_assist as assisted
from tests.model import test_families as families
from tests.model.paged import VOCAB, ids_of, relative_error, sequence_over, small_llama, small_spec

LENGTHS: Final = [3, 255, 257, 120, 31, 256, 1, 90]

TOLERANCE: Final = 0.005
"""Most that logits of a row may differ, of their spread (root mean square). Without a flipped code it is 1e-5, with one
0.0005; a row that is one position off differs by 0.03 and more."""


@pytest.fixture
def model() -> Iterator[Any]:
    """A small llama with the dispatcher in place."""
    made = small_llama()
    with dispatching(made):
        yield made


def sequences(spec: ModelCacheSpec, names: list[str], backend: AttentionBackend, pages: int = 3) -> list[SequenceCache]:
    """Empty sequences of a pool, one for each name of a format."""
    pool = FramePool(1 << 30)
    return [
        sequence_over(pool, spec, pages, name=name, backend=backend, first_frame=10_000 * number)
        for number, name in enumerate(names)
    ]


def both(
    model: Any, spec: ModelCacheSpec, names: list[str], backend: AttentionBackend, lengths: list[int], vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [rows, steps, vocab] of six forced tokens after prompts of those lengths: rows alone, and as a batch."""
    forward = Forward(model, assisted=not isinstance(backend, MlxBackend))
    steps = np.random.default_rng(5).integers(0, vocab, (len(lengths), 6))
    alone, batched = sequences(spec, names, backend), sequences(spec, names, backend)
    for rows in (alone, batched):
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            prompt = np.random.default_rng(number).integers(0, vocab, length).tolist()
            forward.step(row, prompt, wants_logits=False)
    right = [
        [forward.step(row, [int(i)], wants_logits=True) for i in ids] for row, ids in zip(alone, steps, strict=True)
    ]
    batch = BatchCache.merge(batched)
    mine = [forward.step_batch(batch, steps[:, at : at + 1].tolist()) for at in range(steps.shape[1])]
    assert [row.tokens for row in batched] == [length + 6 for length in lengths]
    return np.array(right), np.stack(mine, 1)


def worst_row(mine: np.ndarray, right: np.ndarray) -> float:
    """The largest relative error of a row; a wrong one must not hide among others."""
    return max(relative_error(a, b) for a, b in zip(mine, right, strict=True))


def backends() -> list[str]:
    """Those of this machine that may serve."""
    return [name for name in ("mlx", "cpu") if name in suitable_backends()]


# ---- rows are what they are alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("backend", backends())
def test_a_batch_computes_what_its_rows_do(model: Any, backend: str, rows: int) -> None:
    """P28: 1 to 8 rows of unequal lengths, one of them about to fill a page: the logits of each alone."""
    right, mine = both(model, small_spec(), ["q8"] * rows, BACKENDS[backend](), LENGTHS[:rows], VOCAB)
    assert worst_row(mine, right) < TOLERANCE


@pytest.mark.parametrize("name", ["q4", "k8v4", "q4c", "q2"])
@pytest.mark.parametrize("backend", backends())
def test_every_page_format(model: Any, backend: str, name: str) -> None:
    """P32: keys of all rows are conditioned alike and land in their own frames."""
    right, mine = both(model, small_spec(), [name] * 4, BACKENDS[backend](), LENGTHS[:4], VOCAB)
    assert worst_row(mine, right) < TOLERANCE


@pytest.mark.parametrize("family", list(families.CONFIGS))
def test_every_family(family: str) -> None:
    """P31: experts, sinks, windows, K wider than V, one KV head, a latent: mlx-lm's models with an offset per row."""
    made = families.model_of(family)
    with dispatching(made):
        spec, vocab = families.spec_of(family), families.VOCAB
        right, mine = both(made, spec, ["q8"] * 4, MlxBackend(), LENGTHS[:4], vocab)
    assert worst_row(mine, right) < TOLERANCE


@pytest.mark.parametrize("maker", assisted.MAKERS)
def test_assisted_blocks(maker: Callable[[], Any]) -> None:
    """Blocks outside mlx run the rows through one product, turn each at its own position, and attend in one call."""
    if "cpu" not in suitable_backends():
        pytest.skip("cpu is not for this machine")
    made = assisted.make(maker)
    with dispatching(made):
        assert cpu_assist.install(made) == ("blocks", "output")
        names = ["q8", "q4", "q8", "q4c", "q8", "q8", "q8", "q8"]
        right, mine = both(made, assisted.spec_of(made), names, BACKENDS["cpu"](), LENGTHS, assisted.VOCAB)
    assert worst_row(mine, right) < TOLERANCE


def test_a_rotary_base_that_grows_with_the_context() -> None:
    """mlx-lm's dynamic rotary embedding takes one offset; each row has the base of its own length."""
    mx.random.seed(1)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=256,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        rope_scaling={"type": "dynamic", "factor": 4.0},
    )
    made = llama.Model(arguments)
    mx.eval(made.parameters())
    with dispatching(made):
        right, mine = both(made, small_spec(), ["q8"] * 3, MlxBackend(), [3, 200, 90], VOCAB)
    assert worst_row(mine, right) < TOLERANCE


def test_chunks_of_equal_length(model: Any) -> None:
    """Several tokens of every row in one step, across page borders: bytes of the same tokens alone, nearly."""
    for backend in backends():
        alone, batched = (sequences(small_spec(), ["q8"] * 3, BACKENDS[backend]()) for _ in range(2))
        forward = Forward(model)
        for rows in (alone, batched):
            for number, row in enumerate(rows):
                forward.step(row, ids_of(250 + number, number), wants_logits=False)
        chunks = [ids_of(9, 10 + number) for number in range(3)]
        right = np.stack([forward.step(row, ids, wants_logits=True) for row, ids in zip(alone, chunks, strict=True)])
        assert worst_row(forward.step_batch(BatchCache.merge(batched), chunks), right) < TOLERANCE


# ---- joining, leaving, replaying ------------------------------------------------------------------------------------


def test_rows_join_and_leave_at_any_step(model: Any) -> None:
    """The longest leaves first, a new one joins, one goes on alone: every row's logits stay those of a lone run."""
    lone, rows = (sequences(small_spec(), ["q8"] * 4, ReferenceBackend()) for _ in range(2))
    forward = Forward(model)
    for group in (lone, rows):
        for number, length in enumerate((300, 20, 60, 7)):
            forward.step(group[number], ids_of(length, number), wants_logits=False)
    ids = np.random.default_rng(3).integers(0, VOCAB, (4, 9))
    done = [0] * 4
    for members in ((0, 1, 2), (0, 1, 2), (1, 2), (3, 1, 2), (2, 3), (3,), (0, 3)):
        batch = BatchCache.merge([rows[number] for number in members])
        mine = forward.step_batch(batch, [[int(ids[number, done[number]])] for number in members])
        for place, number in enumerate(members):
            assert batch.extract(place) is rows[number]
            right = forward.step(lone[number], [int(ids[number, done[number]])], wants_logits=True)
            assert relative_error(mine[place], right) < TOLERANCE
            done[number] += 1
    assert [row.tokens for row in rows] == [row.tokens for row in lone] == [303, 24, 65, 11]


@pytest.mark.parametrize("backend", backends())
def test_a_replay_beside_rows_that_grow(model: Any, backend: str) -> None:
    """EXACT in a batch: the last token's logits again; its row's bytes and count stay, the other row grows."""
    forward, spec = Forward(model), small_spec()
    one, two = sequences(spec, ["q8", "q8"], BACKENDS[backend]())
    forward.step(one, ids_of(256, 1), wants_logits=False)
    right = np.array(forward.step(one, [5], wants_logits=True))
    forward.step(two, ids_of(30, 2), wants_logits=False)
    mine, theirs = ([FrameId(start + 3 - page) for page in range(3)] for start in (0, 10_000))
    before, other = [one.pool.export(frame) for frame in mine], [two.pool.export(frame) for frame in theirs]
    logits = step(model, BatchCache.merge([two, one]), [[9], [5]], replays={1})
    assert relative_error(logits[1], right) < TOLERANCE
    assert [one.pool.export(frame) for frame in mine] == before
    assert [two.pool.export(frame) for frame in theirs] != other
    assert (one.tokens, two.tokens) == (257, 31)
    logits[:] = 0  # hooks write into them


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assist", [False, True])
def test_a_failed_step_counts_for_no_row(assist: bool) -> None:
    """One row's NaN fails the step for all; afterwards no step runs, and the same step without it works."""
    made = small_llama()
    backend: AttentionBackend = MlxBackend()
    if assist:
        if "cpu" not in suitable_backends():
            pytest.skip("cpu is not for this machine")
        backend = BACKENDS["cpu"]()
        assert "blocks" in cpu_assist.install(made)
    weight = made.model.embed_tokens.weight
    made.model.embed_tokens.weight = mx.where(mx.arange(VOCAB)[:, None] == 99, mx.nan, weight)
    forward = Forward(made)
    with dispatching(made):
        rows = sequences(small_spec(), ["q8"] * 3, backend)
        for number, row in enumerate(rows):
            forward.step(row, [1, 2, 3, 4][: number + 2], wants_logits=False)
        batch = BatchCache.merge(rows)
        with pytest.raises(NonFiniteValues):
            forward.step_batch(batch, [[1], [99], [2]])
        assert [row.tokens for row in rows] == [2, 3, 4]
        assert not any(row.stepping for row in rows)
        again = forward.step_batch(batch, [[1], [3], [2]])
    assert np.isfinite(np.delete(again, 99, axis=1)).all()  # the embeddings are tied
    assert [row.tokens for row in rows] == [3, 4, 5]


def test_the_protocol_of_a_batch(model: Any) -> None:
    """Steps begin for all rows or none, replays are single tokens, shapes fit, and every layer writes."""
    rows = sequences(small_spec(), ["q8"] * 2, MlxBackend(), pages=1)
    batch, forward = BatchCache.merge(rows), Forward(model)
    with pytest.raises(InternalError):
        batch.begin_step(1, replays={0})  # no token to replay
    rows[1].begin_step(4)
    with pytest.raises(InternalError):
        batch.begin_step(1)
    assert (rows[0].stepping, rows[1].stepping) == (False, True)  # the lone step is not ended by the refusal
    rows[1].abort_step()
    for wrong in (lambda: batch.begin_step(257), lambda: batch.begin_step(2, replays={1}), batch.end_step):
        with pytest.raises(InternalError):
            wrong()
    with pytest.raises(InternalError):
        batch.begin_step(1, replays={2})
    batch.begin_step(1)
    keys = mx.zeros((3, 2, 1, 64))
    with pytest.raises(InternalError):
        batch.layer_caches[0].update_and_fetch(keys, keys)
    batch.layer_caches[0].update_and_fetch(keys[:2] + 1, keys[:2] + 1)
    with pytest.raises(InternalError, match="took part"):
        batch.end_step()
    for ids in ([[1]], [[1], [2, 3]], [[1], [2], [3]]):
        with pytest.raises(InternalError):
            forward.step_batch(batch, ids)
    assert [row.tokens for row in rows] == [0, 0]
    assert not any(row.stepping for row in rows)
    assert len(batch) == 2


def test_what_cannot_be_one_batch() -> None:
    """No rows, a row twice, rows of other pools: refused; so is a row that is not there."""
    one, two = sequences(small_spec(), ["q8"] * 2, MlxBackend())
    (other,) = sequences(small_spec(), ["q8"], one.backend)
    for rows in ([], [one, two, one], [one, other]):
        with pytest.raises(InternalError):
            BatchCache.merge(rows)
    with pytest.raises(InternalError):
        BatchCache.merge([one, two]).extract(2)


def test_offsets_and_masks_of_rows() -> None:
    """Offsets are one per row; an array mask is causal and windowed for each row, and is accepted back."""
    rows = sequences(small_spec(2, window=6), ["q8"] * 2, MlxBackend())
    rows[0].tokens, rows[1].tokens = 8, 3
    batch = BatchCache.merge(rows)
    sliding, full = batch.layer_caches
    assert isinstance(full.offset, mx.array)
    assert full.offset.tolist() == [8, 3]
    assert full.make_mask(3) == "causal"
    ages = np.array([8, 3])[:, None, None, None] + np.arange(3)[:, None] - np.arange(11)
    np.testing.assert_array_equal(np.array(full.make_mask(3, return_array=True)), ages >= 0)
    batch.begin_step(3)
    mask = sliding.make_mask(3, return_array=True, window_size=6)
    np.testing.assert_array_equal(np.array(mask), (ages >= 0) & (ages < 6))
    keys = mx.array(np.random.default_rng(0).standard_normal((2, 2, 3, 64), dtype=np.float32))
    handle, _ = sliding.update_and_fetch(keys, keys)
    assert handle.shape == (2, 2, 11, 64)
    assert full.offset.tolist() == [8, 3]
    assert sliding.attend(mx.concatenate([keys, keys], axis=1), scale=0.1, mask=mask).shape == (2, 4, 3, 64)


def test_layers_of_a_step_share_one_array_of_positions(model: Any) -> None:
    """Every layer asks for the rows' positions twice; they are made once a step, and anew for the next."""
    rows = sequences(small_spec(), ["q8"] * 2, MlxBackend())
    batch = BatchCache.merge(rows)
    caches = batch.layer_caches
    batch.begin_step(1)
    first = caches[0].offset
    assert all(cache.offset is first for cache in caches)
    batch.abort_step()
    for number, row in enumerate(rows):
        Forward(model).step(row, ids_of(3 + number), wants_logits=False)
    batch.begin_step(1)
    assert caches[1].offset.tolist() == [3, 4]
    batch.abort_step()
