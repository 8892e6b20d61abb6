"""What requests may hold of the daemon's memory: all connections together, and each for itself."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvd.front import FrontLimits
from tests.front.peer_socket import RawPeer
from tests.front.test_server import on_loop, running, until

LIMITS = FrontLimits(max_held_bytes=100_000, free_held_bytes=10_000)


@pytest.fixture
def path(short_tmp: Path) -> Path:
    """A socket path."""
    return short_tmp / "s"


def hanging(number: int, size_bytes: int) -> list[Any]:
    """A request that ends when it is cancelled."""
    return [0, number, "generate", [{"agent": "hangs", "text": "", "padding": "x" * size_bytes}]]


@on_loop
async def test_requests_in_flight_are_bounded_by_their_bytes(path: Path) -> None:
    """What is too much is `busy` with the figures; when calls end, their bytes are free again."""
    async with running(path, limits=LIMITS) as (server, _, _), RawPeer(path) as peer:
        peer.send(hanging(1, 40_000), hanging(2, 40_000), hanging(3, 40_000))
        refused = await peer.response(3)
        assert (refused[2]["name"], refused[2]["data"]["max_held_bytes"]) == ("busy", 100_000)
        assert 80_000 < refused[2]["data"]["held_bytes"] < 81_000
        assert refused[2]["retry_after_s"] == 1.0
        peer.send([2, "cancel", [1]])
        assert (await peer.response(1))[2]["name"] == "cancelled"
        peer.send(hanging(4, 40_000), [0, 5, "health", []])
        assert (await peer.response(5))[2] is None
        assert server.statistics().calls_in_flight == 2
        peer.send([2, "cancel", [2]], [2, "cancel", [4]])
        assert {(await peer.response(number))[2]["name"] for number in (2, 4)} == {"cancelled"}
        await until(lambda: server.held_bytes == 0)


@on_loop
async def test_a_client_of_small_requests_is_served_whatever_others_hold(path: Path) -> None:
    """A full house closes nobody out whose requests are small."""
    async with running(path, limits=LIMITS) as (server, _, _), RawPeer(path) as greedy, RawPeer(path) as modest:
        greedy.send(hanging(1, 99_000))
        await until(lambda: server.held_bytes > 99_000)
        modest.send([0, 1, "test.echo", [{"value": "x" * 9_000}]], [0, 2, "test.echo", [{"value": "x" * 11_000}]])
        answers = {message[1]: message[2] for message in [await modest.next(), await modest.next()] if message}
        assert answers[1] is None
        assert answers[2]["name"] == "busy"


@on_loop
async def test_unfinished_messages_are_bounded_together(path: Path) -> None:
    """Connections that never end their messages hold no more than the bound; those beyond it are closed with `busy`."""
    async with running(path, limits=LIMITS) as (server, _, _), AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(RawPeer(path)) for _ in range(5)]
        half = msgpack.packb(hanging(1, 30_000))[:29_000]
        for number, peer in enumerate(peers[:3], 1):
            peer.send_bytes(half)
            await until(lambda number=number: server.held_bytes == number * len(half))  # type: ignore[misc]
        for peer in peers[3:]:
            peer.send_bytes(half)
            assert [message[2][0]["name"] for message in await peer.rest()] == ["busy"]
        await until(lambda: server.statistics().connections == 3)
        assert server.held_bytes == 3 * len(half)
    assert server.held_bytes == 0


@on_loop
async def test_what_a_connection_held_goes_with_it(path: Path) -> None:
    """P23: not only out of the books.

    Half messages of connections that are gone, however they went, are not left to a full collection of garbage, which
    may be hours away: so much may come again at once.
    """
    half = msgpack.packb(hanging(1, 30_000))[:29_000]
    async with running(path, limits=LIMITS) as (server, _, _):
        wires = []
        for end in (b"", b"\xc1" * 2_000):
            async with RawPeer(path) as peer:
                peer.send_bytes(half)
                await until(lambda: server.held_bytes == len(half))
                wires += [session._wire for session in server._sessions]
                peer.send_bytes(end)
            await until(lambda: server.statistics().connections == 0)
        assert [wire.buffered_bytes for wire in wires] == [0, 0]


@on_loop
async def test_a_call_that_waits_for_its_reader_piles_up_nothing(path: Path) -> None:
    """P34: a peer that stops reading is no `slow_reader` to such a call; when it reads again, it gets the rest."""
    async with running(path) as (server, service, _), RawPeer(path) as peer:
        peer.send([0, 1, "test.pour", [{"bytes": 10_000}]])
        await until(lambda: service.poured > 10)
        poured = -1
        while poured != service.poured:  # until the kernel's and asyncio's buffers are full
            poured = service.poured
            await asyncio.sleep(0.05)
        assert poured * 10_000 < 4 << 20
        numbers = []
        while len(numbers) < poured + 20:
            message = await peer.next()
            assert message is not None
            numbers.append(message[2][1]["number"])
        assert numbers == list(range(poured + 20)), "none is lost, none comes twice"
        assert server.statistics().slow_readers == 0
        peer.send([2, "cancel", [1]])
        assert (await peer.response(1))[2]["name"] == "cancelled"


@on_loop
async def test_a_call_that_waits_for_its_reader_ends_with_its_connection(path: Path) -> None:
    """Nobody reads, and then nobody is there: the call is cancelled, not left waiting."""
    async with running(path) as (server, service, _):
        async with RawPeer(path) as peer:
            peer.send([0, 1, "test.pour", [{"bytes": 100_000}]])
            await until(lambda: service.poured > 3)
        await until(lambda: server.statistics().calls_in_flight == 0)
        assert service.was_cancelled.is_set()
