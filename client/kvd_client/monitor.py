"""The daemon as a monitor sees it, put together from answers that tell what changed. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SHARED, BEHIND_WINDOW, PINNED, STATE_BITS = 16, 32, 64, 15
"""Flags of a page's code, and the bits that number its state."""

AgentKey = tuple[str, str]
"""Namespace and name."""


class MonitorPicture:
    """All agents and figures as of the last answer. `take` is the only method that changes it.

    Attributes:
        version: to be asked for as `since`; None before the first answer, and after `forget`.
        agents: entries of `monitor`, by namespace and name.
        figures: of the whole daemon.
        states: names of the page states, by number.
        page_tokens: tokens of a page.
        changed: keys of the agents that the last answer told of.
        gone: keys of those that it took away.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.agents: dict[AgentKey, Mapping[str, Any]] = {}
        self.figures: Mapping[str, Any] = {}
        self.states: tuple[str, ...] = ()
        self.page_tokens = 0
        self.changed: frozenset[AgentKey] = frozenset()
        self.gone: frozenset[AgentKey] = frozenset()

    def take(self, answer: Mapping[str, Any]) -> None:
        """An answer of `monitor` to `since=version` came."""
        told = {(str(each["namespace"]), str(each["agent"])): each for each in answer.get("agents", ())}
        if answer.get("full", True):
            gone = self.agents.keys() - told.keys()
            self.agents = told
        else:
            gone = {(str(namespace), str(agent)) for namespace, agent in answer.get("gone", ())} - told.keys()
            for key in gone:
                self.agents.pop(key, None)
            self.agents |= told
        self.changed, self.gone = frozenset(told), frozenset(gone)
        self.version = answer.get("version")
        self.figures = answer.get("figures", {})
        self.states = tuple(answer.get("states", ()))
        self.page_tokens = int(answer.get("page_tokens", 0))

    def forget(self) -> None:
        """Ask for everything the next time; what is known stays until then."""
        self.version = None

    def pages(self, runs: list[int]) -> Iterator[tuple[str, int, int]]:
        """Runs of a segment as (state, flags, pages), in order."""
        for code, pages in zip(runs[::2], runs[1::2], strict=True):
            number = code & STATE_BITS
            state = self.states[number] if number < len(self.states) else "unknown"
            yield state, code & ~STATE_BITS, pages


__all__ = ["BEHIND_WINDOW", "PINNED", "SHARED", "STATE_BITS", "AgentKey", "MonitorPicture"]
