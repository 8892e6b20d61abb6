"""SentencePiece's BPE written from its definition, slow and plain: the oracle for the merges kvd builds from scores.

It shares nothing with the code under test: no merges, no added tokens. A queue of neighbouring pairs, the highest
score first and the leftmost on ties; a pair is a candidate if the joint text is a piece. User-defined pieces are cut
out first, the longest at each place, and never join.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

NORMAL, USER_DEFINED, BYTE = 1, 4, 6


class ReferenceSentencePiece:
    """A BPE vocabulary with scores.

    Args:
        tokens: pieces by id; spaces in user-defined ones stand for `▁`.
        scores: of the pieces.
        types: `tokenizer.ggml.token_type` of the pieces.
        hidden: ids of user-defined pieces that content may not yield; they are ordinary text.
    """

    def __init__(
        self, tokens: list[str], scores: list[float], types: list[int], hidden: frozenset[int] = frozenset()
    ) -> None:
        self.scores = scores
        self.pieces: dict[str, int] = {}
        self.frozen: set[str] = set()
        self.bytes: dict[int, int] = {}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
            if kind == BYTE:
                self.bytes[int(token[3:5], 16)] = i
            elif kind == USER_DEFINED and i not in hidden:
                self.pieces[token.replace(" ", "▁")] = i
                self.frozen.add(token.replace(" ", "▁"))
            elif kind == NORMAL:
                self.pieces[token] = i
        self.longest = max((len(piece) for piece in self.frozen), default=0)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without a space in front."""
        symbols = list(self._cut(text.replace(" ", "▁")))
        ids: list[int] = []
        for symbol in self._join(symbols):
            if symbol in self.pieces:
                ids.append(self.pieces[symbol])
            else:
                ids += [self.bytes[byte] for byte in symbol.encode()]
        return ids

    def _cut(self, text: str) -> Iterator[str]:
        at = 0
        while at < len(text):
            sizes = range(min(self.longest, len(text) - at), 0, -1)
            size = next((n for n in sizes if text[at : at + n] in self.frozen), 1)
            yield text[at : at + size]
            at += size

    def _join(self, symbols: list[str]) -> list[str]:
        fixed = [symbol in self.frozen for symbol in symbols]
        after = [*range(1, len(symbols)), -1] if symbols else []
        before = list(range(-1, len(symbols) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left < 0 or right < 0 or fixed[left] or fixed[right]:
                return
            joint = symbols[left] + symbols[right]
            if joint in self.pieces:
                heapq.heappush(queue, (-self.scores[self.pieces[joint]], left, right, joint))

        for left in range(len(symbols) - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, joint = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != joint:
                continue  # one of the two has joined another in the meantime
            symbols[left], symbols[right] = joint, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [symbol for symbol in symbols if symbol]
