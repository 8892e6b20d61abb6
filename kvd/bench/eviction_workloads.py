"""Seeded traces of agents at work: what an eviction policy has to cope with, without anybody's data.

Each workload is a function from a random generator to a script of turns; the same seed gives the same trace. Lengths
and habits are those of coding agents: a context of some thousand tokens that grows by a tool's output or an answer a
turn. Pages are those of SmolLM2-135M in `k8v4`, as far as that matters (all pages of a trace are equal).

May import kvd.vm.trace and kvd.quant.spec; no mlx.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final

from kvd.quant.spec import PAGE_TOKENS
from kvd.vm.trace import TraceHeader, TraceLine

PAGE_BYTES: Final = PAGE_TOKENS * 9_360
"""Bytes of one page: 9,360 a token over all layers."""

Trace = tuple[TraceHeader, list[TraceLine]]


class Script:
    """Writes a trace, one operation after the other. Owner: the workload that fills it.

    Args:
        rng: draws lengths.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[TraceLine] = []
        self._tokens: dict[int, int] = {}

    def agent(self, tokens: int) -> int:
        """A new agent with a first turn of so many tokens; returns its space."""
        space = len(self._tokens)
        self._tokens[space] = 0
        self._write("create", space, agent=f"agent-{space}", page_bytes=(PAGE_BYTES,))
        self.turn(space, tokens)
        return space

    def fork(self, parent: int) -> int:
        """A sub-agent that shares all that its parent has computed."""
        space = len(self._tokens)
        self._tokens[space] = self._tokens[parent]
        self._write("fork", space, agent=f"agent-{space}", parent=parent, tokens=self._tokens[parent])
        return space

    def turn(self, space: int, tokens: int) -> None:
        """A turn that adds `tokens` tokens."""
        before = self._tokens[space]
        self._write("start", space, tokens=before, pages=-(-before // PAGE_TOKENS))
        after = self._tokens[space] = before + tokens
        self._write("end", space, tokens=after, pages=after // PAGE_TOKENS - before // PAGE_TOKENS)

    def step(self, space: int) -> None:
        """A turn of usual length: a question or a tool's output, and an answer."""
        self.turn(space, self.rng.randint(80, 700))

    def close(self, space: int) -> None:
        """The agent is deleted."""
        self._write("close", space)

    def _write(self, word: str, space: int, **facts: object) -> None:
        self.lines.append(TraceLine(float(len(self.lines)), word, space, **facts))  # type: ignore[arg-type]


def round_robin(script: Script) -> None:
    """Eight coding agents that take turns, always in the same order."""
    agents = [script.agent(script.rng.randint(4_000, 9_000)) for _ in range(8)]
    for _ in range(15):
        for agent in agents:
            script.step(agent)


def long_session(script: Script) -> None:
    """One long session; between its turns helpers with short contexts of their own, most deleted when they are done."""
    session = script.agent(4_000)
    for _ in range(40):
        script.step(session)
        helpers = [script.agent(script.rng.randint(700, 3_000)) for _ in range(script.rng.randint(3, 8))]
        for helper in helpers:
            for _ in range(script.rng.choice((0, 0, 1, 2))):
                script.step(helper)
        for helper in helpers:
            if script.rng.random() < 0.85:
                script.close(helper)


def sub_agents(script: Script) -> None:
    """Three agents that now and then fork a burst of sub-agents, which share the prefix and never come back."""
    mains = [script.agent(script.rng.randint(6_000, 10_000)) for _ in range(3)]
    for _ in range(10):
        main = script.rng.choice(mains)
        for _ in range(script.rng.randint(1, 4)):
            script.step(main)
        burst = [script.fork(main) for _ in range(script.rng.randint(3, 6))]
        for _ in range(script.rng.randint(1, 3)):
            for each in burst:
                script.step(each)
        script.step(main)


def pairs(script: Script) -> None:
    """Writer and reviewer in turns; after a while another pair works, and the first comes back later."""
    all_pairs = [[script.agent(script.rng.randint(4_000, 8_000)) for _ in range(2)] for _ in range(5)]
    for _ in range(15):
        pair = script.rng.choice(all_pairs)
        for _ in range(script.rng.randint(3, 9)):
            for agent in pair:
                script.step(agent)


def zipf(script: Script) -> None:
    """Twenty agents whose popularity falls with their rank; nobody has an order."""
    agents = [script.agent(script.rng.randint(2_000, 8_000)) for _ in range(20)]
    weights = [1 / rank for rank in range(1, len(agents) + 1)]
    for _ in range(200):
        script.step(script.rng.choices(agents, weights)[0])


def batch_scan(script: Script) -> None:
    """Four agents at work, and a batch that goes over thirty others from time to time and would flush the pool."""
    workers = [script.agent(script.rng.randint(4_000, 8_000)) for _ in range(4)]
    others = [script.agent(script.rng.randint(1_500, 4_000)) for _ in range(30)]
    for _ in range(3):
        for _ in range(script.rng.randint(20, 40)):
            script.step(script.rng.choices(workers, (4, 3, 2, 1))[0])
        for number, other in enumerate(others):
            script.step(other)
            if number % 3 == 2:
                script.step(script.rng.choices(workers, (4, 3, 2, 1))[0])


WORKLOADS: Final[Mapping[str, Callable[[Script], None]]] = {
    "batch-scan": batch_scan,
    "long-session": long_session,
    "pairs": pairs,
    "round-robin": round_robin,
    "sub-agents": sub_agents,
    "zipf": zipf,
}


def generate(name: str, seed: int) -> Trace:
    """The trace of a workload.

    Args:
        name: one of `WORKLOADS`.
        seed: the same gives the same trace.
    """
    script = Script(random.Random(f"{name} {seed}"))  # noqa: S311  nothing here is secret
    WORKLOADS[name](script)
    return TraceHeader(PAGE_TOKENS, (None,), name=name), script.lines
