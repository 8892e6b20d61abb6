"""Mixtures of experts, sinks, values narrower than keys, latent attention: mlx-lm's own models over kvd's pages.

One small model per family, made from mlx-lm's `ModelArgs` of the configuration that kvd reads its geometry from, with
random weights. The shapes cover 1 to 8 query heads per KV head, a single KV head, and K and V of different widths.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import deepseek_v3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import save_model

from kvd.attention import AttentionBackend, AttentionOutput, PageSource, ReferenceBackend
from kvd.attention.select import BACKENDS, suitable_backends
from kvd.ids import Fingerprint
from kvd.model.cache import SequenceCache
from kvd.model.cache_spec import build_cache_spec, check_supported, scratch_bytes
from kvd.model.dispatch import dispatching, install
from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.families import REFUSED
from kvd.model.forward import Forward
from kvd.model.loader import load
from kvd.model.registry import ModelFolder
from kvd.model.spec import ModelCacheSpec
from kvd.store.frame_pool import FramePool
from tests.model.paged import relative_error, sequence_over
from tests.support.tiny_model import build_tokenizer, write_tokenizer

VOCAB, WINDOW, PAGES = 128, 40, 3

ERROR: Final = 0.015
"""Most that 8-bit pages may change logits, of their spread; twice what they do, and less than one token more in the
window does, or no sinks, or a scale that is a tenth too large."""

BASE: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 2,
}

DEEPSEEK: Final[dict[str, Any]] = {
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "q_lora_rank": 64,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 512,
    },
}

CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "mixtral": {**BASE, "num_key_value_heads": 4, "num_local_experts": 4},
    "qwen2_moe": {
        **BASE,
        "num_key_value_heads": 1,
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_moe": {
        **BASE,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "rope_theta": 10000.0,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **BASE,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_local_experts": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v2": {
        **BASE,
        **DEEPSEEK,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "routed_scaling_factor": 1.0,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
    },
    "deepseek_v3": {
        **BASE,
        **DEEPSEEK,
        "num_attention_heads": 8,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "topk_method": "noaux_tc",
        "n_group": 2,
        "topk_group": 1,
    },
}

GEOMETRY: Final[dict[str, list[tuple[int, int, int, int | None]]]] = {
    "mixtral": [(4, 32, 32, None)],
    "qwen2_moe": [(1, 32, 32, None)],
    "qwen3_moe": [(1, 64, 64, None)],
    "gpt_oss": [(2, 32, 32, WINDOW), (2, 32, 32, None)],
    "deepseek_v2": [(4, 192, 128, None)],
    "deepseek_v3": [(1, 96, 64, None)],
}
"""KV heads, widths of K and V, window of each cache group."""


def build(config: dict[str, Any], family: str, seed: int = 0) -> Any:
    """mlx-lm's model of a configuration with random float32 weights.

    Logits spread by about 3. The experts of a layer differ by a third of what they are: where two are nearly tied a
    rounding error picks the other one, and that must not be a large error.
    """
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": family, **config}))
    rng, weights = np.random.default_rng(seed), []
    for name, array in tree_flatten(model.parameters()):
        if "norm" in name:
            continue
        values = rng.standard_normal(array.shape, dtype=np.float32)
        if name.endswith(("embed_tokens.weight", "sinks")):
            gain = 1.0
        elif array.ndim == 1 or name.endswith("bias"):
            gain = 0.1
        else:
            gain = (3.0 if "lm_head" in name else 1.1) / np.sqrt(array.shape[-1])
        if "switch_mlp" in name or ".experts." in name:
            values = values[:1] + values / 3
        if name.endswith("sinks"):
            values = values + 4  # a sink that takes about half of the weight
        weights.append((name, mx.array(values * np.float32(gain))))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


@functools.cache
def model_of(family: str) -> Any:
    """The family's small model."""
    return build(CONFIGS[family], family)


def spec_of(family: str) -> ModelCacheSpec:
    """Its geometry as kvd reads it from the configuration."""
    config = {"model_type": family, **CONFIGS[family]}
    return build_cache_spec(config, model_name=family, fingerprint=Fingerprint("0" * 32), item_bytes=4)


@pytest.fixture(params=list(CONFIGS))
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each family, its attention routed to kvd's caches during the test."""
    name: str = request.param
    with dispatching(model_of(name)):
        yield name


def sequence(family: str, name: str, backend: AttentionBackend | None = None) -> SequenceCache:
    """An empty sequence with frames for `PAGES` pages."""
    spec = spec_of(family)
    layouts = [group.layout(group.format(name)) for group in spec.groups]
    pool = FramePool(budget_bytes=PAGES * sum(layout.payload_bytes for layout in layouts))
    return sequence_over(pool, spec, PAGES, name=name, backend=backend)


def ids_of(count: int, seed: int) -> list[int]:
    """Random token ids."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, count)]


def own_logits(family: str, ids: list[int]) -> np.ndarray:
    """Logits [n, vocab] by mlx-lm with its own caches."""
    model = model_of(family)
    cache = make_prompt_cache(model)
    parts = [model(mx.array([ids[at : at + 150]]), cache=cache)[0] for at in range(0, len(ids), 150)]
    return np.concatenate([np.array(part) for part in parts])


def paged_logits(family: str, over: SequenceCache, ids: list[int], steps: list[int]) -> np.ndarray:
    """Logits [steps, vocab] after each of `steps`, which take `ids` in order."""
    assert sum(steps) == len(ids)
    forward, ends = Forward(model_of(family)), np.cumsum(steps)
    found = [
        forward.step(over, ids[end - step : end], wants_logits=True) for step, end in zip(steps, ends, strict=True)
    ]
    return np.stack([logits for logits in found if logits is not None])


def test_groups_are_those_of_mlx_lms_model(family: str) -> None:
    """P31: KV heads, widths and windows are read as the model file makes them."""
    layers = [group.layer for group in spec_of(family).groups]
    assert [(layer.kv_heads, layer.k_dim, layer.v_dim, layer.window) for layer in layers] == GEOMETRY[family]
    assert len(spec_of(family).layers) == len(model_of(family).layers)


def test_pages_follow_mlx_lms_own_caches(family: str) -> None:
    """P31: chunks, decode, a cut back into the first page and another way on stay within the error of 8 bits."""
    first, other = ids_of(423, 1), ids_of(150, 2)
    steps, more = [200, 120, 100, 1, 1, 1], [80, 67, 1, 1, 1]
    over = sequence(family, "q8")
    mine = paged_logits(family, over, first, steps)
    over.truncate(230)
    again = paged_logits(family, over, other, more)
    right = own_logits(family, first)[np.cumsum(steps) - 1]
    right_again = own_logits(family, [*first[:230], *other])[230 + np.cumsum(more) - 1]
    assert relative_error(mine, right) < ERROR
    assert relative_error(again, right_again) < ERROR


class Compared:
    """A backend that answers as `reference` does and asks another for the same: pages are those of the reference.

    Attributes:
        worst: greatest difference of an output or log-sum-exp.
        calls: how often it was asked.
    """

    name = "compared"

    def __init__(self, other: AttentionBackend) -> None:
        self._other, self._reference = other, ReferenceBackend()
        self.worst, self.calls = 0.0, 0

    def attend(self, pages: PageSource, queries: mx.array, **request: Any) -> AttentionOutput:
        """See `AttentionBackend.attend`."""
        mine, right = self._other.attend(pages, queries, **request), self._reference.attend(pages, queries, **request)
        self.worst = max(self.worst, *(float(mx.abs(a - b).max()) for a, b in zip(mine, right, strict=True)))
        self.calls += 1
        return right


@pytest.mark.parametrize("name", ["mlx", "cpu"])
def test_backends_agree_with_the_reference(family: str, name: str) -> None:
    """4-bit pages of every geometry, sinks and windows included, read alike by each backend in prefill and decode."""
    if name not in suitable_backends():
        pytest.skip(f"{name} is not for this machine")
    compared, steps = Compared(BACKENDS[name]()), [260, 40, 1, 1, 2]
    paged_logits(family, sequence(family, "q4", compared), ids_of(sum(steps), 3), steps)
    assert compared.calls == len(steps) * len(model_of(family).layers)
    assert compared.worst < 2e-3


def test_five_turns_continue_where_the_last_one_ended(family: str) -> None:
    """Turns that know nothing but the frames and the count of tokens give the bits of a run without turns."""
    turns = [[130, 1, 1], [1, 60, 1], [70, 1], [2, 1, 1], [33, 1]]
    ids = ids_of(sum(map(sum, turns)), 4)
    whole = paged_logits(family, sequence(family, "q8"), ids, [step for steps in turns for step in steps])
    over, found, done = sequence(family, "q8"), [], 0
    for steps in turns:
        turn = SequenceCache(pool=over.pool, spec=over.spec, layouts=over.layouts, backend=over.backend, tokens=done)
        for group in range(len(over.layouts)):
            turn.set_block_table(group, over.mapped(group)[0])
        found.append(paged_logits(family, turn, ids[done : done + sum(steps)], steps))
        done += sum(steps)
    np.testing.assert_array_equal(np.concatenate(found), whole)


def test_deepseek_v3s_class_is_mlx_lms_again_after_the_block() -> None:
    """Installed once however often; afterwards the class is what it was, and with caches of mlx-lm it always is."""
    kind, model = deepseek_v3.DeepseekV3Attention, model_of("deepseek_v3")
    original = kind.__call__
    plain = own_logits("deepseek_v3", ids_of(40, 6))
    with dispatching(model):
        replaced = kind.__call__
        assert install(model) == ("mlx_lm.models.deepseek_v3",)
        assert replaced is not original
        assert kind.__call__ is replaced
        np.testing.assert_array_equal(own_logits("deepseek_v3", ids_of(40, 6)), plain)
    assert kind.__call__ is original


WIDE: Final[dict[str, dict[str, Any]]] = {
    "mixtral": {"intermediate_size": 768},
    "qwen2_moe": {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024},
    "qwen3_moe": {"moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 8},
    "gpt_oss": {"intermediate_size": 768, "num_experts_per_tok": 4},
    "deepseek_v2": {"num_attention_heads": 16, "moe_intermediate_size": 256},
    "deepseek_v3": {"num_attention_heads": 16, "moe_intermediate_size": 256, "kv_lora_rank": 256},
}


@pytest.mark.parametrize("name", list(WIDE))
def test_a_step_stays_within_the_stated_scratch(name: str) -> None:
    """P24: what MLX holds at most in a chunk of 512 tokens, experts and all heads included, is less than stated."""
    config = {**CONFIGS[name], "hidden_size": 256, **WIDE[name]}
    model = build(config, name)
    spec = build_cache_spec(
        {"model_type": name, **config}, model_name=name, fingerprint=Fingerprint("0" * 32), item_bytes=4
    )
    over = sequence_over(FramePool(budget_bytes=1 << 26), spec, 2, name="q8")
    with dispatching(model):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        Forward(model).step(over, ids_of(512, 5), wants_logits=True)
    assert mx.get_peak_memory() - before < spec.scratch_bytes


def test_scratch_counts_the_experts_of_a_token() -> None:
    """The stated figure is the documented sum: routed experts once per expert of a token, shared ones once."""
    config = {"model_type": "qwen2_moe", **CONFIGS["qwen2_moe"]}
    hidden, experts = 128, 2 * (3 * 48 + 4 * 128) + 3 * 64 + 3 * 4
    per_token = (3 * hidden + (4 + 1) * 64 + experts) * 4
    fixed = 2 * VOCAB * 4 + 2 * 4 * 512 * 512 * 4 + 512 * 64 * 4
    shape = check_supported(config)
    assert scratch_bytes(shape, item_bytes=4, chunk_tokens=512, tile_tokens=512) == int(
        1.25 * (fixed + 512 * per_token)
    )
    biased = {"model_type": "gpt_oss", **CONFIGS["gpt_oss"]}
    biased_per_token = 3 * hidden + (4 + 2) * 64 + 2 * (5 * 96 + 5 * hidden) + 3 * 4
    figure = scratch_bytes(check_supported(biased), item_bytes=2, chunk_tokens=512, tile_tokens=512)
    assert figure == int(1.25 * (fixed + 512 * 64 * 4 + 512 * biased_per_token * 2))
    # A dense layer that is wider than all experts of a token together decides.
    wide = {"model_type": "qwen3_moe", **CONFIGS["qwen3_moe"], "intermediate_size": 4096}
    wider = {**wide, "num_experts_per_tok": 1}
    dense, same = (
        scratch_bytes(check_supported(c), item_bytes=4, chunk_tokens=1, tile_tokens=1) for c in (wide, wider)
    )
    assert dense == same > 1.25 * 4 * 3 * 4096


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_without_pages_are_refused_with_the_reason(name: str) -> None:
    """P27 P31: state, capped scores and indices of their own are named, and what is supported is listed."""
    with pytest.raises(UnsupportedModel, match=r"supported: llama, .*gpt_oss, deepseek_v2, deepseek_v3") as refused:
        check_supported({"model_type": name, **BASE})
    assert f"{name!r} is not supported ({REFUSED[name]})" in refused.value.message


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("qwen2_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, "sliding"),
        ("mixtral", {"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4}, "one kind"),
        ("gpt_oss", {"layer_types": None, "num_hidden_layers": 5}, "names 4 layers"),
        ("deepseek_v2", {"rope_scaling": None}, "rope_scaling"),
        ("deepseek_v2", {"rope_scaling": {"type": "yarn"}}, "factor"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"v_head_dim": 40}, "head width 40"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"kv_lora_rank": 80}, "head width"),
    ],
)
def test_what_mlx_lm_would_run_as_something_else_is_refused(name: str, changes: dict[str, Any], match: str) -> None:
    """P31: entries that a model file ignores or cannot do are refused before a weight is read."""
    config = {"model_type": name, **CONFIGS[name]}
    check_supported(config)
    with pytest.raises(UnsupportedModel, match=match):
        check_supported({**config, **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"num_experts_per_tok": 5}),
        ("qwen2_moe", {"num_experts": None}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}),
        ("qwen2_moe", {"num_key_value_heads": 3}),
        ("qwen3_moe", {"num_key_value_heads": 3}),
        ("qwen3_moe", {"head_dim": None}),
        ("gpt_oss", {"sliding_window": 0}),
        ("gpt_oss", {"num_attention_heads": 3}),
        ("deepseek_v3", {"qk_rope_head_dim": -32}),
    ],
)
def test_impossible_figures_are_corrupt(name: str, changes: dict[str, Any]) -> None:
    """No such number of experts, no window, less than nothing: named as a fault of the folder."""
    with pytest.raises(ModelCorrupt, match=r"config\.json"):
        check_supported({"model_type": name, **CONFIGS[name], **changes})


@pytest.mark.parametrize(
    ("name", "quantisation"),
    [
        ("mixtral", {"group_size": 32, "bits": 8, "mode": "affine"}),
        ("gpt_oss", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        ("deepseek_v3", {"group_size": 32, "bits": 8, "mode": "affine"}),
    ],
)
def test_a_folder_of_quantised_experts_loads(tmp_path: Path, name: str, quantisation: dict[str, Any]) -> None:
    """Experts and heads are unpacked where MLX computes on the CPU, and give what mlx-lm's quantised model gives."""
    model = build({**CONFIGS[name], "vocab_size": len(build_tokenizer(None)[0])}, name)
    nn.quantize(model, **quantisation)
    loaded = load(folder_of(tmp_path, name, model, quantization=quantisation))
    prompt = mx.array([[5, 70, 300, 400] * 20])
    if mx.default_device().type == mx.DeviceType.cpu:
        kept = dict(tree_flatten(loaded.model.parameters()))
        assert {array.dtype for array in kept.values()} == {mx.float32}
        assert not [each for each in kept if each.endswith("scales")]
        assert loaded.weights_bytes == 4 * sum(array.size for array in kept.values())
    assert relative_error(np.array(loaded.model(prompt)), np.array(model(prompt))) < 2e-3
    assert [group.layer.kv_heads for group in loaded.spec.groups] == [shape[0] for shape in GEOMETRY[name]]


def folder_of(path: Path, name: str, model: Any, **entries: object) -> ModelFolder:
    """A complete folder of a model with the tiny tokenizer's vocabulary, further entries in its configuration."""
    ids, merges = build_tokenizer(None)
    save_model(path, model)
    config = {**CONFIGS[name], "model_type": name, "vocab_size": len(ids), "eos_token_id": ids["<|im_end|>"]}
    (path / "config.json").write_text(json.dumps({**config, **entries}))
    write_tokenizer(path, ids, merges)
    return ModelFolder(name, path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v2", {"rope_scaling": {"factor": 40, "beta_fast": 0}}),
        ("deepseek_v3", {"rope_scaling": "yarn"}),
        ("qwen3_moe", {"mlp_only_layers": None}),
        ("gpt_oss", {"head_dim": 64}),
    ],
)
def test_what_a_model_file_trips_over_is_a_corrupt_folder(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """A division by zero, a missing method, weights of another shape: the folder is named, nothing else escapes."""
    small = nn.Linear(4, 4)
    with pytest.raises(ModelCorrupt, match="cannot be loaded"):
        load(folder_of(tmp_path, name, small, **changes))
