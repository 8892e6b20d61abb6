"""Log-probabilities from the model to both clients and the command line, on the real daemon."""

from __future__ import annotations

import asyncio
import math

import pytest

from kvd_client import AsyncClient, errors
from kvd_client.logprobs import TokenLogprob
from kvd_client.stream import Logprobs, Text
from tests.support.daemon import Daemon
from tests.support.prose import prose

pytestmark = pytest.mark.daemon


def test_both_clients_get_them_in_the_stream_and_in_the_result(daemon: Daemon) -> None:
    """One entry a token, the same twice; a greedy token is the most likely one; chances add up to at most one."""
    with daemon.client.generate_stream("told", prose(30, "told"), max_tokens=9, logprobs=5) as stream:
        events = list(stream)
        result = stream.result
    streamed = [each for event in events if isinstance(event, Logprobs) for each in event.logprobs]
    assert result.logprobs == tuple(streamed)
    assert len(streamed) == result.completion_tokens
    assert "".join(event.text for event in events if isinstance(event, Text)) == result.text
    assert b"".join(each.bytes or b"" for each in streamed).decode(errors="replace") == result.text
    for each in streamed:
        assert each.top_logprobs[0].id == each.id
        assert len(each.top_logprobs) == 5
        assert sum(math.exp(one.logprob) for one in each.top_logprobs) <= 1 + 1e-6

    async def ask() -> tuple[TokenLogprob, ...] | None:
        async with AsyncClient(daemon.socket, timeout_s=60) as client:
            return (await client.generate("twin", prose(30, "told"), max_tokens=9, logprobs=5)).logprobs

    assert asyncio.run(ask()) == result.logprobs
    silent = daemon.client.generate("silent", prose(30, "told"), max_tokens=9)
    assert (silent.text, silent.logprobs) == (result.text, None)


def test_a_chat_without_a_stream_has_them_in_its_result(daemon: Daemon) -> None:
    """`stream` false leaves out the events, not the field; 0 alternatives tell the sampled tokens alone."""
    messages = [{"role": "user", "content": "hi"}]
    with daemon.client.chat_stream("chat", messages, max_tokens=6, logprobs=0, stream=False) as stream:
        assert [event.type for event in stream] == ["first_token"]
        result = stream.result
    assert result.logprobs is not None
    assert len(result.logprobs) == result.completion_tokens
    assert all(each.top_logprobs == () for each in result.logprobs)


def test_the_command_line_prints_them(daemon: Daemon) -> None:
    """`--json` ends with them, bytes as integers; else each token is a line on stderr, and stdout stays the text."""
    arguments = ("generate", "cli", "--text", prose(20, "cli"), "--max-tokens", "5", "--logprobs", "2")
    told = daemon.cli(*arguments, "--json").json
    assert list(told)[-1] == "logprobs"
    assert len(told["logprobs"]) == told["completion_tokens"]
    assert all(isinstance(byte, int) for each in told["logprobs"] for byte in each["bytes"] or ())
    plain = daemon.cli(*arguments[:1], "cli-2", *arguments[2:])
    assert plain.stdout == told["text"]
    assert len(plain.stderr.strip().splitlines()) == 1 + told["completion_tokens"]
    assert "logprobs" not in daemon.cli(*arguments[:1], "cli-3", *arguments[2:-2], "--json").json
    assert daemon.cli(*arguments[:-1], "21").code == 2


def test_wrong_values_are_refused_with_what_is_allowed(daemon: Daemon) -> None:
    """Out of range, or more than a call may hold."""
    with pytest.raises(errors.InvalidParams, match="logprobs must be from 0 to 20, not 21"):
        daemon.client.generate("wrong", "x", logprobs=21)
    with pytest.raises(errors.InvalidParams, match="logprobs 20 takes max_tokens of at most 3120, not 4000"):
        daemon.client.generate("wrong", "x", logprobs=20, max_tokens=4000)
    assert not any(info.agent == "wrong" for info in daemon.client.agents())
