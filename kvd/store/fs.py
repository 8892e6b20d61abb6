"""The only door to the disk: a small file system interface, so that crashes and faults can be put behind it.

Theory of operation. Durable state is made of three moves only: a new file appears under its name complete
(`write_file`: temporary name, write, fsync, rename, fsync of the folder), a log grows (write, fsync), a name goes away.
Everything a crash can do to them is simulated by the lossy disk of the tests, which implements `FileSystem` too.
SQLite does its own file access and is therefore used for derived state only.

May import nothing from kvd.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import stat as stat_bits
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NewType, Protocol, TypeVar

T = TypeVar("T")

FileHandle = NewType("FileHandle", int)
"""An open file; owned by whoever opened it."""

TEMP_SUFFIX: Final = ".tmp"
"""Ends the name of every file that is not complete yet; such names start with a dot."""

_TEMP_NAME: Final = re.compile(r"\..+\.[0-9a-f]{12}\.tmp", re.DOTALL)
LOCK_PATIENCE_S: Final = 0.1
"""How long a lock is asked for: whoever looks at a folder holds its lock for a moment, a daemon holds it for good."""

_LOCK_PAUSE_S: Final = 0.002
_FULL_FSYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
_NO_CACHE: Final[int | None] = getattr(fcntl, "F_NOCACHE", None)


def is_no_file(error: OSError) -> bool:
    """Whether a file could not be opened since a folder, a link, a pipe or a device has its name."""
    return isinstance(error, NotRegularFile) or error.errno in (errno.EISDIR, errno.ELOOP)


class NotRegularFile(OSError):
    """A pipe, socket or device has the name of a file: it is never read or written, and counts as no file."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


@dataclass(frozen=True, slots=True)
class FileStat:
    """Facts of a file or folder.

    Attributes:
        is_folder: False for anything that is not a folder.
        file_bytes: length in bytes (0 for folders).
        mode: permission bits.
        mtime_s: last change of the content, seconds since the epoch.
        is_special: a pipe, socket or device.
    """

    is_folder: bool
    file_bytes: int
    mode: int
    mtime_s: float
    is_special: bool = False


class FileSystem(Protocol):
    """What the store asks of a disk. Every method raises OSError when the disk refuses.

    No method waits for a pipe's other end: what opens files raises NotRegularFile for what is none.
    """

    def create(self, path: Path) -> FileHandle:
        """Open a new file for writing, mode 0600; FileExistsError when the name is taken, links are not followed."""

    def open_append(self, path: Path) -> FileHandle:
        """Open an existing or new file (0600) for writing at its end; links are not followed."""

    def write(self, handle: FileHandle, data: bytes | memoryview) -> None:
        """Write all of `data`; when it raises, any prefix of it may be in the file."""

    def truncate(self, handle: FileHandle, file_bytes: int) -> None:
        """Cut the file to `file_bytes`."""

    def fsync(self, handle: FileHandle) -> None:
        """Return once the file's content survives a loss of power."""

    def close(self, handle: FileHandle) -> None:
        """Close the file."""

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, replacing whatever had it."""

    def link(self, source: Path, target: Path) -> None:
        """Give a file one more name in the same file system; FileExistsError when that is taken."""

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""

    def mkdir(self, path: Path) -> None:
        """Make one folder, mode 0700."""

    def fsync_dir(self, path: Path) -> None:
        """Return once the names inside the folder survive a loss of power."""

    def chmod(self, path: Path, mode: int) -> None:
        """Set permission bits."""

    def read(self, path: Path, *, offset: int = 0, limit: int = -1, drop_cache: bool = False) -> bytes:
        """Read `limit` bytes (-1: all) from `offset` on; optionally leave nothing in the system's page cache."""

    def read_into(self, path: Path, buffer: memoryview, *, drop_cache: bool = False) -> int:
        """Read a file from its beginning into uint8 [n] until that is full or the file ends; returns the bytes read."""

    def listdir(self, path: Path) -> list[str]:
        """Names in a folder, sorted."""

    def entries(self, path: Path) -> list[tuple[str, FileStat]]:
        """Names in a folder with their facts, sorted: one look at a folder of thousands. What vanishes is left out."""

    def stat(self, path: Path) -> FileStat | None:
        """Facts of a path, None when nothing is there. Links are not followed."""

    def lock(self, path: Path) -> FileHandle:
        """Open (0600) and lock a file for this process; BlockingIOError when another one holds it for good."""

    def database_path(self, path: Path) -> Path:
        """Where SQLite may open the file that the store calls `path`."""


class RealFileSystem:
    """The machine's file system. Stateless, safe from any thread."""

    def create(self, path: Path) -> FileHandle:
        """See `FileSystem.create`."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return FileHandle(os.open(path, flags, 0o600))

    def open_append(self, path: Path) -> FileHandle:
        """See `FileSystem.open_append`."""
        return FileHandle(_open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))

    def write(self, handle: FileHandle, data: bytes | memoryview) -> None:
        """See `FileSystem.write`."""
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(handle, left) :]

    def truncate(self, handle: FileHandle, file_bytes: int) -> None:
        """See `FileSystem.truncate`."""
        os.ftruncate(handle, file_bytes)

    def fsync(self, handle: FileHandle) -> None:
        """See `FileSystem.fsync`. On macOS fsync leaves data in the drive's cache; F_FULLFSYNC does not."""
        if _FULL_FSYNC is not None:
            try:
                fcntl.fcntl(handle, _FULL_FSYNC)
            except OSError as error:
                # Network file systems lack it. A real fault must not reach the plain fsync: it would report success.
                if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                    raise
                os.fsync(handle)
        else:
            os.fsync(handle)

    def close(self, handle: FileHandle) -> None:
        """See `FileSystem.close`."""
        os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """See `FileSystem.rename`."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """See `FileSystem.link`."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """See `FileSystem.unlink`."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """See `FileSystem.mkdir`."""
        os.mkdir(path, 0o700)

    def fsync_dir(self, path: Path) -> None:
        """See `FileSystem.fsync_dir`."""
        handle = FileHandle(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            self.fsync(handle)
        finally:
            os.close(handle)

    def chmod(self, path: Path, mode: int) -> None:
        """See `FileSystem.chmod`."""
        os.chmod(path, mode)

    def read(self, path: Path, *, offset: int = 0, limit: int = -1, drop_cache: bool = False) -> bytes:
        """See `FileSystem.read`."""
        with _open_to_read(path, drop_cache=drop_cache) as file:
            file.seek(offset)
            return file.readall() if limit < 0 else _read_exactly(file.fileno(), limit)

    def read_into(self, path: Path, buffer: memoryview, *, drop_cache: bool = False) -> int:
        """See `FileSystem.read_into`."""
        done = 0
        with _open_to_read(path, drop_cache=drop_cache) as file:
            while done < len(buffer) and (part := file.readinto(buffer[done:])):
                done += part
        return done

    def listdir(self, path: Path) -> list[str]:
        """See `FileSystem.listdir`."""
        return sorted(os.listdir(path))

    def entries(self, path: Path) -> list[tuple[str, FileStat]]:
        """See `FileSystem.entries`."""
        found: list[tuple[str, FileStat]] = []
        with os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.name, _facts_of(entry.stat(follow_symlinks=False))))
        return sorted(found, key=lambda each: each[0])

    def stat(self, path: Path) -> FileStat | None:
        """See `FileSystem.stat`."""
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _facts_of(found)

    def lock(self, path: Path) -> FileHandle:
        """See `FileSystem.lock`. Another's hold that ends within `LOCK_PATIENCE_S` is waited out."""
        handle = _open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock_patiently(handle)
        except BaseException:
            os.close(handle)
            raise
        return FileHandle(handle)

    def database_path(self, path: Path) -> Path:
        """See `FileSystem.database_path`."""
        return path


def _facts_of(found: os.stat_result) -> FileStat:
    mode = found.st_mode
    folder = stat_bits.S_ISDIR(mode)
    special = not (folder or stat_bits.S_ISREG(mode) or stat_bits.S_ISLNK(mode))
    file_bytes = 0 if folder or special else found.st_size
    return FileStat(folder, file_bytes, stat_bits.S_IMODE(mode), found.st_mtime, special)


@contextlib.contextmanager
def _open_to_read(path: Path, *, drop_cache: bool) -> Iterator[io.FileIO]:
    """A regular file, unbuffered; what was read of it is left out of the system's page cache if that is wanted."""
    handle = _open_regular(path, os.O_RDONLY)
    with io.FileIO(handle, "rb") as file:
        if drop_cache and _NO_CACHE is not None:
            fcntl.fcntl(handle, _NO_CACHE, 1)
        yield file
        if drop_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _open_regular(path: Path, flags: int) -> int:
    """Open a file without following links; a pipe must not make the caller wait until somebody opens its other end."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EOPNOTSUPP, errno.ENODEV):  # a pipe nobody reads, a socket, no device
            raise NotRegularFile(path) from error
        raise
    mode = os.fstat(handle).st_mode
    if not stat_bits.S_ISREG(mode):
        os.close(handle)
        if stat_bits.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise NotRegularFile(path)
    return handle


def _lock_patiently(handle: int) -> None:
    """Lock an open file exclusively; BlockingIOError when it is still another's after `LOCK_PATIENCE_S`."""
    deadline_s = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(_LOCK_PAUSE_S)
        else:
            return


def _read_exactly(handle: int, limit: int) -> bytes:
    """Read `limit` bytes or up to the end of the file, whichever comes first."""
    parts: list[bytes] = []
    while limit > 0 and (part := os.read(handle, limit)):
        parts.append(part)
        limit -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def make_folder(fs: FileSystem, path: Path) -> None:
    """Make `path` and its missing parents, each durable; a folder that exists becomes 0700 if it was wider.

    A folder that exists is made durable too: whoever made it may have died, or failed, before that. Parents that exist
    are left as they are: they are not ours, and one that may not be opened is somebody else's to flush.

    Raises:
        OSError: the disk refused, or something else has the name.
    """
    found = fs.stat(path)
    if found is None:
        if path.parent != path and fs.stat(path.parent) is None:
            make_folder(fs, path.parent)
        with contextlib.suppress(FileExistsError):
            fs.mkdir(path)
        fs.fsync_dir(path.parent)
        found = fs.stat(path)
    else:
        with contextlib.suppress(PermissionError):
            fs.fsync_dir(path.parent)
    if found is None or not found.is_folder:
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
    if found.mode & 0o077:
        fs.chmod(path, 0o700)


def write_file(fs: FileSystem, path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Put a complete file under `path`, durable when this returns.

    When it raises, `path` holds either what it held before or the whole new content, never part of it, and the
    temporary file is removed if the disk allows it (recovery removes it otherwise).

    Args:
        fs: the disk.
        path: final name; the temporary one is in the same folder, as a rename must not cross file systems.
        parts: the content in order.

    Returns:
        Bytes written.

    Raises:
        OSError: the disk refused.
    """
    temp = path.with_name(f".{path.name}.{secrets.token_hex(6)}{TEMP_SUFFIX}")
    written = 0
    handle = fs.create(temp)
    try:
        try:
            for part in parts:
                fs.write(handle, part)
                written += len(part)
            fs.fsync(handle)
        finally:
            fs.close(handle)
        fs.rename(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fs.unlink(temp)
        raise
    fs.fsync_dir(path.parent)
    return written


def is_temp_name(name: str) -> bool:
    """Whether a name is one that `write_file` gives to files that are not complete."""
    return _TEMP_NAME.fullmatch(name) is not None


def read_twice(read: Callable[[], T]) -> T:
    """What `read` gives at the first or second try: one hiccup of the disk must not cost an agent a whole run."""
    try:
        return read()
    except OSError:
        return read()


def folder_bytes(fs: FileSystem, path: Path, *, besides: frozenset[Path] = frozenset()) -> int:
    """Bytes of all files under `path`, whatever their names; 0 when there is no such folder.

    Args:
        fs: the disk.
        path: a folder.
        besides: folders in it that are left out.
    """
    total = 0
    try:
        entries = fs.entries(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    for name, found in entries:
        if not found.is_folder:
            total += found.file_bytes
        elif path / name not in besides:
            total += folder_bytes(fs, path / name)
    return total


__all__ = [
    "LOCK_PATIENCE_S",
    "TEMP_SUFFIX",
    "FileHandle",
    "FileStat",
    "FileSystem",
    "NotRegularFile",
    "RealFileSystem",
    "folder_bytes",
    "is_temp_name",
    "make_folder",
    "write_file",
]
