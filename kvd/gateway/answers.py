"""A finished turn as every dialect needs it: text, reasoning, calls and figures out of the daemon's result.

Pure. May import kvd_client.
"""

from __future__ import annotations

import codecs
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvd_client import GenerateResult
from kvd_client.logprobs import Alternative, TokenLogprob


@dataclass(frozen=True, slots=True)
class Call:
    """A tool the model calls; `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out of a turn.

    Attributes:
        content: the answer's text, without reasoning and calls.
        reasoning: what the model thought.
        calls: tools it calls.
        finish_reason: `stop`, `length` or `tool_calls`.
        stop_string: the stop string that ended it, if one did.
        context_full: `length` because the model's context is full.
        result: the daemon's result, with all figures.
        logprobs: of the tokens that `content` is made of.
    """

    content: str
    reasoning: str
    calls: tuple[Call, ...]
    finish_reason: str
    stop_string: str | None
    context_full: bool
    result: GenerateResult
    logprobs: tuple[TokenLogprob, ...] = field(default=())

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a later request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


def answer_of(result: GenerateResult) -> Answer:
    """Read a result of `chat` or `generate`."""
    message = {"content": result.text} if result.message is None else result.message
    content, reasoning = message.get("content"), message.get("reasoning_content")
    calls = message.get("tool_calls")
    return Answer(
        content=content if isinstance(content, str) else "",
        reasoning=reasoning if isinstance(reasoning, str) else "",
        calls=tuple(_call(call) for call in calls) if isinstance(calls, list) else (),
        finish_reason=result.finish_reason,
        stop_string=result.stop_string or None,
        context_full=result.context_full,
        result=result,
        logprobs=(result.logprobs or ()) if result.message is None else _of_content(message, result.logprobs or ()),
    )


@dataclass(slots=True)
class _Part:
    """A piece of an answer in the model's order, and how many of its characters have their tokens."""

    is_content: bool
    text: str = ""
    at: int = 0


class ContentTokens:
    """Finds the sampled tokens that an answer's text is made of, among those of reasoning, calls and markers.

    Texts and tokens come in the same order, but not at the same time: the daemon keeps a text back while it may be the
    beginning of a call. So both wait here, and tokens are compared with what is said next, as many at a time as make a
    character. Those that spell something else are a marker's or a call's. Owner: a writer.
    """

    def __init__(self) -> None:
        self._said: deque[_Part] = deque()
        self._waiting: deque[tuple[str, tuple[TokenLogprob, ...]]] = deque()
        self._half: list[TokenLogprob] = []
        self._decoder = _utf8()

    def said(self, text: str, *, is_content: bool) -> None:
        """More of the answer's text, or of what is none; an empty text ends the one before it."""
        if not self._said or self._said[-1].is_content != is_content:
            self._said.append(_Part(is_content))
        self._said[-1].text += text

    def sampled(self, tokens: Iterable[TokenLogprob]) -> None:
        """More of the tokens that were sampled."""
        for token in tokens:
            if token.bytes is None:  # a control token is a marker
                self._half, self._decoder = [], _utf8()
                continue
            self._half.append(token)
            if spelt := self._decoder.decode(token.bytes):
                self._waiting.append((spelt, tuple(self._half)))
                self._half = []

    def take(self, *, ended: bool = False) -> tuple[TokenLogprob, ...]:
        """Tokens that are known now to be the text's; `ended`: nothing more will be said."""
        found: list[TokenLogprob] = []
        while self._waiting and self._said:
            part, (spelt, tokens) = self._said[0], self._waiting[0]
            left = len(part.text) - part.at
            if not left:
                if len(self._said) == 1:
                    break  # it may go on
                self._said.popleft()
                continue
            if part.at == 0 and not part.text.startswith(spelt):
                spelt = spelt.lstrip()  # the answer's text may begin behind the white space that follows a marker
            is_inside = bool(spelt) and part.text.startswith(spelt, part.at)
            is_beyond = len(spelt) > left and spelt.startswith(part.text[part.at :])
            if is_beyond and len(self._said) == 1 and not ended:
                break  # the rest of it may be said yet
            if is_inside or is_beyond:
                part.at += min(len(spelt), left)
                if part.is_content:
                    found += tokens
            self._waiting.popleft()
        return tuple(found)


def _utf8() -> codecs.IncrementalDecoder:
    """What the daemon makes of bytes that are no character."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def _of_content(message: Mapping[str, object], tokens: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
    """Of all tokens of a turn those of the answer's text."""
    places = ContentTokens()
    places.said(_text(message.get("reasoning_content")), is_content=False)
    places.said(_text(message.get("content")), is_content=True)
    places.said("", is_content=False)
    places.sampled(tokens)
    return places.take(ended=True)


def call_of(data: Mapping[str, object]) -> Call:
    """A `tool_call` event of the stream."""
    return Call(_text(data.get("id")) or new_id("call_"), _text(data.get("name")), _text(data.get("arguments")))


def _call(call: object) -> Call:
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    return call_of({"id": call.get("id"), **(function if isinstance(function, dict) else {})})


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


class _Ids:
    """Random bytes in stock: asking the system for twelve of them costs a request more than all else its id does."""

    def __init__(self) -> None:
        self._left = b""

    def take(self) -> str:
        """12 bytes in hex that nobody else gets."""
        if not self._left:
            self._left = secrets.token_bytes(12 * 256)
        taken, self._left = self._left[:12], self._left[12:]
        return taken.hex()


_IDS = _Ids()


def new_id(prefix: str) -> str:
    """A fresh id as the services make them. Of the event loop's thread only."""
    return prefix + _IDS.take()


def openai_logprobs(tokens: tuple[TokenLogprob, ...]) -> list[dict[str, object]]:
    """Log-probabilities in the form of OpenAI's chat and responses; control tokens, which have no bytes, as text."""
    return [
        {**_entry(token), "top_logprobs": [_entry(alternative) for alternative in token.top_logprobs]}
        for token in tokens
    ]


def _entry(token: Alternative) -> dict[str, object]:
    return {
        "token": token.token,
        "logprob": token.logprob,
        "bytes": None if token.bytes is None else list(token.bytes),
    }


__all__ = ["Answer", "Call", "ContentTokens", "answer_of", "call_of", "new_id", "openai_logprobs"]
