"""New keys and values into the frames of a page: by the compiled codec where it runs, else by numpy; the same bytes.

May import numpy, kvd.attention.interface, kvd.errors, kvd.ids, kvd.quant, kvd.native (its error) and
kvd.store.frame_pool.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

from kvd.attention.interface import HostPages
from kvd.errors import InternalError
from kvd.ids import FrameId
from kvd.native import KernelUnavailable
from kvd.quant.codec import Encoded, F32Array, encode
from kvd.quant.spec import PAGE_TOKENS, LayerFormat, PageLayout
from kvd.store.frame_pool import SideArrays


class PageWriter(Protocol):
    """Writes tokens of one layer into frames."""

    def write(
        self, pool: HostPages, frame: FrameId, layer_index: int, keys: F32Array, values: F32Array, first_token: int
    ) -> None:
        """Quantise tokens into a frame.

        Args:
            pool: the frame's pool.
            frame: an existing frame that has the layer.
            layer_index: index of the layer in the model.
            keys: float32 [kv_heads, n, k_dim], conditioned already; the last axis contiguous.
            values: float32 [kv_heads, n, v_dim]; the last axis contiguous.
            first_token: place in the page of the first token; all n fit the page.

        Raises:
            NonFiniteValues: NaN or infinity; what the frame holds of these tokens means nothing.
            InternalError: they do not fit the page; nothing was written.
        """


class NumpyWriter:
    """The codec itself.

    Args:
        layer_format: formats of K and V.
    """

    def __init__(self, layer_format: LayerFormat) -> None:
        self._format = layer_format

    def write(
        self, pool: HostPages, frame: FrameId, layer_index: int, keys: F32Array, values: F32Array, first_token: int
    ) -> None:
        """See `PageWriter.write`."""
        arrays = pool.layer(frame, layer_index)
        target = slice(first_token, first_token + keys.shape[1])
        encoded_keys, encoded_values = encode(keys, self._format.k), encode(values, self._format.v)
        _store(arrays.k, target, encoded_keys)
        _store(arrays.v, target, encoded_values)


class NativeWriter:
    """The compiled codec.

    Args:
        layer_format: formats of K and V.
        k_dim: width of a key.
        v_dim: width of a value.

    Raises:
        KernelUnavailable: it cannot run here.
    """

    def __init__(self, layer_format: LayerFormat, k_dim: int, v_dim: int) -> None:
        try:
            from kvd.quant.native_codec import SideEncoder
        except ImportError as error:
            raise KernelUnavailable(f"llvmlite is not installed ({error})") from None
        self._k = SideEncoder(layer_format.k, k_dim, PAGE_TOKENS)
        self._v = SideEncoder(layer_format.v, v_dim, PAGE_TOKENS)

    def write(
        self, pool: HostPages, frame: FrameId, layer_index: int, keys: F32Array, values: F32Array, first_token: int
    ) -> None:
        """See `PageWriter.write`."""
        layout, base = pool.layout(frame), pool.address(frame)
        shape = (layout.kv_heads, layout.k_dim, layout.v_dim)
        if (keys.shape[0], keys.shape[2], values.shape[2]) != shape or first_token + keys.shape[1] > PAGE_TOKENS:
            # the kernel writes where it is told: a mistake here would change somebody else's memory
            raise InternalError(f"tokens {keys.shape} and {values.shape} at {first_token} do not fit a page of {shape}")
        places = [tensor.offset_bytes for tensor in layout.layer_tensors(layer_index)]
        self._k.write(keys, (base + places[0], base + places[1], base + places[2]), first_token)
        self._v.write(values, (base + places[3], base + places[4], base + places[5]), first_token)

    def write_tokens(
        self,
        layout: PageLayout,
        layer_index: int,
        keys: F32Array,
        values: F32Array,
        places: Sequence[tuple[int, int, int]],
    ) -> None:
        """Quantise one token of each of several pages of one layout: a decode step of a batch.

        Args:
            layout: of every page.
            layer_index: index of the layer in the model.
            keys: float32 [rows, kv_heads, k_dim], conditioned already; the last axis contiguous.
            values: float32 [rows, kv_heads, v_dim]; the last axis contiguous.
            places: per token its row, the address of its page's frame, and its place in the page.

        Raises:
            NonFiniteValues, InternalError: as `PageWriter.write`, for any of them.
        """
        shape = (layout.kv_heads, layout.k_dim, layout.v_dim)
        if (keys.shape[1], keys.shape[2], values.shape[2]) != shape or len(keys) != len(values):
            raise InternalError(f"tokens {keys.shape} and {values.shape} do not fit a page of {shape}")
        if any(not (0 <= row < len(keys) and 0 <= token < PAGE_TOKENS) for row, _, token in places):
            raise InternalError(f"{len(keys)} rows have no such places in their pages: {places}")
        offsets = [tensor.offset_bytes for tensor in layout.layer_tensors(layer_index)]
        self._k.write_tokens(keys, (offsets[0], offsets[1], offsets[2]), places)
        self._v.write_tokens(values, (offsets[3], offsets[4], offsets[5]), places)


@functools.cache
def page_writer(layer_format: LayerFormat, k_dim: int, v_dim: int) -> PageWriter:
    """The fastest writer that runs here."""
    try:
        return NativeWriter(layer_format, k_dim, v_dim)
    except KernelUnavailable:
        return NumpyWriter(layer_format)


def _store(arrays: SideArrays, target: slice, encoded: Encoded) -> None:
    """Write encoded tokens to tokens `target` of a frame."""
    arrays.codes[:, target] = encoded.codes
    arrays.scales[:, target] = encoded.scales
    arrays.biases[:, target] = encoded.biases


__all__ = ["NativeWriter", "NumpyWriter", "PageWriter", "page_writer"]
