"""Agents that run at the same time on a real daemon: hits stay hits, nobody goes on from another, nobody is starved."""

from __future__ import annotations

import itertools
import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvd_client import AgentInfo, errors
from kvd_client.stream import StreamEvent, Text
from tests.support.daemon import Daemon, MakeDaemon, ageless, eventually, short_folder
from tests.support.prose import prose
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.daemon

LONG = 3000
"""New tokens that outlast a test; whoever makes them is cancelled at its end."""


@contextmanager
def decoding(daemon: Daemon, count: int) -> Iterator[None]:
    """Meanwhile so many agents decode."""
    with ExitStack() as stack:
        held: list[Iterator[StreamEvent]] = []  # an iterator that is let go of cancels its call
        for i in range(count):
            client = stack.enter_context(daemon.new_client())
            stream = stack.enter_context(client.generate_stream(f"background-{i}", prose(40, i), max_tokens=LONG))
            held.append(iter(stream))
            assert any(isinstance(event, Text) for event in held[-1])
        yield


def pages_of(daemon: Daemon, agent: str) -> set[str]:
    """Every page that the agent maps, tails left out."""
    branches = daemon.client.residency(agent)["agents"][0]["branches"]
    return {page["page"] for branch in branches for segment in branch["segments"] for page in segment["pages"]}


def info_of(daemon: Daemon, agent: str) -> AgentInfo:
    """Its facts."""
    return ageless(daemon.client.agent_info(agent))


def test_five_turns_in_a_row_are_hits_while_others_decode(daemon: Daemon) -> None:
    """P16: in a batch, too, no hit, miss, hit, miss: each turn reuses everything but the pending token."""
    text, known = prose(250, "p16-batched"), 0
    before = daemon.statistics()
    with decoding(daemon, 2):
        for turn in range(5):
            result = daemon.client.generate("p16-batched", text, max_tokens=6)
            assert (result.match, result.cached_tokens) == ("extend" if turn else "new", known)
            text += result.text + prose(9, turn)
            known = info_of(daemon, "p16-batched").computed_tokens
    after = daemon.statistics()
    assert after["decode_rows"] - before["decode_rows"] > after["decode_steps"] - before["decode_steps"]
    assert after["largest_batch"] >= 3


def test_agents_that_get_the_same_text_stay_apart(daemon: Daemon) -> None:
    """P10, P19: injected into three agents and answered in one batch: each goes on from its own."""
    agents, shared = [f"p19-{i}" for i in range(3)], prose(520, "p19-shared")
    own = {agent: prose(30 + 5 * i, agent) for i, agent in enumerate(agents)}
    with decoding(daemon, 1):
        for agent in agents:
            daemon.client.inject(agent, own[agent], priority="interactive")
        parts = daemon.client.inject_into(agents, shared)
        assert [(part.agent, part.appended_tokens, part.error) for part in parts] == [(a, 520, None) for a in agents]
        assert [part.tokens for part in parts] == [550, 555, 560]
        assert [part.server["cached_tokens"] for part in parts] == [30, 35, 40]

        def ask(agent: str) -> Any:
            with daemon.new_client() as client:
                return client.generate(agent, own[agent] + shared + prose(5, "q"), max_tokens=8)

        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(ask, agents))
    for agent, part, answer in zip(agents, parts, answers, strict=True):
        assert (answer.match, answer.cached_tokens, answer.prompt_tokens) == ("extend", part.tokens, part.tokens + 5)
        whole = own[agent] + shared + prose(5, "q") + answer.text
        assert info_of(daemon, agent).text_bytes == len(whole.encode())
    pages = [pages_of(daemon, agent) for agent in agents]
    assert all(pages)
    assert all(left.isdisjoint(right) for left, right in itertools.combinations(pages, 2))


def test_one_bad_agent_does_not_lose_the_others(daemon: Daemon) -> None:
    """Injecting into several: the one without room says so by name and is unchanged; the others have the text."""
    client = daemon.client
    client.inject("full", prose(4000, "full"))
    before = info_of(daemon, "full")
    one, full, new = client.inject_into(["one", "full", "new"], prose(200, "added"), priority="interactive")
    assert [(part.tokens, part.appended_tokens, part.durable) for part in (one, new)] == [(200, 200, True)] * 2
    assert isinstance(full.error, errors.ContextFull)
    assert (full.agent, full.error.data["prompt_tokens"]) == ("full", 4200)
    assert info_of(daemon, "full") == before
    client.inject_into(["one"], " and")
    assert info_of(daemon, "one").tokens == 201


@pytest.mark.parametrize(
    ("agents", "said"),
    [
        ([], "1 to 64 names"),
        ([f"many-{i}" for i in range(65)], "1 to 64 names"),
        (["twice", "twice"], "'twice' twice"),
        (["good", ""], r"agents\[1\] must be 1 to 128"),
        (["good", 7], r"agents\[1\] must be a string"),
        ("abc", "1 to 64 names"),
    ],
    ids=["none", "too many", "twice", "empty", "number", "text"],
)
def test_a_malformed_list_of_agents_is_refused_as_a_whole(daemon: Daemon, agents: object, said: str) -> None:
    """What makes no sense fails by its parameter's name before anything is queued; no agent comes of it."""
    with pytest.raises(errors.InvalidParams, match=said) as refused:
        daemon.client.call("inject", {"agents": agents, "text": "x"})
    assert refused.value.data["parameter"] == "agents"
    with pytest.raises(errors.InvalidParams, match="either agent or agents"):
        daemon.client.call("inject", {"agent": "good", "agents": ["good"], "text": "x"})
    with pytest.raises(errors.AgentNotFound):
        daemon.client.agent_info("good")


def test_a_cancelled_injection_ends_all_its_parts(daemon: Daemon) -> None:
    """P34: what runs stops at its next step and what waits never starts; events say whose they are."""
    agents = [f"parts-{i}" for i in range(12)]
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(30)
        raw.connect(str(daemon.socket))
        raw.sendall(msgpack.packb([0, 1, "inject", [{"agents": agents, "text": prose(3900, "parts")}]]))
        for message in messages_of(raw):
            if message[0] == 2 and message[2][1]["type"] == "prefill":
                assert message[2][1]["agent"] in agents
                raw.sendall(msgpack.packb([2, "cancel", [1]]))
                break
        error = next(message for message in messages_of(raw) if message[0] == 1)[2]
    assert error["name"] == "cancelled"
    entries = error["data"]["agents"]
    assert [entry["agent"] for entry in entries] == agents
    assert {entry["error"]["name"] for entry in entries} == {"cancelled"}
    eventually(lambda: daemon.client.health().server["queued"] == 0, "nothing waits")
    held = {info.agent: info.computed_tokens for info in daemon.client.agents() if info.agent in agents}
    assert held
    assert max(held.values()) < 3900
    assert "parts-11" not in held


def messages_of(raw: socket.socket) -> Iterator[list[Any]]:
    """Messages as they come."""
    unpacker = msgpack.Unpacker()
    while data := raw.recv(1 << 16):
        unpacker.feed(data)
        yield from unpacker


def test_a_decoding_agent_goes_on_during_anothers_prefill(daemon: Daemon) -> None:
    """P35: between any two chunks of another's 4K prompt the agent that decodes gets tokens.

    Both calls are of one connection, whose events come in the order in which they were made.
    """
    word = daemon.client.tokenize(" the")[0]
    decodes = {"agent": "p35-decodes", "text": prose(20, "p35"), "max_tokens": LONG, "logit_bias": {str(word): 1000.0}}
    reads = {"agent": "p35-reads", "text": prose(4000, "p35-reads"), "max_tokens": 1}
    between: list[int] = []
    asked = done = False
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(30)
        raw.connect(str(daemon.socket))
        raw.sendall(msgpack.packb([0, 1, "generate", [decodes]]))
        for message in messages_of(raw):
            if message[0] == 1:
                assert message[1] == 2, "the agent that decodes ended too soon"
                assert message[2] is None
                done = True
                break
            number, event = message[2]
            if (number, event["type"]) == (1, "text"):
                if not asked:
                    raw.sendall(msgpack.packb([0, 2, "generate", [reads]]))
                    asked = True
                elif between:
                    between[-1] += 1
            elif (number, event["type"]) == (2, "prefill"):
                between.append(0)
    assert done
    assert len(between) == 8
    assert min(between[:-1]) >= 1, between


NUDGE = {"role": "system", "content": "Remember the topic."}

TAKES_TURNS = (
    "{% for m in messages %}{% set spoken = loop.index0 - (messages[0].role == 'system') %}"
    "{% if spoken >= 0 and (m.role == 'user') != (spoken % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("takes_nudges", [True, False], ids=["in place", "as user text"])
def test_a_nudge_in_mid_conversation_costs_its_own_tokens_only(
    make_daemon: MakeDaemon, tmp_path: Path, takes_nudges: bool
) -> None:
    """P13: a system message between turns extends the conversation, in each of five turns, sent or injected.

    The same holds for a model whose template refuses it: there it travels as user text, in its place.
    """
    model = make_tiny_model(tmp_path / "model")
    if not takes_nudges:
        config = model / "tokenizer_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TAKES_TURNS}))
    with make_daemon(model=model) as daemon:
        client = daemon.client
        messages = [{"role": "system", "content": "Be brief."}]
        known = 0
        for turn in range(5):
            question = {"role": "user", "content": prose(20, turn).strip()}
            if turn == 3:  # somebody else injects it, and the client's history has it all the same
                added = client.inject("nudged", messages=[NUDGE, question])
                assert added.appended_tokens < 90
                known = added.tokens
            messages += [NUDGE, question] if turn else [question]
            result = client.chat("nudged", messages, max_tokens=6)
            assert (result.match, result.cached_tokens) == ("extend" if turn else "new", known), turn
            assert not turn or result.prompt_tokens - known < 90
            messages.append({"role": "assistant", "content": result.text})
            known = info_of(daemon, "nudged").computed_tokens
        info = info_of(daemon, "nudged")
        assert info.branches == 1


def test_injected_messages_are_where_chat_expects_them(daemon: Daemon) -> None:
    """Cross-phase context as messages: to a new agent, behind an answer, behind another injection, in a warm start."""
    client = daemon.client
    system, context = {"role": "system", "content": "Be brief."}, {"role": "user", "content": prose(300, "ctx").strip()}
    client.inject("msgs", messages=[system, context])
    warm = client.chat("msgs", [system, context], max_tokens=0)  # opens an answer that nobody gives
    assert (warm.match, warm.completion_tokens) == ("extend", 0)
    note, more = ({"role": "user", "content": prose(25, name).strip()} for name in ("note", "more"))
    first = client.inject("msgs", messages=[note])
    assert first.appended_tokens < 50
    second = client.inject("msgs", messages=[more])
    assert second.tokens == first.tokens + second.appended_tokens
    history = [system, context, note, more]
    answer = client.chat("msgs", history, max_tokens=5)
    assert (answer.match, answer.cached_tokens) == ("extend", second.tokens)
    third = client.inject("msgs", messages=[{"role": "user", "content": "the end"}])
    history += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "the end"}]
    last = client.chat("msgs", history, max_tokens=1)
    assert (last.match, last.cached_tokens) == ("extend", third.tokens)
    # a fresh agent with the same history computes the same number of tokens, all of them
    assert client.chat("msgs-twin", history, max_tokens=1).prompt_tokens >= last.prompt_tokens - 5


WATCHED = """
import json, sys, threading
from pathlib import Path
from kvd import launcher
launcher.prepare()
import mlx.core as mx

callers = {}

def watch(name, function):
    def watched(*args, **kwargs):
        callers.setdefault(threading.current_thread().name, set()).add(name)
        return function(*args, **kwargs)
    return watched

for module in (mx, mx.fast, mx.random, mx.linalg):
    for name, value in list(vars(module).items()):
        if type(value).__name__ == "nb_func":
            setattr(module, name, watch(name, value))

from kvd.cli import main
out = Path(sys.argv.pop(1))
try:
    main()
finally:
    out.write_text(json.dumps({name: sorted(found) for name, found in callers.items()}))
"""


class WatchedDaemon(Daemon):
    """A daemon that notes which thread called which function of MLX."""

    @property
    def callers(self) -> dict[str, list[str]]:
        """Functions by thread; there once it has ended."""
        found: dict[str, list[str]] = json.loads((self.folder / "callers.json").read_text())
        return found

    def command(self, *options: str) -> list[str]:
        """The command line that starts this daemon, watched."""
        serve = super().command(*options)[3:]
        return [sys.executable, "-c", WATCHED, str(self.folder / "callers.json"), *serve]


def test_one_thread_calls_mlx(tiny_model_dir: Path) -> None:
    """P36: with batches, prefetches, evictions, injections and many connections, MLX hears from the engine alone."""
    with short_folder() as folder:
        daemon = WatchedDaemon(folder, tiny_model_dir, ("--check", "--budget", "4MB"))
        try:
            daemon.start()

            def work(number: int) -> None:
                agent = f"p36-{number}"
                text = prose(300 + 20 * number, agent)
                with daemon.new_client() as client:
                    text += client.generate(agent, text, max_tokens=20, temperature=0.7, seed=number).text
                    client.evict(agent)
                    client.prefetch(agent)
                    client.inject_into([agent, f"{agent}-too"], prose(30, "x"))
                    client.chat(f"{agent}-chat", [{"role": "user", "content": "hello"}], max_tokens=8)

            with ThreadPoolExecutor(5) as pool:
                list(pool.map(work, range(5)))
            figures = daemon.statistics()
            assert figures["largest_batch"] >= 2
            assert daemon.terminate() == 0
            callers = daemon.callers
        finally:
            daemon.kill()
    assert len(callers["kvd-engine"]) > 10
    assert "eval" in callers["kvd-engine"]
    others = {name: found for name, found in callers.items() if name != "kvd-engine"}
    # decorators of modules that the main thread imports compile nothing yet
    assert set().union(*others.values()) <= {"compile"}, others
