"""Agents with an end: who gets one, what keeps them, who deletes them, what survives a restart."""

from __future__ import annotations

import time

import pytest

from kvd.ids import RequestId
from kvd.scheduler.agents import Agent
from kvd.scheduler.endings import PASSING_TTL_S
from kvd.scheduler.requests import TurnRequest
from kvd.scheduler.turn import TurnState, run_turn
from kvd.scheduler.upkeep import EXPIRY_LOOK_S, Upkeep
from kvd.scheduler.views import agent_list
from tests.scheduler.harness import Outcome, World, content, ref_of
from tests.scheduler.test_turn import text_of

DAY_S = 86_400.0


def turn(world: World, name: str, ttl_s: float | None = None) -> None:
    """A turn of an agent that may say when the agent ends."""
    prompt = content(f"{name} {text_of(3)}")
    request = TurnRequest(RequestId(0), ref_of(name), prompt, max_tokens=1, ttl_s=ttl_s)
    work = run_turn(world.core, TurnState(request, world.now_s))
    assert world.drive(work, Outcome()).turn.durable


def keep_up(world: World) -> list[str]:
    """Let the engine's own work be done; the agents that were tried."""
    upkeep = Upkeep(world.core, lambda: world.now_s, 1.0)
    tried = []
    while (job := upkeep.next_job(idle=False)) is not None:
        ref, operation = job
        assert operation == "expire"
        tried.append(ref.agent)
        world.job(operation, ref.agent)
    world.settle()
    return sorted(tried)


def names(world: World) -> list[str]:
    """All agents, those that sleep included."""
    return sorted(world.core.agents.names(ref_of("a").namespace))


def test_an_agent_ends_after_its_last_use(world: World) -> None:
    """A flood of agents that nobody names leaves nothing behind: not in RAM, not on disk; others are untouched."""
    turn(world, "kept")
    for name in ("passing", "used"):
        turn(world, name, DAY_S)
    world.now_s += DAY_S - 1.0
    turn(world, "used", DAY_S)
    assert keep_up(world) == []
    world.now_s += 1.0
    assert keep_up(world) == ["passing"]
    assert names(world) == ["kept", "used"]
    assert world.core.stats.agents_expired == 1
    ((_event, facts),) = [(event, facts) for event, facts in world.logged if event == "agent_expired"]
    assert (facts["agent"], facts["ttl_s"]) == (str(ref_of("passing")), DAY_S)
    world.now_s += DAY_S
    assert keep_up(world) == ["used"]
    world.crash()
    assert names(world) == ["kept"]


def test_who_was_made_without_an_end_has_none(world: World) -> None:
    """P19: nobody's request ends somebody else's agent; whoever has an end may be given another one."""
    turn(world, "a")
    turn(world, "a", 1.0)
    assert world.agent("a").ttl_s is None
    turn(world, "b", DAY_S)
    turn(world, "b")
    assert world.agent("b").ttl_s == DAY_S
    turn(world, "b", 10.0)
    assert world.agent("b").ttl_s == 10.0
    world.now_s += DAY_S
    assert keep_up(world) == ["b"]


def test_forks_have_an_end_of_their_own(world: World) -> None:
    """A fork without one is kept, whatever it is forked from; a fork is a use of both."""
    turn(world, "a", DAY_S)
    world.now_s += DAY_S / 2
    assert world.job("fork", "a", new_agent="kept").error is None
    assert world.job("fork", "a", new_agent="passing", ttl_s=10.0).error is None
    world.now_s += DAY_S / 2
    assert keep_up(world) == ["passing"]
    world.now_s += DAY_S / 2
    assert keep_up(world) == ["a"]
    assert names(world) == ["kept"]


def test_a_restart_knows_the_last_record(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork keeps its parent while the daemon runs, and writes nothing of it: later its last turn is what counts."""
    began_s = time.time()
    turn(world, "a", DAY_S)
    world.now_s += DAY_S / 2
    monkeypatch.setattr(time, "time", lambda: began_s + DAY_S / 2)
    assert world.job("fork", "a", new_agent="b", ttl_s=DAY_S).error is None
    world.settle()
    assert [each["idle_s"] < DAY_S / 4 for each in agent_list(world.core, None)] == [True, True]
    world.crash()
    assert [each["idle_s"] < DAY_S / 4 for each in agent_list(world.core, None)] == [False, True]
    turn(world, "a")
    world.settle()
    world.crash()
    assert [each["idle_s"] < DAY_S / 4 for each in agent_list(world.core, None)] == [True, True]


@pytest.mark.parametrize("asleep", [False, True])
def test_an_end_survives_restarts(world: World, monkeypatch: pytest.MonkeyPatch, asleep: bool) -> None:
    """Time passes while no daemon runs; agents whose logs nobody has read end, too, and are listed with it."""
    began_s = time.time()
    turn(world, "a", DAY_S)
    turn(world, "b", 10 * DAY_S)
    world.settle()
    world.close()
    if asleep:
        world.read_agents = 0
    monkeypatch.setattr(time, "time", lambda: began_s + DAY_S + 60.0)
    world.start()
    assert bool(world.core.agents.asleep) is asleep
    facts = {each["agent"]: each for each in agent_list(world.core, None)}
    assert [facts[name]["ttl_s"] for name in ("a", "b")] == [DAY_S, 10 * DAY_S]
    assert facts["b"]["expires_s"] == pytest.approx(began_s + 10 * DAY_S, abs=30.0)
    upkeep = Upkeep(world.core, lambda: world.now_s, 1.0)
    assert upkeep.next_job(idle=False) == (ref_of("a"), "expire")
    assert upkeep.next_job(idle=False) is None


def test_ages_are_told_as_differences(world: World) -> None:
    """P19: who has another wall clock than the daemon can tell how old an agent is, and how long it has."""
    turn(world, "a", DAY_S)
    turn(world, "b")
    world.now_s += 3600.0
    facts = {each["agent"]: each for each in agent_list(world.core, None)}
    assert [facts[name]["idle_s"] for name in "ab"] == pytest.approx([3600.0, 3600.0])
    assert facts["a"]["expires_in_s"] == pytest.approx(DAY_S - 3600.0)
    assert facts["b"]["expires_in_s"] is None
    world.now_s += 2 * DAY_S
    assert agent_list(world.core, None)[0]["expires_in_s"] == 0.0


def test_a_machine_that_sleeps_gets_older(world: World) -> None:
    """P25: as after a restart; the clock of waits stands still meanwhile, that of ages does not."""
    turn(world, "a", DAY_S)
    turn(world, "b", 3 * DAY_S)
    before = [each["idle_s"] for each in agent_list(world.core, None)]
    world.asleep_s += 2 * DAY_S
    facts = agent_list(world.core, None)
    assert [each["idle_s"] for each in facts] == pytest.approx([idle_s + 2 * DAY_S for idle_s in before])  # type: ignore[operator]
    assert [each["expires_in_s"] for each in facts] == [0.0, pytest.approx(DAY_S, abs=60.0)]
    turn(world, "b", 3 * DAY_S)
    assert keep_up(world) == ["a"]
    assert agent_list(world.core, None)[0]["expires_in_s"] == pytest.approx(3 * DAY_S, abs=60.0)


def test_a_use_in_time_saves_it(world: World) -> None:
    """Between the look and the deletion an agent may have been used: it is looked at once more."""
    turn(world, "a", 10.0)
    world.now_s += 20.0
    upkeep = Upkeep(world.core, lambda: world.now_s, 1.0)
    assert upkeep.next_job(idle=False) == (ref_of("a"), "expire")
    turn(world, "a")
    assert world.job("expire", "a").error is None
    assert names(world) == ["a"]


def test_pinned_agents_stay(world: World) -> None:
    """What somebody pinned he wants to keep; unpinned it ends as before."""
    turn(world, "a", 10.0)
    assert world.job("pin", "a").facts["expires_s"] is None
    world.now_s += 100.0
    assert keep_up(world) == []
    world.job("unpin", "a")
    assert keep_up(world) == ["a"]


def test_a_disk_that_refuses_is_asked_again_later(world: World) -> None:
    """Once a look, not in a loop; the agent is there until its log is gone."""
    turn(world, "a", 10.0)
    world.now_s += 20.0
    world.fs.fail = lambda number, name, path: 5 if name == "unlink" else None
    upkeep = Upkeep(world.core, lambda: world.now_s, 1.0)
    assert upkeep.next_job(idle=False) == (ref_of("a"), "expire")
    refused = world.job("expire", "a").error
    assert refused is not None
    assert names(world) == ["a"]
    assert [job for job in [upkeep.next_job(idle=False)] if job and job[1] == "expire"] == []
    world.heal()
    world.now_s += EXPIRY_LOOK_S
    while (job := upkeep.next_job(idle=False)) is not None:
        world.job(job[1], job[0].agent)
    assert names(world) == []


def first_victims(world: World) -> list[Agent]:
    """Awake agents in the order in which their pages would leave RAM."""
    spaces = {space.space: space for space in world.core.pager.spaces}
    return sorted(
        world.core.agents,
        key=lambda agent: (spaces[agent.branch.space].use.eviction_claim, spaces[agent.branch.space].use.last_used),
    )


def test_passing_agents_are_evicted_first(world: World) -> None:
    """Their pages go before those of agents that were used longer ago; with a far end they count like any other."""
    turn(world, "old")
    turn(world, "session", 15 * PASSING_TTL_S)
    turn(world, "passing", PASSING_TTL_S)
    turn(world, "new")
    assert [agent.ref.agent for agent in first_victims(world)] == ["passing", "old", "session", "new"]
    world.crash(lossy=False)
    assert next(iter(first_victims(world))).ref.agent == "passing"
