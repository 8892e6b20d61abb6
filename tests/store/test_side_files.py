"""Small durable files: all of the new content or the old one, whatever fails, and there after a loss of power."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvd.store.side_files import read_small_file, write_small_file
from tests.support.lossy_disk import LossyFileSystem

PATH = Path("/data/conditioning/one.safetensors")


def disk(tmp_path: Path) -> LossyFileSystem:
    """An empty disk."""
    return LossyFileSystem(tmp_path / "side")


def test_what_was_written_survives_a_loss_of_power(tmp_path: Path) -> None:
    """P3: content, name and folder, all private; no other file is left."""
    fs = disk(tmp_path)
    write_small_file(fs, PATH, b"old")
    write_small_file(fs, PATH, b"new")
    fs.crash()
    assert read_small_file(fs, PATH) == b"new"
    assert fs.listdir(PATH.parent) == [PATH.name]
    for path, mode in ((PATH, 0o600), (PATH.parent, 0o700)):
        found = fs.stat(path)
        assert found is not None
        assert found.mode == mode


@pytest.mark.parametrize("failing", ["create", "write", "fsync", "rename", "fsync_dir"])
def test_a_failed_write_leaves_a_whole_file(tmp_path: Path, failing: str) -> None:
    """The old content or the new one, never part of it, also after a crash."""
    fs = disk(tmp_path)
    write_small_file(fs, PATH, b"old")
    fs.fail = lambda number, name, path: errno.EIO if name == failing else None
    with pytest.raises(OSError):
        write_small_file(fs, PATH, b"new content")
    fs.fail = lambda number, name, path: None
    fs.crash()
    assert read_small_file(fs, PATH) in (b"old", b"new content")


def test_a_missing_file_is_not_an_unreadable_one(tmp_path: Path) -> None:
    """None means there is none; what the disk refuses is raised, so that nobody takes it for a first start."""
    fs = disk(tmp_path)
    assert read_small_file(fs, PATH) is None
    write_small_file(fs, PATH, b"x")
    assert read_small_file(fs, PATH / "below") is None
    fs.fail = lambda number, name, path: errno.EIO if name == "read" else None
    with pytest.raises(OSError):
        read_small_file(fs, PATH)
