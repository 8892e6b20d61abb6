"""Tools for models whose chat template knows nothing of them: as text that says how to call.

Theory of operation. The list of tools and the way to call one go behind the system message, or make one of their own;
calls in the history are written as the model was told to write them, and what a tool gave back is a user message. The
form is that of the Hermes models, which most open models have seen: JSON between `<tool_call>` tags, results between
`<tool_response>` tags. Whether a small model follows it is the model's affair; with `tool_choice` other than `auto` a
grammar makes it.

What a message becomes depends on it and its neighbours of the same kind only, so a conversation that goes on keeps its
text. Pure. May import this package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvd.model.tool_calls import PLAIN_END, PLAIN_START

_INSTRUCTIONS: Final = (
    "You may call the functions below to help with the user's request. Each is described by JSON:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "To call a function, answer with a JSON object that has its name and its arguments, between tags:\n"
    '<tool_call>\n{{"name": <function name>, "arguments": <object of arguments>}}\n</tool_call>\n'
    "Repeat the tags for each call. What the function gives back comes between <tool_response> tags. "
    "Without need of a function, answer in plain text."
)


def with_plain_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, takes_system: bool = True
) -> list[dict[str, Any]]:
    """The conversation in roles that every template knows.

    Args:
        messages: normalised ones: contents are text or None.
        tools: functions to tell the model of; None when there are none.
        takes_system: the template knows system messages; else the first user message gets the list of tools.

    Returns:
        Messages without `tool` roles and `tool_calls`; those that have neither are the same objects.
    """
    written: list[dict[str, Any]] = []
    joins = False
    for given in messages:
        message, is_result = given, given["role"] == "tool"
        if is_result:
            content = f"<tool_response>\n{given['content'] or ''}\n</tool_response>"
            message = {"role": "user", "content": content}
        elif given.get("tool_calls"):
            message = _with_calls_as_text(given)
        if written and message["role"] == written[-1]["role"] == "user" and (is_result or joins):
            parts = [part for part in (written[-1]["content"], message["content"]) if part]
            written[-1] = {**written[-1], "content": ("\n" if is_result and joins else "\n\n").join(parts)}
        else:
            written.append(message)
        joins = is_result
    return _with_instructions(written, tools, "system" if takes_system else "user") if tools else written


def _with_instructions(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], role: str
) -> list[dict[str, Any]]:
    """The conversation with the list of tools in its first message: behind a system text, before a user's."""
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = messages[0] if messages else None
    if first is None or first["role"] not in ("system", role):
        return [{"role": role, "content": text}, *messages]
    parts = (first["content"], text) if first["role"] == "system" else (text, first["content"])
    return [{**first, "content": "\n\n".join(part for part in parts if part)}, *messages[1:]]


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant message whose calls are part of its content."""
    lines: list[str] = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            written = {"name": function.get("name"), "arguments": function.get("arguments")}
            lines.append(f"{PLAIN_START}\n{json.dumps(written, ensure_ascii=False)}\n{PLAIN_END}")
    content = "\n".join(part for part in (message["content"], *lines) if part)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
