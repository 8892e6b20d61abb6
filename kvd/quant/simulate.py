"""Caches that pretend: quantise-on-write without pages, for calibration inside a plain mlx-lm forward.

`SimulatedCache` has mlx-lm's cache duck type. It passes every key and value through the real codec and back before
anybody attends to it, so attention sees exactly the values pages would hold. It keeps float32 copies: good for two
thousand tokens, not for serving. May import mlx, numpy and this package.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.errors import InternalError
from kvd.quant.codec import F32Array, decode, encode
from kvd.quant.conditioning import LayerConditioning
from kvd.quant.spec import PAGE_TOKENS, LayerFormat, SideFormat
from kvd.quant.token_groups import KeyPage, read_keys, write_keys


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

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: mx.array | Literal["causal"] | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention over what is cached; called by `kvd.model.dispatch` when it is installed.

        On CPU in numpy, whose exponential is 25 times as fast as mlx's there: most of a calibration's time otherwise.

        Args:
            queries: mx [1, heads, n, k_dim].
            scale: factor of the scores.
            mask: what `make_mask` answered.
            sinks: mx [heads] or None.

        Returns:
            mx [1, heads, n, v_dim].
        """
        if self._keys is None or self._values is None:
            raise InternalError("attention over an empty cache")
        if sinks is not None or mx.default_device().type != mx.DeviceType.cpu:
            return mx.fast.scaled_dot_product_attention(
                queries, self._keys, self._values, scale=scale, mask=mask, sinks=sinks
            )
        length, tokens = queries.shape[2], self.offset
        hidden = None
        if isinstance(mask, mx.array):
            hidden = ~np.array(mask)
        elif mask == "causal":
            hidden = np.arange(tokens)[None] > np.arange(tokens - length, tokens)[:, None]
        q, k, v = (np.array(a.astype(mx.float32))[0] for a in (queries, self._keys, self._values))
        return mx.array(_attention(q * np.float32(scale), k, v, hidden)[None]).astype(queries.dtype)

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


class GroupedKeysCache(SimulatedCache):
    """As `SimulatedCache`, for keys whose groups run along tokens: a group that closes changes keys seen before.

    Args:
        layer_format: formats of K (groups along tokens, no conditioning) and V.
    """

    def __init__(self, layer_format: LayerFormat) -> None:
        super().__init__(layer_format, None)
        self._pages: list[KeyPage] = []
        self._value_bytes = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [1, kv_heads, n, dim] and return everything as it reads now."""
        side, start, end = self._format.k, self.offset, self.offset + keys.shape[2]
        new = np.array(keys.astype(mx.float32))[0]
        for page in range(start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            if page == len(self._pages):
                self._pages.append(KeyPage.empty(new.shape[0], new.shape[2], side))
            low = max(start, page * PAGE_TOKENS)
            part = new[:, low - start : min(end, (page + 1) * PAGE_TOKENS) - start]
            write_keys(self._pages[page], part, low - page * PAGE_TOKENS, side)
        held = [min(end - page * PAGE_TOKENS, PAGE_TOKENS) for page in range(len(self._pages))]
        read = [read_keys(page, tokens, side) for page, tokens in zip(self._pages, held, strict=True)]
        self._keys = mx.array(np.concatenate(read, axis=1)[None]).astype(keys.dtype)
        self.encoded_bytes = self._value_bytes  # `_through` adds the new values to it
        kept = self._through(values, self._format.v).astype(values.dtype)
        self._value_bytes = self.encoded_bytes
        self._values = kept if self._values is None else mx.concatenate([self._values, kept], axis=2)
        key_bytes = sum(page.held_bytes(tokens) for page, tokens in zip(self._pages, held, strict=True))
        self.encoded_bytes = self._value_bytes + key_bytes
        return self._keys, self._values


def _attention(q: F32Array, k: F32Array, v: F32Array, hidden: npt.NDArray[np.bool_] | None) -> F32Array:
    """Softmax attention, one KV head at a time.

    Args:
        q: float32 [heads, n, k_dim], scaled.
        k: float32 [kv_heads, tokens, k_dim].
        v: float32 [kv_heads, tokens, v_dim].
        hidden: bool [n, tokens], True where a key is not visible; None when all are.
    """
    heads, length, dim = q.shape
    kv_heads, tokens, v_dim = v.shape
    grouped = q.reshape(kv_heads, -1, dim)
    out = np.empty((kv_heads, grouped.shape[1], v_dim), np.float32)
    for head in range(kv_heads):
        scores = grouped[head] @ k[head].T
        if hidden is not None:
            np.copyto(scores.reshape(-1, length, tokens), -np.inf, where=hidden)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out[head] = (scores @ v[head]) / scores.sum(axis=-1, keepdims=True)
    return out.reshape(heads, length, v_dim)
