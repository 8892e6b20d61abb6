"""Assistance on CPUs: wrapped blocks compute what mlx-lm computes, and what is not understood is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gemma3_text, llama, qwen2, qwen3

pytest.importorskip("llvmlite", reason="compiled kernels need llvmlite")

from kvd.attention import MlxBackend
from kvd.attention.select import BACKENDS
from kvd.ids import Fingerprint
from kvd.model import cpu_assist
from kvd.model.dispatch import dispatching
from kvd.model.forward import Forward, project
from kvd.model.host_block import HostBlock, NotUnderstood, Rope
from kvd.model.spec import LayerSpec, ModelCacheSpec
from kvd.native import KernelUnavailable
from kvd.store.frame_pool import FramePool
from tests.model.paged import relative_error, sequence_over

HIDDEN, HEADS, KV_HEADS, DIM, VOCAB, WINDOW = 128, 4, 2, 64, 96, 100
COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "intermediate_size": 160,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10_000.0,
}


@pytest.fixture(autouse=True)
def _runs_here() -> None:
    """Skips with the reason where nothing is assisted."""
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("MLX computes on a GPU here")
    try:
        BACKENDS["cpu"]()
    except KernelUnavailable as error:
        pytest.skip(str(error))


def _llama() -> Any:
    return llama.Model(llama.ModelArgs(model_type="llama", tie_word_embeddings=False, **COMMON))


def _llama3() -> Any:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return llama.Model(llama.ModelArgs(model_type="llama", rope_scaling=scaling, **COMMON))


def _qwen2() -> Any:
    arguments = {key: value for key, value in COMMON.items() if key != "head_dim"} | {"hidden_size": HEADS * DIM}
    return qwen2.Model(qwen2.ModelArgs(model_type="qwen2", **arguments))


def _qwen3() -> Any:
    return qwen3.Model(
        qwen3.ModelArgs(model_type="qwen3", tie_word_embeddings=True, max_position_embeddings=4096, **COMMON)
    )


def _gemma3() -> Any:
    arguments = COMMON | {"sliding_window": WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": DIM}
    return gemma3_text.Model(gemma3_text.ModelArgs(model_type="gemma3_text", **arguments))


MAKERS = [_llama, _llama3, _qwen2, _qwen3, _gemma3]


def make(maker: Callable[[], Any]) -> Any:
    """A small model of a family with random weights, biases and norms."""
    mx.random.seed(0)
    model = maker()
    if hasattr(model, "sanitize") and maker is _gemma3:
        model.sanitize({})  # ties the embeddings, as a file without lm_head does

    def noisy(path: str, array: mx.array) -> mx.array:
        return array + 0.1 * mx.random.normal(array.shape) if path.endswith(("bias", "norm.weight")) else array

    from mlx.utils import tree_map_with_path

    model.update(tree_map_with_path(noisy, model.parameters()))
    mx.eval(model.parameters())
    return model


def spec_of(model: Any) -> ModelCacheSpec:
    """Cache geometry of a small model."""
    full = LayerSpec("full", KV_HEADS, DIM, DIM)
    sliding = LayerSpec("sliding", KV_HEADS, DIM, DIM, WINDOW)
    is_gemma = type(model).__module__.endswith("gemma3_text")
    layers = (sliding, sliding, full) if is_gemma else (full,) * 3
    return ModelCacheSpec("small", Fingerprint("0" * 32), layers, HEADS, 4096, VOCAB, 0)


STEPS = [70, 1, 1, 3, 140, 16, 2, 1, 7, 1]


def paged(model: Any, *, assisted: bool) -> np.ndarray:
    """Logits [steps, vocab] after each of `STEPS`, over q8 pages."""
    ids = np.random.default_rng(2).integers(0, VOCAB, sum(STEPS)).tolist()
    backend = BACKENDS["cpu"]() if assisted else MlxBackend()
    sequence = sequence_over(FramePool(1 << 28), spec_of(model), 2, name="q8", backend=backend)
    forward, out, at = Forward(model, assisted=assisted), [], 0
    for step in STEPS:
        logits = forward.step(sequence, ids[at : at + step], wants_logits=True)
        assert logits is not None
        out.append(np.array(logits))
        at += step
    return np.stack(out)


@pytest.mark.parametrize("maker", MAKERS)
def test_an_assisted_model_computes_the_same(maker: Callable[[], Any]) -> None:
    """Every family, prefill and decode past a window: blocks outside mlx agree with mlx over the same pages."""
    model = make(maker)
    with dispatching(model):
        right = paged(model, assisted=False)
        assert cpu_assist.install(model) == ("blocks", "output")
        assert all(isinstance(layer, HostBlock) for layer in model.model.layers)
        assert relative_error(paged(model, assisted=True), right) < 2e-3


def test_a_replay_reads_and_does_not_write() -> None:
    """The last token again: the same logits as its step gave, and not a byte of the pages changes."""
    model = make(_llama)
    cpu_assist.install(model)
    pool = FramePool(1 << 28)
    sequence = sequence_over(pool, spec_of(model), 2, name="q8", backend=BACKENDS["cpu"]())
    forward = Forward(model, assisted=True)
    forward.step(sequence, list(range(50)), wants_logits=False)
    right = np.array(forward.step(sequence, [7], wants_logits=True))
    before = [pool.export(frame) for frame in (1, 2)]
    np.testing.assert_array_equal(forward.replay(sequence, 7), right)
    assert [pool.export(frame) for frame in (1, 2)] == before
    assert sequence.tokens == 51


def test_with_other_caches_it_is_the_original() -> None:
    """mlx-lm's own caches, and no cache at all, go the way mlx-lm made: bit for bit."""
    model = make(_qwen3)
    ids = mx.array([[3, 1, 4, 1, 5]])
    right = np.array(model(ids))
    cpu_assist.install(model)
    np.testing.assert_array_equal(np.array(model(ids)), right)


@pytest.mark.parametrize("maker", [_llama, _gemma3])
def test_the_output_projection(maker: Callable[[], Any]) -> None:
    """Logits of one token by a product of one row are those of the model's own projection, tied or not."""
    model = make(maker)
    hidden = mx.array(np.random.default_rng(0).standard_normal((1, 1, HIDDEN), dtype=np.float32))
    right = np.array(project(model, hidden)[0, 0])
    mine = cpu_assist.project_last(model, hidden)
    assert mine is not None
    assert mine.shape == (1, VOCAB)
    np.testing.assert_allclose(mine[0], right, atol=1e-5 * np.abs(right).max())


def test_installing_twice_changes_nothing() -> None:
    """A wrapped block is not wrapped again."""
    model = make(_llama)
    cpu_assist.install(model)
    before = list(model.model.layers)
    assert cpu_assist.install(model) == ("blocks", "output")
    assert all(mine is other for mine, other in zip(model.model.layers, before, strict=True))


def test_a_block_that_computes_something_else_is_left_alone() -> None:
    """The comparison with the original decides, not the name of its class."""
    model = make(_llama)

    class Doubled(type(model.layers[0].mlp)):  # type: ignore[misc]
        """A class named MLP in a known module, with another function."""

        def __call__(self, x: mx.array) -> mx.array:
            """Twice what the original gives."""
            return super().__call__(x) * 2

    Doubled.__name__, Doubled.__module__ = "MLP", "mlx_lm.models.llama"
    for layer in model.model.layers:
        layer.mlp.__class__ = Doubled
    assert cpu_assist.install(model) == ("output",)
    assert not any(isinstance(layer, HostBlock) for layer in model.model.layers)


def test_half_precision_and_quantised_models_are_left_alone() -> None:
    """Only plain float32 matrices are multiplied outside mlx."""
    model = make(_llama)
    model.set_dtype(mx.bfloat16)
    assert cpu_assist.install(model) == ()
    quantised = make(_qwen2)
    nn.quantize(quantised, group_size=32, bits=4)
    assert cpu_assist.install(quantised) == ()
    assert cpu_assist.project_last(quantised, mx.zeros((1, 1, 256))) is None


@pytest.mark.parametrize(
    "layer", [nn.RoPE(DIM, traditional=True), nn.RoPE(DIM // 2), nn.Identity()], ids=["interleaved", "partial", "none"]
)
def test_rotary_embeddings_of_other_kinds_are_not_understood(layer: Any) -> None:
    """What would turn other values than the kernel does is refused."""
    with pytest.raises(NotUnderstood):
        Rope(layer, DIM)
