"""The model families kvd runs: which layers cache what, read from a `config.json`. Pure arithmetic; no mlx.

Each family states what mlx-lm's model file of that name does, not what the configuration might mean elsewhere: where
the two differ (a pattern of layers mlx-lm does not know), the folder is refused. May import kvd.model.errors and spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvd.model.errors import UnsupportedModel
from kvd.model.spec import LayerSpec

Config = Mapping[str, Any]

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


@dataclass(frozen=True, slots=True)
class Geometry:
    """What kvd must know of a model's shape.

    Attributes:
        layers: one per model layer.
        query_heads: attention heads.
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        vocab_tokens: rows of the output projection.
        context_tokens: context limit; 0 when the configuration states none.
    """

    layers: tuple[LayerSpec, ...]
    query_heads: int
    hidden: int
    intermediate: int
    vocab_tokens: int
    context_tokens: int


def geometry(config: Config) -> Geometry:
    """The shape of a supported model.

    Args:
        config: the parsed `config.json`.

    Raises:
        UnsupportedModel: an unknown family, or layers that it does not have in mlx-lm; the supported ones are listed.
        KeyError, TypeError, ValueError: a figure without a default is missing or senseless.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise UnsupportedModel(
            f"model type {config.get('model_type')!r} is not supported; supported: {', '.join(FAMILIES)}",
            model_type=str(config.get("model_type")),
            supported=list(FAMILIES),
        )
    return family(config)


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
    pattern = int(full_config["sliding_window_pattern"])
    full = LayerSpec("full", *_kv_shape(full_config))
    sliding = LayerSpec("sliding", *_kv_shape(full_config), int(full_config["sliding_window"]))
    count = int(full_config["num_hidden_layers"])
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


FAMILIES: Final[Mapping[str, Callable[[Config], Geometry]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma3_text": _gemma3,
    "gemma3": _gemma3_wrapper,
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
    """Width of a head: stated, or hidden size by heads."""
    return int(config.get("head_dim") or _figure(config, "hidden_size") // _figure(config, "num_attention_heads"))


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
    return int(config.get("num_key_value_heads") or heads), width, width


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


def _with_layers(config: Config, layers: tuple[LayerSpec, ...]) -> Geometry:
    return Geometry(
        layers=layers,
        query_heads=_figure(config, "num_attention_heads"),
        hidden=_figure(config, "hidden_size"),
        intermediate=_figure(config, "intermediate_size"),
        vocab_tokens=_figure(config, "vocab_size"),
        context_tokens=int(config.get("max_position_embeddings") or 0),
    )


__all__ = ["FAMILIES", "GEMMA3_DEFAULTS", "Geometry", "geometry", "head_width", "text_config"]
