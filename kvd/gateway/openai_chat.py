"""OpenAI's chat completions: a request as a plan, a turn as a completion or as chunks.

Messages stay in their order and place: a system message in mid-conversation is not moved to the front, where it would
change everything behind it. `developer` is another word for `system`. May import kvd_client and siblings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvd.gateway.answers import Answer, Call, ContentTokens, call_of, new_id, openai_logprobs
from kvd.gateway.canonical import Canonical
from kvd.gateway.errors import ApiError
from kvd.gateway.fields import Fields
from kvd.gateway.openai_params import (
    IDENTITY_FIELDS,
    MAX_ALTERNATIVES,
    MAX_NEW_TOKENS,
    SAMPLING_FIELDS,
    WITHOUT_EFFECT,
    default_limit,
    function_tools,
    response_format,
    sampling,
    stop_strings,
    usage,
)
from kvd.gateway.sse import COMMENT_PING, DONE, event, json_bytes
from kvd.gateway.turns import Plan
from kvd_client.stream import Logprobs, Matched, OtherEvent, Reasoning, StreamEvent, Text, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = frozenset(
    (
        *IDENTITY_FIELDS,
        *SAMPLING_FIELDS,
        *WITHOUT_EFFECT,
        "audio",
        "chat_template_kwargs",
        "function_call",
        "functions",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "modalities",
        "model",
        "n",
        "parallel_tool_calls",
        "response_format",
        "stop",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
        "top_logprobs",
        "web_search_options",
    )
)


def plan(fields: Fields, canonical: Canonical, default_max_tokens: int) -> Plan:
    """The turn that a request asks for.

    Raises:
        ApiError: a field is unknown, wrong, or asks for what kvd cannot do.
    """
    fields.refuse_unknown(FIELDS)
    fields.refuse("n", "ask once for each answer", harmless=(None, 1))
    fields.refuse("audio", "answers are text")
    fields.refuse("modalities", "answers are text", harmless=(None, ["text"]))
    fields.refuse("functions", "use tools", harmless=(None, []))
    fields.refuse("function_call", "use tool_choice", harmless=(None, "none", "auto"))
    fields.refuse("web_search_options", "kvd searches nothing")
    asked = fields.optional_integer("max_completion_tokens", 1, MAX_NEW_TOKENS)
    options = sampling(fields) | {"stop": stop_strings(fields)}
    if fields.flag("logprobs"):
        options["logprobs"] = fields.integer("top_logprobs", 0, MAX_ALTERNATIVES, 0)
    elif fields.has("top_logprobs"):
        fields.wrong("top_logprobs", "is only allowed when logprobs is true")
    limit = default_limit(options, default_max_tokens)
    options["max_tokens"] = asked or fields.integer("max_tokens", 1, MAX_NEW_TOKENS, limit)
    if tools := canonical.tools(function_tools(fields)):
        options |= {"tools": tools} | _tool_choice(fields)
    elif fields.raw.get("tool_choice") not in (None, "auto", "none"):
        fields.wrong("tool_choice", "asks for a call, which needs tools")
    if (form := response_format(fields, "response_format")) is not None:
        options["response_format"] = form
    if fields.has("chat_template_kwargs"):
        options["chat_template_kwargs"] = dict(fields.inner("chat_template_kwargs").raw)
    return Plan(
        method="chat",
        messages=messages_of(fields, canonical),
        options=options,
        body=fields.raw,
        stream=fields.flag("stream"),
        names={"logprobs": "top_logprobs"},
    )


def _tool_choice(fields: Fields) -> dict[str, Any]:
    options: dict[str, Any] = {}
    choice = fields.raw.get("tool_choice")
    if isinstance(choice, dict):
        named = fields.inner("tool_choice")
        named.choice("type", ("function",))
        name = named.inner("function").text("name")
        options["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif fields.choice("tool_choice", ("auto", "none", "required"), "auto") != "auto":
        options["tool_choice"] = choice
    if not fields.flag("parallel_tool_calls", True):
        options["parallel_tool_calls"] = False
    return options


def messages_of(fields: Fields, canonical: Canonical) -> list[dict[str, Any]]:
    """The conversation as the daemon takes it.

    Raises:
        ApiError: with the place of what is wrong.
    """
    found = [_message(message, canonical) for message in fields.objects("messages")]
    if not found:
        fields.wrong("messages", "must be a list with at least one message")
    return found


def _message(fields: Fields, canonical: Canonical) -> dict[str, Any]:
    role = fields.choice("role", ROLES)
    role = "system" if role == "developer" else role
    message: dict[str, Any] = {"role": role, "content": _content(fields, role, canonical)}
    if fields.has("name"):
        message["name"] = fields.text("name")
    if role == "assistant":
        if calls := fields.objects("tool_calls"):
            message["tool_calls"] = [_sent_call(call) for call in calls]
        for name in ("reasoning_content", "reasoning"):
            if fields.has(name):
                message.setdefault("reasoning_content", fields.text(name))
        if not message["content"] and not calls:
            message["content"] = ""
    elif message["content"] is None:
        fields.wrong("content", "must be a string or a list of text parts")
    if role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id")
    return message


def _content(fields: Fields, role: str, canonical: Canonical) -> str | None:
    value = fields.raw.get("content")
    if value is None:
        return None
    if isinstance(value, str):
        return canonical.text(role, value)
    if not isinstance(value, list):
        fields.wrong("content", "must be a string or a list of parts")
    return "".join(canonical.text(role, _part(part)) for part in fields.objects("content"))


def _part(part: Fields) -> str:
    kind = part.text("type")
    if kind == "refusal":
        return part.text("refusal")
    if kind != "text":
        raise ApiError(
            "unsupported",
            f"{part.path('type')} must be text, not {kind[:40]!r}: the model reads no images, audio or files",
            param=part.path("type"),
        )
    return part.text("text")


def _sent_call(fields: Fields) -> dict[str, Any]:
    """A tool call of an earlier answer."""
    fields.choice("type", ("function",), "function")
    function = fields.inner("function")
    return {
        "id": fields.text("id"),
        "type": "function",
        "function": {"name": function.text("name"), "arguments": function.text("arguments", "")},
    }


_NO_TEXT = b'"content":""'
"""Of a chunk: inside a string its quotation marks would have back-slashes."""


class ChatWriter:
    """Says a turn as a completion or as chunks. Owner: its request.

    Args:
        model: the loaded model's name.
        include_usage: end the stream with a chunk of token counts.
        logprobs: log-probabilities will come.
        clock: seconds since the epoch, for `created`.
    """

    def __init__(self, model: str, *, include_usage: bool, logprobs: bool = True, created_s: int | None = None) -> None:
        self._id = new_id("chatcmpl-")
        self._model = model
        self._created = int(time.time()) if created_s is None else created_s
        self._include_usage = include_usage
        self._calls = CallDeltas()
        self._tokens = ContentTokens() if logprobs else None
        self._around_text: tuple[bytes, bytes] | None = None

    @classmethod
    def of(cls, fields: Fields, model: str) -> ChatWriter:
        """The writer for a request."""
        usage, logprobs = fields.inner("stream_options").flag("include_usage"), fields.flag("logprobs")
        return cls(model, include_usage=usage, logprobs=logprobs)

    def begin(self, matched: Matched | None) -> bytes:
        """The chunk that opens the message."""
        self._text("")  # what all of text have in common is ready before there is any
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: StreamEvent) -> bytes:
        """A chunk for text, reasoning, calls and log-probabilities."""
        match event:
            case Text(text):
                said = self._text(text)
                if self._tokens is None:
                    return said
                self._tokens.said(text, is_content=True)
                return said + self._told()
            case Reasoning(text):
                if self._tokens is not None:
                    self._tokens.said(text, is_content=False)
                return self._chunk({"reasoning_content": text}) + self._told()
            case Logprobs(tokens):
                if self._tokens is not None:
                    self._tokens.sampled(tokens)
                return self._told()
            case ToolCall() | OtherEvent():
                if self._tokens is not None and (isinstance(event, ToolCall) or event.type == "tool_call_delta"):
                    self._tokens.said("", is_content=False)
                return self._told() + b"".join(
                    self._chunk({"tool_calls": [delta]}) for delta in self._calls.deltas(event)
                )
            case _:
                return b""

    def _text(self, text: str) -> bytes:
        """A chunk of text. All are alike but for that: only it is made anew."""
        if self._around_text is None:
            before, empty, after = self._chunk({"content": ""}).partition(_NO_TEXT)
            self._around_text = before + empty[:-2], after
        before, after = self._around_text
        return before + json_bytes(text) + after

    def _told(self, *, ended: bool = False) -> bytes:
        """A chunk for the log-probabilities of the text, if there are new ones."""
        if self._tokens is None:
            return b""
        tokens = self._tokens.take(ended=ended)
        return self._chunk({"content": ""}, logprobs=openai_logprobs(tokens)) if tokens else b""

    def end(self, answer: Answer) -> bytes:
        """Why it ended, its figures, and the end of the stream."""
        last = self._told(ended=True) + self._chunk({}, finish_reason=answer.finish_reason)
        if self._include_usage:
            last += event({**self._head(chunk=True), "choices": [], "usage": usage(answer.result)})
        return last + DONE

    def error(self, error: ApiError) -> bytes:
        """An error in mid-stream, which ends it."""
        return event({"error": error.openai_error()})

    def ping(self) -> bytes:
        """A comment: chunks have no event for it."""
        return COMMENT_PING

    def whole(self, answer: Answer) -> Mapping[str, Any]:
        """The completion."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None, "annotations": []}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [call_object(call) for call in answer.calls]
        logprobs = {"content": openai_logprobs(answer.logprobs), "refusal": None} if answer.logprobs else None
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}
        return {**self._head(chunk=False), "choices": [choice], "usage": usage(answer.result)}

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(
        self,
        delta: Mapping[str, Any],
        *,
        logprobs: list[dict[str, object]] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        told = None if logprobs is None else {"content": logprobs, "refusal": None}
        choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": finish_reason}
        usage_so_far = {"usage": None} if self._include_usage else {}
        return event({**self._head(chunk=True), "choices": [choice], **usage_so_far})


class CallDeltas:
    """Tool calls of a stream as chat's deltas: a call comes in pieces, or whole. Owner: a writer."""

    def __init__(self) -> None:
        self._in_pieces: set[int] = set()
        self._next = 0

    def deltas(self, event: ToolCall | OtherEvent) -> Sequence[dict[str, Any]]:
        """What to say of an event; nothing of a whole call whose pieces have been said."""
        if isinstance(event, OtherEvent) and event.type != "tool_call_delta":
            return ()
        index = event.data.get("index")
        index = index if isinstance(index, int) else self._next
        self._next = max(self._next, index + 1)
        if isinstance(event, ToolCall):
            return () if index in self._in_pieces else ({"index": index, **call_object(call_of(event.data))},)
        delta: dict[str, Any] = {"index": index, "function": {}}
        if index not in self._in_pieces:
            call = call_of(event.data)
            self._in_pieces.add(index)
            return ({"index": index, **call_object(call)},)
        delta["function"]["arguments"] = str(event.data.get("arguments") or "")
        return (delta,)


def call_object(call: Call) -> dict[str, Any]:
    """A tool call in chat's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


__all__ = ["CallDeltas", "ChatWriter", "messages_of", "plan"]
