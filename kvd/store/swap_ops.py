"""What the swap thread can be asked to do, and what it answers. Plain frozen data.

Order. Writes, records, compactions and deletions are carried out strictly in the order of submission. Reads overtake
them, except those they depend on: a page's read waits for queued writes and deletions of that page, a tail's read for
queued changes of that agent's log; and a change waits for such reads that were submitted before it.

May import kvd.errors, kvd.quant.spec and siblings of kvd.store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvd.errors import KvdError
from kvd.ids import PageId
from kvd.quant.spec import PageLayout
from kvd.store.agent_image import AgentImage
from kvd.store.fork_notes import ForkNote
from kvd.store.fs import FileSystem
from kvd.store.layout import DataFolder
from kvd.store.page_file import PageHeader
from kvd.store.records import AgentRecord


@dataclass(frozen=True, slots=True)
class WritePageOp:
    """Write a sealed page. Durable when the result has no error; then a record may name it."""

    header: PageHeader
    layout: PageLayout
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReadPageOp:
    """Read and verify a page; `SwapResult.payload` holds `layout.payload_bytes` bytes."""

    expected: PageHeader
    layout: PageLayout


@dataclass(frozen=True, slots=True)
class AppendRecordOp:
    """Commit a record to its agent's log. Durable when the result has no error, else not, and nothing is half written.

    After LogVanished or LogDamaged or for a new agent the record must stand alone (no base, all its KV).

    Attributes:
        record: what to append.
        missing: pages the branch may go on naming although no good file of them is known: the engine can do without.
    """

    record: AgentRecord
    missing: frozenset[PageId] = frozenset()


@dataclass(frozen=True, slots=True)
class ForkLogOp:
    """Make a new agent durable as the beginning of another one's log; its own log follows.

    After any error but a DiskFault nothing was written, and a record of the child itself may do instead.

    Attributes:
        note: whose log, and how much of it.
        flushing: called on the swap thread when nothing is left to do but to flush, and when it is done or refused.
    """

    note: ForkNote
    flushing: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class CompactLogOp:
    """Rewrite an agent's log as one snapshot a branch; record numbers go on as before.

    Attributes:
        keep_branches: branches to keep besides the current one; None keeps all. The pages of dropped branches may be
            deleted afterwards.
        open_pages: False gives up the KV that the log holds; text and ids stay.
    """

    namespace: str
    agent: str
    keep_branches: frozenset[int] | None = None
    open_pages: bool = True


@dataclass(frozen=True, slots=True)
class DeletePageOp:
    """Delete a page: row first, then file. Refused while a log names it."""

    page_id: str


@dataclass(frozen=True, slots=True)
class CheckPagesOp:
    """See whether files of known pages still are what was written; `SwapResult.value` is a `PagesChecked`.

    A file that is as it was left is not read. Others are read and verified; bad ones go to quarantine, and those pages
    are not durable any more. What the disk refuses to read proves nothing, nor does a swap folder that is away.

    One answer speaks of a few pages and names the rest, which the swap thread goes on with when nothing else is to do.

    Attributes:
        page_ids: pages to look at; those that are not known are passed over.
        folders: first two digits of the ids of further pages.
    """

    page_ids: frozenset[str]
    folders: frozenset[str] = frozenset()

    def and_also(self, other: CheckPagesOp) -> CheckPagesOp:
        """A look at all that both mean."""
        return CheckPagesOp(self.page_ids | other.page_ids, self.folders | other.folders)


@dataclass(frozen=True, slots=True)
class PagesChecked:
    """What a step of a look at page files found.

    Attributes:
        bad: pages without a good file.
        rest: what was not looked at yet; None when that is all.
    """

    bad: tuple[PageId, ...] = ()
    rest: CheckPagesOp | None = None


@dataclass(frozen=True, slots=True)
class GiveUpPagesOp:
    """Delete files of pages although logs name them: row first, then file. `SwapResult.value`: how many there were.

    For a full quota; the pages are missing from then on, and their tokens are computed again when they are needed.
    """

    page_ids: frozenset[PageId]


@dataclass(frozen=True, slots=True)
class DeleteLogOp:
    """Delete an agent's log: row first, then file. Its pages stay until they are deleted themselves."""

    namespace: str
    agent: str


@dataclass(frozen=True, slots=True)
class WakeLogOp:
    """Read and verify the log of an agent that sleeps since the start (`kvd.store.sleeping`).

    `SwapResult.image` is the agent, `SwapResult.value` a tuple of `PageHeader`: its pages that have files.
    After LogCorrupt the agent is gone, after any other error it goes on sleeping.
    """

    namespace: str
    agent: str


@dataclass(frozen=True, slots=True)
class ReadTailOp:
    """Read a branch's tail KV; `SwapResult.payload`: `[kv_heads, tail_tokens, width]` per tensor, in layout order."""

    namespace: str
    agent: str
    branch: int
    group: int
    segment: int = 0


@dataclass(frozen=True, slots=True)
class FlushOp:
    """Set `event` once everything submitted before is done and the catalog is committed."""

    event: threading.Event


class StoreHands(Protocol):
    """What a `FileStepOp` may do, on the swap thread."""

    @property
    def fs(self) -> FileSystem:
        """The disk; what passes is counted."""

    @property
    def folder(self) -> DataFolder:
        """The data folder."""

    def admit(self, wanted_bytes: int) -> None:
        """Raise QuotaExceeded unless that many bytes of pages may be written."""

    def read_page(self, expected: PageHeader, layout: PageLayout) -> memoryview:
        """As `ReadPageOp`."""

    def read_tail(self, namespace: str, agent: str, branch: int, group: int) -> bytes:
        """As `ReadTailOp`."""

    def write_page(self, header: PageHeader, layout: PageLayout, payload: bytes) -> None:
        """As `WritePageOp`."""


@dataclass(frozen=True, eq=False, slots=True)
class FileStepOp:
    """One step of an export or import; `SwapResult.value` has what it returned.

    A step moves a page or a few megabytes, so that others' reads and commits come in between. It runs like a read,
    ahead of what is queued: it must not depend on anything that has not been answered.

    Attributes:
        step: what to do; its OSErrors become FileFault.
        path: the file outside the data folder, for messages.
    """

    step: Callable[[StoreHands], object]
    path: str


@dataclass(frozen=True, slots=True)
class SwapBroken:
    """Nobody asks for this: the thread ended through a bug of its own. Its answer is the last one there will be."""

    reason: str


SwapOp = (
    WritePageOp
    | ReadPageOp
    | AppendRecordOp
    | ForkLogOp
    | CompactLogOp
    | DeletePageOp
    | CheckPagesOp
    | GiveUpPagesOp
    | DeleteLogOp
    | ReadTailOp
    | FlushOp
    | FileStepOp
    | WakeLogOp
)


def doing(op: SwapOp) -> str:
    """What an operation does, for messages."""
    match op:
        case WritePageOp():
            return f"Writing page {op.header.page_id}"
        case ReadPageOp():
            return f"Reading page {op.expected.page_id}"
        case AppendRecordOp():
            return f"Committing record {op.record.seq} of agent {op.record.agent!r}"
        case ForkLogOp(note, _):
            return f"Noting fork {note.child!r} of agent {note.parent!r}"
        case CompactLogOp() | DeleteLogOp() | ReadTailOp() | WakeLogOp():
            return f"{type(op).__name__.removesuffix('Op')} of agent {op.agent!r}"
        case DeletePageOp():
            return f"Deleting page {op.page_id}"
        case GiveUpPagesOp():
            return "Giving up page files"
        case CheckPagesOp():
            return "Looking at page files"
        case FileStepOp():
            return f"A step on {op.path}"
        case FlushOp():
            return "Flushing"


@dataclass(frozen=True, slots=True)
class SwapResult:
    """The answer to one op.

    Attributes:
        op: what was asked; `SwapBroken` when nothing will be done any more.
        error: why it failed; None when it is done and durable.
        seconds: time it took, without waiting in the queue.
        written_bytes: bytes written for it.
        read_bytes: bytes read for it.
        payload: page (a view into its file's bytes) or tail, for reads that succeeded.
        image: the agent afterwards, for records, forks and compactions that succeeded.
        facts: what else happened and belongs into the log (quarantined files, recreated folders, a new catalog).
        value: what a `FileStepOp` returned, a `WakeLogOp` says, a `CheckPagesOp` found (`PagesChecked`), or a
            `GiveUpPagesOp` counted.
    """

    op: SwapOp | SwapBroken
    error: KvdError | None
    seconds: float
    written_bytes: int = 0
    read_bytes: int = 0
    payload: bytes | memoryview | None = None
    image: AgentImage | None = None
    facts: tuple[str, ...] = ()
    value: object = None


@dataclass(frozen=True, slots=True)
class ReadFigures:
    """Reads of pages beside the swap thread, since start.

    Attributes:
        pages_read: that gave a page.
        bytes_read: of their files.
        reading_s: seconds in which at least one was running.
    """

    pages_read: int = 0
    bytes_read: int = 0
    reading_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """Figures since start, unless said otherwise.

    Attributes:
        bytes_written: all bytes written (pages, logs, moves to quarantine), without SQLite's.
        bytes_written_lifetime: likewise, since the data folder was made (as of the last commit before a crash).
        bytes_read: all bytes read.
        reading_s: seconds in which pages or tails were being read, without waiting in the queue.
        fsyncs, fsync_s: flushes of files and folders, and seconds they took, without SQLite's.
        pages_written, pages_read, records_appended, logs_compacted, pages_deleted: operations that succeeded.
        pages_corrupt, pages_missing: loads that failed so.
        write_errors: writes, records and compactions that failed.
        deliver_errors: answers whose receiver raised.
        queued_ops: operations waiting, reads included.
        queued_bytes: payload bytes they hold in memory.
        read_buffer_bytes: memory that pages are read into, in use or kept for reads to come.
        durable_pages: pages with a durable file.
        swap_bytes, log_bytes, quarantine_bytes: disk used by pages, logs and what was put aside.
        used_bytes: every byte under the data folder, as of the last count plus own writes.
        quota_bytes: the limit for it.
        namespace_bytes: what pages and logs of each namespace take, every file once.
    """

    bytes_written: int
    bytes_written_lifetime: int
    bytes_read: int
    reading_s: float
    fsyncs: int
    fsync_s: float
    pages_written: int
    pages_read: int
    records_appended: int
    logs_compacted: int
    pages_deleted: int
    pages_corrupt: int
    pages_missing: int
    write_errors: int
    deliver_errors: int
    queued_ops: int
    queued_bytes: int
    read_buffer_bytes: int
    durable_pages: int
    swap_bytes: int
    log_bytes: int
    quarantine_bytes: int
    used_bytes: int
    quota_bytes: int
    namespace_bytes: Mapping[str, int] = field(default_factory=dict)


__all__ = [
    "AppendRecordOp",
    "CheckPagesOp",
    "CompactLogOp",
    "DeleteLogOp",
    "DeletePageOp",
    "FileStepOp",
    "FlushOp",
    "ForkLogOp",
    "GiveUpPagesOp",
    "PagesChecked",
    "ReadFigures",
    "ReadPageOp",
    "ReadTailOp",
    "StoreHands",
    "SwapBroken",
    "SwapOp",
    "SwapResult",
    "SwapStatistics",
    "WakeLogOp",
    "WritePageOp",
    "doing",
]
