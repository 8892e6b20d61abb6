"""`chat` from parameters to message: tools, reasoning, forms of answers, over a real engine in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvd.errors import CallerError, InvalidParams
from kvd.model.answers import AnswerFormat
from kvd.model.grammar import GrammarCompiler
from kvd.model.grammar_text import answer_grammar
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.sampling import SamplingParams
from tests.scheduler.chats import Chats
from tests.scheduler.harness import World, ref_of
from tests.scheduler.test_engine import Runner
from tests.scheduler.test_preempting import LONG, Meddler
from tests.support.chat_templates import ALTERNATING, TAGGED, THINKING, TURNS_ONLY
from tests.support.prose import prose
from tests.support.tiny_sentencepiece import sentencepiece

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock", "strict": True, "parameters": PARAMETERS}},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": [1, "two"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Rome","days":3}}\n</tool_call>'


@pytest.fixture
def make_chats(tmp_path: Path, codec: TextCodec) -> Iterator[Callable[..., Chats]]:
    """Makes daemons without sockets; their engines are stopped at the end."""
    runners: list[Runner] = []

    def make(source: str = TURNS_ONLY, **options: Any) -> Chats:
        runner = Runner(tmp_path / f"{len(runners)}", codec, **{"max_batch": 4, "max_queued": 16, **options})
        runners.append(runner)
        runner.start()
        return Chats(runner, codec, source)

    yield make
    for runner in runners:
        runner.stop()


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


@pytest.mark.parametrize("source", [TURNS_ONLY, TAGGED, THINKING], ids=["turns only", "tagged", "thinking"])
def test_a_round_of_tools_extends_with_all_tokens_cached(make_chats: Callable[..., Chats], source: str) -> None:
    """P13, P16, P17, P32: call, result, answer, next question: each turn reuses every token there is, exactly."""
    chats = make_chats(source)
    reasoning = "<think>\nI should look.\n</think>\n\n" if source is THINKING else ""
    messages = [{"role": "system", "content": "Be brief."}, user("What of the weather?")]
    known = 0
    for number, answer in enumerate([f"{reasoning}{CALL}", f"{reasoning}It rains, é <b>.\n", f" Wait.\n{CALL}"]):
        chats.script(answer)
        said = chats.call("chat", agent="a", messages=messages, tools=TOOLS[:1], max_tokens=400)
        result, message = said.result, said.message
        assert result["match"] == ("extend" if number else "new")
        assert result["cached_tokens"] == known
        assert result["text"] == answer
        known = result["prompt_tokens"] + result["completion_tokens"]
        assert "".join(event["text"] for event in said.of("text")) == (message["content"] or "")
        assert "".join(event["text"] for event in said.of("reasoning")) == message.get("reasoning_content", "")
        messages.append(message)
        if CALL in answer:
            assert result["finish_reason"] == "tool_calls"
            (call,) = message["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
                "weather",
                {"city": "Rome", "days": 3},
            )
            event = {"index": 0, "id": call["id"], **call["function"]}
            assert said.of("tool_call") == [{"type": "tool_call", **event}]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"})
        else:
            assert result["finish_reason"] == "stop"
            messages.append(user("And else?"))


def test_a_compacted_history_gets_no_thoughts_of_another_turn(make_chats: Callable[..., Chats]) -> None:
    """P17: two answers read alike; sent without what came before, neither stands as it was written elsewhere."""
    chats = make_chats(THINKING)
    messages = [user("delete a.txt")]
    for thought, question in (("OLD", "create b.txt"), ("NEW", "next")):
        chats.script(f"<think>{thought}</think>Done.")
        said = chats.call("chat", agent="a", messages=messages, max_tokens=100)
        assert said.message["reasoning_content"] == thought
        messages += [{"role": "assistant", "content": "Done."}, user(question)]
    chats.call("agent.fork", agent="a", new_agent="b")
    for agent in ("a", "b"):
        for history, thoughts in ((messages[2:], 0), (messages, 2)):
            chats.call("chat", agent=agent, messages=history, max_tokens=0)
            assert chats.engine.taken[-1].prompt.data.count(b"<think>") == thoughts


def test_a_call_is_recalled_after_a_restart_and_in_a_fork(tmp_path: Path, codec: TextCodec) -> None:
    """P17: what is compared is the agent's own durable text, so nothing else has to be remembered."""
    messages = [user("What of the weather?")]
    known = 0
    for number in range(2):
        runner = Runner(tmp_path / "data", codec)
        runner.start()
        try:
            chats = Chats(runner, codec, TAGGED)
            if number == 0:
                chats.script(CALL)
                first = chats.call("chat", agent="a", messages=messages, tools=TOOLS, max_tokens=300)
                known = first.result["prompt_tokens"] + first.result["completion_tokens"]
                (call,) = first.message["tool_calls"]
                messages += [first.message, {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"}]
            chats.call("agent.fork", agent="a", new_agent=f"b{number}")
            for agent in (f"b{number}", "a")[: number + 1]:
                said = chats.call("chat", agent=agent, messages=messages, tools=TOOLS, max_tokens=0)
                assert (said.result["match"], said.result["cached_tokens"]) == ("extend", known)
        finally:
            runner.stop()


def test_a_call_is_recalled_of_an_agent_in_the_warm_tier(make_chats: Callable[..., Chats], tmp_path: Path) -> None:
    """The first chat that names it imports it, before its answers are looked for."""
    path = tmp_path / "a.safetensors"
    chats = make_chats(TAGGED)
    chats.script(CALL)
    messages = [user("the weather")]
    said = chats.call("chat", agent="a", messages=messages, tools=TOOLS[:1], max_tokens=300)
    chats.call("agent.export", agent="a", path=str(path))
    messages += [said.message, {"role": "tool", "tool_call_id": said.message["tool_calls"][0]["id"], "content": "12"}]
    other = make_chats(TAGGED)
    other.engine.call(lambda core: core.warm.paths.update({ref_of("a"): path})).result(20)
    again = other.call("chat", agent="a", messages=messages, tools=TOOLS[:1], max_tokens=0)
    known = said.result["prompt_tokens"] + said.result["completion_tokens"]
    assert (again.result["match"], again.result["cached_tokens"]) == ("extend", known)
    path.write_bytes(b"no agent")
    other.engine.call(lambda core: core.warm.paths.update({ref_of("b"): path})).result(20)
    assert other.call("chat", agent="b", messages=messages, tools=TOOLS[:1], max_tokens=0).result["match"] == "new"


def test_calls_that_control_tokens_mark(tmp_path: Path) -> None:
    """P17, P32: markers that surface as nothing: calls are masked, read, told, and recalled from the agent's ids."""
    roles = ("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|im_end|>")
    codec = sentencepiece("[TOOL_CALLS]", "[ARGS]", *roles)
    runner = Runner(tmp_path / "data", codec)
    runner.start()
    try:
        chats = Chats(runner, codec, ALTERNATING)
        messages, known = [user("the weather")], 0
        for _ in range(2):
            said = chats.call(
                "chat",
                agent="a",
                messages=messages,
                tools=TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=1.0,
                seed=3,
                max_tokens=300,
            )
            assert said.result["finish_reason"] == "tool_calls"
            assert said.result["cached_tokens"] == known
            assert "[" not in said.result["text"].partition("{")[0], "markers are no text"
            (call,) = said.message["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
            assert [event["name"] for event in said.of("tool_call")] == [call["function"]["name"]]
            assert said.of("text") == said.of("control") == []
            known = said.result["prompt_tokens"] + said.result["completion_tokens"]
            messages += [said.message, {"role": "tool", "tool_call_id": call["id"], "content": "12"}]
        end = chats.call("chat", agent="a", messages=messages, tools=TOOLS, max_tokens=0)
        assert (end.result["match"], end.result["cached_tokens"]) == ("extend", known)
    finally:
        runner.stop()


@pytest.mark.parametrize(
    ("choice", "sampling"),
    [
        ("required", {}),
        ({"type": "function", "function": {"name": "clock"}}, {"temperature": 1.5, "seed": 3}),
    ],
    ids=["any, greedy", "one, sampled"],
)
def test_a_model_that_must_call_calls_whatever_it_wants(
    make_chats: Callable[..., Chats], choice: Any, sampling: dict[str, Any]
) -> None:
    """P32: a random model: one call of a function that there is, with valid arguments."""
    said = make_chats().call(
        "chat",
        agent="a",
        messages=[user("the")],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=400,
        **sampling,
    )
    (call,) = said.message["tool_calls"]
    assert said.result["finish_reason"] == "tool_calls"
    assert said.message["content"] is None
    assert call["function"]["name"] in ("weather", "clock")[isinstance(choice, dict) :]
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


def test_a_form_is_kept_against_everything_else(make_chats: Callable[..., Chats]) -> None:
    """Bias, penalties, temperature and what the model wants: nothing brings a forbidden token back."""
    chats = make_chats()
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 5.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 3.0},
        {"logit_bias": {str(chats.codec.encode_content(" the")[0]): 1e6, str(min(chats.codec.eos_ids)): 1e6}},
    ]
    for number, more in enumerate(options):
        chats.script("I would rather not.")
        said = chats.call(
            "chat", agent=f"a{number}", messages=[user("go")], response_format=FORM, max_tokens=400, **more
        )
        assert said.result["finish_reason"] == "stop"
        jsonschema.validate(json.loads(said.message["content"]), SCHEMA)
    plain = chats.call("generate", agent="g", text="A name: ", response_format=FORM, max_tokens=400)
    jsonschema.validate(json.loads(plain.result["text"]), SCHEMA)
    assert "message" not in plain.result


def test_forms_and_ends(make_chats: Callable[..., Chats]) -> None:
    """`max_tokens` and stop strings end a form early, and say so; `text` is no form; logprobs are the model's."""
    chats = make_chats()
    chats.script('{"name": "the of", "tags": []}')
    short = chats.call("chat", agent="a", messages=[user("go")], response_format=FORM, max_tokens=4, logprobs=1)
    assert short.result["finish_reason"] == "length"
    assert short.message["content"] == short.result["text"]
    assert len(short.result["logprobs"]) == short.result["completion_tokens"]
    chats.script('{"name": "the of", "tags": []}')
    stopped = chats.call("chat", agent="b", messages=[user("go")], response_format=FORM, stop=" of", max_tokens=99)
    assert (stopped.result["finish_reason"], stopped.result["text"]) == ("stop", '{"name": "the')
    chats.script("free")
    free = chats.call("chat", agent="c", messages=[user("go")], response_format={"type": "text"}, max_tokens=99)
    assert free.message == {"role": "assistant", "content": "free"}
    silent = chats.call("chat", agent="d", messages=[user("go")], response_format=FORM, max_tokens=0)
    assert silent.result["finish_reason"] == "length"
    chats.script(CALL)
    cut = chats.call("chat", agent="e", messages=[user("go")], tools=TOOLS, max_tokens=12)
    assert cut.result["finish_reason"] == "length"
    assert cut.message == {"role": "assistant", "content": cut.result["text"]}


def test_rows_of_a_batch_have_their_own_masks(make_chats: Callable[..., Chats]) -> None:
    """P28, P33: with and without forms side by side, each says what it says alone."""
    calls: list[tuple[str, dict[str, Any]]] = [
        ("chat", {"agent": "form", "messages": [user("a")], "response_format": FORM, "max_tokens": 50}),
        ("chat", {"agent": "free", "messages": [user("a b")], "max_tokens": 40}),
        (
            "chat",
            {
                "agent": "tool",
                "messages": [user("a b c")],
                "tools": TOOLS,
                "tool_choice": "required",
                "max_tokens": 50,
            },
        ),
        ("generate", {"agent": "same", "text": "the", "response_format": FORM, "max_tokens": 50}),
    ]
    chats = make_chats()
    alone = [chats.call(method, **params, namespace="alone").result["text"] for method, params in calls]
    together = [said.result["text"] for said in chats.calls(*calls)]
    assert together == alone
    assert chats.engine.call(lambda core: core.stats.largest_batch).result(20) > 1


def interrupt(runner: Runner) -> None:
    """Somebody else wants the only slot."""
    runner.turn("quick", prose(50, "q"), max_tokens=3)


def test_a_preempted_turn_keeps_its_place_in_the_grammar(tmp_path: Path, codec: TextCodec) -> None:
    """P33: swapped out in the middle of a form, it goes on there: the same text, valid as before."""
    grammar = answer_grammar(AnswerFormat(), codec, schema=SCHEMA)
    assert grammar is not None
    compiler = GrammarCompiler(codec, codec.token_count)
    texts: list[str] = []
    for disturbed in (False, True):
        runner = Runner(tmp_path / str(disturbed), codec, max_queued=8, max_batch=1)
        runner.start()
        try:
            meddler = Meddler("text", 6, partial(interrupt, runner) if disturbed else lambda: None)
            slow = runner.turn(
                "slow",
                LONG[:600],
                max_tokens=200,
                sampling=SamplingParams(temperature=0.9, seed=4),
                hooks=(compiler.compile(grammar),),
                priority="background",
                emit=meddler,
            )
            assert slow.result["preemptions"] == int(disturbed)
            texts.append(slow.result["text"])
        finally:
            runner.stop()
    assert texts[0] == texts[1]
    jsonschema.validate(json.loads(texts[0]), SCHEMA)


def test_control_tokens_are_told_where_they_were_made(make_world: Callable[..., World], codec: TextCodec) -> None:
    """Their names come between the text before and behind them, also where a stop string holds text back."""
    world = make_world()
    mark = codec.id_of("<|im_start|>")
    assert mark is not None
    ids = [*codec.encode_content(" the E"), mark, *codec.encode_content(" of"), mark]
    start: list[int] = []

    def script(so_far: Any, logits: Any) -> Any:
        start.append(len(so_far))
        logits[ids[min(len(so_far) - start[0], len(ids) - 1)]] += 1e4
        return logits

    outcome = world.turn("a", "the", max_tokens=len(ids), stop=("END",), hooks=(script,), tells_control=True)
    told = [(event["type"], event["text"]) for event in outcome.events if event["type"] in ("text", "control")]
    text = "".join(f"[{piece}]" if kind == "control" else piece for kind, piece in told)
    assert text == " the E[<|im_start|>] of[<|im_start|>]"
    assert outcome.turn.text == " the E of"
    start.clear()
    silent = world.turn("b", "the", max_tokens=len(ids), hooks=(script,))
    assert {event["type"] for event in silent.events} & {"control"} == set()


@pytest.mark.parametrize(
    ("params", "parameter", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema must be a JSON schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "auto, none or required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "weather, clock",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "'weather' twice"),
        ({"tools": [{"type": "function", "function": {"name": "no space"}}]}, "tools", "letters, digits"),
        ({"tools": [{"type": "retrieval"}]}, "tools", '"type": "function"'),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "it knows no switches"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "does not know messages"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ],
)
def test_refusals_name_what_is_allowed(
    make_chats: Callable[..., Chats], params: dict[str, Any], parameter: str, words: str
) -> None:
    """Nothing of a refused call reaches the engine."""
    chats = make_chats()
    with pytest.raises(InvalidParams, match=words) as refused:
        chats.call("chat", agent="a", messages=[user("x")], **params)
    assert refused.value.data["parameter"] == parameter
    assert chats.engine.taken == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": "x"}, "system, developer, user, assistant or tool, not 'robot'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\] must be .*'image_url'"),
        ({"role": "user", "content": [3]}, r"content\[0\] must be"),
        ({"role": "user", "content": 3}, "a string or a list of text parts"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "only assistant messages"),
        ({"role": "assistant", "content": "x", "tool_calls": 3}, "a list of maps"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "a string of JSON"),
        ({"role": "assistant", "content": "x", "reasoning_content": 3}, "reasoning_content must be a string"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "tool_call_id must be a string"),
    ],
)
def test_messages_are_checked_one_by_one(make_chats: Callable[..., Chats], message: Any, words: str) -> None:
    """The place is named, and what may be there."""
    with pytest.raises(CallerError, match=words) as refused:
        make_chats().call("chat", agent="a", messages=[user("x"), message])
    assert "messages[1]" in refused.value.message
    assert refused.value.data["parameter"] == "messages"


def test_switches_of_the_template_and_the_stream(make_chats: Callable[..., Chats]) -> None:
    """`enable_thinking` reaches a template that knows it; without a stream the message is the same."""
    chats = make_chats(THINKING)
    for stream in (True, False):
        chats.script("<think>hm</think> Yes.")
        said = chats.call("chat", agent=f"a{stream}", messages=[user("x")], stream=stream, max_tokens=50)
        assert said.message == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    quiet = chats.call(
        "chat", agent="b", messages=[user("x")], max_tokens=1, chat_template_kwargs={"enable_thinking": False}
    )
    assert quiet.result["prompt_tokens"] > said.result["prompt_tokens"]
