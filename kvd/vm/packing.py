"""Tails that no step needs: packed to the bytes of their tokens, and put back into a frame when a step does.

Theory of operation. A frame has room for a whole page, since kernels append in place; a tail fills it by half on
average. So a tail is in a frame while its space runs (or is pinned), and packed some time after: at once when room is
short, before anything is evicted, since nothing has to be read again for it; else after its space has been left alone
for `IDLE_TICKS` ticks, so that turns that follow each other closely pay nothing. A turn that waits in the queue keeps
its frame, too, while there is room. Unpacking costs a copy, which is far less than the step that it is for.

May import kvd.ids, kvd.vm.address_space, kvd.vm.events, kvd.vm.page, kvd.vm.page_table and kvd.vm.views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvd.ids import SpaceId
from kvd.vm.address_space import AddressSpace
from kvd.vm.events import Instruction, PackTail, UnpackTail
from kvd.vm.page import Page, PageState
from kvd.vm.page_table import PageTable
from kvd.vm.views import Counters

IDLE_TICKS: Final = 2
"""A space that has seen so many ticks (seconds) without use has its tails packed: after one to two seconds."""

BYTES_PER_TICK: Final = 32 << 20
"""A tick that packed so much packs no more: copying it takes about ten milliseconds from whoever decodes meanwhile."""


class Packing:
    """Packs tails and unpacks them. Owned by the pager's transfers.

    Args:
        table: the page table.
        spaces: all spaces, as the pager keeps them.
        emit: takes the instructions, in order.
        counters: where it counts what it does.
    """

    def __init__(
        self,
        table: PageTable,
        spaces: Mapping[SpaceId, AddressSpace],
        emit: Callable[[Instruction], None],
        counters: Counters,
    ) -> None:
        self._counters = counters
        self._table = table
        self._spaces = spaces
        self._emit = emit
        self._idle: dict[SpaceId, int] = {}  # spaces that may have tails to pack: ticks since they were used

    def left_alone(self, space: SpaceId) -> None:
        """Something that held the space's tail does no more; whatever else may hold it is looked at later."""
        self._idle.pop(space, None)
        self._idle[space] = 0

    def packable(self) -> Iterator[Page]:
        """Tails in frames that nothing needs, of the space that has been left alone longest first.

        The caller may pack a page before asking for the next.
        """
        for space in tuple(self._idle):
            tails = self._tails(space)
            if not tails:
                del self._idle[space]
            yield from tails

    def saved_bytes(self, page: Page) -> int:
        """What packing a tail gives back."""
        return page.ram_bytes - self._table.packed_bytes(page.page_bytes, page.tokens)

    def make_room(self, shortage_bytes: int) -> int:
        """Pack until `shortage_bytes` came free, or nothing is left to pack; returns what came free."""
        freed_bytes = 0
        for page in self.packable():
            if freed_bytes >= shortage_bytes:
                break
            freed_bytes += self.pack(page)
        return freed_bytes

    def tick(self) -> None:
        """A second passed: pack what has been left alone for long enough."""
        packed_bytes = 0
        for space in tuple(self._idle):
            found = self._spaces.get(space)
            if found is not None and found.use.hint == "queued":
                continue  # it runs soon
            self._idle[space] += 1
            if self._idle[space] < IDLE_TICKS or packed_bytes >= BYTES_PER_TICK:
                continue
            del self._idle[space]
            for page in self._tails(space):
                self.pack(page)
                packed_bytes += page.ram_bytes

    def pack(self, page: Page) -> int:
        """Pack a `packable` tail; returns the bytes that came free."""
        frame, before_bytes = page.frame, page.ram_bytes
        self._table.move(page, PageState.PACKED)
        self._counters.packs += 1
        assert frame is not None
        self._emit(PackTail(page.page_id, frame, page.tokens))
        return before_bytes - page.ram_bytes

    def unpack(self, page: Page) -> None:
        """Put a packed tail into a frame; the caller has seen that it fits."""
        self._table.move(page, PageState.FILLING)
        self._counters.unpacks += 1
        assert page.frame is not None
        self._emit(UnpackTail(page.page_id, page.frame, page.tokens))

    def check(self) -> Iterator[str]:
        """Problems found: a tail that could be packed and that nobody would ever pack (none: it never happens)."""
        for space, found in self._spaces.items():
            if space not in self._idle:
                yield from (f"page {page.page_id} keeps a frame for ever" for page in _packable(found))

    def _tails(self, space: SpaceId) -> list[Page]:
        found = self._spaces.get(space)
        return [] if found is None else _packable(found)


def _packable(space: AddressSpace) -> list[Page]:
    return [page for segment in space.segments if (page := segment.tail) is not None and page.packable]
