"""Agents as the engine holds them: branches of typed text, token ids and an address space each.

Theory of operation. A branch is what a client would call the conversation: text in typed spans, the token ids that
stand for it (kept exactly as they were computed, since the same text may tokenise otherwise), and how many of them
have KV. `Baseline` remembers how much of the branch the agent's log holds, as the least of every cut since the last
commit; the next record says only what lies beyond it. So a turn that could not be committed (full disk) is simply part
of the next record.

Owner: the engine thread. May import kvd.ids, kvd.errors, kvd.vm and kvd.store.records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kvd.ids import PageId, SpaceId
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.requests import AgentRef
from kvd.store.records import AgentRecord, PageEntry, PositionRun, RecordKind, SegmentDelta
from kvd.vm.text import Span, SpanKind, TypedText, cut_spans, merge_spans, rest_of

NOT_WRITTEN = "not written yet"
"""Why a change is not durable that nobody has tried to write so far."""

FIRST_BRANCH = 1
"""Number of an agent's first branch."""

MAX_BRANCHES = 4
"""Branches an agent keeps beside its current one; the least recently used is let go of first."""


@dataclass(slots=True)
class Baseline:
    """How much of a branch the log holds and is still true.

    Attributes:
        parent: branch whose logged state is the base; None when it is this branch's own (or nothing).
        tokens, text_bytes: prefix of the base that stands.
        logged_pages: sealed pages a segment had when it was logged.
        pages: of those, the ones that still stand.
        tail: tokens of the base's open page that still stand.
        logged_tokens, logged_computed: how long the base was when it was logged.
    """

    parent: int | None = None
    tokens: int = 0
    text_bytes: int = 0
    logged_pages: int = 0
    pages: int = 0
    tail: int = 0
    logged_tokens: int = 0
    logged_computed: int = 0

    def cut(self, *, tokens: int, text_bytes: int, computed: int) -> None:
        """The branch was cut: what lies beyond stands no more.

        Args:
            tokens: ids kept.
            text_bytes: text bytes kept.
            computed: tokens whose KV was kept (at most `tokens`).
        """
        self.tokens = min(self.tokens, tokens)
        self.text_bytes = min(self.text_bytes, text_bytes)
        if computed < self.pages * PAGE_TOKENS + self.tail:
            self.pages = min(self.pages, computed // PAGE_TOKENS)
            intact = self.pages == self.logged_pages
            self.tail = min(self.tail, computed - self.pages * PAGE_TOKENS) if intact else 0


@dataclass(slots=True)
class Branch:
    """One branch of an agent. See the module docstring.

    Attributes:
        branch_id: its number in the agent's log.
        space: its address space.
        format_ids: page format per cache group.
        tokens: ids.
        token_bytes: bytes of text each id stands for.
        spans: kinds of the text, in order.
        text: UTF-8.
        computed: tokens with KV.
        baseline: what of it the log holds.
        last_used: the registry's tick at its last use.
        logged: the log knows the branch (as it is, or as it was).
        doubtful: the store knows no durable copy of a page that is not in RAM: it must be read to see what is true.
        missing: pages behind a window of which the store knows no durable copy either: nothing needs them until the
            branch is cut back to where they are seen.
        borrowed_pages: pages at its beginning that another agent computed.
    """

    branch_id: int
    space: SpaceId
    format_ids: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    token_bytes: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)
    computed: int = 0
    baseline: Baseline = field(default_factory=Baseline)
    last_used: int = 0
    logged: bool = False
    doubtful: bool = False
    missing: frozenset[PageId] = frozenset()
    borrowed_pages: int = 0

    @property
    def behind(self) -> bool:
        """True when more than the pending token lacks KV (lost pages): no record but a snapshot says that."""
        return len(self.tokens) - self.computed > 1

    @property
    def saved(self) -> bool:
        """True when the log holds the branch exactly as it is."""
        base = self.baseline
        return (
            base.parent is None
            and base.tokens == base.logged_tokens == len(self.tokens)
            and base.pages * PAGE_TOKENS + base.tail == base.logged_computed == self.computed
        )

    @property
    def durable(self) -> bool:
        """True when nothing of the branch is lost with the process; the log may say more (KV that turned out lost)."""
        base = self.baseline
        return (
            base.parent is None
            and base.tokens == base.logged_tokens == len(self.tokens)
            and base.pages * PAGE_TOKENS + base.tail == self.computed
        )

    @property
    def typed(self) -> TypedText:
        """Text and spans as the matcher takes them."""
        return TypedText(bytes(self.text), tuple(self.spans))

    def text_bytes_of(self, tokens: int) -> int:
        """Text bytes that the first `tokens` ids stand for; all of them cost nothing to count."""
        return len(self.text) if tokens >= len(self.token_bytes) else sum(self.token_bytes[:tokens])

    def append(self, kind: SpanKind, data: bytes, ids: Sequence[int], token_bytes: Sequence[int]) -> None:
        """Add text of one kind and its ids. `sum(token_bytes) == len(data)`."""
        self.append_typed(TypedText(data, (Span(kind, len(data)),)), ids, token_bytes)

    def append_typed(self, typed: TypedText, ids: Sequence[int], token_bytes: Sequence[int]) -> None:
        """Add typed text and its ids. A token may cover the end of one span and the start of the next.

        Raises:
            ValueError: the lengths of the tokens or of the spans do not add up to the text; nothing was added.
        """
        spans_bytes = sum(span.text_bytes for span in typed.spans)
        if not sum(token_bytes) == spans_bytes == len(typed.data):
            raise ValueError(
                f"tokens of {sum(token_bytes)} and spans of {spans_bytes} bytes for a text of {len(typed.data)}"
            )
        self.spans[-1:] = merge_spans([*self.spans[-1:], *typed.spans])
        self.text += typed.data
        self.tokens.extend(ids)
        self.token_bytes.extend(token_bytes)

    def cut(self, tokens: int) -> None:
        """Keep the first `tokens` ids and their text; KV beyond them is gone too."""
        kept_bytes = self.text_bytes_of(tokens)
        del self.tokens[tokens:], self.token_bytes[tokens:], self.text[kept_bytes:]
        self.spans = cut_spans(self.spans, kept_bytes)
        self.computed = min(self.computed, tokens)
        self.borrowed_pages = min(self.borrowed_pages, self.computed // PAGE_TOKENS)
        self.baseline.cut(tokens=tokens, text_bytes=kept_bytes, computed=self.computed)

    def drop_kv_from(self, computed: int) -> None:
        """KV from token `computed` on is gone (a lost page); the ids stay and are computed again."""
        self.computed = min(self.computed, computed)
        self.borrowed_pages = min(self.borrowed_pages, self.computed // PAGE_TOKENS)
        self.baseline.cut(tokens=len(self.tokens), text_bytes=len(self.text), computed=self.computed)

    def border_at_most(self, tokens: int) -> int:
        """Largest count <= `tokens` after which the text ends on a character border."""
        offset = self.text_bytes_of(tokens)
        while tokens and offset < len(self.text) and self.text[offset] & 0xC0 == 0x80:
            tokens -= 1
            offset -= self.token_bytes[tokens]
        return tokens


@dataclass(slots=True)
class TurnFigures:
    """What turns came to, since the start.

    Attributes:
        turns: that were let in and ended, however.
        prompt_tokens, cached_tokens, completion_tokens: sums; of the last, what turns made themselves.
        last: facts of the last one, as a monitor shows them; None before there is one.
    """

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    last: Mapping[str, object] | None = None

    def note(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """A turn ended."""
        self.turns += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.completion_tokens += completion_tokens


@dataclass(slots=True)
class Agent:
    """An agent: its branches, its place in its log.

    Attributes:
        ref: namespace and name.
        branches: by branch id.
        current: branch the last turn used.
        next_branch: id the next new branch gets.
        seq: number of the last record that is (or may be) in the log.
        refused: why the last record was not written, or that one has to be; None when there is none to write.
        last_save: tick of the last try to save what a disk refused.
        dropped_branches: branches let go of that the log still holds.
        dropped_bytes: bytes of pages that only they mapped; their files stay while the log names them.
        compaction_due: so much of the log is dead that rewriting it pays.
        compaction_urgent: the quota waits for it: it goes ahead of requests.
        counted_on: a full quota has counted on what it will free, and does not do so again before it was made.
        pinned: the user pinned the agent: its current branch is held in RAM.
        logged: the agent has a log on disk.
        created_s: wall clock of the first record.
        ttl_s: it ends so long after its last use; None: never.
        used_s: wall clock of its last use, as `EngineCore.wall_s` tells it.
        turns: what its turns came to.
    """

    ref: AgentRef
    branches: dict[int, Branch] = field(default_factory=dict)
    current: int = 0
    next_branch: int = FIRST_BRANCH
    seq: int = 0
    refused: str | None = None
    last_save: int = 0
    dropped_branches: list[int] = field(default_factory=list)
    dropped_bytes: int = 0
    compaction_due: bool = False
    compaction_urgent: bool = False
    counted_on: bool = False
    pinned: bool = False
    created_s: float = 0.0
    ttl_s: float | None = None
    used_s: float = 0.0
    logged: bool = False
    turns: TurnFigures = field(default_factory=TurnFigures)

    @property
    def branch(self) -> Branch:
        """The current branch."""
        return self.branches[self.current]

    @property
    def unsaved(self) -> str | None:
        """Why the newest state is not durable; None when every branch and the agent's own facts are."""
        if self.refused is not None:
            return self.refused
        return None if all(branch.durable for branch in self.branches.values()) else NOT_WRITTEN

    @property
    def other_branches(self) -> list[Branch]:
        """The branches beside the current one."""
        return [branch for branch in self.branches.values() if branch.branch_id != self.current]

    def spare_branches(self) -> list[Branch]:
        """Of these, those that can be let go of, least recently used first.

        One that another branch's unwritten record leans on stays until that record is written.
        """
        leaned_on = {branch.baseline.parent for branch in self.branches.values()}
        spare = [branch for branch in self.other_branches if branch.branch_id not in leaned_on]
        return sorted(spare, key=lambda branch: branch.last_used)


@dataclass(frozen=True, slots=True)
class SegmentNow:
    """A segment's present state, as the record builder needs it.

    Attributes:
        pages: sealed pages there are.
        entries: those from a number on, in order; asked for the ones that a record names, which are few of many.
        tail_tokens: tokens of the open page.
        extract: bytes of tokens [start, end) of the open page.
    """

    pages: int
    entries: Callable[[int], tuple[PageEntry, ...]]
    tail_tokens: int
    extract: Callable[[int, int], bytes]


@lru_cache(maxsize=4096)
def page_runs(page_number: int) -> tuple[PositionRun, ...]:
    """Position runs of page `page_number` of a uniform segment: one run of a page's tokens."""
    return (PositionRun(page_number * PAGE_TOKENS, PAGE_TOKENS),)


def build_record(
    agent: Agent,
    branch: Branch,
    segments: Sequence[SegmentNow],
    *,
    kind: RecordKind,
    time_s: float,
    numerics: str,
    meta: Mapping[str, object],
) -> AgentRecord:
    """The record that brings the log from the branch's baseline to its present state.

    Args:
        agent: whose log.
        branch: the branch to record; it becomes current on replay.
        segments: one per cache group.
        kind: what happened.
        time_s: wall clock, seconds since the epoch.
        numerics: version of the arithmetic that computed the KV.
        meta: facts of the agent as a whole; the last record's win.
    """
    base = branch.baseline
    deltas: list[SegmentDelta] = []
    for group, segment in enumerate(segments):
        kept_pages = min(base.pages, segment.pages)
        same_open_page = base.pages == base.logged_pages == segment.pages
        tail_start = min(base.tail, segment.tail_tokens) if same_open_page else 0
        deltas.append(
            SegmentDelta(
                group=group,
                format_id=branch.format_ids[group],
                kept_pages=kept_pages,
                new_pages=segment.entries(kept_pages) if kept_pages < segment.pages else (),
                tail_start=tail_start,
                tail_end=segment.tail_tokens,
                tail_kv=segment.extract(tail_start, segment.tail_tokens) if segment.tail_tokens > tail_start else b"",
            )
        )
    return AgentRecord(
        seq=agent.seq + 1,
        agent=agent.ref.agent,
        namespace=agent.ref.namespace,
        kind=kind,
        branch=branch.branch_id,
        # a base of nothing needs no parent (which may itself not be in the log yet)
        parent=base.parent if base.tokens else None,
        base_tokens=base.tokens,
        base_text_bytes=base.text_bytes,
        token_ids=tuple(branch.tokens[base.tokens :]),
        token_bytes=tuple(branch.token_bytes[base.tokens :]),
        spans=rest_of(branch.typed, base.text_bytes).spans,
        text=bytes(branch.text[base.text_bytes :]),
        computed_tokens=branch.computed,
        segments=tuple(deltas),
        time_s=time_s,
        numerics=numerics,
        meta=dict(meta),
    )


def mark_committed(branch: Branch, siblings: Iterable[Branch] = ()) -> None:
    """The log now holds the branch as it is.

    A sibling whose own first record is still to come leaned on what the log held of this branch before. That has
    changed, so its record will say everything.
    """
    pages, tail = divmod(branch.computed, PAGE_TOKENS)
    branch.logged = True
    branch.baseline = Baseline(
        parent=None,
        tokens=len(branch.tokens),
        text_bytes=len(branch.text),
        logged_pages=pages,
        pages=pages,
        tail=tail,
        logged_tokens=len(branch.tokens),
        logged_computed=branch.computed,
    )
    for sibling in siblings:
        if sibling.baseline.parent == branch.branch_id:
            sibling.baseline = Baseline()


def log_is_gone(agent: Agent) -> None:
    """The agent's log does not exist (any more): its next records stand alone."""
    agent.logged = False
    agent.dropped_branches.clear()
    agent.dropped_bytes = 0
    for branch in agent.branches.values():
        branch.logged = False
        branch.baseline = Baseline()


def baseline_on_parent(parent: Branch, *, tokens: int) -> Baseline:
    """Baseline of a branch that starts as the first `tokens` ids of `parent`.

    When the parent's own newest state is not in the log, what the log has of it cannot serve as a base beyond what
    still stands; the parent's baseline says exactly that.
    """
    base = parent.baseline
    own = Baseline(
        # a parent that is itself not logged yet leans on its own parent's logged state
        parent=base.parent if base.parent is not None else parent.branch_id,
        tokens=base.tokens,
        text_bytes=base.text_bytes,
        logged_pages=base.logged_pages,
        pages=base.pages,
        tail=base.tail,
        logged_tokens=base.logged_tokens,
        logged_computed=base.logged_computed,
    )
    own.cut(tokens=tokens, text_bytes=parent.text_bytes_of(tokens), computed=min(parent.computed, tokens))
    return own
