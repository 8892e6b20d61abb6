"""What `chat` is given, checked: messages, tools, which of them may be called, and the form of the answer.

The shapes are those of the OpenAI API, so that a gateway passes them on. Every refusal names the place and what may be
there. Fields that are not known are left in place: a model's template may read them.

Pure. May import kvd.errors, kvd.model.grammar_text and siblings that are pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast, get_args

from kvd.errors import InvalidParams
from kvd.model.grammar_text import CallChoice, CallRule
from kvd.scheduler.plain_values import check_plain

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
FORMATS: Final = ("text", "json_object", "json_schema")
MAX_TOOLS: Final = 256
_FUNCTION_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def checked_messages(raw: Sequence[object]) -> list[dict[str, object]]:
    """Chat messages: maps with a known role, a content that is text, and well-formed calls.

    Raises:
        InvalidParams, InvalidText: with the index of the message.
    """
    messages: list[dict[str, object]] = []
    for index, message in enumerate(raw):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidParams(f"{place} must be a map with a role", parameter="messages")
        check_plain("messages", place, message)
        _check_content(place, message.get("content"))
        role = message["role"]
        if role not in ROLES:
            raise InvalidParams(
                f"{place}.role must be {_any_of(ROLES)}, not {role[:40]!r}", parameter="messages", allowed=list(ROLES)
            )
        _check_calls(place, role, message.get("tool_calls"))
        for name in ("reasoning_content", "tool_call_id", "name"):
            if not isinstance(message.get(name), str | None):
                raise InvalidParams(f"{place}.{name} must be a string", parameter="messages")
        messages.append({str(key): value for key, value in message.items()})
    return messages


def _check_content(place: str, content: object) -> None:
    """Refuse contents that are no text, string or parts."""
    if isinstance(content, str | None):
        return
    if not isinstance(content, list):
        raise InvalidParams(f"{place}.content must be a string or a list of text parts", parameter="messages")
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else None
            raise InvalidParams(
                f'{place}.content[{number}] must be {{"type": "text", "text": ...}}; '
                f"this model takes no other parts{f', such as {kind[:40]!r}' if isinstance(kind, str) else ''}",
                parameter="messages",
                allowed=["text"],
            )


def _check_calls(place: str, role: str, calls: object) -> None:
    """Refuse calls that are none, or that nobody but an assistant can have made."""
    if calls is None or calls == []:
        return
    if role != "assistant":
        raise InvalidParams(f"{place} has tool_calls, which only assistant messages have", parameter="messages")
    if not isinstance(calls, list):
        raise InvalidParams(f"{place}.tool_calls must be a list of maps", parameter="messages")
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        is_whole = (
            isinstance(function, Mapping)
            and isinstance(function.get("name"), str)
            and isinstance(function.get("arguments", "{}"), str)
        )
        if not is_whole:
            raise InvalidParams(
                f'{place}.tool_calls[{number}] must be {{"id": ..., "type": "function", "function": {{"name": ..., '
                f'"arguments": ...}}}}, the arguments as a string of JSON',
                parameter="messages",
            )


def checked_tools(raw: object) -> list[dict[str, Any]] | None:
    """Functions the model may call; None when absent or empty.

    Raises:
        InvalidParams, InvalidText: with the place inside.
    """
    if raw is None:
        return None
    if not isinstance(raw, list) or not all(isinstance(tool, dict) for tool in raw):
        raise InvalidParams("tools must be a list of maps", parameter="tools")
    check_plain("tools", "tools", raw)
    if len(raw) > MAX_TOOLS:
        raise InvalidParams(f"tools takes at most {MAX_TOOLS}, not {len(raw)}", parameter="tools")
    names: set[str] = set()
    for index, tool in enumerate(raw):
        name = _function_name(f"tools[{index}]", tool)
        if name in names:
            raise InvalidParams(f"tools names {name!r} twice; name each function once", parameter="tools")
        names.add(name)
    return raw or None


def _function_name(place: str, tool: Mapping[str, Any]) -> str:
    """The name of one tool, whose fields are checked."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise InvalidParams(
            f'{place} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}',
            parameter="tools",
            allowed=["function"],
        )
    name = function.get("name")
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        raise InvalidParams(
            f"{place}.function.name must be 1 to 128 letters, digits, `_`, `-` and `.`", parameter="tools"
        )
    for field, kind, words in (("description", str, "a string"), ("parameters", dict, "a JSON schema, which is a map")):
        if not isinstance(function.get(field), kind | None):
            raise InvalidParams(f"{place}.function.{field} must be {words}", parameter="tools")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidParams(f"{place}.function.strict must be true or false", parameter="tools")
    return name


def checked_choice(raw: object, parallel: bool, tools: Sequence[Mapping[str, Any]] | None) -> CallChoice:
    """What `tool_choice` says.

    Raises:
        InvalidParams: it is none of the choices, or chooses what is not there.
    """
    rules = get_args(CallRule)
    only: str | None = None
    if isinstance(raw, Mapping):
        function = raw.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if raw.get("type") == "function" and isinstance(name, str):
            only = name
    names = [str(tool["function"]["name"]) for tool in tools or ()]
    if raw is not None and only is None and raw not in rules:
        raise InvalidParams(
            f'tool_choice must be {_any_of(rules)}, or {{"type": "function", "function": {{"name": ...}}}}',
            parameter="tool_choice",
            allowed=list(rules),
        )
    if only is not None and only not in names:
        raise InvalidParams(
            f"tool_choice names {only[:128]!r}; tools has {', '.join(names) or 'nothing'}",
            parameter="tool_choice",
            allowed=names,
        )
    rule = "required" if only is not None else raw or "auto"
    if rule == "required" and not names:
        raise InvalidParams("tool_choice required needs tools", parameter="tool_choice")
    return CallChoice(cast("CallRule", rule), only, parallel)


def checked_format(raw: object) -> Mapping[str, Any] | None:
    """The JSON schema that `response_format` asks for; None for text.

    Raises:
        InvalidParams: naming what is allowed.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise InvalidParams(f"response_format must be a map, not {type(raw).__name__}", parameter="response_format")
    check_plain("response_format", "response_format", raw)
    kind = raw.get("type")
    if kind not in FORMATS:
        raise InvalidParams(
            f"response_format.type must be {_any_of(FORMATS)}", parameter="response_format", allowed=list(FORMATS)
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    wrapped = raw.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidParams(
            "response_format.json_schema.schema must be a JSON schema, which is a map", parameter="response_format"
        )
    return schema


def _any_of(choices: Sequence[str]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
