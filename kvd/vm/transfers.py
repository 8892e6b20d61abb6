"""Pages on their way between RAM and disk: write-behind, loads, and making room.

Theory of operation. Sealed pages are queued for writing at once, so that a turn's pages are durable early and room can
be made by dropping clean pages. Writes that stand between a demand and its room go before write-behind. A write that
failed waits for the next Tick and is not counted on meanwhile: with a full disk, clean pages of later spaces go first
rather than nothing at all. A page that its last user let go of while it is in flight stays until the transfer ends.

May import kvd.ids and the other modules of kvd.vm but pager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kvd.ids import PageId, SpaceId
from kvd.vm.address_space import AddressSpace
from kvd.vm.errors import NoRoomForCopy
from kvd.vm.events import DropFrame, ForgetPage, Instruction, LoadPage, LoadTail, WritePage
from kvd.vm.eviction import EvictionPolicy
from kvd.vm.page import IN_FLIGHT, Page, PageState
from kvd.vm.page_table import PageTable
from kvd.vm.views import Counters


class Transfers:
    """Starts and ends transfers and frees frames. Owned by the pager, which alone calls it.

    Args:
        table: the page table.
        spaces: all spaces, as the pager keeps them.
        policy: ranks victims.
        emit: takes the instructions, in order.
        max_writes_in_flight: bound on WritePage without an answer.
        max_loads_in_flight: bound on LoadPage and LoadTail without an answer.
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
        self.writes_in_flight = 0
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
        self._failed: dict[PageId, Page] = {}

    # ---- frames -----------------------------------------------------------------------------------------------------

    def drop(self, page: Page) -> None:
        """Drop a droppable page's frame; its bytes stay in swap or in the log."""
        self._move(page, page.stored_state)
        self.counters.evictions += 1

    def release(self, page: Page) -> None:
        """Let go of a page nobody maps; one in flight stays until its transfer ends."""
        if page.state in IN_FLIGHT:
            return
        in_swap = page.key is not None and page.state in (PageState.CLEAN, PageState.EVICTED, PageState.LOST)
        for queue in (self._urgent, self._behind, self._failed):
            queue.pop(page.page_id, None)
        self._move(page, PageState.RELEASED)
        if in_swap:
            self._emit(ForgetPage(page.page_id))

    def drop_if_wanted(self, page: Page) -> None:
        """Drop the frame when every space that maps the page was asked to be evicted."""
        if page.droppable and all(use.evict_wanted and not use.held for use in page.users.values()):
            self.drop(page)

    def make_room(self, want_bytes: int) -> None:
        """Evict until `want_bytes` more fit, as far as that can be done now.

        Clean victims go at once. Dirty ones are written first: they count as room on its way, and the demand goes on
        when their writes are done.
        """
        shortage_bytes = self._budget.shortage_bytes(want_bytes)
        if shortage_bytes <= 0:
            return
        for page in self._policy.order(self._spaces.values()):
            if page.droppable:
                self.drop(page)
            elif page.write_failed:
                continue
            elif page.state is PageState.SEALED_DIRTY:
                self.hurry(page)
            shortage_bytes -= page.page_bytes
            if shortage_bytes <= 0:
                return

    def plan_copy_room(self, want_bytes: int, keep: Collection[PageId]) -> list[Page]:
        """Find victims whose frames make room for a copy at once; drops none of them.

        Args:
            want_bytes: bytes of the copies, less what the same event frees before them.
            keep: pages that must not be victims.

        Raises:
            NoRoomForCopy: too much is held or dirty; nothing has changed.
        """
        shortage_bytes = self._budget.copy_shortage_bytes(want_bytes)
        victims: list[Page] = []
        if want_bytes <= 0 or shortage_bytes <= 0:
            return victims  # What takes no more than it frees is allowed even while a smaller budget is out of reach.
        for page in self._policy.order(self._spaces.values()):
            if page.droppable and page.page_id not in keep:
                victims.append(page)
                shortage_bytes -= page.page_bytes
                if shortage_bytes <= 0:
                    return victims
        raise NoRoomForCopy(
            f"no room for a copy of {want_bytes} bytes: {shortage_bytes} bytes are missing; retry when a request ends",
            retry_after_s=0.05,
            want_bytes=want_bytes,
            shortage_bytes=shortage_bytes,
            resident_bytes=self._budget.resident_bytes,
            budget_bytes=self._budget.budget_bytes,
        )

    # ---- loads ------------------------------------------------------------------------------------------------------

    @property
    def can_start_load(self) -> bool:
        """True when the bound on loads in flight allows another."""
        return self.loads_in_flight < self._max_loads

    def load(self, page: Page) -> None:
        """Start to fault a page or tail in; the caller has seen that it fits."""
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
        if failed:
            self._move(page, PageState.LOST)
        else:
            self._table.move(page, PageState.CLEAN if page.state is PageState.LOADING else PageState.FILLING)
        self._settle(page)

    # ---- writes -----------------------------------------------------------------------------------------------------

    def queue_write(self, page: Page) -> None:
        """Queue a page that was just sealed."""
        self._behind[page.page_id] = page

    def hurry(self, page: Page) -> None:
        """Let a dirty page be written before write-behind; one that failed keeps waiting for a Tick."""
        if self._behind.pop(page.page_id, None) is not None:
            self._urgent[page.page_id] = page

    def retry_failed(self) -> None:
        """Queue failed writes again."""
        for page in self._failed.values():
            page.write_failed = False
        self._behind = {**self._failed, **self._behind}
        self._failed = {}

    def start_writes(self) -> None:
        """Start queued writes, urgent ones first, as far as the bounds allow."""
        for queue in (self._urgent, self._behind):
            while queue:
                page = next(iter(queue.values()))
                if self.writes_in_flight >= self._max_writes or not self._budget.can_write(page.page_bytes):
                    return
                del queue[page.page_id]
                self._table.move(page, PageState.WRITING)
                self.writes_in_flight += 1
                self.counters.writes += 1
                assert page.frame is not None
                self._emit(WritePage(page.page_id, page.frame, page.group))

    def write_done(self, page_id: PageId) -> None:
        """A page is durable in swap."""
        self._settle(self._write_ended(page_id, PageState.CLEAN))

    def write_failed(self, page_id: PageId) -> None:
        """A write failed: the page stays resident and dirty until a retry succeeds."""
        page = self._write_ended(page_id, PageState.SEALED_DIRTY)
        self.counters.failed_writes += 1
        page.write_failed = True
        self._failed[page_id] = page
        self._settle(page)

    def _write_ended(self, page_id: PageId, state: PageState) -> Page:
        page = self._table.in_flight(page_id, PageState.WRITING)
        self.writes_in_flight -= 1
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
        queued = [*self._urgent, *self._behind, *self._failed]
        dirty = {page.page_id for page in self._table if page.state is PageState.SEALED_DIRTY}
        if len(queued) != len(dirty) or set(queued) != dirty:
            problems.append(f"write queues hold {sorted(queued)}, dirty are {sorted(dirty)}")
        return problems

    def _settle(self, page: Page) -> None:
        if page.users:
            self.drop_if_wanted(page)
        else:
            self.release(page)

    def _move(self, page: Page, state: PageState) -> None:
        freed = self._table.move(page, state)
        if freed is not None:
            self._emit(DropFrame(freed))
