"""Hostile and careless clients against a real daemon: it answers, stays small, and keeps what it had.

Everything is seeded. Tests that make their inputs count them: a generator that quietly makes nothing is noticed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvd.ops.footprint import process_footprint_bytes
from kvd_client import AsyncClient, errors
from kvd_client.wire import CODES
from tests.support.daemon import Daemon, ageless, eventually, short_folder
from tests.support.prose import prose

pytestmark = pytest.mark.daemon

MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon(tiny_model_dir: Path) -> Iterator[Daemon]:
    """A daemon with an agent that every test finds as it was."""
    with short_folder() as folder, Daemon(folder, tiny_model_dir) as running:
        client = running.client
        client.generate("witness", prose(300, "witness"), max_tokens=4)
        client.pin("witness")
        _WITNESS[running.pid] = ageless(client.agent_info("witness"))
        yield running


_WITNESS: dict[int, object] = {}


@pytest.fixture(autouse=True)
def _unharmed(daemon: Daemon) -> Iterator[None]:
    """After each test: the daemon answers, its agent is intact, its descriptors are back, and it has not grown."""
    before_fds, before_bytes = _fds(daemon.pid) if HAS_FDS else 0, process_footprint_bytes(daemon.pid)
    yield
    with daemon.new_client(20) as client:
        assert client.health().ready
        assert ageless(client.agent_info("witness")) == _WITNESS[daemon.pid]
    if HAS_FDS:  # else `test_descriptors_come_back` is reported as skipped
        eventually(lambda: _fds(daemon.pid) <= before_fds, f"no more than {before_fds} descriptors")
    grown = process_footprint_bytes(daemon.pid) - before_bytes
    assert grown < 96 * MIB, f"the daemon grew by {grown >> 20} MiB"
    assert not [line for line in daemon.log_lines() if line["event"] in ("call_failed", "request_failed")]


HAS_FDS = Path("/proc/self/fd").exists()
"""Whether the descriptors of another process can be counted."""


def _fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _logged(daemon: Daemon, event: str) -> list[dict[str, Any]]:
    return [line for line in daemon.log_lines() if line["event"] == event]


class Raw:
    """A blocking socket that sends what it is told."""

    def __init__(self, daemon: Daemon) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(str(daemon.socket))  # blocking: with a timeout a full backlog would refuse at once
        except BaseException:
            self.socket.close()
            raise
        self.socket.settimeout(20)
        self._unpacker = msgpack.Unpacker(max_buffer_size=1 << 27, strict_map_key=False)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Write, if the daemon still reads."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def messages(self) -> Iterator[list[Any]]:
        """What comes, to the end of the stream."""
        while True:
            yield from self._unpacker
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionResetError:
                return
            if not data:
                return
            self._unpacker.feed(data)

    def responses(self, count: int) -> list[list[Any]]:
        """That many responses, in the order they came."""
        return list(itertools.islice((message for message in self.messages() if message[0] == 1), count))

    def ended_with(self) -> str:
        """Ends our side; the error's name that the daemon closed with, or an empty text when it closed quietly."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        names = [message[2][0]["name"] for message in self.messages() if message[:2] == [2, "error"]]
        assert len(names) <= 1
        return names[0] if names else ""


def request(number: object, method: object = "health", params: object = ()) -> bytes:
    """A request that may be anything."""
    packed: bytes = msgpack.packb([0, number, method, params], strict_types=False)
    return packed


@pytest.mark.skipif(not HAS_FDS, reason="without /proc nobody sees another process's descriptors")
def test_descriptors_come_back(daemon: Daemon) -> None:
    """The daemon holds a descriptor for each connection and none for connections that ended, well or badly."""
    before = _fds(daemon.pid)
    with ExitStack() as stack:
        raws = [stack.enter_context(Raw(daemon)) for _ in range(40)]
        for number, raw in enumerate(raws):
            raw.send(request(number))
            assert raw.responses(1)[0][1] == number
        assert _fds(daemon.pid) >= before + 40
        for raw in raws[::2]:
            raw.send(b"\xc1")
    eventually(lambda: _fds(daemon.pid) <= before, f"no more than {before} descriptors")


# ---- bytes ----------------------------------------------------------------------------------------------------------

NESTED = b"\x94\x00\x01\xa1m"
BOMBS: dict[str, bytes] = {
    "arrays": NESTED + b"\x91" * 1_000_000,
    "maps": NESTED + b"\x81\xa1k" * 500_000,
    "str32": NESTED + b"\xdb\xff\xff\xff\xff",
    "bin32": NESTED + b"\xc6\xff\xff\xff\xff" + b"x" * 1000,
    "array32": NESTED + b"\xdd\xff\xff\xff\xff",
    "map32": NESTED + b"\xdf\xff\xff\xff\xff",
    "outer array32": b"\xdd\xff\xff\xff\xff",
    "method str32": b"\x94\x00\x01\xdb\xff\xff\xff\xff",
    "id bin32": b"\x94\x00\xc6\xff\xff\xff\xff",
    "values": NESTED + b"\x91\x81\xa1k\xdd\x00\x03\xff\xff" + b"\xdd\x00\x03\xff\xff" * 60,
    "ext8": NESTED + b"\xc7\x04\x63abcd",
    "ext32": NESTED + b"\xc9\xff\xff\xff\xff\x01",
    "fixext": NESTED + b"\x91\xd4\x05x",
    "timestamp": NESTED + b"\x91\xd6\xff\x00\x00\x00\x00",
    "never used": b"\xc1",
    "number": b"\x07",
    "nil": b"\xc0",
    "http": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n{}",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "json": b'{"jsonrpc": "2.0", "id": 1, "method": "health"}\n',
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_by_their_headers(daemon: Daemon, name: str) -> None:
    """What announces too much, nests too deeply or is no message ends the connection with `protocol`, at once."""
    with Raw(daemon) as raw:
        raw.send(BOMBS[name])
        assert raw.ended_with() == "protocol"


def test_garbage(daemon: Daemon) -> None:
    """Random bytes, and valid requests with some bytes changed, cut or doubled, give `protocol` or typed answers."""
    rng, names = random.Random(20), Counter[str]()
    for _ in range(400):
        kind = rng.randrange(4)
        valid = request(rng.randrange(9), rng.choice(["health", "agent.info", "tokenize"]), [{"text": "abc é"}])
        spot = rng.randrange(len(valid))
        data = (
            rng.randbytes(rng.randrange(1, 300)),
            valid[:spot] + rng.randbytes(rng.randrange(1, 4)) + valid[spot + 1 :],
            valid[:spot],
            valid[:spot] + valid,
        )[kind]
        with Raw(daemon) as raw:
            raw.send(data)
            with suppress(OSError):
                raw.socket.shutdown(socket.SHUT_WR)
            for message in raw.messages():
                error = message[2] if message[0] == 1 else message[2][0] if message[1] == "error" else None
                names["ok" if error is None else error["name"]] += 1
                assert error is None or (error["name"] in CODES and error["name"] != "internal"), data
    assert sum(names.values()) >= 400
    assert names["protocol"] >= 200
    assert names.keys() >= {"protocol", "invalid_params", "method_not_found"}


@pytest.mark.parametrize("number", [-1, 2**63, 2**64 - 1, 1.0, float("nan"), None, "1", b"1", [1], {"a": 1}, True])
def test_odd_ids_break_the_connection(daemon: Daemon, number: object) -> None:
    """An id that is no integer from 0 to 2^63 - 1 cannot be answered: `protocol`, closed."""
    with Raw(daemon) as raw:
        raw.send(request(number))
        assert raw.ended_with() == "protocol"


@pytest.mark.parametrize(
    "message",
    [
        [],
        [0],
        [0, 1],
        [0, 1, "health"],
        [0, 1, "health", [], 5],
        [3, 1, "health", []],
        [-1, 1, "health", []],
        [None, 1, "health", []],
        [0, 1, 7, []],
        [0, 1, None, []],
        [0, 1, b"health", []],
        [0, 1, ["health"], []],
        [1, 99, None, {}],
        [1, 1],
        [2, "cancel"],
        [2, 7, []],
        [2, "x", 7],
        ["0", 1, "health", []],
    ],
)
def test_wrong_arity_and_types_break_the_connection(daemon: Daemon, message: list[object]) -> None:
    """A message that is none of the protocol's ends the connection, with the reason; answers before it still come."""
    with Raw(daemon) as raw:
        raw.send(request(5) + msgpack.packb(message))
        found = list(raw.messages()) if raw.socket.shutdown(socket.SHUT_WR) is None else []
        assert [message[2][0]["name"] for message in found if message[:2] == [2, "error"]] == ["protocol"]


@pytest.mark.parametrize("params", [{}, {"namespace": "a"}, [[]], [1], ["text"], [{}, {}], 7, "text", None, True])
def test_parameters_of_another_shape(daemon: Daemon, params: object) -> None:
    """Not one map in a list: the call is refused by its id, and the connection goes on (or ends with `protocol`)."""
    with Raw(daemon) as raw:
        raw.send(request(1, "health", params) + request(2))
        found = list(itertools.islice(raw.messages(), 2))
    if found[0][0] == 1:
        answers = {message[1]: message[2] for message in found}
        assert answers[1]["name"] == "invalid_params"
        assert answers[2] is None
    else:
        assert found[0][2][0]["name"] == "protocol"


def test_ids_in_flight_twice(daemon: Daemon) -> None:
    """A second request with the id of one in flight breaks the protocol; a free id may be used again."""
    with Raw(daemon) as raw:
        raw.send(request(1, "statistics") * 2)  # `health` is answered before the second is read
        assert raw.ended_with() == "protocol"
    with Raw(daemon) as raw:
        for _ in range(3):
            raw.send(request(1))
            assert [answer[1] for answer in raw.responses(1)] == [1]


def test_notifications_and_cancellations_of_nothing(daemon: Daemon) -> None:
    """Unknown notifications and cancellations of ids that are not in flight do nothing; the next call is answered."""
    rng = random.Random(21)
    with Raw(daemon) as raw:
        for turn in range(300):
            what = rng.choice(["cancel", "stream", "error", "tomorrow", ""])
            values = [rng.choice([0, 7, 2**63 - 1])] if what == "cancel" else [rng.randrange(9), {"type": "x"}]
            if what in ("stream", "error"):
                what += "s"
            raw.send(msgpack.packb([2, what, values]) + request(turn))
            answer = raw.responses(1)[0]
            assert (answer[1], answer[2]) == (turn, None)


# ---- many -----------------------------------------------------------------------------------------------------------


def test_ten_thousand_calls_at_once_are_each_answered_once(daemon: Daemon) -> None:
    """10,000 pipelined calls that are read: one answer each; what exceeds the connection's limit is `busy`."""
    with Raw(daemon) as raw:
        sent = b"".join(request(number) for number in range(10_000))
        done = 0
        answers: Counter[int] = Counter()
        names: Counter[str] = Counter()
        raw.socket.setblocking(False)
        while len(answers) < 10_000:
            if done < len(sent):
                with suppress(BlockingIOError):
                    done += raw.socket.send(sent[done : done + 65_536])
            with suppress(BlockingIOError):
                data = raw.socket.recv(1 << 18)
                assert data
                raw._unpacker.feed(data)
            for message in raw._unpacker:
                answers[message[1]] += 1
                names["" if message[2] is None else message[2]["name"]] += 1
    assert set(answers.values()) == {1}
    assert sorted(answers) == list(range(10_000))
    assert names.keys() <= {"", "busy"}
    assert names[""] >= 1024


def test_ten_thousand_calls_within_the_limit_are_all_carried_out(daemon: Daemon) -> None:
    """With at most 1,000 in flight every call has its result, in order of their ids within what is cheap."""

    async def run() -> list[str]:
        async with AsyncClient(daemon.socket) as client:
            found = []
            for _ in range(10):
                found += await asyncio.gather(*(client.health() for _ in range(1000)))
            return [health.status for health in found]

    assert asyncio.run(run()) == ["ready"] * 10_000


def test_a_client_that_never_reads_costs_bounded_memory(daemon: Daemon) -> None:
    """10,000 calls whose answers are never read: the daemon closes that client and goes on serving the others."""
    before = process_footprint_bytes(daemon.pid)
    with Raw(daemon) as probe:
        probe.send(b"\xc1")
        assert probe.ended_with() == "protocol"
    # the next ones count on from it; not the largest, since a daemon that was killed before counted for itself
    known = _logged(daemon, "protocol_error")[-1]["connection"]

    logged_bytes = daemon.log.stat().st_size

    def last_word(raw: Raw, connection: int) -> str:
        """Of the daemon, read as soon as it closes: it is kept for a few seconds only."""

        def is_closed() -> bool:
            # beside a busy daemon that logs a line a call: only what is new, and no more of it than its text
            with daemon.log.open("rb") as log:
                log.seek(logged_bytes)
                lines = [line for line in log.read().splitlines() if b'"slow_reader"' in line]
            return any(json.loads(line)["connection"] == connection for line in lines)

        eventually(is_closed, f"connection {connection} is closed", timeout_s=120, poll_s=0.25)
        raw.socket.settimeout(20)
        return raw.ended_with()

    with ExitStack() as stack:
        raws = [stack.enter_context(Raw(daemon)) for _ in range(3)]
        big = [{"text": "x" * 10_000}]
        data = b"".join(request(n, "tokenize", big) if n < 600 else request(n) for n in range(10_000))
        readers = stack.enter_context(ThreadPoolExecutor(len(raws)))
        words = [readers.submit(last_word, raw, known + 1 + number) for number, raw in enumerate(raws)]
        for raw in raws:
            raw.socket.settimeout(60)  # until it is closed, however slowly the daemon takes what is sent
            with suppress(OSError):
                raw.send(data)
        most = 0
        with daemon.new_client(20) as client:
            for turn in range(20):
                result = client.generate("well-behaved", prose(20 + turn, "good"), max_tokens=2)
                assert result.durable
                most = max(most, process_footprint_bytes(daemon.pid) - before)
            client.delete("well-behaved")
        assert most < 96 * MIB
        assert [word.result() for word in words] == ["slow_reader"] * len(raws)


def test_generations_nobody_reads_are_cancelled_with_their_client(daemon: Daemon) -> None:
    """A client that asks for streams, reads nothing and goes away leaves no running call behind (P34)."""
    with Raw(daemon) as raw:
        for number in range(20):
            params = [{"agent": f"unread-{number}", "text": prose(10, number), "max_tokens": 3000}]
            raw.send(request(number, "generate", params))
        eventually(lambda: daemon.client.health().server["running"], "a generation runs")
    eventually(lambda: not daemon.client.health().server["running"], "the generations end")
    assert daemon.client.health().server["queued"] == 0
    for info in daemon.client.agents():
        if info.agent.startswith("unread-"):
            daemon.client.delete(info.agent)


def test_two_hundred_connections_at_once(daemon: Daemon) -> None:
    """200 connections with half a frame each, and all are served when the other half comes."""
    whole = request(3, "tokenize", [{"text": "the of and"}])
    with ExitStack() as stack:
        raws = [stack.enter_context(Raw(daemon)) for _ in range(200)]
        for number, raw in enumerate(raws):
            raw.send(whole[: 1 + number % (len(whole) - 1)])
        assert daemon.client.health().ready
        for number, raw in enumerate(raws):
            raw.send(whole[1 + number % (len(whole) - 1) :])
        for raw in raws:
            answer = raw.responses(1)[0]
            assert (answer[1], answer[2], answer[3]["count"]) == (3, None, 5)


def test_too_many_connections_are_told_so(daemon: Daemon) -> None:
    """The 257th connection hears `busy`; the others stay, and there is room again when one leaves."""
    daemon.client.health()
    with ExitStack() as stack:
        raws = [stack.enter_context(Raw(daemon)) for _ in range(255)]
        raws[-1].send(request(1))
        assert raws[-1].responses(1)[0][2] is None
        for _ in range(20):
            with Raw(daemon) as late:
                assert late.ended_with() == "busy"
        assert daemon.client.health().ready
    with Raw(daemon) as again:
        again.send(request(1))
        assert again.responses(1)[0][2] is None


def test_a_slow_loris_costs_nothing(daemon: Daemon) -> None:
    """Frames that come a byte at a time, and big ones that never end, hold nothing but their own bytes."""
    with ExitStack() as stack:
        raws = [stack.enter_context(Raw(daemon)) for _ in range(20)]
        before = process_footprint_bytes(daemon.pid)
        for raw in raws:
            raw.send(b"\x94\x00\x01\xa8tokenize\x91\x81\xa4text\xdb\x00\xef\xff\xff" + b"x" * (1 << 18))
        trickle = request(9, "tokenize", [{"text": "a" * 50}])
        with Raw(daemon) as slow:
            for byte in trickle:
                slow.send(bytes([byte]))
                assert slow.socket.fileno() > 0
            assert slow.responses(1)[0][1] == 9
        assert daemon.client.health().ready
        assert process_footprint_bytes(daemon.pid) - before < (20 << 18) * 2 + 8 * MIB


def test_connections_closed_in_the_middle(daemon: Daemon) -> None:
    """Closing with half a request, during a call, or in the middle of a reply, politely or by reset, harms nobody."""
    rng = random.Random(23)
    whole = request(1, "tokenize", [{"text": " the" * 10_000}])
    asks: list[Callable[[Raw], None]] = [
        lambda raw: raw.send(whole[: rng.randrange(1, len(whole))]),
        lambda raw: raw.send(whole),
        lambda raw: (raw.send(whole), raw.socket.recv(1000), None)[-1],
        lambda raw: raw.send(request(1, "generate", [{"agent": "gone", "text": prose(600, 1), "max_tokens": 900}])),
        lambda raw: raw.send(whole + b"\xc1"),
    ]
    for turn in range(60):
        with Raw(daemon) as raw:
            asks[turn % len(asks)](raw)
            if rng.random() < 0.5:
                raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    eventually(lambda: not daemon.client.health().server["running"], "the calls end")
    with suppress(errors.AgentNotFound):
        daemon.client.delete("gone")


@pytest.mark.leaks("the module's daemon is another process from here on")
def test_the_agent_survives_all_of_it_and_a_kill(daemon: Daemon) -> None:
    """After everything above and `kill -9` the first agent goes on with all its state."""
    daemon.restart()
    result = daemon.client.generate("witness", prose(300, "witness"), max_tokens=0)
    assert result.cached_tokens == 300
    _WITNESS[daemon.pid] = ageless(daemon.client.agent_info("witness"))
