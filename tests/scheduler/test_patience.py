"""How long one request waits at most while the disk refuses writes: its waits in a row, and behind others, add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.errors import Busy
from kvd.scheduler.waiting import PATIENCE_S, STUCK_S, Patience
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of

SLACK_S = 4.0
"""Ticks are a second apart, and the disk is known to refuse from one of them on."""


@pytest.fixture
def full(make_world: Callable[..., World]) -> World:
    """A world whose memory is full of pages that the disk does not take."""
    world = make_world(budget_pages=12)
    world.refuse_writes()
    for number in range(3):
        world.generate(f"agent-{number}", f"{number} {text_of(22)}", max_tokens=1)
    world.tick()
    assert world.core.refusing_since_s is not None
    return world


def progress_of_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on others get somewhere in each second: nobody is stuck as far as that goes."""
    tick = world.tick

    def tick_and_progress() -> None:
        tick()
        world.core.stats.records_written += 1

    monkeypatch.setattr(world, "tick", tick_and_progress)


def test_a_wait_for_room_ends_though_others_get_on(full: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is answered, with the reason and when to try again, however busy the others are."""
    progress_of_others(full, monkeypatch)
    began_s = full.now_s
    outcome = full.generate("new", text_of(60), max_tokens=1)
    assert isinstance(outcome.error, Busy)
    assert "No space left" in outcome.error.message
    assert outcome.error.retry_after_s
    assert STUCK_S < full.now_s - began_s <= PATIENCE_S + SLACK_S


def test_a_wait_for_a_place_ends_too(full: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stands in line behind requests that all wait for the disk does not wait for each of them in turn."""
    progress_of_others(full, monkeypatch)
    other = full.core.reservations.ask(full.core.pager.usable_bytes)
    began_s = full.now_s
    outcome = full.generate("new", text_of(20), max_tokens=1)
    assert isinstance(outcome.error, Busy)
    assert full.now_s - began_s <= PATIENCE_S + SLACK_S
    assert full.core.reservations.waiting == 0, "it has left the line"
    full.core.reservations.release(other)
    full.heal()
    full.settle()
    full.save_unsaved()
    assert full.generate("new", text_of(20), max_tokens=1).turn.durable, "and comes in once the disk is well"


def test_a_request_that_was_turned_away_is_nobodys_progress(full: World) -> None:
    """Otherwise each of many that give up would let all others wait for `STUCK_S` once more."""
    before = full.core.progress
    full.core.stats.requests += 1
    full.core.stats.requests_busy += 1
    assert full.core.progress == before
    full.core.stats.requests += 1
    assert full.core.progress != before


def test_waits_add_up_while_the_disk_refuses_and_only_then(full: World) -> None:
    """Two waits of six seconds are too much; the same on a well disk are none of its business."""
    core, patience = full.core, Patience()
    for expected in (False, True):
        patience.begin(core)
        full.now_s += 0.6 * PATIENCE_S
        assert patience.is_over(core) is expected
        patience.end(core)
    core.refusing_since_s = None
    patience = Patience()
    patience.begin(core)
    full.now_s += 10 * PATIENCE_S
    assert not patience.is_over(core)
    patience.end(core)
    assert patience.waited_s == 0
    core.refusing_since_s = full.now_s  # the disk only begins to refuse now
    patience.begin(core)
    assert not patience.is_over(core)
