"""The codec of keys whose groups run along tokens: one scale and one bias for 64 tokens of one channel.

Theory of operation. Keys have outlier *channels*; a group along the head dimension mixes them with all others, a group
along tokens does not (KIVI, "A Tuning-Free Asymmetric 2bit Quantization for KV Cache", section 3). Three rules make
the bytes depend on the keys of the page alone, not on how they were cut into chunks:

- **Open group.** The group that is still filling is kept in 8 bits a value, each token by itself (a `q8` key row).
- **Closing.** A group's 64th token closes it: codes, scales and biases come from what the 8-bit rows *read back*, also
  when one chunk brings all 64. Whoever restores the rows from a log therefore closes to the same bytes.
- **First token.** Token 0 of a page is kept in bf16 and left out of its group's range: the first token of a text is an
  attention sink whose key lies far from all others and would stretch the range of 63 neighbours.

Shortening into a closed group reopens it: its first tokens become 8-bit rows of their 4-bit values. That is
deterministic, but not what the rows were before they closed. May import numpy, spec, codec and errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvd.errors import InvalidParams
from kvd.quant.codec import (
    Encoded,
    F32Array,
    U16Array,
    U32Array,
    affine,
    decode,
    encode,
    from_bf16_bits,
    pack,
    to_bf16_bits,
    unpack,
)
from kvd.quant.errors import NonFiniteValues
from kvd.quant.spec import PAGE_TOKENS, SideFormat, group_for

GROUP_TOKENS: Final = 64
"""Tokens of a group."""

PAGE_GROUPS: Final = PAGE_TOKENS // GROUP_TOKENS
"""Groups of a page."""


def open_side(dim: int) -> SideFormat:
    """How rows of the open group are kept: 8 bits along the head dimension.

    Raises:
        InvalidParams: `dim` is no multiple of 32.
    """
    return SideFormat(8, group_for(dim))


@dataclass(frozen=True, slots=True)
class KeyPage:
    """Keys of one layer in one page; arrays or views of them. Written by this module's functions only.

    Attributes:
        codes: uint32 [kv_heads, 256, words], packed along the head dimension; those of closed groups mean something.
        scales: uint16 [kv_heads, 4, dim], bf16 bits: one per group and channel.
        biases: as `scales`.
        first: uint16 [kv_heads, 1, dim], bf16 bits: the key of token 0.
        open_rows: tokens of the open group by their place in it: codes uint32 [kv_heads, 64, dim / 4], scales and
            biases uint16 [kv_heads, 64, dim / open group].
    """

    codes: U32Array
    scales: U16Array
    biases: U16Array
    first: U16Array
    open_rows: Encoded

    @property
    def dim(self) -> int:
        """Width of a key."""
        return int(self.scales.shape[-1])

    def held_bytes(self, tokens: int) -> int:
        """Bytes that mean something while the page holds `tokens` tokens: closed groups, first token, open rows."""
        group, rest = divmod(tokens, GROUP_TOKENS)
        closed = sum(a.nbytes for a in (self.codes, self.scales, self.biases)) * group // PAGE_GROUPS
        return (
            closed + sum(a.nbytes for a in self.open_rows) * rest // GROUP_TOKENS + (self.first.nbytes if tokens else 0)
        )

    @classmethod
    def empty(cls, heads: int, dim: int, side: SideFormat) -> KeyPage:
        """A page of zeros.

        Args:
            heads: KV heads.
            dim: width of a key.
            side: bits, with groups along tokens.

        Raises:
            InvalidParams: groups of `side` run along the head dimension, or `dim` is no multiple of 32.
        """
        _check_axis(side)
        row = open_side(dim)
        return cls(
            np.zeros((heads, PAGE_TOKENS, side.words(dim)), np.uint32),
            np.zeros((heads, PAGE_GROUPS, dim), np.uint16),
            np.zeros((heads, PAGE_GROUPS, dim), np.uint16),
            np.zeros((heads, 1, dim), np.uint16),
            Encoded(
                np.zeros((heads, GROUP_TOKENS, row.words(dim)), np.uint32),
                np.zeros((heads, GROUP_TOKENS, row.groups(dim)), np.uint16),
                np.zeros((heads, GROUP_TOKENS, row.groups(dim)), np.uint16),
            ),
        )


def write_keys(page: KeyPage, keys: F32Array, first_token: int, side: SideFormat) -> None:
    """Append keys to a page that holds `first_token` tokens.

    Args:
        page: where to.
        keys: float32 [kv_heads, n, dim]; any strides.
        first_token: place in the page of the first key.
        side: bits, with groups along tokens.

    Raises:
        InvalidParams: the keys do not fit the page; nothing was written.
        NonFiniteValues: NaN, infinity, or beyond bf16; groups that had closed before are intact.
    """
    _check_axis(side)
    heads, tokens, dim = keys.shape
    if (heads, dim) != (page.first.shape[0], page.dim) or not 0 <= first_token <= first_token + tokens <= PAGE_TOKENS:
        raise InvalidParams(
            f"keys {keys.shape} at {first_token} do not fit a page of {page.first.shape[0]} x {page.dim}"
        )
    if not tokens:
        return
    if first_token == 0:
        exact = to_bf16_bits(np.ascontiguousarray(keys[:, :1]))
        if ((exact & 0x7F80) == 0x7F80).any():
            raise NonFiniteValues("the first key of a page is not finite; the model's activations overflowed")
        page.first[...] = exact
        keys = np.concatenate([from_bf16_bits(exact), keys[:, 1:]], axis=1)
    rows = encode(keys, open_side(dim))
    done = 0
    while done < tokens:
        group, place = divmod(first_token + done, GROUP_TOKENS)
        count = min(GROUP_TOKENS - place, tokens - done)
        _store_rows(page, place, _part(rows, done, done + count))
        done += count
        if place + count == GROUP_TOKENS:
            _close(page, group, side)


def read_keys(page: KeyPage, tokens: int, side: SideFormat) -> F32Array:
    """Keys of a page that holds `tokens` tokens: float32 [kv_heads, tokens, dim].

    Raises:
        InvalidParams: `tokens` is not in [0, 256].
    """
    _check_axis(side)
    _check_tokens(tokens)
    group, rest = divmod(tokens, GROUP_TOKENS)
    parts = [_closed(page, 0, group, side), decode(*_part(page.open_rows, 0, rest), open_side(page.dim))]
    keys = np.concatenate(parts, axis=1)
    if tokens:
        keys[:, :1] = from_bf16_bits(page.first)
    return keys


def shorten(page: KeyPage, held_tokens: int, tokens: int, side: SideFormat) -> None:
    """Make a page of `held_tokens` tokens one of its first `tokens`; a closed group that this cuts is reopened.

    Raises:
        InvalidParams: not 0 <= tokens <= held_tokens <= 256; nothing changed.
    """
    _check_axis(side)
    _check_tokens(held_tokens)
    if not 0 <= tokens <= held_tokens:
        raise InvalidParams(f"a page of {held_tokens} tokens cannot be shortened to {tokens}")
    group, rest = divmod(tokens, GROUP_TOKENS)
    if group == held_tokens // GROUP_TOKENS or not rest:
        return
    keys = _closed(page, group, group + 1, side)
    if group == 0:
        keys[:, :1] = from_bf16_bits(page.first)
    _store_rows(page, 0, encode(keys[:, :rest], open_side(page.dim)))


def _part(rows: Encoded, start: int, end: int) -> Encoded:
    """Rows [start, end), as views."""
    return Encoded(rows.codes[:, start:end], rows.scales[:, start:end], rows.biases[:, start:end])


def _store_rows(page: KeyPage, place: int, rows: Encoded) -> None:
    """Put rows into the open area, the first at `place` in the group."""
    target = slice(place, place + rows.codes.shape[1])
    page.open_rows.codes[:, target] = rows.codes
    page.open_rows.scales[:, target] = rows.scales
    page.open_rows.biases[:, target] = rows.biases


def _close(page: KeyPage, group: int, side: SideFormat) -> None:
    """Codes, scales and biases of a group whose 64 rows are all there."""
    rows = decode(*page.open_rows, open_side(page.dim))
    channels = np.ascontiguousarray(rows.swapaxes(1, 2))
    codes, scales, biases = affine(channels, side.bits, apart=1 if group == 0 else 0)
    start = group * GROUP_TOKENS
    page.codes[:, start : start + GROUP_TOKENS] = pack(np.ascontiguousarray(codes.swapaxes(1, 2)), side.bits)
    page.scales[:, group] = scales
    page.biases[:, group] = biases


def _closed(page: KeyPage, start: int, end: int, side: SideFormat) -> F32Array:
    """Groups [start, end), all closed: float32 [kv_heads, tokens, dim]; token 0 of the page means nothing."""
    keys = unpack(page.codes[:, start * GROUP_TOKENS : end * GROUP_TOKENS], side.bits)
    grouped = keys.reshape(keys.shape[0], end - start, GROUP_TOKENS, page.dim)
    grouped *= from_bf16_bits(page.scales[:, start:end])[:, :, None]
    grouped += from_bf16_bits(page.biases[:, start:end])[:, :, None]
    return keys


def _check_axis(side: SideFormat) -> None:
    if side.axis != "tokens":
        raise InvalidParams("groups must run along tokens here", axis=side.axis)


def _check_tokens(tokens: int) -> None:
    if not 0 <= tokens <= PAGE_TOKENS:
        raise InvalidParams(f"a page holds 0 to {PAGE_TOKENS} tokens, not {tokens}")


__all__ = ["GROUP_TOKENS", "PAGE_GROUPS", "KeyPage", "open_side", "read_keys", "shorten", "write_keys"]
