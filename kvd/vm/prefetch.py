"""Pages loaded before anybody demands them: for whom, at whose expense, and what became of it.

Theory of operation. Three things make a page worth loading ahead: a turn of its space waits (`queued`), a client said
so (`hint`), or the space is expected to run soon (`predicted`; the engine names all such spaces, the soonest first).
The first two are treated alike. Nothing is loaded ahead while a demand waits, nor when that would leave no load to a
demand that comes now. A prefetch takes free frames, then clean frames of spaces that nothing holds and that are
expected less: a hint takes from predictions and from idle spaces, a prediction from later ones and from idle spaces,
the least recently used first. So frames only ever go to who is expected more, and two prefetches cannot rob each other
in turn. A space that the user wanted on disk is not loaded ahead because it is predicted.

A client's hint is worth what it finds: what does not fit is not waited for. A turn that waits and a prediction are
looked at again whenever room may have come, until the space runs, the turn is gone, or others are predicted.

Every page loaded ahead is *unknown* until a space that is held (or a cut to come) needs it while it is still there:
then it was *used*. If it leaves RAM before, it was *wasted*. So prefetched = used + wasted + unknown, for each reason.

May import kvd.ids and the other modules of kvd.vm but pager and demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvd.ids import SpaceId
from kvd.vm.address_space import AddressSpace
from kvd.vm.page import PREFETCH_REASONS, Page, PrefetchReason
from kvd.vm.page_table import PageTable


@dataclass(slots=True)
class PrefetchFigures:
    """What was loaded ahead for one reason, since start; bytes as frames hold them. Owned by the ledger."""

    pages: int = 0
    page_bytes: int = 0
    used_pages: int = 0
    used_bytes: int = 0
    wasted_pages: int = 0
    wasted_bytes: int = 0

    @property
    def unknown_pages(self) -> int:
        """Pages in RAM, or on their way, that nobody has needed yet."""
        return self.pages - self.used_pages - self.wasted_pages

    def copy(self) -> PrefetchFigures:
        """The figures as of now."""
        return PrefetchFigures(
            self.pages, self.page_bytes, self.used_pages, self.used_bytes, self.wasted_pages, self.wasted_bytes
        )


class PrefetchLedger:
    """What became of pages loaded ahead. Owned by the pager's transfers."""

    def __init__(self) -> None:
        self._figures: dict[PrefetchReason, PrefetchFigures] = {
            reason: PrefetchFigures() for reason in PREFETCH_REASONS
        }

    @property
    def figures(self) -> Mapping[PrefetchReason, PrefetchFigures]:
        """A copy of the figures, by reason."""
        return {reason: figures.copy() for reason, figures in self._figures.items()}

    def loaded(self, page: Page, reason: PrefetchReason) -> None:
        """A load of the page starts although nobody demands it."""
        page.prefetched = reason
        figures = self._figures[reason]
        figures.pages += 1
        figures.page_bytes += page.page_bytes

    def used(self, pages: Iterable[Page]) -> None:
        """Somebody needs these pages now; those that were loaded ahead were worth it."""
        for page in pages:
            if page.prefetched is not None:
                figures = self._figures[page.prefetched]
                figures.used_pages += 1
                figures.used_bytes += page.page_bytes
                page.prefetched = None

    def dropped(self, page: Page) -> None:
        """The page leaves RAM; if it was loaded ahead, in vain."""
        if page.prefetched is not None:
            figures = self._figures[page.prefetched]
            figures.wasted_pages += 1
            figures.wasted_bytes += page.page_bytes
            page.prefetched = None

    def check(self, table: PageTable) -> Iterator[str]:
        """Problems found when unknown pages are counted again (none: the law above holds)."""
        for reason, figures in self._figures.items():
            marked = [page for page in table if page.prefetched == reason]
            unknown = (figures.unknown_pages, figures.page_bytes - figures.used_bytes - figures.wasted_bytes)
            counted = (len(marked), sum(page.page_bytes for page in marked))
            if unknown != counted:
                yield f"(pages, bytes) {unknown} loaded as {reason} have no known end, {counted} are there"
        for page in table:
            if page.prefetched is not None and (not page.ram_bytes or page.held):
                yield f"page {page.page_id} counts as {page.prefetched} though it is {page.state}, held: {page.held}"


class Expectations:
    """Which spaces are worth loading ahead, the most expected first. Owned by the pager, which alone calls it.

    Args:
        spaces: all spaces, as the pager keeps them.
    """

    def __init__(self, spaces: Mapping[SpaceId, AddressSpace]) -> None:
        self._spaces = spaces
        self._hinted: dict[SpaceId, None] = {}  # an ordered set
        self._predicted: tuple[SpaceId, ...] = ()
        self.is_due = False

    def hint(self, space: AddressSpace, reason: PrefetchReason) -> None:
        """A turn of the space waits, or a client says that one will come."""
        if space.use.hint != "queued":  # what is certain is not made less so
            space.use.hint = reason
        self._hinted[space.space] = None
        self.is_due = True

    def withdraw(self, space: AddressSpace) -> None:
        """The space runs, or what was expected of it will not come."""
        space.use.hint = None
        self._hinted.pop(space.space, None)

    def predict(self, spaces: Sequence[SpaceId]) -> None:
        """These spaces, and no others, are expected to run, the soonest first."""
        for each in self._predicted:
            if each in self._spaces:
                self._spaces[each].use.predicted = None
        self._predicted = tuple(dict.fromkeys(spaces))
        for rank, each in enumerate(self._predicted):
            self._spaces[each].use.predicted = rank
        self.is_due = True

    def forget(self, space: AddressSpace) -> None:
        """The space is gone."""
        self.withdraw(space)
        self._predicted = tuple(each for each in self._predicted if each != space.space)

    def next_pages(self) -> Iterator[tuple[AddressSpace, PrefetchReason, list[Page]]]:
        """Spaces that nothing holds, why each is expected, and the pages it lacks; the most expected space first."""
        hinted = sorted(self._hinted, key=lambda each: self._spaces[each].use.hint != "queued")
        for each in (*hinted, *(each for each in self._predicted if each not in self._hinted)):
            space = self._spaces[each]
            reason = space.use.hint if each in self._hinted else None
            # what the user wants on disk stays there, whatever we think; it would be dropped at once
            if not (space.use.held or space.use.evict_wanted):
                yield space, reason or "predicted", list(space.loadable())

    def looked(self) -> None:
        """Everything that found room is under way: clients' hints are done, the others wait for room to come."""
        self.is_due = False
        self._hinted = {each: None for each in self._hinted if self._spaces[each].use.hint == "queued"}
