"""The official SDKs, unmodified, against a live daemon with a tiny model: one daemon and one gateway for all tests.

So are the metrics of it, and the dashboard that shows them.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.serving import Served, gateway
from tests.support.daemon import Daemon, short_folder
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

DOCS = Path(__file__).resolve().parents[2] / "docs"


class Lazy:
    """A module that is imported when it is used: it takes seconds, also of workers that run none of these tests."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Something of the module's."""
        return getattr(importlib.import_module(self._name), name)


anthropic: Any = Lazy("anthropic")
openai: Any = Lazy("openai")

WORDS = "the time of a system that is made of pages and of memory and of an agent "
SYSTEM = {"role": "system", "content": WORDS * 30}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def daemon(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Daemon]:
    """A running daemon."""
    with short_folder() as folder, Daemon(folder, tiny_model_dir, zygote=zygote) as running:
        yield running


@pytest.fixture(scope="module")
def served(daemon: Daemon, tiny_model_dir: Path) -> Iterator[Served]:
    """A gateway in front of it; `claude-*` and `gpt-*` mean its model, too."""
    with gateway(daemon.socket, aliases=("claude-*", "gpt-*")) as running:
        running.ask("GET", "/health")
        yield running


@pytest.fixture
def gpt(served: Served) -> Iterator[Any]:
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(served: Served) -> Iterator[Any]:
    """Anthropic's client."""
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def user(text: str) -> dict[str, str]:
    """A user message."""
    return {"role": "user", "content": text}


def ask(gpt: Any, messages: list[Any], agent: str | None = None, **more: Any) -> Any:
    """A greedy completion."""
    headers = {} if agent is None else {"X-Kvd-Agent": agent}
    return gpt.chat.completions.create(model="gpt-x", messages=messages, extra_headers=headers, **{**GREEDY, **more})


def test_models_are_listed(gpt: Any, claude: Any, daemon: Daemon) -> None:
    """Both clients read the list and the loaded model."""
    name = daemon.client.model_info()["model"]
    assert [model.id for model in gpt.models.list()] == [name]
    assert gpt.models.retrieve(name).id == name
    assert [model.id for model in claude.models.list()] == [name]


@pytest.mark.parametrize("named", [True, False])
def test_five_turns_are_hits(gpt: Any, served: Served, daemon: Daemon, named: bool) -> None:
    """P16, P40: each turn of a conversation reuses all that was computed, with the agent named or found by itself."""
    messages: list[Any] = [SYSTEM, user(f"Tell me of time, {named}.")]
    served.run(served.gateway.settled())
    before = sum(each.agent.startswith("gw:anonymous:") for each in daemon.client.agents())
    held = 0
    for turn in range(5):
        answer = ask(gpt, messages, "five turns" if named else None)
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert turn == 0 or cached == held
        held = usage.prompt_tokens + usage.completion_tokens - 1  # the last token's KV comes with the next turn
        messages += [answer.choices[0].message.model_dump(exclude_none=True), user(f"Go on, {turn}.")]
    if not named:  # five turns of nobody have left one agent, not five
        served.run(served.gateway.settled())
        anonymous = [each for each in daemon.client.agents() if each.agent.startswith("gw:anonymous:")]
        assert len(anonymous) == before + 1


def test_a_stream_says_what_the_whole_answer_says(gpt: Any) -> None:
    """Text, reason and figures; the prompt is the same, so all but one token of it is cached."""
    messages = [SYSTEM, user("Stream.")]
    whole = ask(gpt, messages, "whole")
    chunks = list(ask(gpt, messages, "whole", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_log_probabilities_and_stop_strings(gpt: Any) -> None:
    """Each token with its alternatives; a stop string ends the text before itself; equal seeds give equal text."""
    messages = [user("Probabilities.")]
    choice = ask(gpt, messages, "probable", logprobs=True, top_logprobs=2).choices[0]
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace") == choice.message.content
    assert all(token.logprob == pytest.approx(token.top_logprobs[0].logprob) for token in tokens)
    word = next(token.token for token in tokens[1:] if "\ufffd" not in token.token)
    stopped = ask(gpt, messages, "probable", stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == choice.message.content.partition(word)[0]
    drawn = [ask(gpt, messages, "drawn", temperature=1, seed=7).choices[0].message.content for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_parallel_agents_of_one_key(gpt: Any, daemon: Daemon) -> None:
    """P18: they share the pages of their common beginning, and neither evicts or continues the other."""
    keyed = {"extra_body": {"prompt_cache_key": "team"}}
    tasks = [[SYSTEM, user(f"Task {number}.")] for number in range(3)]
    answers = [ask(gpt, task, **keyed) for task in tasks]
    again = [
        ask(gpt, [*task, answer.choices[0].message.model_dump(exclude_none=True), user("And?")], **keyed)
        for task, answer in zip(tasks, answers, strict=True)
    ]
    for first, second in zip(answers, again, strict=True):
        held = first.usage.prompt_tokens + first.usage.completion_tokens - 1
        assert second.usage.prompt_tokens_details.cached_tokens == held
    assert answers[1].usage.prompt_tokens_details.cached_tokens >= 256
    names = [agent.agent for agent in daemon.client.agents() if agent.agent.startswith("gw:cache-key:team:")]
    assert len(names) == 3


def test_a_system_message_in_mid_conversation_costs_nothing_before_it(gpt: Any) -> None:
    """P13: what stands before it is a hit."""
    messages: list[Any] = [SYSTEM, user("Nudge me.")]
    first = ask(gpt, messages, "nudged")
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "system", "content": "It is late."}]
    second = ask(gpt, [*messages, user("And?")], "nudged")
    held = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == held


def test_completions_and_responses(gpt: Any) -> None:
    """The other two endpoints of OpenAI's client, whole and as streams."""
    text = gpt.completions.create(model="gpt-x", prompt="Once upon a time", **GREEDY)
    pieces = gpt.completions.create(model="gpt-x", prompt="Once upon a time", stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text
    asked: dict[str, Any] = {"model": "gpt-x", "input": "Once", "temperature": 0, "max_output_tokens": 6}
    response = gpt.responses.create(**asked, user="r")
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    events = list(gpt.responses.create(**asked, user="r", stream=True))
    assert events[-1].response.output_text == response.output_text
    assert events[-1].response.usage.input_tokens_details.cached_tokens == response.usage.input_tokens - 1


def test_messages(claude: Any) -> None:
    """Whole and as a stream, over turns: P40: `input_tokens` are the computed ones; `count_tokens` counts them all."""
    asked: dict[str, Any] = {
        "model": "claude-x",
        "max_tokens": 6,
        "system": WORDS * 30,
        "extra_body": {"temperature": 0},
        "extra_headers": {"X-Claude-Code-Session-Id": "session-1"},
    }
    first = claude.messages.create(messages=[user("Hello.")], **asked)
    assert first.stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model="claude-x", system=WORDS * 30, messages=[user("Hello.")])
    usage = first.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    longer = [user("Hello."), {"role": "assistant", "content": first.content}, user("And?")]
    with claude.messages.stream(messages=longer, **asked) as stream:
        text = "".join(stream.text_stream)
        second = stream.get_final_message()
    assert second.content[0].text == text
    assert second.usage.cache_read_input_tokens == counted.input_tokens + usage.output_tokens - 1
    again = claude.messages.create(messages=longer, **asked)
    assert again.content[0].text == text
    assert again.usage.input_tokens == 1
    word = text.split()[2]
    stopped = claude.messages.create(messages=longer, stop_sequences=["never", word], **asked)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert stopped.content[0].text == text.partition(word)[0]


def test_volatile_headers_do_not_cost_the_prefix(claude: Any) -> None:
    """P12: Claude Code's billing line changes with every request; all but one token is still a hit."""
    for nonce in ("fa690", "0aaa9"):
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.37.{nonce[:3]}; cch={nonce};"}
        answer = claude.messages.with_raw_response.create(
            model="claude-x",
            max_tokens=2,
            system=[line, {"type": "text", "text": WORDS * 30}],
            messages=[user("Bill me.")],
            extra_headers={"X-Claude-Code-Session-Id": "session-2"},
        )
    assert answer.headers["x-kvd-rules"] == "claude-billing-header"
    assert answer.parse().usage.input_tokens == 1


def test_errors_are_the_clients_own_classes(gpt: Any, claude: Any) -> None:
    """Both SDKs raise what they raise for the real services."""
    with pytest.raises(openai.NotFoundError) as missing:
        gpt.chat.completions.create(model="other", messages=[user("Hi")])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        ask(gpt, [user(WORDS * 400)])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(gpt, [user("Hi")], n=2)
    assert wrong.value.param == "n"
    with pytest.raises(anthropic.BadRequestError) as roles:
        claude.messages.create(model="claude-x", max_tokens=1, messages=[{"role": "king", "content": "Hi"}])
    assert roles.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=1, messages=[user("Hi")])


def test_leaving_a_stream_stops_the_model(gpt: Any, daemon: Daemon, served: Served) -> None:
    """P34: the turn ends long before its tokens do; what was made is kept, and the agent can go on."""
    messages = [SYSTEM, user("Go on and on.")]
    with ask(gpt, messages, "left", stream=True, max_tokens=3000) as stream:
        for _, chunk in zip(range(4), stream, strict=False):
            assert chunk.object == "chat.completion.chunk"
        request_id = stream.response.headers["x-request-id"]
    assert served.line(request_id)["outcome"] == "disconnected"
    assert ask(gpt, messages, "left").usage.prompt_tokens_details.cached_tokens > 256
    assert daemon.client.agent_info("left").tokens < 3000


def test_metrics_add_up(gpt: Any, served: Served) -> None:
    """Counts of the gateway grow with its requests; the daemon's figures stand beside them."""

    def value(name: str) -> float:
        lines = served.ask("GET", "/metrics").body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    names = ("prompt", "cached", "completion")
    before = {name: value(f'kvd_gateway_tokens_total{{kind="{name}"}}') for name in names}
    answer = gpt.chat.completions.with_raw_response.create(model="gpt-x", messages=[user("Count me.")], **GREEDY)
    served.line(answer.headers["x-request-id"])
    usage = answer.parse().usage
    after = {name: value(f'kvd_gateway_tokens_total{{kind="{name}"}}') - before[name] for name in names}
    cached = usage.prompt_tokens_details.cached_tokens
    assert after == {"prompt": usage.prompt_tokens, "cached": cached, "completion": usage.completion_tokens}
    assert value("kvd_gateway_daemon_up") == 1
    assert value('kvd_gateway_daemon{figure="budget_bytes"}') > 0
    assert value("kvd_gateway_anonymous_agents") > 0


CITIES = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_a_call_of_a_tool_and_its_result(gpt: Any) -> None:
    """A call that must come has valid arguments; the turn with its result reuses all of the one before."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITIES}}
    asked: dict[str, Any] = {"tools": [tool], "max_tokens": 300}
    messages: list[Any] = [user("What is the weather?")]
    first = ask(gpt, messages, "calls", tool_choice="required", parallel_tool_calls=False, **asked)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")
    messages += [message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "4 degrees"} for call in message.tool_calls]
    second = ask(gpt, messages, "calls", **asked)
    held = first.usage.prompt_tokens + first.usage.completion_tokens
    assert held - second.usage.prompt_tokens_details.cached_tokens <= 1


def test_calls_in_streams_of_all_dialects(gpt: Any, claude: Any) -> None:
    """The SDKs put the same call together from chunks, events and blocks."""
    weather = {"name": "weather", "parameters": CITIES}
    chunks = ask(
        gpt,
        [user("Weather?")],
        tools=[{"type": "function", "function": weather}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        stream=True,
    )
    deltas = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert json.loads("".join(delta.function.arguments for delta in deltas))["city"] in ("Oslo", "Rome")
    with gpt.responses.stream(
        model="gpt-x",
        input="Weather?",
        tools=[{"type": "function", "strict": True, **weather}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
    ) as stream:
        (item,) = stream.get_final_response().output
    assert json.loads(item.arguments)["city"] in ("Oslo", "Rome")
    with claude.messages.stream(
        model="claude-x",
        max_tokens=300,
        messages=[user("Weather?")],
        tools=[{"name": "weather", "input_schema": CITIES}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[-1].input["city"] in ("Oslo", "Rome")


def test_anthropics_tool_runner(claude: Any) -> None:
    """It runs the tool that the model calls, sends the result, and gets an answer."""
    calls: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: its name.
        """
        calls.append(city)
        return "4 degrees"

    runner = claude.beta.messages.tool_runner(
        model="claude-x",
        max_tokens=200,
        messages=[user("Weather?")],
        tools=[weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        extra_body={"temperature": 0},
    )
    reasons = [message.stop_reason for message in runner]
    assert len(reasons) == 2 or reasons == ["max_tokens"]
    assert len(calls) == reasons.count("tool_use")


def test_structured_output_parses(gpt: Any) -> None:
    """`responses.create` with a strict schema gives JSON of that schema."""
    form = {"type": "json_schema", "name": "place", "schema": CITIES, "strict": True}
    response = gpt.responses.create(model="gpt-x", input="Where?", max_output_tokens=300, text={"format": form})
    assert json.loads(response.output_text)["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_framework_runs_its_loop(served: Served, stream: bool) -> None:
    """P16, P40: pydantic-ai as published: prompt, call, result, answer; what was computed is cached in the second turn.

    The seeded model calls nothing by itself, so the first request of each run has to. The framework needs no change: it
    has a setting for that, which may depend on the step.
    """
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    asked: list[str] = []

    def settings(run: pydantic_ai.RunContext[None]) -> pydantic_ai.ModelSettings:
        """A call first, then whatever the model says."""
        first = run.run_step == 1
        return {
            "tool_choice": ["weather"] if first else "none",
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_tokens": 300 if first else 8,
            "extra_headers": {"X-Kvd-Agent": f"framework {stream}"},
        }

    async def run() -> pydantic_ai.AgentRunResult[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk:
            model = OpenAIChatModel("gpt-x", provider=OpenAIProvider(openai_client=sdk))
            agent = pydantic_ai.Agent(model, instructions=WORDS * 30, model_settings=settings)

            @agent.tool_plain
            def weather(city: Literal["Oslo", "Rome"]) -> str:
                """Tell the weather of a city."""
                asked.append(city)
                return "4 degrees"

            if not stream:
                return await agent.run("What is the weather?")
            async with agent.run_stream_events("What is the weather?") as events:
                async for event in events:  # noqa: B007  (the last one has the result)
                    pass
            return event.result

    result = asyncio.run(run())
    assert len(asked) == 1
    assert asked[0] in ("Oslo", "Rome")
    first, second = (each for each in result.all_messages() if each.kind == "response")
    assert first.tool_calls
    assert result.output == second.text
    held = first.usage.input_tokens + first.usage.output_tokens
    assert held - second.usage.cache_read_tokens <= 1


# ---- metrics and the dashboard that shows them ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def scraped(served: Served) -> dict[str, set[str]]:
    """Names of samples -> the values of their label `figure`; names of families as the documentation has them."""
    found: dict[str, set[str]] = {}
    text = served.ask("GET", "/metrics").body.decode()
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):  # when a counter began, for readers of OpenMetrics
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for suffix in ("", "_bucket", "_count", "_sum") if family.type == "histogram" else ("",):
            found.setdefault(name + suffix, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).add(sample.labels.get("figure", ""))
    return found


def test_every_metric_is_listed(scraped: dict[str, set[str]]) -> None:
    """docs/gateway.md lists what a scrape has, and nothing else; the daemon's figures are in docs/commands.md."""
    listed = set(re.findall(r"^\| `(kvd_gateway_\w+)` \|", (DOCS / "gateway.md").read_text(), re.MULTILINE))
    assert listed == {re.sub("_(bucket|count|sum)$", "", name) for name in scraped}
    figures = set(re.findall(r"`(\w+)`", (DOCS / "commands.md").read_text()))
    health = {"running", "queued", "preempted", "max_batch"}
    assert (scraped["kvd_gateway_daemon"] | scraped["kvd_gateway_daemon_part"]) - figures - health == set()
    assert scraped["kvd_gateway_daemon_part"] >= {"pages", "prefetched_pages"}


def test_the_dashboard_shows_what_there_is(scraped: dict[str, set[str]]) -> None:
    """grafana/kvd.json: every metric and figure in it is in a scrape, every panel has a unit and a description."""
    board = json.loads((DOCS.parent / "grafana" / "kvd.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert len({panel["title"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            for name, labels in re.findall(r"(kvd_\w+)(\{[^}]*\})?", target["expr"]):
                assert name in scraped, panel["title"]
                for figure in re.findall(r'figure="(\w+)"', labels):
                    assert figure in scraped[name], f"{panel['title']}: {figure}"
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "instance"}
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in panels]
    for x, y, width, height in places:
        assert x + width <= 24
        assert sum(x < a + w and a < x + width and y < b + h and b < y + height for a, b, w, h in places) == 1
