"""Loading: what can be refused is refused with the reason; what is loaded computes in the dtype it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, save_model

from kvd.ids import Fingerprint
from kvd.model.cache_spec import build_cache_spec, check_supported, scratch_bytes
from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.loader import LoadedModel, load
from kvd.model.registry import ModelFolder
from tests.support.tiny_model import make_tiny_model


def folder(path: Path) -> ModelFolder:
    """The model folder at `path`."""
    return ModelFolder(path.name, path)


def copy_with(source: Path, target: Path, **changes: object) -> ModelFolder:
    """A copy of a model folder with changed configuration entries."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return folder(target)


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> LoadedModel:
    """The tiny model in memory."""
    return load(folder(tiny_folder))


def greedy(model: LoadedModel, text: str, tokens: int) -> list[int]:
    """Greedy continuation with mlx_lm's own cache."""
    cache = make_prompt_cache(model.model)
    step = mx.array([model.codec.encode_content(text)])
    ids: list[int] = []
    for _ in range(tokens):
        ids.append(int(mx.argmax(model.model(step, cache=cache)[0, -1]).item()))
        step = mx.array([ids[-1:]])
    return ids


def test_the_tiny_model_loads_whole(loaded: LoadedModel) -> None:
    """Model, codec, template and geometry agree with the folder."""
    spec = loaded.spec
    assert (len(spec.layers), spec.query_heads, spec.context_tokens) == (2, 4, 4096)
    assert (spec.layers[0].kind, spec.layers[0].kv_heads, spec.layers[0].k_dim) == ("full", 2, 64)
    assert len(spec.groups) == 1
    assert spec.vocab_tokens == loaded.codec.token_count
    assert loaded.template is not None
    assert loaded.weights_bytes == 4 * sum(array.size for _, array in tree_flatten(loaded.model.parameters()))


def test_weights_compute_in_the_stated_dtype(loaded: LoadedModel) -> None:
    """On the CPU everything is float32."""
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("MLX computes on a GPU here")
    assert loaded.dtype == "float32"
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.float32}
    assert loaded.model(mx.array([[1, 2]])).dtype == mx.float32


def test_the_tiny_model_writes_varied_text_and_its_seed_matters(loaded: LoadedModel, tmp_path: Path) -> None:
    """Other tests rely on greedy text that neither ends nor loops, and that differs between seeds and prompts."""
    ids = greedy(loaded, "the world", 60)
    assert len(set(ids)) > 30
    assert loaded.codec.eos_ids.isdisjoint(ids)
    assert greedy(loaded, "the water", 60) != ids
    other = load(folder(make_tiny_model(tmp_path / "tiny", seed=1)))
    assert greedy(other, "the world", 60) != ids
    assert other.spec.fingerprint != loaded.spec.fingerprint


def test_equal_arguments_give_equal_tiny_models(tiny_folder: Path, tmp_path: Path) -> None:
    """The tiny model is a fixture for restarts: the same bytes each time, and of the vocabulary size asked for."""
    again = make_tiny_model(tmp_path / "again")
    for path in sorted(tiny_folder.iterdir()):
        if not path.name.startswith("."):
            assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    small = make_tiny_model(tmp_path / "small", vocab=300)
    assert json.loads((small / "config.json").read_text())["vocab_size"] == 300
    assert load(folder(small)).codec.token_count == 300


def test_quantised_weights_are_unpacked_on_the_cpu(tiny_folder: Path, tmp_path: Path) -> None:
    """An 8-bit copy loads as float32 and computes what mlx_lm's quantised model computes."""
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("MLX computes on a GPU here")
    model, config = load_model(tiny_folder)
    nn.quantize(model, group_size=64, bits=8)
    target = tmp_path / "quantised"
    shutil.copytree(tiny_folder, target)
    (target / "model.safetensors").unlink()
    save_model(target, model)
    quantisation = {"group_size": 64, "bits": 8}
    (target / "config.json").write_text(json.dumps({**config, "quantization": quantisation}))
    plain = load(folder(target))
    ids = mx.array([[1, 70, 300, 400]])
    assert plain.dtype == "float32"
    assert mx.allclose(plain.model(ids), model(ids), atol=1e-3).item()


def test_bfloat16_weights_become_float32_on_the_cpu(tiny_gguf: Path, tmp_path: Path) -> None:
    """A folder stored in bfloat16 computes in float32 where half precision is slow."""
    from kvd.model.pull import import_file

    model = load(import_file(tiny_gguf, directory=tmp_path, dtype="bfloat16").folder)
    expected = "float32" if mx.default_device().type == mx.DeviceType.cpu else "bfloat16"
    assert model.dtype == expected


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "mamba2"}, r"'mamba2'.*supported: llama, mistral, qwen2, qwen3"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window of at least one token"),
        ({"layer_types": ["linear_attention", "full_attention"]}, r"linear_attention.*supported: full_attention, slid"),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, "none of full attention"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2, "layer_types": ["full_attention"] * 2}, "pattern"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128}, "sliding"),
        ({"head_dim": 40}, "multiples of 32"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(
    tiny_folder: Path, tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    """P31: what kvd cannot cache is refused at start, before a weight is read."""
    model = copy_with(tiny_folder, tmp_path / "m", **changes)
    (model.path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=match):
        load(model)


def test_missing_and_misfit_weights_are_corrupt(tiny_folder: Path, tmp_path: Path) -> None:
    """No weights, a truncated file and weights of another shape name the folder."""
    model = copy_with(tiny_folder, tmp_path / "a", num_hidden_layers=3)
    with pytest.raises(ModelCorrupt, match="cannot be loaded"):
        load(model)
    weights = model.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelCorrupt):
        load(model)
    weights.unlink()
    with pytest.raises(ModelCorrupt, match="no model"):
        load(model)


def test_a_model_without_a_template_loads(tiny_folder: Path, tmp_path: Path) -> None:
    """A base model has no chat, and everything else."""
    model = copy_with(tiny_folder, tmp_path / "base")
    (model.path / "tokenizer_config.json").write_text("{}")
    assert load(model).template is None


CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def test_scratch_grows_with_chunk_and_tile_as_the_formula_says() -> None:
    """The figure is the documented sum; it holds no `heads x chunk x context` term (P24)."""

    def scratch(chunk: int, tile: int) -> int:
        return scratch_bytes(check_supported(CONFIG), item_bytes=4, chunk_tokens=chunk, tile_tokens=tile)

    fixed = 2 * 49152 * 4
    per_token = (3 * 576 + 64 * (18 + 6) + 3 * 1536) * 4
    per_score = 2 * 9 * 4
    per_tile = 2 * 3 * 64 * 4
    assert scratch(512, 256) == int(1.25 * (fixed + 512 * per_token + 512 * 256 * per_score + 256 * per_tile))
    spec = build_cache_spec(CONFIG, model_name="m", fingerprint=Fingerprint("0" * 32), item_bytes=4)
    longer = {**CONFIG, "max_position_embeddings": 100_000}
    other = build_cache_spec(longer, model_name="m", fingerprint=Fingerprint("0" * 32), item_bytes=4)
    assert other.scratch_bytes == spec.scratch_bytes
    assert (spec.context_tokens, other.context_tokens) == (2048, 100_000)


def test_head_figures_have_their_defaults() -> None:
    """Without KV heads a model is multi-head; the head width follows from the hidden size."""
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    spec = build_cache_spec(config, model_name="m", fingerprint=Fingerprint("0" * 32), item_bytes=4)
    assert spec.layers[0].kv_heads == 9
    assert spec.layers[0].k_dim == 64
    check_supported(config)


@pytest.mark.parametrize("figure", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [None, "many", 0])
def test_a_configuration_without_its_figures_is_corrupt(figure: str, value: object) -> None:
    """A missing or senseless figure is named instead of surfacing as a KeyError or a division by zero."""
    config = {key: each for key, each in {**CONFIG, figure: value}.items() if each is not None}
    with pytest.raises(ModelCorrupt, match=r"config\.json"):
        check_supported(config)


GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3", "mixtral", "gpt_oss")
"""Families that this configuration is complete for."""


@pytest.mark.parametrize(
    ("family", "changed"),
    [("gemma3_text", {name: value}) for name in ("sliding_window", "sliding_window_pattern") for value in (0, -1, -5)]
    + [("llama", {name: -1}) for name in ("num_key_value_heads", "head_dim", "max_position_embeddings")]
    + [("llama", {"num_key_value_heads": 0}), ("llama", {"hidden_size": 8, "head_dim": None})]
    + [(name, {"num_attention_heads": 4, "num_key_value_heads": 3}) for name in GROUPED],
)
def test_figures_that_cannot_be_are_corrupt(family: str, changed: dict[str, Any]) -> None:
    """No window, no pattern, less than nothing, query heads that KV heads do not divide: refused before loading."""
    config: dict[str, Any] = {**CONFIG, "model_type": family, "head_dim": 64, "num_hidden_layers": 12}
    config |= {"sliding_window": 16, "sliding_window_pattern": 6}
    check_supported(config)
    config |= changed
    with pytest.raises(ModelCorrupt, match=r"config\.json"):
        check_supported(config if family != "gemma3" else {**config, "text_config": config})


def test_sliding_layers_form_a_group_of_their_own() -> None:
    """Layers that see a window are told from those that see all tokens, by family; the window is the model's."""
    kinds = ["sliding_attention", "full_attention"] * 15
    llama = check_supported({**CONFIG, "layer_types": kinds, "sliding_window": 128})
    assert [layer.window for layer in llama.layers[:4]] == [128, None, 128, None]
    gemma = build_cache_spec(
        {"model_type": "gemma3_text", "num_hidden_layers": 18, "hidden_size": 640, "intermediate_size": 2048},
        model_name="m",
        fingerprint=Fingerprint("0" * 32),
        item_bytes=4,
    )
    assert [group.layer.kind for group in gemma.groups] == ["sliding", "full"]
    assert gemma.groups[1].layer_indices == (5, 11, 17)
    assert gemma.groups[0].layer.window == 512
    assert (gemma.groups[0].layer.kv_heads, gemma.groups[0].layer.k_dim, gemma.context_tokens) == (1, 256, 32768)


def test_a_multimodal_gemma_is_read_through_its_text_part() -> None:
    """What the folder nests under `text_config` counts, with mlx-lm's defaults for what it leaves out."""
    nested = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    shape = check_supported({"model_type": "gemma3", "text_config": nested, "vocab_size": 262_208})
    assert (shape.query_heads, shape.layers[0].kv_heads, shape.layers[0].window) == (8, 4, 1024)
    assert (shape.vocab_tokens, len(shape.layers), shape.layers[5].kind) == (262_208, 34, "full")
