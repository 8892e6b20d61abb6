"""From an mlx-lm `config.json` to a `ModelCacheSpec`. Pure arithmetic on configuration; no mlx.

May import kvd.ids, kvd.quant.spec and this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvd.errors import InvalidParams
from kvd.ids import Fingerprint
from kvd.model.errors import UnsupportedModel
from kvd.model.spec import LayerSpec, ModelCacheSpec
from kvd.quant.spec import group_for

SUPPORTED_MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose layers all attend to all tokens with plain grouped-query attention."""

DEFAULT_CONTEXT_TOKENS: Final = 2048
"""Context of a configuration without `max_position_embeddings` (llama's own default)."""

PREFILL_CHUNK_TOKENS: Final = 512
TILE_TOKENS: Final = 512
"""Context tokens whose scores an attention backend holds at once."""

_HEADROOM: Final = 1.25


def check_supported(config: Mapping[str, Any]) -> None:
    """Refuse what kvd cannot run.

    Raises:
        UnsupportedModel: with the reason and the list of supported types.
    """
    known = ", ".join(SUPPORTED_MODEL_TYPES)
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        message = f"model type {model_type!r} is not supported; supported: {known}"
        raise UnsupportedModel(message, model_type=str(model_type), supported=list(SUPPORTED_MODEL_TYPES))
    kinds = set(config.get("layer_types") or ["full_attention"]) - {"full_attention"}
    if kinds or (config.get("use_sliding_window") and config.get("sliding_window")):
        raise UnsupportedModel(
            f"layers of kind {', '.join(sorted(kinds)) or 'sliding_attention'} are not supported; supported: full "
            f"attention in all layers of {known}",
            model_type=str(model_type),
        )
    head_dim = head_width(config)
    try:
        group_for(head_dim)
    except InvalidParams:
        message = f"head width {head_dim} is not supported; supported: multiples of 32"
        raise UnsupportedModel(message, head_dim=head_dim) from None


def head_width(config: Mapping[str, Any]) -> int:
    """Width of a head: stated, or hidden size by heads."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def scratch_bytes(config: Mapping[str, Any], *, item_bytes: int, chunk_tokens: int, tile_tokens: int) -> int:
    """Bytes a prefill step may need beside weights and KV.

    Of a chunk of L tokens, at the widest point of a layer, with hidden size H, MLP width I, query heads A, KV heads B,
    head width d, vocabulary V and a tile of T context tokens:

        residual, its norm and the block's output     3 L H
        queries, keys, values and attention output    L d (2 A + 2 B)
        MLP: gate, up, their product                  3 L I
        float32 logits of one row, and a sorted copy  2 V      (4 bytes each, whatever the dtype)
        float32 scores of a tile and their exponents  2 A L T
        one tile of dequantised keys and values       2 B T d

    MLP and attention are not alive together, but a lazy graph may keep the former's inputs until its evaluation, so
    they are added. A quarter is added for the allocator's rounding and reuse.
    """
    hidden, mlp = int(config["hidden_size"]), int(config["intermediate_size"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = head_width(config)
    activations = chunk_tokens * (3 * hidden + width * (2 * heads + 2 * kv_heads) + 3 * mlp) * item_bytes
    logits = 2 * int(config["vocab_size"]) * 4
    scores = 2 * heads * chunk_tokens * tile_tokens * 4
    tile = 2 * kv_heads * tile_tokens * width * 4
    return int((activations + logits + scores + tile) * _HEADROOM)


def build_cache_spec(
    config: Mapping[str, Any], *, model_name: str, fingerprint: Fingerprint, item_bytes: int
) -> ModelCacheSpec:
    """The cache geometry of a supported model.

    Args:
        config: the parsed `config.json`.
        model_name: how the user names the model.
        fingerprint: its fingerprint.
        item_bytes: bytes of one activation.

    Raises:
        UnsupportedModel: see `check_supported`.
    """
    check_supported(config)
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = head_width(config)
    layer = LayerSpec("full", kv_heads, width, width)
    return ModelCacheSpec(
        model_name=model_name,
        fingerprint=fingerprint,
        layers=(layer,) * int(config["num_hidden_layers"]),
        query_heads=heads,
        context_tokens=int(config.get("max_position_embeddings") or DEFAULT_CONTEXT_TOKENS),
        vocab_tokens=int(config["vocab_size"]),
        scratch_bytes=scratch_bytes(
            config, item_bytes=item_bytes, chunk_tokens=PREFILL_CHUNK_TOKENS, tile_tokens=TILE_TOKENS
        ),
        chunk_tokens=PREFILL_CHUNK_TOKENS,
    )
