"""Answers of a conversation's history as the agent holds them: what a model wrote, not what a template makes of it.

Theory of operation. A client sends an answer back as a message: content, reasoning, calls. Templates write such a
message otherwise than the model did: they drop reasoning, print arguments anew, trim. So before a conversation is
rendered, each assistant message is compared *in meaning* with the generated texts that the agent holds, in order, and
where they are equal the agent's own text stands in its place. Equal in meaning: the same content but for white space
around it, the same calls with equal arguments (ids do not count, JSON is compared as values), and the same reasoning,
unless the message has none: most clients drop it. A message that is not found is rendered by the template.

Meaning is read off the agent's stored text by the same reader that made the message, so nothing else need be kept, and
it holds after a restart. Pure. May import kvd.vm.text and this package.
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
    """

    text: str
    opening: str
    pieces: tuple[tuple[str, bool], ...]


def needs_tokens(answers: AnswerFormat, codec: TextCodec) -> bool:
    """Whether texts alone do not tell where the parts of an answer begin, since markers are control tokens."""
    markers = [*(answers.reasoning or ()), *((answers.tools.start, answers.tools.end) if answers.tools else ())]
    return any(token is not None for marker in markers for _, token in split_marker(marker, codec))


def recall(
    messages: Sequence[Mapping[str, Any]], held: Sequence[HeldText], answers: AnswerFormat, codec: TextCodec
) -> dict[int, Generated]:
    """Which assistant messages the agent holds as it wrote them.

    Args:
        messages: a conversation.
        held: the agent's branches, the present one first.
        answers: the model's markers.
        codec: its vocabulary.

    Returns:
        By index of the message; of the branch that has most of them.
    """
    wanted = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    best: dict[int, Generated] = {}
    for branch in held if wanted else ():
        found: dict[int, Generated] = {}
        texts = [(text, _meanings(text, answers, codec)) for text in _generated(branch, codec)]
        at = 0
        for index in wanted:
            for number in range(at, len(texts)):
                text, meanings = texts[number]
                if any(_is_equal(meaning, messages[index]) for meaning in meanings):
                    found[index], at = text, number + 1
                    break
        if len(found) > len(best):
            best = found
    return best


def _generated(held: HeldText, codec: TextCodec) -> Iterator[Generated]:
    """The generated spans of a branch."""
    opening, start, token = "", 0, 0
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
        if is_answer:
            rest = (_decoded(held.typed.data[first:end]), False)
            yield Generated(_decoded(held.typed.data[start:end]), opening, (*pieces, rest))
        opening = _decoded(held.typed.data[start:end]) if span.kind == "control" else ""
        start = end


def _decoded(data: bytes) -> str:
    return data.decode(errors="replace")


def _meanings(generated: Generated, answers: AnswerFormat, codec: TextCodec) -> list[Answer]:
    """What a generated text may have been sent as: its parts, with calls or without, or as it is."""
    parts = [_read(generated, answers, codec, reads_calls=reads_calls) for reads_calls in (True, False)]
    return [Answer(content=generated.text), *parts]


def _read(generated: Generated, answers: AnswerFormat, codec: TextCodec, *, reads_calls: bool) -> Answer:
    reader = AnswerReader(answers, codec, opening=generated.opening, reads_calls=reads_calls)
    for piece, is_control in generated.pieces:
        if is_control:
            reader.feed_control(piece)
        else:
            reader.feed(piece)
    reader.end()
    return reader.answer


def _is_equal(answer: Answer, message: Mapping[str, Any]) -> bool:
    if answer.content.strip() != _content(message):
        return False
    reasoning = message.get("reasoning_content")
    if reasoning and str(reasoning).strip() != answer.reasoning.strip():
        return False
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or len(calls) != len(answer.calls):
        return False
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in calls]
    return all(
        isinstance(theirs, Mapping)
        and theirs.get("name") == ours["function"]["name"]
        and same_arguments(str(theirs.get("arguments")), ours["function"]["arguments"])
        for theirs, ours in zip(functions, answer.calls, strict=True)
    )


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content.strip() if isinstance(content, str) else ""
