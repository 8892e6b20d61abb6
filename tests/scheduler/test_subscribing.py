"""Subscriptions: filtered, at the reader's pace, with a gap where it is too slow; ended when the daemon stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvd.errors import Busy, Cancelled, InvalidParams, KvdError
from kvd.front.api import PeerInfo
from kvd.scheduler import subscribing
from kvd.scheduler.event_ring import EventRing
from kvd.scheduler.params import Params
from kvd.scheduler.subscribing import BATCH_EVENTS, Subscriptions
from tests.front.test_server import on_loop, until


class Reader:
    """A call whose client reads when it is told to; a `CallContext`."""

    peer = PeerInfo(1, None, 0)

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.cancelled = False
        self.reads = asyncio.Event()
        self.reads.set()
        self._callbacks: list[Callable[[], None]] = []

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """See `CallContext`."""
        self._callbacks.append(callback)

    def emit(self, event: Mapping[str, object]) -> None:
        """See `CallContext`."""
        self.events.append(dict(event))

    async def until_read(self) -> None:
        """See `CallContext`."""
        await self.reads.wait()

    def error_map(self, error: KvdError) -> dict[str, object]:
        """See `CallContext`."""
        return {"name": error.name}

    def cancel(self) -> None:
        """The client leaves."""
        self.cancelled = True
        self.reads.set()
        for callback in self._callbacks:
            callback()

    def kinds(self) -> list[str]:
        """Types of what came."""
        return [each["type"] for each in self.events]


def subscribe(subscriptions: Subscriptions, ring: EventRing, reader: Reader, **params: object) -> asyncio.Task[object]:
    """A subscription under way."""
    call = subscriptions.serve(ring, Params("events.subscribe", params), reader)
    return asyncio.create_task(call)


def tell(ring: EventRing, kind: str = "fault", agent: str | None = "a", namespace: str = "default") -> None:
    """An event of an agent, or of none."""
    ring.publish(kind, {} if agent is None else {"agent": agent, "namespace": namespace})


@on_loop
async def test_what_happens_from_now_on_is_told_in_order() -> None:
    """First where it begins, then each event as it comes; leaving ends it with `cancelled`."""
    ring, subscriptions, reader = EventRing(), Subscriptions(), Reader()
    tell(ring)
    task = subscribe(subscriptions, ring, reader)
    await until(lambda: len(reader.events) == 1)
    assert reader.events[0] == {
        "type": "subscribed",
        "seq": ring.seq,
        "time_s": reader.events[0]["time_s"],
        "first_seq": ring.first_seq,
    }
    for kind in ("fault", "hit", "turn_ended"):
        tell(ring, kind)
    await until(lambda: len(reader.events) == 4)
    assert reader.kinds()[1:] == ["fault", "hit", "turn_ended"]
    assert subscriptions.count == 1
    reader.cancel()
    with pytest.raises(Cancelled):
        await task
    assert subscriptions.count == 0
    tell(ring)  # wakes nobody who has gone
    assert len(reader.events) == 4


@on_loop
async def test_since_begins_with_what_is_remembered() -> None:
    """What was missed between two connections comes first; with 0, everything; a forgotten part is a gap."""
    ring, subscriptions = EventRing(most_events=3), Subscriptions()
    for _ in range(5):
        tell(ring)
    seen = ring.seq - 1
    expected: list[tuple[int, list[str]]] = [
        (seen, ["fault"]),
        (0, ["fault"] * 3),
        (ring.first_seq - 2, ["gap", *["fault"] * 3]),
        (7, ["gap", *["fault"] * 3]),
    ]
    for since, kinds in expected:
        reader = Reader()
        task = subscribe(subscriptions, ring, reader, since=since)
        await until(lambda reader=reader, kinds=kinds: len(reader.events) == 1 + len(kinds))  # type: ignore[misc]
        assert reader.kinds()[1:] == kinds
        gaps = [(each["lost"], each["reason"]) for each in reader.events if each["type"] == "gap"]
        assert gaps == ([] if "gap" not in kinds else [(None, "restart")] if since == 7 else [(1, "old")])
        reader.cancel()
        with pytest.raises(Cancelled):
            await task


@on_loop
async def test_a_slow_reader_gets_a_gap_and_holds_up_nobody() -> None:
    """P34: what waits for it is a batch, whatever happens meanwhile; the number of lost events is exact."""
    ring, subscriptions, slow, quick = EventRing(most_events=200), Subscriptions(), Reader(), Reader()
    tasks = [subscribe(subscriptions, ring, reader) for reader in (slow, quick)]
    await until(lambda: bool(slow.events) and bool(quick.events))
    slow.reads.clear()
    told = 0
    for _ in range(10):
        for _ in range(100):
            tell(ring)
            told += 1
        await until(lambda told=told: quick.events[-1]["seq"] == ring.seq)  # type: ignore[misc]
    assert quick.kinds().count("fault") == told
    assert len(slow.events) <= 1 + BATCH_EVENTS
    slow.reads.set()
    await until(lambda: slow.events[-1]["seq"] == ring.seq)
    (gap,) = [each for each in slow.events if each["type"] == "gap"]
    assert gap["reason"] == "slow"
    assert slow.kinds().count("fault") + gap["lost"] == told
    for reader, task in zip((slow, quick), tasks, strict=True):
        reader.cancel()
        with pytest.raises(Cancelled):
            await task


@on_loop
async def test_filters() -> None:
    """By kind, agent and namespace; what concerns the daemon as a whole passes every filter but that of kinds."""
    ring, subscriptions = EventRing(), Subscriptions()
    tell(ring, "fault", "a")
    tell(ring, "fault", "b")
    tell(ring, "fault", "a", "team")
    tell(ring, "miss", "a")
    tell(ring, "disk", None)
    cases: list[tuple[dict[str, object], int]] = [
        ({}, 5),
        ({"kinds": ["miss", "disk"]}, 2),
        ({"agent": "a"}, 3),
        ({"agent": "a", "namespace": "team"}, 2),
        ({"namespace": "team"}, 2),
        ({"namespace": "nobody's"}, 1),
        ({"kinds": ["fault"], "namespace": "nobody's"}, 0),
    ]
    for params, count in cases:
        reader = Reader()
        task = subscribe(subscriptions, ring, reader, since=0, **params)
        await until(lambda reader=reader, count=count: len(reader.events) == 1 + count)  # type: ignore[misc]
        reader.cancel()
        with pytest.raises(Cancelled):
            await task
        assert len(reader.events) == 1 + count, params


@on_loop
async def test_when_the_daemon_stops_they_tell_the_rest_and_end() -> None:
    """Those that wait, and those that come then."""
    ring, subscriptions, reader, late = EventRing(), Subscriptions(), Reader(), Reader()
    task = subscribe(subscriptions, ring, reader)
    await until(lambda: bool(reader.events))
    tell(ring, "draining", None)
    subscriptions.close()
    assert await task == {"reason": "stopping"}
    assert reader.kinds() == ["subscribed", "draining"]
    assert await subscribe(subscriptions, ring, late, since=0) == {"reason": "stopping"}
    assert late.kinds() == ["subscribed", "draining"]


@on_loop
async def test_what_makes_no_sense_is_refused_by_name() -> None:
    """Unknown kinds name all that there are."""
    ring, subscriptions = EventRing(), Subscriptions()
    for params, word in (
        ({"kinds": ["evictions"]}, "eviction"),
        ({"kinds": []}, "fault"),
        ({"kinds": "fault"}, "list"),
        ({"since": -1}, "since"),
        ({"since": "x"}, "since"),
        ({"agent": ""}, "agent"),
        ({"namspace": "x"}, "namespace"),
    ):
        with pytest.raises(InvalidParams, match=word):
            await subscribe(subscriptions, ring, Reader(), **params)  # type: ignore[arg-type]
    assert subscriptions.count == 0


@on_loop
async def test_one_too_many_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number, and when to come again; a place that came free is given."""
    monkeypatch.setattr(subscribing, "MAX_SUBSCRIPTIONS", 1)
    ring, subscriptions, reader = EventRing(), Subscriptions(), Reader()
    task = subscribe(subscriptions, ring, reader)
    await until(lambda: bool(reader.events))
    with pytest.raises(Busy) as caught:
        await subscribe(subscriptions, ring, Reader())
    assert caught.value.data == {"max_subscriptions": 1}
    assert caught.value.retry_after_s
    reader.cancel()
    with pytest.raises(Cancelled):
        await task
    other = Reader()
    task = subscribe(subscriptions, ring, other)
    await until(lambda: bool(other.events))
    other.cancel()
    with pytest.raises(Cancelled):
        await task
