"""What is demanded from disk and in RAM, in which order, and write-behind after it.

Theory of operation. A space demands all that its next step sees while it is active, what its pin holds while it is
pinned, and the frames it wants for growth; pages behind the window of a sliding group are not demanded. A cut to come
demands the one page per group that it goes through, which is then kept until the cut is done. A packed tail is in RAM:
a step needs it in a frame, a cut does not. The head of the demand queue is never overtaken, so a large space cannot be
starved by small ones; while every active and pinned space together fit the budget's usable bytes, everything else can
be evicted and each transfer that ends moves the queue on. When no demand waits, pages are loaded ahead
(`kvd.vm.prefetch`).

May import kvd.ids and the other modules of kvd.vm but pager.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvd.ids import SpaceId
from kvd.vm.address_space import AddressSpace
from kvd.vm.budget import Budget
from kvd.vm.mapping import Mappings
from kvd.vm.page import IN_RAM, STORED, Page, PageState
from kvd.vm.prefetch import Expectations
from kvd.vm.reclaim import Reclaim
from kvd.vm.transfers import Transfers


class Demand:
    """Owned by the pager, which alone calls it.

    Args:
        spaces: all spaces, as the pager keeps them.
        budget: what may be had.
        transfers: loads, writes, makes room.
        mappings: maps growth frames.
        expected: what to load ahead.
        reclaim: evicts beyond what is demanded.
    """

    def __init__(
        self,
        spaces: Mapping[SpaceId, AddressSpace],
        budget: Budget,
        transfers: Transfers,
        mappings: Mappings,
        expected: Expectations,
        reclaim: Reclaim,
    ) -> None:
        self._spaces = spaces
        self._budget = budget
        self._transfers = transfers
        self._mappings = mappings
        self._expected = expected
        self._reclaim = reclaim
        self._demand: dict[SpaceId, None] = {}  # an ordered set of spaces with work queued
        self._cuts: dict[SpaceId, list[Page]] = {}

    @property
    def waiting_spaces(self) -> int:
        """Spaces whose demand is not fully under way."""
        return len(self._demand)

    # ---- what is wanted ---------------------------------------------------------------------------------------------

    def want(self, space: AddressSpace) -> None:
        """The space demands what it lacks; its place in the queue stays if it has one."""
        self._demand.setdefault(space.space)

    def settle(self, space: AddressSpace) -> None:
        """The space is used less than before: it demands nothing more, unless something still holds it."""
        if not (space.use.demands or space.space in self._cuts):
            self._demand.pop(space.space, None)

    def forget(self, space: AddressSpace) -> None:
        """The space is gone."""
        self._demand.pop(space.space, None)
        self._let_cut_go(space.space)

    def want_cut(self, space: AddressSpace, tokens: int | None) -> None:
        """Demand and keep the pages that a cut at `tokens` goes through, instead of those kept so far."""
        pages = [] if tokens is None else space.cut_pages(tokens)
        for page in pages:
            page.keepers += 1
        self._transfers.ledger.used(pages)
        self._let_cut_go(space.space)
        if tokens is None:
            self.settle(space)
            return
        self._cuts[space.space] = pages
        self.want(space)

    def can_cut(self, space: SpaceId) -> bool:
        """True when every page that the last `want_cut` named is in RAM."""
        return all(page.state in IN_RAM for page in self._cuts.get(space, ()))

    def _let_cut_go(self, space: SpaceId) -> None:
        for page in self._cuts.pop(space, ()):
            page.keepers -= 1
            self._transfers.drop_if_wanted(page)
            self._transfers.packing.left_alone(space)

    # ---- carrying it on ---------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Carry queued work on as far as the budget allows."""
        while self._demand:
            space = self._spaces[next(iter(self._demand))]
            if not self._serve(space):
                break
            del self._demand[space.space]
        if not self._demand:
            self._transfers.make_room(0)
        self._reclaim.look()
        self._transfers.start_writes()
        if not self._demand and self._expected.is_due and self._transfers.can_start_prefetch:
            self._prefetch()

    def _serve(self, space: AddressSpace) -> bool:
        """Unpack and load what the space lacks and map its growth, as far as possible; True when all is under way."""
        growth = space.growth_missing()
        growth_bytes = sum(count * page_bytes for count, page_bytes in zip(growth, space.page_bytes, strict=True))
        packed = [page for page in space.packed() if space.use.holds(page.page_id)]
        loads = self._loads(space)
        more_bytes = sum(page.page_bytes - page.ram_bytes for page in (*packed, *loads))
        self._transfers.make_room(more_bytes + growth_bytes, space.namespace)
        for page in packed:
            if not self._budget.can_map(page.page_bytes - page.ram_bytes):
                return False
            self._transfers.packing.unpack(page)
        for page in loads:
            if not (self._transfers.can_start_load and self._budget.can_load(page.page_bytes)):
                return False
            space.use.faults += page.state is PageState.EVICTED
            self._transfers.count_fault(page)
            self._transfers.load(page)
        for segment, count in zip(space.segments, growth, strict=True):
            for _ in range(count):
                if not self._budget.can_map(segment.page_bytes):
                    return False
                self._mappings.add_growth(space, segment)
        return True

    def _loads(self, space: AddressSpace) -> list[Page]:
        """From disk: what the space's next step sees and is held, and what a cut to come goes through."""
        loads = list(space.demanded())
        return loads + [page for page in self._cuts.get(space.space, ()) if page.state in STORED and page not in loads]

    def _prefetch(self) -> None:
        """Load ahead what finds room; what the bound on loads holds up goes on when one of them ends."""
        for space, reason, pages in self._expected.next_pages():
            for page in pages:
                if not self._transfers.can_start_prefetch:
                    return
                if not self._transfers.make_prefetch_room(page.page_bytes, space.use, space.namespace):
                    break
                if not self._budget.can_load(page.page_bytes):
                    return
                self._transfers.load(page)
                # whoever holds it and has lost a page before it demands nothing: then it comes in for both
                if not page.held:
                    self._transfers.ledger.loaded(page, reason)
        self._expected.looked()
