"""The store of a daemon that keeps KV in RAM only (`--swap off`): nothing of it is written, nothing of it is read.

Theory of operation. It answers as the real store does, and keeps nothing. A page that is "written" counts as one whose
frame may be dropped; when it is wanted again it is gone (`PageDropped`), and its tokens are computed again. Agents have
no logs: `kvd.scheduler.commit` appends no records. Exports go to the file that the user named.

May import kvd.errors and siblings of kvd.store.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvd.errors import InternalError, KvdError
from kvd.quant.spec import PageLayout
from kvd.store.errors import FileFault, PageDropped, SwapOff
from kvd.store.fs import FileSystem
from kvd.store.fs_meter import MeteredFileSystem
from kvd.store.layout import DataFolder
from kvd.store.page_file import PageHeader
from kvd.store.swap_ops import (
    AppendRecordOp,
    CompactLogOp,
    FileStepOp,
    FlushOp,
    ReadFigures,
    ReadPageOp,
    ReadTailOp,
    SwapOp,
    SwapResult,
    SwapStatistics,
)


class RamStore:
    """Answers operations without a disk. One owner at a time.

    Args:
        folder: the data folder; never looked into.
        fs: the disk that exports are written to.
    """

    def __init__(self, folder: DataFolder, fs: FileSystem) -> None:
        self._folder = folder
        self._fs = MeteredFileSystem(fs)

    def perform(self, op: SwapOp) -> SwapResult:
        """Answer one operation; faults are in the result."""
        started_s = time.perf_counter()
        error: KvdError | None = None
        value: object = None
        match op:
            case ReadPageOp(expected):
                error = PageDropped(page_id=expected.page_id)
            case ReadTailOp():
                error = PageDropped(page_id="tail")
            case AppendRecordOp() | CompactLogOp():
                error = SwapOff()
            case FileStepOp():
                value, error = self._step(op)
            case FlushOp(event):
                event.set()
        return SwapResult(op, error, time.perf_counter() - started_s, value=value)

    def read_beside(self, op: ReadPageOp) -> SwapResult | None:
        """As `perform`."""
        return self.perform(op)

    def idle(self) -> None:
        """There is nothing to tidy up."""

    def close(self) -> None:
        """There is nothing to close."""

    def trim(self) -> int:
        """Nothing is read, so nothing is kept for it."""
        return 0

    def statistics(
        self,
        *,
        deliver_errors: int = 0,
        queued_ops: int = 0,
        queued_bytes: int = 0,
        beside: ReadFigures = ReadFigures(),  # noqa: B008  frozen
    ) -> SwapStatistics:
        """Figures; what is not written is nought."""
        written, read, fsyncs = self._fs.bytes_written, self._fs.bytes_read, self._fs.fsyncs
        return SwapStatistics(
            bytes_written=written,
            bytes_written_lifetime=written,
            bytes_read=read,
            reading_s=0.0,
            fsyncs=fsyncs,
            fsync_s=self._fs.fsync_s,
            pages_written=0,
            pages_read=0,
            records_appended=0,
            logs_compacted=0,
            pages_deleted=0,
            pages_corrupt=0,
            pages_missing=0,
            write_errors=0,
            deliver_errors=deliver_errors,
            queued_ops=queued_ops,
            queued_bytes=queued_bytes,
            read_buffer_bytes=0,
            durable_pages=0,
            swap_bytes=0,
            log_bytes=0,
            quarantine_bytes=0,
            used_bytes=0,
            quota_bytes=0,
        )

    # ---- what steps of exports may do (`StoreHands`) ----------------------------------------------------------------

    @property
    def fs(self) -> FileSystem:
        """The disk that exports are written to."""
        return self._fs

    @property
    def folder(self) -> DataFolder:
        """The data folder; an export must not be inside it."""
        return self._folder

    def admit(self, wanted_bytes: int) -> None:
        """Raise SwapOff: nothing may be written."""
        raise SwapOff

    def read_page(self, expected: PageHeader, layout: PageLayout) -> memoryview:
        """Raise PageDropped."""
        raise PageDropped(page_id=expected.page_id)

    def read_tail(self, namespace: str, agent: str, branch: int, group: int) -> bytes:
        """Raise PageDropped."""
        raise PageDropped(page_id="tail")

    def write_page(self, header: PageHeader, layout: PageLayout, payload: bytes) -> None:
        """Raise SwapOff."""
        raise SwapOff

    def _step(self, op: FileStepOp) -> tuple[object, KvdError | None]:
        step: Callable[[RamStore], object] = op.step
        try:
            return step(self), None
        except KvdError as error:
            return None, error
        except OSError as error:
            return None, FileFault(op.path, error)
        except Exception as error:
            return None, InternalError(f"A step on {op.path} failed: {error!r}")


__all__ = ["RamStore"]
