"""Configuration and tensors of each architecture: stated defaults, exact refusals, nothing written before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.gguf_families import build_config, llama3_factors
from kvd.model.gguf_file import GgufFile
from kvd.model.gguf_import import GGUF_ARCHITECTURES, import_gguf
from kvd.model.progress import SilentReporter
from tests.support.random_gguf import HIDDEN, WINDOW, write_random_gguf


def config_of(path: Path, arch: str, metadata: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The configuration of a random file of `arch`."""
    return build_config(GgufFile(write_random_gguf(path / "m.gguf", arch, metadata=metadata, **options)))


def refusal(path: Path, error: type[Exception], match: str, arch: str, **options: Any) -> None:
    """Import a random file of `arch`: it must be refused, and nothing written."""
    out = path / "out"
    out.mkdir()
    with pytest.raises(error, match=match):
        import_gguf(
            write_random_gguf(path / "m.gguf", arch, **options), out, dtype="float32", reporter=SilentReporter()
        )
    assert list(out.iterdir()) == []


def test_the_supported_architectures_are_named(tmp_path: Path) -> None:
    """Mixtures and others are refused with the list."""
    assert GGUF_ARCHITECTURES == ("llama", "qwen2", "qwen3", "gemma3")
    refusal(tmp_path, UnsupportedModel, r"'qwen3moe'.*supported: llama, qwen2, qwen3, gemma3", "qwen3moe")


def test_gemma3_has_its_windows_and_both_rotary_bases(tmp_path: Path) -> None:
    """What the file says, and the stated defaults for what it leaves out."""
    config = config_of(tmp_path, "gemma3", {"rope.freq_base": None, "attention.layer_norm_rms_epsilon": None})
    assert config["model_type"] == "gemma3_text"
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (WINDOW, 6)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1_000_000.0, 10_000.0)
    assert config["query_pre_attn_scalar"] == config["head_dim"] == HIDDEN // 2
    assert config["rms_norm_eps"] == 1e-6
    assert "rope_scaling" not in config


def test_the_deepest_gemma3_scales_queries_by_its_hidden_size(tmp_path: Path) -> None:
    """62 blocks: hidden size / heads, whatever the head width is."""
    config = config_of(tmp_path, "gemma3", {"block_count": 62}, head_dim=128)
    assert (config["query_pre_attn_scalar"], config["head_dim"]) == (HIDDEN / 2, 128)


def test_a_stated_pattern_of_windows_is_taken(tmp_path: Path) -> None:
    """A number, or a flag per layer; a pattern mlx-lm cannot run is refused."""
    key = "attention.sliding_window_pattern"
    assert config_of(tmp_path, "gemma3", {key: 3})["sliding_window_pattern"] == 3
    flags = [True, False, True, False]
    assert config_of(tmp_path, "gemma3", {key: flags}, layers=4)["sliding_window_pattern"] == 2
    for wrong in ([True, False, False, True], [True] * 4, [True, False]):
        with pytest.raises(UnsupportedModel, match="pattern"):
            config_of(tmp_path, "gemma3", {key: wrong}, layers=4)


def test_linear_scaling_reaches_the_configuration(tmp_path: Path) -> None:
    """The larger Gemmas state a factor of 8; mlx-lm applies it to layers of full attention only."""
    metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    assert config_of(tmp_path, "gemma3", metadata)["rope_scaling"] == {"type": "linear", "factor": 8.0}


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_defaults(tmp_path: Path, arch: str) -> None:
    """Rotary base one million, epsilon 1e-6, KV heads as query heads, tied without an output matrix."""
    absent = ("rope.freq_base", "attention.layer_norm_rms_epsilon", "attention.head_count_kv")
    config = config_of(tmp_path, arch, dict.fromkeys(absent))
    assert config["model_type"] == arch
    assert (config["rope_theta"], config["rms_norm_eps"], config["num_key_value_heads"]) == (1e6, 1e-6, 2)
    assert config["tie_word_embeddings"] is True
    assert config_of(tmp_path, arch, tied=False)["tie_word_embeddings"] is False


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3s_rotary_factors_become_its_rotary_scaling(tmp_path: Path, factor: float) -> None:
    """The factors of the file and mlx-lm's rotary embedding of the configuration turn every pair equally fast."""
    factors = llama3_factors(factor, 128, 500_000.0).astype(np.float32)
    config = config_of(
        tmp_path, "llama", {"rope.freq_base": 500_000.0}, head_dim=128, tensors={"rope_freqs.weight": factors}
    )
    assert config["rope_scaling"]["rope_type"] == "llama3"
    rope = initialize_rope(128, config["rope_theta"], False, config["rope_scaling"], 8192)
    plain = 500_000.0 ** (np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(np.array(rope._freqs), plain * factors, rtol=1e-4)
    assert len(set(factors.tolist())) > 3
    assert mx.isfinite(rope._freqs).all().item()


def test_other_rotary_factors_are_refused(tmp_path: Path) -> None:
    """Factors that no Llama 3 has would give a model that runs and is wrong."""
    factors = llama3_factors(8.0, 32, 1e6).astype(np.float32)
    factors[-1] *= 1.01
    refusal(tmp_path, UnsupportedModel, r"rope_freqs.*llama3", "llama", tensors={"rope_freqs.weight": factors})


@pytest.mark.parametrize("arch", GGUF_ARCHITECTURES)
def test_a_missing_or_misshapen_tensor_is_corrupt(tmp_path: Path, arch: str) -> None:
    """Named with the shape it has and the shape it should have, before anything is written."""
    name = "blk.1.ffn_down.weight"
    refusal(tmp_path, ModelCorrupt, f"lacks the tensor {name}", arch, tensors={name: None})
    (tmp_path / "out").rmdir()
    wrong = np.zeros((32, 64), np.float32)
    refusal(tmp_path, ModelCorrupt, rf"{name} has shape \(32, 64\), expected \(64, 96\)", arch, tensors={name: wrong})


@pytest.mark.parametrize(
    ("arch", "options", "match"),
    [
        ("llama", {"tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, r"unexpected tensors.*attn_q\.bias"),
        ("qwen3", {"metadata": {"expert_count": 8}}, "dense qwen3"),
        ("qwen2", {"head_dim": 64}, "head width of 64"),
        ("qwen3", {"metadata": {"rope.scaling.type": "yarn"}}, "supported: none, linear, llama3"),
        ("gemma3", {"metadata": {"final_logit_softcapping": 30.0}}, "soft caps"),
        ("qwen3", {"metadata": {"attention.value_length": 16}}, "another width"),
        ("llama", {"metadata": {"attention.head_count_kv": [1, 2]}}, "differs between layers"),
    ],
    ids=str,
)
def test_what_mlx_lm_has_no_place_for_is_refused(
    tmp_path: Path, arch: str, options: dict[str, Any], match: str
) -> None:
    """It would run and be wrong."""
    refusal(tmp_path, UnsupportedModel, match, arch, **options)


@pytest.mark.parametrize(
    "metadata",
    [
        {"attention.sliding_window": None},
        {"attention.sliding_window": 0},
        {"rope.freq_base": -1.0},
        {"attention.head_count_kv": 3},
        {"embedding_length": "wide"},
        {"block_count": 2**31},
    ],
    ids=str,
)
def test_senseless_figures_are_corrupt(tmp_path: Path, metadata: dict[str, Any]) -> None:
    """A missing window, zeros, negatives, other types and absurd counts are errors that name the file."""
    refusal(tmp_path, ModelCorrupt, r"m\.gguf", "gemma3", metadata=metadata)


def test_figures_stated_per_layer_are_taken_if_they_agree(tmp_path: Path) -> None:
    """Some converters write one number for each layer."""
    assert config_of(tmp_path, "llama", {"attention.head_count_kv": [1, 1]})["num_key_value_heads"] == 1
