"""Caches that pretend: quantise-on-write without pages, for calibration inside a plain mlx-lm forward.

`SimulatedCache` has mlx-lm's cache duck type. It passes every key and value through the real codec and back before
anybody attends to it, so attention sees exactly the values pages would hold. It keeps float32 copies: good for two
thousand tokens, not for serving. May import mlx, numpy and this package.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx
import numpy as np

from kvd.quant.codec import F32Array, decode, encode
from kvd.quant.conditioning import LayerConditioning
from kvd.quant.spec import LayerFormat, SideFormat


class PlainCache:
    """Unquantised cache of one layer and one sequence (mlx-lm's duck type)."""

    def __init__(self) -> None:
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def offset(self) -> int:
        """Tokens cached."""
        return 0 if self._keys is None else int(self._keys.shape[2])

    @property
    def state(self) -> list[mx.array]:
        """Arrays to evaluate between chunks."""
        return [a for a in (self._keys, self._values) if a is not None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [1, kv_heads, n, dim] and return everything."""
        keys, values = self.stored(keys, values)
        if self._keys is not None and self._values is not None:
            keys = mx.concatenate([self._keys, keys], axis=2)
            values = mx.concatenate([self._values, values], axis=2)
        self._keys, self._values = keys, values
        return keys, values

    def stored(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What the cache keeps of new keys and values: here, themselves."""
        return keys, values

    def make_mask(
        self,
        N: int,  # noqa: N803  mlx-lm's name
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | Literal["causal"] | None:
        """Causal mask for N new tokens, with an optional window; an array only where a word does not say it."""
        if window_size is not None and self.offset + N <= window_size:
            window_size = None
        if not return_array and window_size is None:
            return None if N == 1 else "causal"
        ages = mx.arange(self.offset, self.offset + N)[:, None] - mx.arange(self.offset + N)[None]
        mask = ages >= 0
        return mask if window_size is None else mask & (ages < window_size)


class RangeCache(PlainCache):
    """Plain cache that records the range of each key channel, without the first `skip` tokens of a sequence.

    The first tokens of a text are attention sinks with keys far from all others; they would stretch the range.

    Attributes:
        low: float32 [kv_heads, k_dim], least value; None before the first key.
        high: the same, greatest.
    """

    def __init__(self, skip: int) -> None:
        super().__init__()
        self._skip = skip
        self.low: F32Array | None = None
        self.high: F32Array | None = None

    def stored(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Note the keys' range and keep them as they are."""
        seen = np.array(keys.astype(mx.float32))[0, :, max(0, self._skip - self.offset) :]
        if seen.shape[1]:
            low, high = seen.min(axis=1), seen.max(axis=1)
            self.low = low if self.low is None else np.minimum(self.low, low)
            self.high = high if self.high is None else np.maximum(self.high, high)
        return keys, values


class SimulatedCache(PlainCache):
    """Cache whose content went through the codec.

    Args:
        layer_format: formats of K and V.
        conditioning: operators for conditioned keys, None for raw ones.

    Attributes:
        encoded_bytes: bytes of all codes, scales and biases made so far.
    """

    def __init__(self, layer_format: LayerFormat, conditioning: LayerConditioning | None) -> None:
        super().__init__()
        self._format = layer_format
        self._conditioning = conditioning
        self.encoded_bytes = 0

    def stored(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Encode and decode; conditioned keys come back in the model's own terms."""
        if self._conditioning is None:
            kept = self._through(keys, self._format.k)
        else:
            kept = self._conditioning.restore_keys(
                self._through(self._conditioning.condition_keys(keys), self._format.k)
            )
        return kept.astype(keys.dtype), self._through(values, self._format.v).astype(values.dtype)

    def _through(self, x: mx.array, side: SideFormat) -> mx.array:
        """float32 values after the codec: mx [1, heads, n, dim]."""
        encoded = encode(np.array(x.astype(mx.float32))[0], side)
        self.encoded_bytes += sum(part.nbytes for part in encoded)
        return mx.array(decode(*encoded, side)[None])
