"""Page formats and the exact bytes of a page.

A page format says, per layer and side (K or V), how values become bits. `bits` is never one number for everything:
keys and values differ, and later formats differ by layer. From a format and the geometry of a cache group follows the
`PageLayout`: every tensor of a page, its place and its bytes. The layout is the frame's memory order, the swap file's
payload order and the delta log's slice order, so a page moves between the three without being rearranged.

Source of the byte formula: "Agent Memory Below the Prompt", section 3: K or V of one token, one head takes
`dim * bits / 8` bytes of codes and `4 * dim / group` bytes of bf16 scale and bias; for 4 bits and group 64 that is
(1 + 8/g)/4 = 0.281 of FP16.

May import kvd.ids and kvd.errors only; no mlx, no numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvd.errors import InvalidParams
from kvd.ids import FormatId

PAGE_TOKENS: Final = 256
"""Tokens of one page (the seed's block)."""

NAMED_FORMATS: Final = ("q4", "q4c", "k8v4", "q8", "q2")
UNCALIBRATED_FORMAT: Final = "k8v4"
"""What `auto` takes for a model nobody calibrated: safe on every model measured so far."""
"""The formats `--kv-format` accepts beside `auto`, in no order of quality."""


@dataclass(frozen=True, slots=True)
class SideFormat:
    """How K or V of one layer becomes bits: MLX affine quantisation along the head dimension, or along tokens.

    Attributes:
        bits: 2, 4 or 8 bits a code.
        group: values along the axis that share one bf16 scale and one bf16 bias.
        axis: the axis groups run along. `tokens` (one channel of 64 tokens) has a codec, `kvd.quant.token_groups`, but
            no pages yet: `PageLayout` refuses it.
        conditioning: digest of the key conditioning constants, or None for raw values.
    """

    bits: int
    group: int = 64
    axis: Literal["head_dim", "tokens"] = "head_dim"
    conditioning: str | None = None

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise InvalidParams(f"bits must be one of 2, 4, 8, not {self.bits}", bits=self.bits)
        if self.group not in (32, 64, 128):
            raise InvalidParams(f"group must be one of 32, 64, 128, not {self.group}", group=self.group)
        if self.axis not in ("head_dim", "tokens"):
            raise InvalidParams(f"axis must be head_dim or tokens, not {self.axis}", axis=self.axis)
        if self.axis == "tokens" and (self.group != 64 or self.conditioning is not None):
            raise InvalidParams("groups along tokens are of 64 raw values", group=self.group, axis=self.axis)

    def words(self, dim: int) -> int:
        """uint32 words that hold the codes of one token and head of width `dim`."""
        return dim * self.bits // 32

    def groups(self, dim: int) -> int:
        """Scale/bias pairs of one token and head of width `dim`."""
        return dim // self.group

    def token_bytes(self, heads: int, dim: int) -> int:
        """Bytes that one token takes in this side of one layer."""
        return heads * (4 * self.words(dim) + 4 * self.groups(dim))


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """Formats of one layer's keys and values."""

    k: SideFormat
    v: SideFormat


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The format of one cache group's pages: one `LayerFormat` a layer, in layer order.

    Attributes:
        name: one of `NAMED_FORMATS`.
        layers: formats in the order of the group's layers.
    """

    name: str
    layers: tuple[LayerFormat, ...]

    @property
    def format_id(self) -> FormatId:
        """Canonical id: the name, and for anything beyond it a digest of all layers' fields."""
        text = ";".join(
            ",".join(f"{s.bits}/{s.group}/{s.axis}/{s.conditioning or '-'}" for s in (layer.k, layer.v))
            for layer in self.layers
        )
        return FormatId(f"{self.name}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}")


def group_for(*dims: int) -> int:
    """Largest supported group (64, else 32) that divides every width in `dims`.

    Raises:
        InvalidParams: no supported group divides a width.
    """
    for group in (64, 32):
        if all(dim % group == 0 for dim in dims):
            return group
    raise InvalidParams(f"head widths must be multiples of 32, not {dims}", dims=list(dims))


def named_format(name: str, *, k_dim: int, v_dim: int, layer_count: int, conditioning: str | None = None) -> PageFormat:
    """Build a named format for a cache group of `layer_count` equal layers.

    Args:
        name: one of `NAMED_FORMATS`.
        k_dim: width of a key head, in values.
        v_dim: width of a value head, in values.
        layer_count: layers of the group.
        conditioning: digest of the conditioning constants; required by `q4c`, refused by the others.

    Raises:
        InvalidParams: unknown name, or `conditioning` does not go with the name.
    """
    bits: Mapping[str, tuple[int, int]] = {"q4": (4, 4), "q4c": (4, 4), "k8v4": (8, 4), "q8": (8, 8), "q2": (2, 2)}
    if name not in bits:
        raise InvalidParams(f"kv format must be one of auto, {', '.join(NAMED_FORMATS)}, not {name!r}", format=name)
    if (name == "q4c") != (conditioning is not None):
        raise InvalidParams(f"format {name} and conditioning {conditioning!r} do not go together", format=name)
    k_bits, v_bits = bits[name]
    layer = LayerFormat(
        k=SideFormat(k_bits, group_for(k_dim), conditioning=conditioning), v=SideFormat(v_bits, group_for(v_dim))
    )
    return PageFormat(name, (layer,) * layer_count)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a page.

    Attributes:
        name: `layers.<index in model>.<k|v>.<codes|scales|biases>`.
        dtype: safetensors name, `U32` for codes, `BF16` for scales and biases.
        shape: (kv_heads, PAGE_TOKENS, words or groups).
        offset_bytes: place in the frame and in the payload.
        tensor_bytes: length.
    """

    name: str
    dtype: Literal["U32", "BF16"]
    shape: tuple[int, int, int]
    offset_bytes: int
    tensor_bytes: int


class PageLayout:
    """Every tensor of a page of one cache group in one format. Immutable.

    Args:
        layer_indices: indices of the group's layers in the model, ascending.
        kv_heads: KV heads of each layer.
        k_dim: width of a key head.
        v_dim: width of a value head.
        page_format: one entry per layer of the group.

    Raises:
        InvalidParams: the number of layers differs, or a side's groups run along tokens.

    Attributes:
        tensors: in payload order: for each layer k.codes, k.scales, k.biases, v.codes, v.scales, v.biases.
        payload_bytes: bytes of a whole page, exactly.
        token_bytes: bytes of one token over all tensors; `payload_bytes == PAGE_TOKENS * token_bytes`.
    """

    def __init__(
        self, *, layer_indices: tuple[int, ...], kv_heads: int, k_dim: int, v_dim: int, page_format: PageFormat
    ) -> None:
        if len(layer_indices) != len(page_format.layers):
            raise InvalidParams(f"format has {len(page_format.layers)} layers, the group {len(layer_indices)}")
        if any(side.axis != "head_dim" for layer in page_format.layers for side in (layer.k, layer.v)):
            raise InvalidParams("pages with groups along tokens are not supported yet", axis="tokens")
        self.layer_indices = layer_indices
        self.kv_heads = kv_heads
        self.k_dim = k_dim
        self.v_dim = v_dim
        self.page_format = page_format
        self.format_id = page_format.format_id
        tensors: list[TensorSpec] = []
        offset = 0
        for layer, layer_format in zip(layer_indices, page_format.layers, strict=True):
            for side_name, side, dim in (("k", layer_format.k, k_dim), ("v", layer_format.v, v_dim)):
                parts: tuple[tuple[str, Literal["U32", "BF16"], int, int], ...] = (
                    ("codes", "U32", side.words(dim), 4),
                    ("scales", "BF16", side.groups(dim), 2),
                    ("biases", "BF16", side.groups(dim), 2),
                )
                for part, dtype, width, item_bytes in parts:
                    n_bytes = kv_heads * PAGE_TOKENS * width * item_bytes
                    name = f"layers.{layer}.{side_name}.{part}"
                    tensors.append(TensorSpec(name, dtype, (kv_heads, PAGE_TOKENS, width), offset, n_bytes))
                    offset += n_bytes
        self.tensors = tuple(tensors)
        self._layers = {layer: self.tensors[6 * at : 6 * at + 6] for at, layer in enumerate(layer_indices)}
        self.payload_bytes = offset
        self.token_bytes = offset // PAGE_TOKENS

    def layer_tensors(self, layer_index: int) -> tuple[TensorSpec, ...]:
        """The six tensors of a layer (index in the model), in payload order."""
        return self._layers[layer_index]
