"""The machine's clock is set, forwards and back, by hours: order, durability and durations do not depend on it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable

import pytest

from kvd.scheduler.requests import TurnResult
from kvd.scheduler.views import agent_info
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of

JUMPS_S = (6 * 3600.0, -30 * 3600.0, 3600.0, -365 * 86400.0, 400 * 86400.0)
START_S = 1_800_000_000.0


class WallClock:
    """`time.time` as a test sets it."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.asked = 0

    def time(self) -> float:
        """Seconds since the epoch, a little later each time."""
        self.asked += 1
        self.now_s += 0.001
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    """The wall clock of everything in this process."""
    made = WallClock()
    monkeypatch.setattr(time, "time", made.time)
    return made


def durations_are_sane(turn: TurnResult) -> None:
    """No figure of a reply is negative or as long as a jump."""
    for field in dataclasses.fields(turn):
        if field.name.endswith("_s"):
            assert 0.0 <= getattr(turn, field.name) < 3600.0, field.name


def test_jumps_of_the_clock_cost_no_turn_and_no_restart_anything(
    make_world: Callable[..., World], clock: WallClock, tally: Counter[str]
) -> None:
    """P2 P8: a turn, a fork, a compaction and a kill around each jump: all is there, no log is called old."""
    world = make_world(seed=3)
    world.generate("a", text_of(30), max_tokens=2)
    made_s = world.agent("a").created_s
    assert START_S < made_s < START_S + 60
    for number, jump_s in enumerate(JUMPS_S):
        clock.now_s += jump_s
        turn = world.generate("a", world.text("a") + f" jump {number}", max_tokens=2).turn
        assert turn.durable
        assert turn.match == "extend"
        durations_are_sane(turn)
        assert world.job("fork", "a", new_agent=f"f{number}").facts["durable"]
        assert world.job("compact", "a").error is None
        clock.now_s -= jump_s / 2
        texts = {agent.ref.agent: agent.branch.text for agent in world.core.agents}
        computed = world.agent("a").branch.computed
        world.crash()
        assert {agent.ref.agent: agent.branch.text for agent in world.core.agents} == texts
        assert not world.report.log_troubles
        assert not world.report.missing_pages
        assert world.report.seconds >= 0.0
        assert world.agent("a").created_s == made_s
        assert agent_info(world.core, world.agent("a"))["created_s"] == made_s
        again = world.generate("a", world.text("a") + "!", max_tokens=1).turn
        assert again.cached_tokens == computed
        durations_are_sane(again)
        tally["clock jumps, tried"] += 2
    assert clock.asked > 20


@pytest.mark.parametrize("jump_s", [-50 * 3600.0, 50 * 3600.0])
def test_the_least_recently_used_pages_go_first_whatever_the_clock_says(
    make_world: Callable[..., World], clock: WallClock, tally: Counter[str], jump_s: float
) -> None:
    """Agents used after the clock was set back are not taken for the oldest ones, nor the other way round."""
    world = make_world(budget_pages=24)
    for name in ("a", "b", "c"):
        world.generate(name, name + text_of(44), max_tokens=1)
        clock.now_s += jump_s
    world.generate("a", world.text("a") + "!", max_tokens=1)  # the oldest by name is the newest by use
    world.settle()
    clock.now_s += jump_s
    world.generate("d", "d" + text_of(44), max_tokens=1)

    def resident(name: str) -> int:
        return world.core.pager.residency(world.agent(name).branch.space).resident_pages

    assert resident("b") < resident("c") <= resident("a")
    tally["clock jumps, tried"] += 4


def test_a_page_that_is_lost_after_a_jump_is_still_reported(world: World, clock: WallClock) -> None:
    """P4 P8: what the log says has the clock's time, and nothing is computed from it."""
    world.generate("a", text_of(60), max_tokens=1)
    world.settle()
    world.job("evict", "a")
    world.spoil_page(world.page_ids("a")[1])
    clock.now_s -= 86400.0
    turn = world.generate("a", world.text("a") + "!", max_tokens=1).turn
    assert "page lost at token 256" in turn.match_reason
    assert world.events("page_lost")[0]["time_s"] < START_S  # type: ignore[operator]
    durations_are_sane(turn)
