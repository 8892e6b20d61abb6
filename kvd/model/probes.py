"""What the attention self-test tries: each layer geometry with each layer format in use.

May import kvd.attention, kvd.quant, kvd.model.spec.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from kvd.attention.select import ShapeProbe
from kvd.model.spec import CacheGroup, ModelCacheSpec
from kvd.quant.spec import LayerFormat, PageFormat

_ANY_CONSTANTS: Final = "any"


def probes_for(
    spec: ModelCacheSpec, page_formats: Iterable[tuple[CacheGroup, PageFormat]], *, dtype: str = "float32"
) -> tuple[ShapeProbe, ...]:
    """One probe per distinct pair of layer geometry and layer format, in the order they first appear.

    Args:
        spec: the model's geometry.
        page_formats: every page format in use (the default and those of restored agents) with its cache group; repeats
            cost nothing.
        dtype: in which the model computes.
    """
    return tuple(
        dict.fromkeys(
            ShapeProbe(
                query_heads=spec.query_heads,
                kv_heads=group.layer.kv_heads,
                k_dim=group.layer.k_dim,
                v_dim=group.layer.v_dim,
                layer_format=layer_format,
                window=group.layer.window,
                dtype=dtype,
            )
            for group, page_format in page_formats
            for layer_format in dict.fromkeys(map(_without_digest, page_format.layers))
        )
    )


def _without_digest(layer: LayerFormat) -> LayerFormat:
    """Which constants condition the keys makes no other kernel: the self-test draws its own."""
    if layer.k.conditioning is None:
        return layer
    return LayerFormat(replace(layer.k, conditioning=_ANY_CONSTANTS), layer.v)
