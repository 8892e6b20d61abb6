"""What is wanted from disk and in RAM, in which order: demands first, then write-behind, then hints.

Theory of operation. A space demands all that its next step sees while it is held (active or pinned), and the frames it
wants for growth; pages behind the window of a sliding group are not demanded. A cut to come demands the one page per
group that it goes through, which is then kept until the cut is done. The head of the demand queue is never overtaken,
so a large space cannot be starved by small ones; while every active and pinned space together fit the budget's usable
bytes, everything else can be evicted and each transfer that ends moves the queue on. Hints get what is free, and what
clean pages of idle spaces leave; none waits for room.

May import kvd.ids and the other modules of kvd.vm but pager.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvd.ids import SpaceId
from kvd.vm.address_space import AddressSpace
from kvd.vm.budget import Budget
from kvd.vm.mapping import Mappings
from kvd.vm.page import READABLE, STORED, Page, PageState
from kvd.vm.transfers import Transfers


class Demand:
    """Owned by the pager, which alone calls it.

    Args:
        spaces: all spaces, as the pager keeps them.
        budget: what may be had.
        transfers: loads, writes, makes room.
        mappings: maps growth frames.
    """

    def __init__(
        self, spaces: Mapping[SpaceId, AddressSpace], budget: Budget, transfers: Transfers, mappings: Mappings
    ) -> None:
        self._spaces = spaces
        self._budget = budget
        self._transfers = transfers
        self._mappings = mappings
        # Ordered sets of spaces with work queued: what is demanded, and what was only hinted at.
        self._demand: dict[SpaceId, None] = {}
        self._hints: dict[SpaceId, None] = {}
        self._cuts: dict[SpaceId, list[Page]] = {}

    @property
    def waiting_spaces(self) -> int:
        """Spaces whose demand is not fully under way."""
        return len(self._demand)

    # ---- what is wanted ---------------------------------------------------------------------------------------------

    def want(self, space: AddressSpace) -> None:
        """The space demands what it lacks; its place in the queue stays if it has one."""
        self._hints.pop(space.space, None)
        self._demand.setdefault(space.space)

    def settle(self, space: AddressSpace) -> None:
        """The space is used less than before: it demands nothing more, unless something still holds it."""
        if not (space.use.held or space.space in self._cuts):
            self._demand.pop(space.space, None)

    def hint(self, space: AddressSpace) -> None:
        """The space would be better in RAM."""
        space.use.hinted = True
        self._hints[space.space] = None

    def forget_hint(self, space: AddressSpace) -> None:
        """It would not any more."""
        space.use.hinted = False
        self._hints.pop(space.space, None)

    def forget(self, space: AddressSpace) -> None:
        """The space is gone."""
        self._demand.pop(space.space, None)
        self._hints.pop(space.space, None)
        self._let_cut_go(space.space)

    def want_cut(self, space: AddressSpace, tokens: int | None) -> None:
        """Demand and keep the pages that a cut at `tokens` goes through, instead of those kept so far."""
        pages = [] if tokens is None else space.cut_pages(tokens)
        for page in pages:
            page.keepers += 1
        self._let_cut_go(space.space)
        if tokens is None:
            self.settle(space)
            return
        self._cuts[space.space] = pages
        self.want(space)

    def can_cut(self, space: SpaceId) -> bool:
        """True when every page that the last `want_cut` named is in RAM."""
        return all(page.state in READABLE for page in self._cuts.get(space, ()))

    def _let_cut_go(self, space: SpaceId) -> None:
        for page in self._cuts.pop(space, ()):
            page.keepers -= 1
            self._transfers.drop_if_wanted(page)

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
        self._transfers.start_writes()
        if not self._demand:
            self._prefetch()

    def _serve(self, space: AddressSpace) -> bool:
        """Load what the space lacks and map its growth, as far as possible; True when all of it is under way."""
        growth = space.growth_missing()
        growth_bytes = sum(count * page_bytes for count, page_bytes in zip(growth, space.page_bytes, strict=True))
        loads = self._loads(space)
        self._transfers.make_room(sum(page.page_bytes for page in loads) + growth_bytes)
        for page in loads:
            if not (self._transfers.can_start_load and self._budget.can_load(page.page_bytes)):
                return False
            space.use.faults += page.state is PageState.EVICTED
            self._transfers.load(page)
            self._transfers.counters.faults += 1
        for segment, count in zip(space.segments, growth, strict=True):
            for _ in range(count):
                if not self._budget.can_map(segment.page_bytes):
                    return False
                self._mappings.add_growth(space, segment)
        return True

    def _loads(self, space: AddressSpace) -> list[Page]:
        """From disk: what the space's next step sees while it is held, and what a cut to come goes through."""
        loads = list(space.loadable()) if space.use.held else []
        return loads + [page for page in self._cuts.get(space.space, ()) if page.state in STORED and page not in loads]

    def _prefetch(self) -> None:
        while self._hints:
            space = self._spaces[next(iter(self._hints))]
            for page in space.loadable():
                if not self._transfers.make_hint_room(page.page_bytes):
                    break  # A hint is worth what is free or clean; what does not fit now is not waited for.
                if not (self._transfers.can_start_load and self._budget.can_load(page.page_bytes)):
                    return
                self._transfers.load(page)
                self._transfers.counters.prefetches += 1
            del self._hints[space.space]
