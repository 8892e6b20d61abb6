"""The same promises with SmolLM2-135M: a real model's text, real page sizes, real memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from kvd.ops.footprint import process_footprint_bytes
from kvd_client.stream import Text
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.tool_calls import CALLS, parsed, transcript

pytestmark = [pytest.mark.daemon, pytest.mark.real_model, pytest.mark.timeout(240)]

BUDGET_BYTES = 40_000_000
AGENTS = 12
NEW = 20
"""New tokens after the restart."""


def article(name: str, characters: int) -> str:
    """Technical English that every Python has."""
    return str(topics[name])[:characters]


def test_a_conversation_survives_kill_9(make_daemon: MakeDaemon, smollm2_dir: Path) -> None:
    """P1, P2, P14, P32: after `kill -9` all KV is reused; answers equal an unbroken fork's, tool calls are exact."""
    daemon = make_daemon("--kv-format", "auto", "--sharing", "agent", model=smollm2_dir).start()
    messages = [
        {"role": "system", "content": "You answer questions about this text:\n" + article("assert", 1600)},
        {"role": "user", "content": "What does an assert statement do?"},
    ]
    first = daemon.client.chat("reader", messages, max_tokens=12)
    assert first.durable
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "When is it removed from the code?"},
    ]
    before = daemon.client.agent_info("reader")
    calls, request = transcript()
    assert daemon.client.inject("tools", calls).durable
    daemon.client.fork("reader", "unbroken")
    unbroken = daemon.client.chat("unbroken", messages, max_tokens=NEW)
    with daemon.new_client() as client, client.chat_stream("reader", messages, max_tokens=300) as stream:
        events = iter(stream)
        assert any(isinstance(event, Text) for event in events)
        daemon.kill()
    daemon.start()
    computed = daemon.statistics()["tokens_computed"]
    again = daemon.client.chat("reader", messages, max_tokens=NEW)
    assert again.text == unbroken.text
    assert again.match == "extend"
    assert again.cached_tokens == unbroken.cached_tokens == before.computed_tokens > 256
    steps = daemon.statistics()["tokens_computed"] - computed
    assert steps == again.prompt_tokens - again.cached_tokens + NEW - 1
    called = daemon.client.generate("tools", calls + request, max_tokens=60, stop=["\n"])
    assert called.cached_tokens > 0
    assert parsed(called.text) == CALLS[-1], called.text


class Footprints:
    """Samples a process's footprint while a block runs. Owner: the test."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.peak_bytes = 0

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.peak_bytes = max(self.peak_bytes, process_footprint_bytes(self._pid))

    def __enter__(self) -> Footprints:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()


def secrets() -> Iterator[tuple[str, str, str]]:
    """(agent, its context, its secret): each knows a number that nobody else has."""
    names = sorted(name for name in topics if len(topics[name]) > 1500)[:AGENTS]
    for i, name in enumerate(names):
        secret = f"{7919 * (i + 3) % 90000 + 10000}"
        context = f"The secret number is {secret}.\n\n{article(name, 1150)}\n\nThe secret number is {secret}.\n\n"
        yield f"agent-{i}", context, secret


def test_twelve_agents_in_forty_megabytes(make_daemon: MakeDaemon, smollm2_dir: Path) -> None:
    """P21, P23, P30, P33: the budget holds in the books and in the process, and each agent still knows its secret."""
    with make_daemon("--budget", "40MB", model=smollm2_dir) as daemon:
        idle = daemon.statistics()
        contexts = list(secrets())
        with Footprints(daemon.pid) as footprints:
            for agent, context, _ in contexts:
                assert daemon.client.inject(agent, context).durable
            for agent, context, secret in contexts:
                answer = daemon.client.generate(agent, context + "The secret number is", max_tokens=8)
                assert secret in answer.text, (agent, secret, answer.text)
                assert answer.cached_tokens == len(daemon.client.tokenize(context))
        busy = daemon.statistics()
        assert sum(info.server["total_bytes"] for info in daemon.client.agents()) > BUDGET_BYTES
        assert busy["evictions"] > 0
        assert busy["faults"] > 0
        assert busy["peak_resident_bytes"] <= busy["peak_budget_bytes"] <= BUDGET_BYTES
        assert busy["frame_bytes"] <= BUDGET_BYTES
        growth = footprints.peak_bytes - idle["footprint_bytes"]
        assert growth - busy["scratch_bytes"] <= BUDGET_BYTES, (growth, busy["scratch_bytes"])


def test_the_command_line_from_a_shell(make_daemon: MakeDaemon, smollm2_dir: Path, tmp_path: Path) -> None:
    """P40: `kvd serve`, `kvd-client` for three turns and a `kill -9` in between, with exact counts in the JSON."""
    daemon: Daemon = make_daemon(model=smollm2_dir).start()
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a page table that")
    cached = []
    for turn in range(3):
        if turn == 2:
            daemon.restart()
        done = daemon.cli("generate", "teller", "--file", str(text), "--max-tokens", "10", "--json")
        assert done.code == 0, done.stderr
        result = done.json
        assert (result["durable"], result["agent"]) == (True, "teller")
        assert result["match"] == ("exact" if turn else "new")
        cached.append(result["cached_tokens"])
        assert result["cached_tokens"] == (result["prompt_tokens"] - 1 if turn else 0)
        text.write_text(text.read_text() + result["text"])
    assert cached == sorted(set(cached))
    assert daemon.cli("show", "teller", "--json").json["text_bytes"] == len(text.read_bytes())
    assert daemon.cli("health").code == 0
