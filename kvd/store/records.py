"""The delta log's record: one turn (or rollback, snapshot) of one agent, as plain data.

A record says how one branch of an agent changed. Replaying all records of a log gives the agent: `AgentImage` in
`kvd.store.agent_image`. Tail KV travels as *fragments*: bytes of tokens [start, end) of the open page, sliced from the
frame in `PageLayout` tensor order, each tensor `[kv_heads, end - start, width]` C-contiguous.

May import kvd.ids and kvd.vm.text only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvd.ids import PageId, PageKey
from kvd.vm.text import Span

RecordKind = Literal["create", "turn", "rollback", "snapshot"]


@dataclass(frozen=True, slots=True)
class PositionRun:
    """Tokens [start, start + tokens) of the address space; a page holds one or more runs."""

    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A sealed page as the log names it."""

    page_id: PageId
    key: PageKey
    runs: tuple[PositionRun, ...]


@dataclass(frozen=True, slots=True)
class SegmentDelta:
    """How one segment changed. A cache group of one precision has exactly segment 0.

    Attributes:
        group: cache group.
        format_id: page format of this segment.
        kept_pages: sealed pages of the base that stay mapped.
        new_pages: sealed pages appended after them.
        tail_start: first token (inside the open page) the fragment holds; 0 when a new page was opened.
        tail_end: tokens of the open page after this record; `tail_end == 0` means no open page.
        tail_kv: the fragment, tokens [tail_start, tail_end) of the open page.
        segment: index inside the group.
        tail_runs: positions of all tokens of the open page after this record; empty when they follow the sealed pages
            without a gap.
    """

    group: int
    format_id: str
    kept_pages: int
    new_pages: tuple[PageEntry, ...]
    tail_start: int
    tail_end: int
    tail_kv: bytes
    segment: int = 0
    tail_runs: tuple[PositionRun, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """One change of one branch of an agent.

    Attributes:
        seq: 1, 2, 3 … inside the log; a gap ends replay.
        agent, namespace: whose log this is.
        kind: what happened. `snapshot` carries a whole branch (compaction writes one per branch).
        branch: the branch this record changes and makes current.
        parent: branch it was forked from, whose state is then the base (None: it continues `branch` itself).
        base_tokens: tokens of the base that stay; everything after them is replaced by this record.
        base_text_bytes: text bytes of the base that stay.
        token_ids: ids appended.
        token_bytes: for each appended token the UTF-8 bytes it stands for (0 inside a replacement run).
        spans: spans appended (a first span of the same kind as the base's last one continues it).
        text: UTF-8 bytes appended.
        computed_tokens: tokens with KV after this record; `len(tokens) - computed_tokens` is 0 or 1 (pending),
            or more in a `snapshot` of an agent whose KV was given up.
        segments: one per segment of each cache group.
        time_s: wall clock, seconds since the epoch (for people only).
        numerics: version of the arithmetic and of the codec that computed the KV.
        meta: small extra facts (`pinned`: bool, `created_s`, `ttl_s`…); the last record's wins key by key.
    """

    seq: int
    agent: str
    namespace: str
    kind: RecordKind
    branch: int
    parent: int | None
    base_tokens: int
    base_text_bytes: int
    token_ids: tuple[int, ...]
    token_bytes: tuple[int, ...]
    spans: tuple[Span, ...]
    text: bytes
    computed_tokens: int
    segments: tuple[SegmentDelta, ...]
    time_s: float
    numerics: str
    meta: dict[str, object] = field(default_factory=dict)
