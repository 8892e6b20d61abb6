"""HTTP as bytes: what is read, in how long and how much of it, with either reader and either loop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from kvd.gateway.connections import MAX_HEAD_BYTES, Patience, Patient, quickest
from kvd.gateway.swift import Swift
from kvd.ops.loops import new_loop
from tests.gateway.daemons import ScriptedDaemon
from tests.gateway.serving import Served, gateway

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}]}'
Loop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(params=["installed", "fallback"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Loop:
    """What this machine has, and what is taken where that is missing."""
    if request.param == "installed":
        return new_loop
    monkeypatch.setattr("kvd.gateway.serve.quickest", lambda: Patient)
    return asyncio.new_event_loop


def answered(served: Served, *sent: bytes) -> bytes:
    """What a connection is told that sends so much, a piece after each reply, until the gateway closes it."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as end:
        found = b""
        for piece in sent[:-1]:
            end.sendall(piece)
            found += end.recv(65536)
        end.sendall(sent[-1])
        while data := end.recv(4096):
            found += data
        return found


def test_tests_have_what_a_gateway_has() -> None:
    """P5: this is a test of nothing if httptools is missing here and nobody sees it."""
    assert quickest() is not Patient
    assert issubclass(quickest(), Patience)
    made = new_loop()
    made.close()
    assert not isinstance(made, asyncio.SelectorEventLoop)


def test_clients_that_never_finish_are_left(
    scripted: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    """P21: a head without end, also of a second request, line breaks, a body without end: all have a deadline."""
    monkeypatch.setattr("kvd.gateway.connections.Patience.head_s", 0.05)
    with gateway(scripted.path, loop=loop, body_s=0.05) as served:  # type: ignore[attr-defined]
        assert answered(served, b"") == b""
        assert answered(served, b"GET /health HTTP/1.1\r\nhost: loc") == b""
        assert answered(served, HEALTH, b"GET /he").count(b"HTTP/1.1 200") == 1
        assert answered(served, HEALTH, b"\r\n").count(b"HTTP/1.1 200") == 1
        head = b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        told = answered(served, head + b"content-length: 50\r\n\r\n{")
        assert told.startswith(b"HTTP/1.1 408")
        assert b"was not there within 0.05 s" in told
        assert b"\r\nconnection: close\r\n" in told.lower(), "or what comes of it later would keep it for ever"


def test_what_follows_a_request_does_not_end_its_answer(
    scripted: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    """P34: a line break behind a body, or the beginning of a next request, waits until the answer is over."""
    monkeypatch.setattr("kvd.gateway.connections.Patience.head_s", 0.05)
    with gateway(scripted.path, loop=loop, ping_s=0.01) as served:  # type: ignore[attr-defined]
        body = CHAT.replace(b"{", b'{"stream":true,', 1)
        asked = POST + b"x-kvd-agent: hangs\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        for more in (b"\r\n", b"GET /he"):
            host, port = served.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=20) as end:
                end.sendall(asked)
                said = end.recv(65536)
                end.sendall(more)
                while said.count(b": ping") < 20:
                    data = end.recv(65536)
                    assert data, "it was cut off"
                    said += data


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_an_offer_of_another_protocol_is_passed_over(
    scripted: ScriptedDaemon, loop: Loop, framing: str, pieces: int
) -> None:
    """P33 P40: Java's client offers HTTP/2 with its first request: its body is a body, and the connection goes on."""
    length = b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT
    chunks = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)
    whole = POST + b"x-kvd-agent: offers\r\n" + OFFER + (length if framing == "length" else chunks)
    cuts = {1: [], 2: [-9], 3: [len(POST) + 5, -9]}[pieces]
    with gateway(scripted.path, loop=loop) as served:  # type: ignore[attr-defined]
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as end:
            for begin, cut in zip([0, *cuts], [*cuts, len(whole)], strict=True):
                end.sendall(whole[begin:cut])
                time.sleep(0.02)  # whether it is read by itself changes nothing, and mostly it is
            found = end.recv(65536)
            end.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            while data := end.recv(65536):
                found += data
    assert found.count(b"HTTP/1.1 200") == 2, found
    assert [params["agent"] for params in scripted.of("chat")] == ["offers"]
    assert scripted.of("chat")[0]["messages"] == [{"role": "user", "content": "Hi"}]


class Wire(asyncio.Transport):
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keep it."""
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There are none."""

    def is_closing(self) -> bool:
        """Nobody closes it in these tests."""
        return False

    def pause_reading(self) -> None:
        """Note it."""
        self.is_reading = False

    def resume_reading(self) -> None:
        """Note it."""
        self.is_reading = True

    def close(self) -> None:
        """It stays as it is."""


def test_a_long_head_behind_a_request_does_not_speak_into_its_answer() -> None:
    """P33: what a body and the next head take in one read is no long head; one that is waits for the answer."""
    answer = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await answer.wait()
        await send({"type": "http.response.body", "body": b"said"})

    async def run() -> None:
        config = Config(app, lifespan="off", log_config=None, ws="none", loop="none", http=Swift)
        config.load()
        wire = Wire()
        connection = Swift(config, ServerState(), {})
        connection.connection_made(wire)
        body = b"a" * (MAX_HEAD_BYTES + 1)
        connection.data_received(POST + b"content-length: %d\r\n\r\n" % len(body) + body + b"GET /health HTTP/1.1\r\n")
        await asyncio.sleep(0)
        assert wire.written.startswith(b"HTTP/1.1 200")
        connection.data_received(b"x: " + body)
        assert b"400" not in wire.written
        assert not wire.is_reading
        answer.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert b"said" in wire.written
        assert wire.is_reading
        connection.data_received(b"a")
        assert b"HTTP/1.1 400" in wire.written
        connection.connection_lost(None)

    asyncio.run(run())


def test_heads_have_a_bound(scripted: ScriptedDaemon, loop: Loop) -> None:
    """P21: a head without end takes no memory without end."""
    with gateway(scripted.path, loop=loop) as served:  # type: ignore[attr-defined]
        told = answered(served, HEALTH, b"GET /health HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES)
        assert told.count(b"HTTP/1.1 200") == 1
        assert told.count(b"HTTP/1.1 400") == 1


def test_a_body_may_come_in_pieces_and_is_followed_by_nothing(scripted: ScriptedDaemon, loop: Loop) -> None:
    """P10: what stands behind a body names no agent: the request is what its head said."""
    with gateway(scripted.path, loop=loop) as served:  # type: ignore[attr-defined]
        head = POST + b"x-kvd-agent: mine\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        pieces = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n" % (9, CHAT[:9], len(CHAT) - 9, CHAT[9:])
        assert answered(served, head + pieces + b"x-kvd-agent: other\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert [params["agent"] for params in scripted.of("chat")] == ["mine"]


def test_requests_that_were_sent_at_once_are_answered_in_turn(scripted: ScriptedDaemon, loop: Loop) -> None:
    """P33: each has its own answer."""
    with gateway(scripted.path, loop=loop) as served:  # type: ignore[attr-defined]
        length = b"content-length: %d\r\n" % len(CHAT)
        first = POST + b"x-kvd-agent: echo one\r\n" + length + b"\r\n" + CHAT
        second = POST + b"x-kvd-agent: echo two\r\nconnection: close\r\n" + length + b"\r\n" + CHAT
        told = answered(served, first + second)
    assert told.count(b"HTTP/1.1 200") == 2
    assert 0 < told.index(b'"content":"echo one"') < told.index(b'"content":"echo two"')


@pytest.mark.parametrize(
    "raw",
    [
        HEALTH.replace(b"local", b"lo\x00cal"),
        HEALTH.replace(b"host:", b"host :"),
        HEALTH.replace(b"host:", b"host: localhost\r\nhost:"),
        POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    ],
)
def test_what_two_readers_could_read_in_two_ways_is_refused(scripted: ScriptedDaemon, loop: Loop, raw: bytes) -> None:
    """P33: or somebody's request could be read as a part of another one's."""
    with gateway(scripted.path, loop=loop) as served:  # type: ignore[attr-defined]
        assert answered(served, raw).startswith(b"HTTP/1.1 400")
    assert scripted.of("chat") == []


@pytest.mark.parametrize(("before", "cut"), [(b"", None), (b"", 3), (b"", 40), (b"\r\n", None), (b"\r\n", 2)])
def test_streams_of_http_1_0_are_not_in_chunks(
    scripted: ScriptedDaemon, loop: Loop, before: bytes, cut: int | None
) -> None:
    """P40: a client of that version reads to the end of the connection, and would take chunks' lengths for text."""
    body = CHAT.replace(b"{", b'{"stream":true,', 1)
    if loop is not new_loop:
        before = b""  # h11 takes no line break before a request
    whole = before + POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"content-length: %d\r\n\r\n" % len(body) + body
    with gateway(scripted.path, loop=loop) as served:  # type: ignore[attr-defined]
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as end:
            for piece in (whole[:cut], whole[cut:]) if cut else (whole,):
                end.sendall(piece)
                time.sleep(0.02)
            found = b""
            while data := end.recv(65536):
                found += data
    head, _, told = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), found
    assert b"transfer-encoding" not in head.lower()
    assert told.startswith(b"data: {")
    assert told.endswith(b"data: [DONE]\n\n")


def test_what_is_no_request_is_refused_at_once(scripted: ScriptedDaemon, loop: Loop) -> None:
    """P40: of a first line that is not there yet nothing is waited for that cannot be one; TLS begins like this."""
    with gateway(scripted.path, loop=loop) as served:  # type: ignore[attr-defined]
        for said in (b"\x16\x03\x01\x02\x00\x01", b"GET " + b"x" * 70_000):
            assert answered(served, said).startswith(b"HTTP/1.1 400"), said[:10]
