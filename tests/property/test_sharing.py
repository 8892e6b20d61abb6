"""Agents that share pages against the same agents that do not: nobody can tell by what is said.

Two worlds do the same in the same order, one with `--sharing namespace`, one with `--sharing agent`. Words are one
token each, so both have the same ids, and the fake model gives each token the same bytes: every text is equal to the
last byte (P10, P18, P19).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvd.errors import AgentBusy
from tests.property.test_turns import codec
from tests.scheduler.harness import Outcome, World
from tests.support.prose import prose

NAMES = ("ann", "bob", "eve", "kim")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
BEGINNINGS = tuple(prose(tokens, tokens) for tokens in (256, 600, 790))
"""System prompts; two agents that begin with one often go on differently from some word of it on."""

MAX_WORDS = 1600
"""Longer agents are left as they are: the model's context ends at 2,048 tokens."""

names = st.sampled_from(NAMES)


class SharingMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(budget=st.sampled_from([16, 24, 80]), seed=st.integers(0, 99), window=st.sampled_from([None, 200]))
    def begin(self, budget: int, seed: int, window: int | None) -> None:
        """Tight and wide budgets, with a window and without."""
        self.folder = tempfile.TemporaryDirectory(prefix="kvd-sharing-", dir=MEMORY)
        self.worlds = [
            World(Path(self.folder.name, mode), codec(), budget_pages=budget, seed=seed, window=window, sharing=mode)
            for mode in ("namespace", "agent")
        ]
        self.count = 0

    @property
    def shared(self) -> World:
        """The world whose agents share."""
        return self.worlds[0]

    def turn(self, name: str, text: str) -> None:
        """The same turn in both: equal answers, and at least as much found computed where pages are shared."""
        if len(text.split()) > MAX_WORDS:
            return
        turns = [world.generate(name, text, max_tokens=2).turn for world in self.worlds]
        assert turns[0].text == turns[1].text
        assert (turns[0].match, turns[0].durable) == (turns[1].match, turns[1].durable)
        assert turns[0].prompt_tokens == turns[1].prompt_tokens
        if "page lost" not in turns[0].match_reason:
            assert turns[0].cached_tokens >= turns[1].cached_tokens or turns[0].match == "diverge"

    def both(self, operation: str, name: str, **more: object) -> list[Outcome]:
        """The same operation in both worlds, which end alike."""
        outcomes = [world.job(operation, name, **more) for world in self.worlds]
        assert type(outcomes[0].error) is type(outcomes[1].error)
        return outcomes

    @rule(name=names, which=st.integers(0, 2), cut=st.sampled_from([0, 0, 1, 300]), more=st.integers(1, 300))
    def begins(self, name: str, which: int, cut: int, more: int) -> None:
        """A new text: a system prompt, all of it or to some word, and something nobody else says."""
        self.count += 1
        words = BEGINNINGS[which].split(" ")[1:]
        text = "".join(f" {word}" for word in words[: max(1, len(words) - cut)])
        self.turn(name, text + prose(more, f"own {self.count}"))

    @rule(name=names, other=names, more=st.integers(1, 40))
    def repeats(self, name: str, other: str, more: int) -> None:
        """All that another agent holds, its answers included, as this agent's own text."""
        if self.shared.has(other):
            self.count += 1
            self.turn(name, self.shared.text(other) + prose(more, f"more {self.count}"))

    @rule(name=names, more=st.integers(0, 300))
    def goes_on(self, name: str, more: int) -> None:
        """The next turn of an agent."""
        if self.shared.has(name):
            self.count += 1
            self.turn(name, self.shared.text(name) + prose(more, f"next {self.count}"))

    @rule(name=names, part=st.integers(0, 100))
    def rolls_back(self, name: str, part: int) -> None:
        """An agent is cut, through pages that others map."""
        if self.shared.has(name):
            tokens = len(self.shared.agent(name).branch.tokens) * part // 100
            self.both("rollback", name, tokens=tokens)

    @rule(name=names, other=names, part=st.integers(1, 100))
    def forks(self, name: str, other: str, part: int) -> None:
        """A new agent begins as a part of another."""
        if self.shared.has(name) and not self.shared.has(other):
            tokens = len(self.shared.agent(name).branch.tokens) * part // 100
            self.both("fork", name, new_agent=other, tokens=tokens)

    @rule(name=names)
    def deletes(self, name: str) -> None:
        """An agent goes; the others keep what they map."""
        if self.shared.has(name):
            self.both("delete", name)

    @rule(name=names)
    def evicts(self, name: str) -> None:
        """Its pages go to disk, those of others with them unless they are in use."""
        if self.shared.has(name):
            assert not any(isinstance(outcome.error, AgentBusy) for outcome in self.both("evict", name))

    @rule(name=names, number=st.integers(0, 6))
    def spoils(self, name: str, number: int) -> None:
        """A page file goes bad where agents share: whoever maps it computes its tokens again."""
        pages = self.shared.page_ids(name) if self.shared.has(name) else []
        if number < len(pages) and self.shared.page_path(pages[number]) in self.shared.fs.live_files():
            self.shared.spoil_page(pages[number])

    @rule(lossy=st.booleans())
    def crashes(self, lossy: bool) -> None:
        """Process or machine die."""
        for world in self.worlds:
            world.crash(lossy=lossy)

    @rule()
    def settles(self) -> None:
        """All that is queued is done."""
        for world in self.worlds:
            world.settle()

    @invariant()
    def nobody_can_tell(self) -> None:
        """Equal texts and ids in both worlds; every page in RAM has exactly its agent's bytes."""
        if not hasattr(self, "worlds"):
            return
        for world in self.worlds:
            world.check()
        for name in NAMES:
            assert self.worlds[0].has(name) == self.worlds[1].has(name)
            if self.shared.has(name):
                branches = [world.agent(name).branch for world in self.worlds]
                assert branches[0].tokens == branches[1].tokens
                assert branches[0].text == branches[1].text

    def teardown(self) -> None:
        """At last everybody is deleted, and no page is left."""
        if hasattr(self, "worlds"):
            for name in NAMES:
                self.deletes(name)
            self.settles()
            assert self.shared.core.pager.statistics().spaces == 0
            # what a lossy crash brought back without a catalog that knew it was put aside
            left = [path for path in self.shared.fs.live_files() if path.suffix == ".safetensors"]
            assert {path.parent.name for path in left} <= {"quarantine"}
            for world in self.worlds:
                world.close()
            self.folder.cleanup()


TestSharing = SharingMachine.TestCase
TestSharing.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
