"""The model families kvd runs: which layers cache what, read from a `config.json`. Pure arithmetic; no mlx.

Each family states what mlx-lm's model file of that name does, not what the configuration might mean elsewhere: where
the two differ (a pattern of layers mlx-lm does not know), the folder is refused. May import kvd.model.errors and spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvd.model.errors import UnsupportedModel
from kvd.model.spec import LayerSpec

Config = Mapping[str, Any]

_CONTEXT: Final = "max_position_embeddings"

GEMMA3_DEFAULTS: Final[Config] = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262_144,
    "max_position_embeddings": 32_768,
}
"""What mlx-lm's Gemma 3 takes for figures that a configuration leaves out (published ones leave out many)."""

_MIXTRAL_DEFAULTS: Final[Config] = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32_000,
}

_GPT_OSS_DEFAULTS: Final[Config] = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201_088,
}

_DEEPSEEK_DEFAULTS: Final[Config] = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 102_400,
    _CONTEXT: 2048,
}

_NO_PAGES: Final = "its layers keep a recurrent state, which has no KV pages"
_SOFT_CAP: Final = "it caps scores inside attention, which no backend does"

REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv7", "recurrent_gemma", "jamba", "falcon_h1"), _NO_PAGES),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "granitemoehybrid", "plamo2"), _NO_PAGES),
    **dict.fromkeys(("kimi_linear", "bailing_moe_linear", "lfm2", "lfm2_moe", "olmo_hybrid"), _NO_PAGES),
    "gemma2": _SOFT_CAP,
    "deepseek_v32": "it picks the tokens it attends to with an index of its own, which is not paged",
}
"""Why some values of `model_type` that mlx-lm knows are refused; the others are merely not there yet."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The layers of a mixture of experts, as far as memory goes.

    Attributes:
        count: routed experts.
        per_token: of these, how many compute each token.
        width: width of a routed expert's MLP.
        shared_width: width of the MLP that computes every token beside them; 0 for none.
        biased: their projections add biases, which are gathered for every token.
    """

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    biased: bool = False


@dataclass(frozen=True, slots=True)
class Geometry:
    """What kvd must know of a model's shape.

    Attributes:
        layers: one per model layer.
        query_heads: attention heads.
        hidden: width of the residual stream.
        intermediate: width of the MLP of dense layers; 0 when there are none.
        vocab_tokens: rows of the output projection.
        context_tokens: context limit; 0 when the configuration states none.
        experts: what layers with experts have; None for a dense model.
        compressed: values per token between the residual stream and an attention's queries, keys and values, beside
            these: what latent attention unfolds them from.
    """

    layers: tuple[LayerSpec, ...]
    query_heads: int
    hidden: int
    intermediate: int
    vocab_tokens: int
    context_tokens: int
    experts: Experts | None = None
    compressed: int = 0


def geometry(config: Config) -> Geometry:
    """The shape of a supported model.

    Args:
        config: the parsed `config.json`.

    Raises:
        UnsupportedModel: an unknown family, or layers that it does not have in mlx-lm; the supported ones are listed.
        KeyError, TypeError, ValueError: a figure without a default is missing or senseless.
    """
    name = str(config.get("model_type"))
    family = FAMILIES.get(name)
    if family is None:
        reason = f" ({REFUSED[name]})" if name in REFUSED else ""
        raise UnsupportedModel(
            f"model type {config.get('model_type')!r} is not supported{reason}; supported: {', '.join(FAMILIES)}",
            model_type=name,
            supported=list(FAMILIES),
        )
    found = family(config)
    for layer in found.layers:
        if found.query_heads % layer.kv_heads:
            raise ValueError(f"num_attention_heads is {found.query_heads}, no multiple of {layer.kv_heads} KV heads")
    return found


def _llama(config: Config) -> Geometry:
    """Llama and Mistral: all layers alike, or `layer_types` says which see a window of `sliding_window` tokens."""
    kinds = _layer_types(config, ("full_attention", "sliding_attention"))
    full = LayerSpec("full", *_kv_shape(config))
    if "sliding_attention" not in kinds:
        return _with_layers(config, (full,) * len(kinds))
    window = config.get("sliding_window")
    if not isinstance(window, int) or window < 1 or "full_attention" not in kinds:
        raise UnsupportedModel(
            "sliding layers need a sliding_window of at least one token and a layer of full attention beside them",
            model_type=str(config["model_type"]),
        )
    sliding = LayerSpec("sliding", *_kv_shape(config), window)
    return _with_layers(config, tuple(sliding if kind == "sliding_attention" else full for kind in kinds))


def _qwen(config: Config) -> Geometry:
    """Qwen 2 and 3: all layers see all tokens (mlx-lm knows no windows for them)."""
    kinds = _layer_types(config, ("full_attention",))
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise UnsupportedModel("layers of kind sliding_attention are not supported for this family; supported: full")
    return _with_layers(config, (LayerSpec("full", *_kv_shape(config)),) * len(kinds))


def _gemma3(config: Config) -> Geometry:
    """Gemma 3: every sixth layer (or as `sliding_window_pattern` says) sees all tokens, the others a window."""
    full_config = {**GEMMA3_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    pattern = _figure(full_config, "sliding_window_pattern")
    full = LayerSpec("full", *_kv_shape(full_config))
    sliding = LayerSpec("sliding", *_kv_shape(full_config), _figure(full_config, "sliding_window"))
    count = _figure(full_config, "num_hidden_layers")
    layers = tuple(full if index % pattern == pattern - 1 else sliding for index in range(count))
    if len(layers) < pattern:
        raise UnsupportedModel(f"a Gemma 3 of {count} layers has none of full attention; one in {pattern} is expected")
    stated = config.get("layer_types")
    if stated and [kind == "full_attention" for kind in stated] != [layer is full for layer in layers]:
        raise UnsupportedModel(f"layer_types is not the pattern of one full layer in {pattern} that mlx-lm runs")
    return _with_layers(full_config, layers)


def _gemma3_wrapper(config: Config) -> Geometry:
    """The text part of a multimodal Gemma 3; its configuration is nested."""
    return _gemma3(text_config(config))


def _mixtral(config: Config) -> Geometry:
    """Mixtral: every layer has experts and sees all tokens; a head is as wide as the hidden size by heads."""
    stated = {**_MIXTRAL_DEFAULTS, **config, "head_dim": None}
    layers = (LayerSpec("full", *_kv_shape(stated)),) * len(_layer_types(stated, ("full_attention",)))
    experts = _experts(stated, "num_local_experts", "intermediate_size")
    return replace(_with_layers(stated, layers), intermediate=0, experts=experts)


def _qwen2_moe(config: Config) -> Geometry:
    """Qwen 2 MoE: every layer has experts and one that computes all tokens; heads as Mixtral's."""
    _only(config, "mlp_only_layers", None, [])
    _only(config, "decoder_sparse_step", None, 1)
    _only(config, "norm_topk_prob", None, False)
    shared = _figure(config, "shared_expert_intermediate_size")
    experts = replace(_experts(config, "num_experts", "moe_intermediate_size"), shared_width=shared)
    return replace(_qwen({**config, "head_dim": None}), intermediate=0, experts=experts)


def _qwen3_moe(config: Config) -> Geometry:
    """Qwen 3 MoE: layers have experts or, as `mlp_only_layers` and `decoder_sparse_step` say, an MLP."""
    _figure(config, "head_dim")
    return replace(_qwen(config), experts=_experts(config, "num_experts", "moe_intermediate_size"))


def _gpt_oss(config: Config) -> Geometry:
    """gpt-oss: sliding and full layers in turn (or as `layer_types` says), sinks, experts in every layer."""
    stated = {**_GPT_OSS_DEFAULTS, **config}
    count = _figure(stated, "num_hidden_layers")
    known = ("sliding_attention", "full_attention")
    # mlx-lm's own pattern has an even length: it would run an odd count of layers without the last.
    kinds = _layer_types({**stated, "layer_types": stated.get("layer_types") or list(known) * (count // 2)}, known)
    if len(set(kinds)) < len(known):
        raise UnsupportedModel("a gpt_oss has layers of sliding and of full attention; its layer_types name one kind")
    full = LayerSpec("full", *_kv_shape(stated))
    sliding = replace(full, kind="sliding", window=_figure(stated, "sliding_window"))
    layers = tuple(full if kind == "full_attention" else sliding for kind in kinds)
    experts = replace(_experts(stated, "num_local_experts", "intermediate_size"), biased=True)
    return replace(_with_layers(stated, layers), intermediate=0, experts=experts)


def _deepseek_v2(config: Config) -> Geometry:
    """DeepSeek V2: keys and values are unfolded for every head before they are cached; keys are wider than values."""
    stated = {**_DEEPSEEK_DEFAULTS, **config}
    if not isinstance(stated.get("rope_scaling"), Mapping) or "factor" not in stated["rope_scaling"]:
        raise UnsupportedModel("mlx-lm runs a deepseek_v2 only with a rope_scaling that has a factor")
    _only(stated, "norm_topk_prob", None, False)
    _only(stated, "scoring_func", None, "softmax")
    heads, k_dim, v_dim, rope, latent = _latent_figures(stated)
    # Queries before their rotated part is put back, unfolded keys and values, the rotated part for every head.
    compressed = heads * (2 * k_dim + v_dim + rope) + latent + rope + int(stated["q_lora_rank"] or 0)
    return _deepseek(stated, LayerSpec("full", heads, k_dim, v_dim), compressed)


def _deepseek_v3(config: Config) -> Geometry:
    """DeepSeek V3: the latent vector and the rotated key, which all heads share, are cached (`kvd.model.latent`)."""
    stated = {"topk_method": "noaux_tc", **_DEEPSEEK_DEFAULTS, **config}
    _only(stated, "topk_method", "noaux_tc")
    _only(stated, "scoring_func", None, "sigmoid")
    heads, k_dim, v_dim, rope, latent = _latent_figures(stated)
    # Queries as projected, their part that meets the latent, and what attention gives, unfolded.
    compressed = heads * (k_dim + latent + v_dim) + latent + rope + int(stated["q_lora_rank"] or 0)
    return _deepseek(stated, LayerSpec("full", 1, latent + rope, latent), compressed)


FAMILIES: Final[Mapping[str, Callable[[Config], Geometry]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma3_text": _gemma3,
    "gemma3": _gemma3_wrapper,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
"""Values of `model_type` kvd runs."""


def text_config(config: Config) -> dict[str, Any]:
    """The configuration of the text part: itself, or what a multimodal folder nests, with mlx-lm's defaults for it."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return dict(config)
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
    outer = {key: config[key] for key in ("vocab_size",) if key in config}
    return {**defaults, **nested, **outer}


def head_width(config: Config) -> int:
    """Width of a head: stated, or hidden size by heads.

    Raises:
        KeyError, TypeError, ValueError: a figure is missing or senseless.
    """
    if config.get("head_dim"):
        return _figure(config, "head_dim")
    hidden, heads = _figure(config, "hidden_size"), _figure(config, "num_attention_heads")
    if hidden < heads:
        raise ValueError(f"hidden_size is {hidden}, less than num_attention_heads, which is {heads}")
    return hidden // heads


def _figure(config: Config, name: str) -> int:
    """A figure that must be there and positive.

    Raises:
        KeyError, TypeError, ValueError: it is not.
    """
    value = int(config[name])
    if value < 1:
        raise ValueError(f"{name} is {value}")
    return value


def _kv_shape(config: Config) -> tuple[int, int, int]:
    """KV heads, width of a key, width of a value."""
    heads = _figure(config, "num_attention_heads")
    width = head_width(config)
    kv_heads = heads if config.get("num_key_value_heads") is None else _figure(config, "num_key_value_heads")
    return kv_heads, width, width


def _layer_types(config: Config, known: tuple[str, ...]) -> list[str]:
    """The kind of each layer.

    Raises:
        UnsupportedModel: a kind the family does not have, or a list of the wrong length.
    """
    count = _figure(config, "num_hidden_layers")
    kinds = list(config.get("layer_types") or ["full_attention"] * count)
    if unknown := sorted(set(kinds) - set(known)):
        raise UnsupportedModel(
            f"layers of kind {', '.join(unknown)} are not supported for model type {config['model_type']!r}; "
            f"supported: {', '.join(known)}",
            model_type=str(config["model_type"]),
        )
    if len(kinds) != count:
        raise UnsupportedModel(f"layer_types names {len(kinds)} layers, num_hidden_layers says {count}")
    return kinds


def _only(config: Config, name: str, *known: object) -> None:
    """Raise UnsupportedModel unless an entry has a value that mlx-lm's model file runs; it would ignore another."""
    if config.get(name) not in known:
        raise UnsupportedModel(f"{name} of {config.get(name)!r} is not what mlx-lm runs for {config['model_type']!r}")


def _experts(config: Config, count_name: str, width_name: str) -> Experts:
    """Routed experts without shared ones.

    Raises:
        KeyError, TypeError, ValueError: a figure is missing or senseless.
    """
    found = Experts(_figure(config, count_name), _figure(config, "num_experts_per_tok"), _figure(config, width_name))
    if found.per_token > found.count:
        raise ValueError(f"num_experts_per_tok is {found.per_token}, more than {count_name}, which is {found.count}")
    return found


def _deepseek(config: Config, layer: LayerSpec, compressed: int) -> Geometry:
    """A DeepSeek whose layers all cache the same; its first `first_k_dense_replace` layers have no experts."""
    shape = replace(_with_layers(config, (layer,) * _figure(config, "num_hidden_layers")), compressed=compressed)
    if config.get("n_routed_experts") is None:
        return shape
    experts = _experts(config, "n_routed_experts", "moe_intermediate_size")
    return replace(
        shape, experts=replace(experts, shared_width=experts.width * int(config.get("n_shared_experts") or 0))
    )


def _latent_figures(config: Config) -> tuple[int, int, int, int, int]:
    """Heads, widths of an unfolded key and value, width of the rotated part, rank of the latent."""
    rope = _figure(config, "qk_rope_head_dim")
    k_dim, v_dim = _figure(config, "qk_nope_head_dim") + rope, _figure(config, "v_head_dim")
    return _figure(config, "num_attention_heads"), k_dim, v_dim, rope, _figure(config, "kv_lora_rank")


def _with_layers(config: Config, layers: tuple[LayerSpec, ...]) -> Geometry:
    return Geometry(
        layers=layers,
        query_heads=_figure(config, "num_attention_heads"),
        hidden=_figure(config, "hidden_size"),
        intermediate=_figure(config, "intermediate_size"),
        vocab_tokens=_figure(config, "vocab_size"),
        context_tokens=_figure(config, _CONTEXT) if config.get(_CONTEXT) else 0,
    )


__all__ = ["FAMILIES", "GEMMA3_DEFAULTS", "REFUSED", "Experts", "Geometry", "geometry", "head_width", "text_config"]
