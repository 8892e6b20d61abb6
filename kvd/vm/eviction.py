"""Which pages lose their frames first. A policy only ranks; the pager decides how many go and how.

May import kvd.vm.page and kvd.vm.address_space only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from kvd.vm.address_space import AddressSpace
from kvd.vm.page import Page, PageState


class EvictionPolicy(Protocol):
    """Ranks pages for eviction."""

    def order(self, spaces: Iterable[AddressSpace]) -> Iterator[Page]:
        """Yield pages that may lose their frame, first victim first, each once.

        A yielded page is either droppable at once (`Page.droppable`) or dirty (SEALED_DIRTY, WRITING) and can be
        dropped after its write. Pages an active or pinned space needs, or a cut to come does, are never yielded, nor
        are those behind the window of every space that maps them: they go by themselves. The caller may drop a page
        before asking for the next.

        Args:
            spaces: all spaces.
        """


class LruPolicy:
    """Least recently used space first, expected spaces last; within one clean before dirty, tail end before head.

    Of spaces that are expected to run (`SpaceUse.eviction_rank`) the latest goes first: with agents that take turns the
    least recently used one is the one that is needed next. A page that several spaces need goes with the one of them
    that goes last. The tail end goes first because a head without its tail can still be continued by a fork, never the
    reverse.
    """

    def order(self, spaces: Iterable[AddressSpace]) -> Iterator[Page]:
        """See `EvictionPolicy.order`."""
        # Spaces that are wholly absent are skipped: there may be many, and this runs whenever room is short.
        idle = (s for s in spaces if not s.use.held and s.use.readable_pages)
        for space in sorted(idle, key=lambda s: s.use.eviction_rank):
            dirty: list[Page] = []
            for page in space.pages_tail_first():
                if page.keepers or not self._belongs(page, space):
                    continue
                if page.droppable:
                    yield page
                elif page.state in (PageState.SEALED_DIRTY, PageState.WRITING):
                    dirty.append(page)
            yield from dirty

    @staticmethod
    def _belongs(page: Page, space: AddressSpace) -> bool:
        needed_by = page.needed_by
        if not needed_by or page.held:
            return False
        return max(needed_by, key=lambda use: use.eviction_rank) is space.use
