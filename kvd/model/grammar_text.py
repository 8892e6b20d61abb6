"""What an answer may be, written as a grammar: response formats, tool calls, reasoning before either.

Theory of operation. A grammar is text in llguidance's dialect of Lark; `kvd.model.grammar` compiles it. Everything a
client sends goes in as JSON (schemas by `%json`, names and markers as quoted strings), so nothing of it is read as
grammar. Schemas of different functions stay apart, since their `$ref`s count from their own roots.

Strict functions and response formats are held to all of their schemas, or refused with what cannot be held to. Other
functions that must be called are held to what of their schemas can be.

White space inside of JSON is bounded: a small model that may go on with spaces for ever does.

Pure. May import kvd.errors and this package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvd.errors import InvalidParams
from kvd.model.answers import AnswerFormat, TokenNames, split_marker
from kvd.model.errors import UnsupportedFeature
from kvd.model.grammar_tags import DIALECT as TAGS
from kvd.model.grammar_tags import tag_calls
from kvd.model.tool_calls import JSON_DIALECTS, ToolDialect

MAX_SCHEMA_CHARACTERS: Final = 65_536
"""Of all schemas of a request, as JSON."""

CallRule = Literal["auto", "none", "required"]

_JSON_OPTIONS: Final = {"whitespace_pattern": r"(\n[ ]{0,32}|[ ]{1,2})"}
_MISTRAL: Final = "mistral"
_MISTRAL_ARGUMENTS: Final = "[ARGS]"
_HELD: Final = (*JSON_DIALECTS, _MISTRAL, TAGS)
"""Forms of calls that masks can hold a model to."""


@dataclass(frozen=True, slots=True)
class CallChoice:
    """What a request says of calls.

    Attributes:
        rule: `auto` lets the model decide, `none` keeps it from calling, `required` makes it call.
        only: the one function that may be called; None for any.
        parallel: several calls in one answer are allowed.
    """

    rule: CallRule = "auto"
    only: str | None = None
    parallel: bool = True


def answer_grammar(
    answers: AnswerFormat,
    codec: TokenNames,
    *,
    schema: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    choice: CallChoice | None = None,
    opening: str = "",
    is_loose: bool = False,
) -> str | None:
    """The grammar of an answer; None where any text will do.

    Args:
        answers: the model's markers.
        codec: its vocabulary.
        schema: JSON schema of the answer; None for text.
        tools: functions that may be called, in the OpenAI form.
        choice: what the request says of calls.
        opening: control text that the answer begins behind.
        is_loose: arguments of functions that are not strict may be any object, whatever their schemas say.

    Raises:
        InvalidParams: schemas that are too large.
        UnsupportedFeature: the model writes calls in a form that masks cannot hold it to.
    """
    choice = choice or CallChoice()
    rules = _Rules(codec)
    calls = (
        _calls(rules, answers, tools, choice, alone=schema is None, is_loose=is_loose)
        if tools and answers.tools
        else None
    )
    if schema is not None:
        rules.add_json("answer", schema)
    if calls is None and schema is None:
        return None
    body = calls or "answer"
    if calls is not None and schema is not None:
        body = {"auto": f"answer | {calls}", "none": "answer", "required": calls}[choice.rule]
    rules.add("body", body)
    rules.check_schemas("tools" if schema is None else "response_format")
    return rules.text(_reasoning(rules, answers, opening))


class _Rules:
    """A grammar that is being written. Owner: `answer_grammar`."""

    def __init__(self, codec: TokenNames) -> None:
        self._codec = codec
        self._lines: list[str] = []
        self._schema_characters = 0

    def add(self, name: str, body: str) -> None:
        """A rule."""
        self._lines.append(f"{name}: {body}")

    def add_json(self, name: str, schema: Mapping[str, Any], *, is_lenient: bool = False) -> None:
        """A rule for JSON of a schema; `is_lenient`: what of it cannot be held to is left out."""
        options = {**_JSON_OPTIONS, "lenient": is_lenient}
        written = json.dumps({**schema, "x-guidance": options}, ensure_ascii=True)
        self._schema_characters += len(written)
        self.add(name, f"%json {written}")

    def knows(self, token: str) -> bool:
        """Whether the vocabulary has a token."""
        return self._codec.id_of(token) is not None

    def literal(self, marker: str) -> str:
        """A marker, of text and control tokens."""
        parts = split_marker(marker, self._codec)
        return " ".join(json.dumps(text) if token is None else f"<[{token}]>" for text, token in parts)

    def up_to(self, name: str, marker: str) -> str:
        """Any text up to a marker, and the marker; the name of a rule for it."""
        parts = split_marker(marker, self._codec)
        if parts[0][1] is not None:  # a control token: text cannot hold it
            self.add(name, f"TEXT {self.literal(marker)}")
        else:
            first, rest = parts[0][0], self.literal("".join(text for text, _ in parts[1:])) if parts[1:] else ""
            self.add(f"{name}_first[lazy]", f"TEXT {json.dumps(first)}")
            self.add(name, f"{name}_first {rest}".rstrip())
        return name

    def without(self, name: str, marker: str) -> str:
        """Any text that does not hold a marker."""
        first, token = split_marker(marker, self._codec)[0]
        if token is not None:
            return "TEXT"
        self.add(name.upper(), f"/(?s:.*)/ & ~(/(?s:.*)/ {json.dumps(first)} /(?s:.*)/)")
        return name.upper()

    def check_schemas(self, parameter: str) -> None:
        """Refuse more than a compiler should be given; `parameter` it came in."""
        if self._schema_characters > MAX_SCHEMA_CHARACTERS:
            raise InvalidParams(
                f"the JSON schemas have {self._schema_characters} characters, of {MAX_SCHEMA_CHARACTERS} at most",
                parameter=parameter,
            )

    def text(self, reasoning: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {reasoning}body", *self._lines, "TEXT: /(?s:.*)/", r"SPACE: /[ \n]{0,4}/", ""])


def _reasoning(rules: _Rules, answers: AnswerFormat, opening: str) -> str:
    """What may come before the body."""
    if answers.reasoning is None:
        return ""
    start, end = answers.reasoning
    thought = rules.up_to("thought", end)
    if answers.is_thinking(opening):
        return f"{thought} SPACE "
    return f"({rules.literal(start)} {thought} SPACE)? "


def _calls(
    rules: _Rules,
    answers: AnswerFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: CallChoice,
    *,
    alone: bool,
    is_loose: bool,
) -> str | None:
    """The body for tools; None where it need not be held to anything.

    `alone`: an answer without calls is free text.
    """
    dialect = answers.tools
    assert dialect is not None
    if choice.rule == "none":
        return rules.without("nocall", dialect.start)
    functions = [tool["function"] for tool in tools]
    is_strict = any(function.get("strict") for function in functions)
    if choice.rule == "auto" and alone and choice.parallel and not is_strict:
        return None
    if choice.only is not None:
        functions = [function for function in functions if function["name"] == choice.only]
    if dialect.name not in _HELD and (choice.only is not None or is_strict or not dialect.end):
        raise UnsupportedFeature(
            f"this model writes calls in the form {dialect.name!r}, which masks cannot hold it to; strict tools and a "
            f"tool_choice that names a function are for the forms {', '.join(_HELD)}; leave them out",
            feature="tools",
            parameter="tools",
            dialect=dialect.name,
        )
    several = choice.parallel and choice.only is None
    calls = f"{rules.literal(dialect.start)} tail"
    rules.add("tail", _tail(rules, dialect, functions, several=several, is_loose=is_loose))
    if dialect.name == _MISTRAL and not rules.knows(_MISTRAL_ARGUMENTS):
        several = False  # one list has them all
    if several:
        rules.add("calls", f"{calls} (SPACE {calls})*")
        calls = "calls"
    if choice.rule == "required" or not alone:
        return calls
    before = rules.up_to("before", dialect.start)
    free = rules.without("nocall", dialect.start)
    return f"({before} tail)* {free}" if several else f"{free} | {before} tail"


def _tail(
    rules: _Rules, dialect: ToolDialect, functions: Sequence[Mapping[str, Any]], *, several: bool, is_loose: bool
) -> str:
    """What follows the marker that a call begins with."""
    if dialect.name == TAGS:
        return f"{tag_calls(rules, functions, is_loose=is_loose)} {rules.literal(dialect.end)}"
    is_json = dialect.name in JSON_DIALECTS
    if not is_json and dialect.name != _MISTRAL:
        return rules.up_to("call", dialect.end)
    name_first = not is_json and rules.knows(_MISTRAL_ARGUMENTS)
    for number, function in enumerate(functions):
        strict = bool(function.get("strict"))
        schema = function.get("parameters") if strict or not is_loose else None
        # whatever its schema says: arguments are an object
        rules.add_json(f"arguments_{number}", {"type": "object", **(schema or {})}, is_lenient=not strict)
        if name_first:
            head = f"{json.dumps(function['name'])} {rules.literal(_MISTRAL_ARGUMENTS)}"
            rules.add(f"call_{number}", f"{head} arguments_{number}")
        else:
            head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
            rules.add(f"call_{number}", f'{head} arguments_{number} "}}"')
    rules.add("call", " | ".join(f"call_{number}" for number in range(len(functions))))
    if is_json:
        return f'"\\n" call "\\n" {rules.literal(dialect.end)}'
    if name_first:
        return "call"
    return '"[" call (", " call)* "]"' if several else '"[" call "]"'
