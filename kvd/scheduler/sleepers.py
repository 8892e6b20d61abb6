"""Agents that sleep, and which of them map a page.

Theory of operation. A full quota asks of page after page who maps it. Sleepers may be thousands, with tens of pages
each, and most daemons never meet a full quota: so the index is made when somebody first asks, and follows from then on
what becomes of each sleeper. A shortage costs what it looks at, not all that is asleep.

Owner: the engine thread. May import kvd.ids, kvd.store.sleeping and siblings.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from kvd.ids import PageId
from kvd.scheduler.requests import AgentRef
from kvd.store.sleeping import SleepingAgent


class Sleepers(MutableMapping[AgentRef, SleepingAgent]):
    """Sleeping agents by reference, in the order in which they became known."""

    def __init__(self) -> None:
        self._agents: dict[AgentRef, SleepingAgent] = {}
        self._mapped_by: dict[PageId, tuple[AgentRef, ...]] | None = None

    def __getitem__(self, ref: AgentRef) -> SleepingAgent:
        return self._agents[ref]

    def __iter__(self) -> Iterator[AgentRef]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)

    def __setitem__(self, ref: AgentRef, agent: SleepingAgent) -> None:
        before = self._agents.get(ref)
        if before is not None:
            self._forget(ref, before)
        self._agents[ref] = agent
        if self._mapped_by is not None:
            self._index(ref, agent)

    def __delitem__(self, ref: AgentRef) -> None:
        self._forget(ref, self._agents.pop(ref))

    def who_maps(self, page: PageId) -> tuple[AgentRef, ...]:
        """The sleepers that map a page."""
        if self._mapped_by is None:
            self._mapped_by = {}
            for ref, agent in self._agents.items():
                self._index(ref, agent)
        return self._mapped_by.get(page, ())

    def _index(self, ref: AgentRef, agent: SleepingAgent) -> None:
        assert self._mapped_by is not None
        for page in agent.page_ids:
            self._mapped_by[page] = (*self._mapped_by.get(page, ()), ref)

    def _forget(self, ref: AgentRef, agent: SleepingAgent) -> None:
        if self._mapped_by is None:
            return
        for page in agent.page_ids:
            left = tuple(each for each in self._mapped_by[page] if each != ref)
            if left:
                self._mapped_by[page] = left
            else:
                del self._mapped_by[page]


__all__ = ["Sleepers"]
