"""Each dialect in both directions, against a daemon whose turns are written down: what it is asked, what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.daemons import ScriptedDaemon, text
from tests.gateway.serving import Served

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {"type": "tool_call", "index": 0, "id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
SECOND = {"type": "tool_call", "index": 1, "id": "call_2", "name": "weather", "arguments": '{"city": "Rome"}'}
CALLED: dict[str, Any] = {
    "finish_reason": "tool_calls",
    "message": {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        ],
    },
}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
HI = [{"role": "user", "content": "Hi"}]


def chat(**more: Any) -> dict[str, Any]:
    """A request of chat completions."""
    return {"model": "tiny", "messages": HI, **more}


def message(**more: Any) -> dict[str, Any]:
    """A request of messages."""
    return {"model": "claude-x", "max_tokens": 9, "messages": HI, **more}


def calling(daemon: ScriptedDaemon) -> None:
    """The model thinks, speaks and calls."""
    daemon.script({"type": "reasoning", "text": "Hm."}, text("Let me see."), CALL, **CALLED)


# ---- chat completions -----------------------------------------------------------------------------------------------


def test_chat_asks_the_daemon_for_what_was_asked(served: Served, scripted: ScriptedDaemon) -> None:
    """Every parameter that has a meaning here arrives, in the daemon's words; nothing else does."""
    body = chat(
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["END"],
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=2,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
        service_tier="flex",
        user="ann",
        store=True,
    )
    assert served.post("/v1/chat/completions", body).status == 200
    asked = scripted.of("chat")[0]
    assert asked.pop("agent").startswith("gw:user:ann:")
    assert asked == {
        "messages": HI,
        "namespace": "default",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["END"],
        "logit_bias": {"5": -100.0},
        "logprobs": 2,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
        "priority": "background",
        "on_context_full": "stop",
        "stream": False,
        "ttl_s": 30 * 86_400.0,
    }


def test_what_says_nothing_is_not_asked(served: Served, scripted: ScriptedDaemon) -> None:
    """Defaults that mean "as usual" are left out, so that a daemon without tools or formats serves plain requests."""
    body = chat(response_format={"type": "text"}, tool_choice="auto", n=1, frequency_penalty=0, stop=None)
    assert served.post("/v1/chat/completions", body).status == 200
    asked = scripted.of("chat")[0]
    assert not {"tools", "tool_choice", "parallel_tool_calls", "response_format", "logprobs"} & set(asked)
    assert asked["max_tokens"] == 4096
    assert asked["temperature"] == 1


def test_log_probabilities_fit_what_the_daemon_can_hold(served: Served, scripted: ScriptedDaemon) -> None:
    """Who asks for them and says no limit gets as many tokens as the daemon can tell them of, not an error."""
    served.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=20))
    served.post("/v1/responses", {"model": "tiny", "input": "x", "top_logprobs": 20})
    assert [asked["max_tokens"] for asked in scripted.of("chat")] == [3120, 3120]


def test_an_answer_says_how_its_prompt_matched(served: Served, scripted: ScriptedDaemon) -> None:
    """P12: where prompt and stored text part, in ASCII headers; a stream says how it matched, too."""
    parts = {"character": 3, "expected": "ä", "found": "b"}
    scripted.script(text("x"), match="diverge", match_reason="parts at character 3\nä", divergence=parts)
    headers = served.post("/v1/chat/completions", chat(), x_kvd_agent="me, myself").headers
    assert (headers["x-kvd-agent"], headers["x-kvd-match"]) == ("me, myself", "diverge")
    assert headers["x-kvd-match-reason"] == "parts at character 3 \\xe4"
    assert json.loads(headers["x-kvd-divergence"]) == {"character": 3}
    assert headers["x-kvd-cached-tokens"] == "7"
    headers = served.post("/v1/chat/completions", chat(stream=True), x_kvd_agent="me").headers
    assert (headers["x-kvd-match"], headers["x-kvd-prompt-tokens"]) == ("extend", "10")


def test_messages_stay_in_their_place(served: Served, scripted: ScriptedDaemon) -> None:
    """P13: a system message in mid-conversation is passed on where it stands; `developer` is `system`."""
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": CALLED["message"]["tool_calls"], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "4 degrees"},
        {"role": "system", "content": "It is late."},
        {"role": "user", "content": "And now?"},
    ]
    assert served.post("/v1/chat/completions", chat(messages=messages)).status == 200
    assert scripted.of("chat")[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": CALLED["message"]["tool_calls"],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "4 degrees"},
        {"role": "system", "content": "It is late."},
        {"role": "user", "content": "And now?"},
    ]


def test_chat_answers_with_calls(served: Served, scripted: ScriptedDaemon) -> None:
    """Text, reasoning and calls of an answer; P40: cached tokens are told exactly."""
    calling(scripted)
    answer = served.post("/v1/chat/completions", chat(tools=[TOOL])).json
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"] == CALLED["message"]["tool_calls"]
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 7},
    }


def test_chat_streams_calls_whole_or_in_pieces(served: Served, scripted: ScriptedDaemon) -> None:
    """A call's chunks join to the call, however the daemon sends it; none is said twice."""
    pieces = [
        {"type": "tool_call_delta", "index": 1, "id": "call_2", "name": "weather", "arguments": '{"ci'},
        {"type": "tool_call_delta", "index": 1, "arguments": 'ty": "Rome"}'},
        {"type": "tool_call", "index": 1, "id": "call_2", "name": "weather", "arguments": '{"city": "Rome"}'},
    ]
    scripted.script(text("So"), CALL, *pieces, **CALLED)
    body = chat(tools=[TOOL], stream=True, stream_options={"include_usage": True})
    *chunks, (_, done) = served.post("/v1/chat/completions", body).events
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for _, chunk in chunks if chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == "So"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    joined: dict[int, str] = {}
    for call in calls:
        joined[call["index"]] = joined.get(call["index"], "") + call["function"]["arguments"]
    assert joined == {0: '{"city": "Oslo"}', 1: '{"city": "Rome"}'}
    assert [call["id"] for call in calls if "id" in call] == ["call_1", "call_2"]
    assert chunks[-2][1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1][1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}


def test_usage_comes_only_when_asked_for(served: Served) -> None:
    """A stream without `stream_options` has no chunk of figures, as with the service."""
    chunks = served.post("/v1/chat/completions", chat(stream=True)).events
    assert all("usage" not in chunk for _, chunk in chunks[:-1])


# ---- completions ----------------------------------------------------------------------------------------------------


def test_completions_send_the_text_as_it_is(served: Served, scripted: ScriptedDaemon) -> None:
    """The prompt is the agent's whole text; the answer only the new one."""
    reply = served.post("/v1/completions", {"model": "tiny", "prompt": " Once\n", "temperature": 0}, x_kvd_agent="tale")
    asked = scripted.of("generate")[0]
    assert (asked["agent"], asked["text"], asked["max_tokens"]) == ("tale", " Once\n", 16)
    choice = reply.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "stop")
    streamed = served.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}).events
    assert "".join(chunk["choices"][0]["text"] for _, chunk in streamed[:-1]) == "Hello"


# ---- responses ------------------------------------------------------------------------------------------------------


def test_response_items_become_messages(served: Served, scripted: ScriptedDaemon) -> None:
    """Text, calls and reasoning of one answer are one message; P13: a system item stays in its place."""
    body = {
        "model": "tiny",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "4 degrees"},
            {"role": "developer", "content": "It is late."},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "weather"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "max_output_tokens": 5,
    }
    assert served.post("/v1/responses", body).status == 200
    asked = scripted.of("chat")[0]
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "4 degrees"},
        {"role": "system", "content": "It is late."},
    ]
    assert asked["tools"] == [TOOL]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert asked["response_format"] == {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "a"}}


def test_a_response_and_its_stream_say_the_same(served: Served, scripted: ScriptedDaemon) -> None:
    """The last event has the same output as the whole response; events are numbered without gaps."""
    calling(scripted)
    body = {"model": "tiny", "input": "Hi", "tools": [{"type": "function", **FUNCTION}]}
    whole = served.post("/v1/responses", body).json
    events = served.post("/v1/responses", {**body, "stream": True}).events
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    last = events[-1][1]
    assert last["type"] == "response.completed"

    def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in item.items() if name != "id"} for item in items]

    assert without_ids(last["response"]["output"]) == without_ids(whole["output"])
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 7}
    opened = [data["item"]["id"] for name, data in events if name == "response.output_item.added"]
    assert opened == [data["item"]["id"] for name, data in events if name == "response.output_item.done"]


def test_a_response_streams_each_call_as_an_item(served: Served, scripted: ScriptedDaemon) -> None:
    """Calls that follow each other, one of them in pieces: an item opens and closes with the same id and call."""
    pieces = [
        {"type": "tool_call_delta", "index": 1, "id": "call_2", "name": "weather", "arguments": '{"city"'},
        {"type": "tool_call_delta", "index": 1, "arguments": ': "Rome"}'},
    ]
    scripted.script(CALL, *pieces, SECOND, **CALLED)
    events = served.post("/v1/responses", {"model": "tiny", "input": "Hi", "stream": True}).events
    opened = [data["item"] for name, data in events if name == "response.output_item.added"]
    closed = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [(item["id"], item["call_id"]) for item in opened] == [(item["id"], item["call_id"]) for item in closed]
    assert [(item["call_id"], item["arguments"]) for item in closed] == [
        ("call_1", '{"city": "Oslo"}'),
        ("call_2", '{"city": "Rome"}'),
    ]
    deltas = "".join(data["delta"] for name, data in events if name == "response.function_call_arguments.delta")
    assert deltas == '{"city": "Oslo"}{"city": "Rome"}'


def test_a_cut_response_is_incomplete(served: Served, scripted: ScriptedDaemon) -> None:
    """`length` is `incomplete` with its reason, in both forms."""
    scripted.script(text("He"), finish_reason="length")
    whole = served.post("/v1/responses", {"model": "tiny", "input": "Hi"}).json
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    events = served.post("/v1/responses", {"model": "tiny", "input": "Hi", "stream": True}).events
    assert events[-1][0] == "response.incomplete"


# ---- messages -------------------------------------------------------------------------------------------------------


def test_blocks_become_messages(served: Served, scripted: ScriptedDaemon) -> None:
    """Results of tools are messages of their own, in the order of the blocks; P13: system text stays in place."""
    body = message(
        system=[{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "B"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "Let me "},
                    {"type": "text", "text": "see."},
                    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "4 degrees", "is_error": True},
                    {"type": "text", "text": "And Rome?"},
                ],
            },
            {"role": "system", "content": "It is late."},
        ],
        tools=[{"name": "weather", "description": "of a city", "input_schema": SCHEMA}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        top_k=5,
    )
    assert served.post("/v1/messages", body).status == 200
    asked = scripted.of("chat")[0]
    assert asked["messages"] == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": CALLED["message"]["tool_calls"],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Error: 4 degrees"},
        {"role": "user", "content": "And Rome?"},
        {"role": "system", "content": "It is late."},
    ]
    assert asked["tools"] == [TOOL]
    assert (asked["tool_choice"], asked["parallel_tool_calls"]) == ("required", False)
    assert (asked["stop"], asked["top_k"], asked["max_tokens"]) == (["END"], 5, 9)
    assert asked["response_format"] == {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def test_a_message_has_blocks_and_counts(served: Served, scripted: ScriptedDaemon) -> None:
    """P40: `input_tokens` excludes the cached ones, which have a field of their own."""
    calling(scripted)
    answer = served.post("/v1/messages", message(tools=[{"name": "weather", "input_schema": SCHEMA}])).json
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][2]["input"] == {"city": "Oslo"}
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 7,
        "output_tokens": 4,
    }


def test_a_message_streams_its_blocks(served: Served, scripted: ScriptedDaemon) -> None:
    """Blocks open, fill and close in turn; the counts of the prompt stand in the first event, all in the last."""
    calling(scripted)
    events = served.post("/v1/messages", message(stream=True)).events
    assert [name for name, _ in events] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["usage"]["input_tokens"], start["usage"]["cache_read_input_tokens"]) == (3, 7)
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1, 2]
    assert events[8][1]["delta"] == {"type": "input_json_delta", "partial_json": '{"city": "Oslo"}'}
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 4


@pytest.mark.parametrize(
    ("result", "reason", "sequence"),
    [
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "stop", "stop_string": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "length", "context_full": True}, "model_context_window_exceeded", None),
    ],
)
def test_a_message_says_why_it_ended(
    served: Served, scripted: ScriptedDaemon, result: dict[str, Any], reason: str, sequence: str | None
) -> None:
    """End of turn, a stop sequence by name, the limit, or the context."""
    scripted.script(text("Hi"), **result)
    answer = served.post("/v1/messages", message()).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_tokens_are_counted_by_the_daemon(served: Served, scripted: ScriptedDaemon) -> None:
    """`count_tokens` asks for the tokens of the conversation as `chat` would render it, and generates nothing."""
    reply = served.post("/v1/messages/count_tokens", {"model": "claude-x", "messages": HI, "system": "S"})
    assert reply.json == {"input_tokens": 3}
    assert scripted.of("tokenize") == [{"messages": [{"role": "system", "content": "S"}, *HI], "count_only": True}]
    assert scripted.of("chat") == []


def test_models_in_both_forms(served: Served) -> None:
    """The loaded model, by list and by name, as either service describes one."""
    listed = served.ask("GET", "/v1/models").json
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "tiny"
    assert served.ask("GET", "/v1/models/tiny").json == listed["data"][0]
    other = served.ask("GET", "/v1/models", headers={"anthropic-version": "2023-06-01"}).json
    assert other["data"][0]["type"] == "model"
    assert other["has_more"] is False
