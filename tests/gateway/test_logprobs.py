"""Log-probabilities belong to the answer's text: they open and close nothing, and none of others is told with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvd.gateway.answers import ContentTokens
from kvd_client.logprobs import TokenLogprob
from tests.gateway.daemons import ScriptedDaemon, text
from tests.gateway.serving import Reply, Served

CALL = {"name": "f", "arguments": "{}"}
SPELT = ["<think>", "Hm", " Hi", "</think>", "\n\n", "Hi", " y", "ou", "<call>", "f{}", "</call>"]
"""What the model sampled; the first and the last markers are control tokens."""
MESSAGE = {
    "role": "assistant",
    "content": "Hi you",
    "reasoning_content": "Hm Hi",
    "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
}


def token(spelt: str | bytes) -> dict[str, object]:
    """A token as the daemon tells it; control tokens have no bytes."""
    data = spelt.encode() if isinstance(spelt, str) else spelt
    is_control = data in (b"<think>", b"<call>", b"</call>")
    told = {"id": 1, "token": data.decode(errors="replace"), "bytes": None if is_control else data, "logprob": -0.5}
    return {**told, "top_logprobs": []}


def told(*spelt: str) -> dict[str, object]:
    """A `logprobs` event."""
    return {"type": "logprobs", "logprobs": [token(each) for each in spelt]}


def script(scripted: ScriptedDaemon) -> None:
    """A turn with reasoning, text and a call; each token is told as it was sampled, texts when they are certain."""
    scripted.script(
        told(SPELT[0]),
        {"type": "reasoning", "text": "Hm"},
        told(SPELT[1]),
        {"type": "reasoning", "text": " Hi"},
        *(told(each) for each in SPELT[2:6]),
        text("Hi"),
        text(" y"),
        told(" y"),
        told("ou"),
        text("ou"),
        *(told(each) for each in SPELT[8:]),
        {"type": "tool_call", "index": 0, "id": "c1", **CALL},
        message=MESSAGE,
        finish_reason="tool_calls",
        logprobs=[token(each) for each in SPELT],
    )


def asked(served: Served, path: str, stream: bool) -> Reply:
    """A turn with log-probabilities."""
    body: dict[str, Any] = {"model": "tiny", "stream": stream}
    if path == "/v1/responses":
        return served.post(path, {**body, "input": "x", "include": ["message.output_text.logprobs"]})
    return served.post(path, {**body, "messages": [{"role": "user", "content": "x"}], "logprobs": True})


def spelt_in(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Texts of told tokens."""
    return [entry["token"] for entry in entries]


def test_a_response_stream_keeps_its_items_whole(served: Served, scripted: ScriptedDaemon) -> None:
    """One item each for reasoning, text and call, whatever tokens come between; the text's alone are told."""
    script(scripted)
    events = [data for _, data in asked(served, "/v1/responses", True).events]
    added = [data["item"]["type"] for data in events if data["type"] == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call"]
    deltas = [data for data in events if data["type"] == "response.output_text.delta"]
    assert "".join(data["delta"] for data in deltas) == "Hi you"
    assert spelt_in([entry for data in deltas for entry in data["logprobs"]]) == ["Hi", " y", "ou"]
    (message,) = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
    assert spelt_in(message["content"][0]["logprobs"]) == ["Hi", " y", "ou"]


def test_a_chat_stream_tells_the_texts_tokens(served: Served, scripted: ScriptedDaemon) -> None:
    """Not those of reasoning and calls."""
    script(scripted)
    events = [data for _, data in asked(served, "/v1/chat/completions", True).events if data != "[DONE]"]
    found = [entry for data in events for entry in (data["choices"][0]["logprobs"] or {}).get("content", [])]
    assert spelt_in(found) == ["Hi", " y", "ou"]


def test_whole_answers_tell_the_texts_tokens(served: Served, scripted: ScriptedDaemon) -> None:
    """As their streams do."""
    script(scripted)
    choice = asked(served, "/v1/chat/completions", False).json["choices"][0]
    assert spelt_in(choice["logprobs"]["content"]) == ["Hi", " y", "ou"]
    output = asked(served, "/v1/responses", False).json["output"]
    (message,) = [item for item in output if item["type"] == "message"]
    assert spelt_in(message["content"][0]["logprobs"]) == ["Hi", " y", "ou"]


@pytest.mark.parametrize(
    ("said", "sampled", "found"),
    [
        ("zo\u00eb!", [b"zo", b"\xc3", b"\xab", b"!"], [b"zo", b"\xc3", b"\xab", b"!"]),
        ("a\ufffdb", [b"a", b"\xff", b"b"], [b"a", b"\xff", b"b"]),
        ("a\ufffdb", [b"a", b"\xe2\x82", b"b"], [b"a", b"\xe2\x82", b"b"]),
        ("stop", [b"\n\nst", b"op.END"], [b"\n\nst", b"op.END"]),
        ("x", [b"<m>", b"x", b"</m>"], [b"x"]),
        ("", [b"x"], []),
    ],
)
def test_tokens_are_found_by_what_they_spell(said: str, sampled: list[bytes], found: list[bytes]) -> None:
    """Parts of characters, bytes that are none, white space before the text, and a token that a stop string cuts."""
    places = ContentTokens()
    places.sampled(TokenLogprob(1, "", each, -0.5) for each in sampled)
    places.said(said, is_content=True)
    assert [each.bytes for each in places.take(ended=True)] == found
