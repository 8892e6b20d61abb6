"""A look at a data folder that changes nothing: its state, who holds its lock, every file by kind.

`DataFolder.open` makes, locks and corrects; a look must not, so it asks the system directly. Imports kvd.errors and
kvd.store.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvd.errors import KvdError
from kvd.store.fs import RealFileSystem, is_temp_name
from kvd.store.layout import FORMAT_VERSION, DataFolder, is_log_name, page_of_file
from kvd.store.migrate import MARKER

Kind = Literal["own", "swap", "logs", "catalog", "quarantine", "constants", "temp", "foreign"]
KINDS: Final[tuple[Kind, ...]] = ("swap", "logs", "catalog", "quarantine", "constants", "own", "temp", "foreign")
"""Kinds of files, as they are listed. `own`: version, lock, record, tag, socket and kvd's folders."""

SOCKET_FILE: Final = "kvd.sock"
REPLACED: Final = ".replaced."
"""In the names of catalogs that `--rebuild` moved to quarantine: nobody found them bad."""

CATALOG_FILES: Final = ("catalog.sqlite3", "catalog.sqlite3-wal", "catalog.sqlite3-shm", "catalog.sqlite3-journal")

_ROOT_FILES: Final = frozenset({"VERSION", "CACHEDIR.TAG", "daemon.lock", "engine.json", MARKER})
_OLD_FOLDER: Final = re.compile(r"(backup|aside)-v[0-9]+")
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{32}")
_CONSTANTS: Final = re.compile(r"[0-9a-f]{12}\.safetensors")
_PAGE_FOLDER: Final = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder of the data folder.

    Attributes:
        path: where it is.
        kind: what it is for kvd.
        file_bytes: length of a regular file, else 0.
        mode: permission bits.
        uid: owner.
        file_type: `file`, `folder`, `link`, `socket` or `special`.
    """

    path: Path
    kind: Kind
    file_bytes: int
    mode: int
    uid: int
    file_type: Literal["file", "folder", "link", "socket", "special"]

    @property
    def is_exposed(self) -> bool:
        """Whether it is kvd's and others may reach it (P37). What others put here, and links, are not judged."""
        return self.kind != "foreign" and self.file_type != "link" and bool(self.mode & 0o077)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything under a data folder.

    Attributes:
        entries: the root first, then in name order.
        unreadable: folders that could not be listed, with the reason.
    """

    entries: tuple[Entry, ...]
    unreadable: tuple[str, ...]

    def of_kind(self, kind: Kind) -> list[Entry]:
        """Entries of a kind that are no folders."""
        return [entry for entry in self.entries if entry.kind == kind and entry.file_type != "folder"]

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the files of each kind."""
        return {kind: sum(entry.file_bytes for entry in self.of_kind(kind)) for kind in KINDS}

    @property
    def used_bytes(self) -> int:
        """Bytes of every file."""
        return sum(entry.file_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class FolderState:
    """Whether the data folder can be looked into.

    Attributes:
        state: `usable`; `missing` (not made yet); `empty` (no version yet); else why not.
        text: for people, when it is not usable.
        version: its format number, if it has one.
        mode: permission bits; 0 when missing.
        uid: owner; -1 when missing.
    """

    state: Literal["usable", "missing", "empty", "no_folder", "unreadable", "malformed", "too_new", "older"]
    text: str = ""
    version: int | None = None
    mode: int = 0
    uid: int = -1

    @property
    def may_be_searched(self) -> bool:
        """Whether this kvd understands what is inside."""
        return self.state in ("usable", "empty")


@dataclass(frozen=True, slots=True)
class LockState:
    """Who holds the data folder.

    Attributes:
        held: whether a process holds it now.
        pid: what the lock file says, None when it says nothing; a past holder's if `held` is False.
    """

    held: bool
    pid: int | None


def folder_state(root: Path) -> FolderState:
    """Look at a data folder's outside and its version."""
    try:
        found = root.stat()
        if not stat.S_ISDIR(found.st_mode):
            return FolderState("no_folder", f"{root} is not a folder")
        mode, uid = stat.S_IMODE(found.st_mode), found.st_uid
        os.listdir(root)
    except FileNotFoundError:
        return FolderState("missing", f"{root} does not exist yet")
    except NotADirectoryError:
        return FolderState("no_folder", f"{root} lies in something that is not a folder")
    except OSError as error:
        return FolderState("unreadable", f"{root} cannot be read: {error.strerror or error}")
    try:
        version = DataFolder(root, RealFileSystem()).version()
    except KvdError as error:
        return FolderState("malformed", error.message, None, mode, uid)
    except OSError as error:
        found_type = odd_type(root / "VERSION")
        if found_type:
            return FolderState("malformed", f"{root}/VERSION is {found_type}, not a file", None, mode, uid)
        return FolderState("unreadable", f"{root}/VERSION cannot be read: {error.strerror or error}", None, mode, uid)
    if version is not None and version > FORMAT_VERSION:
        text = f"{root} has format {version}; this kvd reads up to {FORMAT_VERSION}"
        return FolderState("too_new", text, version, mode, uid)
    if (version is not None and version < FORMAT_VERSION) or os.path.lexists(root / MARKER):
        text = f"{root} has format {version}, or a migration to {FORMAT_VERSION} was interrupted"
        return FolderState("older", text, version, mode, uid)
    return FolderState("usable" if version is not None else "empty", "", version, mode, uid)


def lock_state(root: Path) -> LockState:
    """Who holds the lock. A shared lock is held for a moment to find out; no file is made or changed.

    A daemon that asks for the lock in that moment is refused it: `RealFileSystem.lock` asks again.

    Raises:
        OSError: the lock file cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        handle = os.open(root / "daemon.lock", flags)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ELOOP):  # none, or no regular file
            return LockState(False, None)
        raise
    try:
        text = os.read(handle, 32).strip() if stat.S_ISREG(os.fstat(handle).st_mode) else b""
        pid = int(text) if text.isdigit() else None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return LockState(True, pid)
        return LockState(False, pid)
    finally:
        os.close(handle)  # lets go of the lock too


def odd_type(path: Path) -> str:
    """What lies where a file of kvd's should: `a link`, `a folder`, `a pipe, socket or device`; empty if a file does.

    Empty, too, when nothing is there. kvd never follows links in its folder, so that one to the right file is as wrong
    as any other.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    if stat.S_ISREG(mode):
        return ""
    if stat.S_ISLNK(mode):
        return "a link"
    return "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"


def take_inventory(root: Path) -> Inventory:
    """List everything under a data folder; what vanishes meanwhile is left out. Links are not followed."""
    entries: list[Entry] = []
    unreadable: list[str] = []
    for path in _walk(root, unreadable):
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            unreadable.append(f"{path}: {error.strerror or error}")
            continue
        entries.append(_entry(path, path.relative_to(root).parts, found))
    return Inventory(tuple(entries), tuple(unreadable))


def fingerprints(root: Path) -> tuple[str, ...]:
    """Names of the models' folders in a data folder.

    Raises:
        OSError: the folder cannot be listed.
    """
    return tuple(
        name
        for name in sorted(os.listdir(root))
        if _FINGERPRINT.fullmatch(name) and stat.S_ISDIR(os.lstat(root / name).st_mode)
    )


def _walk(folder: Path, unreadable: list[str]) -> Iterator[Path]:
    yield folder
    try:
        with os.scandir(folder) as found:
            inside = sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        unreadable.append(f"{folder}: {error.strerror or error}")
        return
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, unreadable)
        else:
            yield folder / entry.name


def _entry(path: Path, parts: tuple[str, ...], found: os.stat_result) -> Entry:
    mode = found.st_mode
    file_type: Literal["file", "folder", "link", "socket", "special"]
    if stat.S_ISREG(mode):
        file_type = "file"
    elif stat.S_ISDIR(mode):
        file_type = "folder"
    elif stat.S_ISLNK(mode):
        file_type = "link"
    else:
        file_type = "socket" if stat.S_ISSOCK(mode) else "special"
    kind = _kind(parts, file_type)
    file_bytes = found.st_size if file_type == "file" else 0
    return Entry(path, kind, file_bytes, stat.S_IMODE(mode), found.st_uid, file_type)


def _kind(parts: tuple[str, ...], file_type: str) -> Kind:
    """What kvd uses a path for; `foreign` when it has no use for it, or when it is of another type than kvd makes."""
    if file_type == "folder":
        return _folder_kind(parts)
    if file_type == "socket":
        return "own" if parts == (SOCKET_FILE,) else "foreign"
    if file_type == "file" and is_temp_name(parts[-1]):
        return "temp"
    match parts:
        case (fingerprint, "quarantine", *_, _) if _FINGERPRINT.fullmatch(fingerprint):
            return "quarantine"  # of any type: a link that lay in a page's place ends here, too
    if file_type != "file":
        return "foreign"
    match parts:
        case (name,) if name in _ROOT_FILES:
            return "own"
        case (old, *_, _) if _OLD_FOLDER.fullmatch(old):
            return "own"
        case ("exports", name) if re.fullmatch("[0-9a-f]{12}", name):
            return "own"
        case ("conditioning", name) if _CONSTANTS.fullmatch(name):
            return "constants"
        case (fingerprint, *rest) if _FINGERPRINT.fullmatch(fingerprint):
            return _model_file_kind(rest)
    return "foreign"


def _model_file_kind(parts: list[str]) -> Kind:
    match parts:
        case ("swap", folder, name) if (page_of_file(name) or "").startswith(folder) and len(folder) == 2:
            return "swap"
        case ("agents", name) if is_log_name(name):
            return "logs"
        case ("forks.log",):
            return "logs"
        case (name,) if name in CATALOG_FILES:
            return "catalog"
    return "foreign"


def _folder_kind(parts: tuple[str, ...]) -> Kind:
    match parts:
        case () | ("conditioning",) | ("exports",):
            return "own"
        case (old, *_) if _OLD_FOLDER.fullmatch(old):
            return "own"
        case (fingerprint, *rest) if _FINGERPRINT.fullmatch(fingerprint):
            match rest:
                case [] | ["swap" | "agents"]:
                    return "own"
                case ["swap", name] if _PAGE_FOLDER.fullmatch(name):
                    return "own"
                case ["quarantine", *_]:
                    return "own"
    return "foreign"


__all__ = [
    "CATALOG_FILES",
    "KINDS",
    "REPLACED",
    "Entry",
    "FolderState",
    "Inventory",
    "Kind",
    "LockState",
    "fingerprints",
    "folder_state",
    "lock_state",
    "odd_type",
    "take_inventory",
]
