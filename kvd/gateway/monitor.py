"""What viewers of the page are shown: the daemon's agents, figures and events, in versions.

Theory of operation. Every change gets the next version, and whatever it changed remembers that number. A viewer holds
the version it has seen; `since` collects what is newer. So nothing is kept for a viewer: a slow one asks again when
its connection takes more, and then gets the newest state of everything, however often it changed in between. Only
events are a list; it is bounded, and who missed some of it is told so.

An agent's entry is encoded once, when it changes, however many look on.

Viewers of one namespace are to learn nothing of others, and without keys everybody is a viewer. So what is told of the
daemon as a whole is what stands on a list: figures that are sums (`FIGURES`), and of events that are nobody's the
fields that name nobody (`DAEMON_EVENT_FIELDS`). A text of the daemon for whoever runs it, such as why a file of
settings was refused, is on neither, and a figure or a field that comes to be is not until somebody has put it there.

An agent's history is made of its events, and begins with the turn that its first entry names as its last, if that was
before the events that the daemon remembers. Which of entry and events comes first is chance, so that turn is compared
by its time with what is there and with what comes: where an event is not younger, the turn is among the events, too.

Text of prompts is in two fields of a divergence, `expected` and `found`. They are taken out here where viewers may not
see them, so nothing behind this can leak them. May import siblings.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvd.gateway.sse import json_bytes

Key: TypeAlias = tuple[str, str]
"""Namespace and agent."""

MAX_EVENTS = 600
MAX_TURNS = 32
"""Turns of an agent whose matches are kept."""
BEFORE_EVENTS = (-1, 0)
"""Stands for run and request of a turn that was before the events; an agent's entry does not tell them."""
MAX_HISTORIES = 4000
MAX_GONE = 2000
_SHOWN_EVENTS = """
budget disk draining eviction fault gap memory miss page_files_lost page_lost prefetch reload swap_out turn_preempted
"""
SHOWN_EVENTS = frozenset(_SHOWN_EVENTS.split())
"""Events of the time line; those of turns are in the agents' histories."""
_OF_EVERY_EVENT = ("type", "seq", "time_s")
DAEMON_EVENT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "budget": ("budget_bytes",),
    "disk": ("disk", "disk_reason"),
    "draining": (),
    "gap": ("lost", "reason"),
    "memory": ("memory_pressure", "footprint_bytes", "limit_bytes"),
    "page_files_lost": ("pages",),
    "page_lost": ("pages", "fault"),
    "reload": ("outcome", "settings"),
}
"""What viewers of one namespace see of events of the daemon as a whole, beside `_OF_EVERY_EVENT`."""
_FIGURES = """
time_s uptime_s budget_bytes usable_bytes resident_bytes in_flight_bytes frames swap_bytes disk_used_bytes quota_bytes
bytes_read bytes_written evictions window_drops faults refaults prefetched_pages pages_written load_failures
page_files_lost running queued preempted max_batch requests preemptions tokens_computed tokens_reused decode_rows turns
prompt_tokens cached_tokens completion_tokens agents agents_asleep agents_untold subscribers thrashing refault_rate
memory_pressure swap disk disk_reason
"""
FIGURES = tuple(_FIGURES.split())
"""Figures of the daemon as a whole that every viewer sees."""
_AGENT_FIELDS = """
agent namespace state tokens computed_tokens pinned durable pages resident_pages swapped_pages lost_pages shared_pages
behind_window_pages resident_bytes turns prompt_tokens cached_tokens generated_tokens branches
"""
AGENT_FIELDS = tuple(_AGENT_FIELDS.split())


@dataclass(slots=True)
class _Entry:
    """Something encoded, and the version in which it became so."""

    version: int
    namespace: str | None
    data: bytes


@dataclass(slots=True)
class _History:
    """An agent's last turns, by the daemon's run and the number of their request, oldest first."""

    version: int = 0
    turns: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)


class Monitor:
    """Owner: the event loop.

    Args:
        show_text: viewers may see prompts' text where it parts from the stored one.
        every_namespace: viewers see the agents of all namespaces.
        clock: wall clock, seconds since the epoch.
    """

    def __init__(
        self, *, show_text: bool, every_namespace: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self.show_text = show_text
        self.every_namespace = every_namespace
        self.version = 0
        self._clock = clock
        self._facts: dict[str, object] = {"up": None, "since_s": clock(), "reason": "", "returns": 0}
        self._facts_version = 0
        self._figures: dict[str, Any] = {}
        self._figures_version = 0
        self._agents: dict[Key, _Entry] = {}
        self._agents_seen: dict[Key, Mapping[str, Any]] = {}
        self._histories: dict[Key, _History] = {}
        self._events: deque[_Entry] = deque(maxlen=MAX_EVENTS)
        self._events_lost = 0
        self._gone: deque[tuple[int, Key]] = deque(maxlen=MAX_GONE)
        self._gone_lost = 0
        self._run = 0
        self._moved = asyncio.Event()

    # ---- changes ----------------------------------------------------------------------------------------------------

    def tell(self, **facts: object) -> None:
        """Facts of the daemon: model, status. What did not change makes no version."""
        if any(self._facts.get(name) != value for name, value in facts.items()):
            self._facts |= facts
            self._facts_version = self._next()

    def away(self, reason: str) -> None:
        """Nobody answers."""
        if self._facts["up"] is not False:
            self.tell(up=False, since_s=self._clock(), reason=reason)

    def back(self) -> None:
        """The daemon answers."""
        if self._facts["up"] is not True:
            returns = int(str(self._facts["returns"])) + (self._facts["up"] is False)
            self.tell(up=True, since_s=self._clock(), reason="", returns=returns)

    def answered(self, answer: Mapping[str, Any]) -> None:
        """An answer of the daemon's `monitor`."""
        version = self._next()
        agents: Sequence[Mapping[str, Any]] = answer["agents"]
        gone: Iterable[Key] = [(namespace, agent) for namespace, agent in answer.get("gone") or ()]
        if answer["full"]:
            gone = self._agents.keys() - {_key(agent) for agent in agents}
        for key in list(gone):
            self._forget(key, version)
        for agent in agents:
            self._agent(agent, version)
        self.tell(states=answer["states"], windows=answer["windows"], page_tokens=answer["page_tokens"])
        told = answer["figures"]
        figures = {name: told[name] for name in FIGURES if name in told}
        if self._figures != figures:
            self._figures, self._figures_version = figures, version

    def _agent(self, agent: Mapping[str, Any], version: int) -> None:
        key = _key(agent)
        before = self._agents_seen.get(key)
        if before == agent:
            return
        self._agents_seen[key] = agent
        data = json_bytes({name: agent.get(name) for name in AGENT_FIELDS})
        self._agents[key] = _Entry(version, key[0], data)
        turn = agent.get("last_turn")
        if turn and before is None:  # later ones are events
            self._begin(key, turn, version)

    def _begin(self, key: Key, turn: Mapping[str, Any], version: int) -> None:
        """Put a turn before an agent's history, unless it is part of it."""
        history = self._histories.setdefault(key, _History())
        is_before = all(each["time_s"] > turn["time_s"] for each in history.turns.values())
        if is_before and len(history.turns) < MAX_TURNS:
            shown = self._shown({**turn, "miss": turn.get("match") == "diverge"})
            history.turns = {BEFORE_EVENTS: shown} | history.turns
            history.version = version

    def _forget(self, key: Key, version: int) -> None:
        if self._agents.pop(key, None) is not None:
            self._agents_seen.pop(key, None)
            self._histories.pop(key, None)
            if len(self._gone) == MAX_GONE:
                self._gone_lost = self._gone[0][0]
            self._gone.append((version, key))

    def happened(self, event: Mapping[str, Any]) -> None:
        """An event of the daemon."""
        kind = event.get("type")
        if kind == "gap" and event.get("reason") == "restart":
            self._run += 1  # requests are numbered anew
        if kind in ("hit", "miss", "turn_ended") and "agent" in event:
            self._turn(event)
        if kind not in SHOWN_EVENTS:
            return
        if len(self._events) == MAX_EVENTS:
            self._events_lost = self._events[0].version
        shown = dict(event)
        if "namespace" not in event and not self.every_namespace:
            seen = (*_OF_EVERY_EVENT, *DAEMON_EVENT_FIELDS.get(str(kind), ()))
            shown = {name: event[name] for name in seen if name in event}
        self._events.append(_Entry(self._next(), event.get("namespace"), json_bytes(self._shown(shown))))

    def _turn(self, event: Mapping[str, Any]) -> None:
        key = _key(event)
        history = self._histories.get(key)
        if history is None:
            if len(self._histories) >= MAX_HISTORIES:  # an agent that is gone before it was seen leaves one
                unseen = next((each for each in self._histories if each not in self._agents), None)
                self._histories.pop(unseen if unseen is not None else next(iter(self._histories)))
            history = self._histories[key] = _History()
        request = event.get("request")
        if not isinstance(request, int):
            return
        begun = history.turns.get(BEFORE_EVENTS)
        if begun is not None and event["time_s"] <= begun["time_s"]:
            del history.turns[BEFORE_EVENTS]
        turn = history.turns.setdefault((self._run, request), {"time_s": event["time_s"], "match": None, "miss": False})
        if event["type"] == "turn_ended":
            turn |= {name: event.get(name) for name in ("outcome", "completion_tokens", "ttft_s")}
        else:
            names = ("match", "match_reason", "prompt_tokens", "cached_tokens", "divergence")
            turn |= self._shown({name: event.get(name) for name in names}) | {"miss": event["type"] == "miss"}
        while len(history.turns) > MAX_TURNS:
            del history.turns[next(iter(history.turns))]
        history.version = self._next()

    def _shown(self, told: dict[str, Any]) -> dict[str, Any]:
        """A turn or an event as viewers may see it."""
        divergence = told.get("divergence")
        if divergence and not self.show_text:
            told["divergence"] = {
                name: value for name, value in divergence.items() if name not in ("expected", "found")
            }
            told.pop("match_reason", None)  # may quote
        return told

    def _next(self) -> int:
        self.version += 1
        self._moved.set()
        return self.version

    # ---- viewers ----------------------------------------------------------------------------------------------------

    def since(self, version: int | None, namespace: str) -> bytes:
        """What is newer than a version, as one JSON object; everything for None, or when it is too old to say.

        Args:
            version: the last one that the viewer has.
            namespace: whose agents it may see.
        """
        if version is None or version < self._gone_lost or version > self.version:
            version = -1
        full = version < 0
        parts = [
            b'"version":%d' % self.version,
            b'"full":%s' % json_bytes(full),
            b'"now_s":%s' % json_bytes(round(self._clock(), 3)),
        ]
        if self._facts_version > version or full:
            facts = self._facts | {"text": self.show_text, "namespace": None if self.every_namespace else namespace}
            parts.append(b'"daemon":%s' % json_bytes(facts))
        if self._figures_version > version:
            parts.append(b'"figures":%s' % json_bytes(self._figures))
        agents = [each.data for each in self._agents.values() if each.version > version and self._sees(namespace, each)]
        if agents or full:
            parts.append(b'"agents":[%s]' % b",".join(agents))
        gone = [key for at, key in self._gone if at > version and (self.every_namespace or key[0] == namespace)]
        if gone and not full:
            parts.append(b'"gone":%s' % json_bytes(gone))
        histories = [
            {"namespace": key[0], "agent": key[1], "turns": list(history.turns.values())}
            for key, history in self._histories.items()
            if history.version > version and (self.every_namespace or key[0] == namespace)
        ]
        if histories:
            parts.append(b'"histories":%s' % json_bytes(histories))
        events = [each.data for each in self._events if each.version > version and self._sees(namespace, each)]
        if events or full:
            parts.append(b'"events":[%s]' % b",".join(events))
            parts.append(b'"skipped":%s' % json_bytes(version < self._events_lost and not full))
        return b"{%s}" % b",".join(parts)

    def _sees(self, namespace: str, entry: _Entry) -> bool:
        return self.every_namespace or entry.namespace is None or entry.namespace == namespace

    async def moved(self, version: int) -> None:
        """Wait until there is something newer than a version."""
        while self.version <= version:
            self._moved.clear()
            await self._moved.wait()


def _key(told: Mapping[str, Any]) -> Key:
    return told["namespace"], told["agent"]


__all__ = ["DAEMON_EVENT_FIELDS", "FIGURES", "MAX_EVENTS", "MAX_TURNS", "SHOWN_EVENTS", "Key", "Monitor"]
