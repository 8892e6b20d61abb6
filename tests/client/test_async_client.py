"""The asyncio client against a live server whose service is a fake."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvd_client import AsyncClient, CallTimeout, Cancelled, DaemonUnreachable
from kvd_client.async_transport import _Inbox
from kvd_client.errors import AgentNotFound, InvalidText, ProtocolViolation
from kvd_client.stream import FirstToken, Queued, Text
from tests.client.impostor import Impostor
from tests.front.peer_socket import RawPeer
from tests.front.service import WORDS, FakeService
from tests.front.test_server import on_loop, running, until


@pytest.fixture
def path(short_tmp: Path) -> Path:
    """Where the server will listen."""
    return short_tmp / "run" / "s"


@on_loop
async def test_generate_and_the_stream(path: Path) -> None:
    """The result and the typed events are those of the blocking client."""
    async with running(path), AsyncClient(path) as client:
        result = await client.generate("a", "hi", max_tokens=3)
        assert (result.text, result.server) == ("".join(WORDS), {"branch": 3})
        assert result.ttft_s is not None
        stream = client.generate_stream("a", "hi")
        events = [event async for event in stream]
        assert events[0] == Queued(0)
        assert FirstToken() in events
        assert "".join(event.text for event in events if isinstance(event, Text)) == (await stream.result()).text
        chat = await client.chat("a", [{"role": "user", "content": "hi"}])
        assert chat.prompt_tokens == 2


@on_loop
async def test_every_method(path: Path) -> None:
    """Each method calls its namesake and types the result."""
    async with running(path) as (_, service, _), AsyncClient(path, namespace="n") as client:
        assert (await client.inject("a", "more")).tokens == 12
        parts = await client.inject_into(["a", "missing"], messages=[{"role": "user", "content": "x"}])
        assert [part.error is None for part in parts] == [True, False]
        assert await client.tokenize("a") == [97]
        assert len(await client.agents("n")) == 2
        assert (await client.agent_info("a")).namespace == "n"
        assert (await client.fork("a", "c")).agent == "c"
        assert (await client.rollback("a", 3)).agent == "a"
        for method in (client.pin, client.unpin, client.prefetch, client.evict, client.verify):
            assert (await method("a")).agent == "a"
        await client.delete("a")
        assert (await client.export_agent("a", "/tmp/f")).path == "/tmp/f"
        assert (await client.import_agent("/tmp/f", agent="b")).agent == "b"
        assert (await client.residency("z"))["agents"][0]["agent"] == "z"
        assert (await client.statistics()).tokens_computed == 7
        assert (await client.configure(budget=5)).converging == ("budget",)
        assert (await client.model_info())["name"] == "tiny"
        assert (await client.health()).ready
        assert (await client.hello())["protocol"] == 1
        assert await client.drain() == {"draining": True}
        assert await client.shutdown() == {"stopping": True}
        assert await client.call("test.echo", {"value": 5}) == 5
        assert dict(service.calls)["agent.list"] == {"namespace": "n"}


@on_loop
async def test_many_tasks_share_a_connection(path: Path) -> None:
    """Hundreds of concurrent calls each get their own answer."""
    async with running(path) as (_, service, _), AsyncClient(path) as client:
        calls = (client.call("test.echo", {"value": i, "turns": i % 5}) for i in range(300))
        assert await asyncio.gather(*calls) == list(range(300))
        assert {context.peer.connection for context in service.contexts} == {1}


@on_loop
async def test_cancelling_the_task_cancels_the_call(path: Path) -> None:
    """P34: a cancelled task's call is cancelled in the daemon, and the connection serves the next."""
    async with running(path) as (_, service, _), AsyncClient(path) as client:
        task = asyncio.create_task(client.generate("hangs", ""))
        await until(service.has_begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: service.cancelled == ["hangs"])
        assert (await client.generate("a", "hi")).agent == "a"


@on_loop
async def test_the_time_of_a_wait_that_was_cancelled_ends_no_other() -> None:
    """A wait may be given up in the very turn of the loop in which its time is over; the next one goes on."""
    loop, inbox = asyncio.get_running_loop(), _Inbox()
    waits: list[asyncio.Future[bool]] = []

    def give_up() -> None:
        waits[0].cancel()
        waits.append(inbox.wait(None))

    loop.call_later(0.0, give_up)
    waits.append(inbox.wait(0.0))
    with pytest.raises(asyncio.CancelledError):
        await waits[0]
    assert not waits[1].done()
    inbox.wake()
    assert await waits[1] is True
    assert await inbox.wait(0.0) is False


@on_loop
async def test_leaving_the_stream_cancels(path: Path) -> None:
    """P34: break, an exception and the end of the block cancel; so does `cancel`, after which the end comes."""
    async with running(path) as (_, service, _), AsyncClient(path) as client:
        stream = client.generate_stream("hangs", "x")
        async for _ in stream:
            break
        await until(lambda: len(service.cancelled) == 1)
        with pytest.raises(Cancelled):
            await stream.result()
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with client.generate_stream("hangs", "x") as entered:
                async for _ in entered:
                    _ = 1 // 0
        await until(lambda: len(service.cancelled) == 2)
        kept = client.generate_stream("hangs", "x")
        with pytest.raises(Cancelled, match="by the client"):  # noqa: PT012
            async for _ in kept:
                kept.cancel()
        assert (await client.health()).ready


@on_loop
async def test_errors(path: Path) -> None:
    """Errors of the daemon, of the text and of time are typed; the connection goes on."""
    async with running(path) as (_, service, _), AsyncClient(path, timeout_s=0.05) as client:
        with pytest.raises(AgentNotFound):
            await client.agent_info("missing")
        with pytest.raises(InvalidText):
            await client.generate("a", "\ud800")
        with pytest.raises(CallTimeout):
            await client.generate("hangs", "")
        await until(lambda: service.cancelled == ["hangs"])
        client.timeout_s = 20
        assert (await client.health()).ready


@on_loop
async def test_reconnecting(path: Path) -> None:
    """Without a daemon the error has the command; after a restart the next call connects anew."""
    client = AsyncClient(path)
    with pytest.raises(DaemonUnreachable, match="kvd serve"):
        await client.health()
    for _ in range(2):
        async with running(path):
            assert (await client.health()).ready
            task = asyncio.create_task(client.generate("hangs", ""))
            await asyncio.sleep(0)
        with pytest.raises((DaemonUnreachable, Cancelled)):
            await task
    await client.close()


@on_loop
async def test_a_daemon_that_breaks_the_protocol(short_tmp: Path) -> None:
    """Nonsense from the other end is a typed error."""
    impostor = Impostor(short_tmp / "s", lambda _: b"HTTP/1.1 400\r\n")
    async with AsyncClient(short_tmp / "s", timeout_s=20) as client:
        with pytest.raises(ProtocolViolation):
            await client.health()
    await asyncio.to_thread(impostor.close)


@on_loop
async def test_closing_cancels(path: Path) -> None:
    """P34: closing the client cancels what is in flight and wakes who waits."""
    async with running(path) as (_, service, _):
        client = AsyncClient(path)
        task = asyncio.create_task(client.generate("hangs", ""))
        await until(service.has_begun.is_set)
        await client.close()
        with pytest.raises(DaemonUnreachable):
            await task
        await until(lambda: service.cancelled == ["hangs"])
        async with RawPeer(path) as peer:
            peer.send([0, 1, "health", []])
            assert (await peer.response(1))[2] is None


def test_the_service_is_the_documented_one() -> None:
    """The fake has a handler for each method that the clients call."""
    methods = "hello generate chat inject tokenize residency statistics configure model_info health drain shutdown"
    agents = "list info fork rollback pin unpin verify prefetch evict delete export import"
    names = [f"do_{name}" for name in methods.split()] + [f"do_agent_{name}" for name in agents.split()]
    assert all(callable(getattr(FakeService, name)) for name in names)
