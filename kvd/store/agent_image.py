"""What an agent is after replaying its log. Pure: no disk, no clock, no threads; every value here is immutable.

Theory of operation. `apply` takes an image and one record and returns the next image, or raises `RecordInvalid` and
leaves everything as it was; the swap thread calls it *before* a record is written, so that a log never holds a record
that cannot be replayed. Branches share tuples, forks copy nothing.

Tail KV is not kept: a `Fragment` says where in the log the bytes of some tokens of the open page lie. A fragment is
never rewritten; cutting the tail lowers `upto`. `dead_bytes` is the KV in the log that no branch names any more.

May import kvd.ids, kvd.quant.spec, kvd.vm.text, kvd.store.errors and kvd.store.records only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import xxhash

from kvd.ids import PageId
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.store.errors import RecordInvalid
from kvd.store.records import AgentRecord, PageEntry, SegmentDelta
from kvd.vm.text import Span

Layouts = Callable[[int, str], PageLayout | None]
"""Layout of a cache group's pages in a format; None when it is not known."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tail KV of tokens [start, end) of an open page, of which [start, upto) still count.

    Attributes:
        start, end: tokens the bytes were sliced for (`end - start` is the stride of each head).
        upto: tokens that are still part of the tail.
        offset: first byte in the log.
        kv_bytes: length.
        checksum: xxh3_128 of the bytes, taken when they were verified as part of their frame.
    """

    start: int
    end: int
    upto: int
    offset: int
    kv_bytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class SegmentState:
    """One segment of a branch: sealed pages, then `tail_tokens` tokens of an open page in `fragments`."""

    group: int
    format_id: str
    pages: tuple[PageEntry, ...]
    tail_tokens: int
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, slots=True)
class BranchImage:
    """One branch of an agent; fields as in `AgentRecord`, accumulated.

    Attributes:
        time_s: wall clock of the last record that changed it.
        numerics: of the last record that changed it.
    """

    tokens: tuple[int, ...] = ()
    token_bytes: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    text: bytes = b""
    computed_tokens: int = 0
    segments: tuple[SegmentState, ...] = ()
    time_s: float = 0.0
    numerics: str = ""

    def segment(self, group: int) -> SegmentState:
        """The segment of a cache group; KeyError when there is none."""
        for segment in self.segments:
            if segment.group == group:
                return segment
        raise KeyError(group)

    def page_ids(self) -> set[PageId]:
        """Every sealed page the branch maps."""
        return {page.page_id for segment in self.segments for page in segment.pages}


@dataclass(frozen=True, slots=True)
class AgentImage:
    """An agent: its branches and where its log stands.

    Attributes:
        branches: by branch number.
        current: the branch that the next turn continues.
        meta: accumulated, last record wins key by key.
        seq: number of the last record.
        log_bytes: length of the log's good part.
        kv_bytes: tail KV in the log, dead or not.
    """

    namespace: str
    agent: str
    branches: Mapping[int, BranchImage]
    current: int
    meta: Mapping[str, object] = field(default_factory=dict)
    seq: int = 0
    log_bytes: int = 0
    kv_bytes: int = 0

    @property
    def branch(self) -> BranchImage:
        """The current branch."""
        return self.branches[self.current]

    @property
    def dead_bytes(self) -> int:
        """Tail KV in the log that no branch needs; compaction gets rid of it."""
        live = {
            fragment.offset: fragment.kv_bytes
            for branch in self.branches.values()
            for segment in branch.segments
            for fragment in segment.fragments
        }
        return self.kv_bytes - sum(live.values())

    def compaction_due(self, page_bytes: int) -> bool:
        """Whether rewriting pays: a page of dead bytes, and as much dead as alive (so wear stays bounded, P26)."""
        dead = self.dead_bytes
        return dead >= max(page_bytes, self.log_bytes - dead)

    def page_ids(self) -> set[PageId]:
        """Every sealed page any branch maps."""
        return set().union(*(branch.page_ids() for branch in self.branches.values()))


def apply(
    image: AgentImage | None,
    record: AgentRecord,
    *,
    payload_end: int,
    layouts: Layouts | None = None,
    full_groups: frozenset[int] | None = None,
) -> AgentImage:
    """The image after one more record.

    Args:
        image: the agent so far; None for the first record of a log.
        record: the change.
        payload_end: where the record ends in the log, in bytes (its tail KV are the last bytes before).
        layouts: when given, the KV's length is checked against the format.
        full_groups: groups in which every computed token has its place; None: all groups.

    Raises:
        RecordInvalid: the record does not follow from `image`; names the record.
    """
    try:
        return _apply(image, record, payload_end, layouts, full_groups)
    except ValueError as error:
        raise RecordInvalid(str(error), seq=record.seq) from error


def replay(
    records: Iterable[tuple[AgentRecord, int]],
    *,
    layouts: Layouts | None = None,
    full_groups: frozenset[int] | None = None,
) -> AgentImage | None:
    """All records of a log, each with its `payload_end`; None when there are none."""
    image: AgentImage | None = None
    for record, payload_end in records:
        image = apply(image, record, payload_end=payload_end, layouts=layouts, full_groups=full_groups)
    return image


def _check(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _apply(
    image: AgentImage | None,
    record: AgentRecord,
    payload_end: int,
    layouts: Layouts | None,
    full_groups: frozenset[int] | None,
) -> AgentImage:
    if image is None:
        _check(record.seq >= 1, "records are numbered from 1")
        image = AgentImage(record.namespace, record.agent, {}, record.branch, seq=record.seq - 1)
    _check(record.seq == image.seq + 1, f"it follows record {image.seq}")
    _check((record.namespace, record.agent) == (image.namespace, image.agent), "it belongs to another agent")
    kv_bytes = sum(len(segment.tail_kv) for segment in record.segments)
    branches = dict(image.branches)
    if record.kind == "flip":
        _check(record.branch in branches, f"it flips to branch {record.branch}, which does not exist")
        nothing = not (record.token_ids or record.token_bytes or record.spans or record.text or record.segments)
        _check(nothing, "a flip appends nothing")
    else:
        base = _base(image, record)
        branches[record.branch] = _next_branch(base, record, payload_end - kv_bytes, layouts, full_groups)
    return replace(
        image,
        branches=branches,
        current=record.branch,
        meta={**image.meta, **record.meta},
        seq=record.seq,
        log_bytes=payload_end,
        kv_bytes=image.kv_bytes + kv_bytes,
    )


def _base(image: AgentImage, record: AgentRecord) -> BranchImage:
    """The state the record builds on."""
    if record.parent is None:
        if record.branch in image.branches:
            return image.branches[record.branch]
        _check(record.base_tokens == 0 and record.base_text_bytes == 0, f"branch {record.branch} does not exist")
        return BranchImage()
    _check(record.parent in image.branches, f"parent branch {record.parent} does not exist")
    _check(record.branch not in image.branches, f"branch {record.branch} exists and cannot be forked again")
    return image.branches[record.parent]


def _next_branch(
    base: BranchImage,
    record: AgentRecord,
    kv_offset: int,
    layouts: Layouts | None,
    full_groups: frozenset[int] | None,
) -> BranchImage:
    cut = record.base_tokens
    _check(cut <= len(base.tokens), f"it keeps {cut} of {len(base.tokens)} tokens")
    _check(
        record.base_text_bytes <= len(base.text), f"it keeps {record.base_text_bytes} of {len(base.text)} text bytes"
    )
    _check(len(record.token_ids) == len(record.token_bytes), "token ids and token bytes differ in number")
    kept_bytes = base.token_bytes[:cut]
    kept_text = len(base.text) if cut == len(base.tokens) else sum(kept_bytes)  # a plain turn must not cost O(text)
    _check(kept_text == record.base_text_bytes, "the text is cut where no token starts")
    tokens = base.tokens[:cut] + record.token_ids
    token_bytes = kept_bytes + record.token_bytes
    text = base.text[: record.base_text_bytes] + record.text
    _check(sum(record.token_bytes) == len(record.text), "the tokens do not stand for the text")
    spans = merge_spans((*cut_spans(base.spans, record.base_text_bytes), *record.spans))
    _check(sum(span.text_bytes for span in spans) == len(text), "the spans do not tile the text")
    _check(0 <= len(tokens) - record.computed_tokens <= 1, f"{record.computed_tokens} of {len(tokens)} are computed")
    return BranchImage(
        tokens=tokens,
        token_bytes=token_bytes,
        spans=spans,
        text=text,
        computed_tokens=record.computed_tokens,
        segments=tuple(_segments(base, record, kv_offset, layouts, full_groups)),
        time_s=record.time_s,
        numerics=record.numerics,
    )


def _segments(
    base: BranchImage,
    record: AgentRecord,
    kv_offset: int,
    layouts: Layouts | None,
    full_groups: frozenset[int] | None,
) -> Iterator[SegmentState]:
    groups = [delta.group for delta in record.segments]
    _check(len(set(groups)) == len(groups), "it names a group twice")
    _check({segment.group for segment in base.segments} <= set(groups), "it leaves out a group")
    for delta in sorted(record.segments, key=lambda delta: delta.group):
        old = next((segment for segment in base.segments if segment.group == delta.group), None)
        before = sum(len(other.tail_kv) for other in record.segments[: groups.index(delta.group)])
        full = full_groups is None or delta.group in full_groups
        yield _segment(old, delta, record, kv_offset + before, layouts, full=full)


def _segment(
    old: SegmentState | None,
    delta: SegmentDelta,
    record: AgentRecord,
    offset: int,
    layouts: Layouts | None,
    *,
    full: bool,
) -> SegmentState:
    where = f"group {delta.group}: "
    old = old or SegmentState(delta.group, delta.format_id, (), 0, ())
    _check(delta.kept_pages <= len(old.pages), f"{where}it keeps {delta.kept_pages} of {len(old.pages)} pages")
    _check(0 <= delta.tail_start <= delta.tail_end < PAGE_TOKENS, f"{where}tail {delta.tail_start}..{delta.tail_end}")
    if delta.format_id != old.format_id:
        _check(delta.kept_pages == 0 and delta.tail_start == 0, f"{where}the format changes under kept pages")
    fragments: tuple[Fragment, ...] = ()
    if delta.tail_start:
        same_page = delta.kept_pages == len(old.pages) and not delta.new_pages
        _check(same_page and delta.tail_start <= old.tail_tokens, f"{where}its tail does not continue the base's")
        fragments = tuple(cut_fragments(old.fragments, delta.tail_start))
    for page in delta.new_pages:
        _check(sum(run.tokens for run in page.runs) == PAGE_TOKENS, f"{where}page {page.page_id} is not full")
    added = delta.tail_end - delta.tail_start
    _check(bool(delta.tail_kv) == bool(added), f"{where}{len(delta.tail_kv)} bytes of KV for {added} tokens")
    layout = layouts(delta.group, delta.format_id) if layouts is not None else None
    if layout is not None:
        _check(
            len(delta.tail_kv) == added * layout.token_bytes, f"{where}{len(delta.tail_kv)} bytes for {added} tokens"
        )
    if added:
        checksum = xxhash.xxh3_128_digest(delta.tail_kv)
        new = Fragment(delta.tail_start, delta.tail_end, delta.tail_end, offset, len(delta.tail_kv), checksum)
        fragments += (new,)
    pages = old.pages[: delta.kept_pages] + delta.new_pages
    if full:
        held = len(pages) * PAGE_TOKENS + delta.tail_end
        _check(held == record.computed_tokens, f"{where}it holds {held} of {record.computed_tokens} computed tokens")
        kept = delta.kept_pages * PAGE_TOKENS + delta.tail_start
        _check(kept <= record.base_tokens, f"{where}it keeps KV of {kept} tokens, its base {record.base_tokens}")
    return SegmentState(delta.group, delta.format_id, pages, delta.tail_end, fragments)


def cut_fragments(fragments: Iterable[Fragment], tokens: int) -> Iterator[Fragment]:
    """Fragments of a tail cut to its first `tokens` tokens."""
    for fragment in fragments:
        if fragment.start < tokens:
            yield fragment if fragment.upto <= tokens else replace(fragment, upto=tokens)


def cut_spans(spans: Iterable[Span], text_bytes: int) -> Iterator[Span]:
    """Spans of a text cut to its first `text_bytes` bytes."""
    for span in spans:
        if text_bytes <= 0:
            return
        yield span if span.text_bytes <= text_bytes else Span(span.kind, text_bytes)
        text_bytes -= span.text_bytes


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join neighbours of one kind and leave out empty ones."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].kind == span.kind:
            merged[-1] = Span(span.kind, merged[-1].text_bytes + span.text_bytes)
        elif span.text_bytes:
            merged.append(span)
    return tuple(merged)


__all__ = [
    "AgentImage",
    "BranchImage",
    "Fragment",
    "Layouts",
    "SegmentState",
    "apply",
    "cut_fragments",
    "cut_spans",
    "merge_spans",
    "replay",
]
