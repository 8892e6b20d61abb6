"""Page keys: a digest of everything a page's content depends on.

The key of a page is blake2b-128 over sharing domain, model fingerprint, cache group, numerics version, *all* token ids
from position 0 to the page's last one, and the format each position had when it was computed. Two pages with one key
hold the same tokens after the same past; equal ids after another first token, another checkpoint of the same shape, or
the same ids in another format never share a key. A key is a look-up index; pages have their own unique ids.

A `KeyChain` keeps the running digest at every page border, so a context of n tokens costs O(n) in total and cutting it
back costs nothing. May import kvd.ids, kvd.quant.spec and kvd.errors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from kvd.errors import InternalError
from kvd.ids import Fingerprint, FormatId, GroupId, Namespace, PageKey
from kvd.quant.spec import PAGE_TOKENS

KEY_BYTES: Final = 16
"""Length of a key before hexadecimal."""

FORMAT_MARK: Final = 0xFFFF_FFFF
"""Stands in the token stream before a change of format; no token has this id."""


class KeyChain:
    """Keys of one cache group of one address space, fed in order. Owned by whoever computes the space's tokens.

    Args:
        domain: sharing domain; pages of other domains never match.
        fingerprint: digest of weights, tokenizer, template and quantisation.
        group: cache group.
        numerics: version of the arithmetic and of the codec.
        page_tokens: tokens of one page.
    """

    def __init__(
        self,
        domain: Namespace,
        fingerprint: Fingerprint,
        group: GroupId,
        numerics: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self._page_tokens = page_tokens
        self._hash = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvd page key")
        for field in (str(domain), str(fingerprint), str(int(group)), numerics):
            data = field.encode()
            self._hash.update(struct.pack("<I", len(data)) + data)
        self._format: FormatId | None = None
        self._tokens = 0
        # borders[i]: digest and format after i whole pages.
        self._borders: list[tuple[hashlib.blake2b, FormatId | None]] = [(self._hash.copy(), None)]
        self._keys: list[PageKey] = []

    @property
    def tokens(self) -> int:
        """Tokens fed so far."""
        return self._tokens

    @property
    def keys(self) -> tuple[PageKey, ...]:
        """Keys of all whole pages fed so far, in order."""
        return tuple(self._keys)

    def extend(self, token_ids: Sequence[int], format_id: FormatId) -> tuple[PageKey, ...]:
        """Feed tokens that were computed in one format.

        How a run of tokens is divided over calls does not matter.

        Args:
            token_ids: ids in order, each in 0 .. 2**32 - 2.
            format_id: the format their KV was computed in.

        Returns:
            Keys of the pages that these tokens completed, in order.

        Raises:
            InternalError: an id is out of range; nothing has changed.
        """
        if not token_ids:
            return ()
        if min(token_ids) < 0 or max(token_ids) >= FORMAT_MARK:
            raise InternalError(f"token ids must be in 0 .. {FORMAT_MARK - 1}")
        if format_id != self._format:
            data = format_id.encode()
            self._hash.update(struct.pack("<II", FORMAT_MARK, len(data)) + data)
            self._format = format_id
        first_new = len(self._keys)
        # The digest is read at every page border inside the run.
        end = self._tokens + len(token_ids)
        inside = range((first_new + 1) * self._page_tokens, end, self._page_tokens)
        for start, stop in pairwise((self._tokens, *inside, end)):
            run = token_ids[start - self._tokens : stop - self._tokens]
            self._hash.update(struct.pack(f"<{len(run)}I", *run))
            if stop % self._page_tokens == 0:
                self._borders.append((self._hash.copy(), self._format))
                self._keys.append(PageKey(self._hash.hexdigest()))
        self._tokens = end
        return tuple(self._keys[first_new:])

    def cut(self, tokens: int) -> int:
        """Forget tokens after position `tokens`.

        Returns:
            The page border at or before `tokens` that the chain is at now: tokens from there on must be fed again.

        Raises:
            InternalError: the chain has fewer tokens; nothing has changed.
        """
        if not 0 <= tokens <= self._tokens:
            raise InternalError(f"a chain of {self._tokens} tokens cannot be cut at {tokens}")
        if tokens == self._tokens:
            return tokens
        pages = tokens // self._page_tokens
        saved, self._format = self._borders[pages]
        self._hash = saved.copy()
        del self._borders[pages + 1 :]
        del self._keys[pages:]
        self._tokens = pages * self._page_tokens
        return self._tokens

    def copy(self) -> KeyChain:
        """An independent chain at the same position, for a fork."""
        twin = object.__new__(KeyChain)
        twin._page_tokens = self._page_tokens
        twin._hash = self._hash.copy()
        twin._format = self._format
        twin._tokens = self._tokens
        twin._borders = self._borders.copy()  # Saved digests are never fed, only copied.
        twin._keys = self._keys.copy()
        return twin
