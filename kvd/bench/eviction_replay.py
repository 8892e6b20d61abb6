"""Replays a trace through the real pager with a disk that answers at once, under any policy and budget.

Theory of operation. Operations come in the order of the trace; times play no part. A turn is replayed at its start: its
space is activated, what it lacks comes in, its tokens are appended in steps of a prefill chunk; it is held until its
end, so turns that ran together hold pages together. Where a smaller budget than the traced one cannot hold them all,
those that started first end early, as admission would have kept them apart. Which turns these are follows from lengths
alone, so every policy meets the same accesses and creates the same pages in the same order.

The *optimum* (Belady, 1966: of the pages that may go, the one whose next use is farthest) needs to know the future: a
first run notes the turns that need each page. It may take any page where policies go tail before head. With pages of
one size nothing can fault less; with several it is a good guess.

May import kvd.ids, kvd.errors, kvd.vm and kvd.scheduler.prediction; no mlx.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from kvd.errors import InvalidParams
from kvd.ids import GroupId, PageId, PageKey, SpaceId
from kvd.scheduler.prediction import Predictor
from kvd.vm import events as ev
from kvd.vm.address_space import AddressSpace
from kvd.vm.errors import NoRoomForCopy, SpaceInUse
from kvd.vm.eviction import EvictionPolicy
from kvd.vm.page import Page, PageState
from kvd.vm.pager import Pager
from kvd.vm.trace import TraceHeader, TraceLine

CHUNK_TOKENS = 512
NEVER = 1 << 60


@dataclass(slots=True)
class Tally:
    """What a replay cost.

    Attributes:
        turns: turns that ran.
        refused_turns: turns that do not fit the budget even alone; the rest of their tokens was left out.
        demanded_pages: pages that turns needed when they started.
        hit_pages: of these, pages that were in RAM.
        faults, refaults: as in the pager's statistics.
        in_bytes, out_bytes: bytes of pages and tails loaded, of pages written.
        ahead_bytes: of `in_bytes`, what was loaded before anybody demanded it.
        peak_bytes: the most that frames took.
    """

    turns: int = 0
    refused_turns: int = 0
    demanded_pages: int = 0
    hit_pages: int = 0
    faults: int = 0
    refaults: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    ahead_bytes: int = 0
    peak_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Part of the pages needed that were in RAM, 0 to 1."""
        return self.hit_pages / self.demanded_pages if self.demanded_pages else 1.0


class Optimum:
    """Belady's policy: knows which turns need which pages. One replay sets `turn` as it goes.

    Args:
        uses: numbers of the turns that need a page, ascending.

    Attributes:
        turn: number of the turn that started last.
    """

    name = "optimum"

    def __init__(self, uses: Mapping[PageId, Sequence[int]]) -> None:
        self._uses = uses
        self.turn = 0

    def order(self, spaces: Iterable[AddressSpace]) -> Iterator[Page]:
        """See `EvictionPolicy.order`."""
        pages: dict[PageId, Page] = {}
        for space in spaces:
            if space.use.ram_pages and not space.use.held:
                pages.update((page.page_id, page) for page in space.pages_tail_first() if page.ram_bytes)
        able = [p for p in pages.values() if (p.droppable or self._dirty(p)) and not p.held and p.needed_by]
        yield from sorted(able, key=lambda page: (-self._next_use(page.page_id), page.page_id))

    @staticmethod
    def _dirty(page: Page) -> bool:
        return page.state in (PageState.SEALED_DIRTY, PageState.WRITING)

    def _next_use(self, page: PageId) -> int:
        uses = self._uses.get(page, ())
        found = bisect_right(uses, self.turn)
        return uses[found] if found < len(uses) else NEVER


@dataclass(slots=True)
class Turn:
    """A turn as it is replayed: cut to `cut_tokens` if that is less than what there is, then append."""

    cut_tokens: int
    appended_tokens: int


def plan_turns(lines: Sequence[TraceLine]) -> dict[int, Turn]:
    """What each `start` line's turn does to its space, by the number of the line; cuts within a turn are part of it."""
    turns: dict[int, Turn] = {}
    running: dict[int, tuple[int, int]] = {}
    for number, line in enumerate(lines):
        if line.word == "start":
            running[line.space] = (number, line.tokens)
        elif line.word == "cut" and line.space in running:
            start, least = running[line.space]
            running[line.space] = (start, min(least, line.tokens))
        elif line.word == "end" and line.space in running:
            start, least = running.pop(line.space)
            least = min(least, line.tokens)
            turns[start] = Turn(least, line.tokens - least)
    for start, least in running.values():  # the trace ends within a turn
        turns[start] = Turn(least, 0)
    return turns


@dataclass(slots=True)
class _Known:
    """A space of the trace that is alive in the replay."""

    agent: str
    page_bytes: tuple[int, ...]
    pages: list[PageId] = field(default_factory=list)  # of a restored space: in order of position, then of group


class Replay:
    """One trace, one policy, one budget. Used once; `run` does it.

    Args:
        header, lines: the trace.
        policy: ranks victims.
        budget_bytes: of the pager.
        predict: load ahead for whom the order of turns makes likely, as the daemon does (a client's `prefetch` is
            always honoured, except by the optimum).
    """

    def __init__(
        self,
        header: TraceHeader,
        lines: Sequence[TraceLine],
        policy: EvictionPolicy,
        budget_bytes: int,
        *,
        predict: bool = False,
    ) -> None:
        self._page_tokens = header.page_tokens
        self._groups = len(header.windows)
        self._lines = lines
        self._turns = plan_turns(lines)
        self._optimum = policy if isinstance(policy, Optimum) else None
        self._predictor = Predictor() if predict and self._optimum is None else None
        self._numbers = count(1)
        self._pager = Pager(
            budget_bytes,
            group_count=self._groups,
            new_page_id=self._new_page,
            page_tokens=header.page_tokens,
            policy=policy,
            windows=header.windows,
            # writes end at once here: there is nothing to be gained by evicting before somebody needs room
            high_free_percent=0,
            low_free_percent=0,
        )
        self._known: dict[int, _Known] = {}
        self._running: dict[int, None] = {}  # ordered sets
        self._pinned: dict[int, None] = {}
        self._page_bytes: dict[PageId, int] = {}
        self._current: dict[str, int] = {}  # the space an agent ran on last
        self.tally = Tally()
        self.uses: dict[PageId, list[int]] = {}

    def run(self) -> Tally:
        """Replay everything.

        Raises:
            InvalidParams: the trace contradicts itself; the message names the line.
        """
        for number, line in enumerate(self._lines):
            if line.word not in ("create", "restore", "fork") and line.space not in self._known:
                raise InvalidParams(f"operation {number + 1} of the trace: space {line.space} is not there")
            try:
                self._replay(number, line)
            except KeyError as error:
                raise InvalidParams(f"operation {number + 1} of the trace: space {error} is not there") from error
        figures = self._pager.statistics()
        self.tally.faults, self.tally.refaults = figures.faults, figures.refaults
        self.tally.ahead_bytes = sum(each.page_bytes for each in figures.prefetched.values())
        self.tally.peak_bytes = figures.peak_resident_bytes
        self._pager.check_integrity()
        return self.tally

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of every space of the trace that is there."""
        return {each: self._pager.tokens(SpaceId(each)) for each in self._known}

    @property
    def pages(self) -> int:
        """Pages in the table, each once however many spaces map it."""
        return sum(self._pager.statistics().pages.values())

    # ---- operations -------------------------------------------------------------------------------------------------

    def _replay(self, number: int, line: TraceLine) -> None:
        space = SpaceId(line.space)
        match line.word:
            case "create":
                self._enter(line, line.page_bytes)
                self._send(ev.SpaceCreated(space, line.page_bytes))
            case "restore":
                self._restore(line)
            case "fork":
                self._fork(line)
            case "start":
                self._start(number, line.space)
            case "end":
                self._end(line.space)
            case "cut":
                if line.space not in self._running:
                    self._cut(line.space, line.tokens)
            case "prefetch":
                if self._optimum is None:
                    self._send(ev.PrefetchHinted(space))
            case "evict":
                with suppress(SpaceInUse):  # here its turn may still be running
                    self._send(ev.EvictionWanted(space))
            case "pin":
                if self._makes_room(line.space, 0):
                    self._pinned[line.space] = None
                    self._send(ev.Pinned(space))
            case "unpin":
                self._pinned.pop(line.space, None)
                self._send(ev.Unpinned(space))
            case "close":
                self._end(line.space)
                self._pinned.pop(line.space, None)
                self._send(ev.SpaceClosed(space))
                del self._known[line.space]

    def _enter(self, line: TraceLine, page_bytes: tuple[int, ...]) -> _Known:
        if line.space in self._known:
            raise InvalidParams(f"the trace makes space {line.space} twice")
        known = self._known[line.space] = _Known(line.agent, page_bytes)
        return known

    def _restore(self, line: TraceLine) -> None:
        known = self._enter(line, line.page_bytes)
        full = line.tokens // self._page_tokens
        shared = min(full, line.shared_pages) * self._groups
        known.pages = self._known[line.parent].pages[:shared] if line.parent is not None else []
        while len(known.pages) < full * self._groups:
            page = self._new_page()
            self._page_bytes[page] = line.page_bytes[len(known.pages) % self._groups]
            known.pages.append(page)
        images = tuple(
            ev.SegmentImage(
                GroupId(group),
                tuple(ev.PageRef(page, PageKey(page)) for page in known.pages[group :: self._groups]),
                line.tokens % self._page_tokens,
            )
            for group in range(self._groups)
        )
        self._send(ev.SpaceRestored(SpaceId(line.space), line.page_bytes, images))
        for segment in self._pager.segments(SpaceId(line.space)):
            if segment.tail is not None:
                self._page_bytes[segment.tail.page_id] = line.page_bytes[segment.group]

    def _fork(self, line: TraceLine) -> None:
        assert line.parent is not None
        parent = self._known[line.parent]
        tokens = min(line.tokens, self._pager.tokens(SpaceId(line.parent)))
        known = self._enter(line, parent.page_bytes)
        self._carefully(line.parent, tokens, ev.Forked(SpaceId(line.parent), SpaceId(line.space), tokens), known)

    def _cut(self, space: int, tokens: int) -> None:
        if tokens < self._pager.tokens(SpaceId(space)):
            self._carefully(space, tokens, ev.RolledBack(SpaceId(space), tokens), self._known[space])

    def _carefully(self, source: int, tokens: int, event: ev.Event, known: _Known) -> None:
        """Cut or fork: the page that is cut comes in first, and its copy finds room once running turns have ended."""
        self._send(ev.CutWanted(SpaceId(source), tokens))
        while self._running and not self._pager.can_cut(SpaceId(source)):
            self._end_oldest()
        try:
            self._send(event, known)
        except NoRoomForCopy:
            while self._running:
                self._end_oldest()
            self._send(event, known)
        self._send(ev.CutWanted(SpaceId(source), None))

    def _start(self, number: int, space: int) -> None:
        self._end(space)
        turn, known, pager = self._turns[number], self._known[space], self._pager
        self._cut(space, turn.cut_tokens)
        self.tally.turns += 1
        if not self._makes_room(space, min(CHUNK_TOKENS, turn.appended_tokens)):
            self.tally.refused_turns += 1
            return
        self._note_use(SpaceId(space))
        self._running[space] = None
        self._send(ev.Activated(SpaceId(space)))
        if self._predictor is not None:
            self._predict(known.agent, space)
        left = turn.appended_tokens
        while left:
            tokens = min(left, CHUNK_TOKENS - pager.tokens(SpaceId(space)) % CHUNK_TOKENS)
            if not self._makes_room(space, tokens):
                self.tally.refused_turns += 1
                return
            self._append(space, tokens)
            left -= tokens

    def _append(self, space: int, tokens: int) -> None:
        self._send(ev.GrowthWanted(SpaceId(space), tokens))
        before = self._pager.tokens(SpaceId(space))
        full = (before + tokens) // self._page_tokens - before // self._page_tokens
        keys = tuple(PageKey(f"{space}/{before}/{each}") for each in range(full))
        self._send(ev.TokensAppended(SpaceId(space), tokens, (keys,) * self._groups))

    def _end(self, space: int) -> None:
        if space in self._running:
            del self._running[space]
            self._send(ev.TurnCommitted(SpaceId(space)))
            self._send(ev.Deactivated(SpaceId(space)))

    def _end_oldest(self) -> None:
        self._end(next(iter(self._running)))

    def _makes_room(self, space: int, tokens: int) -> bool:
        """Let turns end until the space can have `tokens` more beside the others; False when it cannot even alone."""
        pager = self._pager
        while True:
            others = [each for each in (self._running | self._pinned) if each != space]
            wanted = pager.working_set_bytes(SpaceId(space), tokens)
            if pager.fits(wanted + sum(pager.working_set_bytes(SpaceId(each)) for each in others)):
                return True
            ending = [each for each in self._running if each != space]
            if not ending:
                return False
            self._end(ending[0])

    # ---- accounts ---------------------------------------------------------------------------------------------------

    def _note_use(self, space: SpaceId) -> None:
        """Count what is there of what the turn needs, and note for the optimum who needs it."""
        now = self._pager.residency(space)
        self.tally.demanded_pages += now.total_pages - now.behind_window_pages
        self.tally.hit_pages += now.resident_pages
        if self._optimum is not None:
            self._optimum.turn = self.tally.turns
            return
        for segment in self._pager.segments(space):
            needed = [page.ref.page_id for page in segment.pages if not page.behind_window]
            for page in (*needed, *([segment.tail.page_id] if segment.tail else [])):
                self.uses.setdefault(page, []).append(self.tally.turns)

    def _predict(self, agent: str, space: int) -> None:
        assert self._predictor is not None
        self._current[agent] = space
        self._predictor.started(agent, None)
        spaces = [self._current[str(each)] for each in self._predictor.expected()]
        alive = [SpaceId(each) for each in spaces if each in self._known]
        fitting = [each for each in alive if self._pager.fits(self._pager.working_set_bytes(each))]
        self._send(ev.SpacesPredicted(tuple(fitting)))

    def _new_page(self) -> PageId:
        return PageId(f"{next(self._numbers):08x}")

    def _send(self, event: ev.Event, known: _Known | None = None) -> None:
        """An event, and the disk's answers to all it leads to, oldest first."""
        waiting: list[ev.Event] = [event]
        while waiting:
            for instruction in self._pager.handle(waiting.pop(0)):
                answer = self._answer(instruction, known)
                if answer is not None:
                    waiting.append(answer)

    def _answer(self, instruction: ev.Instruction, known: _Known | None) -> ev.Event | None:
        match instruction:
            case ev.MapFrame(page, _, group, space):
                self._page_bytes[page] = self._known[space].page_bytes[group]
            case ev.CopyTail(page=page, group=group):
                assert known is not None
                self._page_bytes[page] = known.page_bytes[group]
            case ev.LoadPage(page) | ev.LoadTail(page):
                self.tally.in_bytes += self._page_bytes[page]
                return ev.LoadDone(page)
            case ev.WritePage(page):
                self.tally.out_bytes += self._page_bytes[page]
                return ev.WriteDone(page)
            case _:
                pass
        return None
