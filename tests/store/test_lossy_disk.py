"""The simulated disk can lose data: writers that leave out one flush are caught by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.store.fs import write_file
from tests.support.lossy_disk import LossyFileSystem, SimulatedCrash

FOLDER = Path("/d")
TARGET = FOLDER / "file"
CONTENT = b"twelve bytes"


def disk(tmp_path: Path, seed: int) -> LossyFileSystem:
    """A disk with one durable folder."""
    fs = LossyFileSystem(tmp_path / "side", seed=seed)
    fs.mkdir(FOLDER)
    fs.fsync_dir(Path("/"))
    return fs


def broken_writer(*, file_flush: bool, folder_flush: bool) -> Callable[[LossyFileSystem], None]:
    """`write_file`, but flushes can be left out."""

    def write(fs: LossyFileSystem) -> None:
        temp = FOLDER / ".file.tmp"
        handle = fs.create(temp)
        fs.write(handle, CONTENT)
        if file_flush:
            fs.fsync(handle)
        fs.close(handle)
        fs.rename(temp, TARGET)
        if folder_flush:
            fs.fsync_dir(FOLDER)

    return write


def outcomes(tmp_path: Path, write: Callable[[LossyFileSystem], object]) -> set[bytes | None]:
    """What the file holds after a crash that follows the write, over many crashes."""
    found: set[bytes | None] = set()
    for seed in range(200):
        fs = disk(tmp_path, seed)
        write(fs)
        fs.crash()
        found.add(fs.read(TARGET) if fs.stat(TARGET) is not None else None)
    return found


def test_a_correct_writer_never_loses_anything(tmp_path: Path) -> None:
    """P3: file flushed, renamed, folder flushed: the whole content, in every crash."""
    assert outcomes(tmp_path, lambda fs: write_file(fs, TARGET, [CONTENT])) == {CONTENT}
    assert outcomes(tmp_path, broken_writer(file_flush=True, folder_flush=True)) == {CONTENT}


def test_without_the_file_flush_content_is_lost_torn_or_zeroed(tmp_path: Path) -> None:
    """The name survives, the content does not: empty, cut anywhere, zeros at the end."""
    found = outcomes(tmp_path, broken_writer(file_flush=False, folder_flush=True))
    assert b"" in found
    assert any(data and data != CONTENT and CONTENT.startswith(data) for data in found)
    assert any(data and data.endswith(b"\0") and len(data) == len(CONTENT) for data in found)


def test_without_the_folder_flush_the_name_is_lost(tmp_path: Path) -> None:
    """The content is durable, its name may not be."""
    assert outcomes(tmp_path, broken_writer(file_flush=True, folder_flush=False)) == {CONTENT, None}


def test_a_failed_flush_is_not_repaired_by_a_later_one(tmp_path: Path) -> None:
    """As on Linux: after EIO from fsync the pages are marked clean, a second fsync succeeds and means nothing."""
    found = set()
    for seed in range(50):
        fs = disk(tmp_path, seed)
        handle = fs.create(TARGET)
        fs.fsync_dir(FOLDER)
        fs.write(handle, CONTENT)
        fs.fail = lambda number, name, path: 5 if name == "fsync" else None
        with pytest.raises(OSError, match="Input/output error"):
            fs.fsync(handle)
        fs.fail = lambda number, name, path: None
        fs.fsync(handle)
        fs.crash()
        found.add(fs.read(TARGET))
    assert len(found) > 1


def test_removals_and_folders_need_a_flush_too(tmp_path: Path) -> None:
    """An unlinked file may come back, a new folder may go."""
    came_back, gone = set(), set()
    for seed in range(50):
        fs = disk(tmp_path, seed)
        write_file(fs, TARGET, [CONTENT])
        fs.unlink(TARGET)
        fs.mkdir(FOLDER / "inner")
        fs.crash()
        came_back.add(fs.stat(TARGET) is not None)
        gone.add(fs.stat(FOLDER / "inner") is None)
    assert came_back == gone == {True, False}


def test_a_crash_stops_everything_and_may_hit_before_or_after_the_operation(tmp_path: Path) -> None:
    """After the fatal operation nothing works until the machine is up again."""
    effects = set()
    for seed in range(30):
        fs = disk(tmp_path, seed)
        fs.crash_at = fs.operations + 1
        with pytest.raises(SimulatedCrash):
            fs.fsync_dir(Path("/")) if seed % 2 else fs.mkdir(FOLDER / "inner")
        with pytest.raises(SimulatedCrash):
            fs.listdir(FOLDER)
        fs.reboot_clean()
        effects.add(fs.stat(FOLDER / "inner") is not None)
    assert effects == {True, False}
