"""Small files beside the pages (settings, constants): whole or not there, durable, written through the same door.

They go through `FileSystem` like everything else, so that what macOS calls a flush is one, and the lossy disk of the
tests sees them. May import kvd.store.fs only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvd.store.fs import FileSystem, NotRegularFile, make_folder, write_file

MAX_SMALL_FILE_BYTES: Final = 1 << 28
"""What is read at once at most; more than any such file has, less than hurts."""


def write_small_file(fs: FileSystem, path: Path, data: bytes) -> None:
    """Put `data` under `path`; when this returns it survives a loss of power. A missing folder is made (0700).

    When it raises, the path holds what it held before or all of `data`.

    Raises:
        OSError: the disk refused.
    """
    if fs.stat(path.parent) is None:
        make_folder(fs, path.parent)
    write_file(fs, path, [data])


def read_small_file(fs: FileSystem, path: Path) -> bytes | None:
    """The file's content; None when there is no such file (a pipe, socket or device in its place is none).

    Raises:
        OSError: the disk refused (then nobody knows what it holds).
    """
    try:
        return fs.read(path, limit=MAX_SMALL_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError, NotRegularFile):
        return None


__all__ = ["MAX_SMALL_FILE_BYTES", "read_small_file", "write_small_file"]
