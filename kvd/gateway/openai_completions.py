"""OpenAI's completions: text in, text out, no template. The agent's whole text is the prompt, its bytes unchanged.

May import kvd_client and siblings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvd.gateway.answers import Answer, new_id
from kvd.gateway.errors import ApiError
from kvd.gateway.fields import Fields
from kvd.gateway.openai_params import (
    IDENTITY_FIELDS,
    MAX_ALTERNATIVES,
    MAX_NEW_TOKENS,
    SAMPLING_FIELDS,
    WITHOUT_EFFECT,
    response_format,
    sampling,
    stop_strings,
    usage,
)
from kvd.gateway.sse import COMMENT_PING, DONE, event
from kvd.gateway.turns import Plan
from kvd_client.logprobs import TokenLogprob
from kvd_client.stream import Logprobs, Matched, StreamEvent, Text

FIELDS = frozenset(
    (
        *IDENTITY_FIELDS,
        *SAMPLING_FIELDS,
        *WITHOUT_EFFECT,
        "best_of",
        "echo",
        "logprobs",
        "max_tokens",
        "model",
        "n",
        "prompt",
        "response_format",
        "stop",
        "stream",
        "stream_options",
        "suffix",
    )
)
DEFAULT_MAX_TOKENS = 16
"""The service's own for this endpoint."""


def plan(fields: Fields) -> Plan:
    """The turn that a request asks for.

    Raises:
        ApiError: a field is unknown, wrong, or asks for what kvd cannot do.
    """
    fields.refuse_unknown(FIELDS)
    for name in ("n", "best_of"):
        fields.refuse(name, "ask once for each answer", harmless=(None, 1))
    fields.refuse("suffix", "the model writes at the end of the text only", harmless=(None, ""))
    fields.refuse("echo", "the prompt is what was sent")
    options = sampling(fields) | {
        "max_tokens": fields.integer("max_tokens", 0, MAX_NEW_TOKENS, DEFAULT_MAX_TOKENS),
        "stop": stop_strings(fields),
    }
    if fields.has("logprobs"):
        options["logprobs"] = fields.integer("logprobs", 0, MAX_ALTERNATIVES)
    if (form := response_format(fields, "response_format")) is not None:
        options["response_format"] = form
    return Plan(
        method="generate",
        text=_prompt(fields),
        options=options,
        body=fields.raw,
        stream=fields.flag("stream"),
        names={"text": "prompt"},
    )


def _prompt(fields: Fields) -> str:
    value = fields.raw.get("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    if not isinstance(value, str):
        fields.wrong("prompt", "must be one string; send one request for each prompt, and text instead of token ids")
    return value


class CompletionWriter:
    """Says a turn as a completion or as pieces of one. Owner: its request.

    Args:
        model: the loaded model's name.
        include_usage: end the stream with token counts.
        prompt_characters: where the new text begins, for the offsets of tokens.
    """

    def __init__(self, model: str, *, include_usage: bool, prompt_characters: int) -> None:
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._offset = prompt_characters

    @classmethod
    def of(cls, fields: Fields, model: str) -> CompletionWriter:
        """The writer for a request."""
        include = fields.inner("stream_options").flag("include_usage")
        return cls(model, include_usage=include, prompt_characters=len(_prompt(fields)))

    def begin(self, matched: Matched | None) -> bytes:
        """Nothing: the first piece is the first text."""
        return b""

    def event(self, event: StreamEvent) -> bytes:
        """A piece of text, or what is said of its tokens."""
        match event:
            case Text(text):
                return self._piece(text)
            case Logprobs(tokens):
                return self._piece("", logprobs=self._logprobs(tokens))
            case _:
                return b""

    def end(self, answer: Answer) -> bytes:
        """Why it ended, its figures, and the end of the stream."""
        last = self._piece("", finish_reason=answer.finish_reason)
        if self._include_usage:
            last += event({**self._head, "choices": [], "usage": usage(answer.result)})
        return last + DONE

    def error(self, error: ApiError) -> bytes:
        """An error in mid-stream, which ends it."""
        return event({"error": error.openai_error()})

    def ping(self) -> bytes:
        """A comment."""
        return COMMENT_PING

    def whole(self, answer: Answer) -> Mapping[str, Any]:
        """The completion."""
        choice = {
            "index": 0,
            "text": answer.result.text,
            "logprobs": self._logprobs(answer.logprobs) if answer.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        return {**self._head, "choices": [choice], "usage": usage(answer.result)}

    def _piece(
        self, text: str, *, logprobs: Mapping[str, Any] | None = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        usage_so_far = {"usage": None} if self._include_usage else {}
        return event({**self._head, "choices": [choice], **usage_so_far})

    def _logprobs(self, tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        """Parallel lists, in the form of this endpoint."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.token)
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{each.token: each.logprob for each in token.top_logprobs} for token in tokens],
            "text_offset": offsets,
        }


__all__ = ["CompletionWriter", "plan"]
