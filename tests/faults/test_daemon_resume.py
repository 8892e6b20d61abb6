"""Streams over a `kill -9` of their daemon, and over the loss of their connection alone. Real processes, real sockets.

Between two kills the daemon runs on: agents are told apart by name, and each has a twin that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd_client import AsyncClient, Client, ConnectionLost, GenerateResult, GenerateStream
from kvd_client.errors import NotResumable
from kvd_client.stream import Reconnected, StreamEvent
from tests.support.daemon import Daemon, short_folder
from tests.support.prose import prose
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

MAX_TOKENS = 250
"""Enough to be in the middle when the stream is broken after a few events."""

BREAK_AT = 9
"""Text events before the break."""

OPTIONS = ("--sharing", "agent", "--drain-grace", "0")
SEEDED = {"temperature": 0.8, "seed": 11}


@pytest.fixture(scope="module")
def daemon(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Daemon]:
    """One daemon, killed now and then. Agents share nothing: each computes what it says."""
    with short_folder() as folder, Daemon(folder, tiny_model_dir, OPTIONS, zygote=zygote) as running:
        yield running


def restart(daemon: Daemon) -> Callable[[GenerateStream], None]:
    """Break a stream by a kill of the daemon, which is there again when the stream looks for it."""

    def act(stream: GenerateStream) -> None:
        daemon.kill()
        daemon.start()

    return act


def stop(daemon: Daemon) -> Callable[[GenerateStream], None]:
    """Break a stream by a daemon that is stopped, and gives nobody time to end."""

    def act(stream: GenerateStream) -> None:
        assert daemon.terminate() == 0
        daemon.start()

    return act


def cut_off(stream: GenerateStream) -> None:
    """Break a stream by the loss of its connection alone."""
    stream._at[0]._socket.shutdown(socket.SHUT_RDWR)


def read(stream: GenerateStream, act: Callable[[GenerateStream], None]) -> tuple[list[StreamEvent], GenerateResult]:
    """Read a stream to its end, and break it on the way."""
    events: list[StreamEvent] = []
    for event in stream:
        events.append(event)
        if sum(each.type == "text" for each in events) == BREAK_AT and event.type == "text":
            act(stream)
    return events, stream.result


def text_of(events: list[StreamEvent]) -> str:
    """All text events together."""
    return "".join(str(getattr(event, "text", "")) for event in events if event.type == "text")


@pytest.mark.leaks("behind a restart the daemon's own client has another connection")
@pytest.mark.parametrize(
    ("how", "options"),
    [("kill", {}), ("kill", {"logprobs": 1, **SEEDED}), ("connection", {}), ("stop", SEEDED)],
    ids=["kill-greedy", "kill-logprobs", "connection-greedy", "stop-seeded"],
)
def test_a_stream_goes_on_at_the_exact_token(daemon: Daemon, how: str, options: dict[str, Any]) -> None:
    """P2, P14: the same text as undisturbed, in events none of which comes twice; what was told before is said."""
    name = f"{how}-{'-'.join(options)}"
    start = prose(280, "resume")
    with Client(daemon.socket, timeout_s=60) as client:
        first = daemon.client.generate(f"{name}-twin", start, max_tokens=3)
        twin = daemon.client.generate(f"{name}-twin", start + first.text, max_tokens=MAX_TOKENS, **options)
        assert daemon.client.generate(name, start, max_tokens=3).text == first.text
        stream = client.generate_stream(name, start + first.text, max_tokens=MAX_TOKENS, **options)
        acts = {"kill": restart(daemon), "connection": cut_off, "stop": stop(daemon)}
        events, result = read(stream, acts[how])
        (broken,) = [event for event in events if isinstance(event, Reconnected)]
        assert 0 < broken.tokens < MAX_TOKENS
        assert result.text == twin.text == text_of(events)
        assert result.resumed_tokens == broken.tokens
        assert (result.prompt_tokens, result.completion_tokens) == (twin.prompt_tokens, twin.completion_tokens)
        assert result.logprobs == twin.logprobs
        assert result.durable
        kinds = [event.type for event in events]
        assert all(kinds.count(kind) == 1 for kind in ("matched", "first_token", "usage", "durable"))
        again = client.generate(name, start + first.text + result.text, max_tokens=1)
        assert again.match == "exact"


@pytest.mark.leaks("behind a restart the daemon's own client has another connection")
def test_a_chat_goes_on_for_the_async_client(daemon: Daemon) -> None:
    """The answer's message is whole, whoever reads it; the daemon was killed in the middle of it."""
    messages = [{"role": "user", "content": prose(40, "chat")}]
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "logit_bias": {"0": -100.0, "2": -100.0}, **SEEDED}
    twin = daemon.client.chat("chat-twin", messages, **options)

    async def run() -> tuple[list[StreamEvent], GenerateResult]:
        events: list[StreamEvent] = []
        client = AsyncClient(daemon.socket, timeout_s=60)
        async with client, client.chat_stream("chat", messages, **options) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == BREAK_AT + 4:
                    await asyncio.to_thread(restart(daemon), None)  # type: ignore[arg-type]
            return events, await stream.result()

    events, result = asyncio.run(run())
    assert [type(event) for event in events].count(Reconnected) == 1
    assert result.text == twin.text
    assert result.message == twin.message
    assert text_of(events) == twin.message["content"] if twin.message else False


def test_opted_out(daemon: Daemon) -> None:
    """With `resume_s` 0 a break is an error at once, as it is for calls that are no streams."""
    with Client(daemon.socket, timeout_s=60, resume_s=0.0) as client:
        stream = client.generate_stream("opted-out", prose(30, "out"), max_tokens=MAX_TOKENS)
        with pytest.raises(ConnectionLost):
            read(stream, cut_off)


def test_an_agent_that_was_changed_is_not_gone_on_with(daemon: Daemon) -> None:
    """An agent whose conversation is another one by now: an error that says so, never another agent's words."""
    messages = [{"role": "user", "content": prose(30, "one")}]
    said = daemon.client.chat("changed", messages, max_tokens=40, logit_bias={"2": -100.0}, **SEEDED)
    assert said.message is not None
    messages += [dict(said.message), {"role": "user", "content": prose(10, "two")}]

    def change(stream: GenerateStream) -> None:
        cut_off(stream)
        daemon.client.delete("changed")  # the ids that the model wrote go with it: its text has others

    with Client(daemon.socket, timeout_s=60) as client:
        stream = client.chat_stream("changed", messages, max_tokens=MAX_TOKENS)
        with pytest.raises(NotResumable, match="is not the one it began with"):
            read(stream, change)
