"""Calls with arguments in tags of their own, as Qwen3-Coder writes them, as a grammar.

    <tool_call>
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Theory of operation. A string stands there bare, everything else as JSON, and whoever reads the call goes by the `type`
that the schema states for the argument. So what can be held to is what is read back as it was meant: strings of any
text, choices of strings, and JSON of the other types. A string that reads `null` is read as nothing, so none does.
Arguments come in the order of the schema; those that are not required may be left out, others than the schema's are not
written.

What cannot be held to (a pattern, a length, several types for one argument) is refused for strict functions, with its
name, and any text for others.

Pure. May import kvd.model.errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from kvd.model.errors import UnsupportedFeature

DIALECT: Final = "qwen3_coder"
_END: Final = "</parameter>"
_NAME: Final = re.compile(r"[^\s<>]+")
_TEXT_KEYS: Final = frozenset({"type", "title", "description", "default", "examples", "enum", "const"})
_JSON_TYPES: Final = ("integer", "number", "boolean", "object", "array", "null")


class Rules(Protocol):
    """The grammar that is being written."""

    def add(self, name: str, body: str) -> None:
        """A rule."""

    def add_json(self, name: str, schema: Mapping[str, Any], *, is_lenient: bool = False) -> None:
        """A rule for JSON of a schema."""


def tag_calls(rules: Rules, functions: Sequence[Mapping[str, Any]], *, is_loose: bool) -> str:
    """Name of the rule for what stands between the markers of a call.

    Args:
        rules: gets the rules.
        functions: that may be called.
        is_loose: arguments of functions that are not strict may be any, whatever their schemas say.

    Raises:
        UnsupportedFeature: a strict function has what cannot be held to.
    """
    # up to the tag's end, without such a tag inside, and not what is read as nothing
    rules.add("NOEND", f"/(?s:.*)/ & ~(/(?s:.*)/ {json.dumps(_END)} /(?s:.*)/) & ~/(?i:null)/")
    rules.add("value[lazy]", f"NOEND {json.dumps(chr(10) + _END)}")
    for number, function in enumerate(functions):
        name, is_strict = str(function["name"]), bool(function.get("strict"))
        if not _NAME.fullmatch(name):
            raise _cannot(f"the function name {name!r}", "names have no white space and no < or >")
        names_fit = all(map(_NAME.fullmatch, (function.get("parameters") or {}).get("properties") or ()))
        if not is_strict and (is_loose or not names_fit):
            arguments = r'("<parameter=" /[^\s<>]+/ ">\n" value "\n")*'
        else:
            arguments = _arguments(rules, f"argument_{number}", name, function.get("parameters") or {}, is_strict)
        head, tail = json.dumps(f"\n<function={name}>\n"), json.dumps("</function>\n")
        rules.add(f"call_{number}", f"{head} {arguments} {tail}")
    rules.add("call", " | ".join(f"call_{number}" for number in range(len(functions))))
    return "call"


def _arguments(rules: Rules, prefix: str, function: str, schema: Mapping[str, Any], is_strict: bool) -> str:
    """The arguments of a function, in the order of its schema."""
    required = schema.get("required") or ()
    parts = []
    for number, (name, argument) in enumerate((schema.get("properties") or {}).items()):
        where = f"{function}.{name}"
        if not _NAME.fullmatch(name):
            raise _cannot(where, "names have no white space and no < or >")
        rule = f"{prefix}_{number}"
        body = _value(rules, rule, where, argument, schema, is_strict)
        rules.add(rule, f"{json.dumps(f'<parameter={name}>' + chr(10))} {body} {json.dumps(chr(10))}")
        parts.append(rule if name in required else f"{rule}?")
    if is_strict and (missing := set(required) - set(schema.get("properties") or ())):
        raise _cannot(f"{function}.{min(missing)}", "it is required, and the schema does not say what it is")
    return " ".join(parts)


def _value(rules: Rules, rule: str, where: str, argument: object, root: Mapping[str, Any], is_strict: bool) -> str:
    """The value of an argument, and its end tag."""
    meant = _resolved(argument, root)
    kind = argument.get("type") if isinstance(argument, Mapping) else None
    options = [meant["const"]] if "const" in meant else meant.get("enum")
    if kind in (None, "string") and options and all(map(_is_plain, options)):
        return "(" + " | ".join(json.dumps(f"{option}\n{_END}") for option in options) + ")"
    if kind in _JSON_TYPES or (kind is None and meant.get("type") in ("object", "array")):
        kept = {name: root[name] for name in ("$defs", "definitions") if name in root}
        rules.add_json(f"{rule}_json", {**kept, **meant}, is_lenient=not is_strict)
        return f"{rule}_json {json.dumps(chr(10) + _END)}"
    if is_strict and not (kind == "string" and meant.keys() <= _TEXT_KEYS and not options):
        raise _cannot(
            where, f"an argument has one type: string (any text, or an enum of plain texts), {', '.join(_JSON_TYPES)}"
        )
    return "value"


def _resolved(argument: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema's `$ref` to one of its root's definitions leads to; anything else as it is."""
    if not isinstance(argument, Mapping):
        return {}
    reference = argument.get("$ref")
    if isinstance(reference, str) and (found := re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference)):
        target = (root.get(found[1]) or {}).get(found[2])
        return target if isinstance(target, Mapping) else argument
    return argument


def _is_plain(option: object) -> bool:
    """Whether a text of a choice is read back as itself."""
    if not isinstance(option, str) or _END in option or option.lower() == "null" or option[:1] in ("[", "{", "\n"):
        return False
    return not option.endswith("\n")


def _cannot(what: str, allowed: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"{what} cannot be held to in the form {DIALECT!r}, in which this model writes calls: {allowed}; "
        "leave strict out",
        feature="tools",
        parameter="tools",
        dialect=DIALECT,
    )


__all__ = ["DIALECT", "tag_calls"]
