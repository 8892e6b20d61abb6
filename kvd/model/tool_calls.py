"""How a model writes tool calls: the parsers of mlx-lm behind one type, and one of our own for models without any.

Theory of operation. Which of mlx-lm's parsers goes with a model is seen by what its template writes, or by the control
tokens of its vocabulary; the table here says the same as mlx-lm's own choice, which cannot be asked without importing
all of it (`kvd.model.mlx_lm_door`). A model for which there is none is shown its tools as text
(`kvd.model.plain_tools`) and answers in the *plain* dialect: JSON between `<tool_call>` and `</tool_call>`, one object
or a list of them.

What a parser returns is checked here, whatever it did: names are text, arguments are objects that JSON can hold. A
call that cannot be read is no error: it is text, and the client sees it as such.

May import this package; mlx_lm inside functions only.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvd.model import mlx_lm_door

PLAIN: Final = "plain"
"""Name of kvd's own dialect."""

JSON_DIALECTS: Final = (PLAIN, "json_tools")
"""Dialects whose calls are JSON objects with `name` and `arguments`, each between the markers."""

PLAIN_START: Final = "<tool_call>"
PLAIN_END: Final = "</tool_call>"

MAX_CALL_CHARACTERS: Final = 131_072
"""A longer call is text: mlx-lm's parsers search with patterns that take more than linear time."""

MAX_JSON_CALL_CHARACTERS: Final = 1_000_000
"""The same where a call is nothing but JSON."""

MAX_UNKNOWN_CALL_CHARACTERS: Final = 8_192
"""The same for a parser that `_SEARCHES` does not know."""

_SEARCHES: Final[Mapping[str, tuple[tuple[str, ...], int]]] = {
    "function_gemma": ((r"call:\w+\{",), 16_000_000),
    "gemma4": ((r"call:[\w-]+\{",), 1_000_000),
    "glm47": (("<arg_key>", "</arg_key>"), 1_000_000_000),
    "kimi_k2": ((r"<\|tool_call_begin\|>",), 256_000_000),
    "kimi_k3": ((r"<\|open\|>",), 2_000_000),
    "longcat": (("<longcat_arg_key>", "</longcat_arg_key>"), 1_000_000_000),
    "minicpm5": (("<param",), 256_000_000),
    "minimax_m2": (("<invoke|<parameter",), 256_000_000),
    "mistral": ((), MAX_CALL_CHARACTERS),
    "muse_spark": (("<atem:",), 4_000_000),
    "pythonic": ((r"\[[\w.]+\(",), 256_000_000),
    "qwen3_coder": (("<function=|<parameter=",), 256_000_000),
}
"""What mlx-lm's parsers search from, as patterns: from each of the first, behind each of the second, to a call's end.

So a call costs its length times how often it has them. Beside each is how much of that takes about 0.1 s. Calls that
close what they open cost less than that, so the bounds leave room: 100,000 characters in a dozen arguments are fine.
"""

_BY_TEMPLATE: Final = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("qwen3_coder", ("<tool_call>\\n<function=",)),
    ("qwen3_coder", ("<tool_call>\n<function=",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("muse_spark", ("<atem:function_calls>",)),
    ("json_tools", ("<tool_call>", "tool_call.name")),
)
"""Parsers and what is in the templates that they go with; the first row that fits counts."""

_BY_VOCABULARY: Final = (
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    ("pythonic", ("<|tool_call_start|>", "<|tool_call_end|>")),
)

_PARSER_ERRORS: Final = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError),
    *(RecursionError, SyntaxError, TypeError, ValueError),
)
"""What mlx-lm's parsers raise for what they cannot read; they promise nothing narrower."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call.

    Attributes:
        name: of the function.
        arguments: JSON of an object.
        call_id: what the model itself calls it; None in most dialects.
    """

    name: str
    arguments: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """What calls look like in a model's text.

    Attributes:
        name: of the parser.
        start: marker before a call, or before several.
        end: marker after it; empty where a call reaches to the end of the answer.
        parser: mlx-lm's function (text between the markers, tools) -> a map or a list of maps.
    """

    name: str
    start: str
    end: str
    parser: Callable[[str, Sequence[Mapping[str, Any]] | None], object]

    def parse(self, body: str, tools: Sequence[Mapping[str, Any]] | None) -> list[ParsedCall] | None:
        """The calls between two markers; None when they cannot be read.

        Args:
            body: text between the markers, with the names of control tokens in it.
            tools: what the model was shown; some dialects have untyped values and need the schemas.
        """
        if not self._is_affordable(body):
            return None
        try:
            found = self.parser(body, tools)
        except _PARSER_ERRORS:
            return None
        entries = found if isinstance(found, list) else [found]
        calls = [_checked(entry) for entry in entries]
        good = [call for call in calls if call is not None]
        return good if good and len(good) == len(calls) else None

    def _is_affordable(self, body: str) -> bool:
        """Whether reading a body is certain to take no longer than others can wait."""
        if self.name in JSON_DIALECTS:
            return len(body) <= MAX_JSON_CALL_CHARACTERS
        if self.name not in _SEARCHES:
            return len(body) <= MAX_UNKNOWN_CALL_CHARACTERS
        if len(body) > MAX_CALL_CHARACTERS:
            return False
        markers, steps = _SEARCHES[self.name]
        return len(body) * math.prod(len(re.findall(each, body)) for each in markers) <= steps


def find_dialect(source: str, vocabulary: Mapping[str, int], named: str | None = None) -> ToolDialect | None:
    """The dialect of mlx-lm's that goes with a model.

    Args:
        source: its chat template.
        vocabulary: token strings to ids.
        named: `tool_parser_type` of its `tokenizer_config.json`; it wins, if this mlx-lm has such a parser.

    Returns:
        None when mlx-lm knows none.
    """
    mlx_lm_door.prepare()
    for name in (named, _chosen(_BY_TEMPLATE, source) or _chosen(_BY_VOCABULARY, vocabulary)):
        if name is not None and name.isidentifier():
            try:
                module: Any = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
            except ImportError:  # of a later mlx-lm
                continue
            return ToolDialect(name, module.tool_call_start, module.tool_call_end, module.parse_tool_call)
    return None


def _chosen(table: Sequence[tuple[str, Sequence[str]]], given: Container[str]) -> str | None:
    """The first parser of a table all of whose signs are there."""
    return next((name for name, signs in table if all(sign in given for sign in signs)), None)


def plain_dialect() -> ToolDialect:
    """The dialect of models that are shown their tools as text."""
    return ToolDialect(PLAIN, PLAIN_START, PLAIN_END, _parse_plain)


def _parse_plain(body: str, _tools: Sequence[Mapping[str, Any]] | None = None) -> object:
    """JSON: an object or a list; small models often close one bracket too few or repeat the end, which is no JSON."""
    return json.loads(body.strip())


def _checked(entry: object) -> ParsedCall | None:
    """A parser's map as a call; None when it is none."""
    if not isinstance(entry, Mapping):
        return None
    name = entry.get("name")
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (TypeError, ValueError, RecursionError):
        return None
    call_id = entry.get("id")
    return ParsedCall(name, written, call_id if isinstance(call_id, str) and call_id else None)
