"""Viewers of the page that do not read, or read slowly, and how many places whoever has a key gets."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from uvicorn.server import ServerState

from kvd.gateway import GatewaySettings
from kvd.gateway.app import Gateway
from kvd.gateway.connections import Patient, quickest
from kvd.gateway.serve import listening, server_config
from kvd.gateway.watch import MAX_VIEWERS
from tests.front.service import serving
from tests.gateway.monitored import MonitoredDaemon
from tests.gateway.serving import STOP_S, LineLog, Served, gateway
from tests.gateway.test_page import KEY, TEAM_KEY, keys_of, watching
from tests.support.daemon import eventually, short_folder


@contextmanager
def unread(served: Served, key: str) -> Iterator[socket.socket]:
    """A viewer that has got the beginning of a picture and reads nothing."""
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    with socket.socket() as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        end.settimeout(STOP_S)
        end.connect((host, int(port)))
        end.sendall(f"GET /monitor/stream HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\n\r\n".encode())
        eventually(lambda: b"event: picture" in end.recv(65536, socket.MSG_PEEK), "a picture has begun")
        yield end


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes little of what a client does not read: a picture of many agents does not fit."""

    def small(host: str, port: int) -> socket.socket:
        sock = listening(host, port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # handed on to each connection
        return sock

    monkeypatch.setattr("tests.gateway.serving.listening", small)


@pytest.fixture
def large() -> Iterator[Path]:
    """A daemon whose picture is large; its socket."""
    with short_folder() as folder, serving(folder / "kvd.sock", MonitoredDaemon(agents=400)):
        yield folder / "kvd.sock"


@pytest.mark.usefixtures("small_buffers")
def test_a_key_that_is_taken_back_frees_the_place_of_a_viewer_that_does_not_read(large: Path, tmp_path: Path) -> None:
    """P33, P37: nothing can be sent to it, and yet it is asked whether it may stay."""
    ring, path = keys_of(tmp_path), tmp_path / "keys"
    with gateway(large, keys=ring, key_file=path, ping_s=0.02) as served, unread(served, KEY):
        assert served.gateway.watch.viewers == 1
        path.write_text(f"{TEAM_KEY} team\n")
        eventually(lambda: served.gateway.watch.viewers == 0, "its place is free")
        assert served.ask("GET", "/monitor", headers={"x-api-key": TEAM_KEY}).status == 200
        assert served.gateway.watch.viewers == 0  # given back once


@pytest.mark.usefixtures("small_buffers")
def test_a_viewer_that_does_not_read_is_left(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P21, P33: its connection ends and its place is free; the key still counts."""
    monkeypatch.setattr("kvd.gateway.connections.Patience.write_s", 0.05)
    with gateway(large, keys=keys_of(tmp_path)) as served, unread(served, KEY) as end:
        looked = select.poll()
        looked.register(end, 0)  # of a connection that was reset one is told unasked
        assert looked.poll(STOP_S * 1000)
        eventually(lambda: served.gateway.watch.viewers == 0, "its place is free")


def test_one_key_cannot_take_all_places(large: Path, tmp_path: Path) -> None:
    """P33: a namespace has no more than it leaves free; without keys there is nobody to leave them to."""
    with gateway(large, keys=keys_of(tmp_path)) as served, ExitStack() as viewers:
        for _ in range(MAX_VIEWERS // 2):
            viewers.enter_context(watching(served, x_api_key=KEY))
        refused = served.ask("GET", "/monitor", headers={"x-api-key": KEY})
        assert (refused.status, "namespace" in refused.error["message"]) == (429, True)
        with watching(served, x_api_key=TEAM_KEY) as other:
            assert other.next()["full"] is True
        viewers.close()
        eventually(lambda: served.gateway.watch.viewers == 0, "all have left")
        assert served.ask("GET", "/monitor", headers={"x-api-key": KEY}).status == 200
    with gateway(large) as served, ExitStack() as viewers:
        for _ in range(MAX_VIEWERS // 2 + 1):
            viewers.enter_context(watching(served))
        assert served.ask("GET", "/monitor").status == 200


class SlowTransport(asyncio.Transport):
    """Has so much unread, and notes its end."""

    def __init__(self) -> None:
        super().__init__()
        self.unread_bytes = 0
        self.ended = asyncio.Event()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """None is kept."""
        assert high == 0

    def get_write_buffer_size(self) -> int:
        """What the client has not read."""
        return self.unread_bytes

    def abort(self) -> None:
        """End."""
        self.ended.set()

    def close(self) -> None:
        """Nothing is left to send."""


@pytest.mark.parametrize("kind", [Patient, quickest()])
def test_a_slow_client_is_no_dead_one(tmp_path: Path, kind: type[Patient]) -> None:
    """P21: as long as it takes something it may take its time; from then on it has the deadline again."""

    async def scenario() -> None:
        config = server_config(Gateway(GatewaySettings(socket=tmp_path), LineLog()))
        config.load()
        connection, transport = kind(config, ServerState(), {}), SlowTransport()
        due: list[Callable[[], None]] = []

        class Clock:
            """Calls later when it is told to."""

            def call_later(self, _: float, call: Callable[..., None], *args: object) -> asyncio.TimerHandle:
                due.append(lambda: call(*args))
                return asyncio.get_running_loop().call_later(3600, lambda: None)

        connection.connection_made(transport)
        connection.loop = Clock()  # type: ignore[assignment]
        transport.unread_bytes = 100
        connection.pause_writing()
        for unread_bytes in (60, 10):
            transport.unread_bytes = unread_bytes
            due.pop()()
            assert not transport.ended.is_set()
        connection.resume_writing()
        transport.unread_bytes = 50
        connection.pause_writing()
        due.pop()()
        assert transport.ended.is_set()
        connection.connection_lost(None)

    asyncio.run(scenario())
