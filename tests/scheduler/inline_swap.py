"""The swap thread's queue without the thread: operations are carried out when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvd.store.swap_ops import (
    AppendRecordOp,
    CheckPagesOp,
    DeletePageOp,
    FileStepOp,
    FlushOp,
    ForkLogOp,
    GiveUpPagesOp,
    PagesChecked,
    ReadPageOp,
    ReadTailOp,
    SwapOp,
    SwapResult,
    SwapStatistics,
    WritePageOp,
)
from kvd.store.swap_thread import Store


class InlineSwap:
    """A `SwapQueue` without a thread. Reads overtake what does not concern them, as in the real one.

    Args:
        store: carries operations out.
        deliver: takes the answers.
    """

    def __init__(self, store: Store, deliver: Callable[[SwapResult], None]) -> None:
        self._store = store
        self._deliver = deliver
        self.queue: deque[SwapOp] = deque()

    def submit(self, op: SwapOp) -> None:
        """Queue an operation."""
        self.queue.append(op)

    def perform(self) -> bool:
        """Carry out one operation and deliver its answer; False when there is none."""
        if not self.queue:
            self._store.idle()
            return False
        earlier: set[tuple[str, ...]] = set()
        chosen = self.queue[0]
        for op in self.queue:
            if isinstance(op, ReadPageOp | ReadTailOp | FileStepOp) and subject(op) not in earlier:
                chosen = op
                break
            earlier.add(subject(op))
        self.queue.remove(chosen)
        result = self._store.perform(chosen)
        self._deliver(result)
        if isinstance(result.value, PagesChecked) and result.value.rest is not None:
            self.queue.append(result.value.rest)
        return True

    def statistics(self) -> SwapStatistics:
        """Figures."""
        return self._store.statistics()

    def trim(self) -> int:
        """Give back memory kept for reads to come."""
        return self._store.trim()

    def close(self) -> None:
        """Finish what is queued."""
        while self.perform():
            pass
        self._store.close()


def subject(op: SwapOp) -> tuple[str, ...]:
    """The page or log an operation concerns."""
    match op:
        case WritePageOp(header) | ReadPageOp(header):
            return ("page", header.page_id)
        case DeletePageOp(page_id):
            return ("page", page_id)
        case AppendRecordOp(record):
            return ("log", record.namespace, record.agent)
        case ForkLogOp(note):
            return ("log", *note.child_ref)
        case FileStepOp():
            return ("file", op.path)
        case FlushOp() | CheckPagesOp() | GiveUpPagesOp():
            return ()
        case _:
            return ("log", op.namespace, op.agent)
