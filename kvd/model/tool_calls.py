"""How a model writes tool calls: the parsers of mlx-lm behind one type, and one of our own for models without any.

Theory of operation. mlx-lm knows which of its parsers goes with a chat template or a vocabulary; that choice is asked
for with a stand-in for its tokenizer, so that no second tokenizer is loaded. A model for which it knows none is shown
its tools as text (`kvd.model.plain_tools`) and answers in the *plain* dialect: JSON between `<tool_call>` and
`</tool_call>`, one object or a list of them.

What a parser returns is checked here, whatever it did: names are text, arguments are objects that JSON can hold. A
call that cannot be read is no error: it is text, and the client sees it as such.

May import mlx_lm, inside functions only.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

PLAIN: Final = "plain"
"""Name of kvd's own dialect."""

PLAIN_START: Final = "<tool_call>"
PLAIN_END: Final = "</tool_call>"

MAX_CALL_CHARACTERS: Final = 1_000_000
"""A longer call is text: parsers take several times their input in memory, and some of them more than linear time."""

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
        if len(body) > MAX_CALL_CHARACTERS:
            return None
        try:
            found = self.parser(body, tools)
        except _PARSER_ERRORS:
            return None
        entries = found if isinstance(found, list) else [found]
        calls = [_checked(entry) for entry in entries]
        good = [call for call in calls if call is not None]
        return good if good and len(good) == len(calls) else None


def find_dialect(source: str, vocabulary: Mapping[str, int], named: str | None = None) -> ToolDialect | None:
    """The dialect of mlx-lm's that goes with a model.

    Args:
        source: its chat template.
        vocabulary: token strings to ids.
        named: `tool_parser_type` of its `tokenizer_config.json`; it wins, if this mlx-lm has such a parser.

    Returns:
        None when mlx-lm knows none.
    """
    from mlx_lm import tokenizer_utils

    stand_in = SimpleNamespace(chat_template=source, get_vocab=lambda: vocabulary)
    for name in (named, tokenizer_utils._infer_tool_parser(stand_in)):
        if isinstance(name, str) and name.isidentifier():
            try:
                module: Any = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
            except ImportError:  # of a later mlx-lm
                continue
            return ToolDialect(name, module.tool_call_start, module.tool_call_end, module.parse_tool_call)
    return None


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
