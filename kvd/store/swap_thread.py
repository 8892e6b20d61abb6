"""The swap thread: one thread, one ordered queue, reads overtake.

Theory of operation. Writes, records, compactions and deletions form one queue and are carried out strictly in order;
that order is what makes "the page before the record that names it" true. A read only depends on queued changes of the
same page or log: it remembers the last of them and runs as soon as that is done, before anything else. Faults of the
disk are answers; a bug in the thread itself ends it with one last answer, `SwapBroken`.

May import kvd.errors and siblings of kvd.store.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvd.errors import Draining, InternalError
from kvd.store.agent_image import Layouts
from kvd.store.fs import FileSystem
from kvd.store.layout import DataFolder
from kvd.store.recovery_report import RecoveryReport
from kvd.store.swap_ops import (
    AppendRecordOp,
    CompactLogOp,
    DeleteLogOp,
    DeletePageOp,
    FileStepOp,
    FlushOp,
    ReadPageOp,
    ReadTailOp,
    SwapBroken,
    SwapOp,
    SwapResult,
    SwapStatistics,
    WakeLogOp,
    WritePageOp,
)
from kvd.store.swap_store import SwapStore

Subject = tuple[str, ...]
"""What an operation concerns: one page or one log."""


@dataclass(frozen=True, slots=True)
class _Read:
    op: SwapOp
    after: int
    """Number of the last ordered operation it depends on."""


class SwapThread:
    """Owns the durable state of one model from `start` to `close`.

    `submit` may be called from any thread; each operation is answered once, by a call of `deliver` on the swap thread.

    Args:
        folder: the data folder, opened and recovered.
        fingerprint: the model.
        fs: the disk.
        quota_bytes: limit over every byte under the folder.
        layouts: page layouts by (group, format_id).
        recovered: what `recover` found.
        deliver: takes results; must be quick and thread safe. What it raises is counted and otherwise ignored.
        full_groups: groups whose pages hold every computed token; None: all.
        drop_page_cache: leave pages that were read out of the system's page cache.
    """

    def __init__(
        self,
        *,
        folder: DataFolder,
        fingerprint: str,
        fs: FileSystem,
        quota_bytes: int,
        layouts: Layouts,
        recovered: RecoveryReport,
        deliver: Callable[[SwapResult], None],
        full_groups: frozenset[int] | None = None,
        drop_page_cache: bool = False,
    ) -> None:
        self._store = SwapStore(
            folder=folder,
            fingerprint=fingerprint,
            fs=fs,
            quota_bytes=quota_bytes,
            layouts=layouts,
            recovered=recovered,
            full_groups=full_groups,
            drop_page_cache=drop_page_cache,
        )
        self._deliver = deliver
        self._changed = threading.Condition()
        self._ordered: deque[SwapOp] = deque()
        self._reads: deque[_Read] = deque()
        self._submitted = 0  # ordered operations ever submitted; the first has number 1
        self._finished = 0  # ordered operations done
        self._last_change: dict[Subject, int] = {}
        self._queued_bytes = 0
        self._deliver_errors = 0
        self._closing = False
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="kvd-swap", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, op: SwapOp) -> None:
        """Queue an operation.

        Raises:
            Draining: the thread is being closed.
        """
        with self._changed:
            if self._closing:
                raise Draining("The store is closing and takes no more operations.")
            if isinstance(op, ReadPageOp | ReadTailOp | FileStepOp):
                self._reads.append(_Read(op, self._last_change.get(_subject(op), 0)))
            else:
                self._submitted += 1
                self._ordered.append(op)
                self._queued_bytes += _held_bytes(op)
                self._last_change[_subject(op)] = self._submitted
            self._changed.notify()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything submitted so far is done; False when that takes longer than `timeout_s` or for ever."""
        event = threading.Event()
        self.submit(FlushOp(event))
        return event.wait(timeout_s) and not self._broken

    def close(self) -> None:
        """Carry out what is queued, commit the catalog, end the thread. Harmless when called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._store.close()

    def statistics(self) -> SwapStatistics:
        """Figures with units; from any thread."""
        with self._changed:
            queued_ops, queued_bytes = len(self._ordered) + len(self._reads), self._queued_bytes
        return self._store.statistics(
            deliver_errors=self._deliver_errors, queued_ops=queued_ops, queued_bytes=queued_bytes
        )

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (op := self._take()) is not None:
                result = self._store.perform(op)
                if not isinstance(op, ReadPageOp | ReadTailOp | FileStepOp):
                    with self._changed:
                        self._finish(op)
                self._answer(result)
        except Exception as fault:
            self._break(f"the swap thread failed: {fault!r}")
        finally:
            with contextlib.suppress(Exception):  # derived state only; nothing durable waits for it
                self._store.close()

    def _answer(self, result: SwapResult) -> None:
        try:
            self._deliver(result)
        except Exception:  # a receiver's bug must not stop the disk
            self._deliver_errors += 1

    def _break(self, reason: str) -> None:
        """Take nothing more, let no `flush` wait for ever, and say so: whoever waits for an answer must not hang."""
        with self._changed:
            self._closing = self._broken = True
            left, self._ordered = list(self._ordered), deque()
            self._reads.clear()
            self._queued_bytes = 0
        for op in left:
            if isinstance(op, FlushOp):
                op.event.set()
        self._answer(SwapResult(SwapBroken(reason), InternalError(reason), 0.0))

    def _take(self) -> SwapOp | None:
        """The next operation; None when closing and nothing is left. Before waiting, the store tidies up."""
        with self._changed:
            op = self._next()
        if op is not None:
            return op
        self._store.idle()
        with self._changed:
            while (op := self._next()) is None and not self._closing:
                self._changed.wait()
        return op

    def _next(self) -> SwapOp | None:
        for index, read in enumerate(self._reads):
            if read.after <= self._finished:
                del self._reads[index]
                return read.op
        return self._ordered.popleft() if self._ordered else None

    def _finish(self, op: SwapOp) -> None:
        self._finished += 1
        self._queued_bytes -= _held_bytes(op)
        if self._last_change.get(_subject(op)) == self._finished:
            del self._last_change[_subject(op)]


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
        case CompactLogOp() | DeleteLogOp() | ReadTailOp() | WakeLogOp():
            return ("log", op.namespace, op.agent)
        case FileStepOp():
            return ("file", op.path)
        case FlushOp():
            return ("flush",)


def _held_bytes(op: SwapOp) -> int:
    """Bytes of KV an operation keeps in memory while it waits (part of the budget, P21)."""
    match op:
        case WritePageOp():
            return len(op.payload)
        case AppendRecordOp():
            return sum(len(segment.tail_kv) for segment in op.record.segments)
    return 0


__all__ = ["SwapThread"]
