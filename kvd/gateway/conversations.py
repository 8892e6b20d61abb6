"""Anonymous conversations: which agent holds which beginning, so that the next turn can fork it; and their end.

Theory of operation. A request that names nobody gets an agent of its own, always. Two clients may send the same text,
so no likeness of content proves that a request is the same client's; what it does prove is that the client knows the
text. Therefore the new agent is *forked* from the anonymous agent of the same namespace whose text the request repeats
furthest, **at a point up to which it repeats all of it**: after a turn, or after a turn's prompt, where the number of
tokens is known. So nothing that the client did not send gets into its address space, or into a reply about where texts
part. The fork shares pages, copies at most one partial page, and resumes at the exact token, while the other agent
stays as it was. When the turn is over and the new agent holds all that the other one did, the other one is superseded
and goes: an anonymous conversation has one agent, not one a turn. Where nothing is known (after a restart of the
gateway) the daemon's sharing of pages by text still makes whole pages hits.

A conversation is a chain of digests, one for each message and all before it. The table maps digests to points of
agents, the latest wins. Anonymous agents expire after a time without use, the oldest first when there are too many;
those that an earlier run of the gateway left are adopted with the age that the daemon knows. The daemon is told the
same time with every turn, and ends agents by itself where no gateway is left to do so. An agent is noted before
it is made and forgotten when the daemon has none of that name any more, not before: a delete that is refused comes
again. Agents of groups are found by their names and only have an end (`Uses`). Pure: time is given. May import the
standard library.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Owner = tuple[str, str]
"""(namespace, agent)."""

MAX_GROUP_AGENTS = 100_000


def chain_of(messages: Sequence[Mapping[str, Any]], tools: object = None) -> list[bytes]:
    """One digest for each message: of it, of all before it, and of the tools, which templates print at the front."""
    digest = hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16).digest()
    chain = []
    for message in messages:
        data = json.dumps(_meaning(message), ensure_ascii=True, sort_keys=True).encode()
        digest = hashlib.blake2b(digest + data, digest_size=16).digest()
        chain.append(digest)
    return chain


def _meaning(message: Mapping[str, Any]) -> list[object]:
    """What of a message tells conversations apart; not its reasoning, which many clients drop."""
    calls = message.get("tool_calls")
    functions = [_call_meaning(call) for call in calls] if isinstance(calls, list) else []
    named = [message.get(name) for name in ("tool_call_id", "name")]
    return [message.get("role"), message.get("content") or "", functions, *named]


def _call_meaning(call: object) -> object:
    """A tool call without its spelling: arguments as the value that their JSON has."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    try:
        meant = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        meant = arguments
    return [function.get("name"), meant]


@dataclass(frozen=True, slots=True)
class Point:
    """A place in an agent's text that a conversation reaches.

    Attributes:
        digest: of the conversation up to there.
        tokens: of the agent up to there.
    """

    digest: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Found:
    """Where an anonymous request can start from: so many tokens of an agent; `points` are those that lie before."""

    agent: str
    tokens: int
    points: tuple[Point, ...]


@dataclass(slots=True)
class _Held:
    """An anonymous agent: when it was used, and the points of its text, in their order."""

    used_s: float
    points: tuple[Point, ...] = ()


class Conversations:
    """Owner: the gateway's event loop; `note`, `adopt`, `retire` and `forget` are the only ones that change it.

    Args:
        ttl_s: an agent expires so long after its last use.
        most: agents kept.
    """

    def __init__(self, *, ttl_s: float, most: int) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._held: dict[Owner, _Held] = {}
        self._holders: dict[tuple[str, bytes], str] = {}

    def __len__(self) -> int:
        return len(self._held)

    def best(self, namespace: str, chain: Sequence[bytes], now_s: float) -> Found | None:
        """The agent that holds the longest beginning of a conversation; it counts as used."""
        for digest in reversed(chain):
            agent = self._holders.get((namespace, digest))
            if agent is not None:
                held = self._held[namespace, agent]
                held.used_s = now_s
                place = next(number for number, point in enumerate(held.points) if point.digest == digest)
                return Found(agent, held.points[place].tokens, held.points[: place + 1])
        return None

    def note(self, namespace: str, agent: str, points: Sequence[Point], now_s: float) -> None:
        """An agent holds a conversation up to some points; none where it is not known what it holds."""
        self.forget(namespace, agent)
        self._held[namespace, agent] = _Held(now_s, tuple(points))
        for point in points:
            self._holders[namespace, point.digest] = agent

    def is_superseded(self, namespace: str, agent: str, points: Sequence[Point]) -> bool:
        """Whether these points of another agent reach all that an agent holds."""
        held = self._held.get((namespace, agent))
        return held is not None and bool(held.points) and held.points[-1] in points

    def adopt(self, namespace: str, agent: str, used_s: float) -> None:
        """An agent of an earlier run, whose conversation is not known; it only has an end."""
        if (namespace, agent) not in self._held:
            self._held[namespace, agent] = _Held(used_s)

    def retire(self, namespace: str, agent: str) -> None:
        """Nobody needs an agent any more: it is due, and nobody forks it."""
        if (namespace, agent) in self._held:
            self.forget(namespace, agent)
            self._held[namespace, agent] = _Held(-math.inf)

    def forget(self, namespace: str, agent: str) -> None:
        """An agent is gone."""
        held = self._held.pop((namespace, agent), None)
        for point in held.points if held is not None else ():
            if self._holders.get((namespace, point.digest)) == agent:
                del self._holders[namespace, point.digest]

    def due(self, now_s: float) -> list[Owner]:
        """Agents whose time is over, and the oldest that are too many; they stay known until they are gone."""
        by_age = sorted(self._held, key=lambda owner: self._held[owner].used_s)
        surplus = len(by_age) - self._most
        return [
            owner
            for number, owner in enumerate(by_age)
            if number < surplus or now_s - self._held[owner].used_s >= self._ttl_s
        ]


class Uses:
    """When agents of groups were used last. Owner: the gateway's event loop.

    Args:
        ttl_s: an agent expires so long after its last use.
        most: agents kept; the table is no longer, whatever names clients make up.
    """

    def __init__(self, *, ttl_s: float, most: int = MAX_GROUP_AGENTS) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._used_s: dict[Owner, float] = {}

    def use(self, namespace: str, agent: str, now_s: float) -> None:
        """It is used now."""
        self._used_s.pop((namespace, agent), None)  # the dictionary's order is that of the uses
        self._used_s[namespace, agent] = now_s

    def adopt(self, namespace: str, agent: str, used_s: float) -> None:
        """An agent of an earlier run, and when it was used last; what is known already is not made older."""
        self._used_s.setdefault((namespace, agent), used_s)

    def forget(self, namespace: str, agent: str) -> None:
        """An agent is gone."""
        self._used_s.pop((namespace, agent), None)

    def due(self, now_s: float) -> list[Owner]:
        """Agents whose time is over, and those used longest ago that are too many; known until they are gone."""
        surplus = len(self._used_s) - self._most
        return [
            owner
            for number, (owner, used_s) in enumerate(self._used_s.items())
            if number < surplus or now_s - used_s >= self._ttl_s
        ]


__all__ = ["Conversations", "Found", "Owner", "Point", "Uses", "chain_of"]
