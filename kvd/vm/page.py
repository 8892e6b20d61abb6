"""One page: its state, its frame and who maps it; the legal moves are a table.

Theory of operation. A page starts as an empty private tail (FILLING). Sealed, it is written to swap once and may then
lose and regain its frame any number of times. A tail that no step needs is packed: its tokens alone stay in RAM, and
the frame, which has room for a whole page, goes. Its bytes leave RAM only when the agent's log holds all of it:

    FILLING ─► SEALED_DIRTY ─► WRITING ─► CLEAN ─► EVICTED ─► LOADING ─► CLEAN
     │ ▲  ▲         ▲             │                             │
     │ │  │         └── failed ───┘                             └─ failed ─► LOST
     │ ▼  │
     │ PACKED
     ▼ ▼  │
    STASHED ─► LOADING_TAIL ─► FILLING (or LOST)

An EVICTED page whose file is known to be gone is LOST without being read.

A page in flight (WRITING, LOADING, LOADING_TAIL) is never RELEASED: when its last user lets go it stays in the table,
with its frame, until the transfer ends. So a frame number is never reused under a transfer that still names it.

May import kvd.ids and kvd.vm.errors only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, get_args

from kvd.ids import DEFAULT_NAMESPACE, FrameId, GroupId, Namespace, PageId, PageKey, SpaceId
from kvd.vm.errors import IllegalTransition

HISTORY_MOVES: Final = 12
"""Moves a page remembers for its error messages; two full trips to swap and back."""


PrefetchReason = Literal["queued", "hint", "predicted"]
"""Why a page is loaded though nobody demands it: a turn of its space waits, a client said so, or it is expected."""

PREFETCH_REASONS: Final[tuple[PrefetchReason, ...]] = get_args(PrefetchReason)


class PageState(StrEnum):
    """Where a page's bytes are."""

    FILLING = "filling"
    SEALED_DIRTY = "sealed_dirty"
    WRITING = "writing"
    CLEAN = "clean"
    EVICTED = "evicted"
    LOADING = "loading"
    PACKED = "packed"
    STASHED = "stashed"
    LOADING_TAIL = "loading_tail"
    LOST = "lost"
    RELEASED = "released"


_S = PageState

TRANSITIONS: Final[dict[PageState, frozenset[PageState]]] = {
    _S.FILLING: frozenset({_S.SEALED_DIRTY, _S.PACKED, _S.STASHED, _S.RELEASED}),
    _S.SEALED_DIRTY: frozenset({_S.WRITING, _S.RELEASED}),
    _S.WRITING: frozenset({_S.CLEAN, _S.SEALED_DIRTY}),
    _S.CLEAN: frozenset({_S.EVICTED, _S.SEALED_DIRTY, _S.RELEASED}),
    _S.EVICTED: frozenset({_S.LOADING, _S.LOST, _S.RELEASED}),
    _S.LOADING: frozenset({_S.CLEAN, _S.LOST}),
    _S.PACKED: frozenset({_S.FILLING, _S.STASHED, _S.RELEASED}),
    _S.STASHED: frozenset({_S.LOADING_TAIL, _S.RELEASED}),
    _S.LOADING_TAIL: frozenset({_S.FILLING, _S.LOST}),
    _S.LOST: frozenset({_S.RELEASED}),
    _S.RELEASED: frozenset(),
}

FIRST_STATES: Final = frozenset({_S.FILLING, _S.EVICTED, _S.PACKED, _S.STASHED})
"""States a page may be born in: a new tail, a page known from swap, a tail that a cut copied, one known from the log.
"""

RESIDENT: Final = frozenset({_S.FILLING, _S.SEALED_DIRTY, _S.WRITING, _S.CLEAN, _S.LOADING, _S.LOADING_TAIL})
"""States that own a frame."""

READABLE: Final = frozenset({_S.FILLING, _S.SEALED_DIRTY, _S.WRITING, _S.CLEAN})
"""States whose frame holds the page's bytes, so that a step may read it."""

IN_RAM: Final = READABLE | {_S.PACKED}
"""States whose bytes are in RAM, so that they can be copied, recorded and exported without the disk."""

OPEN: Final = frozenset({_S.FILLING, _S.PACKED})
"""States of a tail whose bytes are in RAM."""

STORED: Final = frozenset({_S.EVICTED, _S.STASHED})
"""States whose bytes are on disk only and can be loaded."""

LOADING: Final = frozenset({_S.LOADING, _S.LOADING_TAIL})
"""States of a page on its way in: it owns a frame, whose memory is a read buffer yet."""

IN_FLIGHT: Final = LOADING | {_S.WRITING}
"""States with a transfer under way."""


@dataclass(slots=True, eq=False)
class SpaceUse:
    """How a space is being used, as its pages see it. Owned and mutated by the pager (counters by the page table).

    Attributes:
        space: whose use this is.
        last_used: the pager's own tick at the last use; larger is later.
        active: a request runs on the space.
        pinned: the user pinned the space.
        unpinned_pages: of a pinned space, pages that it needs and its pin does not hold (`kvd.vm.pins`).
        passing: nobody is expected to come back to it.
        pin_changes: how often what its pin holds changed.
        evict_wanted: the user asked to evict it and nothing has used it since.
        hint: `queued` or `hint` while it is to be loaded ahead for a turn; None when it is not, or since it ran.
        predicted: how soon it is expected to run, 0 the soonest; None when it is not expected.
        last_turn: the pager's turn clock (requests that started, of all spaces, from 1) when its last one did; 0: none.
        gaps_turns: distances between its last three turns on that clock, older first; fewer when it had fewer.
        faults: sealed pages loaded since it was created, because it demanded them.
        absent_pages: mapped pages that a step needs and could not read now.
        stored_bytes: of these, bytes of pages that can be loaded (EVICTED, STASHED).
        lost_pages: of these, pages that are lost.
        packed_pages: of these, tails that are packed.
        ram_pages: mapped pages whose bytes are in RAM, wherever they lie.
        changed_at: the pager's tick when the state, window or sharing of one of its pages last changed.
        behind_window: mapped pages that no step can see, since they lie before a group's window. They count as neither
            absent nor lost, and nothing is done to have them in RAM.
    """

    space: SpaceId
    last_used: int = 0
    active: bool = False
    pinned: bool = False
    unpinned_pages: set[PageId] = field(default_factory=set)
    pin_changes: int = 0
    passing: bool = False
    evict_wanted: bool = False
    hint: PrefetchReason | None = None
    predicted: int | None = None
    last_turn: int = 0
    gaps_turns: tuple[int, ...] = ()
    faults: int = 0
    absent_pages: int = 0
    stored_bytes: int = 0
    lost_pages: int = 0
    packed_pages: int = 0
    ram_pages: int = 0
    changed_at: int = 0
    behind_window: set[PageId] = field(default_factory=set)

    @property
    def held(self) -> bool:
        """True when no page that the space needs may be evicted."""
        return self.active or (self.pinned and not self.unpinned_pages)

    @property
    def demands(self) -> bool:
        """True when pages of the space are demanded: all of them, or those that its pin holds."""
        return self.active or self.pinned

    def holds(self, page_id: PageId) -> bool:
        """True when a page that the space needs must not be evicted."""
        return self.active or (self.pinned and page_id not in self.unpinned_pages)

    @property
    def claim(self) -> tuple[int, int]:
        """How much it is expected to run; a prefetch takes frames only from spaces whose claim is less."""
        if self.hint is not None:
            return (2, 0)
        return (0, 0) if self.predicted is None else (1, -self.predicted)

    @property
    def eviction_claim(self) -> tuple[int, int]:
        """As `claim`, for evictions: pages of the space with the least claim go first, whatever the policy.

        A client's hint counts as a use and no more: nobody says that the turn it was for will ever come. The claim of a
        passing space is less than none.
        """
        claim = (0, 0) if self.hint == "hint" and self.predicted is None else self.claim
        return (-1, 0) if self.passing and claim == (0, 0) else claim

    def began(self, turn: int) -> None:
        """A request starts on the space, at this turn of the pager's turn clock."""
        if self.last_turn:
            self.gaps_turns = (*self.gaps_turns[-1:], turn - self.last_turn)
        self.last_turn = turn


@dataclass(slots=True, eq=False)
class Page:
    """One page of one cache group. Owned by the page table, which alone changes state, frame and bytes.

    Attributes:
        page_id: unique for ever.
        group: cache group.
        page_bytes: bytes of a frame that holds it.
        state: where its bytes are.
        namespace: of the agents whose spaces map it; none maps a page of another namespace.
        tokens: tokens it holds; less than a page only for tails and growth pages.
        durable_tokens: for tails, tokens the agent's log is known to hold.
        key: look-up key, None while filling.
        frame: its frame, None when it has none.
        ram_bytes: what it takes in RAM now: a frame's bytes, or while it is packed those of its tokens.
        users: who maps it, by space; a tail has exactly one.
        keepers: cuts to come that need the page in RAM.
        prefetched: why it was loaded ahead, while it is in RAM and nobody has needed it since.
        evicted_at_bytes: of a page evicted for room, the pager's eviction clock just after that (see
            `Transfers.count_fault`); None since it is on its way in again.
        code: its state and whether it is shared, as maps show them (`kvd.vm.codes`).
        history: recent (pager tick, state) pairs, oldest first.
    """

    page_id: PageId
    group: GroupId
    page_bytes: int
    state: PageState
    namespace: Namespace = DEFAULT_NAMESPACE
    tokens: int = 0
    durable_tokens: int = 0
    key: PageKey | None = None
    frame: FrameId | None = None
    ram_bytes: int = 0
    users: dict[SpaceId, SpaceUse] = field(default_factory=dict)
    keepers: int = 0
    prefetched: PrefetchReason | None = None
    evicted_at_bytes: int | None = None
    code: int = 0
    history: deque[tuple[int, PageState]] = field(default_factory=lambda: deque(maxlen=HISTORY_MOVES))

    @property
    def needed_by(self) -> list[SpaceUse]:
        """The uses of the spaces whose next step sees it."""
        return [use for use in self.users.values() if self.page_id not in use.behind_window]

    @property
    def is_behind_window(self) -> bool:
        """True when spaces map it, none of which could see it in its next step, and no cut to come needs it."""
        return not self.keepers and bool(self.users) and not self.needed_by

    @property
    def held(self) -> bool:
        """True when an active or pinned space needs it, or a cut to come does."""
        return self.keepers > 0 or any(use.holds(self.page_id) for use in self.needed_by)

    @property
    def droppable(self) -> bool:
        """True when its bytes can be dropped at once without losing a token: CLEAN, or a tail durable to its end."""
        if self.state in OPEN:
            return 0 < self.tokens == self.durable_tokens
        return self.state is PageState.CLEAN

    @property
    def stored_state(self) -> PageState:
        """The state it takes when its bytes are dropped: EVICTED, or STASHED for a tail."""
        return PageState.STASHED if self.state in OPEN else PageState.EVICTED

    @property
    def packable(self) -> bool:
        """True when it is a tail in a frame that neither a step nor a cut to come needs."""
        return self.state is PageState.FILLING and self.tokens > 0 and not self.held

    def check_move(self, state: PageState) -> None:
        """Refuse a move that the table does not have.

        Raises:
            IllegalTransition: with the page's recent history; the page is unchanged.
        """
        if state not in TRANSITIONS[self.state]:
            trail = " -> ".join(f"{past}@{tick}" for tick, past in self.history)
            raise IllegalTransition(
                f"page {self.page_id} cannot go from {self.state} to {state}; history: {trail}",
                page=str(self.page_id),
                state=str(self.state),
                wanted=str(state),
                history=[[tick, str(past)] for tick, past in self.history],
            )
