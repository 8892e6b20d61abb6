"""The engine's side of the swap thread: operations out, answers back to whoever waits for them.

Runs on the engine thread. The swap thread, or a reader beside it, delivers each result into the engine's inbox;
`on_result` finds its taker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvd.errors import KvdError
from kvd.ids import GroupId, PageId
from kvd.quant.spec import PageLayout
from kvd.scheduler.disk_health import DiskHealth
from kvd.scheduler.errors import EngineBroken
from kvd.scheduler.requests import AgentRef
from kvd.store.errors import QuotaExceeded
from kvd.store.fork_notes import ForkNote
from kvd.store.page_file import PageHeader
from kvd.store.records import AgentRecord
from kvd.store.swap_ops import (
    AppendRecordOp,
    CheckPagesOp,
    CompactLogOp,
    DeleteLogOp,
    DeletePageOp,
    FileStepOp,
    ForkLogOp,
    GiveUpPagesOp,
    PagesChecked,
    ReadPageOp,
    ReadTailOp,
    StoreHands,
    SwapBroken,
    SwapOp,
    SwapResult,
    SwapStatistics,
    WakeLogOp,
    WritePageOp,
)

RecordAnswer = Callable[[SwapResult], None]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Shortage:
    """The quota refused a page or a record.

    Attributes:
        over_bytes: by how much it would have been passed.
        quota_bytes: the quota.
    """

    over_bytes: int
    quota_bytes: int


class SwapQueue(Protocol):
    """The swap thread as the engine sees it (`kvd.store.swap_thread.SwapThread`)."""

    def submit(self, op: SwapOp) -> None:
        """Queue an operation."""

    def statistics(self) -> SwapStatistics:
        """Figures."""

    def trim(self) -> int:
        """Give back memory kept for reads to come; returns its bytes."""

    def close(self) -> None:
        """Finish what is queued and end the thread."""


class PageTaker(Protocol):
    """Where answers about pages go (`kvd.scheduler.memory.Memory`)."""

    def page_written(self, page: PageId, error: KvdError | None) -> None:
        """A write ended."""

    def page_read(self, page: PageId, payload: bytes | memoryview | None, error: KvdError | None) -> None:
        """A read ended."""

    def tail_read(self, page: PageId, payload: bytes | memoryview | None, error: KvdError | None) -> None:
        """A tail came."""

    def copies_lost(self, pages: Sequence[PageId]) -> None:
        """Page files are gone or not what was written, by somebody else's doing."""


class StoreDoor:
    """Owner: the engine thread.

    Args:
        swap: the swap thread's queue.
        log: told of facts an operator wants to know.

    Attributes:
        health: how the disk fares.
    """

    def __init__(self, swap: SwapQueue, log: Callable[..., None]) -> None:
        self._swap = swap
        self._log = log
        self._taker: PageTaker | None = None
        self._tails: dict[tuple[AgentRef, int, int], list[PageId]] = {}
        self._answers: dict[tuple[str, str, int], RecordAnswer] = {}
        # changes of one log, or of one page, are answered in the order in which they were asked for
        self._log_answers: dict[tuple[str, str], list[RecordAnswer]] = {}
        self._deletions: dict[str, list[RecordAnswer]] = {}
        self._steps: dict[FileStepOp, RecordAnswer] = {}
        self.health = DiskHealth()
        self._shortage: Shortage | None = None
        self._giving_up: list[RecordAnswer] = []

    def connect(self, taker: PageTaker) -> None:
        """Name the taker of page answers (it is made after the door)."""
        self._taker = taker

    # ---- operations out ---------------------------------------------------------------------------------------------

    def write_page(self, header: PageHeader, layout: PageLayout, payload: bytes) -> None:
        """Queue a page write."""
        self._swap.submit(WritePageOp(header, layout, payload))

    def read_page(self, header: PageHeader, layout: PageLayout) -> None:
        """Queue a page read."""
        self._swap.submit(ReadPageOp(header, layout))

    def read_tail(self, page: PageId, ref: AgentRef, branch: int, group: GroupId) -> None:
        """Queue a tail read."""
        self._tails.setdefault((ref, branch, int(group)), []).append(page)
        self._swap.submit(ReadTailOp(ref.namespace, ref.agent, branch, int(group)))

    def append_record(
        self, record: AgentRecord, answer: RecordAnswer, *, missing: frozenset[PageId] = frozenset()
    ) -> None:
        """Queue a commit; `missing` pages may be named although no good file of them is known."""
        self._answers[record.namespace, record.agent, record.seq] = answer
        self._swap.submit(AppendRecordOp(record, missing))

    def fork_log(self, note: ForkNote, answer: RecordAnswer, flushing: Callable[[], None]) -> None:
        """Queue a fork that begins as another agent's log does."""
        self._log_answers.setdefault(note.child_ref, []).append(answer)
        self._swap.submit(ForkLogOp(note, flushing))

    def compact_log(
        self, ref: AgentRef, keep_branches: frozenset[int], answer: RecordAnswer, *, open_pages: bool = True
    ) -> None:
        """Queue a compaction; branches not named are let go of, without `open_pages` all KV in the log, too."""
        self._log_answers.setdefault((ref.namespace, ref.agent), []).append(answer)
        self._swap.submit(CompactLogOp(ref.namespace, ref.agent, keep_branches, open_pages))

    def delete_log(self, ref: AgentRef, answer: RecordAnswer) -> None:
        """Queue the deletion of an agent's log."""
        self._log_answers.setdefault((ref.namespace, ref.agent), []).append(answer)
        self._swap.submit(DeleteLogOp(ref.namespace, ref.agent))

    def wake_log(self, ref: AgentRef, answer: RecordAnswer) -> None:
        """Queue the reading of a sleeping agent's log."""
        self._log_answers.setdefault((ref.namespace, ref.agent), []).append(answer)
        self._swap.submit(WakeLogOp(ref.namespace, ref.agent))

    def delete_page(self, page: PageId, answer: RecordAnswer) -> None:
        """Queue the deletion of a page file; the store refuses while a log names the page."""
        self._deletions.setdefault(page, []).append(answer)
        self._swap.submit(DeletePageOp(page))

    def is_deleting(self, page: PageId) -> bool:
        """Whether a deletion of the page's file has no answer yet."""
        return page in self._deletions

    def give_up(self, pages: frozenset[PageId], answer: RecordAnswer) -> None:
        """Queue the deletion of page files although logs name them."""
        self._giving_up.append(answer)
        self._swap.submit(GiveUpPagesOp(pages))

    def take_shortage(self) -> Shortage | None:
        """What the quota refused last since this was asked, if anything; nothing while files are being given up."""
        if self._giving_up:
            return None
        shortage, self._shortage = self._shortage, None
        return shortage

    @property
    def is_giving_up(self) -> bool:
        """Whether files are being given up: what is used then is about to be less."""
        return bool(self._giving_up)

    def file_step(self, path: str, step: Callable[[StoreHands], object], answer: RecordAnswer) -> None:
        """Queue a step of an export or import of the file `path`."""
        op = FileStepOp(step, path)
        self._steps[op] = answer
        self._swap.submit(op)

    def statistics(self) -> SwapStatistics:
        """Figures of the swap thread."""
        return self._swap.statistics()

    def trim(self) -> int:
        """Give back memory kept for reads to come; returns its bytes."""
        return self._swap.trim()

    def close(self) -> None:
        """Finish what is queued."""
        self._swap.close()

    # ---- answers back -----------------------------------------------------------------------------------------------

    def on_result(self, result: SwapResult) -> None:
        """Hand one answer to its taker.

        Raises:
            EngineBroken: the swap thread ended through a bug; nothing can be durable any more.
        """
        assert self._taker is not None
        self._note_health(result)
        for fact in result.facts:
            self._log("store", fact=fact)
        match result.op:
            case WritePageOp(header):
                self._taker.page_written(header.page_id, result.error)
            case ReadPageOp(header):
                self._taker.page_read(header.page_id, result.payload, result.error)
            case ReadTailOp(namespace, agent, branch, group):
                self._tail_came(namespace, agent, branch, group, result)
            case AppendRecordOp(record):
                self._answers.pop((record.namespace, record.agent, record.seq))(result)
            case ForkLogOp(note, _):
                _first(self._log_answers, note.child_ref)(result)
            case CompactLogOp(namespace, agent) | DeleteLogOp(namespace, agent) | WakeLogOp(namespace, agent):
                _first(self._log_answers, (namespace, agent))(result)
            case DeletePageOp(page_id):
                _first(self._deletions, page_id)(result)
            case GiveUpPagesOp():
                if result.error is None:
                    self._shortage = None  # of before there was room; if it does not do, the next refusal says so
                self._giving_up.pop(0)(result)
            case CheckPagesOp():
                if isinstance(result.value, PagesChecked) and result.value.bad:
                    self._taker.copies_lost(result.value.bad)
            case FileStepOp():
                self._steps.pop(result.op)(result)
            case SwapBroken(reason):
                # every answer that is still awaited will never come
                raise EngineBroken(f"the swap thread ended: {reason}")

    def _note_health(self, result: SwapResult) -> None:
        if isinstance(result.error, QuotaExceeded) and isinstance(result.op, WritePageOp | AppendRecordOp | ForkLogOp):
            self._shortage = Shortage(result.error.over_bytes, result.error.quota_bytes)
        before = self.health.state
        self.health.note(result)
        if "refuses" in (before, self.health.state) and before != self.health.state:
            is_well = self.health.state != "refuses"
            self._log("disk_health", level="info" if is_well else "warning", **self.health.facts())

    def _tail_came(self, namespace: str, agent: str, branch: int, group: int, result: SwapResult) -> None:
        assert self._taker is not None
        key = next(
            k for k in self._tails if (k[0].namespace, k[0].agent, k[1], k[2]) == (namespace, agent, branch, group)
        )
        waiting = self._tails[key]
        page = waiting.pop(0)
        if not waiting:
            del self._tails[key]
        self._taker.tail_read(page, result.payload, result.error)


def _first(answers: dict[K, list[RecordAnswer]], key: K) -> RecordAnswer:
    """Take the answer that was asked for first."""
    waiting = answers[key]
    answer = waiting.pop(0)
    if not waiting:
        del answers[key]
    return answer
