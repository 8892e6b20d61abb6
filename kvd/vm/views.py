"""What can be seen of the pager: frozen pictures for logs, `residency`, `statistics` and the engine's records.

May import kvd.ids, kvd.vm.events, kvd.vm.page and kvd.vm.prefetch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvd.ids import FrameId, GroupId, Namespace, PageId, SpaceId
from kvd.vm.address_space import AddressSpace, Segment
from kvd.vm.events import PageRef
from kvd.vm.page import OPEN, STORED, Page, PageState, PrefetchReason
from kvd.vm.page_table import PageTable
from kvd.vm.prefetch import PrefetchFigures


@dataclass(frozen=True, slots=True)
class PageView:
    """A sealed page as a space maps it.

    Attributes:
        ref: id and key.
        state: where its bytes are.
        frame: its frame, None when not resident.
        shared_spaces: spaces that map it.
        behind_window: the space's next step cannot see it: it lies before the window of its group.
    """

    ref: PageRef
    state: PageState
    frame: FrameId | None
    shared_spaces: int
    behind_window: bool = False


@dataclass(frozen=True, slots=True)
class TailView:
    """The private page that is filling.

    Attributes:
        page_id: its id; the sealed page will carry it too.
        state: where its bytes are.
        frame: its frame, None when it has none.
        tokens: tokens it holds.
        durable_tokens: of these, tokens known to be in the agent's log.
        ram_bytes: what it takes in RAM: a frame's bytes, those of its tokens while it is packed, or nothing.
    """

    page_id: PageId
    state: PageState
    frame: FrameId | None
    tokens: int
    durable_tokens: int
    ram_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentView:
    """One segment: sealed pages in order, the tail (None at a page border), frames mapped for growth."""

    group: GroupId
    pages: tuple[PageView, ...]
    tail: TailView | None
    growth_frames: tuple[FrameId, ...]

    @property
    def refs(self) -> tuple[PageRef, ...]:
        """The sealed pages as records and forks name them."""
        return tuple(page.ref for page in self.pages)

    @property
    def tail_tokens(self) -> int:
        """Tokens of the tail; 0: no tail."""
        return self.tail.tokens if self.tail is not None else 0


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of a space is where. Pages are counted over all groups.

    Attributes:
        space: whose residency.
        tokens: tokens that have KV.
        active: a request runs on it.
        pinned: the user pinned it.
        last_used: the pager's tick at its last use; larger is later.
        total_pages: pages that hold tokens, tails included.
        behind_window_pages: of these, pages its next step cannot see, wherever they are; the others are needed.
        resident_pages: needed pages that are in RAM: those a step can read now, and tails that are packed.
        loading_pages: needed pages on their way in.
        stored_pages: needed pages that are only on disk.
        dirty_pages: sealed pages without a swap copy yet, those behind the window included.
        shared_pages: pages other spaces map too.
        lost_pages: needed pages whose load failed.
        resident_bytes: bytes of its frames, growth and what is left behind the window included, and of packed tails.
        needed_bytes: bytes of the needed pages: what it takes when it can run, without growth.
        total_bytes: bytes of all its pages.
        lost_at: position it must be cut to, since a needed page is lost; None when none is.
    """

    space: SpaceId
    tokens: int
    active: bool
    pinned: bool
    last_used: int
    total_pages: int
    behind_window_pages: int
    resident_pages: int
    loading_pages: int
    stored_pages: int
    dirty_pages: int
    shared_pages: int
    lost_pages: int
    resident_bytes: int
    needed_bytes: int
    total_bytes: int
    lost_at: int | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """The pager in figures.

    Attributes:
        budget_bytes: what it may hold.
        usable_bytes: what a demand may take; the rest is reserved for copies.
        high_mark_bytes: frames beyond this are evicted in the background, as far as they are idle.
        low_mark_bytes: down to this.
        converging: a smaller budget was set, and what is held still exceeds it.
        resident_bytes: bytes of all frames, those of loads under way included, and of packed tails.
        packed_bytes: of these, bytes of tails that have no frame.
        peak_resident_bytes: the most that has been.
        peak_total_bytes: the most that frames and copies in flight have been together.
        in_flight_bytes: bytes copied for writes under way, and one page while any comes in.
        dirty_bytes: resident bytes not durable anywhere yet: sealed pages before their write ends, and tails with
            tokens the log does not hold.
        pinned_bytes: resident bytes that active or pinned spaces hold; not evictable.
        pin_limit_bytes: what pins alone may hold together.
        unpinned_bytes: of what pinned spaces need, what that limit leaves out.
        namespaces: resident bytes by namespace; of one without frames there is none.
        quotas: the most that namespaces should have of them, where that is bounded.
        pages: pages by state, growth pages included; every state that a live page can have is a key.
        spaces: address spaces.
        active_spaces: of these, spaces a request runs on.
        waiting_spaces: of these, spaces whose demand is not fully issued.
        shared_pages: pages that two or more spaces map.
        behind_window_pages: pages that no space's next step can see.
        behind_window_bytes: resident bytes of those: they go once they are on disk.
        evictions: frames dropped to make room or on the user's wish, since start.
        reclaimed: of these, frames that nobody had asked for yet: in the background, or for memory's sake.
        window_drops: frames dropped since their pages fell behind a window, since start.
        packs: tails packed, since start; those that a cut copied were never in a frame and do not count.
        unpacks: packed tails put into a frame, since start.
        demanded: pages that spaces needed when requests on them started, in RAM or not, since start.
        faults: pages and tails loaded because a space demanded them, since start.
        refaults: of these, pages that a pool at most twice as large would have kept (see `kvd.vm.transfers`).
        prefetched: what was loaded before anybody demanded it and what became of it, by reason, since start.
        writes: pages handed to swap, since start.
        failed_writes: writes that failed, since start.
        failed_loads: loads that failed, since start.
        eviction: name of the policy that ranks victims.
    """

    budget_bytes: int
    usable_bytes: int
    high_mark_bytes: int
    low_mark_bytes: int
    converging: bool
    resident_bytes: int
    packed_bytes: int
    peak_resident_bytes: int
    peak_total_bytes: int
    in_flight_bytes: int
    dirty_bytes: int
    pinned_bytes: int
    pin_limit_bytes: int
    unpinned_bytes: int
    namespaces: Mapping[Namespace, int]
    quotas: Mapping[Namespace, int]
    pages: Mapping[str, int]
    spaces: int
    active_spaces: int
    waiting_spaces: int
    shared_pages: int
    behind_window_pages: int
    behind_window_bytes: int
    evictions: int
    reclaimed: int
    window_drops: int
    packs: int
    unpacks: int
    demanded: int
    faults: int
    refaults: int
    prefetched: Mapping[PrefetchReason, PrefetchFigures]
    writes: int
    failed_writes: int
    failed_loads: int
    eviction: str


@dataclass(frozen=True, slots=True)
class Paging:
    """Totals since start: `demanded`, `faults` and `refaults` of `Statistics`."""

    demanded: int
    faults: int
    refaults: int


@dataclass(slots=True)
class Counters:
    """Running totals behind `Statistics`. Owned by the pager's transfers."""

    evictions: int = 0
    reclaimed: int = 0
    window_drops: int = 0
    packs: int = 0
    unpacks: int = 0
    demanded: int = 0
    faults: int = 0
    refaults: int = 0
    writes: int = 0
    failed_writes: int = 0
    failed_loads: int = 0


def _is_dirty(page: Page) -> bool:
    if page.state in OPEN:
        return page.tokens > page.durable_tokens
    return page.state in (PageState.SEALED_DIRTY, PageState.WRITING)


def view_segments(space: AddressSpace) -> tuple[SegmentView, ...]:
    """Picture of a space's segments, in order of group."""
    views = []
    for segment in space.segments:
        pages = tuple(view_page(segment, number) for number in range(len(segment.sealed)))
        growth = tuple(page.frame for page in segment.growth if page.frame is not None)
        views.append(SegmentView(segment.group, pages, view_tail(segment), growth))
    return tuple(views)


def ref_of(page: Page) -> PageRef:
    """A sealed page as records and forks name it."""
    assert page.key is not None
    return PageRef(page.page_id, page.key)


def view_page(segment: Segment, number: int) -> PageView:
    """Picture of one sealed page."""
    page = segment.sealed[number]
    return PageView(ref_of(page), page.state, page.frame, len(page.users), number < segment.first_page)


def view_tail(segment: Segment) -> TailView | None:
    """Picture of a segment's tail; None at a page border."""
    tail = segment.tail
    if tail is None:
        return None
    return TailView(tail.page_id, tail.state, tail.frame, tail.tokens, tail.durable_tokens, tail.ram_bytes)


def view_residency(space: AddressSpace) -> Residency:
    """Picture of where a space's pages are."""
    mapped = list(space.mapped())
    needed = [page for _, page in space.needed()]
    growth = [page for segment in space.segments for page in segment.growth]
    return Residency(
        space=space.space,
        tokens=space.tokens,
        active=space.use.active,
        pinned=space.use.pinned,
        last_used=space.use.last_used,
        total_pages=len(mapped),
        behind_window_pages=len(mapped) - len(needed),
        resident_pages=len(needed) - space.use.absent_pages + space.use.packed_pages,
        loading_pages=sum(page.state in (PageState.LOADING, PageState.LOADING_TAIL) for page in needed),
        stored_pages=sum(page.state in STORED for page in needed),
        dirty_pages=sum(page.state in (PageState.SEALED_DIRTY, PageState.WRITING) for page in mapped),
        shared_pages=sum(len(page.users) > 1 for page in mapped),
        lost_pages=space.use.lost_pages,
        resident_bytes=sum(page.ram_bytes for page in (*mapped, *growth)),
        needed_bytes=sum(page.page_bytes for page in needed),
        total_bytes=sum(page.page_bytes for page in mapped),
        lost_at=space.lost_at(),
    )


def view_statistics(
    table: PageTable,
    spaces: Iterable[AddressSpace],
    *,
    waiting_spaces: int,
    counters: Counters,
    prefetched: Mapping[PrefetchReason, PrefetchFigures],
    eviction: str,
    unpinned_bytes: int,
) -> Statistics:
    """Picture of the whole pager; walks all pages."""
    pages = {str(state): 0 for state in PageState if state is not PageState.RELEASED}
    dirty_bytes = pinned_bytes = packed_bytes = shared_pages = behind_pages = behind_bytes = 0
    for page in table:
        pages[str(page.state)] += 1
        shared_pages += len(page.users) > 1
        dirty_bytes += page.ram_bytes * _is_dirty(page)
        pinned_bytes += page.ram_bytes * page.held
        packed_bytes += page.ram_bytes * (page.state is PageState.PACKED)
        behind_pages += page.is_behind_window
        behind_bytes += page.ram_bytes * page.is_behind_window
    uses = [space.use for space in spaces]
    budget = table.budget
    return Statistics(
        budget_bytes=budget.budget_bytes,
        usable_bytes=budget.usable_bytes,
        high_mark_bytes=budget.high_mark_bytes,
        low_mark_bytes=budget.low_mark_bytes,
        converging=budget.converging,
        resident_bytes=budget.resident_bytes,
        packed_bytes=packed_bytes,
        peak_resident_bytes=budget.peak_resident_bytes,
        peak_total_bytes=budget.peak_total_bytes,
        in_flight_bytes=budget.in_flight_bytes,
        dirty_bytes=dirty_bytes,
        pinned_bytes=pinned_bytes,
        pin_limit_bytes=budget.pin_limit_bytes,
        unpinned_bytes=unpinned_bytes,
        namespaces=dict(budget.namespaces),
        quotas=dict(budget.quotas),
        pages=pages,
        spaces=len(uses),
        active_spaces=sum(use.active for use in uses),
        waiting_spaces=waiting_spaces,
        shared_pages=shared_pages,
        behind_window_pages=behind_pages,
        behind_window_bytes=behind_bytes,
        evictions=counters.evictions,
        reclaimed=counters.reclaimed,
        window_drops=counters.window_drops,
        packs=counters.packs,
        unpacks=counters.unpacks,
        demanded=counters.demanded,
        faults=counters.faults,
        refaults=counters.refaults,
        prefetched=prefetched,
        writes=counters.writes,
        failed_writes=counters.failed_writes,
        failed_loads=counters.failed_loads,
        eviction=eviction,
    )
