"""Typed text: the spans an agent's text is made of. Pure; may import nothing from kvd.

Content that a client typed and text the model generated match each other; control text (template markup, control
tokens) matches only control text, so a user who types `<|im_start|>` can never forge a message border.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SpanKind = Literal["control", "content", "generated"]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of text of one kind.

    Attributes:
        kind: `control` (template and control tokens), `content` (given by a client), `generated` (by the model).
        text_bytes: length in UTF-8 bytes.
    """

    kind: SpanKind
    text_bytes: int


@dataclass(frozen=True, slots=True)
class TypedText:
    """UTF-8 bytes and the spans that tile them (`sum(span.text_bytes) == len(data)`)."""

    data: bytes
    spans: tuple[Span, ...]
