"""The RPC server over real Unix sockets, its service a fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from kvd.front import FrontLimits, RpcServer
from kvd.ops.loops import new_loop
from kvd_client.wire import CODES, WireLimits
from tests.front.peer_socket import RawPeer
from tests.front.service import WORDS, FakeService, RecordingLog

new_loop().close()  # the first uvloop of a process makes a pipe that stays: no test is blamed for it

AsyncTest = Callable[..., Coroutine[Any, Any, None]]


def on_loop(test: AsyncTest) -> Callable[..., None]:
    """Run an async test on a loop of its own, of the kind that serves."""

    @wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


@asynccontextmanager
async def running(path: Path, **options: Any) -> AsyncIterator[tuple[RpcServer, FakeService, RecordingLog]]:
    """A started server; closed at the end, after which nothing may be left."""
    service, log = FakeService(), RecordingLog()
    server = RpcServer(service, socket_path=path, logger=log, **options)
    await server.start()
    try:
        yield server, service, log
    finally:
        await server.close(0.0)
    assert server.statistics().connections == 0
    assert server.statistics().calls_in_flight == 0


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def path(short_tmp: Path) -> Path:
    """A socket path in a folder that does not exist yet."""
    return short_tmp / "run" / "s"


@on_loop
async def test_a_call_streams_and_then_answers(path: Path) -> None:
    """Events come in order before the response, which repeats the whole text."""
    async with running(path), RawPeer(path) as peer:
        peer.send([0, 7, "generate", [{"agent": "a", "text": "hi"}]])
        _, request_id, error, result = await peer.response(7)
        kinds = [event["type"] for event in peer.events(7)]
        assert (request_id, error) == (7, None)
        assert result["text"] == "".join(WORDS)
        assert kinds[:4] == ["queued", "matched", "prefill", "first_token"]
        assert "".join(event["text"] for event in peer.events(7) if event["type"] == "text") == result["text"]


@on_loop
async def test_a_client_may_do_without_the_stream(path: Path) -> None:
    """With `stream: false` only the first-token event is sent, whatever the service emits."""
    async with running(path), RawPeer(path) as peer:
        peer.send([0, 1, "generate", [{"agent": "a", "text": "hi", "stream": False}]])
        response = await peer.response(1)
        assert response[3]["text"] == "".join(WORDS)
        assert peer.events(1) == [{"type": "first_token"}]


@on_loop
async def test_what_is_answered_at_once(path: Path) -> None:
    """An answer at once overtakes all that takes a task; its errors and bugs are answered as any call's."""
    async with running(path) as (server, _, log), RawPeer(path) as peer:
        peer.send(
            [0, 1, "test.echo", [{"value": 1}]],
            [0, 2, "test.now", [{"a": 1}]],
            [0, 3, "test.now", [{"raise": "bug"}]],
            [0, 4, "test.now", [{"raise": "params"}]],
            [0, 2, "test.now", [{"again": True}]],
        )
        answers = [await peer.next() or [] for _ in range(5)]
        assert [answer[1] for answer in answers] == [2, 3, 4, 2, 1]
        assert answers[0][3] == {"a": 1}
        assert answers[1][2]["name"] == "internal"
        assert "secret" not in answers[1][2]["message"]
        assert answers[2][2]["name"] == "invalid_params"
        assert answers[3][3] == {"again": True}
        assert log.named("call_failed")[0]["method"] == "test.now"
        assert server.statistics().calls == 5
        assert server.statistics().internal_errors == 1


@on_loop
async def test_responses_come_in_any_order(path: Path) -> None:
    """A short call overtakes a long one; ids tell them apart."""
    async with running(path), RawPeer(path) as peer:
        peer.send(
            [0, 1, "test.echo", [{"value": "long", "turns": 50}]], [0, 2, "test.echo", [{"value": "short", "turns": 0}]]
        )
        assert (await peer.next() or [])[1:] == [2, None, "short"]
        assert (await peer.next() or [])[1:] == [1, None, "long"]


@on_loop
async def test_a_thousand_pipelined_calls(path: Path) -> None:
    """A thousand requests written at once get a thousand answers with their own values."""
    async with running(path) as (server, _, _), RawPeer(path) as peer:
        peer.send(*([0, i, "test.echo", [{"value": i, "turns": i % 3}]] for i in range(1000)))
        answers = [await peer.next() for _ in range(1000)]
        assert sorted(answer[1] for answer in answers if answer) == list(range(1000))
        assert all(answer and answer[1] == answer[3] for answer in answers)
        assert server.statistics().calls == 1000


@on_loop
async def test_more_calls_than_the_cap_are_busy(path: Path) -> None:
    """Above the cap a call is answered `busy` with advice when to retry; the others go on."""
    async with running(path, limits=FrontLimits(max_calls=2)), RawPeer(path) as peer:
        peer.send(*([0, i, "generate", [{"agent": "hangs"}]] for i in range(3)))
        _, request_id, error, _ = await peer.response(2)
        assert (request_id, error["name"], error["code"]) == (2, "busy", CODES["busy"])
        assert error["retry_after_s"] > 0
        peer.send([2, "cancel", [0]])
        assert (await peer.response(0))[2]["name"] == "cancelled"
        peer.send([0, 3, "test.echo", [{"value": 1}]])
        assert (await peer.response(3))[3] == 1


@on_loop
async def test_cancel_ends_that_call_only(path: Path) -> None:
    """A cancellation reaches its own call; one for another id or a finished call does nothing."""
    async with running(path) as (_, service, _), RawPeer(path) as peer, RawPeer(path) as other:
        peer.send([0, 1, "generate", [{"agent": "hangs"}]], [0, 2, "generate", [{"agent": "hangs"}]])
        other.send([0, 1, "generate", [{"agent": "hangs"}]])
        await until(lambda: len(service.contexts) == 3)
        peer.send([2, "cancel", [9]], [2, "cancel", [1]])
        assert (await peer.response(1))[2]["name"] == "cancelled"
        assert len(service.cancelled) == 1
        assert sum(context.cancelled for context in service.contexts) == 1
        peer.send([2, "cancel", [1]], [0, 3, "test.echo", [{"value": 3}]])
        assert (await peer.response(3))[3] == 3


@on_loop
async def test_a_disconnected_client_stops_generating(path: Path) -> None:
    """P34: closing the connection cancels all its calls, and no other client's."""
    async with running(path) as (server, service, _), RawPeer(path) as other:
        other.send([0, 1, "generate", [{"agent": "hangs"}]])
        async with RawPeer(path) as peer:
            peer.send([0, 1, "generate", [{"agent": "hangs"}]], [0, 2, "generate", [{"agent": "hangs"}]])
            await until(lambda: len(service.contexts) == 3)
        await until(lambda: len(service.cancelled) == 2)
        await until(lambda: server.statistics().calls_in_flight == 1)
        assert not service.contexts[0].cancelled or not service.contexts[1].cancelled
        late: list[bool] = []
        gone = next(context for context in service.contexts if context.cancelled)
        gone.on_cancel(lambda: late.append(True))
        gone.emit({"type": "text", "text": "nobody"})
        assert late == [True]


@on_loop
async def test_errors_have_codes_and_keep_secrets(path: Path) -> None:
    """Typed errors arrive with their fields; anything else is `internal`, logged, and shows no detail."""
    async with running(path) as (_, _, log), RawPeer(path) as peer:
        peer.send([0, 1, "generate", [{"agent": "missing"}]], [0, 2, "generate", [{"agent": "busy"}]])
        missing = (await peer.response(1))[2]
        busy = (await peer.response(2))[2]
        assert missing == {
            "code": CODES["agent_not_found"],
            "name": "agent_not_found",
            "message": "no agent missing",
            "data": {"agent": "missing"},
            "retry_after_s": None,
        }
        assert (busy["name"], busy["retry_after_s"], busy["data"]) == ("busy", 2.5, {"queued": 7})
        peer.send([0, 3, "test.crash", [{}]], [0, 4, "no.such", []], [0, 5, "test.unencodable", []])
        crash = (await peer.response(3))[2]
        assert crash["name"] == "internal"
        assert "secret" not in str(crash)
        assert (await peer.response(4))[2]["name"] == "method_not_found"
        assert (await peer.response(5))[2]["name"] == "internal"
        assert log.named("call_failed")[0]["method"] == "test.crash"
        assert log.named("event_not_encodable")
        assert log.named("result_not_encodable")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x94\x00\x20\xa1m\xdb\xff\xff\xff\xff",
        b"\x94\x00\x20\xa1m" + b"\x91" * 100,
        b"\x94\x00\x20\xa1m\x91\xd4\x05\x00",
        b"\x94\x00\xff\xa1m\x90",
        b"\x94\x00\x01\xa9test.echo\x90\x94\x00\x01\xa9test.echo\x90",
        b"\x94\x01\x01\xc0\xc0",
    ],
)
@on_loop
async def test_malformed_input_ends_the_connection_with_the_reason(path: Path, data: bytes) -> None:
    """Garbage, bombs, extension types, bad and duplicate ids: an error message, then the end; others go on."""
    async with running(path) as (server, _, log), RawPeer(path) as good:
        async with RawPeer(path) as bad:
            bad.send([0, 1, "generate", [{"agent": "hangs"}]])
            bad.send_bytes(data)
            last = (await bad.rest())[-1]
        assert last[:2] == [2, "error"]
        assert (last[2][0]["name"], last[2][0]["code"]) == ("protocol", CODES["protocol"])
        good.send([0, 1, "test.echo", [{"value": "alive"}]])
        assert (await good.response(1))[3] == "alive"
        assert log.named("protocol_error")
        assert server.statistics().protocol_errors == 1


@on_loop
async def test_a_half_frame_then_the_end(path: Path) -> None:
    """A peer that stops inside a message is told so, as it may still read."""
    async with running(path), RawPeer(path) as peer:
        peer.send_bytes(b"\x94\x00\x01\xa1m\x91\x81")
        peer.writer.write_eof()
        (message,) = await peer.rest()
        assert "inside a message" in message[2][0]["message"]


@on_loop
async def test_requests_that_cannot_be_served_keep_the_connection(path: Path) -> None:
    """Text that is not UTF-8 and positional parameters are answered by id."""
    async with running(path) as (_, service, _), RawPeer(path) as peer:
        peer.send_bytes(b"\x94\x00\x07\xa1m\x91\x81\xa1t\xa3\xed\xa0\x80")
        peer.send([0, 8, "test.echo", [1, 2]])
        assert (await peer.response(7))[2]["name"] == "invalid_text"
        assert (await peer.response(8))[2]["name"] == "invalid_params"
        assert service.calls == []


@on_loop
async def test_messages_over_the_limit_are_refused(path: Path) -> None:
    """A request longer than the server takes ends the connection before it is read."""
    limits = FrontLimits(wire=WireLimits(max_message_bytes=10_000))
    async with running(path, limits=limits), RawPeer(path) as peer:
        peer.send([0, 1, "test.echo", [{"value": "x" * 20_000}]])
        last = (await peer.rest())[-1]
        assert "10000 bytes" in last[2][0]["message"]


@pytest.mark.parametrize("kind", ["text", "tool_call"])
@on_loop
async def test_a_slow_reader_is_closed_and_its_calls_cancelled(path: Path, kind: str) -> None:
    """A peer that does not read is closed at the cap, with the reason, whether or not its messages can be merged."""
    limits = FrontLimits(max_unread_bytes=100_000, linger_s=30.0)
    async with running(path, limits=limits) as (server, service, log), RawPeer(path) as peer:
        peer.send([0, 1, "test.flood", [{"events": 10**9, "bytes": 500, "type": kind}]])
        await until(lambda: server.statistics().slow_readers == 1)
        await until(lambda: service.cancelled == ["flood"])
        assert log.named("slow_reader")[0]["limit_bytes"] == 100_000
        last = (await peer.rest())[-1]
        assert last[2][0]["name"] == "slow_reader"


@on_loop
async def test_text_is_merged_for_a_reader_that_falls_behind(path: Path) -> None:
    """Text of a peer that reads late arrives whole, in order, in fewer messages than events, before the response."""
    async with running(path) as (server, service, _), RawPeer(path) as peer:
        events = 20_000
        peer.send([0, 1, "test.flood", [{"events": events, "bytes": 100}]])
        await until(lambda: len(service.calls) == 1 and server.statistics().calls_in_flight == 0)
        assert (await peer.response(1))[3] == {"text": "done"}
        texts = [event["text"] for event in peer.events(1)]
        assert sum(map(len, texts)) == events * 100
        assert len(texts) < events


@on_loop
async def test_a_lingering_peer_is_cut_off(path: Path) -> None:
    """A closed connection whose peer never reads is aborted after the linger time."""
    limits = FrontLimits(max_unread_bytes=1000, linger_s=0.05)
    async with running(path, limits=limits) as (server, _, _), RawPeer(path) as peer:
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        peer.send([0, 1, "test.flood", [{"events": 10**9, "bytes": 500, "type": "tool_call"}]])
        await until(lambda: server.statistics().slow_readers == 1)
        await until(lambda: server.statistics().connections == 0)


@on_loop
async def test_connections_are_counted_and_capped(path: Path) -> None:
    """The callback gets the number of connections; one more than the cap is told `busy` and closed."""
    seen: list[int] = []
    limits = FrontLimits(max_connections=2)
    async with running(path, limits=limits, on_connections_changed=seen.append):
        async with RawPeer(path), RawPeer(path):
            await until(lambda: seen == [1, 2])
            async with RawPeer(path) as third:
                (message,) = await third.rest()
            assert message[2][0]["name"] == "busy"
        await until(lambda: seen == [1, 2, 1, 0])


@on_loop
async def test_close_lets_running_calls_end_and_takes_no_new_ones(path: Path) -> None:
    """Within the grace time a call ends with its answer; new requests are `draining`; nobody can connect."""
    service = FakeService()
    server = RpcServer(service, socket_path=path, logger=RecordingLog())
    await server.start()
    async with RawPeer(path) as peer, RawPeer(path) as idle:
        idle.send([0, 1, "health", []])
        await idle.response(1)
        peer.send([0, 1, "test.gate", []])
        await until(lambda: server.statistics().calls_in_flight == 1)
        closing = asyncio.create_task(server.close(20.0))
        assert await idle.next() is None
        peer.send([0, 2, "test.echo", [{"value": "new"}]])
        assert (await peer.response(2))[2]["name"] == "draining"
        service.gate.set()
        assert (await peer.response(1))[3] == "through"
        assert await peer.next() is None
        await closing
        assert not path.exists()
        with pytest.raises(OSError):
            async with RawPeer(path):
                pass
    await server.close(1.0)


@on_loop
async def test_close_cancels_what_takes_too_long(path: Path) -> None:
    """After the grace time calls are cancelled, answered, and even one that ignores it is ended."""
    service = FakeService()
    service.do_test_deaf = lambda params, context: asyncio.sleep(3600)  # type: ignore[attr-defined]
    limits = FrontLimits(settle_s=0.05)
    server = RpcServer(service, socket_path=path, logger=RecordingLog(), limits=limits)
    await server.start()
    async with RawPeer(path) as peer:
        peer.send([0, 1, "generate", [{"agent": "hangs"}]], [0, 2, "test.deaf", []])
        await until(lambda: len(service.contexts) == 2)
        await server.close(0.0)
        errors = {message[1]: message[2]["name"] for message in await peer.rest()}
        assert errors == {1: "cancelled", 2: "cancelled"}
