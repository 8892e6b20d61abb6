"""The pager: takes what happened, answers what to do. Sole owner of page table, spaces and budget.

Theory of operation. Each event is checked, booked, and followed by `Demand.pump`, which carries queued work on as far
as the budget allows: first the demand (spaces that are active or pinned, first come first served: pages head to tail,
then growth frames), then evictions in the background (`kvd.vm.reclaim`), writes, and what is loaded ahead
(`kvd.vm.prefetch`).

Long because it is the one place that takes events, one short method each.

May import kvd.ids, kvd.quant.spec and the other modules of kvd.vm.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from kvd.ids import FrameId, GroupId, Namespace, PageId, SpaceId
from kvd.quant.spec import PAGE_TOKENS
from kvd.vm import events as ev
from kvd.vm.address_space import AddressSpace
from kvd.vm.budget import HIGH_FREE_PERCENT, LOW_FREE_PERCENT, PIN_PART, Budget
from kvd.vm.codes import space_codes
from kvd.vm.demand import Demand
from kvd.vm.errors import IllegalEvent, NotResident, SpaceInUse
from kvd.vm.eviction import EvictionPolicy, LruPolicy
from kvd.vm.integrity import check
from kvd.vm.mapping import Mappings
from kvd.vm.moves import Moved
from kvd.vm.page import IN_RAM, OPEN, Page, PageState
from kvd.vm.page_table import PageTable
from kvd.vm.pins import Pins
from kvd.vm.prefetch import Expectations
from kvd.vm.reclaim import Reclaim
from kvd.vm.transfers import Transfers
from kvd.vm.views import (
    Counters,
    PageView,
    Paging,
    Residency,
    SegmentView,
    Statistics,
    TailView,
    ref_of,
    view_page,
    view_residency,
    view_segments,
    view_statistics,
    view_tail,
)


class Pager:
    """Decides which pages are in RAM. Owned by the engine thread; `handle` is the only method that changes anything.

    Args:
        budget_bytes: everything pages and their copies in flight may take.
        group_count: cache groups of the model, at least 1.
        new_page_id: gives ids that are unique for ever.
        max_writes_in_flight: bound on WritePage without an answer.
        max_loads_in_flight: bound on LoadPage and LoadTail without an answer.
        page_tokens: tokens of one page.
        policy: ranks victims; least recently used by default.
        windows: tokens a query sees, itself included, per cache group; None for all. Without it no group has a window.
        high_free_percent, low_free_percent: where the marks of background eviction are (`kvd.vm.budget`).
        pin_limit: what pins may hold together, in bytes (int) or as a part of what is usable (float).

    Attributes:
        new_page_id: as given; imported pages get their ids from it, too.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        group_count: int,
        new_page_id: Callable[[], PageId],
        max_writes_in_flight: int = 2,
        max_loads_in_flight: int = 4,
        page_tokens: int = PAGE_TOKENS,
        policy: EvictionPolicy | None = None,
        windows: Sequence[int | None] | None = None,
        high_free_percent: int = HIGH_FREE_PERCENT,
        low_free_percent: int = LOW_FREE_PERCENT,
        pin_limit: int | float = PIN_PART,
    ) -> None:
        if min(group_count, page_tokens, max_writes_in_flight, max_loads_in_flight) < 1 or budget_bytes < 0:
            raise ValueError("group_count, page_tokens and transfer bounds must be at least 1, the budget at least 0")
        windows = (None,) * group_count if windows is None else tuple(windows)
        if len(windows) != group_count or any(window is not None and window < 1 for window in windows):
            raise ValueError(f"{group_count} groups need as many windows of at least one token, not {windows}")
        self._budget = Budget(
            budget_bytes,
            max_copies=max_writes_in_flight + 1,
            high_free_percent=high_free_percent,
            low_free_percent=low_free_percent,
            pin_limit=pin_limit,
        )
        self._table = PageTable(self._budget, page_tokens)
        self._spaces: dict[SpaceId, AddressSpace] = {}
        self._policy = policy if policy is not None else LruPolicy()
        self._turns = 0
        self._out: list[ev.Instruction] = []
        self._transfers = Transfers(
            self._table,
            self._spaces,
            self._policy,
            self._out.append,
            max_writes_in_flight=max_writes_in_flight,
            max_loads_in_flight=max_loads_in_flight,
        )
        self.new_page_id = new_page_id
        self._mappings = Mappings(
            self._table,
            self._transfers,
            self._out.append,
            new_page_id=new_page_id,
            group_count=group_count,
            page_tokens=page_tokens,
            windows=windows,
        )
        self._expected = Expectations(self._spaces)
        self._reclaim = Reclaim(self._budget, self._transfers)
        self._demand = Demand(
            self._spaces, self._budget, self._transfers, self._mappings, self._expected, self._reclaim
        )

        self._pins = Pins(self._spaces, self._budget, self._demand_pages, self._transfers.packing.left_alone)

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def budget(self) -> Budget:
        """The byte accounts and their limits, for whoever wants to look at them; changing them is the pager's alone."""
        return self._budget

    @property
    def usable_bytes(self) -> int:
        """The most that active and pinned spaces may need together: the budget less the reserves for copies."""
        return self._budget.usable_bytes

    def pinned_pages(self, space: SpaceId) -> Mapping[PageId, int]:
        """Pages that the space's pin holds, and the bytes of each."""
        return {page.page_id: page.page_bytes for page in self._pins.held_pages(self._space(space))}

    def page_sizes(self, space: SpaceId) -> Mapping[PageId, int]:
        """All pages that the space maps, its tail included, and the bytes of each as frames hold them."""
        return {page.page_id: page.page_bytes for page in self._space(space).mapped()}

    def fits(self, wanted_bytes: int) -> bool:
        """True when a demand of `wanted_bytes` can be met once everything else is evicted."""
        return wanted_bytes <= self._budget.usable_bytes

    def working_set_bytes(self, space: SpaceId, extra_tokens: int = 0) -> int:
        """Bytes of all frames that a step of `extra_tokens` tokens needs (shared pages in full)."""
        return self._space(space).working_set_bytes(extra_tokens)

    def is_ready(self, space: SpaceId) -> bool:
        """True when the space is active, all its next step sees is readable and its growth frames are mapped."""
        found = self._space(space)
        return found.use.active and found.use.absent_pages == 0 and found.growth_mapped

    def can_cut(self, space: SpaceId) -> bool:
        """True when every page that a CutWanted asked for is in RAM."""
        return self._demand.can_cut(space)

    def has_cut_at_hand(self, space: SpaceId, tokens: int) -> bool:
        """Whether a cut at `tokens` would need no page that is elsewhere than in RAM, nor one known to be lost."""
        found = self._space(space)
        return found.resumable_at(tokens) == tokens and all(each.state in IN_RAM for each in found.cut_pages(tokens))

    def faults(self, space: SpaceId) -> int:
        """Sealed pages loaded since the space was created because it demanded them."""
        return self._space(space).use.faults

    @property
    def paging(self) -> Paging:
        """How much is demanded, and how much of it is not there; costs nothing to ask."""
        counters = self._transfers.counters
        return Paging(counters.demanded, counters.faults, counters.refaults)

    @property
    def counters(self) -> Counters:
        """Totals since start, as of now: what of `statistics` costs nothing to ask."""
        return replace(self._transfers.counters)

    @property
    def prefetched_pages(self) -> int:
        """Pages read ahead since start, for whatever reason."""
        return sum(figures.pages for figures in self._transfers.ledger.figures.values())

    @property
    def has_moved(self) -> bool:
        """True when `take_moves` has something to tell."""
        return bool(self._transfers.moves)

    def take_moves(self) -> list[Moved]:
        """Whose pages moved since this was last asked, what they did and why; forgets it."""
        return self._transfers.moves.take()

    def owner(self, page: PageId) -> SpaceId | None:
        """The space that mapped the page first, of those that map it."""
        found = self._table.find(page)
        return None if found is None else next(iter(found.users), None)

    def map_version(self, space: SpaceId) -> Hashable:
        """Differs from an earlier one when `page_codes` of the space may."""
        use = self._space(space).use
        return use.changed_at, self._space(space).tokens, use.pinned, use.pin_changes

    def page_codes(self, space: SpaceId) -> tuple[bytes, ...]:
        """What each page of the space is, by code (`kvd.vm.codes`), per cache group."""
        return space_codes(self._space(space))

    @property
    def writes_fail(self) -> bool:
        """True while the disk refuses writes: nothing dirty can be counted on to become durable soon."""
        return self._transfers.writes_fail

    @property
    def writes_held(self) -> bool:
        """True while dirty pages wait for a write limit, and for nothing else."""
        return self._transfers.writes_held

    def is_held(self, space: SpaceId) -> bool:
        """True while a dirty page of the space waits for a write limit, or for its namespace's room on disk."""
        return self._transfers.holds_any(self._space(space).mapped())

    @property
    def quota_held_bytes(self) -> dict[Namespace, int]:
        """Bytes of dirty pages that wait for their namespace's room on disk, by namespace."""
        return self._transfers.quota_held_bytes

    @property
    def held_write_bytes(self) -> int:
        """Bytes of dirty pages that wait for a write limit."""
        return self._transfers.held_write_bytes

    def block_table(self, space: SpaceId, group: GroupId) -> tuple[FrameId, ...]:
        """Frames of one segment from page `first_page` on: sealed pages, the tail, then frames for growth.

        Raises:
            NotResident: a page that the space's next step sees cannot be read now.
        """
        found = self._space(space)
        if found.use.absent_pages:
            raise NotResident(f"space {space} lacks {found.use.absent_pages} pages", space=int(space))
        segment = found.segments[group]
        return tuple(page.frame for page in (*segment.needed(), *segment.growth) if page.frame is not None)

    def first_page(self, space: SpaceId, group: GroupId) -> int:
        """Number of the first page that the space's next step sees; the pages before it are behind the window."""
        return self._space(space).segments[group].first_page

    @property
    def spaces(self) -> tuple[AddressSpace, ...]:
        """All spaces, for whoever wants to look at them; changing one is the pager's alone."""
        return tuple(self._spaces.values())

    def tokens(self, space: SpaceId) -> int:
        """Tokens of the space that have KV."""
        return self._space(space).tokens

    def lost_at(self, space: SpaceId) -> int | None:
        """Position to cut the space to, since a page its next step sees could not be loaded; None when none is lost.

        At most that of the first lost page; less, when the window before that position has lost pages, too. Pages lost
        behind the window do not count.
        """
        return self._space(space).lost_at()

    def resumable_at(self, space: SpaceId, tokens: int) -> int:
        """The deepest position, at most `tokens`, that needs no page known to be lost: where a cut can go to."""
        return self._space(space).resumable_at(tokens)

    def page_state(self, page: PageId) -> PageState | None:
        """Where a page's bytes are; None when no space maps it."""
        found = self._table.find(page)
        return None if found is None else found.state

    def mapped_by(self, page: PageId) -> int:
        """How many spaces map a page."""
        found = self._table.find(page)
        return 0 if found is None else len(found.users)

    def segments(self, space: SpaceId) -> tuple[SegmentView, ...]:
        """Page ids, keys, states and tails, in order of group."""
        return view_segments(self._space(space))

    def refs(self, space: SpaceId, group: GroupId, first: int = 0) -> tuple[ev.PageRef, ...]:
        """Ids and keys of a segment's sealed pages from number `first` on: no pictures are made."""
        return tuple(ref_of(page) for page in self._space(space).segments[group].sealed[first:])

    def page(self, space: SpaceId, group: GroupId, number: int) -> PageView:
        """One sealed page, for whoever goes from page to page: `segments` makes pictures of all.

        Raises:
            IllegalEvent: the space has no such page.
        """
        segment = self._space(space).segments[group]
        if not 0 <= number < len(segment.sealed):
            raise IllegalEvent(f"space {space} has no sealed page {number}", space=int(space))
        return view_page(segment, number)

    def tails(self, space: SpaceId) -> tuple[TailView | None, ...]:
        """The tail of each group, in order of group; None at a page border."""
        return tuple(view_tail(segment) for segment in self._space(space).segments)

    def dirty_pages(self, space: SpaceId) -> list[PageId]:
        """Sealed pages of the space that are not in swap yet."""
        dirty = (PageState.SEALED_DIRTY, PageState.WRITING)
        return [
            page.page_id for segment in self._space(space).segments for page in segment.sealed if page.state in dirty
        ]

    def residency(self, space: SpaceId) -> Residency:
        """How much of the space is where."""
        return view_residency(self._space(space))

    def statistics(self) -> Statistics:
        """The whole pager in figures."""
        return view_statistics(
            self._table,
            self._spaces.values(),
            waiting_spaces=self._demand.waiting_spaces,
            counters=self._transfers.counters,
            prefetched=self._transfers.ledger.figures,
            eviction=self._policy.name,
            unpinned_bytes=self._pins.unpinned_bytes,
        )

    def check_integrity(self) -> None:
        """Count frames, bytes and references again.

        Raises:
            IntegrityError: they do not agree with the books; `data["problems"]` has the facts.
        """
        check(self._table, self._spaces.values(), [*self._transfers.check_queues(), *self._pins.check()])

    # ---- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        """Take one event; the instructions returned must be carried out in order.

        Raises:
            IllegalEvent: it cannot have happened in this state.
            NotResident: a cut inside a page that is not in RAM.
            NoRoomForCopy: a cut inside a page found no frame; retry when other work has ended.
            SpaceInUse: eviction of an active or pinned space was asked for.
            After each of these nothing has changed.
        """
        self._table.tick += 1
        self._out.clear()
        self._dispatch(event)
        self._pins.review()
        self._demand.pump()
        self._budget.settle()
        return tuple(self._out)

    def _dispatch(self, event: ev.Event) -> None:
        match event:
            case ev.SpaceCreated():
                self._check_new(event.space)
                self._enter(self._mappings.create(event.space, event.page_bytes, event.namespace))
            case ev.SpaceRestored():
                self._check_new(event.space)
                self._enter(self._mappings.restore(event))
            case ev.Activated():
                self._activated(event.space)
            case ev.Deactivated():
                self._deactivated(event.space)
            case ev.PrefetchHinted():
                self._prefetch_hinted(event)
            case ev.HintWithdrawn():
                self._expected.withdraw(self._space(event.space))
            case ev.SpacesPredicted():
                self._expected.predict([self._space(each).space for each in event.spaces])
            case ev.GrowthWanted():
                self._growth_wanted(event)
            case ev.TokensAppended():
                self._mappings.append(self._space(event.space), event)
                self._use(self._space(event.space))
            case ev.TurnCommitted():
                self._turn_committed(event.space)
            case ev.RolledBack():
                self._rolled_back(event)
            case ev.Forked():
                self._check_new(event.child)
                self._enter(self._mappings.fork(self._space(event.parent), event.child, event.tokens))
            case ev.CutWanted():
                self._cut_wanted(event)
            case ev.LogLost():
                self._log_lost(event.space)
            case ev.CopiesLost():
                self._copies_lost(event)
            case ev.FilesGone():
                self._files_gone(event)
            case ev.SpaceClosed():
                self._closed(event.space)
            case ev.Pinned():
                self._pinned(event.space)
            case ev.Unpinned():
                self._unpinned(event.space)
            case ev.MarkedPassing():
                self._space(event.space).use.passing = event.is_passing
            case ev.EvictionWanted():
                self._eviction_wanted(event.space)
            case ev.PagesUnwanted():
                self._pages_unwanted(event)
            case ev.WritesAllowed():
                self._transfers.allow(event.allowance_bytes, event.rooms)
            case ev.WriteDone():
                self._transfers.write_done(event.page)
                self._expected.is_due = self._reclaim.is_due = True
            case ev.WriteFailed():
                self._transfers.write_failed(event.page)
            case ev.LoadDone():
                self._transfers.load_done(event.page)
                self._expected.is_due = True
            case ev.LoadFailed():
                self._transfers.load_failed(event.page)
            case ev.BudgetChanged():
                self._budget.set_budget(event.budget_bytes)
                self._expected.is_due = self._reclaim.is_due = True
            case ev.QuotaChanged():
                self._quota_changed(event)
            case ev.MemoryWanted():
                self._reclaim.free(event.wanted_bytes)
            case ev.Tick():
                self._transfers.packing.tick()
                self._transfers.tick()
                self._reclaim.is_due = True
            case ev.RetryWanted():
                if event.space is not None:
                    self._transfers.put_first(self._space(event.space).mapped())
                self._transfers.try_one()
            case _:
                assert_never(event)

    # ---- use --------------------------------------------------------------------------------------------------------

    def _closed(self, space: SpaceId) -> None:
        found = self._space(space)
        self._demand.forget(found)
        self._expected.forget(found)
        self._pins.unpin(found)
        self._expected.is_due = True
        self._mappings.release_growth(found)
        self._mappings.unmap(found, list(found.pages_tail_first()))
        del self._spaces[space]
        self._budget.set_formats(each.page_bytes for each in self._spaces.values())

    def _activated(self, space: SpaceId) -> None:
        found = self._space(space)
        found.use.active = True
        self._expected.withdraw(found)
        self._use(found)
        self._turns += 1
        found.use.began(self._turns)
        self._transfers.counters.demanded += sum(1 for _ in found.needed())
        self._demand_pages(found, (page for _, page in found.needed()))

    def _deactivated(self, space: SpaceId) -> None:
        found = self._space(space)
        found.use.active = False
        self._pins.is_due = True  # it may have grown
        self._use(found)
        self._mappings.release_growth(found)
        self._demand.settle(found)
        self._transfers.packing.left_alone(space)
        self._expected.is_due = self._reclaim.is_due = True

    def _pinned(self, space: SpaceId) -> None:
        found = self._space(space)
        self._pins.pin(found)
        found.use.evict_wanted = False
        self._expected.withdraw(found)

    def _unpinned(self, space: SpaceId) -> None:
        found = self._space(space)
        self._pins.unpin(found)
        self._demand.settle(found)
        self._transfers.packing.left_alone(space)
        self._expected.is_due = self._reclaim.is_due = True

    def _prefetch_hinted(self, event: ev.PrefetchHinted) -> None:
        found = self._space(event.space)
        if event.reason == "predicted":
            raise IllegalEvent("SpacesPredicted says what is predicted", space=int(event.space))
        self._use(found)
        if not found.use.held:
            self._expected.hint(found, event.reason)

    def _eviction_wanted(self, space: SpaceId) -> None:
        found = self._space(space)
        if found.use.demands:
            raise SpaceInUse(f"space {space} is active or pinned; end its request or unpin it", space=int(space))
        found.use.evict_wanted = True
        self._expected.withdraw(found)
        for page in found.pages_tail_first():
            self._transfers.drop_if_wanted(page)
            if page.state is PageState.SEALED_DIRTY:
                self._transfers.hurry(page)
            elif page.packable:
                self._transfers.packing.pack(page)  # the log lacks some of it

    def _pages_unwanted(self, event: ev.PagesUnwanted) -> None:
        for page_id in event.pages:
            page = self._table.find(page_id)
            if page is not None and page.state is PageState.CLEAN and page.droppable and not page.held:
                self._transfers.drop(page, "quota")

    def _growth_wanted(self, event: ev.GrowthWanted) -> None:
        space = self._space(event.space)
        if not space.use.active or event.tokens < 0:
            raise IllegalEvent(f"space {event.space} must be active to grow by {event.tokens} tokens")
        self._mappings.want_growth(space, event.tokens)
        self._use(space)
        self._demand.want(space)

    def _rolled_back(self, event: ev.RolledBack) -> None:
        space = self._space(event.space)
        self._mappings.cut(space, event.tokens)
        self._pins.is_due = True
        if space.use.demands:
            self._demand_pages(space, (page for _, page in space.needed() if space.use.holds(page.page_id)))

    def _turn_committed(self, space: SpaceId) -> None:
        for segment in self._space(space).segments:
            if segment.tail is not None:
                segment.tail.durable_tokens = segment.tail.tokens
                self._transfers.drop_if_wanted(segment.tail)

    def _cut_wanted(self, event: ev.CutWanted) -> None:
        space = self._space(event.space)
        if event.tokens is not None:
            self._use(space)
        self._demand.want_cut(space, event.tokens)

    def _log_lost(self, space: SpaceId) -> None:
        for segment in self._space(space).segments:
            if segment.tail is not None and segment.tail.state in OPEN:
                segment.tail.durable_tokens = 0

    def _copies_lost(self, event: ev.CopiesLost) -> None:
        for page_id in event.pages:
            page = self._table.find(page_id)
            if page is not None:
                self._transfers.file_gone(page)

    def _quota_changed(self, event: ev.QuotaChanged) -> None:
        if event.quota_bytes is None:
            self._budget.quotas.pop(event.namespace, None)
        else:
            self._budget.quotas[event.namespace] = event.quota_bytes
        self._pins.is_due = self._reclaim.is_due = self._expected.is_due = True

    def _files_gone(self, event: ev.FilesGone) -> None:
        for page_id in event.pages:
            page = self._table.find(page_id)
            if page is not None and page.state is PageState.EVICTED:
                self._table.move(page, PageState.LOST)
            elif page is not None:
                self._transfers.file_gone(page)

    # ---- shared steps -----------------------------------------------------------------------------------------------

    def _demand_pages(self, space: AddressSpace, pages: Iterable[Page]) -> None:
        """A space demands what of it is held, these among it; what is there already was not loaded ahead in vain."""
        self._transfers.ledger.used(pages)
        self._demand.want(space)

    def _space(self, space: SpaceId) -> AddressSpace:
        found = self._spaces.get(space)
        if found is None:
            raise IllegalEvent(f"space {space} is unknown", space=int(space))
        return found

    def _check_new(self, space: SpaceId) -> None:
        if space in self._spaces:
            raise IllegalEvent(f"space {space} exists already", space=int(space))

    def _enter(self, space: AddressSpace) -> None:
        self._spaces[space.space] = space
        self._use(space)
        self._budget.set_formats(each.page_bytes for each in self._spaces.values())

    def _use(self, space: AddressSpace) -> None:
        space.use.last_used = self._table.tick
        space.use.evict_wanted = False
