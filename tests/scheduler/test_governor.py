"""The write limit: what it lets pass by the minute, what a turn says that it holds up, and what eviction does then."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.scheduler.governor import BURST_S, WriteGovernor
from kvd.scheduler.views import statistics
from kvd.scheduler.waiting import never, until_written
from kvd.vm.events import RetryWanted, WritesAllowed
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of

LIMIT = 600_000


@settings(deadline=None, max_examples=50)
@given(
    wants=st.lists(st.integers(0, 120_000), min_size=1, max_size=200),
    page_bytes=st.integers(1_000, 50_000),
    steps_s=st.lists(st.sampled_from([0.0, 0.4, 1.0, 1.0, 3.0, 70.0]), min_size=1, max_size=200),
)
def test_no_minute_sees_more_than_the_limit(wants: list[int], page_bytes: int, steps_s: list[float]) -> None:
    """P26: the limit, one burst and one page, whatever is wanted and however unevenly time passes."""
    now_s, written, log = 0.0, 0, [(0.0, 0)]
    governor = WriteGovernor(LIMIT, lambda: now_s)
    for want, step_s in zip(wants, itertools.cycle(steps_s), strict=False):
        now_s += step_s
        left = governor.tick(written)
        assert left is not None
        # as the pager: the page that uses it up may be larger
        pages = min(-(-want // page_bytes), max(0, -(-left // page_bytes)))
        written += pages * page_bytes
        log.append((now_s, written))
    for start_s, before in log:
        after = max(total for at_s, total in log if at_s <= start_s + 60)
        assert after - before <= LIMIT + LIMIT / 60 * BURST_S + page_bytes


def test_the_last_minute_is_told_with_and_without_a_limit() -> None:
    """P26: bytes written a minute is a figure even where nothing limits it."""
    now_s = 0.0
    governor = WriteGovernor(None, lambda: now_s)
    for second in range(1, 200):
        now_s = float(second)
        assert governor.tick(1_000 * second) is None
    assert governor.last_minute_bytes == pytest.approx(60_000, abs=1_000)


def test_a_turn_whose_pages_wait_says_so_and_is_saved_later(make_world: Callable[..., World]) -> None:
    """P26: the reply comes at once, durable false with the reason; with time its pages are written, then its record."""
    world = make_world(write_limit_bytes=240_000)  # 40,000 bytes at once: a page, then none
    first = world.generate("a", text_of(70))
    assert not first.turn.durable
    assert first.turn.durable_reason is not None
    assert "240000 bytes a minute" in first.turn.durable_reason
    figures = statistics(world.core)
    assert figures["write_limit_bytes"] == 240_000
    assert int(str(figures["write_delayed_bytes"])) > 0
    assert world.core.pager.writes_held
    before_s = world.now_s
    while world.agent("a").unsaved is not None:
        world.tick()
        while world.step_store():
            pass
        world.save_unsaved()
        assert world.now_s < 600
    assert world.now_s > before_s
    written = int(str(statistics(world.core)["bytes_written"]))
    assert written <= 240_000 / 60 * (world.now_s + BURST_S) + 2 * world.set_bytes + 50_000
    assert statistics(world.core)["write_delayed_bytes"] == 0
    text = world.text("a")
    world.crash()
    assert world.text("a") == text, "what was saved later is as durable as anything"


def test_a_turn_without_new_pages_is_durable_at_once(make_world: Callable[..., World]) -> None:
    """P2: a record never waits for the limit, however much was written."""
    world = make_world(write_limit_bytes=1_000_000)
    world.core.governor._account = -1e9  # far beyond the limit
    world.core.govern()
    assert world.generate("b", "short").turn.durable


def test_memory_full_of_pages_that_wait_presses_back(make_world: Callable[..., World]) -> None:
    """P21 P26: dirty pages are not given up for a limit: what does not fit waits, and then names the limit."""
    world = make_world(budget_pages=16, write_limit_bytes=1_000_000)
    world.core.governor._account = -1e12
    world.core.govern()
    outcomes = [world.generate(name, f"{name} says: {text_of(40)}") for name in "abcdef"]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert errors
    assert all(error.name == "busy" and "write limit" in error.message for error in errors)
    world.core.governor.lift()
    world.core.govern()
    world.settle()
    world.save_unsaved()
    assert world.generate("g", text_of(12)).turn.durable, "it recovers by itself when writes may go on"


def test_pages_of_others_that_wait_make_nobody_less_durable(make_world: Callable[..., World]) -> None:
    """P26 P2: a space whose pages are on their way waits for them; only its own that are held back end the wait."""
    world = make_world(write_limit_bytes=1_000_000, sharing="agent")
    core = world.core
    core.memory.apply(WritesAllowed(0))
    for name in "ab":
        assert not world.generate(name, f"{name} says: {text_of(40)}").turn.durable
    space = world.agent("b").branch.space
    assert (core.pager.is_held(space), core.pager.is_held(world.agent("a").branch.space)) == (True, True)
    core.memory.apply(RetryWanted(space))  # b's go first
    while core.pager.is_held(space):
        core.memory.apply(WritesAllowed(1))  # a page starts, and uses it up
        if core.pager.is_held(space):
            assert world.step_store()
    assert core.pager.writes_held, "a's wait for the limit"
    waiting = until_written(core, [space], never)
    wait = next(waiting)
    assert callable(wait)
    assert not wait()
    assert world.step_store()
    assert wait()
    assert list(waiting) == []
    assert core.pages_durable(space)
    assert world.job("save", "b").facts["durable"]
    assert not world.job("save", "a").facts["durable"]
