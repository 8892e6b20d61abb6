"""OpenAI's responses: a request as a plan, a turn as a response or as its events.

The gateway stores no responses: a request carries its whole input, and fields that refer to stored ones are refused.
Items of the input become messages in their order; calls that follow each other, and an answer's text before them, are
one message of the assistant, as they were. May import kvd_client and siblings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvd.gateway.answers import Answer, Call, new_id, openai_logprobs
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
    function_of,
    response_format,
    sampling,
)
from kvd.gateway.turns import Plan

ROLES = ("system", "developer", "user", "assistant")
FIELDS = frozenset(
    (
        *IDENTITY_FIELDS,
        *SAMPLING_FIELDS,
        *WITHOUT_EFFECT,
        "access_programs",
        "background",
        "background_options",
        "context_management",
        "conversation",
        "image",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "model",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt",
        "reasoning",
        "stream",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
    )
)
LOGPROBS = "message.output_text.logprobs"
STORES_NOTHING = "the gateway stores no responses; send the whole conversation as input"


def plan(fields: Fields, canonical: Canonical, default_max_tokens: int) -> Plan:
    """The turn that a request asks for.

    Raises:
        ApiError: a field is unknown, wrong, or asks for what kvd cannot do.
    """
    fields.refuse_unknown(FIELDS)
    fields.refuse("background", STORES_NOTHING)
    for name in ("conversation", "previous_response_id", "prompt"):
        fields.refuse(name, STORES_NOTHING, harmless=(None,))
    fields.refuse("image", "answers are text")
    fields.refuse("truncation", "an input that does not fit is refused", harmless=(None, "disabled"))
    options = sampling(fields)
    alternatives = fields.optional_integer("top_logprobs", 0, MAX_ALTERNATIVES)
    if alternatives or LOGPROBS in fields.items("include"):
        options["logprobs"] = alternatives or 0
    limit = default_limit(options, default_max_tokens)
    options["max_tokens"] = fields.integer("max_output_tokens", 1, MAX_NEW_TOKENS, limit)
    if tools := canonical.tools([_tool(tool) for tool in fields.objects("tools")]):
        options |= {"tools": tools} | _tool_choice(fields)
    elif fields.raw.get("tool_choice") not in (None, "auto", "none"):
        fields.wrong("tool_choice", "asks for a call, which needs tools")
    if (form := response_format(fields.inner("text"), "format")) is not None:
        options["response_format"] = form
    return Plan(
        method="chat",
        messages=messages_of(fields, canonical),
        options=options,
        body=fields.raw,
        stream=fields.flag("stream"),
        names={"max_tokens": "max_output_tokens", "messages": "input", "logprobs": "top_logprobs"},
    )


def _tool(fields: Fields) -> dict[str, Any]:
    fields.choice("type", ("function",))
    return {"type": "function", "function": function_of(fields)}


def _tool_choice(fields: Fields) -> dict[str, Any]:
    options: dict[str, Any] = {}
    choice = fields.raw.get("tool_choice")
    if isinstance(choice, dict):
        named = fields.inner("tool_choice")
        named.choice("type", ("function",))
        options["tool_choice"] = {"type": "function", "function": {"name": named.text("name")}}
    elif fields.choice("tool_choice", ("auto", "none", "required"), "auto") != "auto":
        options["tool_choice"] = choice
    if not fields.flag("parallel_tool_calls", True):
        options["parallel_tool_calls"] = False
    return options


def messages_of(fields: Fields, canonical: Canonical) -> list[dict[str, Any]]:
    """The conversation as the daemon takes it, the instructions first.

    Raises:
        ApiError: with the place of what is wrong.
    """
    found: list[dict[str, Any]] = []
    if fields.has("instructions"):
        found.append({"role": "system", "content": canonical.text("system", fields.text("instructions"))})
    if isinstance(fields.raw.get("input"), str):
        return [*found, {"role": "user", "content": canonical.text("user", fields.text("input"))}]
    items = fields.objects("input")
    if not items:
        fields.wrong("input", "must be a string or a list with at least one item")
    thoughts = ""
    for item in items:
        kind = item.choice("type", ("message", "function_call", "function_call_output", "reasoning"), "message")
        if kind == "reasoning":
            thoughts += _thoughts(item)
            continue
        if kind == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(_sent_call(item))
        elif kind == "function_call_output":
            content = _text_of(item, "output", "tool", canonical)
            found.append({"role": "tool", "tool_call_id": item.text("call_id"), "content": content})
        else:
            role = item.choice("role", ROLES)
            role = "system" if role == "developer" else role
            found.append({"role": role, "content": _text_of(item, "content", role, canonical)})
        if thoughts and found[-1]["role"] == "assistant":
            found[-1].setdefault("reasoning_content", thoughts)
            thoughts = ""
    return found


def _text_of(fields: Fields, name: str, role: str, canonical: Canonical) -> str:
    if isinstance(fields.raw.get(name), str):
        return canonical.text(role, fields.text(name))
    if not isinstance(fields.raw.get(name), list):
        fields.wrong(name, "must be a string or a list of text parts")
    return "".join(canonical.text(role, _part(part)) for part in fields.objects(name))


def _part(part: Fields) -> str:
    kind = part.text("type")
    if kind == "refusal":
        return part.text("refusal")
    if kind not in ("input_text", "output_text", "text"):
        raise ApiError(
            "unsupported",
            f"{part.path('type')} must be input_text or output_text, not {kind[:40]!r}: the model reads no images or "
            "files",
            param=part.path("type"),
        )
    return part.text("text")


def _thoughts(fields: Fields) -> str:
    return "".join(part.text("text") for part in fields.objects("content"))


def _sent_call(fields: Fields) -> dict[str, Any]:
    function = {"name": fields.text("name"), "arguments": fields.text("arguments", "")}
    return {"id": fields.text("call_id"), "type": "function", "function": function}


def message_item(item_id: str, text: str, status: str, logprobs: list[dict[str, object]]) -> dict[str, Any]:
    """An answer's text as an item of the output."""
    part = output_text(text, logprobs)
    content = [] if status == "in_progress" else [part]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def output_text(text: str, logprobs: list[dict[str, object]]) -> dict[str, Any]:
    """A text as a part of an item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(item_id: str, call: Call, status: str) -> dict[str, Any]:
    """A call as an item of the output."""
    named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"id": item_id, "type": "function_call", "status": status, **named}


def reasoning_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    """Reasoning as an item of the output."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


class ResponseObject:
    """The `response` of a request, at any time of its life. Immutable.

    Args:
        fields: the request.
        model: the loaded model's name.
    """

    def __init__(self, fields: Fields, model: str) -> None:
        raw = fields.raw
        self._fields: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "incomplete_details": None,
            "instructions": raw.get("instructions"),
            "max_output_tokens": raw.get("max_output_tokens"),
            "metadata": raw.get("metadata") or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": fields.number("temperature", 0, 2, 1),
            "text": raw.get("text") or {"format": {"type": "text"}},
            "tool_choice": raw.get("tool_choice") or "auto",
            "tools": raw.get("tools") or [],
            "top_p": fields.number("top_p", 0, 1, 1),
            "truncation": "disabled",
            "usage": None,
            "user": raw.get("user"),
        }

    def begun(self) -> dict[str, Any]:
        """While it runs."""
        return {**self._fields, "status": "in_progress"}

    def ended(self, answer: Answer) -> dict[str, Any]:
        """At its end, with its output and counts."""
        cut = answer.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        details = {"reason": "max_output_tokens"} if cut else None
        output = self.output(answer, status)
        told = {"status": status, "incomplete_details": details, "completed_at": None if cut else int(time.time())}
        return {**self._fields, **told, "output": output, "usage": usage(answer)}

    def failed(self, error: ApiError) -> dict[str, Any]:
        """After an error."""
        told = error.openai_error()
        return {
            **self._fields,
            "status": "failed",
            "error": {"code": told["code"] or "server_error", "message": error.message},
        }

    @staticmethod
    def output(answer: Answer, status: str) -> list[dict[str, Any]]:
        """The items of an answer."""
        items = []
        if answer.reasoning:
            items.append(reasoning_item(new_id("rs_"), answer.reasoning, status))
        if answer.content or not answer.calls:
            items.append(message_item(new_id("msg_"), answer.content, status, openai_logprobs(answer.logprobs)))
        items += [call_item(new_id("fc_"), call, status) for call in answer.calls]
        return items


def usage(answer: Answer) -> Mapping[str, Any]:
    """Counts of a finished turn; reasoning is counted where the daemon counts it, and 0 where there was none."""
    result = answer.result
    counted = result.server.get("reasoning_tokens")
    known = counted if isinstance(counted, int) else None if answer.reasoning else 0
    return {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {"cached_tokens": result.cached_tokens},
        "output_tokens": result.completion_tokens,
        "output_tokens_details": {} if known is None else {"reasoning_tokens": known},
        "total_tokens": result.prompt_tokens + result.completion_tokens,
    }


__all__ = [
    "ResponseObject",
    "call_item",
    "message_item",
    "messages_of",
    "output_text",
    "plan",
    "reasoning_item",
    "usage",
]
