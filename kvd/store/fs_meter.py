"""A file system that counts what passes through it: bytes and fsyncs are wear, and wear is a metric (P26).

May import kvd.store.fs only.
"""

from __future__ import annotations

import time
from pathlib import Path

from kvd.store.fs import FileHandle, FileStat, FileSystem


class MeteredFileSystem:
    """Passes everything on to another `FileSystem` and counts. Used by one thread at a time.

    Attributes:
        bytes_written: bytes handed to `write` with success, since construction.
        bytes_read: bytes that were read.
        reads: calls of `read` and `read_into`.
        fsyncs: calls of `fsync` and `fsync_dir`.
        fsync_s: seconds they took.
    """

    def __init__(self, inner: FileSystem) -> None:
        self._inner = inner
        self.bytes_written = 0
        self.bytes_read = 0
        self.reads = 0
        self.fsyncs = 0
        self.fsync_s = 0.0

    def create(self, path: Path) -> FileHandle:
        """See `FileSystem.create`."""
        return self._inner.create(path)

    def open_append(self, path: Path) -> FileHandle:
        """See `FileSystem.open_append`."""
        return self._inner.open_append(path)

    def write(self, handle: FileHandle, data: bytes | memoryview) -> None:
        """See `FileSystem.write`."""
        self._inner.write(handle, data)
        self.bytes_written += len(data)

    def truncate(self, handle: FileHandle, file_bytes: int) -> None:
        """See `FileSystem.truncate`."""
        self._inner.truncate(handle, file_bytes)

    def fsync(self, handle: FileHandle) -> None:
        """See `FileSystem.fsync`."""
        began_s = time.perf_counter()
        try:
            self._inner.fsync(handle)
        finally:
            self._count_fsync(began_s)

    def close(self, handle: FileHandle) -> None:
        """See `FileSystem.close`."""
        self._inner.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """See `FileSystem.rename`."""
        self._inner.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """See `FileSystem.link`."""
        self._inner.link(source, target)

    def unlink(self, path: Path) -> None:
        """See `FileSystem.unlink`."""
        self._inner.unlink(path)

    def mkdir(self, path: Path) -> None:
        """See `FileSystem.mkdir`."""
        self._inner.mkdir(path)

    def fsync_dir(self, path: Path) -> None:
        """See `FileSystem.fsync_dir`."""
        began_s = time.perf_counter()
        try:
            self._inner.fsync_dir(path)
        finally:
            self._count_fsync(began_s)

    def _count_fsync(self, began_s: float) -> None:
        self.fsyncs += 1
        self.fsync_s += time.perf_counter() - began_s

    def chmod(self, path: Path, mode: int) -> None:
        """See `FileSystem.chmod`."""
        self._inner.chmod(path, mode)

    def read(self, path: Path, *, offset: int = 0, limit: int = -1, drop_cache: bool = False) -> bytes:
        """See `FileSystem.read`."""
        self.reads += 1
        data = self._inner.read(path, offset=offset, limit=limit, drop_cache=drop_cache)
        self.bytes_read += len(data)
        return data

    def read_into(self, path: Path, buffer: memoryview, *, drop_cache: bool = False) -> int:
        """See `FileSystem.read_into`."""
        self.reads += 1
        n_bytes = self._inner.read_into(path, buffer, drop_cache=drop_cache)
        self.bytes_read += n_bytes
        return n_bytes

    def listdir(self, path: Path) -> list[str]:
        """See `FileSystem.listdir`."""
        return self._inner.listdir(path)

    def entries(self, path: Path) -> list[tuple[str, FileStat]]:
        """See `FileSystem.entries`."""
        return self._inner.entries(path)

    def stat(self, path: Path) -> FileStat | None:
        """See `FileSystem.stat`."""
        return self._inner.stat(path)

    def lock(self, path: Path) -> FileHandle:
        """See `FileSystem.lock`."""
        return self._inner.lock(path)

    def database_path(self, path: Path) -> Path:
        """See `FileSystem.database_path`."""
        return self._inner.database_path(path)


__all__ = ["MeteredFileSystem"]
