"""Branches and their records: whatever happened between two commits, the log says what RAM holds."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.ids import AgentId, Namespace, PageId, PageKey, SpaceId
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import (
    Agent,
    Baseline,
    Branch,
    SegmentNow,
    baseline_on_parent,
    build_record,
    cut_spans,
    log_is_gone,
    mark_committed,
    page_runs,
)
from kvd.scheduler.requests import AgentRef
from kvd.store.agent_image import AgentImage, BranchImage, apply
from kvd.store.records import AgentRecord, PageEntry
from kvd.store.snapshot import snapshot_records
from kvd.vm.text import Span, TypedText, rest_of

KV_BYTES = 4
GROUPS = 2


@dataclass
class Simulated:
    """A branch with KV that tells tokens apart: each computed token has a number, each sealed page an id per group."""

    branch: Branch
    kv: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Engine:
    """Does to agents what the engine does, with numbers for KV, and keeps a log to replay."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.agent = Agent(AgentRef(Namespace("n"), AgentId("a")))
        self.branches: dict[int, Simulated] = {}
        self.image: AgentImage | None = None
        self.log = bytearray()
        self.add(Branch(self._branch_id(), SpaceId(0), ("f0", "f1")))

    def _branch_id(self) -> int:
        branch_id = self.agent.next_branch
        self.agent.next_branch += 1
        return branch_id

    def add(self, branch: Branch) -> Simulated:
        """Make a branch known and current."""
        self.agent.branches[branch.branch_id] = branch
        self.agent.current = branch.branch_id
        self.branches[branch.branch_id] = Simulated(branch)
        return self.branches[branch.branch_id]

    # ---- what turns do ----------------------------------------------------------------------------------------------

    def append(self, one: Simulated, tokens: int, kind: str, *, pending: bool) -> None:
        """Compute what has no KV, then `tokens` more; the last one may stay pending."""
        ids = [next(self.numbers) for _ in range(tokens)]
        # tokens of 0, 1 and 2 bytes; the text ends on a character in any case
        lengths = [number % 3 for number in ids]
        one.branch.append(kind, b"x" * sum(lengths), ids, lengths)  # type: ignore[arg-type]
        self.compute(one, len(one.branch.tokens) - (1 if pending and tokens else 0))

    def compute(self, one: Simulated, upto: int) -> None:
        """Give tokens KV; seal pages that become full."""
        while len(one.kv) < upto:
            one.kv.append(next(self.numbers))
            if len(one.kv) % PAGE_TOKENS == 0:
                one.pages.append(next(self.numbers))
        one.branch.computed = max(one.branch.computed, upto)

    def lose(self, one: Simulated, computed: int) -> None:
        """KV from a page border on is lost."""
        self._cut_kv(one, computed)
        one.branch.drop_kv_from(computed)

    def cut(self, one: Simulated, tokens: int) -> None:
        """Keep the first tokens."""
        self._cut_kv(one, min(tokens, len(one.kv)))
        one.branch.cut(tokens)

    @staticmethod
    def _cut_kv(one: Simulated, computed: int) -> None:
        del one.kv[computed:], one.pages[computed // PAGE_TOKENS :]

    def fork(self, source: Simulated, tokens: int) -> None:
        """A branch that begins as a part of another."""
        kept = source.branch.text_bytes_of(tokens)
        branch = Branch(
            self._branch_id(),
            SpaceId(0),
            source.branch.format_ids,
            tokens=source.branch.tokens[:tokens],
            token_bytes=source.branch.token_bytes[:tokens],
            spans=cut_spans(source.branch.spans, kept),
            text=source.branch.text[:kept],
            computed=min(source.branch.computed, tokens),
        )
        branch.baseline = baseline_on_parent(source.branch, tokens=tokens)
        child = self.add(branch)
        child.kv = source.kv[: branch.computed]
        child.pages = source.pages[: branch.computed // PAGE_TOKENS]

    # ---- the log ----------------------------------------------------------------------------------------------------

    def record(self, one: Simulated) -> AgentRecord:
        """The next record of a branch."""
        tail = one.branch.computed % PAGE_TOKENS

        def segment(group: int) -> SegmentNow:
            entries = tuple(self.entry(group, page, number) for number, page in enumerate(one.pages))
            return SegmentNow(
                len(entries),
                lambda first: entries[first:],
                tail,
                lambda start, end: self.tail_kv(one, group)[start * KV_BYTES : end * KV_BYTES],
            )

        return build_record(
            self.agent,
            one.branch,
            [segment(group) for group in range(GROUPS)],
            kind="turn" if self.agent.logged else "create",
            time_s=1.0,
            numerics="n",
            meta={"pinned": self.agent.pinned},
        )

    @staticmethod
    def entry(group: int, page: int, number: int) -> PageEntry:
        """A sealed page."""
        return PageEntry(PageId(f"{group}-{page}"), PageKey(f"key {page}"), page_runs(number))

    @staticmethod
    def tail_kv(one: Simulated, group: int) -> bytes:
        """KV of the open page."""
        start = len(one.pages) * PAGE_TOKENS
        return b"".join(struct.pack("<I", number * GROUPS + group) for number in one.kv[start : one.branch.computed])

    def commit(self, one: Simulated, *, works: bool) -> None:
        """Append a record; when the disk refuses it, nothing changes."""
        record = self.record(one)
        if not works:
            return
        self._write(record)
        self.agent.logged = True
        mark_committed(one.branch, self.agent.branches.values())

    def _write(self, record: AgentRecord) -> None:
        self.log += b"header" + b"".join(segment.tail_kv for segment in record.segments)
        self.image = apply(self.image, record, payload_end=len(self.log))
        self.agent.seq = self.image.seq

    def compact(self) -> None:
        """Rewrite the log as the store does; branches let go of are left out."""
        if self.image is None:
            return
        image, old = self.image, bytes(self.log)
        records = list(
            snapshot_records(
                image,
                lambda branch, group, *_: tail_of(image.branches[branch], group, old),
                keep=frozenset(self.agent.branches),
            )
        )
        self.image = None
        self.log.clear()
        for record in records:
            self._write(record)

    def check(self) -> None:
        """Every branch that says it is saved is in the log exactly as it is in RAM."""
        for number, one in self.branches.items():
            if not one.branch.saved or not one.branch.logged:
                continue
            assert self.image is not None
            stored = self.image.branches[number]
            branch = one.branch
            assert stored.tokens == tuple(branch.tokens)
            assert stored.token_bytes == tuple(branch.token_bytes)
            assert stored.text == bytes(branch.text)
            assert stored.spans == tuple(branch.spans)
            assert stored.computed_tokens == branch.computed
            for group in range(GROUPS):
                assert [page.page_id for page in stored.segment(group).pages] == [
                    f"{group}-{page}" for page in one.pages
                ]
                assert tail_of(stored, group, bytes(self.log)) == self.tail_kv(one, group)


def tail_of(stored: BranchImage, group: int, log: bytes) -> bytes:
    """Tail KV of a replayed branch, read from where its fragments lie."""
    return b"".join(
        log[each.offset : each.offset + (each.upto - each.start) * KV_BYTES] for each in stored.segment(group).fragments
    )


SIZES = st.sampled_from([0, 1, 2, 5, 60, 100, 200, 255, 256, 257, 300, 520])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_replaying_the_records_gives_what_ram_holds(data: st.DataObject) -> None:
    """Any mix of turns, cuts, lost KV, forks, refused commits, pins and compactions: the log follows (P14, P15)."""
    engine = Engine()
    for _ in range(data.draw(st.integers(1, 14))):
        one = engine.branches[data.draw(st.sampled_from(sorted(engine.branches)))]
        action = data.draw(
            st.sampled_from(["turn"] * 4 + ["cut", "lose", "fork", "fail", "fail", "pin", "compact", "gone"])
        )
        if action in ("turn", "fail"):
            kind = data.draw(st.sampled_from(["content", "generated", "control"]))
            engine.append(one, data.draw(SIZES), kind, pending=data.draw(st.booleans()))
            engine.agent.current = one.branch.branch_id
            engine.commit(one, works=action == "turn")
        elif action == "cut":
            engine.cut(one, data.draw(st.integers(0, len(one.branch.tokens))))
        elif action == "lose":
            engine.lose(one, data.draw(st.integers(0, one.branch.computed // PAGE_TOKENS)) * PAGE_TOKENS)
        elif action == "fork" and len(engine.branches) < 5:
            engine.fork(one, data.draw(st.integers(0, len(one.branch.tokens))))
        elif action == "pin" and not one.branch.behind:
            engine.agent.pinned = not engine.agent.pinned
            engine.commit(one, works=True)
            assert engine.image is not None
            assert engine.image.meta["pinned"] == engine.agent.pinned
        elif action == "compact":
            engine.compact()
        elif action == "gone":
            log_is_gone(engine.agent)
            engine.image = None
            engine.log.clear()
        engine.check()
    for one in engine.branches.values():
        engine.compute(one, len(one.branch.tokens))
        engine.commit(one, works=True)
        assert one.branch.saved
    engine.check()


@pytest.mark.parametrize(
    ("prepare", "kv_tokens"),
    [
        (lambda engine, one: None, 0),
        (lambda engine, one: engine.append(one, 7, "content", pending=False), 7),
        (lambda engine, one: engine.cut(one, 90), 0),
        (lambda engine, one: (engine.cut(one, 90), engine.append(one, 5, "content", pending=False)), 5),
        (lambda engine, one: engine.append(one, 200, "content", pending=False), 44),
    ],
)
def test_a_record_holds_only_what_is_new(prepare: Callable[[Engine, Simulated], None], kv_tokens: int) -> None:
    """Tail KV that the log has is never written again; a sealed page takes its tail out of the log (P15, P26)."""
    engine = Engine()
    one = engine.branches[1]
    engine.append(one, 100, "content", pending=False)
    engine.commit(one, works=True)
    prepare(engine, one)
    record = engine.record(one)
    assert [len(segment.tail_kv) for segment in record.segments] == [kv_tokens * KV_BYTES] * GROUPS
    engine.commit(one, works=True)
    engine.check()


def test_a_branch_knows_whether_the_log_has_it() -> None:
    """Text, a cut that was filled up again, lost KV and a fork are all changes; a commit ends them."""
    engine = Engine()
    one = engine.branches[1]
    assert one.branch.saved
    for change in (
        lambda: engine.append(one, 3, "content", pending=False),
        lambda: engine.cut(one, 2),
        lambda: (engine.cut(one, 1), engine.append(one, 1, "content", pending=False)),
        lambda: engine.compute(one, len(one.branch.tokens)),
        lambda: (engine.lose(one, 0), engine.compute(one, len(one.branch.tokens))),
    ):
        change()
        assert not one.branch.saved or one.branch.computed == 2
        engine.commit(one, works=True)
        assert one.branch.saved
    engine.fork(one, 1)
    assert not engine.branches[2].branch.saved


def test_a_fork_that_was_not_saved_survives_changes_of_its_parent() -> None:
    """A branch whose first record the disk refused does not lean on a parent that has changed in the log since."""
    engine = Engine()
    parent = engine.branches[1]
    engine.append(parent, 100, "content", pending=False)
    engine.commit(parent, works=True)
    engine.fork(parent, 60)
    child = engine.branches[2]
    engine.append(child, 3, "generated", pending=True)
    engine.commit(child, works=False)
    engine.cut(parent, 10)
    engine.append(parent, 300, "content", pending=False)
    engine.commit(parent, works=True)
    engine.commit(child, works=True)
    engine.check()


def test_spare_branches_come_in_the_order_of_their_last_use() -> None:
    """Never the current one; a branch that an unwritten record leans on stays until that is written."""
    engine = Engine()
    for _ in range(4):
        engine.add(Branch(engine._branch_id(), SpaceId(0), ()))
    for number, branch in engine.agent.branches.items():
        branch.last_used = 100 - number
    current = engine.agent.branch
    spare = [branch.branch_id for branch in engine.agent.spare_branches()]
    assert spare == sorted(engine.agent.branches.keys() - {current.branch_id}, reverse=True)
    current.baseline = Baseline(parent=spare[0], tokens=1)
    assert [branch.branch_id for branch in engine.agent.spare_branches()] == spare[1:]
    assert len(engine.agent.other_branches) == len(spare)


def test_text_is_cut_on_character_borders() -> None:
    """Half a character never stays, and a token without bytes goes with the one before it."""
    branch = Branch(1, SpaceId(0), ())
    branch.append("content", "aé🙂".encode(), [1, 2, 3, 4, 5, 6], [1, 1, 1, 2, 2, 0])
    assert [branch.border_at_most(tokens) for tokens in range(7)] == [0, 1, 1, 3, 3, 5, 6]


def test_a_token_may_cover_two_spans() -> None:
    """Where a tokenizer has no token for a span, its bytes count for the next one's first token."""
    branch = Branch(1, SpaceId(0), ())
    branch.append_typed(TypedText(b"abcd", (Span("control", 1), Span("content", 3))), [9, 8], [2, 2])
    branch.append_typed(TypedText(b"e", (Span("content", 1),)), [7], [1])
    assert branch.spans == [Span("control", 1), Span("content", 4)]
    with pytest.raises(ValueError, match="tokens of 1 and spans of 2 bytes for a text of 2"):
        branch.append_typed(TypedText(b"xy", (Span("content", 2),)), [7], [1])
    assert branch.text == b"abcde"


@given(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=5), start=st.integers(0, 30))
def test_spans_are_cut_and_continued(cuts: list[int], start: int) -> None:
    """The head and the rest of a typed text are the whole."""
    spans = tuple(Span("content" if index % 2 else "control", length) for index, length in enumerate(cuts))
    typed = TypedText(bytes(range(sum(cuts))), spans)
    start = min(start, len(typed.data))
    rest = rest_of(typed, start)
    branch = Branch(1, SpaceId(0), ())
    branch.append_typed(TypedText(typed.data[:start], tuple(cut_spans(spans, start))), [1], [start])
    branch.append_typed(rest, [2], [len(rest.data)])
    assert branch.typed == typed
