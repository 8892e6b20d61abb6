"""The swap thread: one thread and one ordered queue for changes, a few threads beside it that read pages.

Theory of operation. Writes, records, compactions and deletions form one queue and are carried out strictly in order;
that order is what makes "the page before the record that names it" true. A read only depends on queued changes of the
same page or log: it remembers the last of them and runs as soon as that is done, before anything else. A change in turn
waits for the reads of its page or log that were submitted before it.

Pages are read by `READERS` threads, in the order in which they were asked for and several at a time, since one reader
leaves most of an SSD idle; nobody waits for a flush to end. They know bytes only: what a reader cannot settle (a page
that is missing, wrong, refused or unknown) is left to the swap thread, which reads again and keeps the books. Tails and
steps of exports are the swap thread's, before its next change.

Each operation wakes the one thread that can see to it: five that wake for one answer take turns at the interpreter just
when the engine wants it. What tidies up (catalog, files of deleted pages) is put off for `TIDY_AFTER_S` for the same
reason; who asked for something has its answer by then, and more of it may have come to be tidied up at once.

Looks at page files that somebody else may have changed are nobody's request: what was asked for is merged, and a step
of it is made when nothing at all is queued or being read. A close makes no more of them.

Faults of the disk are answers; a bug in the thread itself ends it with one last answer, `SwapBroken`.

May import kvd.errors and siblings of kvd.store.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from kvd.errors import Draining, InternalError
from kvd.store.swap_ops import (
    AppendRecordOp,
    CheckPagesOp,
    CompactLogOp,
    DeleteLogOp,
    DeletePageOp,
    FileStepOp,
    FlushOp,
    ForkLogOp,
    GiveUpPagesOp,
    PagesChecked,
    ReadFigures,
    ReadPageOp,
    ReadTailOp,
    SwapBroken,
    SwapOp,
    SwapResult,
    SwapStatistics,
    WakeLogOp,
    WritePageOp,
)

Subject = tuple[str, ...]
"""What an operation concerns: one page or one log."""

READERS: Final = 4
"""Threads that read pages. Two saturate most SSDs with pages of megabytes; small pages and fast drives want more."""

TIDY_AFTER_S: Final = 0.02
"""How long nothing must have come before the thread tidies up; a flush and a close do so at once."""


class Store(Protocol):
    """What the thread drives (`kvd.store.swap_store.SwapStore`, or `kvd.store.ram_store.RamStore`)."""

    def perform(self, op: SwapOp) -> SwapResult:
        """Carry out one operation; faults are in the result."""

    def read_beside(self, op: ReadPageOp) -> SwapResult | None:
        """Read a page on any thread; None when `perform` has to."""

    def idle(self) -> None:
        """The queue is empty."""

    def trim(self) -> int:
        """Give back memory kept for reads to come; returns its bytes. From any thread."""

    def close(self) -> None:
        """Nothing comes any more."""

    def statistics(
        self, *, deliver_errors: int = 0, queued_ops: int = 0, queued_bytes: int = 0, beside: ReadFigures = ...
    ) -> SwapStatistics:
        """Figures; from any thread."""


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    op: SwapOp
    number: int
    """Reads are numbered as they come."""
    after: int
    """Number of the last ordered operation it depends on."""

    @property
    def is_for_readers(self) -> bool:
        return isinstance(self.op, ReadPageOp)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    op: SwapOp
    reads_before: int
    """How many reads had come before it."""


class SwapThread:
    """Owns the durable state of one model from `start` to `close`.

    `submit` may be called from any thread; each operation is answered once, by `deliver` on one of its threads. Looks
    at page files (`CheckPagesOp`) are answered step by step, several of them together, or not at all once it closes.

    Args:
        store: carries operations out; its owner is the swap thread from here on.
        deliver: takes results; must be quick and thread safe. What it raises is counted and otherwise ignored.
    """

    def __init__(self, *, store: Store, deliver: Callable[[SwapResult], None]) -> None:
        self._store = store
        self._deliver = deliver
        self._changed = threading.Lock()
        self._for_swap = threading.Condition(self._changed)  # there is something for the swap thread
        self._for_readers = threading.Condition(self._changed)  # there are pages to read
        self._ordered: deque[_Change] = deque()
        self._reads: deque[_Read] = deque()  # waiting; those of pages go to the readers
        self._left: deque[_Read] = deque()  # page reads that a reader could not settle
        self._looks: CheckPagesOp | None = None  # at page files, still to be made
        self._open_reads: dict[Subject, list[_Read]] = {}  # all that have no answer yet
        self._reads_submitted = 0
        self._submitted = 0  # ordered operations ever submitted; the first has number 1
        self._finished = 0  # ordered operations done
        self._last_change: dict[Subject, int] = {}
        self._queued_bytes = 0
        self._deliver_errors = 0
        self._reading = _Meter(time.perf_counter)
        self._closing = False
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="kvd-swap", daemon=True)
        self._readers = [
            threading.Thread(target=self._read_on, name=f"kvd-swap-read-{number}", daemon=True)
            for number in range(READERS)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in (self._thread, *self._readers):
            thread.start()

    def submit(self, op: SwapOp) -> None:
        """Queue an operation.

        Raises:
            Draining: the thread is being closed.
        """
        with self._changed:
            if self._closing:
                raise Draining("The store is closing and takes no more operations.")
            if isinstance(op, CheckPagesOp):
                self._look_at(op)
            elif isinstance(op, ReadPageOp | ReadTailOp | FileStepOp):
                self._reads_submitted += 1
                read = _Read(op, self._reads_submitted, self._last_change.get(_subject(op), 0))
                self._reads.append(read)
                self._open_reads.setdefault(_subject(op), []).append(read)
                if read.is_for_readers:
                    self._wake_readers(1)
                    return
            else:
                self._submitted += 1
                self._ordered.append(_Change(op, self._reads_submitted))
                self._queued_bytes += _held_bytes(op)
                self._last_change[_subject(op)] = self._submitted
            self._for_swap.notify()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything submitted so far is done; False when that takes longer than `timeout_s` or for ever."""
        event = threading.Event()
        self.submit(FlushOp(event))
        return event.wait(timeout_s) and not self._broken

    def trim(self) -> int:
        """Give back memory kept for reads to come; returns its bytes. From any thread."""
        return self._store.trim()

    def close(self) -> None:
        """Carry out what is queued, commit the catalog, end the threads. Harmless when called twice."""
        with self._changed:
            self._closing = True
            self._for_swap.notify()
            self._for_readers.notify_all()
        for thread in (self._thread, *self._readers):
            if thread.ident is not None:
                thread.join()
        if self._thread.ident is None:
            self._store.close()

    def statistics(self) -> SwapStatistics:
        """Figures with units; from any thread."""
        with self._changed:
            queued_ops = len(self._ordered) + len(self._reads) + len(self._left)
            return self._store.statistics(
                deliver_errors=self._deliver_errors,
                queued_ops=queued_ops,
                queued_bytes=self._queued_bytes,
                beside=self._reading.figures(),
            )

    # ---- the swap thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (op := self._take()) is not None:
                result = self._store.perform(op)
                self._answer(result)
                if isinstance(op, CheckPagesOp):
                    if isinstance(result.value, PagesChecked) and result.value.rest is not None:
                        with self._changed:
                            self._look_at(result.value.rest)
                elif not isinstance(op, ReadPageOp | ReadTailOp | FileStepOp):
                    with (
                        self._changed
                    ):  # only now may readers go on that waited for it: their answers come after its own
                        self._finish(op)
                        self._wake_readers(sum(read.is_for_readers for read in self._reads))
        except Exception as fault:
            self._break(f"the swap thread failed: {fault!r}")
        finally:
            with contextlib.suppress(Exception):  # derived state only; nothing durable waits for it
                self._store.close()

    def _answer(self, result: SwapResult) -> None:
        try:
            self._deliver(result)
        except Exception:  # a receiver's bug must not stop the disk
            with self._changed:
                self._deliver_errors += 1

    def _break(self, reason: str) -> None:
        """Take nothing more, let no `flush` wait for ever, and say so: whoever waits for an answer must not hang."""
        with self._changed:
            self._closing = self._broken = True
            left, self._ordered = [change.op for change in self._ordered], deque()
            self._reads.clear()
            self._left.clear()
            self._queued_bytes = 0
            self._for_readers.notify_all()
        for op in left:
            if isinstance(op, FlushOp):
                op.event.set()
        self._answer(SwapResult(SwapBroken(reason), InternalError(reason), 0.0))

    def _take(self) -> SwapOp | None:
        """The next operation; None when closing and nothing is left. Before a longer wait, the store tidies up."""
        with self._changed:
            if (op := self._next()) is None and not self._closing:
                self._for_swap.wait(TIDY_AFTER_S)
                op = self._next()
        if op is not None:
            return op
        self._store.idle()
        with self._changed:
            while (op := self._next() or self._next_look()) is None and not (self._closing and not self._open_reads):
                self._for_swap.wait()
        return op

    def _wake_readers(self, reads: int) -> None:
        """There may be so many more reads to be made, and they all are when the thread closes."""
        if self._closing:
            self._for_readers.notify_all()
        elif reads:
            self._for_readers.notify(reads)

    def _look_at(self, op: CheckPagesOp) -> None:
        self._looks = op if self._looks is None else self._looks.and_also(op)

    def _next_look(self) -> CheckPagesOp | None:
        """A look, if nothing else is to do: nothing that waits, and no reader at work."""
        if self._closing or self._ordered or self._open_reads:
            return None
        looks, self._looks = self._looks, None
        return looks

    def _next(self) -> SwapOp | None:
        read = self._left.popleft() if self._left else self._next_read(for_readers=False)
        if read is not None:
            self._close_read(read)  # nothing overtakes it any more: this thread carries out one thing at a time
            return read.op
        if self._ordered and not self._is_read_before(self._ordered[0]):
            return self._ordered.popleft().op
        return None

    def _next_read(self, *, for_readers: bool) -> _Read | None:
        for index, read in enumerate(self._reads):
            if read.after <= self._finished and read.is_for_readers == for_readers:
                del self._reads[index]
                return read
        return None

    def _is_read_before(self, change: _Change) -> bool:
        """Whether a read that was submitted before the next change, of the same page or log, has no answer yet.

        A flush waits for all reads that were there when it came; those that come while it waits are not its own, or it
        might wait as long as somebody reads.
        """
        if isinstance(change.op, FlushOp):
            mine: Iterable[list[_Read]] = self._open_reads.values()
        else:
            mine = [self._open_reads.get(_subject(change.op), [])]
        return any(read.number <= change.reads_before for reads in mine for read in reads)

    def _finish(self, op: SwapOp) -> None:
        self._finished += 1
        self._queued_bytes -= _held_bytes(op)
        if self._last_change.get(_subject(op)) == self._finished:
            del self._last_change[_subject(op)]

    # ---- the readers ------------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        while (read := self._take_read()) is not None:
            assert isinstance(read.op, ReadPageOp)
            result = None
            with contextlib.suppress(Exception):  # a bug shows when the swap thread reads again, as that one's answer
                result = self._store.read_beside(read.op)
            if result is not None:
                self._answer(result)  # before the next change of the page can be
            with self._changed:
                self._reading.end(0 if result is None else result.read_bytes, settled=result is not None)
                if result is not None:
                    self._close_read(read)
                elif not self._broken:
                    self._left.append(read)
                self._for_swap.notify()  # a change may have waited for it, or it is the swap thread's now
                self._wake_readers(0)

    def _take_read(self) -> _Read | None:
        with self._changed:
            while (read := self._next_read(for_readers=True)) is None:
                if self._closing and (self._broken or not any(each.is_for_readers for each in self._reads)):
                    return None
                self._for_readers.wait()
            self._reading.begin()
            return read

    def _close_read(self, read: _Read) -> None:
        subject = _subject(read.op)
        self._open_reads[subject].remove(read)
        if not self._open_reads[subject]:
            del self._open_reads[subject]


class _Meter:
    """What readers did. Called under the swap thread's lock.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = 0
        self._since_s = 0.0
        self._figures = ReadFigures()

    def begin(self) -> None:
        """A read starts."""
        if not self._running:
            self._since_s = self._clock()
        self._running += 1

    def end(self, read_bytes: int, *, settled: bool) -> None:
        """A read ended; `settled`: it gave a page."""
        self._running -= 1
        figures = self._figures
        seconds = 0.0 if self._running else self._clock() - self._since_s
        self._figures = ReadFigures(
            figures.pages_read + settled, figures.bytes_read + read_bytes, figures.reading_s + seconds
        )

    def figures(self) -> ReadFigures:
        """As of the last time when nobody read."""
        return self._figures


def _subject(op: SwapOp) -> Subject:
    match op:
        case WritePageOp():
            return ("page", op.header.page_id)
        case ReadPageOp():
            return ("page", op.expected.page_id)
        case DeletePageOp():
            return ("page", op.page_id)
        case AppendRecordOp():
            return ("log", op.record.namespace, op.record.agent)
        case ForkLogOp(note, _):
            return ("log", *note.child_ref)
        case CompactLogOp() | DeleteLogOp() | ReadTailOp() | WakeLogOp():
            return ("log", op.namespace, op.agent)
        case FileStepOp():
            return ("file", op.path)
        case FlushOp():
            return ("flush",)
        case CheckPagesOp():
            return ("check",)
        case GiveUpPagesOp():
            return ("pages",)


def _held_bytes(op: SwapOp) -> int:
    """Bytes of KV an operation keeps in memory while it waits (part of the budget, P21)."""
    match op:
        case WritePageOp():
            return len(op.payload)
        case AppendRecordOp():
            return sum(len(segment.tail_kv) for segment in op.record.segments)
    return 0


__all__ = ["READERS", "SwapThread"]
