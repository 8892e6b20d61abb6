"""A gateway on a thread of its own, in front of a real or a fake daemon, on a free loopback port."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from kvd.gateway import GatewaySettings
from kvd.gateway.app import Gateway
from kvd.gateway.serve import Server, base_url, listening
from kvd.ops.loops import new_loop
from tests.support.daemon import eventually

STOP_S = 20.0

new_loop().close()  # the first uvloop of a process makes a pipe that stays: no test is blamed for it


class LineLog:
    """Keeps what was logged; a `Log`."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, object]]] = []

    def info(self, event: str, **facts: object) -> None:
        """Keep it."""
        self.lines.append(("info", event, facts))

    def warning(self, event: str, **facts: object) -> None:
        """Keep it."""
        self.lines.append(("warning", event, facts))

    def error(self, event: str, **facts: object) -> None:
        """Keep it."""
        self.lines.append(("error", event, facts))

    def exception(self, event: str, **facts: object) -> None:
        """Keep it."""
        self.lines.append(("exception", event, facts))

    def requests(self) -> list[dict[str, object]]:
        """The canonical lines."""
        return [facts for _, event, facts in self.lines if event == "request"]


@dataclass
class Served:
    """A running gateway.

    Attributes:
        url: its base.
        log: what it logged.
        gateway: itself; to be touched on its own thread only, or while it is idle.
    """

    url: str
    log: LineLog
    gateway: Gateway
    loop: asyncio.AbstractEventLoop = field(repr=False)

    def run(self, work: Any) -> Any:
        """Run a coroutine on the gateway's thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(STOP_S)

    def line(self, request_id: str) -> dict[str, object]:
        """The log line of a request; it comes when the response has been sent."""
        found: list[dict[str, object]] = []

        def logged() -> bool:
            found[:] = [line for line in self.log.requests() if line["request_id"] == request_id]
            return bool(found)

        eventually(logged, f"the line of {request_id} is logged", timeout_s=STOP_S)
        assert len(found) == 1
        return found[0]

    def ask(
        self, method: str, path: str, body: object = None, *, headers: Mapping[str, str] | None = None, raw: bytes = b""
    ) -> Reply:
        """One plain HTTP request, as any program sends it."""
        data = raw or (json.dumps(body).encode() if body is not None else None)
        sent = {"content-type": "application/json", "connection": "close", **(headers or {})}
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=STOP_S)
        with closing(connection):
            connection.request(method, path, data, sent)
            assert connection.sock is not None
            with connection.sock.dup() as end:
                response = connection.getresponse()
                read = response.read()
                while end.recv(4096):  # the server has closed its end as well: no test is blamed for it
                    pass
            return Reply(response.status, dict(response.headers.items()), read)

    def post(self, path: str, body: object, **headers: str) -> Reply:
        """A POST; `x_kvd_agent=...` is the header X-Kvd-Agent."""
        return self.ask("POST", path, body, headers={name.replace("_", "-"): value for name, value in headers.items()})


@dataclass(frozen=True)
class Reply:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Server-sent events: (name, data)."""
        found = []
        for block in self.body.decode().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if "data" in lines:
                data = lines["data"]
                found.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return found


@contextmanager
def gateway(
    socket: Path, *, loop: Callable[[], asyncio.AbstractEventLoop] = new_loop, **settings: Any
) -> Iterator[Served]:
    """A gateway in front of the daemon at `socket`; closed and joined at the end."""
    made = GatewaySettings(socket=socket, **{"port": 0, **settings})
    started = Event()
    running: list[tuple[Server, Served]] = []
    failure: list[BaseException] = []

    async def run() -> None:
        with listening(made.host, made.port) as sock:
            log = LineLog()
            app = Gateway(made, log)
            server = Server(app)
            serving = asyncio.ensure_future(server.serve(sockets=[sock]))
            running.append((server, Served(base_url(sock), log, app, asyncio.get_running_loop())))
            while not server.started and not serving.done():
                await asyncio.sleep(0.001)
            started.set()
            await serving

    def main() -> None:
        try:
            with asyncio.Runner(loop_factory=loop) as runner:
                runner.run(run())
        except BaseException as error:  # shown in the test's own thread
            failure.append(error)
            started.set()

    thread = Thread(target=main, name="kvd-gateway")
    thread.start()
    started.wait()
    try:
        if failure:
            raise failure[0]
        yield running[0][1]
    finally:
        if running:
            running[0][0].should_exit = True
        thread.join(STOP_S)
        assert not thread.is_alive()
        if failure:
            raise failure[0]


__all__ = ["LineLog", "Reply", "Served", "gateway"]
