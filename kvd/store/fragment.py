"""Tokens of one page outside any frame, and the copies between frames and such fragments.

Theory of operation. A *fragment* of n tokens is every tensor of the layout, in layout order, each `[kv_heads, n,
width]`; so it is `n * token_bytes` long and holds nothing but its tokens. A frame is the same with n = 256:
`move_tokens` copies a run of tokens from one to the other, whatever n either has. Layers of one format lie at equal
distances, so it copies a side's part of all of them at once: half a dozen copies of numpy, not six for every layer.

A fragment that is kept lies in an anonymous mapping of its own, in host memory with every pool, for the reason that
frames do: the allocator's heap would keep megabytes that are given up (`kvd.store.frame_pool`).

Owner: the engine thread; other threads get `bytes` (`Fragment.part`). May import numpy, kvd.errors, kvd.quant.spec.
"""

from __future__ import annotations

import functools
import mmap
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidParams
from kvd.quant.spec import PAGE_TOKENS, PageLayout

Octets = npt.NDArray[np.uint8]


class _Stripe(NamedTuple):
    """One tensor of each of some layers in a row that are formatted alike. Bytes are those of one token.

    Attributes:
        layers: how many layers.
        heads: KV heads.
        row_bytes: of one head.
        offset_bytes: where it begins in the first layer.
        layer_bytes: distance from layer to layer.
    """

    layers: int
    heads: int
    row_bytes: int
    offset_bytes: int
    layer_bytes: int

    def view(self, octets: Octets, capacity_tokens: int, start: int, tokens: int) -> Octets:
        """uint8 [layers, heads, tokens, row_bytes] of a frame or fragment with room for `capacity_tokens`."""
        row, capacity = self.row_bytes, capacity_tokens
        return np.ndarray(
            (self.layers, self.heads, tokens, row),
            np.uint8,
            octets.data,
            capacity * self.offset_bytes + start * row,
            (capacity * self.layer_bytes, capacity * row, row, 1),
        )


def anonymous_memory(n_bytes: int, *, is_filled: bool = False) -> mmap.mmap:
    """A mapping of zeros that goes back to the system with the last view of it.

    Private, since the system makes a page of shared memory two to three times as slowly when it is first touched.

    Args:
        n_bytes: how much.
        is_filled: all of it is written at once: where the system can, its pages are made in one go.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if is_filled:
        flags |= getattr(mmap, "MAP_POPULATE", 0)
    return mmap.mmap(-1, n_bytes, flags=flags)


def move_tokens(
    layout: PageLayout,
    source: Octets,
    source_run: tuple[int, int],
    target: Octets,
    target_run: tuple[int, int],
    tokens: int,
) -> None:
    """Copy tokens from one frame or fragment to another.

    Args:
        layout: of both.
        source: uint8 [capacity * token_bytes].
        source_run: tokens it has room for, and the first to copy.
        target: as `source`, writable, of its own capacity.
        target_run: as `source_run`, where the tokens go.
        tokens: how many; the callers have seen that both runs lie inside.
    """
    if not tokens:
        return
    for stripe in _stripes(layout):
        stripe.view(target, *target_run, tokens)[...] = stripe.view(source, *source_run, tokens)


@functools.lru_cache(maxsize=64)
def _stripes(layout: PageLayout) -> tuple[_Stripe, ...]:
    """All tensors of a layout; those of equal layers in a row together."""
    stripes: list[_Stripe] = []
    layers = [layout.layer_tensors(layer) for layer in layout.layer_indices]
    for _, alike in groupby(layers, key=lambda tensors: tuple((t.dtype, t.shape) for t in tensors)):
        run = list(alike)
        layer_bytes = sum(tensor.tensor_bytes for tensor in run[0]) // PAGE_TOKENS
        for tensor in run[0]:
            heads = tensor.shape[0]
            row_bytes = tensor.tensor_bytes // (heads * PAGE_TOKENS)
            stripes.append(_Stripe(len(run), heads, row_bytes, tensor.offset_bytes // PAGE_TOKENS, layer_bytes))
    return tuple(stripes)


class Fragment:
    """The first tokens of a page, unchanging.

    Args:
        layout: of the page.
        tokens: how many there are, at least one.
        source: what they are copied from: a frame or fragment whose first tokens they are.
        capacity_tokens: tokens that `source` has room for; None: just these.

    Raises:
        InvalidParams: `source` has another length, or not so many tokens.

    Attributes:
        layout, tokens: as given.
        octets: the bytes, uint8 [tokens * token_bytes], a copy, not to be written.
    """

    __slots__ = ("layout", "octets", "tokens")

    def __init__(
        self, layout: PageLayout, tokens: int, source: bytes | Octets, *, capacity_tokens: int | None = None
    ) -> None:
        n_bytes = tokens * layout.token_bytes
        capacity = tokens if capacity_tokens is None else capacity_tokens
        whole = np.frombuffer(source, np.uint8)
        if not 1 <= tokens <= capacity or whole.size != capacity * layout.token_bytes:
            raise InvalidParams(f"{tokens} of {capacity} tokens, not less than one, are not in {whole.size} bytes")
        self.layout = layout
        self.tokens = tokens
        # the array keeps the mapping alive
        self.octets: Octets = np.frombuffer(anonymous_memory(n_bytes, is_filled=True), np.uint8)
        move_tokens(layout, whole, (capacity, 0), self.octets, (tokens, 0), tokens)

    @property
    def data(self) -> memoryview:
        """The bytes, not a copy, for `FramePool.insert`."""
        return self.octets.data

    def part(self, start: int, end: int) -> bytes:
        """Tokens [start, end) as `FramePool.extract` would give them.

        Raises:
            InvalidParams: not 0 <= start <= end <= tokens.
        """
        if not 0 <= start <= end <= self.tokens:
            raise InvalidParams(f"token range must lie in [0, {self.tokens}], not [{start}, {end})")
        return extract(self.layout, self.octets, self.tokens, start, end)

    def head(self, tokens: int) -> Fragment:
        """The first `tokens` of them, at least one; errors as `part`. All of them are this fragment itself."""
        if tokens == self.tokens:
            return self
        if not 1 <= tokens < self.tokens:
            raise InvalidParams(f"the first tokens of a fragment are 1 to {self.tokens}, not {tokens}")
        return Fragment(self.layout, tokens, self.octets, capacity_tokens=self.tokens)


def extract(layout: PageLayout, octets: Octets, capacity_tokens: int, start: int, end: int) -> bytes:
    """Tokens [start, end) of a frame or fragment with room for `capacity_tokens`, as bytes of their own."""
    if (start, end) == (0, capacity_tokens):
        return octets.tobytes()
    found = np.empty((end - start) * layout.token_bytes, np.uint8)
    move_tokens(layout, octets, (capacity_tokens, start), found, (end - start, 0), end - start)
    return found.tobytes()
