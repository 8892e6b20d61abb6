"""The pager's hands: carries out its instructions on frame pool and store, and reports back what happened.

Everything here runs on the engine thread. The store's answers reach `on_result` through the engine's inbox. The order
of instructions is kept: a frame is dropped, made or copied at once, reads and writes are queued for the swap thread,
which gets owned bytes and never a view of a frame. Packed tails live here, as fragments without a frame; with a pool on
a device they are in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvd.errors import AgentNotFound, KvdError
from kvd.ids import Fingerprint, FrameId, GroupId, PageId, PageKey, SpaceId
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.scheduler.agents import page_runs
from kvd.scheduler.errors import EngineBroken
from kvd.scheduler.tracing import TraceWriter
from kvd.store.errors import FormatUnknown, LogCorrupt, PageCorrupt, PageDropped, PageMissing
from kvd.store.fragment import Fragment
from kvd.store.frame_pool import Frames
from kvd.store.page_file import PageHeader
from kvd.vm.errors import IllegalEvent, NoRoomForCopy, NotResident, SpaceInUse
from kvd.vm.events import (
    CopyTail,
    CutPacked,
    DropFrame,
    DropPacked,
    Event,
    FilesGone,
    ForgetPage,
    LoadDone,
    LoadFailed,
    LoadPage,
    LoadTail,
    MapFrame,
    PackTail,
    Tick,
    TokensAppended,
    UnpackTail,
    WriteDone,
    WriteFailed,
    WritePage,
)
from kvd.vm.pager import Pager
from kvd.vm.views import TailView

if TYPE_CHECKING:
    from kvd.scheduler.journal import Journal


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What it takes to write or read a sealed page."""

    header: PageHeader
    layout: PageLayout


@dataclass(frozen=True, slots=True)
class SpaceFacts:
    """What the hands must know of an address space.

    Attributes:
        domain: sharing domain of its pages, as in their keys.
        layouts: one per cache group.
        read_tail: starts reading a group's tail from the log; the answer comes as `tail_read` or `tail_failed`.
    """

    domain: str
    layouts: tuple[PageLayout, ...]
    read_tail: Callable[[PageId, GroupId], None]


LOST = (PageMissing, PageCorrupt, LogCorrupt, FormatUnknown, AgentNotFound)
"""Errors of a read after which reading again cannot help: the bytes are gone. Every other one is a hiccup or a bug."""


@dataclass(slots=True)
class Load:
    """A load that the pager waits for.

    Attributes:
        frame: where its bytes go.
        layout: of the frame.
        tokens: how many a tail has; None for a whole page.
        read: queues the read.
        refusals: reads that failed although the bytes may be there.
    """

    frame: FrameId
    layout: PageLayout
    tokens: int | None
    read: Callable[[], None]
    refusals: int = 0


class SwapDoor(Protocol):
    """The part of the swap thread the hands use. Answers come back through the engine's inbox."""

    def write_page(self, header: PageHeader, layout: PageLayout, payload: bytes) -> None:
        """Queue a page write."""

    def read_page(self, header: PageHeader, layout: PageLayout) -> None:
        """Queue a page read."""


@dataclass(slots=True)
class MemoryStatistics:
    """Counters since start, with units in their names."""

    pages_loaded: int = 0
    pages_written: int = 0
    tails_loaded: int = 0
    pages_dropped: int = 0
    page_files_lost: int = 0
    page_files_rewritten: int = 0
    answers: int = 0
    load_failures: int = 0
    write_failures: int = 0
    last_write_failure: str | None = None
    lost_pages: list[str] = field(default_factory=list)


class Memory:
    """Owner: the engine thread.

    Args:
        pager: decides.
        pool: holds the frames.
        swap: reads and writes pages.
        fingerprint: of the served model; part of every page header.
        numerics: version of the arithmetic; part of every page header.
        on_forget: called with pages nobody maps any more.
        on_event: told of faults for the log: (what, facts).

    Attributes:
        trace: is shown every event that the pager took; None: nobody is.
        journal: is told what was lost; None: nobody is.
        failed_writes: of pages that are not in swap for it: how often their write failed.
    """

    def __init__(
        self,
        *,
        pager: Pager,
        pool: Frames,
        swap: SwapDoor,
        fingerprint: Fingerprint,
        numerics: str,
        on_forget: Callable[[PageId], None],
        on_event: Callable[..., None],
    ) -> None:
        self.pager = pager
        self.pool = pool
        self.statistics = MemoryStatistics()
        self.trace: TraceWriter | None = None
        self.journal: Journal | None = None
        self._swap = swap
        self._fingerprint = fingerprint
        self._numerics = numerics
        self._on_forget = on_forget
        self._on_event = on_event
        self._spaces: dict[SpaceId, SpaceFacts] = {}
        self._pages: dict[PageId, PageFacts] = {}
        self.failed_writes: dict[PageId, int] = {}
        self._without_file: set[PageId] = set()  # of pages that had one
        self._loading: dict[PageId, Load] = {}
        self._packed: dict[PageId, Fragment] = {}
        self._late: list[CopyTail] = []  # copies of open pages that are still to be made
        self._read_at_tick: list[Load] = []
        # pages given up although their files may be good: those stay, whoever forgets the pages
        self._spared: set[PageId] = set()

    # ---- spaces and pages -------------------------------------------------------------------------------------------

    def add_space(self, space: SpaceId, facts: SpaceFacts) -> None:
        """Make a space known before the pager hears of it."""
        self._spaces[space] = facts

    def remove_space(self, space: SpaceId) -> None:
        """The space is closed."""
        del self._spaces[space]

    def layouts(self, space: SpaceId) -> tuple[PageLayout, ...]:
        """Layouts of the space's groups."""
        return self._spaces[space].layouts

    def know_header(self, header: PageHeader, layout: PageLayout) -> None:
        """Record the header a page file was found with at start."""
        self._pages[header.page_id] = PageFacts(header, layout)

    def know_page(self, space: SpaceId, group: int, number: int, page: PageId, key: PageKey) -> None:
        """Record the header of a sealed page (recovery, sealing)."""
        if page in self._pages:
            return
        facts = self._spaces[space]
        layout = facts.layouts[group]
        header = PageHeader(
            page_id=page,
            key=key,
            fingerprint=self._fingerprint,
            domain=facts.domain,
            group=group,
            format_id=layout.format_id,
            runs=page_runs(number),
            numerics=self._numerics,
        )
        self._pages[page] = PageFacts(header, layout)

    def facts(self, page: PageId) -> PageFacts:
        """What it takes to read a sealed page that a space maps."""
        return self._pages[page]

    def tail_bytes(self, tail: TailView, start: int, end: int) -> bytes:
        """Tokens [start, end) of a tail that is in RAM (`OPEN`), as the log has them: `[kv_heads, n, width]` a tensor.

        Raises:
            InvalidParams: it has no such tokens.
        """
        if tail.frame is not None:
            return self.pool.extract(tail.frame, start, end)
        self.copy_late()
        return self._packed[tail.page_id].part(start, end)

    @property
    def packed_bytes(self) -> int:
        """Bytes of all packed tails."""
        self.copy_late()
        return sum(fragment.octets.nbytes for fragment in self._packed.values())

    # ---- late copies ------------------------------------------------------------------------------------------------

    @property
    def has_late_copies(self) -> bool:
        """Whether open pages are still to be copied."""
        return bool(self._late)

    def copy_late(self) -> None:
        """Copy the open pages of which forks have copies only in the books.

        A fork's answer need not wait for half a megabyte: the tokens it has of an open page stay as they are in their
        frame until a step writes there or the pager wants something done with it. Before both, and when nothing else
        is to do, this is called.

        Raises:
            EngineBroken: the books have a page that memory lacks.
        """
        late, self._late = self._late, []
        try:
            for source, frame, page, tokens in ((each.source, each.frame, each.page, each.tokens) for each in late):
                packed = self._packed[source].head(tokens) if frame is None else self.pool.fragment(frame, tokens)
                self._packed[page] = packed
        except Exception as error:
            raise EngineBroken(f"an open page was not copied: {type(error).__name__}: {error}") from error

    # ---- events in --------------------------------------------------------------------------------------------------

    def apply(self, event: Event, meanwhile: Callable[[], None] | None = None) -> None:
        """Give the pager an event and carry out what it says.

        Args:
            event: what happened.
            meanwhile: called once the pager has agreed and before bytes are moved, to set other threads to work.

        Raises:
            IllegalEvent, NotResident, NoRoomForCopy, SpaceInUse: nothing has changed.
            EngineBroken: pager and memory do not agree any more, whatever the reason; nothing can go on.
        """
        try:
            if isinstance(event, Tick):
                self._read_refused()
            instructions = self.pager.handle(event)
            if meanwhile is not None:
                meanwhile()
            if self.trace is not None:
                self.trace.observe(event)
            if isinstance(event, TokensAppended) and any(event.keys):
                self._learn_sealed(event)
            for instruction in instructions:
                self._carry_out(instruction)
        except (IllegalEvent, NotResident, NoRoomForCopy, SpaceInUse):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise EngineBroken(f"{type(event).__name__} was not carried out: {what}") from error

    def append(self, space: SpaceId, tokens: int, keys: Sequence[Sequence[PageKey]]) -> None:
        """A step wrote `tokens` tokens; `keys[g]` are the keys of pages that became full."""
        self.apply(TokensAppended(space, tokens, tuple(tuple(group) for group in keys)))

    def _learn_sealed(self, event: TokensAppended) -> None:
        pages = self.pager.tokens(event.space) // PAGE_TOKENS
        for group, keys in enumerate(event.keys):
            for number in range(pages - len(keys), pages):
                ref = self.pager.page(event.space, GroupId(group), number).ref
                self.know_page(event.space, group, number, ref.page_id, ref.key)

    def _carry_out(self, instruction: object) -> None:
        if isinstance(instruction, CopyTail):
            self._late.append(instruction)
            return
        if self._late:
            self.copy_late()
        match instruction:
            case MapFrame(_, frame, group, space):
                self.pool.create(frame, self._spaces[space].layouts[group])
            case DropFrame(frame):
                # a frame whose load is still under way does not exist yet
                if frame in self.pool:
                    self.pool.drop(frame)
            case PackTail(page, frame, tokens):
                self._packed[page] = self.pool.fragment(frame, tokens)
                self.pool.drop(frame)
            case UnpackTail(page, frame, tokens):
                fragment = self._packed.pop(page)
                self.pool.create(frame, fragment.layout)
                self.pool.insert(frame, 0, tokens, fragment.data)
            case CutPacked(page, tokens):
                self._packed[page] = self._packed[page].head(tokens)
            case DropPacked(page):
                del self._packed[page]
            case WritePage(page, frame, _):
                facts = self._pages[page]
                self._swap.write_page(facts.header, facts.layout, self.pool.export(frame))
            case LoadPage(page, frame, _):
                facts = self._pages[page]
                read = partial(self._swap.read_page, facts.header, facts.layout)
                self._load(page, Load(frame, facts.layout, None, read))
            case LoadTail(page, frame, group, space, tokens):
                space_facts = self._spaces[space]
                read = partial(space_facts.read_tail, page, group)
                self._load(page, Load(frame, space_facts.layouts[group], tokens, read))
            case ForgetPage(page):
                self._pages.pop(page, None)
                self.failed_writes.pop(page, None)
                self._without_file.discard(page)
                if page in self._spared:
                    self._spared.remove(page)
                else:
                    self._on_forget(page)
            case _:
                raise TypeError(f"unknown instruction {instruction!r}")

    # ---- what the store says ----------------------------------------------------------------------------------------

    def page_written(self, page: PageId, error: KvdError | None) -> None:
        """A write ended."""
        self.statistics.answers += 1
        if error is None:
            if self.pager.writes_fail:
                self._on_event("page_writes_resumed", level="info")
            self.statistics.pages_written += 1
            self.failed_writes.pop(page, None)
            if page in self._without_file:
                self._without_file.remove(page)
                self.statistics.page_files_rewritten += 1
            self.apply(WriteDone(page))
            return
        self.statistics.write_failures += 1
        self.failed_writes[page] = self.failed_writes.get(page, 0) + 1
        self.statistics.last_write_failure = error.message
        if not self.pager.writes_fail:
            self._on_event("page_write_failed", page=page, reason=error.message)
        self.apply(WriteFailed(page, error.message))

    def page_read(self, page: PageId, payload: bytes | memoryview | None, error: KvdError | None) -> None:
        """A read ended: `payload` fills the whole frame."""
        self.statistics.answers += 1
        if self._reads_again(page, error):
            return
        load = self._loading.pop(page)
        if payload is None:
            self._lost(page, error)
            return
        self.pool.load(load.frame, load.layout, payload)
        self.statistics.pages_loaded += 1
        self.apply(LoadDone(page))

    def tail_read(self, page: PageId, payload: bytes | memoryview | None, error: KvdError | None) -> None:
        """A tail came from the log: `[kv_heads, tokens, width]` per tensor, in layout order."""
        self.statistics.answers += 1
        if self._reads_again(page, error):
            return
        load = self._loading.pop(page)
        assert load.tokens is not None
        # the log may hold more than is wanted: the tail may have been cut since
        held_tokens, rest = divmod(len(payload or b""), load.layout.token_bytes)
        if payload is None or rest or held_tokens < load.tokens:
            self._lost(page, error)
            return
        self.pool.create(load.frame, load.layout)
        self.pool.insert(load.frame, 0, held_tokens, payload, upto=load.tokens)
        self.statistics.tails_loaded += 1
        self.apply(LoadDone(page))

    def copies_lost(self, pages: Sequence[PageId]) -> None:
        """Page files went or changed by others' doing: what is in RAM is written again, the rest computed if needed."""
        self.statistics.page_files_lost += len(pages)
        self._without_file.update(page for page in pages if page in self._pages)
        if self.journal is not None:
            self.journal.tell("page_files_lost", pages=len(pages))
        self._on_event("page_files_lost", pages=len(pages), first=list(pages[:3]))
        self.apply(FilesGone(tuple(pages)))

    def _load(self, page: PageId, load: Load) -> None:
        self._loading[page] = load
        load.read()

    def _reads_again(self, page: PageId, error: KvdError | None) -> bool:
        """After a read that failed although the bytes may be there: at once, then at the next Tick, then no more."""
        if error is None or isinstance(error, LOST):
            return False
        load = self._loading[page]
        load.refusals += 1
        self._on_event("page_read_refused", page=page, reason=error.message, refusals=load.refusals)
        if load.refusals == 1:
            load.read()
        elif load.refusals == 2:
            self._read_at_tick.append(load)
        else:
            self._spared.add(page)
            return False
        return True

    def _read_refused(self) -> None:
        waiting, self._read_at_tick = self._read_at_tick, []
        for load in waiting:
            load.read()

    def _lost(self, page: PageId, error: KvdError | None) -> None:
        reason = error.message if error is not None else "the log does not hold all of it"
        if isinstance(error, PageDropped):  # what eviction means while swap is off: nothing is wrong
            self.statistics.pages_dropped += 1
            self.apply(LoadFailed(page, reason))
            return
        self.statistics.load_failures += 1
        if self.journal is not None:
            self.journal.page_lost(page, "log_short" if error is None else error.name, reason)
        self.statistics.lost_pages = [*self.statistics.lost_pages[-99:], page]
        self._on_event("page_lost", page=page, reason=reason, time_s=time.time())
        self.apply(LoadFailed(page, reason))
