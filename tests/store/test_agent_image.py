"""Replay: rules, refusals, and equality with a simple model over random histories."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.quant.spec import PAGE_TOKENS
from kvd.store.agent_image import AgentImage, apply
from kvd.store.errors import RecordInvalid
from kvd.store.record_codec import encode_record
from kvd.store.records import AgentRecord, PageEntry, PositionRun, SegmentDelta
from kvd.store.snapshot import join_tail, snapshot_records
from kvd.vm.text import Span, merge_spans
from tests.support.store_data import LAYOUTS, NUMERICS, ModelAgent, content, hex_of, layouts, slice_kv


class MemoryLog:
    """A log without a disk: payloads one after the other, as replay sees them."""

    def __init__(self) -> None:
        self.data = b""
        self.records: list[tuple[AgentRecord, int]] = []

    def add(self, record: AgentRecord) -> None:
        """Append a record."""
        self.data += bytes(28) + encode_record(record)
        self.records.append((record, len(self.data)))

    def replay(self) -> AgentImage:
        """The agent."""
        image: AgentImage | None = None
        for record, payload_end in self.records:
            image = apply(image, record, payload_end=payload_end, layouts=layouts)
        assert image is not None
        return image

    def read_tail(self, branch: int, group: int, segment: int = 0) -> bytes:
        """Tail KV from the log's bytes."""
        state = self.replay().branches[branch].segment(group, segment)
        return join_tail(state, LAYOUTS[group], lambda f: self.data[f.offset : f.offset + f.kv_bytes])


@dataclass
class Branch:
    """The simple model: everything in the open."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    salts: list[int] = field(default_factory=list)
    pending: int = 0


@dataclass
class Model:
    """An agent as lists. KV of a token is a function of its group, position and salt, so tails can be checked."""

    branches: dict[int, Branch] = field(default_factory=dict)
    current: int = 0
    seq: int = 0


def page_kv(group: int, salts: list[int], start: int) -> bytes:
    """Content of the open page that starts at token `start`: one byte value per token."""
    layout = LAYOUTS[group]
    parts = []
    for tensor in layout.tensors:
        row = tensor.tensor_bytes // tensor.shape[0] // PAGE_TOKENS
        for head in range(tensor.shape[0]):
            for token in range(PAGE_TOKENS):
                known = start + token < len(salts)
                parts.append(bytes([(salts[start + token] * 7 + head + group) % 251 if known else 0]) * row)
    return b"".join(parts)


def entry(group: int, salts: list[int], number: int) -> PageEntry:
    """A sealed page whose identity depends on its content."""
    name = hex_of(group, number, salts[: (number + 1) * PAGE_TOKENS])
    return PageEntry(name, name, (PositionRun(number * PAGE_TOKENS, PAGE_TOKENS),))


def record_of(
    model: Model, branch: int, base: Branch, after: Branch, cut: int, kind: str, parent: int | None, base_tail: bool
) -> AgentRecord:
    """The record that leads from `base`, cut to `cut` tokens, to `after`."""
    done_before, done = len(base.tokens) - base.pending, len(after.tokens) - after.pending
    kept_tokens = min(cut, done_before)
    segments = []
    for group, layout in enumerate(LAYOUTS):
        kept = kept_tokens // PAGE_TOKENS
        new = tuple(entry(group, after.salts, number) for number in range(kept, done // PAGE_TOKENS))
        tail_end = done % PAGE_TOKENS
        same_page = base_tail and not new and kept == done_before // PAGE_TOKENS
        tail_start = min(kept_tokens % PAGE_TOKENS, tail_end) if same_page else 0
        page = page_kv(group, after.salts, done // PAGE_TOKENS * PAGE_TOKENS)
        segments.append(
            SegmentDelta(
                group, layout.format_id, kept, new, tail_start, tail_end, slice_kv(layout, page, tail_start, tail_end)
            )
        )
    added = after.tokens[cut:]
    return AgentRecord(
        seq=model.seq + 1,
        agent="ada",
        namespace="default",
        kind=kind,
        branch=branch,
        parent=parent,
        base_tokens=cut,
        base_text_bytes=2 * cut,
        token_ids=tuple(added),
        token_bytes=(2,) * len(added),
        spans=tuple(Span(kind, 2) for kind in after.kinds[cut:]),
        text="é".encode() * len(added),
        computed_tokens=done,
        segments=tuple(segments),
        time_s=float(model.seq),
        numerics=NUMERICS,
        meta={"turns": model.seq},
    )


steps = st.tuples(
    st.sampled_from(["turn", "turn", "rollback", "fork", "switch"]),
    st.integers(0, 300),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(["content", "generated", "control"]),
)


def run_history(history: list[tuple[str, int, float, bool, str]]) -> tuple[Model, MemoryLog]:
    """Carry out random steps on model and log."""
    model, log = Model(branches={0: Branch()}), MemoryLog()
    for number, (step, tokens, where, pending, kind) in enumerate(history):
        if step == "switch":
            model.current = sorted(model.branches)[int(where * (len(model.branches) - 1))]
        base = model.branches[model.current]
        cut = len(base.tokens) if step in ("turn", "switch") else int(where * len(base.tokens))
        fork = step == "fork" and bool(log.records)
        target = max(model.branches) + 1 if fork else model.current
        after = Branch(
            tokens=base.tokens[:cut] + [number * 1000 + i for i in range(tokens)],
            kinds=base.kinds[:cut] + [kind] * tokens,
            salts=base.salts[:cut] + [number * 3 + i + 1 for i in range(tokens)],
            pending=int(pending and cut + tokens > 0),
        )
        parent = model.current if fork else None
        # the KV of a token that was pending in the base is new
        name = "create" if not log.records else "rollback" if step == "rollback" else "turn"
        log.add(record_of(model, target, base, after, cut, name, parent, base_tail=True))
        model.branches[target] = after
        model.current = target
        model.seq += 1
    return model, log


def check_model(model: Model, image: AgentImage, log: MemoryLog) -> None:
    """Image and model agree in everything, tails byte for byte."""
    assert (image.current, image.seq, set(image.branches)) == (model.current, model.seq, set(model.branches))
    for number, expected in model.branches.items():
        branch = image.branches[number]
        assert list(branch.tokens) == expected.tokens
        assert branch.text == "é".encode() * len(expected.tokens)
        assert branch.spans == merge_spans(Span(kind, 2) for kind in expected.kinds)
        done = len(expected.tokens) - expected.pending
        assert branch.computed_tokens == done
        for group, layout in enumerate(LAYOUTS):
            segment = branch.segment(group)
            wanted = [entry(group, expected.salts, page) for page in range(done // PAGE_TOKENS)]
            assert list(segment.pages) == wanted
            page = page_kv(group, expected.salts, done // PAGE_TOKENS * PAGE_TOKENS)
            assert log.read_tail(number, group) == slice_kv(layout, page, 0, done % PAGE_TOKENS)


@given(st.lists(steps, min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_random_histories_equal_a_simple_model_and_survive_compaction(
    history: list[tuple[str, int, float, bool, str]],
) -> None:
    """Turns, rollbacks, forks and other branches' turns; then replay(snapshot(replay(log))) == replay(log), twice."""
    model, log = run_history(history)
    if not log.records:
        return
    image = log.replay()
    check_model(model, image, log)
    assert 0 <= image.dead_bytes <= image.log_bytes == len(log.data)
    compacted = MemoryLog()
    for record in snapshot_records(image, log.read_tail):
        compacted.add(record)
    again = compacted.replay()
    assert again.dead_bytes == 0
    pages = sum(len(segment.pages) for branch in image.branches.values() for segment in branch.segments)
    spans = sum(len(branch.spans) for branch in image.branches.values())
    slack = 256 * (1 + len(image.branches)) + 32 * pages + 16 * spans
    assert 0 <= image.rewritten_bytes(image.branches) - len(compacted.data) <= slack
    assert content(again, compacted.read_tail) == content(image, log.read_tail)
    twice = MemoryLog()
    for record in snapshot_records(again, compacted.read_tail):
        twice.add(record)
    assert twice.replay() == again
    check_model(model, again, compacted)


def test_a_log_goes_on_after_compaction_with_the_same_numbers() -> None:
    """The engine need not know whether its compaction has happened yet when it numbers the next record."""
    agent, log = ModelAgent("ada"), MemoryLog()
    for tokens in (10, 20, 300):
        agent, record, _ = agent.turn(tokens)
        log.add(record)
    compacted = MemoryLog()
    for record in snapshot_records(log.replay(), log.read_tail):
        compacted.add(record)
    agent, record, _ = agent.turn(5)
    for each in (log, compacted):
        each.add(record)
    assert content(log.replay(), log.read_tail) == content(compacted.replay(), compacted.read_tail)
    assert compacted.read_tail(0, 1) == agent.tail(1)


def test_dead_bytes_grow_when_pages_are_sealed_and_compaction_becomes_due() -> None:
    """P15 P26: deltas only, and rewriting only when as much is dead as alive."""
    agent, log = ModelAgent("ada"), MemoryLog()
    due = []
    for _ in range(12):
        agent, record, _ = agent.turn(100)
        log.add(record)
        kv = sum(len(segment.tail_kv) for segment in record.segments)
        assert kv <= 100 * sum(layout.token_bytes for layout in LAYOUTS), "a turn stores new tokens only"
        due.append(log.replay().compaction_due(LAYOUTS[0].payload_bytes))
    assert not due[1]
    assert due[-1]


def test_what_an_unwanted_branch_takes_is_dead() -> None:
    """P15 P26: ids, text and tails of branches let go of count, so that they are rewritten away when that pays."""
    _, log = run_history(
        [("turn", 200, 0, False, "content"), ("fork", 200, 0, False, "content"), ("fork", 200, 0, False, "content")]
    )
    image = log.replay()
    token_bytes = 8 + 2 + sum(layout.token_bytes for layout in LAYOUTS)
    assert image.dead_bytes < 2000, "spans of neighbours become one"
    for keep, dropped in (({0, 1, 2}, 0), ({0, 2}, 1), (set(), 2)):
        dead = image.dead_bytes_without(keep)
        assert dropped * 200 * token_bytes <= dead + 1000 <= dropped * 200 * token_bytes + 3000
        compacted = MemoryLog()
        for record in snapshot_records(image, log.read_tail, keep=keep):
            compacted.add(record)
        assert dead <= len(log.data) - len(compacted.data)
    assert not image.compaction_due(100 * token_bytes)
    assert not image.compaction_due(100 * token_bytes, {0})
    assert image.compaction_due(100 * token_bytes, set())
    assert not image.compaction_due(500 * token_bytes, set()), "a rewrite for less than a page"


def test_branches_can_be_left_out_of_a_snapshot() -> None:
    """Compaction drops abandoned branches; the current one always stays."""
    _, log = run_history(
        [("turn", 10, 0, False, "content"), ("fork", 5, 0.5, False, "content"), ("fork", 5, 1, False, "content")]
    )
    image = log.replay()
    assert set(image.branches) == {0, 1, 2}
    compacted = MemoryLog()
    for record in snapshot_records(image, log.read_tail, keep=frozenset({0})):
        compacted.add(record)
    assert set(compacted.replay().branches) == {0, 2}
    assert compacted.replay().current == 2
    assert compacted.replay().seq == image.seq


def base_image() -> tuple[AgentImage, AgentRecord]:
    """An agent with one page and a tail of 44 tokens, and a good next record."""
    agent, first, _ = ModelAgent("ada").turn(300)
    _, second, _ = agent.turn(10)
    image = apply(None, first, payload_end=len(encode_record(first)), layouts=layouts)
    assert apply(image, second, payload_end=10**6, layouts=layouts).seq == 2
    return image, second


def with_segment(record: AgentRecord, **changes: object) -> AgentRecord:
    """The record with its first segment changed."""
    return replace(record, segments=(replace(record.segments[0], **changes), *record.segments[1:]))


def broken_records() -> dict[str, AgentRecord]:
    """Records that do not follow from `base_image`, by what is wrong."""
    record = base_image()[1]
    page = PageEntry("p", "k", (PositionRun(256, 255),))
    return {
        "gap in numbers": replace(record, seq=3),
        "number repeated": replace(record, seq=1),
        "another agent": replace(record, agent="bob"),
        "another namespace": replace(record, namespace="other"),
        "more tokens than there are": replace(record, base_tokens=301),
        "more text than there is": replace(record, base_text_bytes=301),
        "cut inside a token": replace(record, base_tokens=299),
        "ids without bytes": replace(record, token_bytes=record.token_bytes[:-1]),
        "bytes without text": replace(record, text=record.text[:-1]),
        "spans do not tile": replace(record, spans=(Span("content", 9),)),
        "computed beyond tokens": replace(record, computed_tokens=311),
        "two tokens pending": replace(record, computed_tokens=308),
        "unknown parent": replace(record, branch=1, parent=7),
        "fork onto an existing branch": replace(record, branch=0, parent=0),
        "new branch with a base": replace(record, branch=5),
        "segment twice": replace(record, segments=(record.segments[0], record.segments[0])),
        "segment left out": replace(record, segments=record.segments[:1]),
        "keeps pages that are not there": with_segment(record, kept_pages=2),
        "drops a page but keeps the tail": with_segment(record, kept_pages=0),
        "tail backwards": with_segment(record, tail_start=60),
        "tail after a hole": with_segment(
            record, tail_start=50, tail_kv=record.segments[0].tail_kv[: 4 * LAYOUTS[0].token_bytes]
        ),
        "tail too long": with_segment(record, tail_end=256),
        "KV missing": with_segment(record, tail_kv=b""),
        "KV of another length": with_segment(record, tail_kv=record.segments[0].tail_kv[:-1]),
        "format changed under pages": with_segment(record, format_id="q8"),
        "page not full": with_segment(record, new_pages=(page,), tail_start=0),
    }


@pytest.mark.parametrize("wrong", sorted(broken_records()))
def test_records_that_do_not_follow_are_refused(wrong: str) -> None:
    """The error names the record, and the image is as it was."""
    image, good = base_image()
    record = broken_records()[wrong]
    with pytest.raises(RecordInvalid) as caught:
        apply(image, record, payload_end=10**6, layouts=layouts)
    assert caught.value.seq == record.seq
    assert apply(image, good, payload_end=10**6, layouts=layouts).seq == 2


def test_a_sliding_group_may_hold_less_than_all_tokens() -> None:
    """Only groups said to be full must account for every computed token."""
    record = ModelAgent("ada").turn(300)[1]
    record = with_segment(record, new_pages=())
    with pytest.raises(RecordInvalid):
        apply(None, record, payload_end=10**6)
    assert apply(None, record, payload_end=10**6, full_groups=frozenset({1})).seq == 1


def test_spans_of_one_kind_become_one() -> None:
    """A turn that continues the last span makes no new one; empty spans vanish."""
    merged = merge_spans(
        [Span("control", 0), Span("content", 2), Span("content", 3), Span("generated", 0), Span("content", 1)]
    )
    assert merged == (Span("content", 6),)
