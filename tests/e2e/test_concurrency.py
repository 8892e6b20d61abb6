"""Many clients at once, and clients that vanish, cancel, never read or send rubbish. One shared daemon."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest

from kvd_client import Client, ConnectionLost, GenerateStream, errors
from kvd_client.stream import Text
from tests.support.daemon import Daemon, daemon_environment, eventually
from tests.support.prose import prose

pytestmark = pytest.mark.daemon

LONG = 2500
"""New tokens that take several seconds: whoever stops them early shows in the counters."""

STREAMING_CLIENT = """
import sys
from kvd_client import Client
from kvd_client.stream import Text
with Client(sys.argv[1]).generate_stream(sys.argv[2], sys.argv[3], max_tokens=int(sys.argv[4])) as stream:
    for event in stream:
        if isinstance(event, Text):
            print("streaming", flush=True)
"""


def is_idle(daemon: Daemon) -> bool:
    """No request runs or waits."""
    health = daemon.client.health()
    return (health.server["running"], health.server["queued"]) == (0, 0)


def settled_tokens(daemon: Daemon) -> int:
    """Tokens computed so far, once nothing runs any more."""
    eventually(lambda: is_idle(daemon), "the daemon is idle")
    tokens: int = daemon.statistics()["tokens_computed"]
    return tokens


@contextlib.contextmanager
def long_stream(daemon: Daemon, agent: str, text: str) -> Iterator[GenerateStream]:
    """A generation on a connection of its own, with its first text received."""
    with daemon.new_client() as client, client.generate_stream(agent, text, max_tokens=LONG) as stream:
        events = iter(stream)  # held until the end: an iterator that is let go of cancels the call
        assert any(isinstance(event, Text) for event in events)
        yield stream


def test_threads_and_processes_get_their_own_answers(daemon: Daemon) -> None:
    """P33, P36: concurrent callers over shared and own connections get what a lone caller gets, nothing of others."""
    texts = {f"own-{i}": prose(200 + 40 * i, f"concurrent-{i}") for i in range(8)}
    alone = {agent: daemon.client.generate(f"alone-{agent}", text, max_tokens=12).text for agent, text in texts.items()}
    assert len(set(alone.values())) == len(texts)

    def with_own_connection(agent: str) -> str:
        with daemon.new_client() as client:
            return client.generate(agent, texts[agent], max_tokens=12).text

    def with_shared_connection(agent: str) -> str:
        return daemon.client.generate(f"shared-{agent}", texts[agent], max_tokens=12).text

    def with_own_process(agent: str) -> str:
        done = daemon.cli("generate", f"process-{agent}", "-", "--max-tokens", "12", "--json", stdin=texts[agent])
        text: str = done.json["text"]
        return text

    with ThreadPoolExecutor(max_workers=20) as pool:
        answers = [
            (agent, pool.submit(call, agent))
            for call, agents in (
                (with_own_connection, list(texts)),
                (with_shared_connection, list(texts)),
                (with_own_process, list(texts)[:3]),
            )
            for agent in agents
        ]
        for agent, answer in answers:
            assert answer.result() == alone[agent]


def test_turns_of_one_agent_keep_their_order(daemon: Daemon) -> None:
    """Requests for one agent that arrive together are served one after the other; none is lost or mixed."""
    with ThreadPoolExecutor(max_workers=6) as pool:
        results = list(pool.map(lambda i: daemon.client.inject("order", prose(50, i)), range(6)))
    assert sorted(result.tokens for result in results) == [50, 100, 150, 200, 250, 300]
    assert daemon.client.agent_info("order").computed_tokens == 300


def test_a_killed_client_stops_generating_and_keeps_its_kv(daemon: Daemon) -> None:
    """P34: `kill -9` of a client in mid-stream ends its request at the next step; what was computed resumes."""
    text = prose(300, "p34")
    command = [sys.executable, "-c", STREAMING_CLIENT, str(daemon.socket), "p34", text, str(LONG)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=daemon_environment()) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "streaming\n"
        client.kill()
        client.wait()
        at_death = daemon.statistics()["tokens_computed"]
    tokens = settled_tokens(daemon)
    assert tokens - at_death <= 3
    info = daemon.client.agent_info("p34")
    assert 300 < info.computed_tokens < 300 + LONG // 2
    assert info.durable
    again = daemon.client.generate("p34", text, max_tokens=1)
    assert again.cached_tokens == 299


def test_cancel_acts_on_one_request_only(daemon: Daemon) -> None:
    """P34, P33: the cancelled stream ends with its figures, its KV stays; a request that waits behind it is served."""
    text = prose(280, "cancel")
    waiting = prose(30, "waiting")
    with ThreadPoolExecutor(max_workers=1) as pool, long_stream(daemon, "cancel", text) as stream:
        behind = pool.submit(daemon.client.generate, "behind", waiting, max_tokens=4)
        stream.cancel()
        with pytest.raises(errors.Cancelled, match="computed tokens are kept") as cancelled:
            _ = stream.result
        assert behind.result().completion_tokens > 0
    data = cancelled.value.data
    info = daemon.client.agent_info("cancel")
    assert data["durable"] is True
    assert info.tokens == int(str(data["prompt_tokens"])) + int(str(data["completion_tokens"]))
    assert info.tokens - info.computed_tokens in (0, 1)
    assert 280 < info.tokens < 280 + LONG


def test_a_request_cancelled_in_the_queue_computes_nothing(daemon: Daemon) -> None:
    """What waits behind its agent's turn and is cancelled leaves no trace; the running request does not notice."""
    with long_stream(daemon, "runs", prose(50, "runs")) as running, daemon.new_client() as client:
        with client.generate_stream("runs", prose(400, "queued"), max_tokens=5) as queued:
            eventually(lambda: daemon.client.health().server["queued"] == 1, "the second request waits")
            queued.cancel()
            with pytest.raises(errors.Cancelled, match="nothing was computed"):
                _ = queued.result
        running.cancel()
    eventually(lambda: is_idle(daemon), "the daemon is idle")
    assert daemon.client.agent_info("runs").branches == 1
    assert daemon.client.generate("runs", prose(50, "runs"), max_tokens=1).match == "diverge"  # its own text is longer


def test_a_prefill_is_cancelled_between_chunks(daemon: Daemon) -> None:
    """P34: a long prompt whose client leaves stops at a chunk border; the chunks that are done are kept."""
    text = prose(4000, "prefill")
    with daemon.new_client() as client, client.generate_stream("prefill", text, max_tokens=2) as stream:
        for event in stream:
            if event.type == "prefill":
                break  # leaving the loop cancels
    settled_tokens(daemon)
    info = daemon.client.agent_info("prefill")
    assert 512 <= info.computed_tokens < 4000
    assert info.computed_tokens % 512 == 0
    assert daemon.client.generate("prefill", text, max_tokens=1).cached_tokens == info.computed_tokens


def test_a_client_that_never_reads_hinders_nobody(daemon: Daemon) -> None:
    """P33: its turn runs to its end while others are answered, and it finds everything when it reads at last."""
    text = prose(40, "lazy")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.connect(str(daemon.socket))
        lazy.sendall(msgpack.packb([0, 1, "generate", [{"agent": "lazy", "text": text, "max_tokens": 600}]]))
        eventually(lambda: any(info.agent == "lazy" for info in daemon.client.agents()), "the turn runs")
        assert daemon.client.generate("brisk", text, max_tokens=3).completion_tokens > 0
        assert settled_tokens(daemon) > 0
        assert daemon.client.agent_info("lazy").tokens > 600
        lazy.settimeout(30)
        unpacker, pieces, result = msgpack.Unpacker(), [], None
        while result is None:
            unpacker.feed(lazy.recv(1 << 16))
            for message in unpacker:
                if message[0] == 1:
                    assert message[2] is None
                    result = message[3]
                elif message[2][1]["type"] == "text":
                    pieces.append(message[2][1]["text"])
    assert "".join(pieces) == result["text"]
    assert result["durable"] is True


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xc1" * 64,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb([0, 1]),
        msgpack.packb([0, -5, "hello", []]),
        msgpack.packb([1, 1, None, {}]),
        b"\x91" * 5000,
        bytes(range(256)) * 40,
    ],
)
def test_rubbish_closes_its_own_connection_only(daemon: Daemon, rubbish: bytes) -> None:
    """Malformed input gets an error or a closed connection, never a crash; others do not notice."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(10)
        peer.connect(str(daemon.socket))
        with contextlib.suppress(BrokenPipeError):
            peer.sendall(rubbish)
            peer.shutdown(socket.SHUT_WR)
        unpacker = msgpack.Unpacker()
        with contextlib.suppress(ConnectionResetError):
            while data := peer.recv(4096):
                unpacker.feed(data)
        assert [message[1] for message in unpacker] in (["error"], [])
    assert daemon.client.health().ready


def test_a_connection_that_is_closed_cancels_all_its_requests(daemon: Daemon) -> None:
    """P34: one close ends the running and the waiting requests of that connection."""
    client = Client(daemon.socket, timeout_s=30)
    failures: list[str] = []

    def call(agent: str) -> None:
        try:
            client.generate(agent, prose(20, agent), max_tokens=LONG)
        except (ConnectionLost, errors.Cancelled) as error:
            failures.append(type(error).__name__)

    threads = [threading.Thread(target=call, args=(f"closed-{i % 2}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: daemon.client.health().server["queued"] == 2, "two run, two wait for their agents")
    assert daemon.client.health().server["running"] == 2
    before = daemon.statistics()["tokens_computed"]
    client.close()
    for thread in threads:
        thread.join(30)
    assert len(failures) == 4
    assert settled_tokens(daemon) - before < LONG // 2
