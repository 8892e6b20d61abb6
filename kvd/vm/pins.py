"""Which pages pins hold: those of pinned spaces, head first, as far as the limit of pins goes.

Theory of operation. What is pinned cannot be evicted, so a pin that grows with its space would in the end leave room
for nobody else. So pins together hold at most a part of what is usable. In the order the spaces were pinned, and in
each from its head on, pages are held as long as they fit; the rest of a space is as any other's: there while there is
room, evicted in its turn, read when a request needs it. The first page that does not fit ends what its space's pin
holds, so what is held of a space is its beginning. A page that several pinned spaces map counts once. Pins of a
namespace with a quota hold at most as large a part of that.

It is reckoned anew when a space is pinned, unpinned, cut, at rest or gone, and when the limit changes: a larger limit
gives back what a smaller one took. While a request runs on a space all of it is held, whatever its pin holds.

May import kvd.ids and the other modules of kvd.vm but pager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvd.ids import Namespace, PageId, SpaceId
from kvd.vm.address_space import AddressSpace
from kvd.vm.budget import Budget
from kvd.vm.page import Page


class Pins:
    """Owned by the pager, which alone calls it; sole mutator of `SpaceUse.pinned` and `SpaceUse.unpinned_pages`.

    Args:
        spaces: all spaces, as the pager keeps them.
        budget: says how much pins may hold.
        on_held: told of a space of which more is held than before, and which pages.
        on_let_go: told of a space of which less is.

    Attributes:
        is_due: what pins hold may have changed.
        unpinned_bytes: of pages that pinned spaces need, those that the limit leaves out.
    """

    def __init__(
        self,
        spaces: Mapping[SpaceId, AddressSpace],
        budget: Budget,
        on_held: Callable[[AddressSpace, list[Page]], None],
        on_let_go: Callable[[SpaceId], None],
    ) -> None:
        self._spaces = spaces
        self._budget = budget
        self._on_held = on_held
        self._on_let_go = on_let_go
        self._pinned: dict[SpaceId, None] = {}  # an ordered set
        self._seen_limit_bytes = 0
        self.is_due = False
        self.unpinned_bytes = 0

    def pin(self, space: AddressSpace) -> None:
        """The user pinned a space."""
        if not space.use.pinned:
            space.use.pinned = True
            space.use.unpinned_pages = {page.page_id for _, page in space.needed()}  # until it is looked at
            self._pinned[space.space] = None
        self.is_due = True

    def unpin(self, space: AddressSpace) -> None:
        """The user took the pin back, or the space is gone."""
        space.use.pinned = False
        space.use.unpinned_pages = set()
        self._pinned.pop(space.space, None)
        self.is_due = True

    def review(self) -> None:
        """Reckon anew what is held, if anything has changed."""
        limit_bytes = self._budget.pin_limit_bytes
        if not self.is_due and limit_bytes == self._seen_limit_bytes:
            return
        self.is_due, self._seen_limit_bytes = False, limit_bytes
        self.unpinned_bytes = 0
        held: set[PageId] = set()
        room_bytes = limit_bytes
        rooms_bytes: dict[Namespace, int] = {}  # of namespaces
        for space in map(self._spaces.__getitem__, self._pinned):
            unpinned: dict[PageId, Page] = {}
            own_bytes = rooms_bytes.get(space.namespace, self._budget.pin_quota_bytes(space.namespace))
            for _, page in space.needed():
                if unpinned or (page.page_id not in held and page.page_bytes > min(room_bytes, own_bytes)):
                    unpinned[page.page_id] = page
                elif page.page_id not in held:
                    held.add(page.page_id)
                    room_bytes -= page.page_bytes
                    own_bytes -= page.page_bytes
            rooms_bytes[space.namespace] = own_bytes
            self.unpinned_bytes += sum(page.page_bytes for page in unpinned.values())
            before, space.use.unpinned_pages = space.use.unpinned_pages, set(unpinned)
            space.use.pin_changes += before != unpinned.keys()
            if unpinned.keys() - before:
                self._on_let_go(space.space)
            if before - unpinned.keys():
                self._on_held(space, [page for _, page in space.needed() if page.page_id in before - unpinned.keys()])

    def held_pages(self, space: AddressSpace) -> Iterator[Page]:
        """Pages that a space's pin holds."""
        if space.use.pinned:
            for _, page in space.needed():
                if page.page_id not in space.use.unpinned_pages:
                    yield page

    def check(self) -> Iterator[str]:
        """Problems found (none)."""
        held: dict[PageId, int] = {}
        for space in self._spaces.values():
            if space.use.pinned != (space.space in self._pinned) or (space.use.unpinned_pages and not space.use.pinned):
                yield f"space {space.space} is pinned: {space.use.pinned}, booked: {space.space in self._pinned}"
            if not space.use.active:  # what grew since the last look counts at the end of the request
                held |= {page.page_id: page.page_bytes for page in self.held_pages(space)}
        if sum(held.values()) > self._budget.pin_limit_bytes:
            yield f"pins hold {sum(held.values())} bytes, {self._budget.pin_limit_bytes} are the limit"
