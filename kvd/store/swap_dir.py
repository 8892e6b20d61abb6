"""The page files of one model: write, read, delete, quarantine, scan.

Owned by whoever owns the data folder's queue (the swap thread, or recovery before it starts); not thread safe. No
state but the set of folders known to exist. May import kvd.ids, kvd.quant.spec and siblings of kvd.store.
"""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.ids import PageId
from kvd.quant.spec import PageLayout
from kvd.store.errors import PageMissing
from kvd.store.fs import FileStat, FileSystem, NotRegularFile, is_temp_name, make_folder, write_file
from kvd.store.layout import DataFolder, page_of_file
from kvd.store.page_file import PageHeader, decode_page, encode_page, file_bytes_for
from kvd.store.read_buffers import ReadBuffers

BUFFER_BYTES: Final = 64 << 20
"""Memory kept for reads to come: as much as were in flight at once, and no more than this."""


@dataclass(frozen=True, slots=True)
class SwapScan:
    """What is in the swap folders.

    Attributes:
        pages: length in bytes of every file that is named like a page and lies where it belongs.
        times: when each of them was changed last, seconds since the epoch.
        temp_files: files that were being written when the last process died.
        foreign_files: everything else; counted, never touched.
        total_bytes: length of all of them.
    """

    pages: dict[PageId, int]
    times: dict[PageId, float]
    temp_files: tuple[Path, ...]
    foreign_files: tuple[Path, ...]
    total_bytes: int


class SwapDir:
    """Page files of one model.

    Args:
        folder: the data folder.
        fingerprint: the model.
        fs: the disk; may be a metered view of the folder's.
        buffers: what pages are read into, shared with whoever else reads them; None for some of its own.
    """

    def __init__(
        self, folder: DataFolder, fingerprint: str, fs: FileSystem, buffers: ReadBuffers | None = None
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._fs = fs
        self._known_folders: set[Path] = set()
        self._buffers = ReadBuffers(BUFFER_BYTES) if buffers is None else buffers

    def path(self, page_id: str) -> Path:
        """Where the page's file is."""
        return self._folder.page_path(self._fingerprint, page_id)

    def write(self, header: PageHeader, layout: PageLayout, payload: bytes | memoryview) -> int:
        """Write a page; when this returns it survives a loss of power.

        When it raises, the page's name holds nothing, the old file, or the whole new one (durable or not).

        Returns:
            Bytes of the file.

        Raises:
            OSError: the disk refused. FileNotFoundError and NotADirectoryError: the folders vanished.
        """
        path = self.path(header.page_id)
        if path.parent not in self._known_folders:
            if self._fs.stat(path.parent.parent) is None:
                raise FileNotFoundError(errno.ENOENT, "the swap folder vanished", str(path.parent.parent))
            make_folder(self._fs, path.parent)
            self._known_folders.add(path.parent)
        return write_file(self._fs, path, encode_page(header, layout, payload))

    def read(self, expected: PageHeader, layout: PageLayout, *, drop_cache: bool = False) -> memoryview:
        """Read a page's payload in one sequential read and verify every byte. Safe from any thread.

        The view is into a buffer that is used again once no view of it is left.

        Raises:
            PageMissing: no such file.
            PageCorrupt: the file is not the page; it is left where it is.
            OSError: the disk refused.
        """
        buffer = self._buffers.take(file_bytes_for(expected, layout) + 1)  # one more than there should be to read
        try:
            n_bytes = self._fs.read_into(self.path(expected.page_id), buffer, drop_cache=drop_cache)
        except (FileNotFoundError, NotADirectoryError, NotRegularFile) as error:
            raise PageMissing(page_id=expected.page_id) from error
        return decode_page(buffer[:n_bytes], expected, layout)

    def delete(self, page_id: str) -> int:
        """Remove a page's file if there is one. It may come back after a crash, then as an orphan.

        Returns:
            Bytes freed.
        """
        path = self.path(page_id)
        found = self._fs.stat(path)
        if found is None:
            return 0
        self._fs.unlink(path)
        return found.file_bytes

    def quarantine(self, page_id: str) -> Path | None:
        """Move a page's file aside, so that it is never served again; None when there is no file."""
        return move_aside(self._fs, self.path(page_id), self._folder.quarantine_folder(self._fingerprint))

    def forget_folders(self) -> None:
        """Drop what is known about existing folders (they vanished)."""
        self._known_folders.clear()

    def scan(self) -> SwapScan:
        """List every file under the swap folder. A missing folder is an empty one."""
        pages: dict[PageId, int] = {}
        times: dict[PageId, float] = {}
        temp_files: list[Path] = []
        foreign: list[Path] = []
        root = self._folder.swap_folder(self._fingerprint)
        files = _files(self._fs, root)
        for folder, name, found in files:
            page_id = page_of_file(name)
            # the place is compared by parts: making a path for each of a hundred thousand files takes a second
            is_at_home = page_id is not None and folder.name == page_id[:2] and folder.parent == root
            if page_id is not None and is_at_home and not found.is_special:
                pages[page_id] = found.file_bytes
                times[page_id] = found.mtime_s
            elif is_temp_name(name):
                temp_files.append(folder / name)
            else:
                foreign.append(folder / name)
        total_bytes = sum(found.file_bytes for _, _, found in files)
        return SwapScan(pages, times, tuple(temp_files), tuple(foreign), total_bytes)


def _files(fs: FileSystem, folder: Path) -> list[tuple[Path, str, FileStat]]:
    """Every file under `folder`: where it lies, its name and its facts."""
    files: list[tuple[Path, str, FileStat]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name, found in fs.entries(folder):
            if found.is_folder:
                files.extend(_files(fs, folder / name))
            else:
                files.append((folder, name, found))
    return files


def aside_path(fs: FileSystem, name: str, quarantine: Path) -> Path:
    """A free name in the quarantine folder that starts like `name`."""
    stem, dot, suffix = name.partition(".")
    number = 0
    while fs.stat(quarantine / f"{stem}-{number}{dot}{suffix}") is not None:
        number += 1
    return quarantine / f"{stem}-{number}{dot}{suffix}"


def move_aside(fs: FileSystem, path: Path, quarantine: Path) -> Path | None:
    """Move a file to the quarantine folder under a free name; None when there is no file.

    Raises:
        OSError: the disk refused; the file then is where it was.
    """
    if fs.stat(path) is None:
        return None
    make_folder(fs, quarantine)
    target = aside_path(fs, path.name, quarantine)
    fs.rename(path, target)
    fs.fsync_dir(quarantine)  # the target first: between the two the file may have two names, never none
    fs.fsync_dir(path.parent)
    return target


def copy_aside(fs: FileSystem, path: Path, quarantine: Path) -> Path:
    """Copy a file to the quarantine folder under a free name; durable when this returns.

    Raises:
        OSError: there is no such file, or the disk refused; there is no copy then.
    """
    data = fs.read(path)
    make_folder(fs, quarantine)
    target = aside_path(fs, path.name, quarantine)
    write_file(fs, target, [data])
    return target


def prune_quarantine(fs: FileSystem, quarantine: Path, *, wanted_bytes: int) -> int:
    """Delete quarantined files, oldest first, until `wanted_bytes` are free or nothing is left.

    Returns:
        Bytes freed.
    """
    files = [(found.mtime_s, folder / name, found.file_bytes) for folder, name, found in _files(fs, quarantine)]
    freed_bytes = 0
    for _, path, file_bytes in sorted(files):
        if freed_bytes >= wanted_bytes:
            break
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)
            freed_bytes += file_bytes
    return freed_bytes


__all__ = ["BUFFER_BYTES", "SwapDir", "SwapScan", "aside_path", "copy_aside", "move_aside", "prune_quarantine"]
