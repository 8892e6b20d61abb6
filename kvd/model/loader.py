"""The only door to mlx_lm: from a model folder to a model in memory, its text codec, template and cache geometry.

Weights and activations are float32 where MLX computes on the CPU (half-precision and quantised products are one to two
orders slower there, so quantised weights are unpacked) and as stored elsewhere. May import this package only, and mlx
and mlx_lm inside functions: importing this module stays cheap for commands that load nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvd.model import mlx_lm_door
from kvd.model.cache_spec import build_cache_spec, check_supported
from kvd.model.errors import ModelCorrupt
from kvd.model.fingerprint import fingerprint
from kvd.model.folder import check_files
from kvd.model.registry import ModelFolder
from kvd.model.spec import ModelCacheSpec
from kvd.model.template import ChatTemplate
from kvd.model.tokenizer import TextCodec

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

_PLAIN_TYPES: Final = frozenset({"gemma3_text", "llama", "qwen2", "qwen3"})
"""Model types of unquantised folders, kvd's own conversions among them, that need nothing of `mlx_lm.utils`, which
takes two seconds to import (`kvd.model.mlx_lm_door`)."""

_MODEL_FILE_ERRORS: Final = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
"""What mlx-lm's model files raise for a configuration or weights they cannot take; they check little themselves."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. The arrays in `model` belong to the thread that loaded it.

    Attributes:
        model: the mlx_lm model; `model(ids, cache=...)` gives logits [batch, tokens, vocab].
        codec: text to ids and back.
        template: the chat template, or None for a model without one.
        spec: cache geometry, with the fingerprint.
        folder: where it came from.
        dtype: dtype of activations.
        weights_bytes: bytes of the parameters in memory.
    """

    model: Any
    codec: TextCodec
    template: ChatTemplate | None
    spec: ModelCacheSpec
    folder: ModelFolder
    dtype: str
    weights_bytes: int


def load(folder: ModelFolder) -> LoadedModel:
    """Load a model; all weights are evaluated on return.

    What can be refused is refused before a weight is read.

    Raises:
        UnsupportedModel: architecture, layer kind, head width or tokenizer.
        ModelCorrupt: a file is missing, unreadable or does not fit the configuration.
    """
    config = folder.config()
    check_supported(config)
    check_files(folder)
    codec = TextCodec.from_folder(folder.path)
    template = ChatTemplate.from_folder(folder.path, codec)
    model, dtype = _load_weights(folder)
    spec = build_cache_spec(
        config,
        model_name=folder.name,
        fingerprint=fingerprint(folder, compute_dtype=dtype).fingerprint,
        item_bytes=_ITEM_BYTES[dtype],
    )
    from mlx.utils import tree_flatten

    weights_bytes = sum(int(array.nbytes) for _, array in tree_flatten(model.parameters()))
    return LoadedModel(model, codec, template, spec, folder, dtype, weights_bytes)


def _load_weights(folder: ModelFolder) -> tuple[Any, str]:
    """The evaluated mlx_lm model and the dtype it computes in."""
    import mlx.core as mx

    folder.weight_files()
    mlx_lm_door.prepare()
    config = folder.config()
    try:
        if _is_plain(folder, config):
            model = _plain_model(folder, config)
        else:
            from mlx_lm.utils import load_model

            model, config = load_model(folder.path, lazy=True)
    except _MODEL_FILE_ERRORS as error:
        raise ModelCorrupt(f"{folder.path} cannot be loaded: {error}", folder=str(folder.path)) from error
    model = getattr(model, "language_model", model)  # the text part of a multimodal folder
    if mx.default_device().type == mx.DeviceType.cpu:
        if "quantization" in config:
            from mlx_lm.utils import dequantize_model

            model = _with_plain_heads(dequantize_model(model))
        model.set_dtype(mx.float32)
        dtype = "float32"
    else:
        dtype = str(model.model.norm.weight.dtype).rsplit(".", 1)[-1]
    mx.eval(model.parameters())
    model.eval()
    return model, dtype


def _is_plain(folder: ModelFolder, config: Mapping[str, Any]) -> bool:
    """Whether the model's own file and its weights are all there is to it."""
    special = ("model_file", "quantization", "quantization_config", "quantize_activations", "text_config")
    is_special = any(name in config for name in special) or (folder.path / "hf_quant_config.json").exists()
    return config.get("model_type") in _PLAIN_TYPES and not is_special


def _plain_model(folder: ModelFolder, config: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The mlx_lm model of a plain folder, with its weights; none of them is evaluated yet."""
    import mlx.core as mx

    family = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(config))
    weights: dict[str, Any] = {}
    for path in folder.weight_files():
        loaded = mx.load(str(path))
        assert isinstance(loaded, dict)  # so says the suffix
        weights |= loaded
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.load_weights(list(weights.items()), strict=True)
    return model


def _with_plain_heads(model: Any) -> Any:  # noqa: ANN401
    """The model with quantised products per head unpacked, which mlx-lm's own function leaves as they are."""
    import mlx.core as mx
    from mlx.utils import tree_unflatten
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

    plain = []
    for name, part in model.named_modules():
        if isinstance(part, QuantizedMultiLinear):
            packed = (part.weight, part.scales, part.biases, part.group_size, part.bits, part.mode)
            unpacked = MultiLinear(1, 1, 1)
            unpacked.weight = mx.dequantize(*packed)
            plain.append((name, unpacked))
    if plain:
        model.update_modules(tree_unflatten(plain))
    return model
