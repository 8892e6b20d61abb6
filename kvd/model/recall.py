"""What a model wrote, compared in meaning with the messages that clients send back.

Theory of operation. A client sends an answer back as a message: content, reasoning, calls. Templates write such a
message otherwise than the model did: they drop reasoning, print arguments anew, trim. So the generated texts that an
agent holds are read by the same reader that made the messages. A text and a message are equal in meaning when they
have the same content but for white space around it, the same calls with equal arguments (ids do not count, JSON is
compared as values), and the same reasoning, unless the message has none: most clients drop it. Which text stands for
which message is `kvd.scheduler.history`'s to say: being equal is necessary, not sufficient.

Meaning is read off the agent's stored text, so nothing else need be kept, and it holds after a restart. Pure. May
import kvd.vm.text and this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.model.answers import Answer, AnswerFormat, AnswerReader, same_arguments, split_marker
from kvd.model.tokenizer import TextCodec
from kvd.vm.text import TypedText


@dataclass(frozen=True, slots=True)
class HeldText:
    """The text of one branch of an agent.

    Attributes:
        typed: text and spans.
        tokens, token_bytes: its ids and the bytes each stands for; empty where no marker is a control token.
    """

    typed: TypedText
    tokens: tuple[int, ...] = ()
    token_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Generated:
    """A text that a model wrote.

    Attributes:
        text: as the agent holds it.
        opening: control text directly before it.
        pieces: the text again, with the names of control tokens in between: (text, is a control token's name).
        border: offset in bytes of the control text before it, in the branch; `start` where there is none.
        start: offset in bytes of the text.
    """

    text: str
    opening: str
    pieces: tuple[tuple[str, bool], ...]
    border: int
    start: int


def needs_tokens(answers: AnswerFormat, codec: TextCodec) -> bool:
    """Whether texts alone do not tell where the parts of an answer begin, since markers are control tokens."""
    markers = [*(answers.reasoning or ()), *((answers.tools.start, answers.tools.end) if answers.tools else ())]
    return any(token is not None for marker in markers for _, token in split_marker(marker, codec))


class Meanings:
    """Reads generated texts, each at most once in each way. Owner: who renders one conversation.

    Args:
        answers: the model's markers.
        codec: its vocabulary.
        tools: as given; some dialects have untyped values and need the schemas.
    """

    def __init__(
        self, answers: AnswerFormat, codec: TextCodec, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._answers, self._codec, self._tools = answers, codec, tools
        self._read: dict[tuple[str, tuple[tuple[str, bool], ...], bool], Answer] = {}

    def is_equal(self, generated: Generated, message: Mapping[str, Any]) -> bool:
        """Whether a message says the same: as it is, by its parts without calls, or with calls."""
        if _is_equal(Answer(content=generated.text), message):
            return True
        calls = message.get("tool_calls") or ()  # they cost most to read, and a message without has none
        reads_calls = bool(calls)
        if not all(_name(call) in generated.text for call in calls):
            return False
        return _is_equal(self._parts(generated, reads_calls=reads_calls), message)

    def _parts(self, generated: Generated, *, reads_calls: bool) -> Answer:
        key = (generated.opening, generated.pieces, reads_calls)
        if key not in self._read:
            reader = AnswerReader(
                self._answers, self._codec, opening=generated.opening, reads_calls=reads_calls, tools=self._tools
            )
            for piece, is_control in generated.pieces:
                if is_control:
                    reader.feed_control(piece)
                else:
                    reader.feed(piece)
            reader.end()
            self._read[key] = reader.answer
        return self._read[key]


def generated_texts(held: HeldText, codec: TextCodec) -> Iterator[Generated]:
    """The texts of a branch that a model wrote, or that a history had for them; those of no bytes left out."""
    opening, border, start, token = "", 0, 0, 0
    offset = 0  # of the token
    for span in held.typed.spans:
        end = start + span.text_bytes
        pieces: list[tuple[str, bool]] = []
        first = start
        is_answer = span.kind == "generated"  # tokens of no bytes on its borders are the model's: it wrote no markup
        while token < len(held.tokens) and (offset < end or (is_answer and not held.token_bytes[token])):
            if is_answer and start <= offset and codec.is_control(held.tokens[token]):
                pieces += [(_decoded(held.typed.data[first:offset]), False)]
                pieces += [(codec.token_bytes(held.tokens[token]).decode(errors="replace"), True)]
                first = offset
            offset += held.token_bytes[token]
            token += 1
        if is_answer and end > start:
            rest = (_decoded(held.typed.data[first:end]), False)
            yield Generated(_decoded(held.typed.data[start:end]), opening, (*pieces, rest), border, start)
        is_control = span.kind == "control"
        opening = _decoded(held.typed.data[start:end]) if is_control else ""
        border, start = start if is_control else end, end


def _decoded(data: bytes) -> str:
    return data.decode(errors="replace")


def _is_equal(answer: Answer, message: Mapping[str, Any]) -> bool:
    if answer.content.strip() != _content(message):
        return False
    reasoning = message.get("reasoning_content")
    if reasoning and str(reasoning).strip() != answer.reasoning.strip():
        return False
    calls = message.get("tool_calls") or ()
    if len(calls) != len(answer.calls):
        return False
    return all(
        _name(theirs) == ours["function"]["name"]
        and same_arguments(str(theirs["function"].get("arguments")), ours["function"]["arguments"])
        for theirs, ours in zip(calls, answer.calls, strict=True)
    )


def _name(call: Mapping[str, Any]) -> str:
    """The function that a call of a checked message is of."""
    return str(call["function"]["name"])


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content.strip() if isinstance(content, str) else ""
