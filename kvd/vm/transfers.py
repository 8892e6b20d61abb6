"""Pages on their way between RAM and disk: write-behind, loads, and making room.

Theory of operation. Sealed pages are queued for writing at once, so that a turn's pages are durable early and room can
be made by dropping clean pages. Before any page goes tails are packed (`kvd.vm.packing`): nothing is read again for
it. Writes that stand between a demand and its room go before write-behind. After a write failed, one is tried at a
time, ever more rarely (a full disk is full for every page), and dirty pages are not counted on: clean pages of later
spaces go first rather than nothing at all. The page that failed goes to the end of the queue, so that a page that
alone cannot be written does not stop the others. A page of a namespace that has no room left on disk is put aside
until there is some again: it counts as no room on its way, and holds up nobody else's. A page that its last user let
go of while it is in flight stays until the transfer ends. The file of a page may go while the page is being read: what
was read is then all there is, so the page is dirty.

*Refaults* tell a pool that is too small from one that is merely filled for the first time. Evicting for room moves a
clock on, by bytes, and the page is stamped with it. When the page is demanded again, the clock tells how much went in
between: if that is no more than the pool holds, a pool so much larger would have kept it. That is the refault distance
of Linux (`mm/workingset.c`), in bytes since pages differ.

May import kvd.ids and the other modules of kvd.vm but pager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from kvd.ids import Namespace, PageId, SpaceId
from kvd.vm.address_space import AddressSpace
from kvd.vm.disk_rooms import DiskRooms
from kvd.vm.errors import NoRoomForCopy
from kvd.vm.events import DropFrame, DropPacked, ForgetPage, Instruction, LoadPage, LoadTail, WritePage
from kvd.vm.eviction import EvictionPolicy
from kvd.vm.moves import EvictionReason, Moves
from kvd.vm.packing import Packing
from kvd.vm.page import IN_FLIGHT, IN_RAM, RESIDENT, Page, PageState, SpaceUse
from kvd.vm.page_table import PageTable
from kvd.vm.prefetch import PrefetchLedger
from kvd.vm.views import Counters

MAX_WAIT_TICKS: Final = 30
"""How far apart trial writes get while the disk goes on refusing."""


class Transfers:
    """Starts and ends transfers and frees frames. Owned by the pager, which alone calls it.

    Args:
        table: the page table.
        spaces: all spaces, as the pager keeps them.
        policy: ranks victims.
        emit: takes the instructions, in order.
        max_writes_in_flight: bound on WritePage without an answer.
        max_loads_in_flight: bound on LoadPage and LoadTail without an answer.

    Attributes:
        writes_fail: the last write that ended failed; only trials start.
        allowance_bytes: pages that may still start to be written, by a write limit; None: there is none. The page that
            uses it up may be larger.
        ledger: what became of pages that were loaded ahead.
        packing: tails without a frame.
        moves: what moved lately, and whose it was.
        evicted_bytes: the eviction clock: bytes evicted for room since start.
    """

    def __init__(
        self,
        table: PageTable,
        spaces: Mapping[SpaceId, AddressSpace],
        policy: EvictionPolicy,
        emit: Callable[[Instruction], None],
        *,
        max_writes_in_flight: int,
        max_loads_in_flight: int,
    ) -> None:
        self.counters = Counters()
        self.ledger = PrefetchLedger()
        self.moves = Moves()
        self.packing = Packing(table, spaces, emit, self.counters)
        self.evicted_bytes = 0
        self.loads_in_flight = 0
        self._table = table
        self._budget = table.budget
        self._spaces = spaces
        self._policy = policy
        self._emit = emit
        self._max_writes = max_writes_in_flight
        self._max_loads = max_loads_in_flight
        # Dirty pages are in exactly one of these; dicts are ordered sets. `urgent` stands between a demand and room.
        self._urgent: dict[PageId, Page] = {}
        self._behind: dict[PageId, Page] = {}
        self._writing: dict[PageId, Page] = {}
        self._rooms = DiskRooms()
        self._fileless: set[PageId] = set()  # pages on their way in whose files went meanwhile
        self.writes_fail = False
        self.allowance_bytes: int | None = None
        self._trial_due = False
        self._trial_runs = False
        self._ticks_left = 0
        self._wait_ticks = 1

    @property
    def writes_in_flight(self) -> int:
        """Writes without an answer."""
        return len(self._writing)

    @property
    def writes_held(self) -> bool:
        """Dirty pages wait for a write limit."""
        spent = self.allowance_bytes is not None and self.allowance_bytes <= 0
        return spent and bool(self._urgent or self._behind)

    def holds_any(self, pages: Iterable[Page]) -> bool:
        """Whether one of these pages is dirty and may not be written now; one whose write has begun may."""
        if self.writes_held:
            return any(page.state is PageState.SEALED_DIRTY for page in pages)
        return bool(self._rooms.waiting) and any(page.page_id in self._rooms.waiting for page in pages)

    @property
    def quota_held_bytes(self) -> dict[Namespace, int]:
        """Bytes of the dirty pages for which their namespace has no room on disk, by namespace."""
        return self._rooms.waiting_bytes

    @property
    def held_write_bytes(self) -> int:
        """Bytes of the dirty pages that do."""
        if not self.writes_held:
            return 0
        return sum(page.page_bytes for queue in (self._urgent, self._behind) for page in queue.values())

    # ---- frames -----------------------------------------------------------------------------------------------------

    def drop(self, page: Page, reason: EvictionReason) -> None:
        """Drop a droppable page's bytes from RAM; they stay in swap or in the log."""
        self.moves.note("eviction", page, page.ram_bytes, reason)
        self._move(page, page.stored_state)
        self.counters.evictions += 1

    def evict(self, page: Page, reason: EvictionReason = "room") -> None:
        """Drop a droppable page to make room; the clock goes on, and the page remembers what it says."""
        self.evicted_bytes += page.ram_bytes
        self.drop(page, reason)
        page.evicted_at_bytes = self.evicted_bytes

    def count_fault(self, page: Page) -> None:
        """A page on disk is demanded: a fault, and a refault when it went lately enough."""
        self.counters.faults += 1
        if page.evicted_at_bytes is not None:
            distance_bytes = self.evicted_bytes - page.evicted_at_bytes
            self.counters.refaults += distance_bytes <= self._budget.usable_bytes

    def release(self, page: Page) -> None:
        """Let go of a page nobody maps; one in flight stays until its transfer ends."""
        if page.state in IN_FLIGHT:
            return
        for queue in (self._urgent, self._behind, self._rooms.waiting):
            queue.pop(page.page_id, None)
        self._move(page, PageState.RELEASED)
        if page.key is not None:
            self._emit(ForgetPage(page.page_id))

    def drop_if_wanted(self, page: Page) -> None:
        """Drop the bytes when nobody can see the page any more, or all who need it were asked to be evicted."""
        if not page.droppable or page.held or not page.users:
            return
        if page.is_behind_window:
            self.moves.note("eviction", page, page.ram_bytes, "window")
            self._move(page, page.stored_state)
            self.counters.window_drops += 1
        elif all(use.evict_wanted for use in page.needed_by):
            self.drop(page, "asked")

    def make_room(self, want_bytes: int, namespace: Namespace | None = None) -> None:
        """Pack tails, then evict, until `want_bytes` more fit, as far as that can be done now.

        What a namespace wants beyond its quota its own idle pages make room for, before anybody's.

        Clean victims go at once. Dirty ones are written first: they count as room on its way, and the demand goes on
        when their writes are done.
        """
        if namespace is not None:
            self.free(self._budget.quota_shortage_bytes(namespace, want_bytes), namespace)
        shortage_bytes = self._budget.shortage_bytes(want_bytes)
        if shortage_bytes > 0:
            shortage_bytes -= self.packing.make_room(shortage_bytes)
        if shortage_bytes <= 0:
            return
        if not (self.writes_fail or self.writes_held):
            # what is behind a window goes by itself once it is written: sooner than anything that a step may need
            for page in (*self._writing.values(), *self._urgent.values(), *self._behind.values()):
                if page.is_behind_window:
                    self.hurry(page)
                    shortage_bytes -= page.page_bytes
        self.free(shortage_bytes)

    def free(self, wanted_bytes: int, namespace: Namespace | None = None, *, reason: EvictionReason = "room") -> bool:
        """Give up so many bytes of idle pages, or all there are; dirty ones are written first and count already.

        Anybody's tails are packed first; of a namespace pages are evicted alone.

        Args:
            wanted_bytes: how many.
            namespace: whose pages; None for anybody's.
            reason: what is told of it.

        Returns:
            Whether there were so many.
        """
        shortage_bytes = wanted_bytes
        if shortage_bytes > 0 and namespace is None:
            shortage_bytes -= self.packing.make_room(shortage_bytes)
        if shortage_bytes <= 0:
            return True
        for page in self._policy.order(self._of(namespace)):
            freed_bytes = page.ram_bytes
            if page.droppable:
                self.evict(page, reason)
            elif page.state is PageState.SEALED_DIRTY:
                if self.writes_fail:
                    continue
                self.hurry(page)
                if self.writes_held or page.page_id in self._rooms.waiting:
                    continue  # it comes, but nobody knows when: clean pages of later spaces go first
            shortage_bytes -= freed_bytes
            if shortage_bytes <= 0:
                return True
        return False

    def make_prefetch_room(self, want_bytes: int, use: SpaceUse, namespace: Namespace) -> bool:
        """Pack tails and drop clean pages of spaces that are expected less than one with this use.

        When all of them together are too little none goes: a page that is not loaded is no reason to give up others.
        Where the namespace's quota is full, they are those of its own spaces.

        Returns:
            Whether `want_bytes` more fit now.
        """
        quota_bytes = self._budget.quota_shortage_bytes(namespace, want_bytes)
        plan, missing_bytes = self._plan_room(
            max(quota_bytes, self._budget.prefetch_shortage_bytes(want_bytes)),
            lambda page: (
                all(other.claim < use.claim for other in page.needed_by)
                and (quota_bytes <= 0 or page.namespace == namespace)
            ),
        )
        if missing_bytes > 0:
            return False
        self.carry_out(plan)
        return True

    def plan_copy_room(self, want_bytes: int, keep: Collection[PageId]) -> list[Page]:
        """Find what makes room for a copy at once, for `carry_out`; nothing is done yet.

        Args:
            want_bytes: bytes of the copies, less what the same event frees before them.
            keep: pages that must stay as they are.

        Raises:
            NoRoomForCopy: too much is held or dirty; nothing has changed.
        """
        if want_bytes <= 0:
            return []  # What takes no more than it frees is allowed even while a smaller budget is out of reach.
        shortage_bytes = self._budget.copy_shortage_bytes(want_bytes)
        plan, shortage_bytes = self._plan_room(shortage_bytes, lambda page: page.page_id not in keep)
        if shortage_bytes <= 0:
            return plan
        raise NoRoomForCopy(
            f"no room for a copy of {want_bytes} bytes: {shortage_bytes} bytes are missing; retry when a request ends",
            retry_after_s=0.05,
            want_bytes=want_bytes,
            shortage_bytes=shortage_bytes,
            resident_bytes=self._budget.resident_bytes,
            budget_bytes=self._budget.budget_bytes,
        )

    def carry_out(self, plan: Iterable[Page]) -> None:
        """Pack each tail that is in a frame and evict all others, in the order of the plan."""
        for page in plan:
            if page.state is PageState.FILLING:
                self.packing.pack(page)
            else:
                self.evict(page)

    def _plan_room(self, shortage_bytes: int, may_go: Callable[[Page], bool]) -> tuple[list[Page], int]:
        """Tails to pack and clean pages to evict until a shortage is met, and what is missing when they do not suffice.

        A tail that goes altogether comes twice.
        """
        plan: list[Page] = []
        for page in self.packing.packable():
            if shortage_bytes <= 0:
                return plan, shortage_bytes
            if may_go(page):
                plan.append(page)
                shortage_bytes -= self.packing.saved_bytes(page)
        if shortage_bytes <= 0:
            return plan, shortage_bytes
        for page in self._policy.order(self._spaces.values()):
            if page.droppable and may_go(page):
                plan.append(page)
                packed = page.state is PageState.FILLING
                shortage_bytes -= page.ram_bytes - (self.packing.saved_bytes(page) if packed else 0)
                if shortage_bytes <= 0:
                    break
        return plan, shortage_bytes

    # ---- loads ------------------------------------------------------------------------------------------------------

    @property
    def can_start_load(self) -> bool:
        """True when the bound on loads in flight allows another."""
        return self.loads_in_flight < self._max_loads

    @property
    def can_start_prefetch(self) -> bool:
        """True when loads ahead take no more than half of what is allowed: a demand that comes meanwhile is served."""
        return self.loads_in_flight < (self._max_loads + 1) // 2

    def load(self, page: Page) -> None:
        """Start to fault a page or tail in; the caller has seen that it fits."""
        page.evicted_at_bytes = None
        tail = page.state is PageState.STASHED
        self._table.move(page, PageState.LOADING_TAIL if tail else PageState.LOADING)
        self.loads_in_flight += 1
        frame = page.frame
        assert frame is not None
        if tail:
            (space,) = page.users
            self._emit(LoadTail(page.page_id, frame, page.group, space, page.tokens))
        else:
            self._emit(LoadPage(page.page_id, frame, page.group))

    def load_done(self, page_id: PageId) -> None:
        """A load's bytes are in the frame."""
        self._load_ended(page_id, failed=False)

    def load_failed(self, page_id: PageId) -> None:
        """A load found no good bytes: the page is lost."""
        self._load_ended(page_id, failed=True)

    def _load_ended(self, page_id: PageId, *, failed: bool) -> None:
        page = self._table.in_flight(page_id, PageState.LOADING, PageState.LOADING_TAIL)
        self.loads_in_flight -= 1
        self.counters.failed_loads += failed
        has_no_file = page_id in self._fileless
        self._fileless.discard(page_id)
        if failed:
            self._move(page, PageState.LOST)
        else:
            self.moves.note("prefetch" if page.prefetched else "fault", page, page.page_bytes, page.prefetched or "")
            self._table.move(page, PageState.CLEAN if page.state is PageState.LOADING else PageState.FILLING)
            if has_no_file and page.users:
                self.write_again(page)
        self._settle(page)

    # ---- writes -----------------------------------------------------------------------------------------------------

    def queue_write(self, page: Page) -> None:
        """Queue a page that was just sealed."""
        self._behind[page.page_id] = page

    def file_gone(self, page: Page) -> None:
        """A page's swap copy is gone: what is in RAM, or may come yet, is written again."""
        if page.state is PageState.CLEAN:
            self.write_again(page)
        elif page.state is PageState.LOADING:
            self._fileless.add(page.page_id)

    def write_again(self, page: Page) -> None:
        """A clean page's swap copy is gone: it is dirty again."""
        self._table.move(page, PageState.SEALED_DIRTY)
        self._urgent[page.page_id] = page

    def hurry(self, page: Page) -> None:
        """Let a dirty page be written before write-behind."""
        if self._behind.pop(page.page_id, None) is not None:
            self._urgent[page.page_id] = page

    def put_first(self, pages: Iterable[Page]) -> None:
        """The next writes are of these pages, as far as they are dirty."""
        mine = {page.page_id: page for page in pages if page.state is PageState.SEALED_DIRTY}
        for page_id in mine:
            for queue in (self._urgent, self._behind, self._rooms.waiting):
                queue.pop(page_id, None)
        self._urgent = mine | self._urgent

    def tick(self) -> None:
        """A second passed: when writes fail, a trial may be due."""
        self._ticks_left -= 1
        if self.writes_fail and self._ticks_left <= 0:
            self.try_one()

    def try_one(self) -> None:
        """Let one write start although writes fail, unless one is under way."""
        if self.writes_fail and self.writes_in_flight == 0:
            self._trial_due = True

    def allow(self, allowance_bytes: int | None, rooms: Mapping[Namespace, int]) -> None:
        """What may be written from here on: in all, and of namespaces with a quota of the disk.

        Args:
            allowance_bytes: by a write limit; None: there is none.
            rooms: by namespace, writes under way included; those that are not named: any.
        """
        self.allowance_bytes = allowance_bytes
        self._rooms.allot(rooms, self._writing.values(), (self._urgent, self._behind))

    def start_writes(self) -> None:
        """Start queued writes, urgent ones first, as far as the bounds allow."""
        for queue in (self._urgent, self._behind):
            while queue:
                if self.writes_fail and not self._trial_due:
                    return
                if self.writes_held:
                    return
                page = next(iter(queue.values()))
                if not self._rooms.has_room(page):
                    self._rooms.waiting[page.page_id] = queue.pop(page.page_id)
                    continue
                if self.writes_in_flight >= self._max_writes or not self._budget.can_write(page.page_bytes):
                    return
                del queue[page.page_id]
                self._trial_runs, self._trial_due = self.writes_fail, False
                self._table.move(page, PageState.WRITING)
                self._writing[page.page_id] = page
                self.counters.writes += 1
                self._rooms.take(page)
                if self.allowance_bytes is not None:
                    self.allowance_bytes -= page.page_bytes
                assert page.frame is not None
                self._emit(WritePage(page.page_id, page.frame, page.group))

    def write_done(self, page_id: PageId) -> None:
        """A page is durable in swap, so the disk takes writes."""
        self.writes_fail = self._trial_due = self._trial_runs = False
        page = self._write_ended(page_id, PageState.CLEAN)
        self.moves.note("swap_out", page, page.page_bytes)
        self._settle(page)

    def write_failed(self, page_id: PageId) -> None:
        """A write failed: the page stays resident and dirty until a retry succeeds."""
        page = self._write_ended(page_id, PageState.SEALED_DIRTY)
        self.counters.failed_writes += 1
        if not self.writes_fail:
            self._wait_ticks = 1
        elif self._trial_runs:
            self._wait_ticks = min(MAX_WAIT_TICKS, 2 * self._wait_ticks)
        self.writes_fail, self._trial_runs = True, False
        self._ticks_left = self._wait_ticks
        self._behind[page_id] = page
        self._settle(page)

    def _write_ended(self, page_id: PageId, state: PageState) -> Page:
        page = self._table.in_flight(page_id, PageState.WRITING)
        del self._writing[page_id]
        self._table.move(page, state)
        return page

    # ---- shared -----------------------------------------------------------------------------------------------------

    def check_queues(self) -> list[str]:
        """Problems found in the queues and counters (empty: none)."""
        problems = []
        states = [page.state for page in self._table]
        if self.writes_in_flight != states.count(PageState.WRITING):
            problems.append(f"{self.writes_in_flight} writes counted, {states.count(PageState.WRITING)} found")
        loads = states.count(PageState.LOADING) + states.count(PageState.LOADING_TAIL)
        if self.loads_in_flight != loads:
            problems.append(f"{self.loads_in_flight} loads counted, {loads} found")
        loading = {page.page_id for page in self._table if page.state is PageState.LOADING}
        if not self._fileless <= loading:
            problems.append(f"without a file are {sorted(self._fileless)}, loading {sorted(loading)}")
        queued = [*self._urgent, *self._behind, *self._rooms.waiting]
        dirty = {page.page_id for page in self._table if page.state is PageState.SEALED_DIRTY}
        if len(queued) != len(dirty) or set(queued) != dirty:
            problems.append(f"write queues hold {sorted(queued)}, dirty are {sorted(dirty)}")
        return [*problems, *self.ledger.check(self._table), *self.packing.check()]

    def _of(self, namespace: Namespace | None) -> Iterable[AddressSpace]:
        """The spaces of a namespace, which share pages with no others; None: all."""
        spaces = self._spaces.values()
        return spaces if namespace is None else [space for space in spaces if space.namespace == namespace]

    def _settle(self, page: Page) -> None:
        if page.users:
            self.drop_if_wanted(page)
            if page.state is PageState.FILLING:
                for space in page.users:
                    self.packing.left_alone(space)  # as far as it is: what it was loaded for may be over
        else:
            self.release(page)

    def _move(self, page: Page, state: PageState) -> None:
        if state not in RESIDENT | IN_RAM:
            self.ledger.dropped(page)
        was_packed = page.state is PageState.PACKED
        freed = self._table.move(page, state)
        if freed is not None:
            self._emit(DropFrame(freed))
        if was_packed:
            self._emit(DropPacked(page.page_id))
