"""What a chat template made of a conversation: pieces, the typed text they add up to, and where recalled answers stand.

Pure. May import kvd.vm.text and this package.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvd.model.answers import AnswerFormat
from kvd.model.recall import Generated
from kvd.model.tokenizer import utf8
from kvd.vm.text import Span, SpanKind, TypedText

Piece = tuple[SpanKind | Literal["recalled"], str]
"""A run of a rendering: its kind and text. `recalled` is generated text that stands for an answer in the history."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer stands in a text; offsets in bytes.

    Attributes:
        border: where the control text before it begins; `start` where there is none.
        start: its first byte.
    """

    border: int
    start: int


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as text.

    Attributes:
        typed: adjacent spans differ in kind.
        places: of the recalled answers that are in it, by index of the message.
    """

    typed: TypedText
    places: Mapping[int, Place]


def behind_openings(pieces: Sequence[Piece], recalled: Mapping[int, Generated], answers: AnswerFormat) -> list[Piece]:
    """The pieces with recalled answers behind the markup that they were written behind.

    It is put to what it was where it differs in markers of reasoning alone.
    """
    put, waiting = list(pieces), deque(recalled.values())
    for number, (kind, _) in enumerate(pieces):
        if kind == "recalled" and waiting:
            opening = waiting.popleft().opening
            before, written = pieces[number - 1] if number else ("control", "")
            if number and before == "control" and answers.differ_in_reasoning_only(written, opening):
                put[number - 1] = ("control", opening)
    return put


def assembled(pieces: Sequence[Piece], recalled: Mapping[int, Generated]) -> Rendering:
    """Pieces as typed text: empty ones dropped, neighbours of one kind joined.

    Args:
        pieces: of a rendering.
        recalled: the answers among them, by index of the message, in order.

    Raises:
        InvalidText: lone surrogates.
    """
    data = bytearray()
    spans: list[Span] = []
    places: dict[int, Place] = {}
    waiting = deque(recalled.items())
    for kind, text in pieces:
        raw = utf8(text)
        if not raw:
            continue
        if kind == "recalled" and waiting:
            index, answer = waiting.popleft()
            if text == answer.text:  # else the template has edited it
                before = spans[-1].text_bytes if spans and spans[-1].kind == "control" else 0
                places[index] = Place(len(data) - before, len(data))
        span_kind: SpanKind = "generated" if kind == "recalled" else kind
        if spans and spans[-1].kind == span_kind:
            spans[-1] = Span(span_kind, spans[-1].text_bytes + len(raw))
        else:
            spans.append(Span(span_kind, len(raw)))
        data += raw
    return Rendering(TypedText(bytes(data), tuple(spans)), places)
