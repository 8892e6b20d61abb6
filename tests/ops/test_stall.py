"""An engine that hangs is noticed, told, and not kept alive by an event loop that is well."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.ops.lifecycle import Notifier
from kvd.ops.stall import LOOK_S, STALL_S, StallWatch


@pytest.fixture
def manager(short_tmp: Path) -> Iterator[socket.socket]:
    """Takes the datagrams of a notifier."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taker:
        taker.bind(str(short_tmp / "notify"))
        taker.setblocking(False)
        yield taker


def _said(manager: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


class Engine:
    """How long it has given no news, and what was logged of it."""

    def __init__(self) -> None:
        self.idle_s = 0.0
        self.events: list[tuple[str, dict[str, object]]] = []

    def log(self, event: str, *, level: str = "warning", **facts: object) -> None:
        """Note an event."""
        self.events.append((event, {"level": level, **facts}))


def test_a_stall_is_told_once_and_the_watchdog_hungers(manager: socket.socket) -> None:
    """One event at each end; no sign of life between them."""
    engine = Engine()
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "120000000"})
    watch = StallWatch(lambda: engine.idle_s, notifier, engine.log)
    assert (watch.limit_s, watch.look_every_s) == (STALL_S, LOOK_S)
    for engine.idle_s in (0.1, STALL_S - 1):
        watch.look()
    assert (_said(manager), engine.events, watch.is_stalled) == (["WATCHDOG=1"] * 2, [], False)
    for engine.idle_s in (STALL_S, STALL_S + 5, STALL_S + 10):
        watch.look()
        assert watch.is_stalled
    assert [name for name, _ in engine.events] == ["engine_stalled"]
    assert engine.events[0][1]["idle_s"] == STALL_S
    assert _said(manager) == ["STATUS=the engine has not moved for 60 s"]
    engine.idle_s = 0.5
    watch.look()
    assert not watch.is_stalled
    assert engine.events[1:] == [("engine_moves_again", {"level": "info", "stalled_s": STALL_S + 10})]
    assert _said(manager) == ["WATCHDOG=1"]


def test_a_short_watchdog_counts() -> None:
    """The manager's patience is the limit where it is less than ours, and it is fed twice in that time."""
    notifier = Notifier({"WATCHDOG_USEC": "2000000"})
    watch = StallWatch(lambda: 0.0, notifier, Engine().log)
    assert (watch.limit_s, watch.look_every_s) == (2.0, 1.0)


def test_it_looks_again_and_again() -> None:
    """Until it is cancelled, at its own pace."""
    engine, slept = Engine(), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        engine.idle_s += 30
        if len(slept) == 4:
            raise asyncio.CancelledError

    watch = StallWatch(lambda: engine.idle_s, Notifier({}), engine.log)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch.run(sleep))
    assert slept == [LOOK_S] * 4
    assert [name for name, _ in engine.events] == ["engine_stalled"]
