"""The tokens of a GGUF vocabulary: their types, and the added tokens that follow from them. Imports nothing of kvd."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, as SentencePiece numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED})


def added_tokens(tokens: Sequence[str], types: Sequence[int], *, normalized: bool) -> list[dict[str, Any]]:
    """The `added_tokens` of a `tokenizer.json`: matched before anything else, and never split.

    Args:
        tokens: by id.
        types: `TokenType` of each. Unknown, control and unused tokens are special: they surface as nothing.
        normalized: user-defined tokens are matched in the normalised text.
    """
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": normalized and kind == TokenType.USER_DEFINED,
            "special": kind != TokenType.USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in _ADDED
    ]
