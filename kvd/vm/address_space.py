"""An address space: per cache group, sealed pages in order, the tail, and frames mapped for growth.

All segments of a space hold the same tokens, so they have the same number of sealed pages and equally long tails.
A group of sliding layers needs the pages of its window only; those before it stay mapped, on disk.

Pure bookkeeping: the pager decides, the page table changes pages. May import kvd.ids, kvd.vm.page and kvd.vm.window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvd.ids import DEFAULT_NAMESPACE, GroupId, Namespace, SpaceId
from kvd.vm.page import STORED, Page, PageState, SpaceUse
from kvd.vm.window import first_seen_page


@dataclass(slots=True, eq=False)
class Segment:
    """The pages of one cache group of one space. Mutated by the pager only.

    Attributes:
        group: cache group.
        page_bytes: bytes of one of its pages.
        window_tokens: tokens a query of its layers sees; None for all.
        sealed: full pages, in order of position; may be shared.
        tail: the private page that is filling, None at a page border.
        growth: empty private pages mapped for tokens to come, in order.
        first_page: number of the first page the next step sees; the sealed pages before it are behind the window.
    """

    group: GroupId
    page_bytes: int
    window_tokens: int | None = None
    sealed: list[Page] = field(default_factory=list)
    tail: Page | None = None
    growth: list[Page] = field(default_factory=list)
    first_page: int = 0

    def mapped(self) -> Iterator[Page]:
        """Pages that hold tokens, head first."""
        yield from self.sealed
        if self.tail is not None:
            yield self.tail

    def needed(self) -> Iterator[Page]:
        """Pages the next step sees, head first."""
        yield from self.sealed[self.first_page :]
        if self.tail is not None:
            yield self.tail


class AddressSpace:
    """The token positions 0..n of one branch of one agent. Mutated by the pager only.

    Args:
        space: its id.
        page_bytes: bytes of one page, per cache group.
        page_tokens: tokens of one page.
        windows: tokens a query sees, per cache group; None for all.
        namespace: of its agent.

    Attributes:
        use: activity and recency, shared with the pages it maps.
        segments: one per cache group.
        tokens: tokens that have KV.
        growth_tokens: tokens to come that frames are wanted for.
    """

    def __init__(
        self,
        space: SpaceId,
        page_bytes: tuple[int, ...],
        *,
        page_tokens: int,
        windows: tuple[int | None, ...],
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> None:
        self.space = space
        self.namespace = namespace
        self.page_bytes = page_bytes
        self.page_tokens = page_tokens
        self.use = SpaceUse(space)
        self.segments = tuple(
            Segment(GroupId(group), each, window)
            for group, (each, window) in enumerate(zip(page_bytes, windows, strict=True))
        )
        self.tokens = 0
        self.growth_tokens = 0

    @property
    def tail_tokens(self) -> int:
        """Tokens of the tail; 0 at a page border."""
        return self.tokens % self.page_tokens

    @property
    def mapped_pages(self) -> int:
        """Pages that hold tokens, over all groups."""
        return -(-self.tokens // self.page_tokens) * len(self.segments)

    def growth_pages(self, tokens: int) -> int:
        """Empty pages per group that `tokens` more tokens need beside the tail."""
        pages_after = -(-(self.tail_tokens + tokens) // self.page_tokens)
        return pages_after - (1 if self.tail_tokens else 0)

    def working_set_bytes(self, extra_tokens: int) -> int:
        """Bytes of all frames that a step of `extra_tokens` tokens needs."""
        pages = -(-(self.tokens + extra_tokens) // self.page_tokens)
        return sum((pages - segment.first_page) * segment.page_bytes for segment in self.segments)

    def first_page(self, segment: Segment, tokens: int) -> int:
        """Number of the first page of a segment that a step after `tokens` tokens sees."""
        return first_seen_page(tokens, segment.window_tokens, self.page_tokens)

    def mapped(self) -> Iterator[Page]:
        """Pages that hold tokens, in order of position; groups of one position in order of group."""
        for index in range(len(self.segments[0].sealed)):
            for segment in self.segments:
                yield segment.sealed[index]
        for segment in self.segments:
            if segment.tail is not None:
                yield segment.tail

    def needed(self) -> Iterator[tuple[int, Page]]:
        """The pages the next step sees and their numbers, in order of position."""
        for index in range(min(s.first_page for s in self.segments), len(self.segments[0].sealed)):
            for segment in self.segments:
                if index >= segment.first_page:
                    yield index, segment.sealed[index]
        for segment in self.segments:
            if segment.tail is not None:
                yield len(segment.sealed), segment.tail

    def pages_tail_first(self) -> Iterator[Page]:
        """The pages of `mapped`, last position first."""
        for segment in self.segments:
            if segment.tail is not None:
                yield segment.tail
        for index in reversed(range(len(self.segments[0].sealed))):
            for segment in self.segments:
                yield segment.sealed[index]

    def cut_pages(self, tokens: int) -> list[Page]:
        """The pages, one per group, that a cut at `tokens` goes through; none at a page border."""
        full, part = divmod(min(tokens, self.tokens), self.page_tokens)
        if not part:
            return []
        pages = [s.sealed[full] if full < len(s.sealed) else s.tail for s in self.segments]
        return [page for page in pages if page is not None]

    def lost_at(self) -> int | None:
        """Where the space must be cut to go on, since a page that its next step sees is lost; None when none is."""
        return None if self.use.lost_pages == 0 else self.resumable_at(self.tokens)

    def resumable_at(self, tokens: int) -> int:
        """The deepest position, at most `tokens`, from which a step sees no page known to be lost, in any group.

        A position lower than `tokens` is a page border. A window that moves back may meet pages lost before, so this
        goes on until none is in sight.
        """
        tokens = min(tokens, self.tokens)
        while (lost := min(self._lost_numbers(tokens), default=None)) is not None:
            tokens = lost * self.page_tokens
        return tokens

    def _lost_numbers(self, tokens: int) -> Iterator[int]:
        """Per group the first lost page that a step after `tokens` tokens sees."""
        end = -(-tokens // self.page_tokens)
        for segment in self.segments:
            pages = [*segment.sealed[:end], *([segment.tail] if segment.tail and end > len(segment.sealed) else [])]
            first = self.first_page(segment, tokens)
            yield from [n for n in range(first, end) if pages[n].state is PageState.LOST][:1]

    def loadable(self) -> Iterator[Page]:
        """Pages to fault in, head first, up to the position that losses cut the space to."""
        if self.use.stored_bytes == 0:
            return
        end = self.lost_at()
        for number, page in self.needed():
            if end is not None and number * self.page_tokens >= end:
                return
            if page.state in STORED:
                yield page

    def packed(self) -> Iterator[Page]:
        """Tails that a step needs in a frame and that have none, though they are in RAM."""
        if self.use.packed_pages:
            tails = (segment.tail for segment in self.segments)
            yield from (tail for tail in tails if tail is not None and tail.state is PageState.PACKED)

    def demanded(self) -> Iterator[Page]:
        """Of `loadable`, the pages that are held."""
        return (page for page in self.loadable() if self.use.holds(page.page_id))

    def growth_missing(self) -> tuple[int, ...]:
        """Growth pages still to be mapped, per group."""
        wanted = self.growth_pages(self.growth_tokens)
        return tuple(max(0, wanted - len(segment.growth)) for segment in self.segments)

    @property
    def growth_mapped(self) -> bool:
        """True when all wanted growth pages are mapped."""
        wanted = self.growth_pages(self.growth_tokens)
        return all(len(segment.growth) >= wanted for segment in self.segments)
