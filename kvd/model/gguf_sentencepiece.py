"""A `tokenizer.json` from a SentencePiece BPE vocabulary: tokens with scores, no merges.

Theory of operation. SentencePiece joins, again and again, the two neighbours whose joint piece has the highest score
(the leftmost on ties). A BPE table does the same if it holds every split of every piece into two pieces, ordered by
the score of the joint piece: the rank says which pair is joined first. Splits of one piece are ordered by where they
split, the first part shortest first, because that pair is the one further left where two of them overlap.

User-defined pieces are matched before any joining, the longest first; they are added tokens, matched in the normalised
text (`▁` for space), as SentencePiece does, so they are written with `▁` here. Control pieces, the unknown piece and
byte pieces are never the result of a join. Bytes of a character without a piece become byte pieces. Source:
`bpe_model.cc` of SentencePiece. May import `gguf_pieces` and kvd.model.errors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvd.model.errors import ModelCorrupt
from kvd.model.gguf_pieces import TokenType, added_tokens

SPACE_MARK: Final = "▁"
MAX_PIECE: Final = 512
"""Letters of a piece that can be joined. Trainers stop at 16; splitting one takes the square of its length."""


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[list[str]]:
    """Every split of a piece into two pieces, best joint score first.

    Args:
        tokens: pieces by id, `▁` for space.
        scores: the higher, the earlier a piece is made.
        types: `TokenType` of each.

    Returns:
        [left, right] in the order in which they are joined.

    Raises:
        ModelCorrupt: a piece is longer than any vocabulary's.
    """
    joinable = (TokenType.NORMAL, TokenType.USER_DEFINED)
    known = {token for token, kind in zip(tokens, types, strict=True) if kind in joinable}
    order = sorted(
        (token_id for token_id, token in enumerate(tokens) if len(token) > 1 and types[token_id] in joinable),
        key=lambda token_id: (-scores[token_id], token_id),
    )
    longest = max((len(tokens[token_id]) for token_id in order), default=0)
    if longest > MAX_PIECE:
        raise ModelCorrupt(f"the tokenizer has a token of {longest} letters; there may be {MAX_PIECE}")
    merges: list[list[str]] = []
    for token_id in order:
        token = tokens[token_id]
        for at in range(1, len(token)):
            left = token[:at]
            if left in known and token[at:] in known:
                merges.append([left, token[at:]])
    return merges


def marked_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[str]:
    """The pieces as SentencePiece has them: converters write user-defined ones with spaces for `▁`."""
    return [
        token.replace(" ", SPACE_MARK) if kind == TokenType.USER_DEFINED else token
        for token, kind in zip(tokens, types, strict=True)
    ]


def sentencepiece_spec(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, unknown: str | None, space_prefix: bool
) -> dict[str, Any]:
    """The `tokenizer.json` object.

    Args:
        tokens: pieces by id, `▁` for space (see `marked_tokens`).
        scores: of the pieces.
        types: of the pieces.
        unknown: the piece for characters that have no piece, where bytes have none either.
        space_prefix: a space is put in front of a text that begins without one.
    """
    byte_fallback = TokenType.BYTE in types
    metaspace = {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": "first", "split": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if space_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokens, types, normalized=True),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
        "pre_tokenizer": metaspace if space_prefix else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": merges_from_scores(tokens, scores, types),
        },
    }
