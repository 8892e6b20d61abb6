"""From an mlx-lm `config.json` to a `ModelCacheSpec`. Pure arithmetic on configuration; no mlx.

May import kvd.ids, kvd.quant.spec and this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvd.errors import InvalidParams
from kvd.ids import Fingerprint
from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.families import FAMILIES, Geometry, geometry
from kvd.model.spec import ModelCacheSpec
from kvd.quant.spec import group_for

SUPPORTED_MODEL_TYPES: Final = tuple(FAMILIES)
"""Values of `model_type` kvd runs."""

DEFAULT_CONTEXT_TOKENS: Final = 2048
"""Context of a configuration without `max_position_embeddings` (llama's own default)."""

PREFILL_CHUNK_TOKENS: Final = 512
TILE_TOKENS: Final = 512
"""Context tokens whose scores an attention backend holds at once."""

_HEADROOM: Final = 1.25


def check_supported(config: Mapping[str, Any]) -> Geometry:
    """The model's geometry, or a refusal of what kvd cannot run.

    Raises:
        UnsupportedModel: with the reason and the list of what is supported.
        ModelCorrupt: a figure is missing or no number.
    """
    try:
        found = geometry(config)
        widths = {width for layer in found.layers for width in (layer.k_dim, layer.v_dim)}
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelCorrupt(f"config.json lacks a figure, or it is no number: {error}", figure=str(error)) from None
    for width in sorted(widths):
        try:
            group_for(width)
        except InvalidParams:
            message = f"head width {width} is not supported; supported: multiples of 32"
            raise UnsupportedModel(message, head_dim=width) from None
    return found


def scratch_bytes(shape: Geometry, *, item_bytes: int, chunk_tokens: int, tile_tokens: int) -> int:
    """Bytes a prefill step may need beside weights and KV.

    Of a chunk of L tokens, at the widest point of a layer, with hidden size H, MLP width I, query heads A, KV heads B,
    head widths k and v, vocabulary V and a tile of T context tokens:

        residual, its norm and the block's output     3 L H
        queries, keys, values and attention output    L (A + B) (k + v)
        MLP: gate, up, their product                  3 L I
        float32 logits of one row, and a sorted copy  2 V      (4 bytes each, whatever the dtype)
        float32 scores of a tile and their exponents  2 A L T
        one tile of dequantised keys and values       B T (k + v)

    MLP and attention are not alive together, but a lazy graph may keep the former's inputs until its evaluation, so
    they are added. A quarter is added for the allocator's rounding and reuse.
    """
    heads = shape.query_heads
    attention = max((heads + layer.kv_heads) * (layer.k_dim + layer.v_dim) for layer in shape.layers)
    activations = chunk_tokens * (3 * shape.hidden + attention + 3 * shape.intermediate) * item_bytes
    logits = 2 * shape.vocab_tokens * 4
    scores = 2 * heads * chunk_tokens * tile_tokens * 4
    tile = max(layer.kv_heads * tile_tokens * (layer.k_dim + layer.v_dim) for layer in shape.layers) * 4
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
        UnsupportedModel, ModelCorrupt: see `check_supported`.
    """
    shape = check_supported(config)
    return ModelCacheSpec(
        model_name=model_name,
        fingerprint=fingerprint,
        layers=shape.layers,
        query_heads=shape.query_heads,
        context_tokens=shape.context_tokens or DEFAULT_CONTEXT_TOKENS,
        vocab_tokens=shape.vocab_tokens,
        scratch_bytes=scratch_bytes(
            shape, item_bytes=item_bytes, chunk_tokens=PREFILL_CHUNK_TOKENS, tile_tokens=TILE_TOKENS
        ),
        chunk_tokens=PREFILL_CHUNK_TOKENS,
    )
