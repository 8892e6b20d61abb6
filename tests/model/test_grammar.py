"""Masks: whatever the logits, the text has its form; over byte-level and SentencePiece vocabularies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from kvd.errors import InvalidParams
from kvd.model.answers import AnswerFormat
from kvd.model.errors import UnsupportedFeature
from kvd.model.grammar import MAX_KEPT, GrammarCompiler, TokenMask
from kvd.model.grammar_text import MAX_SCHEMA_CHARACTERS, CallChoice, answer_grammar
from kvd.model.tokenizer import TextCodec
from kvd.model.tool_calls import ToolDialect, find_dialect, plain_dialect
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_sentencepiece import sentencepiece


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    """A vocabulary of each kind."""
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")
    return {"byte-level": TextCodec.from_folder(folder), "sentencepiece": sentencepiece()}


@pytest.fixture(scope="module")
def compilers(codecs: dict[str, TextCodec]) -> dict[str, GrammarCompiler]:
    """Their compilers; the models' outputs are wider than the vocabularies, as many are."""
    return {name: GrammarCompiler(codec, codec.token_count + 7) for name, codec in codecs.items()}


def write(codec: TextCodec, mask: TokenMask, seed: int, most: int = 400, *, prompt: int = 3) -> str | None:
    """What a model of random logits writes under a mask; None when it does not end in time."""
    rng = np.random.default_rng(seed)
    ids = list(range(5, 5 + prompt))
    for _ in range(most):
        logits = rng.standard_normal(codec.token_count + 7).astype(np.float32)
        logits[sorted(codec.eos_ids)] += 4.0  # it ends as soon as it may
        token = int(np.argmax(mask(ids, logits)))
        assert np.isfinite(logits[token])
        if token in codec.eos_ids:
            return codec.surface(ids[prompt:])[0].decode()
        assert token < codec.token_count, "rows of the output that are no token are never allowed"
        ids.append(token)
    return None


NAME = {"type": "string", "maxLength": 8}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -5, "maximum": 300},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "string", "maxLength": 12},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"enum": ["red", "grün", 3, None, {"a": [1]}]},
    {"const": {"x": "<|im_end|>"}},
    {"type": ["string", "null"], "maxLength": 4},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "items": NAME, "maxItems": 3},
    {"type": "array", "prefixItems": [NAME, {"type": "integer", "maximum": 9, "minimum": 0}], "items": False},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "properties": {"name": NAME}, "required": ["name"], "additionalProperties": False},
    {"type": "object", "properties": {"name": NAME, "age": {"enum": [1, 2]}}, "additionalProperties": False},
    {"type": "object", "properties": {'é "q\\': {"const": 1}}, "required": ['é "q\\'], "additionalProperties": False},
    {
        "type": "object",
        "patternProperties": {"^[a-c]{1,2}$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 1,
    },
    {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["at", "to"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {axis: {"type": "integer", "minimum": 0, "maximum": 99} for axis in ("x", "y")},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {"oneOf": [{"const": "a"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}], "title": "t", "description": "d", "default": 7},
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["tree"]},
            "children": {"type": "array", "maxItems": 1, "items": {"enum": ["leaf", "bud"]}},
        },
        "required": ["kind", "children"],
        "additionalProperties": False,
    },
)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_any_logits_give_json_of_the_schema(
    codecs: dict[str, TextCodec], compilers: dict[str, GrammarCompiler], kind: str, number: int
) -> None:
    """P32: four random models: each answer ends, parses, and is valid by an independent validator."""
    schema = SCHEMAS[number]
    grammar = answer_grammar(AnswerFormat(), codecs[kind], schema=schema)
    assert grammar is not None
    for seed in range(4):
        text = write(codecs[kind], compilers[kind].compile(grammar), seed)
        assert text is not None
        jsonschema.validate(json.loads(text), schema)


def test_a_text_that_is_cut_short_begins_json(
    codecs: dict[str, TextCodec], compilers: dict[str, GrammarCompiler]
) -> None:
    """An object of any keys may go on for ever: what there is of it so far still begins one, and no space runs away."""
    codec = codecs["byte-level"]
    grammar = answer_grammar(AnswerFormat(), codec, schema={"type": "object"})
    assert grammar is not None
    mask, rng, ids = compilers["byte-level"].compile(grammar), np.random.default_rng(1), [7]
    for _ in range(150):
        logits = rng.standard_normal(codec.token_count + 7).astype(np.float32)
        logits[sorted(codec.eos_ids)] -= 100.0
        token = int(np.argmax(mask(ids, logits)))
        if token in codec.eos_ids:
            break
        ids.append(token)
    text = codec.surface(ids[1:])[0].decode()
    assert text.startswith("{")
    assert re.search(r"\s{34}", text) is None


def test_tokens_that_are_taken_back_are_taken_back(
    codecs: dict[str, TextCodec], compilers: dict[str, GrammarCompiler]
) -> None:
    """After any cut, and after another text in its place, the mask is that of a fresh one at the same ids."""
    codec = codecs["byte-level"]
    schema = {"type": "object", "properties": {"name": NAME, "n": {"type": "integer"}}, "required": ["name", "n"]}
    grammar = answer_grammar(AnswerFormat(), codec, schema=schema)
    assert grammar is not None
    width, prompt = codec.token_count + 7, [5, 6]
    one = codec.encode_content('{"name": "the of", "n": 12')
    other = codec.encode_content('{"name": "and')

    def allowed(mask: TokenMask, ids: list[int]) -> list[int]:
        return np.flatnonzero(np.isfinite(mask([*prompt, *ids], np.zeros(width, np.float32)))).tolist()

    moved = compilers["byte-level"].compile(grammar)
    allowed(moved, [])
    for ids in (one, one[:3], other, one, [], one[:-1], other[:2]):
        fresh = compilers["byte-level"].compile(grammar)
        allowed(fresh, [])
        assert allowed(moved, ids) == allowed(fresh, ids)


def test_masks_of_one_grammar_are_independent(
    codecs: dict[str, TextCodec], compilers: dict[str, GrammarCompiler]
) -> None:
    """P33: a compiled grammar is kept and copied; rows that share it do not share their places in it."""
    codec = codecs["byte-level"]
    grammar = answer_grammar(AnswerFormat(), codec, schema=SCHEMAS[21])
    assert grammar is not None
    masks = [compilers["byte-level"].compile(grammar) for _ in range(3)]
    alone = [write(codec, compilers["byte-level"].compile(grammar), seed) for seed in range(3)]
    rngs, rows = [np.random.default_rng(seed) for seed in range(3)], [[5, 6, 7] for _ in range(3)]
    done: list[str | None] = [None] * 3
    while None in done:
        for row, (mask, rng, ids) in enumerate(zip(masks, rngs, rows, strict=True)):
            if done[row] is None:
                logits = rng.standard_normal(codec.token_count + 7).astype(np.float32)
                logits[sorted(codec.eos_ids)] += 4.0
                token = int(np.argmax(mask(ids, logits)))
                if token in codec.eos_ids:
                    done[row] = codec.surface(ids[3:])[0].decode()
                ids.append(token)
    assert done == alone


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {"type": "string"}, "then": {}}, "if"),
        ({"type": "colour"}, "colour"),
        ({"$ref": "https://example.org/x"}, "example.org"),
        ({"$ref": "#/$defs/absent"}, "absent"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ({"enum": []}, "empty"),
    ],
)
def test_what_cannot_be_held_to_is_named(
    codecs: dict[str, TextCodec], compilers: dict[str, GrammarCompiler], schema: dict[str, Any], word: str
) -> None:
    """A schema is obeyed or refused, never half obeyed in silence; the message says which part it is."""
    grammar = answer_grammar(AnswerFormat(), codecs["byte-level"], schema=schema)
    assert grammar is not None
    with pytest.raises(InvalidParams, match="response_format cannot be held to") as refused:
        compilers["byte-level"].compile(grammar)
    assert word in refused.value.message
    assert refused.value.data == {"parameter": "response_format"}
    assert "\n" not in refused.value.message


def test_schemas_are_bounded(codecs: dict[str, TextCodec], compilers: dict[str, GrammarCompiler]) -> None:
    """A large one is refused by its size before anything is compiled, one that explodes by the compiler's own bound."""
    codec = codecs["byte-level"]
    with pytest.raises(InvalidParams, match=rf"of {MAX_SCHEMA_CHARACTERS} at most"):
        answer_grammar(AnswerFormat(), codec, schema={"enum": ["x" * MAX_SCHEMA_CHARACTERS]})
    many = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1500)}}
    grammar = answer_grammar(AnswerFormat(), codec, schema=many)
    assert grammar is not None
    with pytest.raises(InvalidParams, match="cannot be held to any further"):
        write(codec, compilers["byte-level"].compile(grammar), 0)


def test_compiled_grammars_are_kept_but_not_for_ever(codecs: dict[str, TextCodec]) -> None:
    """The bound holds whatever clients send."""
    codec = codecs["sentencepiece"]
    compiler = GrammarCompiler(codec, codec.token_count)
    for number in range(MAX_KEPT + 5):
        grammar = answer_grammar(AnswerFormat(), codec, schema={"const": number})
        assert grammar is not None
        compiler.compile(grammar)
    assert len(compiler._kept) == MAX_KEPT


def test_a_vocabulary_without_an_end_is_unsupported() -> None:
    """The model could not stop where the grammar ends."""
    codec = sentencepiece()
    codec.eos_ids = frozenset()
    with pytest.raises(UnsupportedFeature, match="no token that ends a turn"):
        GrammarCompiler(codec, codec.token_count).compile("start: /a/")


# ---- tool calls -----------------------------------------------------------------------------------------------------

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "enum": [1, 7]}},
                "required": ["city", "days"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Paris", "Zürich"]}},
            },
        },
    }
    for name in ("weather", "weather-archive")
]
MISTRAL = find_dialect("[TOOL_CALLS]", {})
GLM = find_dialect("<arg_key>", {})


def calls_of(dialect: ToolDialect, text: str) -> list[tuple[str, dict[str, Any]]]:
    """All calls of a text, read by the dialect's own parser; there is nothing else in it."""
    found: list[tuple[str, dict[str, Any]]] = []
    parts = text.split(dialect.start)
    assert parts[0].strip() == ""
    for part in parts[1:]:
        body, _, rest = part.partition(dialect.end) if dialect.end else (part, "", "")
        assert rest.strip() == ""
        calls = dialect.parse(body, TOOLS)
        assert calls is not None, part
        found += [(call.name, json.loads(call.arguments)) for call in calls]
    return found


def forced(dialect: ToolDialect, codec: TextCodec, choice: CallChoice, seed: int) -> str:
    """What a random model writes that has to call; control tokens by name."""
    grammar = answer_grammar(AnswerFormat(None, dialect), codec, tools=TOOLS, choice=choice)
    assert grammar is not None
    mask, rng, ids = GrammarCompiler(codec, codec.token_count + 7).compile(grammar), np.random.default_rng(seed), [9]
    for _ in range(600):
        logits = rng.standard_normal(codec.token_count + 7).astype(np.float32)
        logits[sorted(codec.eos_ids)] += 4.0
        token = int(np.argmax(mask(ids, logits)))
        if token in codec.eos_ids:
            break
        ids.append(token)
    return b"".join(codec.token_bytes(token) for token in ids[1:]).decode()


@pytest.mark.parametrize("control", [(), ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]")])
@pytest.mark.parametrize("name", ["plain", "mistral"])
def test_a_model_that_must_call_calls(name: str, control: tuple[str, ...]) -> None:
    """P32: any logits give calls of the functions there are, with arguments that are valid, in the model's own form."""
    dialect = plain_dialect() if name == "plain" else MISTRAL
    assert dialect is not None
    codec = sentencepiece(*control)
    for seed in range(2):
        for choice in (
            CallChoice("required"),
            CallChoice("required", parallel=False),
            CallChoice("required", "weather"),
        ):
            calls = calls_of(dialect, forced(dialect, codec, choice, seed))
            assert calls
            assert len(calls) == 1 or (choice.parallel and choice.only is None)
            for function, arguments in calls:
                assert function == choice.only or choice.only is None
                jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])


def test_a_call_that_the_model_begins_by_itself_is_held_to_its_schema(codecs: dict[str, TextCodec]) -> None:
    """Strict tools leave the model free until it begins a call; from there on the mask is that of the call."""
    codec = codecs["byte-level"]
    grammar = answer_grammar(AnswerFormat(None, plain_dialect()), codec, tools=TOOLS)
    assert grammar is not None
    compiler = GrammarCompiler(codec, codec.token_count)

    def may_follow(text: str, next_text: str) -> bool:
        mask, ids = compiler.compile(grammar), [5]
        mask(ids, np.zeros(codec.token_count, np.float32))
        ids += codec.encode_content(text)
        logits = mask(ids, np.zeros(codec.token_count, np.float32))
        token = codec.encode_content(next_text)[0] if next_text else min(codec.eos_ids)
        return bool(np.isfinite(logits[token]))

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 7}}\n</tool_call>'
    assert may_follow("I think <b>", "x")
    assert may_follow("I think", "")
    assert may_follow("a <tool_call>", "\n")
    assert not may_follow("a <tool_call>", "x")
    assert not may_follow('a <tool_call>\n{"name": "', "x")
    assert may_follow(f"a {call}", "")
    assert may_follow(f"a {call} b", "c")
    single = answer_grammar(AnswerFormat(None, plain_dialect()), codec, tools=TOOLS, choice=CallChoice(parallel=False))
    assert single is not None
    grammar = single
    assert may_follow("a text", "x")
    assert may_follow(call, "")
    assert not may_follow(call, "x")
    banned = answer_grammar(AnswerFormat(None, plain_dialect()), codec, tools=TOOLS, choice=CallChoice("none"))
    assert banned is not None
    grammar = banned
    assert may_follow("a <tool_call", " the")
    assert not may_follow("a <tool_call", ">")


def test_reasoning_comes_before_the_form(codecs: dict[str, TextCodec]) -> None:
    """A model that reasons may do so first, whether its template opened the reasoning or not."""
    codec = codecs["byte-level"]
    compiler = GrammarCompiler(codec, codec.token_count)
    answers = AnswerFormat(("<think>", "</think>"), plain_dialect())

    def reads(opening: str, text: str) -> bool:
        grammar = answer_grammar(answers, codec, schema={"const": 1}, opening=opening)
        assert grammar is not None
        mask = compiler.compile(grammar)
        mask([5], np.zeros(codec.token_count, np.float32))
        try:
            logits = mask([5, *codec.encode_content(text)], np.zeros(codec.token_count, np.float32))
        except InvalidParams:
            return False
        return bool(np.isfinite(logits[min(codec.eos_ids)]))

    assert reads("", "1")
    assert reads("", "<think>hm { } </think>\n\n1")
    assert not reads("", "hm</think>1")
    assert reads("<think>\n", "hm\n</think>\n\n1")
    assert not reads("<think>\n", "1")
    assert reads("<think>\n\n</think>\n\n", "1")


def test_forms_that_masks_do_not_know_are_refused_where_they_would_matter(codecs: dict[str, TextCodec]) -> None:
    """A dialect of tags: a call can be forced or forbidden; which one, and its arguments, cannot: that is said."""
    assert GLM is not None
    codec, answers = codecs["byte-level"], AnswerFormat(None, GLM)
    loose = [{"type": "function", "function": {"name": "f"}}]
    for tools, choice in ((TOOLS, CallChoice()), (loose, CallChoice("required", "f"))):
        with pytest.raises(UnsupportedFeature, match="'glm47', which masks cannot hold it to"):
            answer_grammar(answers, codec, tools=tools, choice=choice)
    assert answer_grammar(answers, codec, tools=loose) is None
    assert answer_grammar(answers, codec) is None
    compiler = GrammarCompiler(codec, codec.token_count)
    for choice in (CallChoice("required"), CallChoice("none"), CallChoice(parallel=False)):
        grammar = answer_grammar(answers, codec, tools=loose, choice=choice)
        assert grammar is not None
        compiler.compile(grammar)


def test_functions_that_are_not_strict_are_held_to_what_can_be(codecs: dict[str, TextCodec]) -> None:
    """A schema of somebody's tool server may have keywords that masks do not know: they are left out, it is called."""
    codec = codecs["byte-level"]
    parameters = {"properties": {"x": {"type": "integer", "not": {"const": 3}}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = answer_grammar(
        AnswerFormat(None, plain_dialect()), codec, tools=tools, choice=CallChoice("required", "f")
    )
    assert grammar is not None
    GrammarCompiler(codec, codec.token_count).compile(grammar)
    tools[0]["function"]["strict"] = True  # type: ignore[index]
    strict = answer_grammar(AnswerFormat(None, plain_dialect()), codec, tools=tools)
    assert strict is not None
    with pytest.raises(InvalidParams, match=r"tools cannot be held to.*not"):
        GrammarCompiler(codec, codec.token_count).compile(strict, parameter="tools")
