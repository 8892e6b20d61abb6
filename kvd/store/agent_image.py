"""What an agent is after replaying its log. Pure: no disk, no clock, no threads; every value here is immutable.

Theory of operation. `apply` takes an image and one record and returns the next image, or raises `RecordInvalid` and
leaves everything as it was; the swap thread calls it *before* a record is written, so that a log never holds a record
that cannot be replayed. Branches share tuples, forks copy nothing.

Tail KV is not kept: a `Fragment` says where in the log the bytes of some tokens of the open page lie. A fragment is
never rewritten; cutting the tail lowers `upto`. What a rewritten log would save is dead: tails that were sealed or cut,
and ids, text and tails of cuts and of branches that nobody wants any more.

May import kvd.ids, kvd.quant.spec, kvd.vm.text, kvd.store.errors and kvd.store.records only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import xxhash

from kvd.ids import PageId
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.store.errors import RecordInvalid
from kvd.store.records import AgentRecord, PageEntry, PositionRun, SegmentDelta
from kvd.vm.text import Span, cut_spans, merge_spans

Layouts = Callable[[int, str], PageLayout | None]
"""Layout of a cache group's pages in a format; None when it is not known."""

# Upper bounds of what a record takes besides ids, text, names and KV, in bytes (frame, msgpack heads, integers).
_RECORD_BYTES: Final = 160
_SEGMENT_BYTES: Final = 56
_PAGE_BYTES: Final = 8
_RUN_BYTES: Final = 19
_SPAN_BYTES: Final = 11
_META_BYTES: Final = 256


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
    """One segment of a branch: sealed pages, then `tail_tokens` tokens of an open page in `fragments`.

    Attributes:
        segment: index inside the group; 0 when the group has one precision.
        tail_runs: positions of the open page's tokens; empty when they follow the sealed pages.
    """

    group: int
    format_id: str
    pages: tuple[PageEntry, ...]
    tail_tokens: int
    fragments: tuple[Fragment, ...]
    segment: int = 0
    tail_runs: tuple[PositionRun, ...] = ()

    def rewritten_bytes(self) -> int:
        """Bytes that the segment takes in a snapshot record, at most."""
        runs = sum(len(page.runs) for page in self.pages) + len(self.tail_runs)
        names = sum(len(page.page_id) + len(page.key) + _PAGE_BYTES for page in self.pages)
        kv = sum(f.kv_bytes * (f.upto - f.start) // (f.end - f.start) for f in self.fragments)
        return _SEGMENT_BYTES + len(self.format_id) + names + runs * _RUN_BYTES + kv


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

    def segment(self, group: int, segment: int = 0) -> SegmentState:
        """A segment of a cache group; KeyError when there is none."""
        for each in self.segments:
            if (each.group, each.segment) == (group, segment):
                return each
        raise KeyError((group, segment))

    @property
    def uniform(self) -> bool:
        """Whether each group has exactly segment 0 and its tokens follow one another without a gap."""
        return all(each.segment == 0 and not each.tail_runs for each in self.segments)

    def page_ids(self) -> set[PageId]:
        """Every sealed page the branch maps."""
        return {page.page_id for segment in self.segments for page in segment.pages}

    def rewritten_bytes(self) -> int:
        """Bytes that the branch takes in a snapshot record, at most, without names and meta."""
        ids = 4 * (len(self.tokens) + len(self.token_bytes))
        segments = sum(segment.rewritten_bytes() for segment in self.segments)
        return _RECORD_BYTES + ids + len(self.spans) * _SPAN_BYTES + len(self.text) + len(self.numerics) + segments


@dataclass(frozen=True, slots=True)
class AgentImage:
    """An agent: its branches and where its log stands.

    Attributes:
        branches: by branch number.
        current: the branch that the next turn continues.
        meta: accumulated, last record wins key by key.
        seq: number of the last record.
        log_bytes: length of the log's good part.
    """

    namespace: str
    agent: str
    branches: Mapping[int, BranchImage]
    current: int
    meta: Mapping[str, object] = field(default_factory=dict)
    seq: int = 0
    log_bytes: int = 0

    @property
    def branch(self) -> BranchImage:
        """The current branch."""
        return self.branches[self.current]

    @property
    def dead_bytes(self) -> int:
        """Bytes that compaction would save when every branch is kept."""
        return self.dead_bytes_without(self.branches)

    def dead_bytes_without(self, keep: Collection[int]) -> int:
        """Bytes that compaction would save, of which ids, text and tails of branches let go of are a part.

        Args:
            keep: branches still wanted; the current one counts as such anyway.
        """
        return max(0, self.log_bytes - self.rewritten_bytes(keep))

    def rewritten_bytes(self, keep: Collection[int]) -> int:
        """Length of a log of snapshots of these branches and the current one, at most (one small estimate apart: meta).

        Branches that share a prefix share it in the log, not in snapshots: this may exceed `log_bytes`.
        """
        kept = [branch for number, branch in self.branches.items() if number in keep or number == self.current]
        names = len(self.agent.encode()) + len(self.namespace.encode())
        return _META_BYTES + sum(names + branch.rewritten_bytes() for branch in kept)

    def compaction_due(self, page_bytes: int, keep: Collection[int] | None = None) -> bool:
        """Whether rewriting pays: a page of dead bytes, and as much dead as alive (so wear stays bounded, P26).

        Args:
            page_bytes: bytes of a page of all groups.
            keep: branches still wanted; None: all.
        """
        dead = self.dead_bytes_without(self.branches if keep is None else keep)
        return dead >= max(page_bytes, self.log_bytes - dead)

    def without_open_pages(self) -> AgentImage:
        """The agent as its full pages, text and ids say it: no KV in the log. Branches of several segments stay."""
        return replace(self, branches={number: _without_open_page(each) for number, each in self.branches.items()})

    def without(self, branch: int) -> AgentImage | None:
        """The agent without a branch, the newest other one current; None when there is no other."""
        others = {number: each for number, each in self.branches.items() if number != branch}
        return replace(self, branches=others, current=max(others)) if others else None

    @property
    def used_s(self) -> float:
        """Wall clock of the last record of any branch, compactions apart."""
        return max((branch.time_s for branch in self.branches.values()), default=0.0)

    @property
    def ttl_s(self) -> float | None:
        """The agent ends so long after its last use; None: never, or what the log says of it is no such thing."""
        found = self.meta.get("ttl_s")
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) and found > 0 else None

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


def _without_open_page(branch: BranchImage) -> BranchImage:
    if not branch.uniform or not any(segment.tail_tokens for segment in branch.segments):
        return branch
    segments = tuple(replace(each, tail_tokens=0, fragments=(), tail_runs=()) for each in branch.segments)
    return replace(branch, segments=segments, computed_tokens=branch.computed_tokens // PAGE_TOKENS * PAGE_TOKENS)


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
    changed = _next_branch(_base(image, record), record, payload_end - kv_bytes, layouts, full_groups)
    return replace(
        image,
        branches={**image.branches, record.branch: changed},
        current=record.branch,
        meta={**image.meta, **record.meta},
        seq=record.seq,
        log_bytes=payload_end,
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
    # only a snapshot may say that KV was given up: in a turn's record a gap is a bug
    most_pending = len(tokens) if record.kind == "snapshot" else 1
    _check(
        0 <= len(tokens) - record.computed_tokens <= most_pending,
        f"{record.computed_tokens} of {len(tokens)} are computed",
    )
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
    names = [(delta.group, delta.segment) for delta in record.segments]
    known = {(segment.group, segment.segment): segment for segment in base.segments}
    _check(len(set(names)) == len(names), "it names a segment twice")
    _check(known.keys() <= set(names), "it leaves out a segment")
    for group in {delta.group for delta in record.segments}:
        if full_groups is None or group in full_groups:
            _check_full(group, [delta for delta in record.segments if delta.group == group], record)
    offsets = list(itertools.accumulate((len(delta.tail_kv) for delta in record.segments), initial=kv_offset))
    for name, delta, offset in sorted(zip(names, record.segments, offsets[:-1], strict=True), key=lambda each: each[0]):
        yield _segment(known.get(name), delta, offset, layouts)


def _check_full(group: int, deltas: list[SegmentDelta], record: AgentRecord) -> None:
    """All segments of a group together hold every computed token, and keep none beyond the base's."""
    kept = sum(delta.kept_pages * PAGE_TOKENS + delta.tail_start for delta in deltas)
    held = sum((delta.kept_pages + len(delta.new_pages)) * PAGE_TOKENS + delta.tail_end for delta in deltas)
    _check(held == record.computed_tokens, f"group {group}: it holds {held} of {record.computed_tokens} computed")
    _check(kept <= record.base_tokens, f"group {group}: it keeps KV of {kept} tokens, its base {record.base_tokens}")


def _segment(
    old: SegmentState | None,
    delta: SegmentDelta,
    offset: int,
    layouts: Layouts | None,
) -> SegmentState:
    where = f"group {delta.group}: "
    old = old or SegmentState(delta.group, delta.format_id, (), 0, (), delta.segment)
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
    placed = sum(run.tokens for run in delta.tail_runs)
    _check(placed in (0, delta.tail_end), f"{where}its tail of {delta.tail_end} tokens has {placed} positions")
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
    return SegmentState(
        delta.group, delta.format_id, pages, delta.tail_end, fragments, delta.segment, tuple(delta.tail_runs)
    )


def cut_fragments(fragments: Iterable[Fragment], tokens: int) -> Iterator[Fragment]:
    """Fragments of a tail cut to its first `tokens` tokens."""
    for fragment in fragments:
        if fragment.start < tokens:
            yield fragment if fragment.upto <= tokens else replace(fragment, upto=tokens)


__all__ = [
    "AgentImage",
    "BranchImage",
    "Fragment",
    "Layouts",
    "SegmentState",
    "apply",
    "cut_fragments",
]
