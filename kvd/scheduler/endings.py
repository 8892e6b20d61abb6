"""Agents with an end: they are deleted so long after their last use, whoever made them and whether he still lives.

Theory of operation. A client that makes agents for requests that name none cannot be relied on to delete them: it may
die. So the first turn of an agent, or the fork that makes it, may say `ttl_s`; it is in the agent's log, and the
engine's upkeep looks for agents whose time is over. Every turn, injection, rollback and fork of an agent is a use of
it. An agent that was made without an end never gets one: nobody loses a conversation because somebody else's request
says `ttl_s`. While an agent is pinned its time does not end it.

A use that writes no record (a fork, for the parent; a turn that gains nothing) is known until the next start: what
counts then is the time of the last record. Nothing is written for a use's own sake.

Time is a wall clock that was read once, at the start, and goes on with a monotonic one that counts the machine's sleep:
a clock that is set while the daemon runs ends nobody, and a night in a closed laptop is a night. Clients are told
differences as well, which need no clock in common with them.

An agent that ends within two days is *passing*: its pages leave RAM, and the disk when the quota is full, before those
of agents that are expected to come back, so that a flood of one-off requests costs the others nothing.

Owner: the engine thread. May import siblings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.scheduler.agents import Agent
from kvd.scheduler.requests import AgentRef, TurnRequest
from kvd.vm.events import MarkedPassing

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore
    from kvd.store.sleeping import AgentSummary

PASSING_TTL_S: Final = 2 * 86_400.0


def agent_of(core: EngineCore, request: TurnRequest) -> tuple[Agent, bool]:
    """The agent that a turn is of, and whether it is new.

    Raises:
        LogUnreadable: as `AgentRegistry.find`.
    """
    agent, is_new = core.agents.get_or_create(request.ref)
    if is_new or (agent.ttl_s is not None and request.ttl_s is not None):
        give_end(core, agent, request.ttl_s)
    use(core, agent)
    return agent, is_new


def give_end(core: EngineCore, agent: Agent, ttl_s: float | None) -> None:
    """The agent ends so long after its last use; None: never."""
    had_end = agent.ttl_s is not None
    agent.ttl_s = ttl_s
    if had_end or ttl_s is not None:
        mark_passing(core, agent)


def mark_passing(core: EngineCore, agent: Agent) -> None:
    """Tell the pager what the agent's branches are."""
    for branch in agent.branches.values():
        core.memory.apply(MarkedPassing(branch.space, is_passing(agent)))


def end_facts(core: EngineCore, agent: Agent | AgentSummary) -> dict[str, object]:
    """When an agent was used and when it ends, as clients see it."""
    left_s = expires_in_s(core, agent)
    return {
        "used_s": agent.used_s,
        "idle_s": round(idle_s(core, agent), 3),
        "ttl_s": agent.ttl_s,
        "expires_s": expires_s(agent),
        "expires_in_s": None if left_s is None else round(left_s, 3),
    }


def is_passing(agent: Agent | AgentSummary) -> bool:
    """Whether nobody is expected to come back to it."""
    return agent.ttl_s is not None and agent.ttl_s <= PASSING_TTL_S


def use(core: EngineCore, agent: Agent) -> None:
    """It is used now."""
    agent.used_s = core.wall_s()


def expires_s(agent: Agent | AgentSummary) -> float | None:
    """When it ends unless it is used before, seconds since the epoch; None: never."""
    return None if agent.ttl_s is None or agent.pinned else agent.used_s + agent.ttl_s


def idle_s(core: EngineCore, agent: Agent | AgentSummary) -> float:
    """Seconds since its last use."""
    return max(0.0, core.wall_s() - agent.used_s)


def expires_in_s(core: EngineCore, agent: Agent | AgentSummary) -> float | None:
    """Seconds until it ends unless it is used before, 0 when its time is over; None: never."""
    end_s = expires_s(agent)
    return None if end_s is None else max(0.0, end_s - core.wall_s())


def is_due(core: EngineCore, agent: Agent | AgentSummary) -> bool:
    """Whether its time is over."""
    return expires_in_s(core, agent) == 0.0


def due(core: EngineCore) -> list[AgentRef]:
    """Agents whose time is over, those that sleep included."""
    awake = [agent.ref for agent in core.agents if is_due(core, agent)]
    return awake + [ref for ref, sleeper in core.agents.asleep.items() if is_due(core, sleeper.summary)]


__all__ = [
    "PASSING_TTL_S",
    "agent_of",
    "due",
    "end_facts",
    "give_end",
    "is_due",
    "is_passing",
    "mark_passing",
    "use",
]
