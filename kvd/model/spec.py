"""ModelCacheSpec: the model-independent boundary (the seed's abstraction layer).

Everything above the model (pager, store, scheduler) knows a model only through this: which layers cache what, in
which groups, and how many bytes that takes. May import kvd.ids, kvd.errors, kvd.quant.spec; no mlx.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvd.ids import Fingerprint, GroupId
from kvd.quant.spec import PageFormat, PageLayout, named_format

LayerKind = Literal["full", "sliding", "latent", "state"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer caches.

    Attributes:
        kind: `full` (all tokens), `sliding` (a window), `latent` (MLA), `state` (recurrent, no pages).
        kv_heads: KV heads.
        k_dim: width of a key head.
        v_dim: width of a value head; differs from `k_dim` for MLA.
        window: tokens a sliding layer sees; None for the others.
    """

    kind: LayerKind
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one kind and geometry; they share pages.

    Attributes:
        group_id: index in `ModelCacheSpec.groups`.
        layer: the spec all its layers share.
        layer_indices: the layers' indices in the model, ascending.
    """

    group_id: GroupId
    layer: LayerSpec
    layer_indices: tuple[int, ...]

    def format(self, name: str, conditioning: str | None = None) -> PageFormat:
        """The named page format for this group's geometry (`kvd.quant.spec.named_format`)."""
        return named_format(
            name,
            k_dim=self.layer.k_dim,
            v_dim=self.layer.v_dim,
            layer_count=len(self.layer_indices),
            conditioning=conditioning,
        )

    def layout(self, page_format: PageFormat) -> PageLayout:
        """Layout of this group's pages in `page_format`."""
        return PageLayout(
            layer_indices=self.layer_indices,
            kv_heads=self.layer.kv_heads,
            k_dim=self.layer.k_dim,
            v_dim=self.layer.v_dim,
            page_format=page_format,
        )

    @property
    def fp16_token_bytes(self) -> int:
        """Bytes one token would take in FP16 over this group's layers."""
        return 2 * self.layer.kv_heads * (self.layer.k_dim + self.layer.v_dim) * len(self.layer_indices)


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """Geometry of a model's caches.

    Attributes:
        model_name: how the user names it.
        fingerprint: digest of weights, tokenizer, template, quantisation.
        layers: one `LayerSpec` per model layer.
        query_heads: attention heads (GQA ratio = query_heads / kv_heads).
        context_tokens: the model's context limit.
        vocab_tokens: rows of the output projection.
        scratch_bytes: bytes a step of `chunk_tokens` may need beside KV and weights.
        chunk_tokens: prefill chunk the scratch figure is for.
    """

    model_name: str
    fingerprint: Fingerprint
    layers: tuple[LayerSpec, ...]
    query_heads: int
    context_tokens: int
    vocab_tokens: int
    scratch_bytes: int
    chunk_tokens: int = 512

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups in order of their first layer; `state` layers form none."""
        members: dict[LayerSpec, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.kind != "state":
                members.setdefault(layer, []).append(index)
        return tuple(
            CacheGroup(GroupId(i), layer, tuple(indices)) for i, (layer, indices) in enumerate(members.items())
        )
