"""Subscriptions of both clients: typed, on a connection of their own, going on where they were; events as lines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_client import (
    AsyncClient,
    CallTimeout,
    Client,
    ConnectionLost,
    DaemonEvent,
    DaemonUnreachable,
    MonitorPicture,
    RemoteError,
    events,
)
from kvd_client.async_subscription import AsyncSubscription
from kvd_client.async_transport import AsyncTransport, connect
from kvd_client.errors import InvalidParams, remote_error
from kvd_client.event_text import event_line, printable
from kvd_client.events import EVENT_KINDS, Course
from kvd_client.subscription import Subscription
from kvd_client.transport import Transport
from kvd_client.wire import ErrorObject
from tests.front.service import FakeService, serving


@pytest.fixture
def path(short_tmp: Path) -> Path:
    """Where the server will listen."""
    return short_tmp / "s"


@pytest.fixture
def service(path: Path) -> Iterator[FakeService]:
    """A live server."""
    with serving(path) as service:
        yield service


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is away is tried again at once."""
    monkeypatch.setattr(events, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(events, "MOST_WAIT_S", 0.001)


FIRST = DaemonEvent("eviction", 11, 1.5, "a", "n", {"pages": 11, "bytes": 10, "reason": "room"})


def test_a_subscription_is_iterated_and_left(path: Path, service: FakeService) -> None:
    """Typed events in order, its parameters as given; leaving the block cancels the call in the daemon."""
    with Client(path, namespace="team") as client:
        with client.subscribe(kinds=["eviction"], agent="a", since=10) as subscription:
            assert subscription.seq == 10
            found = [event for _, event in zip(range(4), subscription, strict=False)]
            assert [each.type for each in found] == ["subscribed", *["eviction"] * 3]
            assert found[1] == FIRST
            assert subscription.seq == 13
        assert service.was_cancelled.wait(10)
        assert service.calls == [
            ("events.subscribe", {"kinds": ["eviction"], "agent": "a", "namespace": "team", "since": 10})
        ]
        assert client.subscribe(namespace="other").next().type == "subscribed"  # type: ignore[union-attr]
    assert service.calls[1] == ("events.subscribe", {"namespace": "other"})


def test_it_has_a_connection_of_its_own(path: Path, service: FakeService) -> None:
    """Events that nobody takes hold up no call of the same client."""
    with Client(path) as client, client.subscribe():
        assert client.health().ready
    assert len({context.peer.connection for context in service.contexts}) == 2


def test_it_ends_when_the_daemon_stops(path: Path, service: FakeService) -> None:
    """The iteration is over; without a result to wait for."""
    with Client(path) as client:
        found = list(client.subscribe(kinds=["eviction", "stopping"]))
    assert [each.type for each in found] == ["subscribed", *["eviction"] * 3]


def test_it_may_be_closed_from_another_thread(path: Path, service: FakeService) -> None:
    """Whoever iterates comes to the end."""
    with Client(path) as client:
        subscription = client.subscribe()
        found: list[DaemonEvent] = []
        reader = threading.Thread(target=lambda: found.extend(subscription))
        reader.start()
        assert service.has_begun.wait(10)
        subscription.close()
        reader.join(10)
        assert not reader.is_alive()
        with pytest.raises(StopIteration):
            next(iter(subscription))


def test_waiting_is_bounded_where_asked_for(path: Path, service: FakeService) -> None:
    """`CallTimeout` leaves the subscription as it was."""
    with Client(path) as client, client.subscribe(since=12) as subscription:
        assert [subscription.next(10).type for _ in range(2)] == ["subscribed", "eviction"]  # type: ignore[union-attr]
        with pytest.raises(CallTimeout):
            subscription.next(0.01)
        with pytest.raises(CallTimeout):
            subscription.next(0.01)


def test_errors(path: Path, service: FakeService) -> None:
    """A string is no list of kinds; nobody there at the start is an error, with `reconnect` too."""
    with Client(path) as client:
        with pytest.raises(InvalidParams, match="list"):
            client.subscribe(kinds="fault")
        assert client.monitor(since=3, namespace="x")["figures"] == {"asked": {"since": 3, "namespace": "x"}}
    with Client(path.with_name("nobody")) as client, pytest.raises(DaemonUnreachable):
        client.subscribe(reconnect=True)


def test_a_lost_daemon_is_an_error_or_an_event(path: Path) -> None:
    """Without `reconnect` it raises; with it, `away` once, then the next daemon is asked for what came since."""
    client = Client(path)
    with serving(path):
        plain, lasting = client.subscribe(since=11), client.subscribe(since=11, reconnect=True)
        for subscription in (plain, lasting):
            assert [subscription.next(10).type for _ in range(3)] == [  # type: ignore[union-attr]
                "subscribed",
                "eviction",
                "eviction",
            ]
    with pytest.raises((ConnectionLost, RemoteError)):
        list(plain)
    away = lasting.next(10)
    assert away is not None
    assert (away.type, away.seq, away.agent) == ("away", 13, None)
    assert away.data["reason"]
    with serving(path) as service:
        back = lasting.next(10)
        assert back is not None
        assert (back.type, back.seq) == ("subscribed", 13)
        assert service.calls == [("events.subscribe", {"since": 13})]
        lasting.close()
    client.close()


def test_the_asyncio_client_does_the_same(path: Path) -> None:
    """Iterated, entered, bounded, left, and on again after `away`."""

    async def run() -> None:
        client = AsyncClient(path)
        with serving(path) as service:
            subscription = client.subscribe(since=10, reconnect=True)
            async with subscription:
                found = []
                async for event in subscription:
                    found.append(event)
                    if len(found) == 4:
                        break
                assert found[1] == FIRST
                with pytest.raises(CallTimeout):
                    await subscription.next(0.01)
            assert await subscription.next() is None
            assert await asyncio.to_thread(service.was_cancelled.wait, 10)
            ended = [event.type async for event in client.subscribe(kinds=["stopping"], since=12)]
            assert ended == ["subscribed", "eviction"]
            assert (await client.monitor())["version"] == 8
            lasting, plain = client.subscribe(since=13, reconnect=True), client.subscribe()
            assert [(await each.next()).type for each in (lasting, plain)] == ["subscribed"] * 2  # type: ignore[union-attr]
        with pytest.raises((ConnectionLost, RemoteError)):
            assert [event async for event in plain] == []
        assert (await lasting.next()).type == "away"  # type: ignore[union-attr]
        with serving(path):
            assert (await lasting.next()).type == "subscribed"  # type: ignore[union-attr]
            await lasting.close()
        with pytest.raises(DaemonUnreachable):
            await client.subscribe(reconnect=True).next()
        await client.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def served(path: Path) -> None:
    """The server has taken all connections that were made so far: one left to its end would be a socket left open."""
    with Client(path) as client:
        assert client.health().ready


def test_closed_while_it_connects_again(path: Path) -> None:
    """P34: from another thread, when there is no connection to close: the one that comes is closed, and it ends."""
    made: list[Transport] = []

    def connect() -> Transport:
        made.append(Transport(path, command="kvd serve", timeout_s=10))
        if len(made) == 2:
            subscription.close()
        return made[-1]

    with serving(path):
        subscription = Subscription(connect, {"since": 13}, reconnect=True)
        assert subscription.next(10).type == "subscribed"  # type: ignore[union-attr]
        made[0].close()
        assert subscription.next(10).type == "away"  # type: ignore[union-attr]
        assert subscription.next(10) is None
        assert len(made) == 2
        assert made[1].is_closed_here
        served(path)


def test_closed_while_it_connects_in_asyncio(path: Path) -> None:
    """P34: by another task, at the first connection or at a later one."""
    made: list[AsyncTransport] = []

    async def run(closed_at: int) -> None:
        made.clear()

        async def connecting() -> AsyncTransport:
            made.append(await connect(path, 10))
            if len(made) == closed_at:
                await subscription.close()
            return made[-1]

        subscription = AsyncSubscription(connecting, {"since": 13}, reconnect=True)
        for kind in ["subscribed", "away"][: 2 * closed_at - 2]:
            assert (await subscription.next(10)).type == kind  # type: ignore[union-attr]
            if kind == "subscribed":
                made[0]._abort()
        assert await subscription.next(10) is None
        assert made[-1].is_closed_here

    with serving(path):
        for closed_at in (1, 2):
            asyncio.run(asyncio.wait_for(run(closed_at), 60))
            assert len(made) == closed_at
        served(path)


def test_events_that_are_not_taken_do_not_pile_up_in_an_asyncio_client(path: Path) -> None:
    """P23: the connection is not read while much waits, so the daemon is told, too; then everything comes in order."""

    async def run() -> None:
        with serving(path) as service:
            subscription = AsyncClient(path).subscribe()
            await subscription.next()
            transport = subscription._transport
            assert transport is not None
            call = transport.send_request("test.pour", {"bytes": 10_000})
            inbox = transport._inboxes[call]
            poured = -1
            while poured != service.poured or not poured:
                poured = service.poured
                await asyncio.sleep(0.05)
            assert len(inbox.messages) < 1000
            numbers = [(await transport.next_message(call, 10)).event["number"] for _ in range(poured + 50)]  # type: ignore[union-attr]
            assert numbers == list(range(poured + 50))
            await subscription.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_course_goes_on_where_it_was() -> None:
    """`since` of the next call is the last number seen; a gap moves it, also back (a clock that was set back)."""
    course = Course({"agent": "a"}, reconnect=True)
    assert course.params == {"agent": "a"}
    course.take({"type": "subscribed", "seq": 50})
    assert course.params == {"agent": "a", "since": 50}
    course.take({"type": "fault", "seq": 60})
    course.take({"type": "subscribed", "seq": 99})
    assert course.seq == 60, "what happened in between is still to come"
    course.take({"type": "gap", "seq": 7, "lost": None, "reason": "restart"})
    course.take({"type": "fault", "seq": 8})
    assert course.params["since"] == 8


def test_only_what_can_heal_is_tried_again() -> None:
    """Longer and longer, up to a bound; a wrong parameter is raised at once."""
    course = Course({}, reconnect=True)
    wrong = remote_error(ErrorObject.of("invalid_params", "no"))
    with pytest.raises(InvalidParams):
        course.lost(wrong)
    first = course.lost(remote_error(ErrorObject.of("draining", "going down")))
    assert first is not None
    assert first.data == {"reason": "going down"}
    assert course.lost(None) is None, "that it is away is said once"
    assert [course.next_wait_s() for _ in range(3)] == [0.001] * 3


def test_odd_events_are_taken_as_they_are() -> None:
    """Fields of the wrong type are as if they were not there; what is not known is kept in `data`."""
    assert DaemonEvent.of({"type": 7, "seq": "x", "time_s": None, "agent": 3, "new": [1]}) == DaemonEvent(
        "7", data={"new": [1]}
    )
    event = {"type": "fault", "seq": 1, "time_s": 2.0, "agent": "a", "namespace": "n", "pages": 3}
    assert DaemonEvent.of(event).to_map() == event


@pytest.mark.parametrize("kind", [*EVENT_KINDS, "subscribed", "gap", "away", "from_the_future"])
def test_every_kind_has_a_line(kind: str) -> None:
    """With a name and in one line, also where fields are missing."""
    data = {"total_s": 1.0, "pages": 3, "bytes": 2_000_000, "reason": "room", "match": "diverge"}
    line = event_line(DaemonEvent(kind, 5, 1.5, "alice", "team", data))
    assert kind in line
    assert "team/alice" in line
    assert "\n" not in line
    if kind in ("eviction", "fault", "prefetch", "swap_out"):
        assert line.endswith("3 pages, 2.0 MB (room)")


def test_a_line_tells_why_and_acts_on_no_terminal() -> None:
    """P12: the divergent texts of a miss, and nothing of theirs that a terminal would obey."""
    parted = {"token": 7, "expected": "a\\n", "found": "\x1b[2J<b>"}
    data = {"match": "diverge", "match_reason": "here", "cached_tokens": 7, "prompt_tokens": 9, "divergence": parted}
    line = event_line(DaemonEvent("miss", 1, 0.0, "a", "n", data))
    assert "diverge: 7 of 9 tokens were there; here; token 7 was" in line
    assert "<b>" in line
    assert "\x1b" not in line
    assert printable("a\x07b\u202ec\n") == "a?b?c?"


def test_a_picture_is_put_together_from_answers() -> None:
    """Full answers replace, others change and take away; runs are read with the daemon's own names of states."""
    picture = MonitorPicture()
    a, b = ({"namespace": "n", "agent": name, "tokens": 1} for name in "ab")
    picture.take({"version": 5, "full": True, "agents": [a, b], "states": ["x", "y"], "page_tokens": 256})
    assert (picture.version, set(picture.agents)) == (5, {("n", "a"), ("n", "b")})
    picture.take({"version": 6, "full": False, "agents": [a | {"tokens": 2}], "gone": [["n", "b"]], "states": ["x"]})
    assert {key: each["tokens"] for key, each in picture.agents.items()} == {("n", "a"): 2}
    assert (picture.changed, picture.gone) == ({("n", "a")}, {("n", "b")})
    assert list(picture.pages([0, 3, 17, 2])) == [("x", 0, 3), ("unknown", 16, 2)]
    picture.take({"version": 9, "full": True, "agents": [b]})
    assert (set(picture.agents), picture.gone) == ({("n", "b")}, {("n", "a")})
    picture.forget()
    assert picture.version is None
