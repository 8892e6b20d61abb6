"""What the engine does for itself: save what a disk refused, compact logs, delete agents whose time is over, wake some.

Decides only; the engine runs the jobs. Saves go ahead of requests that wait (a busy daemon would never come to them),
ever more rarely while the disk refuses. A namespace whose disk quota is full waits by itself, until there is more room
in it or its own time has come: the disk takes what others have. Compactions wait until nothing else is to do: they save
disk, not time. One that a full quota waits for goes ahead like a save: a daemon that is never idle would otherwise
never save a turn again. So do deletions (`kvd.scheduler.endings`): they cost little, and free what others may want.

Waking agents that nobody asked for, for the pages that they may have in common with others of a namespace in use, waits
until nothing else is to do, too. It takes memory outside the budget (texts and ids), so it stops while memory is short,
and altogether after `MAX_WOKEN_TOKENS`; those used last come first, and those without a page to share not at all.

Owner: the engine thread. May import kvd.ids, kvd.quant.spec and siblings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.ids import Namespace
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import Agent
from kvd.scheduler.endings import due
from kvd.scheduler.requests import AgentRef

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore
    from kvd.store.sleeping import SleepingAgent

MAX_SAVE_WAIT_S = 30.0
"""How far apart tries for unsaved turns get while the disk goes on refusing."""


EXPIRY_LOOK_S = 10.0
"""How often agents are looked for whose time is over; each is tried once a look, so a disk that refuses is no loop."""

MAX_WOKEN_TOKENS = 1 << 20
"""Tokens of all agents that are woken unasked: their text, ids and index take about 100 bytes each."""


@dataclass(slots=True)
class _Backoff:
    """How long saves wait after one that was refused.

    Attributes:
        wait_s: from the last refusal on; 0 after a success.
        until_s: no save before, by the engine's clock.
    """

    wait_s: float = 0.0
    until_s: float = 0.0

    def note(self, now_s: float, *, durable: bool, least_s: float) -> None:
        """A save ended: tries get rarer with each that is refused."""
        self.wait_s = 0.0 if durable else min(MAX_SAVE_WAIT_S, max(least_s, 2 * self.wait_s))
        self.until_s = now_s + self.wait_s


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
        self._disk = _Backoff()
        self._quotas: dict[Namespace, _Backoff] = {}  # in force while the namespace is stuck
        self._next_look_s = 0.0
        self._expired: list[AgentRef] = []
        self._tried: set[AgentRef] = set()
        self._tokens_left = MAX_WOKEN_TOKENS

    def next_job(self, *, idle: bool) -> tuple[AgentRef, str] | None:
        """The job to run before the next request, if there is one: (agent, operation).

        Args:
            idle: no request waits.
        """
        if self._clock() >= self._disk.until_s:
            for agent in self._worth_saving()[:1]:
                agent.last_save = self._core.agents.tick()
                return agent.ref, "shrink" if agent.ref in self._core.to_shrink else "save"
        if (ref := self._next_to_shrink()) is not None:
            return ref, "shrink"
        while self._expired or self._clock() >= self._next_look_s:
            if not self._expired:
                self._expired, self._next_look_s = due(self._core), self._clock() + EXPIRY_LOOK_S
            if self._expired:
                return self._expired.pop(), "expire"
        for agent in self._core.agents:
            if agent.compaction_urgent and agent.logged:
                return agent.ref, "compact"
        if idle:
            for agent in self._core.agents:
                if agent.compaction_due and agent.logged:
                    return agent.ref, "compact"
            return self._next_to_wake()
        return None

    def _next_to_shrink(self) -> AgentRef | None:
        """An agent that is saved, or sleeps, and is to do with less; the others are tried as they are saved."""
        agents = self._core.agents
        for ref in list(self._core.to_shrink):
            agent = agents.known(ref)
            if agent is None or agent.unsaved is None:
                del self._core.to_shrink[ref]
                if agent is not None or ref in agents.asleep:
                    return ref
        return None

    def _next_to_wake(self) -> tuple[AgentRef, str] | None:
        """An agent that others of its namespace might share pages with, each once: a refusal is not asked for again."""
        core, agents = self._core, self._core.agents
        if not core.sharing.is_on or core.pressure.level != "none":
            return None
        refs = [
            ref
            for ref, agent in agents.asleep.items()
            if ref.namespace in agents.in_use
            and ref not in self._tried
            and agent.row.tokens <= self._tokens_left
            and _has_pages_to_share(core, agent)
        ]
        if not refs:
            return None
        ref = max(refs, key=lambda ref: agents.asleep[ref].row.updated_s)
        self._tried.add(ref)
        self._tokens_left -= agents.asleep[ref].row.tokens
        return ref, "wake"

    def unsaved(self) -> list[Agent]:
        """Agents with changes that are not on disk, the one that was tried longest ago first."""
        if self._core.swap_off:
            return []  # there is nowhere to save anything
        unsaved = [agent for agent in self._core.agents if agent.unsaved is not None]
        return sorted(unsaved, key=lambda agent: agent.last_save)

    def _worth_saving(self) -> list[Agent]:
        """Those of `unsaved` that do not wait for room in the disk quota of their namespace."""
        quotas, now_s = self._core.disk_quotas, self._clock()
        for namespace in [each for each in self._quotas if not quotas.is_stuck(each)]:
            del self._quotas[namespace]
        waiting = {namespace for namespace, backoff in self._quotas.items() if now_s < backoff.until_s}
        worth = [agent for agent in self.unsaved() if agent.ref.namespace not in waiting]
        return sorted(worth, key=lambda agent: agent.ref not in self._core.to_shrink)  # they need the least room

    def save_ended(self, ref: AgentRef, *, durable: bool) -> None:
        """While the disk refuses, tries get rarer; once it takes one, the others follow at once.

        Where the quota of a namespace refuses, tries for that namespace do, and the disk has said nothing.
        """
        backoff = self._disk
        if not durable and self._core.disk_quotas.is_stuck(ref.namespace):
            backoff = self._quotas.setdefault(ref.namespace, _Backoff())
        elif durable:
            self._quotas.pop(ref.namespace, None)
        backoff.note(self._clock(), durable=durable, least_s=self._least_wait_s)


def _has_pages_to_share(core: EngineCore, agent: SleepingAgent) -> bool:
    """Whether it has whole pages that this run can use: those of other numerics or formats are computed again."""
    summary = agent.summary
    return (
        bool(agent.page_ids)
        and summary.computed_tokens >= PAGE_TOKENS
        and summary.numerics == core.numerics
        and tuple(summary.format_ids) == tuple(core.formats.default_ids)
    )
