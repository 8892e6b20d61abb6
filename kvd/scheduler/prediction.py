"""Which agents run next, learned from the order in which turns started. Pure: no clock, no thread.

Theory of operation. For each agent an *order* counts which agent had the next turn (itself included); counts decay
each time, so a habit that changed is forgotten after a few turns. There are two orders. In one a client that keeps its
connection is a *stream* of its own, since what two clients ask side by side is mixed at random; the first turn of a
connection follows the last turn of anybody, since many callers make one connection a call. In the other all turns are
one stream, since agents that are processes of their own may well take turns. Which of them is believed is seen: the one
whose predictions had the agents that came next nearer to their head, lately.

From the agent that runs, likely successors are followed as far as the product of their probabilities stays at
`LEAST_PROBABILITY`. A probability is count / (all counts + `DOUBT`): one observation is worth 2/3, so alternation and
round robin are predicted in the second round, and an agent that is followed by another each time predicts nothing. An
agent that had one turn only is never predicted: that it comes again has not been seen.

Each stream's prediction stands until one of its agents starts, the stream goes on, or `STALE_STARTS` turns of others
have started. All counts are bounded; what was used longest ago goes first.

May import nothing from kvd.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

DECAY = 0.75
"""What a count is worth after the next observation."""

DOUBT = 0.5
"""How many observations speak for an agent not seen yet."""

LEAST_PROBABILITY = 0.4

STALE_STARTS = 16
"""A prediction that so many turns of other streams have passed by is given up: its client may have gone."""

MAX_AGENTS = 512
MAX_SUCCESSORS = 8
MAX_STREAMS = 256


@dataclass(slots=True)
class _Habit:
    """What is known of one agent: turns it had, and decayed counts of who came next."""

    starts: int = 0
    next: dict[Hashable, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Stream:
    """One client's turns: the last agent, when that was, and who is expected."""

    last: Hashable
    started: int
    expected: list[Hashable] = field(default_factory=list)


class Predictor:
    """Owner: the engine thread; `started` alone changes what it predicts.

    Args:
        ahead: agents to predict for each stream, at most.

    Attributes:
        hits: turns of the agent that was expected first, in the order that was believed.
        misses: turns of another one; a turn nobody predicted anything for is neither.
    """

    def __init__(self, *, ahead: int = 2) -> None:
        self._by_client, self._overall = _Order(ahead), _Order(ahead)
        self.hits = 0
        self.misses = 0

    def started(self, agent: Hashable, stream: Hashable) -> None:
        """A turn of the agent starts, asked for on that stream."""
        believed = self._believed
        for order, its_stream in ((self._by_client, stream), (self._overall, None)):
            hit = order.started(agent, its_stream)
            if order is believed and hit is not None:
                self.hits += hit
                self.misses += not hit

    def expected(self) -> tuple[Hashable, ...]:
        """Agents expected to run, the soonest first: what each stream expects first, then what it expects second."""
        return self._believed.expected()

    def forget(self, agent: Hashable) -> None:
        """The agent is gone."""
        self._by_client.forget(agent)
        self._overall.forget(agent)

    @property
    def _believed(self) -> _Order:
        return self._overall if self._overall.score > self._by_client.score else self._by_client


class _Order:
    """Who follows whom on each of some streams.

    Attributes:
        score: how near to the head of what was expected those were who came, lately; decays like the counts.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._habits: dict[Hashable, _Habit] = {}  # the one used last is last, likewise of the streams
        self._streams: dict[Hashable, _Stream] = {}
        self._starts = 0
        self.score = 0.0

    def started(self, agent: Hashable, stream: Hashable) -> bool | None:
        """A turn starts; whether it is the agent that the stream expected first, None if it expected nobody."""
        expected = self.expected()
        self.score = DECAY * self.score + (1.0 / (1 + expected.index(agent)) if agent in expected else 0.0)
        self._starts += 1
        before = self._streams.pop(stream, None)
        if before is None and self._streams:
            before = self._streams[next(reversed(self._streams))]
        habit = self._habits.pop(agent, None) or _Habit()
        habit.starts += 1
        self._habits[agent] = habit
        hit = None
        if before is not None:
            if before.expected:
                hit = before.expected[0] == agent
            self._observe(before.last, agent)
        for each in self._streams.values():
            if agent in each.expected:
                each.expected = []
        self._streams[stream] = _Stream(agent, self._starts, self._follow(agent))
        if len(self._habits) > MAX_AGENTS:
            del self._habits[next(iter(self._habits))]
        if len(self._streams) > MAX_STREAMS:
            del self._streams[next(iter(self._streams))]
        return hit

    def expected(self) -> tuple[Hashable, ...]:
        """See `Predictor.expected`."""
        fresh = [each for each in reversed(self._streams.values()) if self._starts - each.started < STALE_STARTS]
        ranked = (each.expected[rank] for rank in range(self._ahead) for each in fresh if rank < len(each.expected))
        return tuple(dict.fromkeys(ranked))

    def forget(self, agent: Hashable) -> None:
        """See `Predictor.forget`."""
        self._habits.pop(agent, None)
        for habit in self._habits.values():
            habit.next.pop(agent, None)
        for stream in self._streams.values():
            stream.expected = [each for each in stream.expected if each != agent]

    def _observe(self, before: Hashable, agent: Hashable) -> None:
        habit = self._habits.get(before)
        if habit is None:
            return
        count = habit.next.pop(agent, 0.0)
        habit.next = {each: DECAY * value for each, value in habit.next.items()}
        habit.next[agent] = DECAY * count + 1.0
        if len(habit.next) > MAX_SUCCESSORS:
            del habit.next[min(habit.next, key=habit.next.__getitem__)]

    def _follow(self, agent: Hashable) -> list[Hashable]:
        """The agents that are likely to come after one, the soonest first."""
        found: list[Hashable] = []
        probability = 1.0
        while len(found) < self._ahead:
            likely = [(probability * p, each) for p, each in self._likely(agent) if each not in found]
            likely = [(p, each) for p, each in likely if p >= LEAST_PROBABILITY]
            if not likely:
                break
            found += [each for _, each in likely]
            probability, agent = likely[0]
        return found[: self._ahead]

    def _likely(self, agent: Hashable) -> Iterator[tuple[float, Hashable]]:
        """Successors that came back at least once, the likeliest first, of equals the latest."""
        counts = self._habits[agent].next if agent in self._habits else {}
        total = sum(counts.values()) + DOUBT
        latest = {each: order for order, each in enumerate(counts)}
        for each in sorted(counts, key=lambda each: (counts[each], latest[each]), reverse=True):
            if each in self._habits and self._habits[each].starts > 1:
                yield counts[each] / total, each
