"""Streams that wait, and clients that leave: pings, and the end of a turn that nobody reads."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections import deque
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvd.gateway.errors import ClientGone
from kvd.gateway.streams import END, Attended, Paced
from tests.front.service import serving
from tests.gateway.daemons import ScriptedDaemon
from tests.gateway.serving import Served, gateway
from tests.support.daemon import eventually, short_folder

PATHS: list[tuple[str, dict[str, Any], bytes]] = [
    ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}, b": ping\n"),
    ("/v1/completions", {"model": "tiny", "prompt": "Hi"}, b": ping\n"),
    ("/v1/responses", {"model": "tiny", "input": "Hi"}, b": ping\n"),
    (
        "/v1/messages",
        {"model": "claude-x", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
        b"event: ping\n",
    ),
]
NAMES = [path for path, _, _ in PATHS]


def begun(served: Served, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    """A request of the agent that hangs until it is cancelled."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
    headers = {"content-type": "application/json", "x-kvd-agent": "hangs"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


@pytest.mark.parametrize(("path", "body", "ping"), PATHS, ids=NAMES)
def test_a_client_that_leaves_a_stream_ends_its_turn(
    served: Served, scripted: ScriptedDaemon, path: str, body: dict[str, Any], ping: bytes
) -> None:
    """P34: the daemon is told at once, though nothing is being said; until then the stream pings."""
    connection = begun(served, path, {**body, "stream": True})
    response = connection.getresponse()
    assert response.status == 200
    assert (response.headers["content-type"] or "").startswith("text/event-stream")
    while response.readline() != ping:
        pass
    request_id = response.headers["x-request-id"]
    response.close()
    connection.close()
    assert scripted.was_cancelled.wait(20)
    assert served.line(str(request_id))["outcome"] == "disconnected"


@pytest.mark.parametrize(("path", "body", "_ping"), PATHS, ids=NAMES)
def test_a_client_that_leaves_without_a_stream_ends_its_turn(
    served: Served, scripted: ScriptedDaemon, path: str, body: dict[str, Any], _ping: bytes
) -> None:
    """P34: waiting for the whole answer is no reason to go on, either; the log has 499."""
    known = len(left(served))
    connection = begun(served, path, body)
    assert scripted.has_begun.wait(20)
    connection.close()
    assert scripted.was_cancelled.wait(20)
    eventually(lambda: len(left(served)) > known, "the request is logged")
    assert left(served)[-1]["status"] == 499


def test_a_client_that_leaves_while_the_model_is_asked_for_is_not_kept(
    scripted: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P34: a daemon that is slow to say which model it has does not hold requests whose clients are gone."""
    asked = threading.Event()

    async def hanging(params: object, context: object) -> object:
        asked.set()
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(scripted, "do_model_info", hanging)
    with gateway(scripted.path) as served:  # type: ignore[attr-defined]
        for number, (path, body, _) in enumerate((*PATHS, ("/v1/messages/count_tokens", PATHS[-1][1], b"")), 1):
            asked.clear()
            connection = begun(served, path, body)
            assert asked.wait(20)
            connection.close()
            eventually(lambda number=number: len(left(served)) == number, f"the request to {path} is logged")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_stop_cuts_off_did_not_go_well(
    scripted: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """P38: its line says so: it is neither `ok` nor a client that left."""
    monkeypatch.setattr("kvd.gateway.serve.STOP_GRACE_S", 0.01)
    with gateway(scripted.path) as served:  # type: ignore[attr-defined]
        connection = begun(served, NAMES[0], {**PATHS[0][1], "stream": stream})
        if stream:
            assert connection.getresponse().status == 200
        assert scripted.has_begun.wait(20)
    connection.close()
    (line,) = served.log.requests()
    assert (line["outcome"], line["status"]) == ("cancelled", 200 if stream else 503)


def left(served: Served) -> list[dict[str, object]]:
    """Lines of clients that left."""
    return [line for line in served.log.requests() if line["outcome"] == "disconnected"]


def test_concurrent_answers_do_not_mix(served: Served) -> None:
    """P33: many requests on one connection to the daemon, whole and as streams: each has its own letters only."""

    def asked(number: int) -> tuple[str, str]:
        path, body, _ = PATHS[number % len(PATHS)]
        name = f"echo {number:02} of {path}"
        reply = served.post(path, {**body, "stream": number % 8 >= 4}, x_kvd_agent=name)
        return name, reply.body.decode() if number % 8 < 4 else "".join(letters(reply.events))

    with ThreadPoolExecutor(8) as pool:
        for name, said in pool.map(asked, range(32)):
            assert name in said


def letters(events: list[tuple[str, Any]]) -> list[str]:
    """The text of a stream of any dialect."""
    found = []
    for _, data in events:
        if not isinstance(data, dict):
            continue
        if data.get("choices"):
            choice = data["choices"][0]
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        delta = data.get("delta")
        found.append(delta if isinstance(delta, str) else delta.get("text", "") if isinstance(delta, dict) else "")
    return found


class Told:
    """Events that a test tells, one by one; a `Waited`. `None` is the end."""

    def __init__(self, *events: str | None) -> None:
        self.left = deque(events)
        self.is_closed = False

    async def wait(self, timeout_s: float) -> bool:
        """Nothing comes while one waits: what there is was there before."""
        await asyncio.sleep(0 if self.left else timeout_s)
        return bool(self.left)

    @property
    def has_event(self) -> bool:
        """The end is none."""
        return bool(self.left) and self.left[0] is not None

    async def events(self) -> AsyncGenerator[str, None]:
        """They are."""
        try:
            while (event := self.left.popleft()) is not None:
                yield event
        finally:
            self.is_closed = True


def test_paced_says_when_nothing_comes() -> None:
    """None for every wait that is over, the events in their order, and the source is closed at the end."""

    async def run(told: Told) -> list[object]:
        found: list[object] = []
        events = Paced(told.events(), told, 0.001)
        while (event := await events.next()) is not END:
            found.append(event)
            if found.count(None) == 3:
                told.left += ["b", None]
        await events.aclose()
        return found

    told = Told("a")
    assert asyncio.run(run(told)) == ["a", None, None, None, "b"]
    assert told.is_closed


def test_what_is_there_goes_out_together() -> None:
    """P34: events that came with another one are had without waiting, the end is not taken for one."""

    async def run() -> list[object]:
        told = Told("a", "b", None)
        events = Paced(told.events(), told, 10.0)
        return [await events.next(), await events.ready(), await events.ready(), await events.next()]

    assert asyncio.run(run()) == ["a", "b", None, END]


def test_events_that_say_nothing_are_no_sign_of_life() -> None:
    """P35: silence counts from what was written: a prompt that is computed or a queue that moves has events enough."""

    async def run() -> object:
        told = Told("prefill")
        events = Paced(told.events(), told, 0.001)
        while (event := await events.next()) == "prefill":
            told.left.append("prefill")
        await events.aclose()
        return event

    assert asyncio.run(run()) is None


def test_paced_closes_its_source_when_it_is_left() -> None:
    """Also when something is there that nobody took."""

    async def run(told: Told) -> None:
        events = Paced(told.events(), told, 0.001)
        assert await events.next() == "a"
        await events.aclose()

    told = Told("a", "b")
    asyncio.run(run(told))
    assert told.is_closed


class Line:
    """A client's connection, as `receive` of ASGI tells of it."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        """Waits until it is closed."""
        await self.closed.wait()
        return {"type": "http.disconnect"}


def test_who_leaves_ends_what_is_awaited() -> None:
    """P34: in the task that waits, which goes on after that."""

    async def run() -> bool:
        line = Line()
        asyncio.get_running_loop().call_soon(line.closed.set)
        with pytest.raises(ClientGone), Attended(line.receive):
            await asyncio.Event().wait()
        await asyncio.sleep(0)  # of the cancellation nothing is left
        task = asyncio.current_task()
        return task is not None and task.cancelling() == 0

    assert asyncio.run(run())


def test_who_leaves_after_the_work_cancels_nothing() -> None:
    """The work's result counts, and so does its own failure."""

    async def run() -> None:
        line = Line()
        with Attended(line.receive):
            await asyncio.sleep(0)
            line.closed.set()
        with pytest.raises(ValueError, match="its own"), Attended(line.receive):
            raise ValueError("its own")
        await asyncio.sleep(0.001)

    asyncio.run(run())


def test_a_cancelled_request_is_no_client_that_left() -> None:
    """P2: a gateway that ends cancels its requests: that goes on as what it is."""

    async def run() -> bool:
        line = Line()

        async def work() -> None:
            with Attended(line.receive):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        line.closed.set()
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(run())


@pytest.mark.parametrize("kind", ["queued", "prefill"])
@pytest.mark.parametrize(("path", "body", "ping"), PATHS, ids=NAMES)
def test_a_stream_pings_while_a_prompt_is_computed_or_a_queue_moves(
    served: Served, path: str, body: dict[str, Any], ping: bytes, kind: str
) -> None:
    """P34: the daemon has much to say, none of it for the client, whose headers and pings come nevertheless."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
    headers = {"content-type": "application/json", "x-kvd-agent": f"only {kind}"}
    connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
    response = connection.getresponse()
    assert response.status == 200
    while response.readline() != ping:
        pass
    request_id = str(response.headers["x-request-id"])
    response.close()
    connection.close()
    assert served.line(request_id)["outcome"] == "disconnected"


@pytest.mark.parametrize(("path", "body", "_ping"), PATHS, ids=NAMES)
def test_a_stream_ends_with_its_daemon(path: str, body: dict[str, Any], _ping: bytes) -> None:
    """P34: at once and with an error: what resumes on the socket would leave an SDK in silence, and asks for more."""
    daemon = ScriptedDaemon()
    with short_folder() as folder, gateway(folder / "kvd.sock", aliases=("claude-*",)) as served:
        with serving(folder / "kvd.sock", daemon):
            connection = begun(served, path, {**body, "stream": True})
            response = connection.getresponse()
            assert daemon.has_begun.wait(20)
        with response:
            told = response.read()
        connection.close()
        line = served.line(str(response.headers["x-request-id"]))
    assert b"error" in told or b"failed" in told
    assert line["outcome"] == "unavailable"
    (asked,) = (params for method, params in daemon.calls if method in ("chat", "generate"))
    assert "resumable" not in asked
