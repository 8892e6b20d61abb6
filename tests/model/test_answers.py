"""Reasoning, text and calls of an answer, however the text is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.model.answers import AnswerFormat, AnswerReader, find_reasoning
from kvd.model.call_ends import CallEnds
from kvd.model.tool_calls import (
    _BY_TEMPLATE,
    _BY_VOCABULARY,
    MAX_CALL_CHARACTERS,
    MAX_UNKNOWN_CALL_CHARACTERS,
    ToolDialect,
    find_dialect,
    plain_dialect,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<a> \\u00e9", "n": 1}}\n</tool_call>'
THINK = ("<think>", "</think>")


class Names:
    """A vocabulary of control tokens."""

    def __init__(self, *control: str) -> None:
        self.control = control

    def id_of(self, token: str, /) -> int | None:
        """Its place."""
        return self.control.index(token) if token in self.control else None

    def is_control(self, token_id: int, /) -> bool:
        """All are."""
        return True


PLAIN = AnswerFormat(None, plain_dialect())
THINKS = AnswerFormat(THINK, plain_dialect())
MISTRAL = find_dialect("[TOOL_CALLS]", {})


def read(
    pieces: Sequence[str | tuple[str]],
    answers: AnswerFormat = THINKS,
    *,
    opening: str = "",
    reads_calls: bool = True,
    names: Names | None = None,
) -> tuple[dict[str, object], list[dict[str, object]]]:
    """The message and the events; a tuple is a control token."""
    reader = AnswerReader(answers, names or Names(), opening=opening, reads_calls=reads_calls)
    events: list[dict[str, object]] = []
    for piece in pieces:
        events += reader.feed(piece) if isinstance(piece, str) else reader.feed_control(piece[0])
    events += reader.end()
    message = reader.answer.message()
    for call in message.get("tool_calls", ()):
        assert len(call.pop("id")) == 9
        assert call.pop("type") == "function"
    return message, events


def streamed(events: Sequence[dict[str, object]], kind: str) -> str:
    """All text of one kind."""
    return "".join(str(event["text"]) for event in events if event["type"] == kind)


F_CALL = {"function": {"name": "f", "arguments": json.dumps({"x": "<a> é", "n": 1}, ensure_ascii=False)}}


@pytest.mark.parametrize(
    ("text", "opening", "reads_calls", "message"),
    [
        ("Hello\n", "", False, {"content": "Hello\n"}),
        (" Hello <b> ", "", True, {"content": " Hello <b> "}),
        (CALL, "", True, {"content": None, "tool_calls": [F_CALL]}),
        (f"I look.\n{CALL}\n{CALL}\n", "", True, {"content": "I look.", "tool_calls": [F_CALL, F_CALL]}),
        (CALL, "", False, {"content": CALL}),
        ("<think>\nhm\n</think>\n\nYes.", "", False, {"content": "Yes.", "reasoning_content": "hm"}),
        ("hm</think> Yes.", "<think>\n", True, {"content": "Yes.", "reasoning_content": "hm"}),
        ("Yes.", "<think>\n\n</think>\n\n", True, {"content": "Yes."}),
        ("\n\n<think>a < b</think>", "", True, {"content": "", "reasoning_content": "a < b"}),
        ("<think>never ends </thin", "", True, {"content": "", "reasoning_content": "never ends </thin"}),
        ("Say <think> aloud.", "", True, {"content": "Say <think> aloud."}),
        (f"<think>x</think>{CALL}", "", True, {"content": None, "reasoning_content": "x", "tool_calls": [F_CALL]}),
        ("<tool_call>{no json}</tool_call>!", "", True, {"content": "<tool_call>{no json}</tool_call>!"}),
        ('a <tool_call>\n{"name": "f"', "", True, {"content": 'a <tool_call>\n{"name": "f"'}),
        ("<tool_call>[1, 2]</tool_call>", "", True, {"content": "<tool_call>[1, 2]</tool_call>"}),
        (
            '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "parameters": {}}]</tool_call>',
            "",
            True,
            {
                "content": None,
                "tool_calls": [
                    {"function": {"name": "f", "arguments": "{}"}},
                    {"function": {"name": "g", "arguments": "{}"}},
                ],
            },
        ),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "", True, None),
    ],
)
@pytest.mark.parametrize("width", [1, 3, 1000])
def test_an_answer_is_taken_apart(
    text: str, opening: str, reads_calls: bool, message: dict[str, object] | None, width: int
) -> None:
    """Whatever the pieces: the same message, and the stream adds up to it; what cannot be read stays text."""
    pieces = [text[at : at + width] for at in range(0, len(text), width)]
    found, events = read(pieces, opening=opening, reads_calls=reads_calls)
    assert found == {"role": "assistant", **({"content": text} if message is None else message)}
    assert streamed(events, "text") == (found["content"] or "")
    assert streamed(events, "reasoning") == found.get("reasoning_content", "")
    calls = [event for event in events if event["type"] == "tool_call"]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len(calls) == len(found.get("tool_calls", ()))  # type: ignore[arg-type]


PARTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, " ", "\n", "x", "<", "é", '"', "\\"]
)


@given(st.lists(PARTS, max_size=8), st.randoms(use_true_random=False))
def test_pieces_make_no_difference(parts: list[str], random: object) -> None:
    """Any text, cut anywhere: message and streams are those of the whole text at once."""
    text = "".join(parts)
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(4))  # type: ignore[attr-defined]
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, events = read([text])
    parted, parted_events = read(pieces)
    assert parted == whole
    for kind in ("text", "reasoning"):
        assert streamed(parted_events, kind) == streamed(events, kind)


QWEN3_CODER = find_dialect("<tool_call>\n<function=", {})
GLM = find_dialect("<arg_key>", {})
HELD = 'a <tool_call>x</tool_call> \\ "q" </tool_call>'
"""A value that holds the markers, quotes and a backslash."""


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (plain_dialect(), json.dumps({"name": "f", "arguments": {"x": HELD}})),
        (plain_dialect(), json.dumps([{"name": "f", "arguments": {"x": HELD}}])),
        (find_dialect("<tool_call> tool_call.name", {}), json.dumps({"name": "f", "arguments": {"x": HELD}}, indent=1)),
        (QWEN3_CODER, f"<function=f>\n<parameter=x>\n{HELD}\n</parameter>\n</function>"),
        (GLM, f"f\n<arg_key>x</arg_key>\n<arg_value>{HELD}</arg_value>"),
    ],
    ids=["plain", "list", "json", "qwen3_coder", "glm47"],
)
@pytest.mark.parametrize("width", [1, 5, 1000])
def test_arguments_may_hold_the_end_marker(dialect: ToolDialect | None, body: str, width: int) -> None:
    """P32: an agent that writes about tool calls: its call ends where it ends, and the next one is read too."""
    assert dialect is not None
    text = f"See:\n<tool_call>\n{body}\n</tool_call>\n<tool_call>\n{body}\n</tool_call>"
    pieces = [text[at : at + width] for at in range(0, len(text), width)]
    message, events = read(pieces, AnswerFormat(THINK, dialect))
    assert message["content"] == "See:"
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"x": HELD}] * 2  # type: ignore[attr-defined]
    assert [event["type"] for event in events if event["type"] != "text"] == ["tool_call"] * 2


@pytest.mark.parametrize(
    "broken", ['{"name": "f}', '{"name": "f}\n', '{"x": "\\"}', '\\"', '{"name": "f", "x": "</tool_call>}']
)
@pytest.mark.parametrize("width", [1, 1000])
def test_a_broken_call_takes_no_other_with_it(broken: str, width: int) -> None:
    """P32: a quote too few: that call is text up to its first marker, and what follows is read as ever."""
    text = f"<tool_call>{broken}</tool_call> {CALL} and {CALL}"
    message, events = read([text[at : at + width] for at in range(0, len(text), width)])
    assert len(message["tool_calls"]) == 2  # type: ignore[arg-type]
    assert str(message["content"]).startswith(f"<tool_call>{broken}</tool_call>")
    assert streamed(events, "text") == message["content"]


def test_where_calls_end_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken calls, as many as fit: each letter is looked at a few times, not once for each call."""
    looked = 0
    scan = CallEnds._scan

    def counted(self: CallEnds, body: str, end: int) -> None:
        nonlocal looked
        before = self._scanned
        scan(self, body, end)
        looked += self._scanned - before

    monkeypatch.setattr(CallEnds, "_scan", counted)
    text = '<tool_call>\\"</tool_call>' * 2_000
    message, _ = read([text])
    assert message["content"] == text
    assert len(text) // 2 < looked <= 2 * len(text)


def test_a_model_without_markers_gives_its_text_unchanged() -> None:
    """Nothing is held back or trimmed where there is nothing to look for."""
    message, events = read([" a", "<think>", "\n"], AnswerFormat())
    assert message["content"] == " a<think>\n"
    assert [event["text"] for event in events] == [" a", "<think>", "\n"]


def test_markers_that_are_control_tokens() -> None:
    """They come by name, are seen by the parser, and are no text; the same letters in text are no marker."""
    assert MISTRAL is not None
    answers, names = AnswerFormat(None, MISTRAL), Names("[TOOL_CALLS]", "[ARGS]", "<x>")
    pieces = ["Wait ", ("<x>",), ("[TOOL_CALLS]",), "f", ("[ARGS]",), '{"x": 1}']
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    assert read(pieces, answers, names=names)[0] == {"role": "assistant", "content": "Wait", "tool_calls": [call]}
    text = "[TOOL_CALLS]f[ARGS]{}"
    assert read([text], answers, names=names)[0]["content"] == text
    unreadable = read([("[TOOL_CALLS]",), "no call"], answers, names=names)[0]
    assert unreadable == {"role": "assistant", "content": "no call"}


SIGNS = (
    *(sign for _, signs in (*_BY_TEMPLATE, *_BY_VOCABULARY) for sign in signs),
    *("", "<tool_call>", "<function=", "tool_call", "</tool_call>"),
)


@pytest.mark.parametrize("sign", SIGNS)
def test_the_parser_goes_with_the_template_as_mlx_lm_says(sign: str) -> None:
    """The table is mlx-lm's own choice, for each sign by itself and beside others, in template and vocabulary."""
    from mlx_lm.tokenizer_utils import _infer_tool_parser

    for other in SIGNS:
        source, words = f"{sign} {other}", [sign, other, "<|close|>", "<|sep|>", "<|end_of_msg|>"]
        for template, vocabulary in ((source, {}), ("", {word: i for i, word in enumerate(words)})):
            stand_in = SimpleNamespace(chat_template=template, get_vocab=lambda vocabulary=vocabulary: vocabulary)
            dialect = find_dialect(template, vocabulary)
            assert (dialect and dialect.name) == _infer_tool_parser(stand_in)


def test_a_folder_may_name_its_parser() -> None:
    """`tool_parser_type` wins, unless this mlx-lm has no such parser: then the template decides."""
    for source, otherwise in (("[TOOL_CALLS]", "mistral"), ("", None)):
        named = find_dialect(source, {}, "glm47")
        assert named is not None
        assert named.name == "glm47"
        for unknown in ("of_tomorrow", "../x", "os", ""):
            later = find_dialect(source, {}, unknown)
            assert (later and later.name) == otherwise


@pytest.mark.parametrize(
    "result",
    [
        None,
        [],
        {"name": "", "arguments": {}},
        {"name": 3, "arguments": {}},
        {"name": "f", "arguments": [1]},
        {"name": "f", "arguments": "no json"},
        {"name": "f", "arguments": {"x": float("inf")}},
        {"name": "f", "arguments": {"x": "\ud800"}},
        {"name": "f", "arguments": {"x": object()}},
        [{"name": "f", "arguments": {}}, 3],
    ],
)
def test_what_a_parser_returns_is_checked(result: object) -> None:
    """P32: a parser of somebody else's may return anything; no half call reaches a client."""
    assert ToolDialect("x", "a", "b", lambda body, tools: result).parse("", None) is None


def test_a_call_that_is_too_long_is_text() -> None:
    """Parsers of patterns may take more than linear time; JSON has room for a whole file."""
    body = json.dumps({"name": "f", "arguments": {"text": "x" * MAX_CALL_CHARACTERS}})
    assert plain_dialect().parse(body, None) is not None
    assert plain_dialect().parse(" " * 1_000_000 + body, None) is None


HOSTILE = {
    "function_gemma": "call:a{",
    "gemma4": "call:a{",
    "glm47": "<arg_key></arg_key><arg_value>",
    "kimi_k2": "<|tool_call_begin|>",
    "kimi_k3": "<|open|>call",
    "longcat": "<longcat_arg_key></longcat_arg_key><longcat_arg_value>",
    "minicpm5": "<param name=x>",
    "minimax_m2": "<invoke name=",
    "mistral": "",
    "muse_spark": "<atem:parameter ",
    "pythonic": "[a(",
    "qwen3_coder": "<parameter=",
}
"""By parser: what it searches from, and never finds the end of."""


@pytest.mark.parametrize("name", sorted({row[0] for row in (*_BY_TEMPLATE, *_BY_VOCABULARY)} - {"json_tools"}))
def test_a_call_that_takes_long_to_read_is_text(name: str) -> None:
    """Such a call is given to no parser, which would hold up all chats for seconds or minutes; a short one is."""
    given: list[int] = []
    dialect = ToolDialect(name, "a", "b", lambda text, tools: given.append(len(text)))
    piece = HOSTILE[name] or "a"
    assert dialect.parse(piece * (MAX_CALL_CHARACTERS // len(piece) + 1), None) is None
    if HOSTILE[name]:
        assert dialect.parse(piece * (MAX_CALL_CHARACTERS // len(piece)), None) is None
    assert given == []
    dialect.parse(piece * 5, None)
    assert given == [5 * len(piece)]


def test_a_parser_that_is_not_known_gets_short_calls() -> None:
    """Nobody has measured what long ones cost it."""
    dialect = ToolDialect("another", "a", "b", lambda text, tools: {"name": "f", "arguments": {}})
    assert dialect.parse("x" * MAX_UNKNOWN_CALL_CHARACTERS, None) is not None
    assert dialect.parse("x" * (MAX_UNKNOWN_CALL_CHARACTERS + 1), None) is None


LONG_VALUE = "if a[0] == b['c'] and not (d < e): print(f(x))" * 2_000
OTHERS = [(f"k{number}", str(number)) for number in range(9)]
VALUES = [*OTHERS, ("x", LONG_VALUE)]


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (
            GLM,
            "f" + "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in VALUES),
        ),
        (
            QWEN3_CODER,
            "<function=f>" + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in VALUES) + "</function>",
        ),
        (MISTRAL, json.dumps([{"name": "f", "arguments": dict(VALUES)}])),
        (find_dialect("<|tool_call_start|>", {}), f"[f(k0='0', x={LONG_VALUE!r})]"),
        (find_dialect("<|tool_call><tool_call|>", {}), f'call:f{{k0:<|"|>0<|"|>,x:<|"|>{LONG_VALUE}<|"|>}}'),
    ],
    ids=["glm47", "qwen3_coder", "mistral", "pythonic", "gemma4"],
)
def test_a_call_that_writes_a_long_file_is_read(dialect: ToolDialect | None, body: str) -> None:
    """P32: agents write files: a value of 90,000 characters of code beside others comes out as it went in."""
    assert dialect is not None
    (call,) = dialect.parse(body, None) or ()
    assert json.loads(call.arguments)["x"] == LONG_VALUE
    assert "k0" in json.loads(call.arguments)


@pytest.mark.parametrize("error", [ValueError, KeyError, RecursionError, SyntaxError, AttributeError, MemoryError])
def test_what_a_parser_raises_is_no_error(error: type[Exception]) -> None:
    """A call that cannot be read is text."""

    def parser(body: str, tools: object) -> object:
        raise error

    assert ToolDialect("x", "a", "b", parser).parse("", None) is None


def test_reasoning_is_known_by_vocabulary_or_template() -> None:
    """Both markers must be there; otherwise a template's remark on `<think>` would make a model think."""
    assert find_reasoning("", Names("<think>", "</think>")) == THINK
    assert find_reasoning("{% if '</think>' in x %}<think>", Names()) == THINK
    assert find_reasoning("", Names("<|channel>", "<channel|>")) == ("<|channel>thought", "<channel|>")
    assert find_reasoning("<think>", Names("</think>")) is None
    assert THINKS.is_thinking("<|im_start|>assistant\n<think>\n")
    assert not THINKS.is_thinking("<think>\n\n</think>\n\n")
    assert not PLAIN.is_thinking("<think>")
