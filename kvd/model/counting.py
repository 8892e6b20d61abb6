"""How many tokens a long text has, in memory that does not grow with it.

Theory of operation. Encoding takes a hundred times its text in memory while it runs. So a long span is encoded in
windows that overlap. Where two windows agree for `RUN` tokens, from the same place on, the second takes over: what a
byte-pair encoder makes of a place depends on the word around it and nothing farther away, so from there on both say
what an encoding of the whole would. A beginning or an end in the middle of a word is far from that place. Windows that
never agree are joined and encoded as one.

Inside a word that is longer than the overlap (thousands of characters without a space; all of a text, for a tokenizer
that splits none into words) two windows may agree as well. There it is what merges do that keeps the count right, not
what they could do: each looks at two neighbours, so what an end brings about reaches a few tokens into the word, and a
beginning is that of a token of the window before. No vocabulary is proved not to carry it over `RUN` tokens; the tests
have such words, periodic and random ones, and demand exact counts.

May import kvd.model.tokenizer and kvd.vm.text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from kvd.model.tokenizer import TextCodec
from kvd.vm.text import TypedText

WINDOW_CHARACTERS: Final = 1 << 18
OVERLAP_CHARACTERS: Final = 1 << 12
RUN: Final = 32
"""Tokens: by then an encoder that began in the middle of a word has long been in step."""


def count_tokens(
    codec: TextCodec,
    typed: TypedText,
    *,
    at_start: bool = False,
    pause: Callable[[], None] = lambda: None,
    window: int = WINDOW_CHARACTERS,
    overlap: int = OVERLAP_CHARACTERS,
) -> int:
    """The number of ids that `TextCodec.encode_typed` would give; see above of words longer than `overlap`.

    Args:
        codec: the model's.
        typed: spans of valid UTF-8.
        at_start: as there.
        pause: called between windows; what it raises ends the count.
        window: characters of one.
        overlap: characters that two have in common.
    """
    count = start = 0
    first: list[int] = []
    for span in typed.spans:
        text = typed.data[start : start + span.text_bytes].decode()
        start += span.text_bytes
        tokens, beginning = _count_span(codec, text, span.kind != "control", pause, window, overlap)
        count += tokens
        first += beginning[: len(codec.bos_ids) - len(first)]
    if at_start and tuple(first) != codec.bos_ids:
        count += len(codec.bos_ids)
    return count


def _count_span(
    codec: TextCodec, text: str, is_content: bool, pause: Callable[[], None], window: int, overlap: int
) -> tuple[int, list[int]]:
    """Tokens of one span, and its first ids."""
    base, end, used, count = 0, window, 0, 0
    ids, starts = codec.encode_with_starts(text[:end], content=is_content)
    first = ids[: len(codec.bos_ids)]
    while end < len(text):
        pause()
        edge = bisect_left(starts, end - base - overlap)
        there = base + starts[edge] if edge < len(starts) else base
        if there > base:
            other_ids, other_starts = codec.encode_with_starts(text[there : there + window], content=is_content)
            met = _meeting(ids, [base + each for each in starts], other_ids, [there + each for each in other_starts])
            if met is not None and there + window > end:
                count += met[0] - used
                base, end, used, ids, starts = there, there + window, met[1], other_ids, other_starts
                continue
        end = base + 2 * (end - base)
        ids, starts = codec.encode_with_starts(text[base:end], content=is_content)
    return count + len(ids) - used, first


def _meeting(
    ids: Sequence[int], places: Sequence[int], other_ids: Sequence[int], other_places: Sequence[int]
) -> tuple[int, int] | None:
    """The first token of both from which on `RUN` tokens are the same, in the same places; None where there is none."""
    for other in range(len(other_ids) - RUN + 1):
        own = bisect_left(places, other_places[other])
        if own + RUN > len(ids):
            return None
        if (
            places[own] == other_places[other]
            and list(ids[own : own + RUN]) == list(other_ids[other : other + RUN])
            and list(places[own : own + RUN]) == list(other_places[other : other + RUN])
        ):
            return own, other
    return None


__all__ = ["OVERLAP_CHARACTERS", "RUN", "WINDOW_CHARACTERS", "count_tokens"]
