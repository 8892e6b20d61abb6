"""Where everything lies in the data folder, who may open it, and which version of it this is.

    <root>/VERSION                                         format number
    <root>/daemon.lock                                     flock; text: pid of the owner
    <root>/exports/                                        notes of exports under way: where the unfinished file is
    <root>/<fingerprint>/swap/<xx>/<page id>.safetensors   xx: the page id's first two digits
    <root>/<fingerprint>/agents/<name digest>.log          blake2b-128 of namespace NUL agent
    <root>/<fingerprint>/forks.log                         notes of forks whose logs are still to be made
    <root>/<fingerprint>/quarantine/                       what was found bad, never served
    <root>/<fingerprint>/catalog.sqlite3                   derived state

    <root>/MIGRATING, backup-v<n>/, aside-v<n>/            see `kvd.store.migrate`

May import kvd.ids, kvd.store.errors, kvd.store.fs and kvd.store.migrate only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import plistlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.errors import InvalidParams
from kvd.ids import PageId
from kvd.store.errors import DataFolderExposed, DataFolderLocked, DataFolderMalformed, DataFolderTooNew
from kvd.store.fs import FileHandle, FileSystem, folder_bytes, make_folder, write_file
from kvd.store.migrate import MARKER, MIGRATIONS, Migration, interrupted, migrate

FORMAT_VERSION: Final = 1
"""The number in VERSION: raised when an older kvd could misread the folder."""

_HEX_32: Final = re.compile(r"[0-9a-f]{32}")
_PAGE_FILE: Final = re.compile(r"([0-9a-f]{32})\.safetensors")
_LOG_FILE: Final = re.compile(r"[0-9a-f]{32}\.log")
_CACHE_TAG: Final = b"Signature: 8a477f597d28d172789f06886806bc55\n# KV pages of kvd; leave out of backups.\n"


@dataclass(frozen=True, slots=True)
class FolderUsage:
    """Bytes of files.

    Attributes:
        swap_bytes, log_bytes, quarantine_bytes: of one model.
        other_bytes: everything else under the root.
    """

    swap_bytes: int
    log_bytes: int
    quarantine_bytes: int
    other_bytes: int

    @property
    def used_bytes(self) -> int:
        """Every byte under the root."""
        return self.swap_bytes + self.log_bytes + self.quarantine_bytes + self.other_bytes


class DataFolder:
    """The daemon's folder on disk: names, version, lock. One process owns it between `open` and `close`.

    Args:
        root: the folder; it is made if missing.
        fs: the disk it is on.
        format_version: the format that is wanted.
        migrations: how to get there from older ones (`kvd.store.migrate`).

    Attributes:
        facts: what `open` did that a person should know.
    """

    def __init__(
        self,
        root: Path,
        fs: FileSystem,
        *,
        format_version: int = FORMAT_VERSION,
        migrations: Mapping[int, Migration] = MIGRATIONS,
    ) -> None:
        self.root = root
        self.fs = fs
        self.facts: list[str] = []
        self._format_version = format_version
        self._migrations = migrations
        self._lock: FileHandle | None = None

    def open(self) -> None:
        """Make, check and lock the folder. A private folder without VERSION is initialised, whatever else is in it.

        One of an older format is brought to this one, or set aside.

        Raises:
            DataFolderExposed: it has no VERSION, holds files and is open to others; untouched.
            DataFolderTooNew: a newer kvd wrote it; untouched.
            DataFolderMalformed: VERSION is not a number; untouched.
            DataFolderLocked: another process has it; untouched.
            OSError: the disk refused.
        """
        version = self.version()
        if version is not None and version > self._format_version:
            raise DataFolderTooNew(path=str(self.root), found=version, supported=self._format_version)
        self._make_root(version)
        self._take_lock()
        try:
            if version is None:
                self._write_version()
            self._migrate(version)
            self._exclude_from_backups()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the lock. Harmless when it is not held."""
        if self._lock is not None:
            self.fs.close(self._lock)
            self._lock = None

    def restore(self) -> None:
        """Make the folder again after somebody removed it under a running daemon, and lock it again.

        Raises:
            DataFolderExposed: another folder is in its place, see `open`.
            DataFolderLocked: another process took it meanwhile.
            OSError: the disk refused.
        """
        version = self.version()
        self._make_root(version)
        if version is None:
            if self._lock is not None:  # the lock was on a file that has no name any more
                self.close()
                self._take_lock()
            self._write_version()

    def _write_version(self) -> None:
        write_file(self.fs, self.root / "VERSION", [f"{self._format_version}\n".encode()])

    def _migrate(self, version: int | None) -> None:
        found = interrupted(self.fs, self.root) or version
        is_old = found is not None and found < self._format_version
        if found is not None and (is_old or self.fs.stat(self.root / MARKER) is not None):
            wanted = self._format_version
            self.facts += migrate(self.fs, self.root, found=found, wanted=wanted, steps=self._migrations)

    def version(self) -> int | None:
        """The folder's format number; None when it has none yet.

        Raises:
            DataFolderMalformed: VERSION is not a number.
        """
        path = self.root / "VERSION"
        found = self.fs.stat(path)
        if found is None:
            return None
        content = b"" if found.is_special else self.fs.read(path, limit=64)
        text = content.strip()
        if not (text.isdigit() and len(text) <= 9) or int(text) == 0:
            raise DataFolderMalformed(path=str(path), content=content)
        return int(text)

    def used_bytes(self) -> int:
        """Bytes of every file under the root, foreign and temporary ones included (P25)."""
        return folder_bytes(self.fs, self.root)

    def usage(self, fingerprint: str, *, swap_bytes: int | None = None) -> FolderUsage:
        """Bytes of every file under the root, as `used_bytes`, and what one model has of them; one look at each.

        Args:
            fingerprint: the model.
            swap_bytes: of its swap folder, where they are known.
        """
        model = self.model_folder(fingerprint)
        named = (self.swap_folder(fingerprint), self.agents_folder(fingerprint), self.quarantine_folder(fingerprint))
        log_bytes, quarantine_bytes = (folder_bytes(self.fs, path) for path in named[1:])
        if swap_bytes is None:
            swap_bytes = folder_bytes(self.fs, named[0])
        other_bytes = folder_bytes(self.fs, self.root, besides=frozenset({model}))
        other_bytes += folder_bytes(self.fs, model, besides=frozenset(named))
        return FolderUsage(swap_bytes, log_bytes, quarantine_bytes, other_bytes)

    def model_folder(self, fingerprint: str) -> Path:
        """The folder of one model's state."""
        if not _HEX_32.fullmatch(fingerprint):
            raise InvalidParams(f"a fingerprint is 32 hex digits, not {fingerprint!r}")
        return self.root / fingerprint

    def swap_folder(self, fingerprint: str) -> Path:
        """The folder that holds the page folders."""
        return self.model_folder(fingerprint) / "swap"

    def page_path(self, fingerprint: str, page_id: str) -> Path:
        """The swap file of a page."""
        if not _HEX_32.fullmatch(page_id):
            raise InvalidParams(f"a page id is 32 hex digits, not {page_id!r}")
        return self.swap_folder(fingerprint) / page_id[:2] / f"{page_id}.safetensors"

    def agents_folder(self, fingerprint: str) -> Path:
        """The folder of the agents' logs."""
        return self.model_folder(fingerprint) / "agents"

    def log_path(self, fingerprint: str, namespace: str, agent: str) -> Path:
        """The log of an agent; its name is a digest, as agent names may hold any character."""
        return self.agents_folder(fingerprint) / log_name(namespace, agent)

    def forks_path(self, fingerprint: str) -> Path:
        """The notes of forks (`kvd.store.fork_notes`)."""
        return self.model_folder(fingerprint) / "forks.log"

    def quarantine_folder(self, fingerprint: str) -> Path:
        """Where bad files are put aside."""
        return self.model_folder(fingerprint) / "quarantine"

    def exports_folder(self) -> Path:
        """Where notes of exports under way are: each holds the path of a file that is not complete."""
        return self.root / "exports"

    def catalog_path(self, fingerprint: str) -> Path:
        """The SQLite catalog."""
        return self.model_folder(fingerprint) / "catalog.sqlite3"

    def make_model_folders(self, fingerprint: str) -> None:
        """Make the folders of one model, durable, 0700 even where they existed with wider modes (P37)."""
        for path in (
            self.root,
            self.model_folder(fingerprint),
            self.swap_folder(fingerprint),
            self.agents_folder(fingerprint),
            self.quarantine_folder(fingerprint),
        ):
            make_folder(self.fs, path)

    def _make_root(self, version: int | None) -> None:
        """Make the root. The mode of a folder with other people's files in it is not ours to change (P37)."""
        found = self.fs.stat(self.root)
        exposed = found is not None and found.is_folder and bool(found.mode & 0o077)
        if found is not None and exposed and version is None and self.fs.listdir(self.root):
            raise DataFolderExposed(path=str(self.root), mode=found.mode)
        make_folder(self.fs, self.root)

    def _take_lock(self) -> None:
        path = self.root / "daemon.lock"
        try:
            handle = self.fs.lock(path)
        except BlockingIOError as error:
            text = b""
            with contextlib.suppress(OSError):
                text = self.fs.read(path, limit=32).strip()
            raise DataFolderLocked(path=str(path), pid=int(text) if text.isdigit() else None) from error
        try:
            self.fs.truncate(handle, 0)
            self.fs.write(handle, f"{os.getpid()}\n".encode())
        except BaseException:
            self.fs.close(handle)
            raise
        self._lock = handle

    def _exclude_from_backups(self) -> None:
        """KV is big, changes all the time and can be computed again. Best effort: never a reason not to start."""
        if sys.platform == "darwin":
            _set_xattr(
                self.fs.database_path(self.root),
                "com.apple.metadata:com_apple_backup_excludeItem",
                plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY),
            )
        tag = self.root / "CACHEDIR.TAG"
        if self.fs.stat(tag) is None:
            write_file(self.fs, tag, [_CACHE_TAG])


def log_name(namespace: str, agent: str) -> str:
    """File name of an agent's log: blake2b-128 over namespace NUL agent, in hex, and `.log`."""
    return hashlib.blake2b(f"{namespace}\0{agent}".encode(), digest_size=16).hexdigest() + ".log"


def page_of_file(name: str) -> PageId | None:
    """The page a swap file's name stands for, None for names that kvd does not give."""
    match = _PAGE_FILE.fullmatch(name)
    return None if match is None else PageId(match[1])


def is_log_name(name: str) -> bool:
    """Whether a file name is one that `log_name` gives."""
    return _LOG_FILE.fullmatch(name) is not None


def _set_xattr(path: Path, name: str, value: bytes) -> None:
    """Set an extended attribute on macOS (os.setxattr exists on Linux only); failures are ignored."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.setxattr(os.fsencode(path), name.encode(), value, ctypes.c_size_t(len(value)), ctypes.c_uint32(0), 0)


__all__ = ["FORMAT_VERSION", "DataFolder", "FolderUsage", "is_log_name", "log_name", "page_of_file"]
