"""Which pages a space maps: restore, append and seal, fork, cut, unmap.

Sealed pages are shared by mapping them once more; a cut inside a page copies its first tokens into a private tail,
which is packed: who only forks or cuts needs no frame for it.
Every method checks before it changes anything. What runs when (demand, eviction) is the pager's.

May import kvd.ids and the other modules of kvd.vm but pager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvd.ids import GroupId, Namespace, PageId, SpaceId
from kvd.vm import events as ev
from kvd.vm.address_space import AddressSpace, Segment
from kvd.vm.errors import IllegalEvent, NotResident
from kvd.vm.page import IN_FLIGHT, IN_RAM, OPEN, Page, PageState
from kvd.vm.page_table import PageTable
from kvd.vm.transfers import Transfers


class Mappings:
    """Builds and changes the segments of spaces. Owned by the pager, which alone calls it.

    Args:
        table: the page table.
        transfers: frees frames and takes sealed pages for writing.
        emit: takes the instructions, in order.
        new_page_id: gives ids that are unique for ever.
        group_count: cache groups of the model.
        page_tokens: tokens of one page.
        windows: tokens a query sees, per cache group; None for all.
    """

    def __init__(
        self,
        table: PageTable,
        transfers: Transfers,
        emit: Callable[[ev.Instruction], None],
        *,
        new_page_id: Callable[[], PageId],
        group_count: int,
        page_tokens: int,
        windows: tuple[int | None, ...],
    ) -> None:
        self._table = table
        self._transfers = transfers
        self._emit = emit
        self._new_page_id = new_page_id
        self._group_count = group_count
        self._page_tokens = page_tokens
        self._windows = windows

    # ---- new spaces -------------------------------------------------------------------------------------------------

    def create(self, space: SpaceId, page_bytes: tuple[int, ...], namespace: Namespace) -> AddressSpace:
        """An empty space.

        Raises:
            IllegalEvent: `page_bytes` does not have one positive figure per group.
        """
        if len(page_bytes) != self._group_count or min(page_bytes) < 1:
            raise IllegalEvent(f"space {space} with pages of {page_bytes} bytes cannot be created", space=int(space))
        return AddressSpace(
            space, page_bytes, page_tokens=self._page_tokens, windows=self._windows, namespace=namespace
        )

    def restore(self, event: ev.SpaceRestored) -> AddressSpace:
        """A space of pages in swap and tails in the log; pages that are known already are shared.

        Raises:
            IllegalEvent: the segments do not agree with each other or with known pages; nothing has changed.
        """
        space = self.create(event.space, event.page_bytes, event.namespace)
        images = {image.group: image for image in event.segments}
        tokens = self._restored_tokens(event)
        refs = [(ref, segment) for segment in space.segments for ref in images[segment.group].pages]
        if len({ref.page_id for ref, _ in refs}) != len(refs):
            raise IllegalEvent(f"space {event.space} cannot map a page twice")
        for ref, segment in refs:
            self._check_known(ref, segment, event.namespace)
        for ref, segment in refs:
            page = self._table.find(ref.page_id)
            if page is None:
                page = self._table.create(
                    ref.page_id,
                    segment.group,
                    segment.page_bytes,
                    PageState.EVICTED,
                    key=ref.key,
                    tokens=self._page_tokens,
                    namespace=event.namespace,
                )
            self._table.map(page, space.use)
            segment.sealed.append(page)
        space.tokens = tokens
        for segment in space.segments:
            if space.tail_tokens:
                tail = self._new_page(space, segment.group, PageState.STASHED, tokens=space.tail_tokens)
                tail.durable_tokens = space.tail_tokens
                segment.tail = tail
        self._slide(space)
        return space

    def fork(self, parent: AddressSpace, child: SpaceId, tokens: int) -> AddressSpace:
        """A space that maps the parent's pages up to `tokens`; of a page that is cut the tokens before it are copied.

        Raises:
            IllegalEvent: the parent does not have `tokens` tokens.
            NotResident: the page that is cut is not in RAM.
            NoRoomForCopy: no room for the copy; after each of these nothing has changed.
        """
        space = self.create(child, parent.page_bytes, parent.namespace)
        full, part = self._split(parent, tokens)
        sources = self._sources(parent, tokens)
        room = self._transfers.plan_copy_room(self._copy_bytes(sources, part), {page.page_id for page in sources})
        self._transfers.carry_out(room)
        for segment, origin in zip(space.segments, parent.segments, strict=True):
            segment.sealed.extend(origin.sealed[:full])
            for page in segment.sealed:
                self._table.map(page, space.use)
        space.tokens = tokens
        self._copy_tails(space, sources, part)
        self._slide(space)
        return space

    # ---- tokens come and go -----------------------------------------------------------------------------------------

    def add_growth(self, space: AddressSpace, segment: Segment) -> None:
        """Map one more empty page; the caller has seen that it fits."""
        page = self._new_page(space, segment.group, PageState.FILLING)
        segment.growth.append(page)
        assert page.frame is not None
        self._emit(ev.MapFrame(page.page_id, page.frame, page.group, space.space))

    def append(self, space: AddressSpace, event: ev.TokensAppended) -> None:
        """Fill the tail and growth pages; pages that become full are sealed and queued for writing.

        Raises:
            IllegalEvent: frames or keys do not suffice; nothing has changed.
        """
        sealed_pages = (space.tail_tokens + event.tokens) // self._page_tokens
        problem = None
        if not space.use.active or event.tokens < 0:
            problem = "it must be active"
        elif any(len(segment.growth) < space.growth_pages(event.tokens) for segment in space.segments):
            problem = "its growth frames do not suffice"
        elif any(s.tail is not None and s.tail.state is not PageState.FILLING for s in space.segments):
            problem = "its tail is not resident"
        elif [len(keys) for keys in event.keys] != [sealed_pages] * self._group_count:
            problem = f"each group needs {sealed_pages} keys for the pages it seals"
        if problem is not None:
            raise IllegalEvent(f"{event.tokens} tokens cannot be appended to space {event.space}: {problem}")
        for segment, keys in zip(space.segments, event.keys, strict=True):
            left = event.tokens
            unused_keys = iter(keys)
            while left:
                page = segment.tail if segment.tail is not None else segment.growth.pop(0)
                taken = min(left, self._page_tokens - page.tokens)
                page.tokens += taken
                left -= taken
                segment.tail = page
                if page.tokens == self._page_tokens:
                    page.key = next(unused_keys)
                    self._table.move(page, PageState.SEALED_DIRTY)
                    segment.sealed.append(page)
                    segment.tail = None
                    self._transfers.queue_write(page)
        space.tokens += event.tokens
        space.growth_tokens = max(0, space.growth_tokens - event.tokens)
        self._slide(space)

    def cut(self, space: AddressSpace, tokens: int) -> None:
        """Cut a space to `tokens`; growth pages go too. Cutting to the present length changes nothing.

        Raises:
            IllegalEvent: the space does not have `tokens` tokens.
            NotResident: the sealed page that is cut is not in RAM.
            NoRoomForCopy: no room for the copy; after each of these nothing has changed.
        """
        full, part = self._split(space, tokens)
        if tokens == space.tokens:
            return
        if part and full == len(space.segments[0].sealed):
            self.release_growth(space)
            self._shorten_tails(space, tokens)
            self._slide(space)
            return
        sources = self._sources(space, tokens)
        kept = full + (1 if part else 0)
        leaving = [page for segment in space.segments for page in (*segment.sealed[kept:], segment.tail) if page]
        growth = [page for segment in space.segments for page in segment.growth]
        room = self._transfers.plan_copy_room(
            self._copy_bytes(sources, part) - self._freed_bytes([*leaving, *growth]),
            {page.page_id for page in (*leaving, *sources)},
        )
        self.release_growth(space)
        for segment in space.segments:
            del segment.sealed[full:]
            segment.tail = None
        space.tokens = tokens
        # What leaves goes first, so that the copy can use its room; the page that is cut goes after the copy.
        self.unmap(space, leaving)
        self._transfers.carry_out(room)
        self._copy_tails(space, sources, part)
        self.unmap(space, sources)
        self._slide(space)

    # ---- unmapping --------------------------------------------------------------------------------------------------

    def unmap(self, space: AddressSpace, pages: Iterable[Page]) -> None:
        """Take the space from the users of `pages`; pages that nobody maps are let go."""
        for page in pages:
            self._table.unmap(page, space.use)
            if page.users:
                self._transfers.drop_if_wanted(page)
            else:
                self._transfers.release(page)

    def want_growth(self, space: AddressSpace, tokens: int) -> None:
        """Want frames for `tokens` more tokens; growth pages beyond them are given back."""
        space.growth_tokens = tokens
        wanted_pages = space.growth_pages(tokens)
        for segment in space.segments:
            surplus = segment.growth[wanted_pages:]
            del segment.growth[wanted_pages:]
            self.unmap(space, surplus)

    def release_growth(self, space: AddressSpace) -> None:
        """Give all growth pages back and want none."""
        self.want_growth(space, 0)

    def _slide(self, space: AddressSpace) -> None:
        """Let the windows follow the space's length: what fell behind may go, what came into sight is needed."""
        for segment in space.segments:
            first, before = space.first_page(segment, space.tokens), segment.first_page
            segment.first_page = first
            for page in segment.sealed[first:before]:
                self._table.show(page, space.use, in_window=True)
            for page in segment.sealed[before:first]:
                self._table.show(page, space.use, in_window=False)
                self._transfers.drop_if_wanted(page)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _restored_tokens(self, event: ev.SpaceRestored) -> int:
        groups = sorted(image.group for image in event.segments)
        lengths = {len(image.pages) * self._page_tokens + image.tail_tokens for image in event.segments}
        if groups != list(range(self._group_count)) or len(lengths) != 1:
            raise IllegalEvent(f"space {event.space} must be restored with one length in every group")
        if any(not 0 <= image.tail_tokens < self._page_tokens for image in event.segments):
            raise IllegalEvent(f"space {event.space} cannot be restored with a tail longer than a page")
        return lengths.pop()

    def _check_known(self, ref: ev.PageRef, segment: Segment, namespace: Namespace) -> None:
        known = self._table.find(ref.page_id)
        if known is None:
            return
        expected = (ref.key, segment.group, segment.page_bytes, namespace)
        if (known.key, known.group, known.page_bytes, known.namespace) != expected:
            raise IllegalEvent(
                f"page {ref.page_id} is known with another key, group, length or namespace", page=str(ref.page_id)
            )

    def _new_page(self, space: AddressSpace, group: GroupId, state: PageState, *, tokens: int = 0) -> Page:
        page = self._table.create(
            self._new_page_id(), group, space.page_bytes[group], state, tokens=tokens, namespace=space.namespace
        )
        self._table.map(page, space.use)
        return page

    def _split(self, space: AddressSpace, tokens: int) -> tuple[int, int]:
        """Whole pages before position `tokens`, and tokens of the page it cuts (0 at a page border)."""
        if not 0 <= tokens <= space.tokens:
            raise IllegalEvent(f"space {space.space} has {space.tokens} tokens and cannot be cut at {tokens}")
        return divmod(tokens, self._page_tokens)

    @staticmethod
    def _sources(space: AddressSpace, tokens: int) -> list[Page]:
        """Per group the page that is cut, sealed or tail; none at a page border."""
        sources = space.cut_pages(tokens)
        for page in sources:
            if page.state not in IN_RAM:
                raise NotResident(
                    f"space {space.space} is cut inside page {page.page_id} ({page.state}): CutWanted comes first",
                    space=int(space.space),
                    page=str(page.page_id),
                    state=str(page.state),
                )
        return sources

    def _copy_tails(self, space: AddressSpace, sources: list[Page], tokens: int) -> None:
        for source in sources:
            tail = self._new_page(space, source.group, PageState.PACKED, tokens=tokens)
            space.segments[source.group].tail = tail
            self._emit(ev.CopyTail(source.page_id, source.frame, tail.page_id, source.group, tokens))

    def _shorten_tails(self, space: AddressSpace, tokens: int) -> None:
        space.tokens = tokens
        for segment in space.segments:
            tail = segment.tail
            assert tail is not None
            # In RAM the tail may go on differently from what the log holds, so only the next commit makes it durable.
            # A stashed tail can only be read back from the log, which holds these tokens as a prefix.
            tail.durable_tokens = 0 if tail.state in OPEN else space.tail_tokens
            self._table.shorten(tail, space.tail_tokens)
            if tail.state is PageState.PACKED:
                self._emit(ev.CutPacked(tail.page_id, tail.tokens))

    def _copy_bytes(self, sources: Iterable[Page], tokens: int) -> int:
        """What copies of the first `tokens` tokens of these pages take."""
        return sum(self._table.packed_bytes(page.page_bytes, tokens) for page in sources)

    @staticmethod
    def _freed_bytes(pages: Iterable[Page]) -> int:
        """Bytes that come free at once when one user lets go of `pages`."""
        return sum(page.ram_bytes for page in pages if len(page.users) == 1 and page.state not in IN_FLIGHT)
