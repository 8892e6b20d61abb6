"""Anthropic's messages: a request as a plan, a turn as a message or as its events; and counting tokens.

A user message that carries tool results becomes one `tool` message for each result and a user message for the rest, in
the order of the blocks. Text blocks of a system or user message are joined by an empty line (clients put whole
documents into them), those of an answer by nothing: it is matched against what the model wrote. `system` messages in
mid-conversation stay where they are. `cache_control` marks need no work: kvd caches everything. May import kvd_client
and siblings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvd.gateway.answers import Answer, call_of, new_id
from kvd.gateway.canonical import Canonical
from kvd.gateway.errors import ApiError
from kvd.gateway.fields import Fields
from kvd.gateway.openai_params import MAX_NEW_TOKENS, response_format, stop_strings
from kvd.gateway.sse import event
from kvd.gateway.turns import Plan
from kvd_client import GenerateResult
from kvd_client.stream import Matched, OtherEvent, Reasoning, StreamEvent, Text, ToolCall

COUNTED_FIELDS = (
    "betas",
    "cache_control",
    "context_management",
    "diagnostics",
    "messages",
    "model",
    "output_config",
    "output_format",
    "speed",
    "system",
    "thinking",
    "tool_choice",
    "tools",
    "user_profile_id",
    "workspace_id",
)
FIELDS = frozenset(
    (
        *COUNTED_FIELDS,
        "billing_policy",
        "compaction",
        "container",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "mcp_servers",
        "max_tokens",
        "metadata",
        "service_tier",
        "stop_sequences",
        "stream",
        "temperature",
        "thread",
        "top_k",
        "top_p",
    )
)
ROLES = ("user", "assistant", "system")
NAMES = {"stop": "stop_sequences"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def plan(fields: Fields, canonical: Canonical) -> Plan:
    """The turn that a request asks for.

    Raises:
        ApiError: a field is unknown, wrong, or asks for what kvd cannot do.
    """
    fields.refuse_unknown(FIELDS)
    if fields.has("thread"):
        raise ApiError(
            "unsupported",
            "thread is not supported: the gateway stores no conversations; send all messages",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": []},  # the SDK then sends them all
        )
    fields.refuse("container", "kvd runs no code")
    fields.refuse("mcp_servers", "connect to them from the client", harmless=(None, []))
    fields.refuse("compaction", "the gateway stores no conversations")
    stops = stop_strings(fields, "stop_sequences")
    options: dict[str, Any] = {
        "max_tokens": fields.integer("max_tokens", 1, MAX_NEW_TOKENS),
        "temperature": fields.number("temperature", 0, 1, 1),
        "stop": stops,
        "on_context_full": "stop",
    }
    if fields.has("top_p"):
        options["top_p"] = fields.number("top_p", 0, 1, 1) or 1e-9  # 0 means: the most likely token only
    if fields.has("top_k"):
        options["top_k"] = fields.integer("top_k", 0, MAX_NEW_TOKENS)
    return Plan(
        method="chat",
        messages=messages_of(fields, canonical),
        options=options | _tools(fields, canonical) | _format(fields),
        body=fields.raw,
        stream=fields.flag("stream"),
        names=NAMES,
    )


def counted(fields: Fields, canonical: Canonical) -> dict[str, Any]:
    """Parameters of the daemon's `tokenize` for a request whose tokens are to be counted.

    Raises:
        ApiError: a field is unknown or wrong.
    """
    fields.refuse_unknown(FIELDS)
    parameters: dict[str, Any] = {"messages": messages_of(fields, canonical), "count_only": True}
    if tools := _tools(fields, canonical).get("tools"):
        parameters["tools"] = tools
    return parameters


def _tools(fields: Fields, canonical: Canonical) -> dict[str, Any]:
    """`tools` and `tool_choice` in the daemon's words."""
    tools = canonical.tools([_tool(tool) for tool in fields.objects("tools")])
    choice = fields.inner("tool_choice")
    kind = choice.choice("type", ("auto", "any", "none", "tool"), "auto")
    if not tools:
        if kind in ("any", "tool"):
            choice.wrong("type", f"{kind} asks for a call, which needs tools")
        return {}
    options: dict[str, Any] = {"tools": tools}
    if kind == "tool":
        options["tool_choice"] = {"type": "function", "function": {"name": choice.text("name")}}
    elif kind != "auto":
        options["tool_choice"] = {"any": "required", "none": "none"}[kind]
    if choice.flag("disable_parallel_tool_use"):
        options["parallel_tool_calls"] = False
    return options


def _tool(fields: Fields) -> dict[str, Any]:
    if fields.has("type") and fields.text("type") != "custom":
        raise ApiError(
            "unsupported",
            f"{fields.path('type')} must be custom: tools that the service runs itself are not served here",
            param=fields.path("type"),
        )
    function: dict[str, Any] = {
        "name": fields.text("name"),
        "parameters": dict(fields.inner("input_schema").raw) or {"type": "object", "properties": {}},
    }
    if fields.has("description"):
        function["description"] = fields.text("description")
    if fields.has("strict"):
        function["strict"] = fields.flag("strict")
    return {"type": "function", "function": function}


def _format(fields: Fields) -> dict[str, Any]:
    config = fields.inner("output_config")
    form = response_format(config, "format") or response_format(fields, "output_format")
    return {} if form is None else {"response_format": form}


def messages_of(fields: Fields, canonical: Canonical) -> list[dict[str, Any]]:
    """The conversation as the daemon takes it, the system text first.

    Raises:
        ApiError: with the place of what is wrong.
    """
    found: list[dict[str, Any]] = []
    if fields.has("system"):
        text = _joined(fields, "system", "system", canonical)
        if text:
            found.append({"role": "system", "content": text})
    messages = fields.objects("messages")
    if not messages:
        fields.wrong("messages", "must be a list with at least one message")
    for message in messages:
        role = message.choice("role", ROLES)
        if role == "user":
            found += _user(message, canonical)
        elif role == "assistant":
            found.append(_assistant(message))
        else:
            found.append({"role": "system", "content": _joined(message, "content", "system", canonical)})
    return found


def _joined(fields: Fields, name: str, role: str, canonical: Canonical) -> str:
    """A text, or text blocks with an empty line between them; blocks that a rule emptied are gone."""
    if isinstance(fields.raw.get(name), str):
        return canonical.text(role, fields.text(name))
    texts = [canonical.text(role, _text_block(block)) for block in _blocks(fields, name)]
    return "\n\n".join(text for text in texts if text)


def _blocks(fields: Fields, name: str) -> list[Fields]:
    if not isinstance(fields.raw.get(name), list):
        fields.wrong(name, "must be a string or a list of content blocks")
    return fields.objects(name)


def _text_block(block: Fields) -> str:
    kind = block.text("type")
    if kind != "text":
        raise ApiError(
            "unsupported",
            f"{block.path('type')} must be text here, not {kind[:40]!r}: the model reads no images or files",
            param=block.path("type"),
        )
    return block.text("text")


def _user(fields: Fields, canonical: Canonical) -> list[dict[str, Any]]:
    """A user message: the results of tools, and what the user says."""
    if isinstance(fields.raw.get("content"), str):
        return [{"role": "user", "content": canonical.text("user", fields.text("content"))}]
    found: list[dict[str, Any]] = []
    texts: list[str] = []

    def say() -> None:
        if texts:
            found.append({"role": "user", "content": "\n\n".join(texts)})
            texts.clear()

    for block in _blocks(fields, "content"):
        if block.raw.get("type") == "tool_result":
            say()
            found.append(_tool_result(block, canonical))
        elif text := canonical.text("user", _text_block(block)):
            texts.append(text)
    say()
    return found or [{"role": "user", "content": ""}]


def _tool_result(block: Fields, canonical: Canonical) -> dict[str, Any]:
    content = _joined(block, "content", "tool", canonical) if block.has("content") else ""
    if block.flag("is_error"):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content}


def _assistant(fields: Fields) -> dict[str, Any]:
    """An answer of an earlier turn."""
    if isinstance(fields.raw.get("content"), str):
        return {"role": "assistant", "content": fields.text("content")}
    texts, thoughts, calls = [], [], []
    for block in _blocks(fields, "content"):
        kind = block.raw.get("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            # compact, with keys in the order they came in: the daemon compares what the JSON means
            arguments = json.dumps(block.raw.get("input", {}), ensure_ascii=False)
            function = {"name": block.text("name"), "arguments": arguments}
            calls.append({"id": block.text("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text_block(block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


class MessageWriter:
    """Says a turn as a message or as its events. Owner: its request.

    Args:
        model: the loaded model's name.
    """

    def __init__(self, model: str) -> None:
        self._id = new_id("msg_")
        self._model = model
        self._index = -1
        self._open = ""
        self._in_pieces: set[object] = set()

    @classmethod
    def of(cls, fields: Fields, model: str) -> MessageWriter:
        """The writer for a request."""
        return cls(model)

    def begin(self, matched: Matched | None) -> bytes:
        """`message_start`, with the counts of the prompt when they are known."""
        counts = {"input_tokens": 0, "output_tokens": 0}
        if matched is not None:
            counts = _usage(matched.prompt_tokens, matched.cached_tokens, 0)
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
        return _event("message_start", message=message)

    def event(self, event: StreamEvent) -> bytes:
        """Deltas of the open block; a block of another kind closes it."""
        match event:
            case Text(text):
                opened = self._into("text", {"type": "text", "text": ""})
                return opened + self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                opened = self._into("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return opened + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCall() | OtherEvent():
                return self._call(event)
            case _:
                return b""

    def _call(self, event: ToolCall | OtherEvent) -> bytes:
        index = event.data.get("index")
        if isinstance(event, OtherEvent):
            if event.type != "tool_call_delta":
                return b""
        elif index in self._in_pieces and index is not None:
            return b""
        call = call_of(event.data)
        opened = b""
        if isinstance(event, ToolCall) or index not in self._in_pieces:
            self._in_pieces.add(index)
            opened = self._close() + self._into("tool_use", _tool_use(call.id, call.name, {}))
        return opened + (self._delta({"type": "input_json_delta", "partial_json": call.arguments}))

    def end(self, answer: Answer) -> bytes:
        """The end of the open block, why the message ended, and its counts."""
        reason, stop = _stop_reason(answer)
        closed = self._close()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return closed + _event("message_delta", delta=delta, usage=usage(answer.result)) + _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        """An error in mid-stream, which ends it."""
        return _event("error", error=error.anthropic_error())

    def ping(self) -> bytes:
        """The service's own event for it."""
        return _event("ping")

    def whole(self, answer: Answer) -> Mapping[str, Any]:
        """The message."""
        blocks: list[dict[str, Any]] = []
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content or not answer.calls:
            blocks.append({"type": "text", "text": answer.content})
        blocks += [_tool_use(call.id, call.name, _object(call.arguments)) for call in answer.calls]
        reason, stop = _stop_reason(answer)
        ended = {"stop_reason": reason, "stop_sequence": stop}
        return {**self._head(), "content": blocks, **ended, "usage": usage(answer.result)}

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _into(self, kind: str, block: Mapping[str, Any]) -> bytes:
        """Open a block unless one of that kind is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open, self._index = kind, self._index + 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        kind, self._open = self._open, ""
        return _event("content_block_stop", index=self._index) if kind else b""


def usage(result: GenerateResult) -> dict[str, int]:
    """Counts of a finished turn."""
    return _usage(result.prompt_tokens, result.cached_tokens, result.completion_tokens)


def _usage(prompt: int, cached: int, completion: int) -> dict[str, int]:
    """`input_tokens` are those that were computed; the service counts cached ones apart."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def _stop_reason(answer: Answer) -> tuple[str, str | None]:
    if answer.context_full:
        return "model_context_window_exceeded", None
    if answer.finish_reason == "stop" and answer.stop_string is not None:
        return "stop_sequence", answer.stop_string
    return STOP_REASONS.get(answer.finish_reason, "end_turn"), None


def _tool_use(call_id: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def _object(arguments: str) -> Mapping[str, Any]:
    """A call's arguments; what is no JSON object (the answer was cut) is shown as it is."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"_incomplete": arguments}
    return value if isinstance(value, dict) else {"_value": value}


def _event(name: str, **data: object) -> bytes:
    return event({"type": name, **data}, name)


__all__ = ["MessageWriter", "counted", "messages_of", "plan", "usage"]
