"""Byte-level BPE written from its definition, slow and plain: the oracle for the tokenizer kvd builds.

It shares nothing with the code under test: own byte table, own pre-tokeniser (a hand-written scanner for GPT-2's
pattern after single digits were split off), own merge loop.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import pairwise

_WHITE = {*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
_SUFFIXES = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def is_space(letter: str) -> bool:
    """Unicode White_Space."""
    return ord(letter) in _WHITE


def is_number(letter: str) -> bool:
    """Unicode N."""
    return unicodedata.category(letter)[0] == "N"


def _class(letter: str) -> str:
    if is_space(letter):
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(letter)[0], "other")


def split_digits(text: str) -> Iterator[str]:
    """Every number character alone, and the runs between them."""
    run = ""
    for letter in text:
        if is_number(letter):
            if run:
                yield run
            yield letter
            run = ""
        else:
            run += letter
    if run:
        yield run


def split_gpt2(text: str) -> Iterator[str]:
    """GPT-2's pattern: contractions, runs of one class with at most one space before, whitespace.

    Of a whitespace run that something follows, the last character is left over: it is the space of what follows, or a
    piece of its own.
    """
    at = 0
    while at < len(text):
        suffix = next((s for s in _SUFFIXES if text.startswith(s, at)), None)
        if suffix:
            yield suffix
            at += len(suffix)
            continue
        start = at + 1 if text[at] == " " and at + 1 < len(text) and not is_space(text[at + 1]) else at
        kind = _class(text[start])
        end = start
        while end < len(text) and _class(text[end]) == kind:
            end += 1
        if kind == "space" and end < len(text) and end - start > 1:
            end -= 1
        yield text[at:end]
        at = end


class ReferenceBpe:
    """Byte-level BPE with SmolLM's pre-tokeniser.

    Args:
        tokens: token strings by id.
        merges: `"left right"`, best first.
    """

    def __init__(self, tokens: list[str], merges: list[str]) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.letters: list[str] = []
        spare = 0
        for byte in range(256):
            if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
                self.letters.append(chr(byte))
            else:
                self.letters.append(chr(256 + spare))
                spare += 1

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; bytes without a token are dropped before merging."""
        ids: list[int] = []
        for part in split_digits(text):
            for piece in split_gpt2(part):
                ids += [self.ids[symbol] for symbol in self._merge(piece)]
        return ids

    def decode(self, ids: list[int]) -> bytes:
        """Bytes of ids that are no control tokens."""
        names = {i: token for token, i in self.ids.items()}
        return bytes(self.letters.index(letter) for i in ids for letter in names[i])

    def _merge(self, piece: str) -> list[str]:
        symbols = [self.letters[byte] for byte in piece.encode()]
        symbols = [symbol for symbol in symbols if symbol in self.ids]
        while True:
            ranks = [self.ranks.get(pair, len(self.ranks)) for pair in pairwise(symbols)]
            if not ranks or min(ranks) == len(self.ranks):
                return symbols
            at = ranks.index(min(ranks))
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
