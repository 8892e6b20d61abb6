"""What a generated text is made of: reasoning, text, tool calls. An incremental reader, for streaming and for recall.

Theory of operation. Models mark the parts of an answer by literals such as `<think>` and `<tool_call>`. Some of these
are ordinary text, others control tokens, which surface as nothing. The reader gets both: text as it surfaced and, in
between, the names of control tokens. Inside, a control token is written between two lone surrogates, which no text of
a model can hold; so a marker made of control tokens is never confused with the same letters in text, and searching is
plain string search. Control tokens that belong to no marker are dropped from text, as everywhere, and kept inside of
tool calls, where parsers need them.

What may be the beginning of a marker is held back until it is not. White space around reasoning and calls belongs to
neither: it is left out, so that the parts of an answer read like messages. Where an answer has neither, it is given
out unchanged.

Pure. May import this package.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvd.model.call_ends import CallEnds
from kvd.model.tool_calls import ParsedCall, ToolDialect

_OPEN, _CLOSE = "\ud800", "\ud801"
_CONTROL: Final = re.compile(f"{_OPEN}[^{_CLOSE}]*{_CLOSE}")
_ID_LETTERS: Final = string.ascii_letters + string.digits
CALL_ID_CHARACTERS: Final = 9
"""Length of a call's id: the templates of Mistral's models take no other."""

REASONING_MARKERS: Final = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Pairs that models write their reasoning between; the same ones that mlx-lm knows."""

Event = dict[str, object]


class TokenNames(Protocol):
    """The part of the text codec needed here."""

    def id_of(self, token: str, /) -> int | None:
        """Id of a token by its string."""

    def is_control(self, token_id: int, /) -> bool:
        """Whether the token surfaces as nothing."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The markers of one model.

    Attributes:
        reasoning: start and end of its reasoning; None where it has none.
        tools: how it writes calls; None where the model takes no tools at all.
    """

    reasoning: tuple[str, str] | None = None
    tools: ToolDialect | None = None

    def is_thinking(self, opening: str) -> bool:
        """Whether an answer that begins behind the control text `opening` begins inside of reasoning."""
        if self.reasoning is None:
            return False
        start, end = self.reasoning
        return opening.rfind(start) > opening.rfind(end)

    def differ_in_reasoning_only(self, left: str, right: str) -> bool:
        """Whether of two control texts one goes on from the other with nothing but markers of reasoning."""
        shorter, longer = sorted((left, right), key=len)
        if not longer.startswith(shorter) or self.reasoning is None:
            return left == right
        rest = longer[len(shorter) :]
        for marker in self.reasoning:
            rest = rest.replace(marker, "")
        return not rest.strip()


def find_reasoning(source: str, codec: TokenNames) -> tuple[str, str] | None:
    """The reasoning markers of a model: both are tokens of its vocabulary, or its template writes both.

    Args:
        source: its chat template.
        codec: its vocabulary.
    """
    for start, end in REASONING_MARKERS:
        first = re.match(r"<[^<>]*>", start)
        is_known = first is not None and all(codec.id_of(token) is not None for token in (first[0], end))
        if is_known or (start in source and end in source):
            return start, end
    return None


def split_marker(marker: str, codec: TokenNames) -> list[tuple[str, int | None]]:
    """A marker as parts: (text, None) and (name, id) of control tokens, in order."""
    parts: list[tuple[str, int | None]] = []
    for piece in re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", marker):
        token = codec.id_of(piece) if piece else None
        if token is not None and codec.is_control(token):
            parts.append((piece, token))
        elif piece and parts and parts[-1][1] is None:
            parts[-1] = (parts[-1][0] + piece, None)
        elif piece:
            parts.append((piece, None))
    return parts


def control_name(name: str) -> str:
    """A control token as the reader writes it."""
    return f"{_OPEN}{name}{_CLOSE}"


@dataclass(slots=True)
class Answer:
    """What has been read so far. Owner: its `AnswerReader`.

    Attributes:
        content, reasoning: text of each.
        calls: tool calls as a message has them, with ids.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """As an assistant message; `content` is None beside calls and nothing else."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.calls}
        return message


class AnswerReader:
    """Reads one answer as it is generated. Owner: whoever feeds it; `feed`, `feed_control` and `end` change it.

    Args:
        answers: the model's markers.
        codec: says which markers are control tokens.
        opening: control text that the answer begins behind.
        reads_calls: whether tools were given; else what looks like a call is text.
        tools: as given.

    Attributes:
        answer: what has been read.
    """

    def __init__(
        self,
        answers: AnswerFormat,
        codec: TokenNames,
        *,
        opening: str = "",
        reads_calls: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.answer = Answer()
        self._tools = tools
        self._dialect = answers.tools if reads_calls else None
        start, end = (_marked(marker, codec) for marker in (answers.reasoning or ("", "")))
        self._think_start, self._think_end = start, end
        self._call_start = _marked(self._dialect.start, codec) if self._dialect else ""
        self._call_end = _marked(self._dialect.end, codec) if self._dialect else ""
        name = self._dialect.name if self._dialect else ""
        self._ends = CallEnds(name, self._call_end, is_text=_OPEN not in self._call_end)
        self._buffer = ""
        self._state = "reasoning" if answers.is_thinking(opening) else "text"
        self._reasoned = self._state == "reasoning"
        self._is_begun = False
        self._space = ""

    def feed(self, text: str) -> list[Event]:
        """Text as it surfaced; events that are certain now."""
        self._buffer += text
        return list(self._read())

    def feed_control(self, name: str) -> list[Event]:
        """A control token, by its name."""
        return self.feed(control_name(name))

    def end(self) -> list[Event]:
        """The answer is complete."""
        events: list[Event] = []
        while self._state == "call" and (at := self._ends.first()) >= 0:  # a broken one
            events += [*self._call_up_to(at), *self._read()]
        return [*events, *self._rest()]

    def _rest(self) -> Iterable[Event]:
        rest, self._buffer = self._buffer, ""
        if self._state == "call":
            if self._call_end:  # cut short
                return self._text(self._call_start + rest, is_last=True)
            return [*self._calls(rest, self._call_start + rest), *self._text("", is_last=True)]
        if self._state == "reasoning":
            return self._reasoning(rest)
        return self._text(rest, is_last=True)

    def _read(self) -> Iterable[Event]:
        while True:
            if self._state == "call":
                at = self._ends.find(self._buffer)
                if at < 0:
                    return
                yield from self._call_up_to(at)
                continue
            if self._state == "reasoning":
                markers = {self._think_end: "text"}
            else:
                markers = {self._call_start: "call"}
                if not (self._is_begun or self._reasoned):
                    markers[self._think_start] = "reasoning"
            found = [(at, marker) for marker in markers if marker and (at := self._buffer.find(marker)) >= 0]
            at, marker = min(found, default=(len(self._buffer) - _held(self._buffer, markers), ""))
            piece, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
            yield from self._reasoning(piece) if self._state == "reasoning" else self._text(piece)
            if not marker:
                return
            if markers[marker] == "reasoning" and self._is_begun:  # letters came right before it
                yield from self._text(marker)
                continue
            self._state = markers[marker]
            self._reasoned |= self._state == "reasoning"
            if self._state != "call":  # what looks like one may turn out to be text
                self._space = ""

    def _call_up_to(self, at: int) -> Iterable[Event]:
        body, self._buffer = self._buffer[:at], self._buffer[at + len(self._call_end) :]
        self._state = "text"
        self._ends.restart()
        yield from self._calls(body, self._call_start + body + self._call_end)

    def _reasoning(self, piece: str) -> Iterable[Event]:
        piece = _CONTROL.sub("", piece)
        text = self._without_space(piece, is_begun=bool(self.answer.reasoning))
        if text:
            self.answer.reasoning += text
            yield {"type": "reasoning", "text": text}

    def _text(self, piece: str, *, is_last: bool = False) -> Iterable[Event]:
        piece = _CONTROL.sub("", piece)
        if self._dialect is None and not self._reasoned and (self._is_begun or not self._think_start):
            text, self._space = self._space + piece, ""
        else:
            text = self._without_space(piece, is_begun=self._is_begun or not (self._reasoned or self.answer.calls))
            if is_last and not self.answer.calls and (self._is_begun or text or not self._reasoned):
                text, self._space = text + self._space, ""
        self._is_begun |= bool(text.strip())
        if text:
            self.answer.content += text
            yield {"type": "text", "text": text}

    def _without_space(self, piece: str, *, is_begun: bool) -> str:
        """The piece without white space at its end, which is held, and where nothing was begun, at its start."""
        piece = self._space + piece
        if not is_begun:
            piece = piece.lstrip()
        kept = piece.rstrip()
        self._space = piece[len(kept) :]
        return kept

    def _calls(self, body: str, whole: str) -> Iterable[Event]:
        assert self._dialect is not None
        parsed = self._dialect.parse(body.replace(_OPEN, "").replace(_CLOSE, ""), self._tools)
        if parsed is None:
            yield from self._text(whole)
            return
        self._space = ""
        for call in parsed:
            index = len(self.answer.calls)
            call_id = call.call_id or _new_id()
            self.answer.calls.append(_as_message(call, call_id))
            yield {"type": "tool_call", "index": index, "id": call_id, "name": call.name, "arguments": call.arguments}


def _as_message(call: ParsedCall, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _new_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(CALL_ID_CHARACTERS))


def _marked(marker: str, codec: TokenNames) -> str:
    """A marker as it comes out of `feed` and `feed_control`."""
    return "".join(text if token is None else control_name(text) for text, token in split_marker(marker, codec))


def _held(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of `text` that may begin a marker, or that are half a control token's name."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def same_arguments(left: str, right: str) -> bool:
    """Whether two JSON texts say the same."""
    if left == right:
        return True
    try:
        return json.dumps(json.loads(left), sort_keys=True) == json.dumps(json.loads(right), sort_keys=True)
    except (ValueError, RecursionError):
        return False
