"""All agents by name. Owner: the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvd.errors import AgentNotFound, InternalError
from kvd.ids import AgentId, Namespace
from kvd.scheduler.agents import Agent, Branch
from kvd.scheduler.requests import AgentRef
from kvd.scheduler.sleepers import Sleepers
from kvd.store.errors import LogUnreadable
from kvd.store.layout import log_name


class AgentRegistry:
    """Agents by reference, and the logical clock of their use.

    An agent whose log could not be read at start is not "new": it has text and pages that a restart may bring back. Its
    name is refused everywhere instead of being given to somebody else.

    Most agents of a large data folder sleep after a start: their logs are read when somebody uses them
    (`kvd.scheduler.waking`). Whoever works on agents has woken those it names; iterating gives those that are awake.

    Args:
        new_branch: makes an empty branch for a new agent.

    Attributes:
        unreadable: names of logs that could not be read, as `kvd.store.layout.log_name` makes them.
        asleep: agents of which only the catalog's word is known; mutated by `kvd.scheduler.waking` and `restore`.
        waking: those whose logs are being read.
        in_use: namespaces in which a turn ran since the start.
    """

    def __init__(self, new_branch: Callable[[Agent], Branch]) -> None:
        self._new_branch = new_branch
        self._agents: dict[AgentRef, Agent] = {}
        self._tick = 0
        self.unreadable: frozenset[str] = frozenset()
        self.asleep = Sleepers()
        self.waking: set[AgentRef] = set()
        self.in_use: set[Namespace] = set()

    def tick(self) -> int:
        """A number greater than all before it."""
        self._tick += 1
        return self._tick

    def __iter__(self) -> Iterator[Agent]:
        return iter(tuple(self._agents.values()))

    def __len__(self) -> int:
        return len(self._agents) + len(self.asleep)

    def names(self, namespace: Namespace) -> list[AgentId]:
        """Names of all agents of a namespace, those that sleep included."""
        return [ref.agent for ref in (*self._agents, *self.asleep) if ref.namespace == namespace]

    def known(self, ref: AgentRef) -> Agent | None:
        """The agent, or None; never raises."""
        return self._agents.get(ref)

    def find(self, ref: AgentRef) -> Agent | None:
        """The agent, or None.

        Raises:
            LogUnreadable: it has a log that could not be read at start.
            InternalError: it sleeps, and nobody woke it: taking it for new would cost it its log.
        """
        agent = self._agents.get(ref)
        if agent is None and ref in self.asleep:
            raise InternalError(f"agent {ref} is used and was not woken")
        if agent is None and (name := log_name(ref.namespace, ref.agent)) in self.unreadable:
            raise LogUnreadable(agent=ref.agent, path=name)
        return agent

    def get(self, ref: AgentRef) -> Agent:
        """The agent.

        Raises:
            AgentNotFound: naming it and the agents of its namespace.
            LogUnreadable: as `find`.
        """
        agent = self.find(ref)
        if agent is None:
            raise AgentNotFound(
                f"no agent {ref.agent!r} in namespace {ref.namespace!r}; `kvd-client agents` lists them",
                agent=ref.agent,
                namespace=ref.namespace,
            )
        return agent

    def get_or_create(self, ref: AgentRef) -> tuple[Agent, bool]:
        """The agent, and whether it is new.

        Raises:
            LogUnreadable: as `find`.
        """
        self.in_use.add(ref.namespace)
        agent = self.find(ref)
        if agent is not None:
            return agent, False
        agent = Agent(ref, created_s=time.time())
        branch = self._new_branch(agent)
        agent.branches[branch.branch_id] = branch
        agent.current = branch.branch_id
        self._agents[ref] = agent
        return agent, True

    def add(self, agent: Agent) -> None:
        """Register a forked or recovered agent."""
        self._agents[agent.ref] = agent

    def remove(self, agent: Agent) -> None:
        """Forget an agent (its spaces are the caller's business)."""
        del self._agents[agent.ref]

    def in_namespace(self, namespace: Namespace | None) -> list[Agent]:
        """Agents of a namespace (None: all), by name."""
        chosen = [a for a in self._agents.values() if namespace is None or a.ref.namespace == namespace]
        return sorted(chosen, key=lambda agent: (agent.ref.namespace, agent.ref.agent))
