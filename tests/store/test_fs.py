"""The door to the disk: one contract, held by the real file system and by the simulated one."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvd.store.fs as fs_module
from kvd.store.fs import FileSystem, RealFileSystem, folder_bytes, is_temp_name, make_folder, write_file
from kvd.store.fs_meter import MeteredFileSystem
from tests.support.lossy_disk import LossyFileSystem

Make = Callable[[Path], tuple[FileSystem, Path]]


def real(tmp_path: Path) -> tuple[FileSystem, Path]:
    """The machine's disk."""
    return RealFileSystem(), tmp_path / "root"


def lossy(tmp_path: Path) -> tuple[FileSystem, Path]:
    """The simulated one."""
    return LossyFileSystem(tmp_path / "side"), Path("/root")


def metered(tmp_path: Path) -> tuple[FileSystem, Path]:
    """The counting one."""
    return MeteredFileSystem(RealFileSystem()), tmp_path / "root"


@pytest.mark.parametrize("make", [real, lossy, metered])
def test_files_are_written_read_renamed_and_removed(make: Make, tmp_path: Path) -> None:
    """The contract of every method, in one life of a file."""
    fs, root = make(tmp_path)
    make_folder(fs, root / "a" / "b")
    path = root / "a" / "b" / "file"
    assert fs.stat(path) is None
    assert write_file(fs, path, [b"one ", memoryview(b"two")]) == 7
    assert fs.read(path) == b"one two"
    assert fs.read(path, offset=4, limit=2, drop_cache=True) == b"tw"
    assert fs.read(path, offset=4, limit=99) == b"two"
    with pytest.raises(FileExistsError):
        fs.create(path)
    handle = fs.open_append(path)
    fs.write(handle, b" three")
    fs.truncate(handle, 10)
    fs.write(handle, b"!")
    fs.fsync(handle)
    fs.close(handle)
    assert fs.read(path) == b"one two th!"
    assert folder_bytes(fs, root) == 11
    other = root / "a" / "other"
    fs.rename(path, other)
    assert fs.listdir(root / "a") == ["b", "other"]
    found = fs.stat(other)
    assert found is not None
    assert (found.is_folder, found.file_bytes, found.mode) == (False, 11, 0o600)
    fs.unlink(other)
    assert fs.stat(other) is None
    assert fs.stat(other / "below") is None
    with pytest.raises(FileNotFoundError):
        fs.read(other)
    with pytest.raises(FileNotFoundError):
        fs.unlink(other)
    with pytest.raises(FileNotFoundError):
        fs.create(root / "missing" / "file")
    with pytest.raises(FileExistsError):
        fs.mkdir(root / "a")


def test_modes_are_private_whatever_the_umask(tmp_path: Path) -> None:
    """P37: 0600 and 0700, and a folder that was wider is tightened."""
    old = os.umask(0)
    try:
        fs = RealFileSystem()
        wide = tmp_path / "wide"
        wide.mkdir(mode=0o777)
        wide.chmod(0o777)
        make_folder(fs, wide)
        make_folder(fs, wide / "inner")
        write_file(fs, wide / "inner" / "file", [b"x"])
        fs.close(fs.open_append(wide / "inner" / "log"))
        fs.close(fs.lock(wide / "lock"))
    finally:
        os.umask(old)
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {
        "wide": 0o700,
        "wide/inner": 0o700,
        "wide/inner/file": 0o600,
        "wide/inner/log": 0o600,
        "wide/lock": 0o600,
    }


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link planted in the folder cannot redirect a write or a read."""
    fs = RealFileSystem()
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep")
    link = tmp_path / "link"
    link.symlink_to(victim)
    for attempt in (fs.create, fs.open_append, fs.read, fs.lock):
        with pytest.raises(OSError):
            attempt(link)
    write_file(fs, link, [b"new"])
    assert victim.read_bytes() == b"keep"
    assert link.read_bytes() == b"new"
    assert not link.is_symlink()


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    """P3: whatever operation fails, the name holds the old content or the whole new one."""
    for failing in ("create", "write", "fsync", "rename", "fsync_dir"):
        fs, root = LossyFileSystem(tmp_path / "side"), Path("/root")
        make_folder(fs, root)
        write_file(fs, root / "file", [b"old"])
        fs.fail = lambda number, name, path, failing=failing: errno.ENOSPC if name == failing else None
        with pytest.raises(OSError):
            write_file(fs, root / "file", [b"new"])
        fs.fail = lambda number, name, path: None
        assert fs.read(root / "file") == (b"new" if failing == "fsync_dir" else b"old")
        assert fs.listdir(root) == ["file"]


def test_full_fsync_is_used_where_the_system_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS plain fsync leaves data in the drive; a real fault is not papered over by the plain one."""
    calls: list[str] = []

    def full(code: int) -> Callable[[int, int], int]:
        def fcntl(handle: int, command: int) -> int:
            calls.append("full")
            if code:
                raise OSError(code, "no")
            return 0

        return fcntl

    monkeypatch.setattr(fs_module, "_FULL_FSYNC", 51)
    monkeypatch.setattr(fs_module.os, "fsync", lambda handle: calls.append("plain"))
    fs = RealFileSystem()
    handle = fs.create(tmp_path / "file")
    try:
        for code, expected in ((0, ["full"]), (errno.ENOTSUP, ["full", "plain"])):
            calls.clear()
            monkeypatch.setattr(fs_module.fcntl, "fcntl", full(code))
            fs.fsync(handle)
            assert calls == expected
        calls.clear()
        monkeypatch.setattr(fs_module.fcntl, "fcntl", full(errno.EIO))
        with pytest.raises(OSError):
            fs.fsync(handle)
        assert calls == ["full"]
    finally:
        fs.close(handle)


def test_temporary_names_are_told_from_others() -> None:
    """Only names that `write_file` gives are removed by recovery."""
    assert is_temp_name(".page.safetensors.0123456789ab.tmp")
    for name in (".hidden.tmp", "page.0123456789ab.tmp", ".tmp", ".page.0123456789ag.tmp", ".a.0123456789ab.tmp2"):
        assert not is_temp_name(name)


def test_the_meter_counts_bytes_and_flushes(tmp_path: Path) -> None:
    """P26: bytes written and flushes are a metric."""
    fs = MeteredFileSystem(RealFileSystem())
    write_file(fs, tmp_path / "file", [b"12345"])
    fs.read(tmp_path / "file", limit=3)
    assert (fs.bytes_written, fs.bytes_read, fs.fsyncs) == (5, 3, 2)


def test_a_folder_whose_flush_failed_is_durable_after_the_retry(tmp_path: Path) -> None:
    """`mkdir` worked, the flush of its parent did not: making it again must flush, although it is there."""
    survived = set()
    for seed in range(30):
        fs = LossyFileSystem(tmp_path / "side", seed=seed)
        fs.fail = lambda number, name, path: errno.EIO if name == "fsync_dir" else None
        with pytest.raises(OSError):
            make_folder(fs, Path("/root"))
        fs.fail = lambda number, name, path: None
        make_folder(fs, Path("/root"))
        fs.crash()
        survived.add(fs.stat(Path("/root")) is not None)
    assert survived == {True}


def test_a_lock_that_is_held_for_a_moment_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever only looks whether a daemon runs never keeps one from starting; a daemon does, after a bounded time."""
    path = tmp_path / "lock"
    path.touch(0o600)
    holders = [os.open(path, os.O_RDONLY)]
    fcntl.flock(holders[0], fcntl.LOCK_SH)
    clock = iter(number * fs_module.LOCK_PATIENCE_S / 4 for number in range(100))
    pauses: list[float] = []

    def let_go(pause_s: float) -> None:
        pauses.append(pause_s)
        if holders:
            os.close(holders.pop())

    monkeypatch.setattr(fs_module, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=let_go))
    fs = RealFileSystem()
    handle = fs.lock(path)
    assert len(pauses) == 1
    with pytest.raises(BlockingIOError):
        fs.lock(path)
    assert len(pauses) == 1 + 3
    fs.close(handle)
