"""The page table: every page the pager knows, its frame, its users, and the byte accounts that follow from them.

A page's state decides whether it owns a frame, what it takes in RAM, whether a copy of it is in flight and whether a
step can read it. So `move` is the one place where frames are handed out and bytes are booked, and they cannot drift
from the states.

May import kvd.ids, kvd.vm.page, kvd.vm.budget, kvd.vm.codes and kvd.vm.errors.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvd.ids import DEFAULT_NAMESPACE, FrameId, GroupId, Namespace, PageId, PageKey
from kvd.vm.budget import Budget
from kvd.vm.codes import page_code
from kvd.vm.errors import IllegalEvent
from kvd.vm.page import FIRST_STATES, IN_RAM, LOADING, READABLE, RESIDENT, STORED, Page, PageState, SpaceUse


class PageTable:
    """All pages and frames. Owned by the pager; `create`, `move`, `shorten`, `map`, `unmap` and `show` mutate it.

    Args:
        budget: the accounts it books into.
        page_tokens: tokens of one page.

    Attributes:
        budget: as given.
        tick: stamp for page histories, set by the pager at each event.
        issued_frames: frame numbers ever handed out; they are 0 to `issued_frames - 1`.
        free_frames: a heap of those that are free now; the lowest is reused first, so numbers stay dense.
    """

    def __init__(self, budget: Budget, page_tokens: int) -> None:
        self.budget = budget
        self._page_tokens = page_tokens
        self.tick = 0
        self.issued_frames = 0
        self.free_frames: list[FrameId] = []
        self._pages: dict[PageId, Page] = {}

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, page_id: PageId) -> Page | None:
        """The page of that id, or None."""
        return self._pages.get(page_id)

    def in_flight(self, page_id: PageId, *states: PageState) -> Page:
        """The page of that id, which must be in one of `states`.

        Raises:
            IllegalEvent: the page is unknown or in another state.
        """
        page = self._pages.get(page_id)
        if page is None or page.state not in states:
            found = "unknown" if page is None else str(page.state)
            wanted = ", ".join(states)
            raise IllegalEvent(f"page {page_id} is {found}, not {wanted}", page=str(page_id), state=found)
        return page

    def packed_bytes(self, page_bytes: int, tokens: int) -> int:
        """What `tokens` tokens of a page of `page_bytes` take without a frame."""
        return -(-page_bytes * tokens // self._page_tokens)

    def create(
        self,
        page_id: PageId,
        group: GroupId,
        page_bytes: int,
        state: PageState,
        *,
        key: PageKey | None = None,
        tokens: int = 0,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> Page:
        """Enter a page of `tokens` tokens in one of `FIRST_STATES`; a FILLING one gets a frame.

        Raises:
            IllegalEvent: the id exists already, or a page cannot begin in `state`.
        """
        if page_id in self._pages or state not in FIRST_STATES:
            raise IllegalEvent(f"page {page_id} cannot be created as {state}", page=str(page_id), state=str(state))
        page = Page(page_id, group, page_bytes, state, namespace, tokens=tokens, key=key)
        self._pages[page_id] = page
        page.code = page_code(page)
        page.history.append((self.tick, state))
        if state in RESIDENT:
            page.frame = self._take_frame()
        self.budget.book(resident_bytes=self._count_ram(page), namespace=namespace)
        return page

    def move(self, page: Page, state: PageState) -> FrameId | None:
        """Change a page's state; frame, accounts and its users' counters follow.

        Returns:
            The frame it gave back, None when it kept or got one.

        Raises:
            IllegalTransition: the table has no such move; nothing has changed.
        """
        page.check_move(state)
        for use in page.users.values():
            self._count(page, use, -1)
        before, page.state = page.state, state
        page.code = page_code(page)
        for use in page.users.values():
            self._count(page, use, 1)
        page.history.append((self.tick, state))
        resident = (state in RESIDENT) - (before in RESIDENT)
        copied = (state is PageState.WRITING) - (before is PageState.WRITING)
        self.budget.book(
            resident_bytes=self._count_ram(page),
            copied_bytes=copied * page.page_bytes,
            namespace=page.namespace,
        )
        if before in LOADING:
            self.budget.load_ends(page.page_bytes)
        if state in LOADING:
            self.budget.load_begins(page.page_bytes)
        freed: FrameId | None = None
        if resident > 0:
            page.frame = self._take_frame()
        elif resident < 0:
            freed, page.frame = page.frame, None
            if freed is not None:
                heapq.heappush(self.free_frames, freed)
        if state is PageState.RELEASED:
            del self._pages[page.page_id]
        return freed

    def shorten(self, page: Page, tokens: int) -> None:
        """A tail keeps its first `tokens` tokens; a packed one takes fewer bytes from here on."""
        page.tokens = tokens
        self.budget.book(resident_bytes=self._count_ram(page), namespace=page.namespace)

    def map(self, page: Page, use: SpaceUse) -> None:
        """Add a user.

        Raises:
            IllegalEvent: the space maps the page already; nothing has changed.
        """
        if use.space in page.users:
            raise IllegalEvent(f"space {use.space} maps page {page.page_id} already", page=str(page.page_id))
        page.users[use.space] = use
        self._count(page, use, 1)
        self._note_sharing(page, 2)

    def unmap(self, page: Page, use: SpaceUse) -> None:
        """Take a user away; what becomes of a page without users is the pager's decision."""
        del page.users[use.space]
        self._count(page, use, -1)
        use.behind_window.discard(page.page_id)
        use.unpinned_pages.discard(page.page_id)
        self._note_sharing(page, 1)

    def show(self, page: Page, use: SpaceUse, *, in_window: bool) -> None:
        """The page came into or fell behind the window of a space that maps it; the counters follow."""
        self._count(page, use, -1)
        if in_window:
            use.behind_window.discard(page.page_id)
        else:
            use.behind_window.add(page.page_id)
        self._count(page, use, 1)

    def _note_sharing(self, page: Page, users: int) -> None:
        """The page began or ceased to be shared, if it has so many users now: they see that, too."""
        if len(page.users) == users:
            page.code = page_code(page)
            for use in page.users.values():
                use.changed_at = self.tick

    def _count(self, page: Page, use: SpaceUse, sign: int) -> None:
        """Enter the page into (1) or take it out of (-1) the counters of a space that maps it."""
        use.changed_at = self.tick
        use.ram_pages += sign * (page.state in IN_RAM)
        if page.state not in READABLE and page.page_id not in use.behind_window:
            use.absent_pages += sign
            use.packed_pages += sign * (page.state is PageState.PACKED)
            use.lost_pages += sign * (page.state is PageState.LOST)
            use.stored_bytes += sign * page.page_bytes * (page.state in STORED)

    def _count_ram(self, page: Page) -> int:
        """Enter what the page takes in RAM as it is now; returns how much more that is than before."""
        before = page.ram_bytes
        if page.state in RESIDENT:
            page.ram_bytes = page.page_bytes
        elif page.state is PageState.PACKED:
            page.ram_bytes = self.packed_bytes(page.page_bytes, page.tokens)
        else:
            page.ram_bytes = 0
        return page.ram_bytes - before

    def _take_frame(self) -> FrameId:
        if self.free_frames:
            return heapq.heappop(self.free_frames)
        self.issued_frames += 1
        return FrameId(self.issued_frames - 1)
