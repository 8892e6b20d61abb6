"""An address space: per cache group, sealed pages in order, the tail, and frames mapped for growth.

All segments of a space hold the same tokens, so they have the same number of sealed pages and equally long tails.
Pure bookkeeping: the pager decides, the page table changes pages. May import kvd.ids, kvd.vm.page and kvd.vm.events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvd.ids import GroupId, SpaceId
from kvd.vm.page import STORED, Page, PageState, SpaceUse


@dataclass(slots=True, eq=False)
class Segment:
    """The pages of one cache group of one space. Mutated by the pager only.

    Attributes:
        group: cache group.
        page_bytes: bytes of one of its pages.
        sealed: full pages, in order of position; may be shared.
        tail: the private page that is filling, None at a page border.
        growth: empty private pages mapped for tokens to come, in order.
    """

    group: GroupId
    page_bytes: int
    sealed: list[Page] = field(default_factory=list)
    tail: Page | None = None
    growth: list[Page] = field(default_factory=list)

    def mapped(self) -> Iterator[Page]:
        """Pages that hold tokens, head first."""
        yield from self.sealed
        if self.tail is not None:
            yield self.tail


class AddressSpace:
    """The token positions 0..n of one branch of one agent. Mutated by the pager only.

    Args:
        space: its id.
        page_bytes: bytes of one page, per cache group.
        page_tokens: tokens of one page.

    Attributes:
        use: activity and recency, shared with the pages it maps.
        segments: one per cache group.
        tokens: tokens that have KV.
        growth_tokens: tokens to come that frames are wanted for.
    """

    def __init__(self, space: SpaceId, page_bytes: tuple[int, ...], *, page_tokens: int) -> None:
        self.space = space
        self.page_bytes = page_bytes
        self.page_tokens = page_tokens
        self.use = SpaceUse(space)
        self.segments = tuple(Segment(GroupId(group), each) for group, each in enumerate(page_bytes))
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
        """Bytes of all frames the space needs to run with `extra_tokens` more tokens."""
        pages = -(-(self.tokens + extra_tokens) // self.page_tokens)
        return pages * sum(self.page_bytes)

    def mapped(self) -> Iterator[Page]:
        """Pages that hold tokens, in order of position; groups of one position in order of group."""
        for index in range(len(self.segments[0].sealed)):
            for segment in self.segments:
                yield segment.sealed[index]
        for segment in self.segments:
            if segment.tail is not None:
                yield segment.tail

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
        """First token position whose page is lost in some group; None when none is."""
        if self.use.lost_pages == 0:
            return None
        group_count = len(self.segments)
        for number, page in enumerate(self.mapped()):
            if page.state is PageState.LOST:
                return number // group_count * self.page_tokens
        return None

    def loadable(self) -> Iterator[Page]:
        """Pages to fault in, head first, up to the first lost position (what follows it will be cut)."""
        if self.use.stored_bytes == 0:
            return
        end = self.lost_at()
        last = self.mapped_pages if end is None else end // self.page_tokens * len(self.segments)
        for page in islice(self.mapped(), last):
            if page.state in STORED:
                yield page

    def growth_missing(self) -> tuple[int, ...]:
        """Growth pages still to be mapped, per group."""
        wanted = self.growth_pages(self.growth_tokens)
        return tuple(max(0, wanted - len(segment.growth)) for segment in self.segments)

    @property
    def growth_mapped(self) -> bool:
        """True when all wanted growth pages are mapped."""
        wanted = self.growth_pages(self.growth_tokens)
        return all(len(segment.growth) >= wanted for segment in self.segments)
