"""The architectures that GGUF files are imported from: names of their tensors, their shapes, their configuration.

Where the file says nothing, the default is stated in the table or the function that uses it. May import
kvd.model.errors and `gguf_file` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.gguf_file import GgufFile

GEMMA3_PATTERN: Final = 6
"""Gemma 3: every sixth layer sees all tokens. GGUF files of it do not say so (the published models all have it)."""

GEMMA3_LOCAL_ROPE_BASE: Final = 10_000.0
"""Gemma 3: the rotary base of sliding layers, which GGUF files leave out."""

_GEMMA3_27B_BLOCKS: Final = 62
"""The one Gemma 3 that scales queries by hidden size / heads instead of the head width; known by its depth."""

_LLAMA3_FACTORS: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama 3.1, 3.2 and 3.3 has; the file keeps only the per-dimension factors that follow from it."""

Names = Mapping[str, tuple[str, str]]
"""GGUF tensor name to (mlx-lm name, shape in letters). The letters: E hidden, F MLP, Q all query heads, K all KV heads,
D one head, V vocabulary."""

_COMMON: Final[Names] = {
    "attn_norm.weight": ("input_layernorm.weight", "E"),
    "attn_q.weight": ("self_attn.q_proj.weight", "QE"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KE"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KE"),
    "attn_output.weight": ("self_attn.o_proj.weight", "EQ"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "FE"),
    "ffn_up.weight": ("mlp.up_proj.weight", "FE"),
    "ffn_down.weight": ("mlp.down_proj.weight", "EF"),
}
_PRE_NORM: Final[Names] = {**_COMMON, "ffn_norm.weight": ("post_attention_layernorm.weight", "E")}
_HEAD_NORMS: Final[Names] = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "D"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "D"),
}
_QKV_BIASES: Final[Names] = {
    "attn_q.bias": ("self_attn.q_proj.bias", "Q"),
    "attn_k.bias": ("self_attn.k_proj.bias", "K"),
    "attn_v.bias": ("self_attn.v_proj.bias", "K"),
}
_TOP: Final[Names] = {
    "token_embd.weight": ("model.embed_tokens.weight", "VE"),
    "output_norm.weight": ("model.norm.weight", "E"),
}
_OUTPUT: Final[Names] = {"output.weight": ("lm_head.weight", "VE")}

ROPE_FACTORS: Final = "rope_freqs.weight"
"""A tensor that only says how Llama 3 stretches its rotary wave lengths; it becomes configuration."""


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture.

    Attributes:
        model_type: mlx-lm's name of it.
        class_name: the class published configurations name.
        layer_names: the tensors of a layer.
        rope_base: rotary base of a file that states none.
        epsilon: of the norms, where the file states none.
        interleaved: q and k rows are stored in interleaved rotary order and have to be put back.
        shifted_norms: the file stores norm weights plus one (mlx-lm's code adds the one itself).
        hidden_heads: mlx-lm takes the head width from hidden size by heads, whatever a configuration says.
        extra_config: what only this architecture has in its configuration.
    """

    model_type: str
    class_name: str
    layer_names: Names
    rope_base: float
    epsilon: float
    interleaved: bool = False
    shifted_norms: bool = False
    hidden_heads: bool = False
    extra_config: Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]] | None = None


def build_config(file: GgufFile) -> dict[str, Any]:
    """The `config.json` of mlx-lm for a file.

    Stated defaults for absent metadata: KV heads as query heads, head width `hidden / heads`, no output matrix means
    tied embeddings, rotary base and epsilon as in `FAMILIES`.

    Raises:
        UnsupportedModel: another architecture, or something of it that mlx-lm's model has no place for.
        ModelCorrupt: a required figure is missing or senseless.
    """
    arch, family = file.architecture, family_of(file)
    if file.get(f"{arch}.expert_count", 0):
        raise UnsupportedModel(f"mixtures of experts in GGUF files are not supported; supported: dense {arch} models")
    hidden, heads = figure(file, "embedding_length"), figure(file, "attention.head_count")
    head_dim = figure(file, "attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.class_name],
        "hidden_size": hidden,
        "intermediate_size": figure(file, "feed_forward_length"),
        "num_hidden_layers": figure(file, "block_count", least=0),
        "num_attention_heads": heads,
        "num_key_value_heads": figure(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _positive(file, "attention.layer_norm_rms_epsilon", family.epsilon),
        "rope_theta": _positive(file, "rope.freq_base", family.rope_base),
        "max_position_embeddings": figure(file, "context_length"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "rope_traditional": False,
    }
    _check_heads(file, config, family)
    scaling = _rope_scaling(file, head_dim, config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    if family.extra_config is not None:
        config.update(family.extra_config(file, config))
    for name in ("bos", "eos"):
        if file.has(f"tokenizer.ggml.{name}_token_id"):
            config[f"{name}_token_id"] = file.require(f"tokenizer.ggml.{name}_token_id", int)
    return config


def family_of(file: GgufFile) -> Family:
    """The file's architecture.

    Raises:
        UnsupportedModel: it is none of `FAMILIES`.
    """
    family = FAMILIES.get(file.architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(
            f"GGUF architecture {file.architecture!r} is not supported; supported: {known}",
            architecture=file.architecture,
        )
    return family


def tensor_names(file: GgufFile, config: Mapping[str, Any]) -> dict[str, str]:
    """Every tensor of the model: GGUF name to mlx-lm name, each checked to be there in the shape `config` asks for.

    Raises:
        ModelCorrupt: a tensor is missing or has another shape.
        UnsupportedModel: the file has tensors that mlx-lm's model has no place for (biases, for instance).
    """
    family = family_of(file)
    expected = dict(_TOP) if config["tie_word_embeddings"] else {**_TOP, **_OUTPUT}
    for layer in range(config["num_hidden_layers"]):
        for old, (new, letters) in family.layer_names.items():
            name = f"blk.{layer}.{old}"
            if name not in file.shapes:  # found here: a senseless count of layers must not make a list of its length
                raise ModelCorrupt(f"{file.path} lacks the tensor {name}", tensor=name)
            expected[name] = (f"model.layers.{layer}.{new}", letters)
    surplus = sorted(set(file.shapes) - set(expected) - {ROPE_FACTORS})
    if surplus:
        message = f"unexpected tensors for a {file.architecture} model: {', '.join(surplus[:5])}"
        raise UnsupportedModel(message, tensors=surplus[:5])
    head = config["head_dim"]
    widths = {
        "E": config["hidden_size"],
        "F": config["intermediate_size"],
        "Q": config["num_attention_heads"] * head,
        "K": config["num_key_value_heads"] * head,
        "D": head,
        "V": config["vocab_size"],
    }
    for name, (_, letters) in expected.items():
        shape = tuple(widths[letter] for letter in letters)
        if name not in file.shapes:
            raise ModelCorrupt(f"{file.path} lacks the tensor {name}", tensor=name)
        if file.shapes[name] != shape:
            message = f"{file.path}: tensor {name} has shape {file.shapes[name]}, expected {shape}"
            raise ModelCorrupt(message, tensor=name, shape=list(file.shapes[name]), expected=list(shape))
    return {name: new for name, (new, _) in expected.items()}


def figure(file: GgufFile, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number of the architecture's metadata; files may state it per layer, if all layers agree.

    Raises:
        ModelCorrupt: it is missing without a default, or below `least`.
        UnsupportedModel: the layers differ.
    """
    full = f"{file.architecture}.{key}"
    if file.is_array(full):
        values = set(file.array(full, int))
        if len(values) != 1:
            raise UnsupportedModel(f"{full} differs between layers, which is not supported; supported: one value")
        (value,) = values
    else:
        value = file.require(full, int) if default is None else file.get(full, default)
    if value < least:
        raise ModelCorrupt(f"{file.path}: {full} is {value}, expected at least {least}", key=full)
    return int(value)


def _positive(file: GgufFile, key: str, default: float) -> float:
    value = file.get(f"{file.architecture}.{key}", default)
    if not (math.isfinite(value) and value > 0):
        raise ModelCorrupt(f"{file.path}: {file.architecture}.{key} is {value}, expected a positive number", key=key)
    return value


def _vocab_size(file: GgufFile) -> int:
    shape = file.shapes.get("token_embd.weight")
    if shape is None:
        raise ModelCorrupt(f"{file.path} lacks the tensor token_embd.weight", tensor="token_embd.weight")
    return shape[0]


def _check_heads(file: GgufFile, config: Mapping[str, Any], family: Family) -> None:
    """Refuse head shapes that mlx-lm's model would read differently.

    Raises:
        UnsupportedModel, ModelCorrupt: with the figures.
    """
    arch, head_dim = file.architecture, config["head_dim"]
    if file.get(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"values of another width than keys are not supported for {arch} GGUF files")
    if file.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"rotary embedding over a part of the head is not supported for {arch} GGUF files")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads or head_dim % 2:
        message = f"{heads} query heads for {kv_heads} KV heads of width {head_dim}"
        raise ModelCorrupt(f"{file.path}: {message} do not fit together")
    if family.hidden_heads and head_dim * heads != config["hidden_size"]:
        raise UnsupportedModel(
            f"a head width of {head_dim} is not supported for {arch}; supported: hidden size / heads"
        )


def _rope_scaling(file: GgufFile, head_dim: int, base: float) -> dict[str, Any] | None:
    """The rotary scaling, in mlx-lm's words.

    Raises:
        UnsupportedModel: another kind than none, linear and Llama 3's.
    """
    arch = file.architecture
    kind = file.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"rotary scaling {kind!r} of GGUF files is not supported; supported: none, linear, llama3"
        )
    linear = _positive(file, "rope.scaling.factor", 1.0) if kind == "linear" else 1.0
    if ROPE_FACTORS not in file.shapes:
        return None if linear == 1.0 else {"type": "linear", "factor": linear}
    factors = file.tensor(ROPE_FACTORS).astype(np.float64).ravel()
    factor = float(factors.max())
    fits = file.architecture == "llama" and linear == 1.0 and len(factors) == head_dim // 2 and factor >= 1
    if not fits or not np.allclose(factors, llama3_factors(factor, head_dim, base), rtol=1e-4, atol=0):
        raise UnsupportedModel(
            f"the factors in {ROPE_FACTORS} are not those of Llama 3's rotary scaling; supported: none, linear, llama3"
        )
    return None if factor == 1 else {"rope_type": "llama3", "factor": factor, **_LLAMA3_FACTORS}


def llama3_factors(factor: float, head_dim: int, base: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What Llama 3's rotary scaling divides the frequency of each pair by.

    Long waves are stretched by `factor`, short ones not, those between by a mix. Source: `rope_scaling` of the
    published Llama 3.1 configurations, which converters write out as these factors.

    Returns:
        [head_dim / 2] factors, all one where `factor` is one.
    """
    waves = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    context = _LLAMA3_FACTORS["original_max_position_embeddings"]
    low, high = _LLAMA3_FACTORS["low_freq_factor"], _LLAMA3_FACTORS["high_freq_factor"]
    smooth = np.clip((context / waves - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _gemma3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Windows, the second rotary base and the query scale.

    A wrong window would silently give wrong text, so it is required. Linear rotary scaling of the larger models applies
    to layers of full attention only, in mlx-lm as in the published models.
    """
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if file.get(f"gemma3.{key}", 0.0):
            raise UnsupportedModel(f"gemma3.{key} is not supported; supported: Gemma 3 without soft caps")
    deepest = config["num_hidden_layers"] == _GEMMA3_27B_BLOCKS
    scalar = config["hidden_size"] / config["num_attention_heads"] if deepest else config["head_dim"]
    return {
        "sliding_window": figure(file, "attention.sliding_window"),
        "sliding_window_pattern": _gemma3_pattern(file, config["num_hidden_layers"]),
        "rope_local_base_freq": _positive(file, "rope.freq_base_swa", GEMMA3_LOCAL_ROPE_BASE),
        "query_pre_attn_scalar": scalar,
    }


def _gemma3_pattern(file: GgufFile, layers: int) -> int:
    """One layer of full attention in how many; a file may say so by a number or a flag per layer (true: sliding)."""
    key = "gemma3.attention.sliding_window_pattern"
    if not file.is_array(key):
        return figure(file, "attention.sliding_window_pattern", GEMMA3_PATTERN)
    sliding = file.array(key, bool)
    pattern = sliding.index(False) + 1 if False in sliding else 0
    if not pattern or len(sliding) != layers or sliding != [(i + 1) % pattern != 0 for i in range(layers)]:
        raise UnsupportedModel(f"{key} is not one layer of full attention in every so many, as mlx-lm runs them")
    return pattern


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family("llama", "LlamaForCausalLM", _PRE_NORM, 10_000.0, 1e-5, interleaved=True),
    "qwen2": Family(
        "qwen2", "Qwen2ForCausalLM", {**_PRE_NORM, **_QKV_BIASES}, 1_000_000.0, 1e-6, hidden_heads=True
    ),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", {**_PRE_NORM, **_HEAD_NORMS}, 1_000_000.0, 1e-6),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            **_COMMON,
            **_HEAD_NORMS,
            "post_attention_norm.weight": ("post_attention_layernorm.weight", "E"),
            "ffn_norm.weight": ("pre_feedforward_layernorm.weight", "E"),
            "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", "E"),
        },
        1_000_000.0,
        1e-6,
        shifted_norms=True,
        extra_config=_gemma3,
    ),
}  # fmt: skip
"""Values of `general.architecture` that can be imported."""
