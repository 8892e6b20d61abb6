"""Which pages leave RAM first. A policy only ranks; the pager decides how many go and how.

May import kvd.ids, kvd.vm.page and kvd.vm.address_space only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from kvd.ids import PageId, SpaceId
from kvd.vm.address_space import AddressSpace
from kvd.vm.page import Page, PageState, SpaceUse

Rank = tuple[float, ...]
"""How late a space's pages are evicted; the least goes first."""


class EvictionPolicy(Protocol):
    """Ranks pages for eviction.

    Attributes:
        name: what statistics call it.
    """

    name: str

    def order(self, spaces: Iterable[AddressSpace]) -> Iterator[Page]:
        """Yield pages that may leave RAM, first victim first, each once.

        A yielded page is either droppable at once (`Page.droppable`) or dirty (SEALED_DIRTY, WRITING) and can be
        dropped after its write. Pages an active or pinned space needs, or a cut to come does, are never yielded, nor
        are those behind the window of every space that maps them: they go by themselves. The caller may drop a page
        before asking for the next.

        Args:
            spaces: all spaces.
        """


class SpaceOrder(ABC):
    """Space by space, as `ranks` says; within one clean before dirty, tail end before head.

    A page that several spaces need goes with the one of them that goes last. The tail end goes first because a head
    without its tail can still be continued by a fork, never the reverse. Spaces that are expected to run
    (`SpaceUse.eviction_claim`) go after all others and of them the latest first: with agents that take turns the least
    recently used one is the one that is needed next.
    """

    name: str

    @abstractmethod
    def ranks(self, spaces: Sequence[AddressSpace]) -> Mapping[SpaceId, Rank]:
        """The rank of each space; `SpaceUse.eviction_claim` comes first in it."""

    def order(self, spaces: Iterable[AddressSpace]) -> Iterator[Page]:
        """See `EvictionPolicy.order`."""
        everything = list(spaces)
        ranks = self.ranks(everything)
        # Spaces that are wholly absent are skipped: there may be many, and this runs whenever room is short.
        idle = [s for s in everything if s.use.ram_pages and not s.use.held]
        goes_with: dict[PageId, SpaceId | None] = {}  # of shared pages: looked up once, however many spaces map them
        for space in sorted(idle, key=lambda s: ranks[s.space]):
            dirty: list[Page] = []
            for page in space.pages_tail_first():
                if not page.ram_bytes:
                    continue
                if len(page.users) == 1:
                    if page.held or page.page_id in space.use.behind_window:
                        continue
                else:
                    if page.page_id not in goes_with:
                        goes_with[page.page_id] = self._last_space(page, ranks)
                    if goes_with[page.page_id] != space.space:
                        continue
                if page.droppable:
                    yield page
                elif page.state in (PageState.SEALED_DIRTY, PageState.WRITING):
                    dirty.append(page)
            yield from dirty

    @staticmethod
    def _last_space(page: Page, ranks: Mapping[SpaceId, Rank]) -> SpaceId | None:
        """The space that goes last of those that need a shared page; None when it must stay, or nobody needs it."""
        needed_by = page.needed_by
        if page.held or not needed_by:
            return None
        return max(needed_by, key=lambda use: ranks[use.space]).space


class LruPolicy(SpaceOrder):
    """Least recently used space first."""

    name = "lru"

    def ranks(self, spaces: Sequence[AddressSpace]) -> Mapping[SpaceId, Rank]:
        """See `SpaceOrder.ranks`."""
        return {space.space: (*space.use.eviction_claim, space.use.last_used) for space in spaces}


class ReusePolicy(SpaceOrder):
    """The space whose next turn is estimated to be farthest away first: Belady's rule with a guess for the future.

    Distances are turns of anybody. A space that came back twice is expected after the shorter of its last two gaps; one
    pause must not make it look rare. So with agents in a round the one that ran last goes first, where least recently
    used takes the one that is needed next, and what a batch goes over once in a while goes before what people work
    with. Of a space that is overdue, or came back less than twice, is only known how long it has been away: the longer,
    the longer it will be. Half a gap is taken off for the overdue one, since it does come back; a space without a habit
    counts twice its absence, since it may never. Where nobody has a habit this is least recently used.
    """

    name = "reuse"

    def ranks(self, spaces: Sequence[AddressSpace]) -> Mapping[SpaceId, Rank]:
        """See `SpaceOrder.ranks`."""
        now = max((space.use.last_turn for space in spaces), default=0)
        return {
            space.space: (*space.use.eviction_claim, -self.distance_turns(space.use, now), space.use.last_used)
            for space in spaces
        }

    @staticmethod
    def distance_turns(use: SpaceUse, now: int) -> float:
        """Estimated turns until the space's next one.

        Args:
            use: of the space.
            now: the pager's turn clock.
        """
        away = now - use.last_turn
        gaps = use.gaps_turns
        if len(gaps) < 2:
            return 2 * away
        gap = min(gaps)
        return gap - away if away < gap else away - gap / 2


POLICIES: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {each.name: each for each in (LruPolicy, ReusePolicy)}
"""By the names that `kvd serve --eviction` takes."""
