"""A finished turn as every dialect needs it: text, reasoning, calls and figures out of the daemon's result.

Pure. May import kvd_client.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
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
        logprobs=result.logprobs or (),
    )


def call_of(data: Mapping[str, object]) -> Call:
    """A `tool_call` event of the stream."""
    return Call(_text(data.get("id")) or new_id("call_"), _text(data.get("name")), _text(data.get("arguments")))


def _call(call: object) -> Call:
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    return call_of({"id": call.get("id"), **(function if isinstance(function, dict) else {})})


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def new_id(prefix: str) -> str:
    """A fresh id as the services make them."""
    return prefix + secrets.token_hex(12)


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


__all__ = ["Answer", "Call", "answer_of", "call_of", "new_id", "openai_logprobs"]
