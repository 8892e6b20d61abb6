"""What the engine does for itself: save what a disk refused, compact logs that are mostly dead, wake agents.

Decides only; the engine runs the jobs. Saves go ahead of requests that wait (a busy daemon would never come to them),
ever more rarely while the disk refuses. Compactions wait until nothing else is to do: they save disk, not time. So does
waking agents that nobody asked for, for the pages that they may have in common with others of a namespace in use.

Owner: the engine thread. May import siblings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvd.scheduler.agents import Agent
from kvd.scheduler.requests import AgentRef

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

MAX_SAVE_WAIT_S = 30.0
"""How far apart tries for unsaved turns get while the disk goes on refusing."""


class Upkeep:
    """Owner: the engine thread.

    Args:
        core: the engine's parts.
        clock: seconds, monotonic.
        wait_s: how far apart tries are at least while the disk refuses.
    """

    def __init__(self, core: EngineCore, clock: Callable[[], float], wait_s: float) -> None:
        self._core = core
        self._clock = clock
        self._least_wait_s = wait_s
        self._wait_s = 0.0
        self._next_save_s = 0.0
        self._tried: set[AgentRef] = set()

    def next_job(self, *, idle: bool) -> tuple[AgentRef, str] | None:
        """The job to run before the next request, if there is one: (agent, operation).

        Args:
            idle: no request waits.
        """
        if self._clock() >= self._next_save_s:
            for agent in self.unsaved()[:1]:
                agent.last_save = self._core.agents.tick()
                return agent.ref, "save"
        if idle:
            for agent in self._core.agents:
                if agent.compaction_due and agent.logged:
                    return agent.ref, "compact"
            return self._next_to_wake()
        return None

    def _next_to_wake(self) -> tuple[AgentRef, str] | None:
        """An agent that others of its namespace might share pages with, each once: a refusal is not asked for again."""
        agents = self._core.agents
        if not self._core.sharing.is_on:
            return None
        for ref in agents.asleep:
            if ref.namespace in agents.in_use and ref not in self._tried:
                self._tried.add(ref)
                return ref, "wake"
        return None

    def unsaved(self) -> list[Agent]:
        """Agents with changes that are not on disk, the one that was tried longest ago first."""
        if self._core.swap_off:
            return []  # there is nowhere to save anything
        unsaved = [agent for agent in self._core.agents if agent.unsaved is not None]
        return sorted(unsaved, key=lambda agent: agent.last_save)

    def save_ended(self, *, durable: bool) -> None:
        """While the disk refuses, tries get rarer; once it takes one, the others follow at once."""
        self._wait_s = 0.0 if durable else min(MAX_SAVE_WAIT_S, max(self._least_wait_s, 2 * self._wait_s))
        self._next_save_s = self._clock() + self._wait_s
