"""P28: teacher-forced, batch 1 against batch n: every page format, 1 to 8 query heads a KV head, K wider than V.

Every case runs the same script. Rows have unequal lengths, the longest of them crosses a page border; one row joins in
the middle, its prompt computed between steps of the others; the longest leaves first, places change, and the last goes
on alone. Tokens are forced, so a flipped code cannot lead the runs apart: only its effect on logits is seen, which is
bounded by `TOLERANCE`.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from kvd.attention import AttentionBackend, MlxBackend
from kvd.attention.select import BACKENDS, suitable_backends
from kvd.ids import Fingerprint
from kvd.model import cpu_assist
from kvd.model.batch_cache import BatchCache
from kvd.model.cache import SequenceCache
from kvd.model.dispatch import dispatching
from kvd.model.forward import Forward
from kvd.model.spec import LayerSpec, ModelCacheSpec
from kvd.quant.spec import NAMED_FORMATS
from kvd.store.frame_pool import FramePool
from tests.model import test_families as families
from tests.model.paged import relative_error, sequence_over
from tests.model.test_batch_cache import TOLERANCE

LENGTHS: Final = (254, 61, 30)
SCRIPT: Final = ((0, 1), (0, 1), (0, 1, 2), (2, 0, 1), (2, 1), (1,))
"""Rows of each step, in their places."""
DIM, VOCAB = 64, 128


@functools.cache
def grouped(heads: int, kv_heads: int) -> tuple[Any, ModelCacheSpec]:
    """A llama of two layers with these heads, and its geometry. Weights are large enough to make attention peaked."""
    mx.random.seed(heads)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=DIM,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
    )
    model = llama.Model(arguments)
    for layer in model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            part = getattr(layer.self_attn, name)
            part.weight = part.weight * 2
    mx.eval(model.parameters())
    if "cpu" in suitable_backends():
        assert "blocks" in cpu_assist.install(model)  # rows share products there, which round otherwise than alone
    layers = (LayerSpec("full", kv_heads, DIM, DIM),) * 2
    return model, ModelCacheSpec("grouped", Fingerprint("0" * 32), layers, heads, 4096, VOCAB, 0)


def rows_of(spec: ModelCacheSpec, name: str, backend: AttentionBackend) -> list[SequenceCache]:
    """One empty sequence a row of the script."""
    pool = FramePool(1 << 28)
    return [
        sequence_over(pool, spec, 2, name=name, backend=backend, first_frame=10_000 * number)
        for number in range(len(LENGTHS))
    ]


def worst_error(model: Any, spec: ModelCacheSpec, name: str, backend: AttentionBackend) -> float:
    """Run the script as batches and each row alone; the largest relative error of a row's logits in any step."""
    forward, rng, worst = Forward(model, assisted=not isinstance(backend, MlxBackend)), np.random.default_rng(2), 0.0
    alone, batched = rows_of(spec, name, backend), rows_of(spec, name, backend)
    begun: set[int] = set()
    with dispatching(model):
        for members in SCRIPT:
            for number in members:
                if number not in begun:
                    prompt = np.random.default_rng(number).integers(0, VOCAB, LENGTHS[number]).tolist()
                    for row in (alone[number], batched[number]):
                        forward.step(row, prompt, wants_logits=False)
                    begun.add(number)
            ids = rng.integers(0, VOCAB, len(members)).tolist()
            mine = forward.step_batch(BatchCache.merge([batched[n] for n in members]), [[each] for each in ids])
            for place, number in enumerate(members):
                right = forward.step(alone[number], [ids[place]], wants_logits=True)
                assert right is not None
                worst = max(worst, relative_error(mine[place], right))
    assert [row.tokens for row in batched] == [row.tokens for row in alone] == [258, 67, 33]
    return worst


def fastest() -> AttentionBackend:
    """The backend that serves on this machine: `cpu` where it can be, else the portable one."""
    return BACKENDS["cpu"]() if "cpu" in suitable_backends() else MlxBackend()


@pytest.mark.parametrize("name", NAMED_FORMATS)
@pytest.mark.parametrize("ratio", range(1, 9))
def test_every_ratio_in_every_format(ratio: int, name: str) -> None:
    """P28: one KV head (two where the ratio is even) with 1 to 8 query heads each: rows are what they are alone."""
    kv_heads = 1 + (ratio % 2 == 0)
    model, spec = grouped(ratio * kv_heads, kv_heads)
    assert worst_error(model, spec, name, fastest()) < TOLERANCE


@pytest.mark.parametrize("name", NAMED_FORMATS)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_keys_wider_than_values_in_every_format(family: str, name: str) -> None:
    """P28: K of 192 with V of 128, and a latent cache of 96 and 64, with experts that each row chooses for itself."""
    error = worst_error(families.model_of(family), families.spec_of(family), name, MlxBackend())
    assert error < TOLERANCE


def test_the_bound_would_see_a_row_in_the_wrong_place() -> None:
    """A row that is one token behind, or has another row's pages, is off by a tenth of the spread and more."""
    model, spec = grouped(4, 2)
    forward = Forward(model)
    rows = rows_of(spec, "q4", fastest())
    with dispatching(model):
        prompt = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
        forward.step(rows[0], prompt, wants_logits=False)
        forward.step(rows[1], prompt[:-1], wants_logits=False)
        forward.step(rows[2], prompt[::-1], wants_logits=False)
        right, behind, other = (forward.step(row, [7], wants_logits=True) for row in rows)
    assert right is not None
    assert behind is not None
    assert other is not None
    assert relative_error(behind, right) > 10 * TOLERANCE
    assert relative_error(other, right) > 10 * TOLERANCE
