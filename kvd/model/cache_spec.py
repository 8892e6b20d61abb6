"""From an mlx-lm `config.json` to a `ModelCacheSpec`. Pure arithmetic on configuration; no mlx.

May import kvd.ids, kvd.quant.spec and this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvd.errors import InvalidParams
from kvd.ids import Fingerprint
from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.families import FAMILIES, Experts, Geometry, geometry
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
        ModelCorrupt: a figure is missing, no number, or contradicts another.
    """
    try:
        found = geometry(config)
        widths = {width for layer in found.layers for width in (layer.k_dim, layer.v_dim)}
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelCorrupt(f"config.json lacks a figure, or it cannot be: {error}", figure=str(error)) from None
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
    head widths k and v, C values of compressed attention per token, vocabulary V and a tile of T context tokens; of E
    experts of width J each token meets K, and a shared one of width S:

        residual, its norm and the block's output     3 L H
        queries, keys, values and attention output    L (A + B) (k + v)
        what latent attention unfolds these from      L C
        MLP: gate, up, their product                  3 L I
        or, if more, experts                          L K (3 J + 4 H) + 3 L S + 3 L E
        biases of experts, gathered                   L K (2 J + H)
        float32 logits of one row, and a sorted copy  2 V      (4 bytes each, whatever the dtype)
        float32 scores of a tile and their exponents  2 A L T
        one tile of dequantised keys and values       B T (k + v)

    MLP and attention are not alive together, but a lazy graph may keep the former's inputs until its evaluation, so
    they are added. The experts' inputs and outputs lie there once per expert of a token, twice each: sorted by expert
    and in order. A quarter is added for the allocator's rounding and reuse.
    """
    heads = shape.query_heads
    attention = max((heads + layer.kv_heads) * (layer.k_dim + layer.v_dim) for layer in shape.layers)
    widest = max(3 * shape.intermediate, 0 if shape.experts is None else _expert_values(shape.experts, shape.hidden))
    activations = chunk_tokens * (3 * shape.hidden + attention + shape.compressed + widest) * item_bytes
    logits = 2 * shape.vocab_tokens * 4
    scores = 2 * heads * chunk_tokens * tile_tokens * 4
    tile = max(layer.kv_heads * tile_tokens * (layer.k_dim + layer.v_dim) for layer in shape.layers) * 4
    return int((activations + logits + scores + tile) * _HEADROOM)


def _expert_values(experts: Experts, hidden: int) -> int:
    """Values of one token in a layer of experts: `scratch_bytes`' term for them."""
    routed = 3 * experts.width + 4 * hidden + (2 * experts.width + hidden if experts.biased else 0)
    return experts.per_token * routed + 3 * experts.shared_width + 3 * experts.count


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
