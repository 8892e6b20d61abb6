"""Typed text: the spans an agent's text is made of. Pure; may import nothing from kvd.

Content that a client typed and text the model generated match each other; control text (template markup, control
tokens) matches only control text, so a user who types `<|im_start|>` can never forge a message border.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def cut_spans(spans: Iterable[Span], text_bytes: int) -> list[Span]:
    """The spans that tile the first `text_bytes` bytes."""
    kept: list[Span] = []
    for span in spans:
        if text_bytes <= 0:
            break
        kept.append(Span(span.kind, min(span.text_bytes, text_bytes)))
        text_bytes -= span.text_bytes
    return kept


def rest_of(typed: TypedText, start: int) -> TypedText:
    """`typed` without its first `start` bytes."""
    spans: list[Span] = []
    offset = 0
    for span in typed.spans:
        end = offset + span.text_bytes
        if end > start:
            spans.append(Span(span.kind, end - max(offset, start)))
        offset = end
    return TypedText(typed.data[start:], tuple(spans))


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join neighbours of one kind and leave out empty ones."""
    merged: list[Span] = []
    for span in spans:
        if not span.text_bytes:
            continue
        if merged and merged[-1].kind == span.kind:
            merged[-1] = Span(span.kind, merged[-1].text_bytes + span.text_bytes)
        else:
            merged.append(span)
    return tuple(merged)


def joined(left: TypedText, right: TypedText) -> TypedText:
    """One text after the other."""
    return TypedText(left.data + right.data, merge_spans([*left.spans, *right.spans]))
