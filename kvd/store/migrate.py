"""Bringing a data folder of an older format to this kvd's: converted with a backup, or set aside; never destroyed.

Theory of operation. A step leads from one format number to the next. It names the files it converts and says how, bytes
to bytes. In order: (1) a file MIGRATING with the old number, (2) VERSION gets the new number, so that from here on an
older kvd refuses the folder, (3) each file is copied to `backup-v<old>/` under its own relative path, unless a copy is
there already, and replaced by what the step makes *of the copy*, (4) MIGRATING goes. Each move is durable before the
next, and what is made depends on the copies alone: a kill anywhere, and the next start does the rest. Whoever wants the
old kvd back moves the copies back and writes the old number into VERSION. Backups are left for a person to delete; they
count against the quota.

Only copies of this migration may be trusted: an older kvd may have written anything since an earlier one. So before
MIGRATING is written what earlier ones left, `backup-v<n>/` or `aside-v<n>/`, gets another name, `backup-v<n>-1/` or the
next that is free. A migration goes on, and its copies count, while MIGRATING has its number and VERSION a newer one.

A folder that is older than any step knows is set aside: everything in it that is kvd's moves to `aside-v<old>/`, and
kvd begins anew beside it.

May import kvd.store.errors and kvd.store.fs only.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.store.fs import FileSystem, make_folder, write_file

MARKER: Final = "MIGRATING"
"""Holds the number of the format that a migration under way began with."""

_LEFT_NAME: Final = re.compile(r"(?:backup|aside)-v([0-9]+)")

KEPT_NAMES: Final = frozenset({"VERSION", MARKER, "daemon.lock", "kvd.sock", "CACHEDIR.TAG"})
"""What is not set aside: it says whose folder this is."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step, from format `n` to `n + 1`.

    Attributes:
        files: the files to convert, relative to the root; the same ones when asked again after a kill.
        convert: their new content; a pure function of path and old content.
    """

    files: Callable[[FileSystem, Path], list[Path]]
    convert: Callable[[Path, bytes], bytes]


MIGRATIONS: Final[Mapping[int, Migration]] = {}
"""By the format they lead away from. Format 1 is the first there was."""


def migrate(fs: FileSystem, root: Path, *, found: int, wanted: int, steps: Mapping[int, Migration]) -> list[str]:
    """Bring a locked folder to format `wanted`.

    Args:
        fs: the disk.
        root: the data folder.
        found: the format it has, or had when a migration that was interrupted began.
        wanted: this kvd's.
        steps: what is known.

    Returns:
        What was done, for a person; nothing when there was nothing to do.

    Raises:
        OSError: the disk refused; the next start does the rest.
    """
    facts = [] if _is_begun(fs, root, found) else _rename_earlier(fs, root, found)
    write_file(fs, root / MARKER, [f"{found}\n".encode()])
    write_file(fs, root / "VERSION", [f"{wanted}\n".encode()])
    if all(number in steps for number in range(found, wanted)):
        for number in range(found, wanted):
            converted = _convert(fs, root, number, steps[number])
            facts.append(
                f"data folder brought from format {number} to {number + 1}: {converted} files converted, "
                f"the old ones are in {root / f'backup-v{number}'}"
            )
    else:
        moved = _set_aside(fs, root, root / f"aside-v{found}")
        facts.append(
            f"this kvd cannot convert format {found}: {moved} entries of {root} moved to {root / f'aside-v{found}'}, "
            "kvd begins anew"
        )
    fs.unlink(root / MARKER)
    fs.fsync_dir(root)
    return facts


def interrupted(fs: FileSystem, root: Path) -> int | None:
    """The format that a migration began with which did not end; None when there is none."""
    return _number(fs, root / MARKER)


def _number(fs: FileSystem, path: Path) -> int | None:
    found = fs.stat(path)
    if found is None or found.is_folder or found.is_special:
        return None
    text = fs.read(path, limit=16).strip()
    return int(text) if text.isdigit() and int(text) > 0 else None


def _is_begun(fs: FileSystem, root: Path, found: int) -> bool:
    """Whether copies may have been made by the migration that is under way; before VERSION is new there are none."""
    return interrupted(fs, root) == found and (_number(fs, root / "VERSION") or 0) > found


def _rename_earlier(fs: FileSystem, root: Path, found: int) -> list[str]:
    """Give another name to what earlier migrations from `found` or later left; returns what was done."""
    facts = []
    names = fs.listdir(root)
    for name in names:
        match = _LEFT_NAME.fullmatch(name)
        if match is None or int(match[1]) < found:
            continue
        free = next(f"{name}-{number}" for number in itertools.count(1) if fs.stat(root / f"{name}-{number}") is None)
        fs.rename(root / name, root / free)
        facts.append(f"what an earlier migration left in {root / name} is in {root / free} now")
    if facts:
        fs.fsync_dir(root)
    return facts


def _convert(fs: FileSystem, root: Path, number: int, step: Migration) -> int:
    backup = root / f"backup-v{number}"
    # once files were converted only the copies say which there were
    paths = sorted({*step.files(fs, root), *_below(fs, backup, backup)})
    for path in paths:
        copy = backup / path
        if fs.stat(copy) is None:
            make_folder(fs, copy.parent)
            write_file(fs, copy, [fs.read(root / path)])
        write_file(fs, root / path, [step.convert(path, fs.read(copy))])
    return len(paths)


def _below(fs: FileSystem, folder: Path, root: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name, found in fs.entries(folder):
            if found.is_folder:
                yield from _below(fs, folder / name, root)
            elif not name.startswith("."):  # a copy that was being written
                yield (folder / name).relative_to(root)


def _set_aside(fs: FileSystem, root: Path, aside: Path) -> int:
    make_folder(fs, aside)
    names = [name for name in fs.listdir(root) if name not in KEPT_NAMES and not name.startswith(("aside-v", "."))]
    for name in names:
        fs.rename(root / name, aside / name)
    fs.fsync_dir(aside)
    fs.fsync_dir(root)
    return len(names)


__all__ = ["KEPT_NAMES", "MARKER", "MIGRATIONS", "Migration", "interrupted", "migrate"]
