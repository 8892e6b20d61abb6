"""Turns, control operations, faults and crashes in any order: no agent ever loses or mixes up a token.

The machine runs the real engine core on a disk that forgets and holds it to simple truths: text and ids are what was
asked for and sampled, every readable byte of every page is the one the fake model makes for these ids, reuse is exact
to the token, what was reported durable survives a crash as it was, and what a disk refused becomes durable once it
heals (P1, P2, P3, P5, P10, P14, P16, P19, P22, P34).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvd.errors import AgentBusy, BudgetExceeded, Busy, Cancelled, ContextFull, InternalError, KvdError
from kvd.model.tokenizer import TextCodec
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import Branch
from kvd.scheduler.errors import NotDeleted
from kvd.store.layout import page_of_file
from kvd.vm.prefix import common_prefix_bytes
from kvd.vm.text import Span, TypedText
from tests.scheduler.fake_model import CONTEXT_TOKENS
from tests.scheduler.harness import World, content
from tests.support.examples import SAME_EXAMPLES
from tests.support.tiny_model import make_tiny_model

NAMES = ("ann", "bob", "eve")
WORDS = (
    "the", "of", "and", "to", "memory", "page", "agent", "naïve", "日本", "token", "🙂", "course\n", "little", "know",
    "word,", "last", "time.", "water", "42", "import", "self", "",
)  # fmt: skip
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the catalog's files go: only they are real, and their flushes would take half of the time."""

COUNTS = (0, 1, 3, 20, 60, 110, 180, 260)
"""Words of a text: on average a page is not quite filled, two and more are common after some turns."""

WEIGHTS = {
    "generate": 12,
    "inject": 2,
    "model_breaks": 1,
    "rollback": 2,
    "fork": 2,
    "hold": 3,
    "delete": 1,
    "crash": 2,
    "disk_refuses": 1,
    "disk_heals": 2,
    "spoil": 1,
    "settle": 1,
}
ACTIONS = [action for action, weight in WEIGHTS.items() for _ in range(weight)]

_codec: TextCodec | None = None


def codec() -> TextCodec:
    """The tiny model's codec, made once."""
    global _codec
    if _codec is None:
        with tempfile.TemporaryDirectory() as folder:
            _codec = TextCodec.from_folder(make_tiny_model(Path(folder), layers=1))
    return _codec


def words(count: int, seed: int) -> str:
    """Text of `count` words that depends on `seed`, beginning with a space."""
    return "".join(" " + WORDS[(seed * 7 + i * i + i // 5) % len(WORDS)] for i in range(count))


@dataclass(frozen=True)
class Snapshot:
    """What an agent's current branch was at one moment."""

    text: bytes
    tokens: tuple[int, ...]
    computed: int

    @classmethod
    def of(cls, branch: Branch) -> Snapshot:
        """Now."""
        return cls(bytes(branch.text), tuple(branch.tokens), branch.computed)


def kept_by(branch: Branch, prompt: bytes) -> int:
    """Tokens of a branch that a prompt of plain content keeps: whole tokens, on a character border."""
    common = common_prefix_bytes(bytes(branch.text), prompt)
    best = offset = 0
    for number, length in enumerate(branch.token_bytes, start=1):
        offset += length
        if offset > common:
            break
        if offset == len(branch.text) or branch.text[offset] & 0xC0 != 0x80:
            best = number
    return best


def reach_of(branch: Branch, prompt: bytes) -> int:
    """Tokens that the branch saves: those with KV, and a pending one at its end where the prompt goes past it."""
    kept = kept_by(branch, prompt)
    is_pending = kept == len(branch.tokens) == branch.computed + 1
    return kept if is_pending else min(kept, branch.computed)


class TurnMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(
        budget=st.sampled_from([10, 14, 40]),
        seed=st.integers(0, 2**16),
        chunk=st.sampled_from([64, 300]),
        window=st.sampled_from([None, 60, 200]),
        sharing=st.sampled_from(["namespace", "namespace", "agent"]),
    )
    def begin(self, budget: int, seed: int, chunk: int, window: int | None, sharing: str) -> None:
        """A small or a large budget, small or large chunks, all seen or a window, pages of others or none."""
        self.folder = Path(tempfile.mkdtemp(prefix="kvd-turns-", dir=MEMORY))
        self.world = World(
            self.folder, codec(), budget_pages=budget, chunk_tokens=chunk, seed=seed, window=window, sharing=sharing
        )
        self.durable: dict[str, Snapshot] = {}  # what the disk has promised to keep
        self.refusing = False
        self.spoiled = False

    @rule(action=st.sampled_from(ACTIONS), data=st.data())
    def act(self, action: str, data: st.DataObject) -> None:
        """One of the actions, by weight."""
        self.draw = data.draw
        getattr(self, action)()

    def name(self, *more: str) -> str:
        """An agent's name."""
        return self.draw(st.sampled_from((*NAMES, *more)), "name")

    def new_words(self) -> str:
        """Text to add."""
        return words(self.draw(st.sampled_from(COUNTS), "words"), self.draw(st.integers(0, 40), "seed"))

    def part(self, whole: int) -> int:
        """A number up to `whole`."""
        return self.draw(st.integers(0, whole), "part")

    # ---- turns ------------------------------------------------------------------------------------------------------

    def generate(self) -> None:
        """A turn whose prompt repeats, extends, cuts or changes what the agent holds."""
        name = self.name()
        stored = self.world.text(name) if self.world.has(name) else ""
        how = self.draw(st.sampled_from(["extend"] * 3 + ["like"] * 2 + ["exact", "diverge", "prefix", "new"]), "how")
        prompt = {
            "extend": lambda: stored + self.new_words(),
            "exact": lambda: stored,
            "diverge": lambda: stored[: self.part(len(stored))] + self.new_words(),
            "prefix": lambda: stored[: self.part(len(stored))],
            "new": self.new_words,
            "like": self.like_another,
        }[how]()
        max_tokens = self.draw(st.integers(0, 6), "max_tokens")
        stop = self.draw(st.sampled_from([(), (), (), ("e",), ("th", " pa")]), "stop")
        cancel_after = self.draw(st.sampled_from([None] * 6 + list(range(8))), "cancel_after")
        expected = self.expected_cached(name, prompt.encode())
        shared = self.expected_shared(name, prompt.encode())
        flawless = not self.spoiled and not self.crowded
        before = self.state(name)
        outcome = self.world.generate(name, prompt, max_tokens, stop=stop, cancel_after=cancel_after)
        if outcome.error is not None:
            self.check_failed(name, outcome.error, before, prompt)
            return
        turn, branch = outcome.turn, self.world.agent(name).branch
        text = bytes(branch.text)
        assert outcome.streamed == turn.text
        assert text.startswith(prompt.encode())
        told, made = (prompt + turn.text).encode(), turn.prompt_tokens + turn.completion_tokens
        if told != text:  # a stop string inside a token, before which is more than one token's text
            assert told.startswith(text)
            rest = TypedText(told[len(text) :], (Span("generated", len(told) - len(text)),))
            assert len(self.world.core.encode(rest, at_start=False)[0]) > 1
        assert not any(each in turn.text for each in stop)
        assert len(branch.tokens) - branch.computed <= 1
        assert bytes(branch.text[: branch.text_bytes_of(made)]) == told[: branch.text_bytes_of(made)]
        assert len(branch.tokens) == made or len(text) > branch.text_bytes_of(made)
        assert self.world.truth.is_greedy(branch.tokens[:made], turn.prompt_tokens)
        if "page lost" not in turn.match_reason:
            exact = {cached - 1 if max_tokens and cached == turn.prompt_tokens else cached for cached in expected}
            if "pages of the namespace" in turn.match_reason or (shared and flawless):
                whole = {tokens - 1 if max_tokens and tokens == turn.prompt_tokens else tokens for tokens in shared}
                assert turn.cached_tokens in whole
            else:
                assert turn.cached_tokens in exact
        self.after(name, durable=turn.durable)

    def inject(self) -> None:
        """Text is appended without generating."""
        name, added = self.name(), self.new_words() or "x"
        before = self.state(name)
        outcome = self.world.inject(name, added)
        if outcome.error is not None:
            self.check_failed(name, outcome.error, before, (before.text.decode() if before else "") + added)
            return
        branch = self.world.agent(name).branch
        assert bytes(branch.text) == (before.text if before else b"") + added.encode()
        assert branch.computed == len(branch.tokens) == outcome.turn.prompt_tokens
        self.after(name, durable=outcome.turn.durable)

    def model_breaks(self) -> None:
        """A bug in the middle of a step: the agent keeps what it had, and the next turn works."""
        name = self.name()
        before = self.state(name)
        stored = before.text.decode() if before else ""
        self.world.model.fail_at = self.world.model.steps + self.draw(st.integers(1, 3), "at")
        try:
            self.world.generate(name, stored + self.new_words(), 2)
        except RuntimeError:
            if self.world.has(name):
                assert bytes(self.world.agent(name).branch.text).startswith(before.text if before else b"")
        else:
            self.resync(name)  # it ended before the step that would have failed
        finally:
            self.world.model.fail_at = None
        self.world.core.pager.check_integrity()
        if self.draw(st.booleans(), "saves"):
            self.world.save_unsaved()  # of every agent
            for each in (*NAMES, "kid", "imp"):
                self.resync(each)

    # ---- control operations -----------------------------------------------------------------------------------------

    def rollback(self) -> None:
        """The agent is cut to a token."""
        name = self.name()
        before = self.state(name)
        if before is None:
            return
        tokens = self.part(len(before.tokens))
        outcome = self.world.job("rollback", name, tokens=tokens)
        if outcome.error is not None:
            self.check_failed(name, outcome.error, before, before.text.decode())
            return
        after = Snapshot.of(self.world.agent(name).branch)
        assert after.tokens == before.tokens[: len(after.tokens)]
        assert before.text.startswith(after.text)
        assert tokens - 4 < len(after.tokens) <= tokens
        self.after(name, durable=outcome.facts["durable"])

    def fork(self) -> None:
        """A new agent begins as a part of another; the other does not change."""
        name, child = self.name(), self.name("kid", "imp")
        before = self.state(name)
        if before is None or self.world.has(child):
            return
        outcome = self.world.job("fork", name, new_agent=child, tokens=self.part(len(before.tokens)))
        assert self.world.text(name).encode() == before.text
        if outcome.error is not None:
            assert isinstance(outcome.error, BudgetExceeded | Busy), outcome.error
            return
        after = Snapshot.of(self.world.agent(child).branch)
        assert after.tokens == before.tokens[: len(after.tokens)]
        self.after(child, durable=outcome.facts["durable"])

    def hold(self) -> None:
        """Residency is asked for or given up; text and ids do not change."""
        name, what = self.name("kid"), self.draw(st.sampled_from(["pin", "unpin", "evict", "prefetch"]), "what")
        before = self.state(name)
        if before is None:
            return
        outcome = self.world.job(what, name)
        if outcome.error is not None:
            assert isinstance(outcome.error, BudgetExceeded | Busy | AgentBusy), outcome.error
        after = Snapshot.of(self.world.agent(name).branch)
        assert (after.text, after.tokens) == (before.text, before.tokens)
        if what in ("pin", "unpin") and outcome.error is None:
            self.after(name, durable=outcome.facts["durable"])

    def delete(self) -> None:
        """The agent is gone, or, when the disk refuses, still there."""
        name = self.name("kid", "imp")
        if not self.world.has(name):
            return
        error = self.world.job("delete", name).error
        assert error is None or isinstance(error, NotDeleted)
        deleted = error is None
        assert self.world.has(name) != deleted
        if deleted:
            self.durable.pop(name, None)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """The process dies, the machine perhaps too."""
        self.crashed(lossy=self.draw(st.booleans(), "lossy"))

    def crashed(self, *, lossy: bool) -> None:
        """After a crash every agent is what was promised last."""
        last = {name: snapshot for name in (*NAMES, "kid", "imp") if (snapshot := self.state(name)) is not None}
        self.world.crash(lossy=lossy)
        self.refusing = False
        for name in (*NAMES, "kid", "imp"):
            found = self.state(name)
            if name in self.durable:
                # a turn that was reported as not durable may have got there all the same
                wanted = (self.durable[name], last.get(name))
                assert found in wanted, f"{name} is not as it was promised: {found}, {wanted}"
            else:
                assert found is None or found == last.get(name), f"{name} came back"
            if found is not None:
                self.durable[name] = found

    def disk_refuses(self) -> None:
        """The disk is full."""
        self.refusing = True
        self.world.refuse_writes()

    def disk_heals(self) -> None:
        """The disk takes everything again, and gets what it refused."""
        self.refusing = False
        self.world.heal()
        for _ in range(2):
            self.world.settle()
            self.world.save_unsaved()
        for agent in self.world.core.agents:
            assert agent.unsaved is None, f"a healthy disk takes what it refused before: {agent.unsaved}"
            if agent.branch.saved:
                self.durable[agent.ref.agent] = Snapshot.of(agent.branch)
            else:  # a lost page: RAM has less KV than the log speaks of, but the same text
                known = self.durable[agent.ref.agent]
                assert self.spoiled
                assert (known.text, known.tokens) == (bytes(agent.branch.text), tuple(agent.branch.tokens))

    def spoil(self) -> None:
        """A bit of a page file flips."""
        name, number = self.name(), self.draw(st.integers(0, 3), "page")
        pages = [*self.world.page_ids(name, 0), *self.world.page_ids(name, 1)] if self.world.has(name) else []
        if number < len(pages) and self.world.page_path(pages[number]) in self.world.fs.live_files():
            self.world.spoil_page(pages[number])
            self.spoiled = True

    def settle(self) -> None:
        """Everything queued is done; no page file is left that nobody needs."""
        self.world.settle()
        if not self.refusing and not self.spoiled:
            self.check_no_leaks()

    # ---- truths -----------------------------------------------------------------------------------------------------

    @invariant()
    def books_and_bytes(self) -> None:
        """See `World.check`."""
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """At last the disk heals and the machine dies once more."""
        if hasattr(self, "world"):
            self.disk_heals()
            self.crashed(lossy=True)
            self.world.check()
            self.world.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def state(self, name: str) -> Snapshot | None:
        """What an agent is now."""
        return Snapshot.of(self.world.agent(name).branch) if self.world.has(name) else None

    def expected_cached(self, name: str, prompt: bytes) -> set[int]:
        """Tokens a turn may reuse: those of the branch that has most of the prompt's KV, or is whole but for a step."""
        if not self.world.has(name):
            return {0}
        branches = self.world.agent(name).branches.values()
        most = max(reach_of(each, prompt) for each in branches)
        best = [each for each in branches if reach_of(each, prompt) == most]
        whole = [each for each in best if kept_by(each, prompt) == len(each.tokens)]
        return {min(kept_by(each, prompt), each.computed) for each in whole or best}

    def expected_shared(self, name: str, prompt: bytes) -> set[int]:
        """Tokens of whole pages of any agent that hold more of a prompt than the agent's own branches have KV of."""
        if self.world.sharing == "agent":
            return set()
        mine = self.world.agent(name).branches.values() if self.world.has(name) else []
        reach = max((each.text_bytes_of(reach_of(each, prompt)) for each in mine), default=0)
        places = set()
        for agent in self.world.core.agents:
            for branch in agent.branches.values():
                for pages in range(1, min(kept_by(branch, prompt), branch.computed) // PAGE_TOKENS + 1):
                    end = branch.text_bytes_of(pages * PAGE_TOKENS)
                    if end > reach and kept_by(branch, bytes(branch.text[:end]) + b"\0") == pages * PAGE_TOKENS:
                        places.add((end, pages * PAGE_TOKENS))
        if self.spoiled or self.crowded:  # a page that is lost, or that the disk refused, is nobody else's beginning
            return {tokens for _, tokens in places}
        return {tokens for end, tokens in places if end == max(places)[0]}

    def like_another(self) -> str:
        """A beginning of what any agent holds, and more."""
        other = self.name("kid")
        text = self.world.text(other) if self.world.has(other) else ""
        return text[: len(text) - self.part(len(text)) // 4] + self.new_words()

    def after(self, name: str, *, durable: bool) -> None:
        """Note what an operation promised."""
        assert durable or self.refusing or self.spoiled, "a healthy disk makes every turn durable"
        # other branches of the agent may still be unsaved
        assert durable or self.world.agent(name).unsaved is not None
        if durable:
            self.durable[name] = Snapshot.of(self.world.agent(name).branch)

    @property
    def crowded(self) -> bool:
        """RAM may be full of what the disk has not taken: only then may a request be told to come back later."""
        return self.refusing or any(agent.unsaved is not None for agent in self.world.core.agents)

    def resync(self, name: str) -> None:
        """Note what the log has, where an operation did not say."""
        if self.world.has(name) and self.world.agent(name).unsaved is None and self.world.agent(name).branch.saved:
            self.durable[name] = Snapshot.of(self.world.agent(name).branch)

    def check_failed(self, name: str, error: KvdError, before: Snapshot | None, prompt: str) -> None:
        """A refusal leaves everything as it was; a cancellation leaves a part of the prompt that can go on."""
        assert not isinstance(error, InternalError), error
        after = self.state(name)
        if isinstance(error, Cancelled) or (isinstance(error, Busy) and self.crowded):
            if after is not None and before is not None and after.tokens != before.tokens:
                common = common_prefix_bytes(after.text, prompt.encode())
                assert common in (len(after.text), len(prompt.encode()))
            if isinstance(error, Cancelled):
                self.resync(name)
            return
        if before is None:
            assert after is None
        else:
            assert after is not None
            assert (after.text, after.tokens) == (before.text, before.tokens)
        if not isinstance(error, BudgetExceeded):
            empty = not prompt
            long = len(content(prompt).data) > CONTEXT_TOKENS // 4
            assert empty or (long and isinstance(error, ContextFull)), error

    def check_no_leaks(self) -> None:
        """Every page file is one that an agent maps or a log names."""
        mapped: set[Any] = set()
        for agent in self.world.core.agents:
            if agent.unsaved is not None or agent.dropped_branches:
                return
            for branch in agent.branches.values():
                for segment in self.world.core.pager.segments(branch.space):
                    mapped.update(page.ref.page_id for page in segment.pages)
                if not branch.saved:
                    return
        files = {page_of_file(path.name) for path in self.world.fs.live_files() if path.suffix == ".safetensors"}
        assert files <= mapped


TestTurns = TurnMachine.TestCase
TestTurns.settings = settings(
    max_examples=20 if SAME_EXAMPLES else 100,
    stateful_step_count=30,
    deadline=None,
    # explaining a failure runs it again and again under a tracer, which takes longer than any test may
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
