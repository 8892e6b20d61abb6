"""Masks for calls with arguments in tags: what is written under them is read back as the schema says."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from kvd.model.answers import AnswerFormat
from kvd.model.errors import UnsupportedFeature
from kvd.model.grammar import GrammarCompiler
from kvd.model.grammar_text import CallChoice, answer_grammar
from kvd.model.tokenizer import TextCodec
from kvd.model.tool_calls import ToolDialect, find_dialect
from tests.support.tiny_sentencepiece import sentencepiece

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "enum": [1, 7]},
        "exact": {"type": "boolean"},
        "unit": {"type": "string", "enum": ["°C", "K"]},
        "box": {"type": "array", "items": {"$ref": "#/$defs/side"}, "maxItems": 2},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["city", "days", "box"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Zürich"]}, "side": {"type": "integer", "minimum": 0, "maximum": 9}},
}


def tool(parameters: object, *, strict: bool = True, name: str = "weather") -> list[dict[str, Any]]:
    """One function."""
    return [{"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}]


def tags() -> ToolDialect:
    """Qwen3-Coder's form."""
    found = find_dialect("<tool_call>\n<function=", {})
    assert found is not None
    assert found.name == "qwen3_coder"
    return found


def grammar_of(codec: TextCodec, tools: list[dict[str, Any]], choice: CallChoice, **more: bool) -> str:
    """The grammar of an answer."""
    grammar = answer_grammar(AnswerFormat(None, tags()), codec, tools=tools, choice=choice, **more)
    assert grammar is not None
    return grammar


def written(codec: TextCodec, grammar: str, seed: int, most: int = 900) -> str:
    """What random logits write under a mask, control tokens by name; cut at `most` tokens."""
    mask, rng, ids = GrammarCompiler(codec, codec.token_count).compile(grammar), np.random.default_rng(seed), [9]
    for _ in range(most):
        logits = rng.standard_normal(codec.token_count).astype(np.float32)
        logits[sorted(codec.eos_ids)] += 4.0
        token = int(np.argmax(mask(ids, logits)))
        if token in codec.eos_ids:
            break
        ids.append(token)
    return b"".join(codec.token_bytes(token) for token in ids[1:]).decode()


def accepts(codec: TextCodec, grammar: str, text: str) -> bool:
    """Whether a text may be written to its end."""
    mask, ids = GrammarCompiler(codec, codec.token_count).compile(grammar), [9]
    for token in codec.encode_content(text):
        if not np.isfinite(mask(ids, np.zeros(codec.token_count, np.float32))[token]):
            return False
        ids.append(token)
    return bool(np.isfinite(mask(ids, np.zeros(codec.token_count, np.float32))[min(codec.eos_ids)]))


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """A vocabulary of bytes and few words."""
    return sentencepiece()


@pytest.mark.parametrize("control", [(), ("<tool_call>", "</tool_call>")])
def test_any_logits_give_calls_that_read_as_the_schema_says(control: tuple[str, ...]) -> None:
    """P32: random models: by the dialect's own parser each argument has its type, and those that must be are there."""
    codec, dialect = sentencepiece(*control), tags()
    tools = tool(PARAMETERS)
    grammar = grammar_of(codec, tools, CallChoice("required", "weather"))
    for seed in range(4):
        text = written(codec, grammar, seed)
        assert text.startswith(dialect.start)
        body, end, rest = text.removeprefix(dialect.start).partition(dialect.end)
        assert (end, rest) == (dialect.end, "")
        calls = dialect.parse(body, tools)
        assert calls is not None
        ((name, arguments),) = [(call.name, json.loads(call.arguments)) for call in calls]
        assert name == "weather"
        jsonschema.validate(arguments, PARAMETERS)


def call(*arguments: tuple[str, str], name: str = "say") -> str:
    """A call as the model writes it."""
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def test_strings_are_any_text_that_reads_as_one(codec: TextCodec) -> None:
    """Several lines, tags of other kinds, nothing at all; not what ends the argument early or reads as null."""
    tools = tool(
        {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}, "required": ["text"]}, name="say"
    )
    grammar = grammar_of(codec, tools, CallChoice("required", "say"))
    for text in ("a", "", "a\nb\n", "<b>1 < 2</b>", "</param", "nullable", '{"a": 1}', "7"):
        said = call(("text", text))
        assert accepts(codec, grammar, said), text
        (found,) = tags().parse(said.removeprefix("<tool_call>").removesuffix("</tool_call>"), tools) or ()
        assert json.loads(found.arguments) == {"text": text}
    for wrong in ("null", "NULL", "a</parameter>\nb"):
        assert not accepts(codec, grammar, call(("text", wrong))), wrong
    assert accepts(codec, grammar, call(("text", "a"), ("n", "7")))
    assert not accepts(codec, grammar, call(("text", "a"), ("n", "x")))
    assert not accepts(codec, grammar, call(("n", "7")))
    assert not accepts(codec, grammar, call(("text", "a"), ("more", "b")))


def test_a_call_that_the_model_begins_by_itself_is_held_to(codec: TextCodec) -> None:
    """Strict functions leave it free until it calls."""
    grammar = grammar_of(codec, tool(PARAMETERS), CallChoice())
    assert accepts(codec, grammar, "I think so")
    assert not accepts(codec, grammar, "I call <tool_call>\n<function=other>\n</function>\n</tool_call>")


REFUSED: tuple[tuple[object, str], ...] = (
    ({"type": "string", "maxLength": 3}, "weather.x"),
    ({"type": "string", "pattern": "a+"}, "weather.x"),
    ({"type": ["string", "null"]}, "weather.x"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "weather.x"),
    ({"enum": [1, 2]}, "weather.x"),
    ({"type": "string", "enum": ["a", "null"]}, "weather.x"),
    ({}, "weather.x"),
)


@pytest.mark.parametrize(("argument", "named"), REFUSED, ids=[json.dumps(argument) for argument, _ in REFUSED])
def test_what_would_not_read_back_is_refused_where_it_is_promised(
    codec: TextCodec, argument: object, named: str
) -> None:
    """Strict functions by name, with what is allowed; others take any text there, and are called all the same."""
    parameters = {"type": "object", "properties": {"x": argument}, "required": ["x"]}
    with pytest.raises(UnsupportedFeature, match=named) as refused:
        grammar_of(codec, tool(parameters), CallChoice("required"))
    assert "'qwen3_coder'" in refused.value.message
    assert refused.value.data["parameter"] == "tools"
    loose = grammar_of(codec, tool(parameters, strict=False), CallChoice("required", "weather"))
    assert accepts(codec, loose, call(("x", "any"), name="weather"))


def test_names_that_tags_cannot_carry_are_refused(codec: TextCodec) -> None:
    """White space and angle brackets end a name."""
    with pytest.raises(UnsupportedFeature, match=r"weather\.a b"):
        grammar_of(codec, tool({"properties": {"a b": {"type": "string"}}}), CallChoice("required"))
    with pytest.raises(UnsupportedFeature, match="'a>b'"):
        grammar_of(codec, tool({}, name="a>b"), CallChoice("required"))
    with pytest.raises(UnsupportedFeature, match=r"weather\.y"):
        grammar_of(codec, tool({"properties": {}, "required": ["y"]}), CallChoice("required"))


def test_loose_functions_take_any_arguments(codec: TextCodec) -> None:
    """What a schema says that no mask knows is no reason not to call: the last resort."""
    grammar = grammar_of(codec, tool({}, strict=False), CallChoice("required", "weather"), is_loose=True)
    assert accepts(codec, grammar, call(name="weather"))
    assert accepts(codec, grammar, call(("a", "1"), ("b", "x\ny"), name="weather"))
    assert not accepts(codec, grammar, call(name="other"))
