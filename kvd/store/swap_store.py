"""Carries out swap operations one after the other, on the caller's thread. `SwapThread` puts a thread around it.

Theory of operation. A page is durable when its file is, and is then known here; a record is refused while it names a
page that is not (so no log can name a page that a crash may take). Deleting goes row first, then file: rows are
dropped in one transaction and the files follow its commit (`idle`, or before anything needs the room). No fault of the
disk ends the store: each becomes the typed error of one result, and what was durable stays so. A folder that somebody
removed is made again; what was in it is forgotten, so that nobody relies on it.

Long because each operation on durable state is carried out here, one short method each.

May import kvd.errors, kvd.ids, kvd.quant.spec and siblings of kvd.store.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from kvd.errors import InternalError, KvdError
from kvd.ids import PageId
from kvd.quant.spec import PageLayout
from kvd.store.agent_image import AgentImage, Layouts
from kvd.store.catalog import AgentRow
from kvd.store.catalog_keeper import CatalogKeeper
from kvd.store.disk_usage import DiskUsage, log_reserve_bytes
from kvd.store.errors import DiskFault, FileFault, LogCorrupt, LogVanished, PageCorrupt, PageMissing, PageReferenced
from kvd.store.fork_book import ForkBook
from kvd.store.fs import FileSystem
from kvd.store.fs_meter import MeteredFileSystem
from kvd.store.layout import DataFolder
from kvd.store.log_book import LogBook
from kvd.store.page_file import PageHeader, file_bytes_for
from kvd.store.read_buffers import ReadBuffers
from kvd.store.records import PageEntry
from kvd.store.recovery_report import RecoveryReport
from kvd.store.swap_dir import BUFFER_BYTES, SwapDir
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
    SwapOp,
    SwapResult,
    SwapStatistics,
    WakeLogOp,
    WritePageOp,
    doing,
)

_DOOMED_PAGES: Final = 256
"""Deleted pages whose files may wait for one common commit of their rows."""

LOOKED_FILES: Final = 256
"""Page files that one step of a look asks the disk about."""

LOOKED_BYTES: Final = 16 << 20
"""Bytes of page files that one step of a look reads, but for one file: tens of milliseconds."""

T = TypeVar("T")
OpT = TypeVar("OpT", bound=SwapOp)


class _FolderAway(Exception):
    """There is no swap folder: what is not there says nothing of a page."""


class SwapStore:
    """Durable state of one model. One owner at a time; `perform` is the only mutator.

    Args:
        folder: the data folder, opened.
        fingerprint: the model.
        fs: the disk.
        quota_bytes: limit over every byte under the folder.
        layouts: page layouts by (group, format_id).
        recovered: what `recover` found; nothing else may have changed the folder since.
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
        full_groups: frozenset[int] | None = None,
        drop_page_cache: bool = False,
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._fs = MeteredFileSystem(fs)
        self._drop_page_cache = drop_page_cache
        self._facts: list[str] = []
        self._buffers = ReadBuffers(BUFFER_BYTES)
        self._swap = SwapDir(folder, fingerprint, self._fs, self._buffers)
        self._beside = SwapDir(folder, fingerprint, fs, self._buffers)  # for readers: the meter is one thread's
        self._pages: dict[PageId, PageHeader] = dict(recovered.pages)
        self._file_bytes: dict[PageId, int] = dict(recovered.file_bytes)
        self._namespace_bytes: Counter[str] = Counter()  # of files of known pages
        for page_id, header in self._pages.items():
            self._namespace_bytes[header.namespace] += self._file_bytes[page_id]
        self._left_as = {  # length and time of change of files that are as this process found, wrote or verified them
            page_id: (recovered.file_bytes[page_id], time_s) for page_id, time_s in recovered.file_times.items()
        }
        self._vanished: set[PageId] = set()  # with the folder, and nobody was told yet
        self._doomed: dict[str, None] = {}
        self._rows_due: dict[tuple[str, str], float] = {}  # agents whose catalog rows are behind, and since when
        self._layouts = layouts
        self._logs = LogBook(folder, fingerprint, self._fs, layouts, full_groups, recovered, self._facts.append)
        self._forks = ForkBook(
            folder,
            fingerprint,
            self._fs,
            layouts,
            self._logs,
            self._facts.append,
            self._log_made,
            recovered.stuck_forks,
            recovered.waiting_forks,
        )
        self._written_before = recovered.counters.get("bytes_written", 0)
        self._usage = DiskUsage(folder, fingerprint, self._fs, quota_bytes, counted=recovered.usage)
        self._catalog = CatalogKeeper(
            folder,
            fingerprint,
            self._fs,
            self._known,
            self._facts.append,
            lambda: self._logs.unreadable,
            is_in_line=recovered.is_catalog_in_line,
        )
        self._counts = dict.fromkeys(
            ("pages_written", "pages_read", "records", "compacted", "deleted", "corrupt", "missing", "write_errors"), 0
        )
        self._reading_s = 0.0

    def perform(self, op: SwapOp) -> SwapResult:
        """Carry out one operation. Never raises for what the disk or the caller did: the result says it."""
        started_s = time.perf_counter()
        written, read = self._fs.bytes_written, self._fs.bytes_read
        error: KvdError | None = None
        done = SwapResult(op, None, 0.0)
        try:
            done = self._dispatch(op)
        except KvdError as fault:
            error = fault
        except OSError as fault:
            if isinstance(op, FileStepOp):
                error = FileFault(op.path, fault)
            else:
                error = DiskFault(doing(op), str(fault.filename or self._folder.root), fault)
        except Exception as fault:
            error = InternalError(f"{doing(op)} failed: {fault!r}")
        if error is not None and isinstance(op, WritePageOp | AppendRecordOp | ForkLogOp | CompactLogOp):
            self._counts["write_errors"] += 1
        facts = tuple(self._facts)
        self._facts.clear()
        seconds = time.perf_counter() - started_s
        if isinstance(op, ReadPageOp | ReadTailOp):
            self._reading_s += seconds
        return SwapResult(
            op=op,
            error=error,
            seconds=seconds,
            written_bytes=self._fs.bytes_written - written,
            read_bytes=self._fs.bytes_read - read,
            payload=done.payload,
            image=done.image,
            facts=facts,
            value=done.value,
        )

    def read_beside(self, op: ReadPageOp) -> SwapResult | None:
        """Read a known page on any thread, beside the one that owns the store; changes nothing.

        Returns:
            The answer, as of `perform`; None when there is no good file, or none is known: then `perform` has to read
            it, since books must be kept.
        """
        page_id, started_s = op.expected.page_id, time.perf_counter()
        if page_id in self._doomed or self._pages.get(page_id) != op.expected:
            return None
        try:
            payload = self._beside.read(op.expected, op.layout, drop_cache=self._drop_page_cache)
        except (PageMissing, PageCorrupt, OSError):
            return None
        file_bytes = self._file_bytes.get(page_id, len(payload))
        return SwapResult(op, None, time.perf_counter() - started_s, read_bytes=file_bytes, payload=payload)

    def idle(self) -> None:
        """Commit the catalog and remove the files of deleted pages. Called when the queue is empty.

        An agent's row is made here, once for all its records since: nobody who waits for a record waits for its row.
        So is the log of an agent that was forked.
        """
        self._forks.tidy()
        for ref, time_s in self._rows_due.items():
            if self._logs.image(ref) is not None:  # its log may have vanished since
                self._catalog.put_agent(self._logs.row(ref, time_s))
        self._rows_due.clear()
        self._catalog.commit({"bytes_written": self._written_before + self._fs.bytes_written})
        for page_id in list(self._doomed):
            try:
                self._usage.swap_bytes -= self._swap.delete(page_id)
            except OSError as error:  # the row is gone: the next recovery, or a full quota, finds the orphan
                self._facts.append(f"file of deleted page {page_id} stays for now: {error}")
            del self._doomed[page_id]

    def trim(self) -> int:
        """Give back memory kept for reads to come; returns its bytes. From any thread."""
        return self._buffers.trim()

    def close(self) -> None:
        """Commit and close the catalog. Nothing else is pending: a stop has nothing to do (P2)."""
        self.idle()
        self._catalog.close()

    def statistics(
        self,
        *,
        deliver_errors: int = 0,
        queued_ops: int = 0,
        queued_bytes: int = 0,
        beside: ReadFigures = ReadFigures(),  # noqa: B008  frozen
    ) -> SwapStatistics:
        """Figures; may be called from any thread. `beside`: what `read_beside` did."""
        return SwapStatistics(
            bytes_written=self._fs.bytes_written,
            bytes_written_lifetime=self._written_before + self._fs.bytes_written,
            bytes_read=self._fs.bytes_read + beside.bytes_read,
            reading_s=self._reading_s + beside.reading_s,
            fsyncs=self._fs.fsyncs,
            fsync_s=self._fs.fsync_s,
            pages_written=self._counts["pages_written"],
            pages_read=self._counts["pages_read"] + beside.pages_read,
            records_appended=self._counts["records"],
            logs_compacted=self._counts["compacted"],
            pages_deleted=self._counts["deleted"],
            pages_corrupt=self._counts["corrupt"],
            pages_missing=self._counts["missing"],
            write_errors=self._counts["write_errors"],
            deliver_errors=deliver_errors,
            queued_ops=queued_ops,
            queued_bytes=queued_bytes,
            read_buffer_bytes=self._buffers.held_bytes,
            durable_pages=len(self._pages),
            swap_bytes=self._usage.swap_bytes,
            log_bytes=self._usage.log_bytes,
            quarantine_bytes=self._usage.quarantine_bytes,
            used_bytes=self._usage.used_bytes,
            quota_bytes=self._usage.quota_bytes,
            namespace_bytes=_sums(self._logs.namespace_bytes, self._namespace_bytes),
        )

    # ---- what steps of exports and imports may do (`StoreHands`) ----------------------------------------------------

    @property
    def fs(self) -> FileSystem:
        """The disk; what passes is counted."""
        return self._fs

    @property
    def folder(self) -> DataFolder:
        """The data folder."""
        return self._folder

    def admit(self, wanted_bytes: int) -> None:
        """Raise QuotaExceeded unless that many bytes of pages may be written."""
        self._admit(wanted_bytes, kept_bytes=log_reserve_bytes(self._usage.quota_bytes))

    def read_page(self, expected: PageHeader, layout: PageLayout) -> memoryview:
        """As `ReadPageOp`; a disk that refuses is a DiskFault."""
        with self._faults_of(ReadPageOp(expected, layout)) as op:
            return self._read_page(op)

    def read_tail(self, namespace: str, agent: str, branch: int, group: int) -> bytes:
        """As `ReadTailOp`; a disk that refuses is a DiskFault."""
        with self._faults_of(ReadTailOp(namespace, agent, branch, group)):
            self._settle((namespace, agent))
            return self._logs.read_tail((namespace, agent), branch, group)

    def write_page(self, header: PageHeader, layout: PageLayout, payload: bytes) -> None:
        """As `WritePageOp`; a disk that refuses is a DiskFault."""
        with self._faults_of(WritePageOp(header, layout, payload)) as op:
            self._unless_vanished(lambda: self._write_page(op))

    @contextlib.contextmanager
    def _faults_of(self, op: OpT) -> Iterator[OpT]:
        """What the disk of the data folder refuses is no fault of the file that a step works on."""
        try:
            yield op
        except OSError as fault:
            raise DiskFault(doing(op), str(fault.filename or self._folder.root), fault) from fault

    # ---- operations -------------------------------------------------------------------------------------------------

    def _dispatch(self, op: SwapOp) -> SwapResult:
        match op:
            case WritePageOp():
                self._unless_vanished(lambda: self._write_page(op))
            case ReadPageOp():
                return SwapResult(op, None, 0.0, payload=self._read_page(op))
            case AppendRecordOp():
                return self._append(op)
            case ForkLogOp():
                return self._fork(op)
            case CompactLogOp():
                return self._compact(op)
            case DeletePageOp():
                self._delete_page(op.page_id)
            case CheckPagesOp():
                return SwapResult(op, None, 0.0, value=self._check_pages(op))
            case GiveUpPagesOp(page_ids):
                return SwapResult(op, None, 0.0, value=self._give_up(page_ids))
            case DeleteLogOp():
                self._unless_vanished(lambda: self._forks.let_go((op.namespace, op.agent)))
                self._rows_due.pop((op.namespace, op.agent), None)
                renewals = self._catalog.renewals
                self._catalog.drop_agent(op.namespace, op.agent)
                self.idle()
                self._usage.log_bytes -= self._logs.delete((op.namespace, op.agent))
                if self._catalog.renewals != renewals:  # made anew while the agent was still known: its row is back
                    self._catalog.drop_agent(op.namespace, op.agent)
            case WakeLogOp():
                return self._wake(op)
            case ReadTailOp():
                self._settle((op.namespace, op.agent))
                tail = self._logs.read_tail((op.namespace, op.agent), op.branch, op.group, op.segment)
                return SwapResult(op, None, 0.0, payload=tail)
            case FileStepOp(step):
                return SwapResult(op, None, 0.0, value=step(self))
            case FlushOp():
                try:
                    self.idle()
                finally:
                    op.event.set()
        return SwapResult(op, None, 0.0)

    def _write_page(self, op: WritePageOp) -> None:
        page_id = op.header.page_id
        if page_id in self._doomed:
            self.idle()
        self._admit(file_bytes_for(op.header, op.layout), kept_bytes=log_reserve_bytes(self._usage.quota_bytes))
        found = self._fs.stat(self._swap.path(page_id))
        try:
            file_bytes = self._swap.write(op.header, op.layout, op.payload)
        except OSError:
            self._usage.recount()  # the temporary or even the final file may be there
            raise
        self._usage.swap_bytes += file_bytes - (0 if found is None else found.file_bytes)
        self._know_page(op.header, file_bytes)
        self._note_left(page_id)
        self._counts["pages_written"] += 1

    def _read_page(self, op: ReadPageOp) -> memoryview:
        """Only a file that is gone or wrong costs the page; what the disk refused to read may be good tomorrow."""
        page_id = op.expected.page_id
        known = self._pages.get(page_id)
        if known is not None and known != op.expected:  # the file is good, the question is wrong: keep the file
            raise PageCorrupt(page_id=page_id, reason="identity")
        try:
            if page_id in self._doomed:
                raise PageMissing(page_id=page_id)
            payload = self._swap.read(op.expected, op.layout, drop_cache=self._drop_page_cache)
        except PageMissing:
            self._counts["missing"] += 1
            self._forget_page(page_id)
            raise
        except PageCorrupt:
            self._counts["corrupt"] += 1
            self._forget_page(page_id)
            self._put_aside(page_id)
            raise
        if known is None:  # its header could not be read at start; now every byte of it was
            self._know_page(op.expected, file_bytes_for(op.expected, op.layout))
            self._note_left(page_id)
        self._counts["pages_read"] += 1
        return payload

    def _append(self, op: AppendRecordOp) -> SwapResult:
        ref = (op.record.namespace, op.record.agent)
        self._settle(ref)
        before = self._logs.log_bytes(ref)
        renewed = self._logs.renewed
        durable = {*self._pages, *op.missing} if op.missing else self._pages
        try:
            image = self._unless_vanished(lambda: self._logs.append(op.record, durable, self._admit))
        except OSError:
            self._usage.recount()  # a failed append may have left bytes behind
            raise
        if self._logs.renewed != renewed:
            self._usage.recount()  # the old log may be in quarantine
        else:
            self._usage.log_bytes += image.log_bytes - before
        return self._log_changed(op, ref, image, "records")

    def _fork(self, op: ForkLogOp) -> SwapResult:
        try:
            image = self._unless_vanished(
                lambda: self._forks.add(op.note, self._pages.keys(), self._admit, op.flushing)
            )
        finally:
            op.flushing()  # a refusal is worth no more waiting
        self._counts["records"] += 1
        return SwapResult(op, None, 0.0, image=image)

    def _settle(self, ref: tuple[str, str]) -> None:
        self._unless_vanished(lambda: self._forks.settle(ref))

    def _log_made(self, ref: tuple[str, str], log_bytes: int) -> None:
        """A fork has a log of its own."""
        self._usage.log_bytes += log_bytes
        self._usage.promised_bytes = self._forks.promised_bytes  # or it would count twice where room is being made
        self._rows_due[ref] = time.time()

    def _compact(self, op: CompactLogOp) -> SwapResult:
        ref = (op.namespace, op.agent)
        self._settle(ref)
        try:
            image = self._logs.compact(ref, op.keep_branches, self._admit, open_pages=op.open_pages)
        finally:
            self._usage.recount()
        return self._log_changed(op, ref, image, "compacted")

    def _wake(self, op: WakeLogOp) -> SwapResult:
        ref = (op.namespace, op.agent)
        before = self._logs.log_bytes(ref)
        try:
            image = self._logs.wake(ref)
        except LogCorrupt:
            self._catalog.drop_agent(*ref)
            self._usage.recount()
            raise
        if image.log_bytes != before:
            self._catalog.put_agent(self._logs.row(ref, time.time()))
            self._usage.recount()
        for branch in image.branches.values():
            for segment in branch.segments:
                for entry in segment.pages:
                    self._check_identity(entry, segment.group, segment.format_id)
        headers = tuple(self._pages[page] for page in image.page_ids() if page in self._pages)
        return SwapResult(op, None, 0.0, image=image, value=headers)

    def _check_identity(self, entry: PageEntry, group: int, format_id: str) -> None:
        """A page that a log names and that says it is another one is none; a start sees this for logs it reads."""
        header = self._pages.get(entry.page_id)
        if header is None:
            return
        found = (header.key, header.runs, header.group, header.format_id)
        if found != (entry.key, entry.runs, group, format_id):
            self._counts["corrupt"] += 1
            self._forget_page(entry.page_id)
            self._put_aside(entry.page_id)

    def _log_changed(
        self, op: AppendRecordOp | CompactLogOp, ref: tuple[str, str], image: AgentImage, count: str
    ) -> SwapResult:
        self._counts[count] += 1
        self._rows_due[ref] = time.time()
        return SwapResult(op, None, 0.0, image=image)

    def _delete_page(self, page_id: str) -> None:
        self._swap.path(page_id)  # refuses what is no page id now, not when the file's turn comes
        references = self._logs.references(page_id)
        if references or self._logs.unreadable:  # a log that nobody could read may name it too
            raise PageReferenced(page_id=page_id, references=references, unreadable_logs=len(self._logs.unreadable))
        self._logs.settle()
        self._forget_page(PageId(page_id))
        self._doomed[page_id] = None
        self._counts["deleted"] += 1
        if len(self._doomed) >= _DOOMED_PAGES:
            self.idle()

    def _give_up(self, page_ids: frozenset[PageId]) -> int:
        known = [page_id for page_id in sorted(page_ids) if page_id in self._pages]
        for page_id in known:
            self._forget_page(page_id)
            self._doomed[page_id] = None
        self.idle()
        self._usage.recount()
        return len(known)

    def _check_pages(self, op: CheckPagesOp) -> PagesChecked:
        known = self._pages.keys() | self._vanished
        wanted = known & op.page_ids
        folders = sorted(op.folders)
        while folders and len(wanted) < LOOKED_FILES:
            folder = folders.pop()
            wanted |= {page_id for page_id in known if page_id.startswith(folder)}
        bad: list[PageId] = []
        left = sorted(wanted, reverse=True)
        looked_files = looked_bytes = 0
        while left and looked_files < LOOKED_FILES and looked_bytes < LOOKED_BYTES:
            page_id = left.pop()
            looked_files += 1
            try:
                is_good, read_bytes = self._check_page(page_id)
            except _FolderAway:
                self._facts.append("the swap folder is away: nothing is said of its pages until it is back")
                return PagesChecked(tuple(bad))
            except OSError as error:
                self._facts.append(f"page {page_id} may have changed and cannot be read now: {error}")
                continue
            looked_bytes += read_bytes
            if not is_good:
                bad.append(page_id)
        if bad:
            self._usage.recount()
        rest = CheckPagesOp(frozenset(left), frozenset(folders)) if left or folders else None
        return PagesChecked(tuple(bad), rest)

    def _check_page(self, page_id: PageId) -> tuple[bool, int]:
        """Whether a page has a good file, and how many bytes it took to tell."""
        header = self._pages.get(page_id)
        if header is None:
            self._vanished.discard(page_id)
            return False, 0
        layout = self._layouts(header.group, header.format_id)
        found = self._fs.stat(self._swap.path(page_id))
        if found is None and self._fs.stat(self._folder.swap_folder(self._fingerprint)) is None:
            raise _FolderAway
        left_as = None if found is None else (found.file_bytes, found.mtime_s)
        if layout is None or (left_as is not None and left_as == self._left_as.get(page_id)):
            return True, 0
        try:
            payload = self._read_page(ReadPageOp(header, layout))
        except PageMissing:
            return False, 0
        except PageCorrupt:
            return False, 0 if found is None else found.file_bytes
        if left_as is not None:
            self._left_as[page_id] = left_as
        return True, len(payload)

    def _note_left(self, page_id: PageId) -> None:
        found = self._fs.stat(self._swap.path(page_id))
        if found is not None:
            self._left_as[page_id] = (found.file_bytes, found.mtime_s)

    # ---- internals --------------------------------------------------------------------------------------------------

    def _put_aside(self, page_id: PageId) -> None:
        """Quarantine a bad file; one that cannot be moved is bad all the same, and is found bad again."""
        try:
            moved = self._swap.quarantine(page_id)
        except OSError as error:
            self._facts.append(f"bad page {page_id} stays where it is for now: {error}")
            return
        self._usage.recount()
        if moved is not None:
            self._facts.append(f"page {page_id} put aside as {moved.name}")

    def _know_page(self, header: PageHeader, file_bytes: int) -> None:
        self._namespace_bytes[header.namespace] += file_bytes - self._file_bytes.get(header.page_id, 0)
        self._pages[header.page_id] = header
        self._file_bytes[header.page_id] = file_bytes
        self._vanished.discard(header.page_id)
        self._catalog.put_page(header, file_bytes)

    def _forget_page(self, page_id: PageId) -> None:
        self._forget_file(page_id)
        self._vanished.discard(page_id)
        self._catalog.drop_pages([page_id])

    def _forget_file(self, page_id: PageId) -> None:
        header, file_bytes = self._pages.pop(page_id, None), self._file_bytes.pop(page_id, 0)
        if header is not None:
            self._namespace_bytes[header.namespace] -= file_bytes
        self._left_as.pop(page_id, None)

    def _admit(self, wanted_bytes: int, *, kept_bytes: int = 0) -> None:
        self._usage.promised_bytes = self._forks.promised_bytes
        # what an unreadable log names is not known: its pages look like orphans, and quarantine may hold its past
        self._usage.admit(wanted_bytes, None if self._logs.unreadable else self._delete_orphans, kept_bytes=kept_bytes)

    def _delete_orphans(self) -> None:
        """Remove page files that are neither durable pages nor waiting to be: left by writes that failed late."""
        self.idle()
        for page_id in self._swap.scan().pages:
            if page_id not in self._pages and not self._logs.references(page_id):
                self._swap.delete(page_id)
                self._facts.append(f"orphan {page_id} deleted")

    def _known(self) -> tuple[dict[PageId, tuple[PageHeader, int]], list[AgentRow]]:
        pages = {page_id: (header, self._file_bytes[page_id]) for page_id, header in self._pages.items()}
        return pages, self._logs.rows(time.time())

    def _unless_vanished(self, action: Callable[[], T]) -> T:
        """Do it; when the folder turns out to be gone, make it again, forget what was in it and do it once more."""
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError):
            self._restore_folder()
        except LogVanished:
            if self._fs.stat(self._folder.agents_folder(self._fingerprint)) is None:
                self._restore_folder()
            self._usage.recount()
            raise
        return action()

    def _restore_folder(self) -> None:
        self._swap.forget_folders()
        self._folder.restore()
        self._folder.make_model_folders(self._fingerprint)
        present = self._swap.scan().pages
        lost_pages = [page_id for page_id in self._pages if page_id not in present]
        for page_id in lost_pages:
            self._forget_file(page_id)
        self._vanished.update(lost_pages)  # told by the next look at them, which a new folder causes
        lost_logs = self._logs.forget_lost()
        self._forks.folder_vanished()
        self._facts.append(
            f"data folder vanished and was made again: lost {len(lost_pages)} pages, {len(lost_logs)} logs"
        )
        self._catalog.renew()
        self._usage.recount()


def _sums(*parts: Mapping[str, int]) -> dict[str, int]:
    """Name by name; from any thread, since a dict is copied in one go."""
    sums: Counter[str] = Counter()
    for part in parts:
        sums.update(dict(part))
    return {name: total for name, total in sums.items() if total}


__all__ = ["SwapStore"]
