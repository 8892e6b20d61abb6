"""Chat messages as every template takes them: contents are text, arguments are objects, system messages stay in place.

Pure. May import kvd.errors and this package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvd.errors import InvalidParams
from kvd.model.errors import UnsupportedFeature
from kvd.model.tokenizer import utf8

Message = Mapping[str, Any]


def normalise(message: Message, index: int) -> dict[str, Any]:
    """A message with its content as one string (or None) and tool-call arguments as objects."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParams(f"message {index} needs a role", index=index)
    content = message.get("content")
    if isinstance(content, list | tuple):
        texts = [p["text"] for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
        if len(texts) != len(content):
            raise UnsupportedFeature(f"message {index} has parts that are not text", feature="content parts")
        content = "".join(texts)
    if content is not None and not isinstance(content, str):
        raise InvalidParams(f"content of message {index} must be text, a list of text parts or null", index=index)
    if content:
        utf8(content)
    result = {**message, "content": content}
    if isinstance(message.get("tool_calls"), list | tuple):
        result["tool_calls"] = [_with_object_arguments(call) for call in message["tool_calls"]]
    return result


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Give results of tools the name of their function, which some templates print and most clients leave out."""
    names: dict[str, object] = {}
    for message in messages:
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and isinstance(call_id, str) and call_id in names:
            message.setdefault("name", names[call_id])
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(call.get("id"), str):
                names[call["id"]] = function.get("name")


def folded(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """System messages behind the first message as user messages, joined with the user messages beside them.

    What messages are joined to depends on those next to them alone, so a conversation that goes on keeps its text.
    """
    joined: list[dict[str, Any]] = []
    joins = False
    for index, message in enumerate(messages):
        was_system = index > 0 and message["role"] == "system"
        as_user = {"role": "user", "content": message["content"]} if was_system else message
        if joined and as_user["role"] == joined[-1]["role"] == "user" and (joins or was_system):
            parts = [part for part in (joined[-1]["content"], as_user["content"]) if part]
            joined[-1] = {**joined[-1], "content": "\n\n".join(parts)}
        else:
            joined.append(as_user)
        joins = was_system
    return joined


def _with_object_arguments(call: object) -> object:
    """A tool call whose JSON arguments are parsed: templates print objects, the OpenAI form sends a string."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = arguments
    return {**call, "function": {**function, "arguments": parsed}}
