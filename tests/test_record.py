"""`engine.json`: the first start's backend and threads, kept until something real changes them."""

import os
from pathlib import Path

import pytest

from kvd import launcher, record
from kvd.record import RECORD_FILE, EngineRecord, follow_recorded_threads, parse_record, read_record, write_record
from kvd.store.fs import RealFileSystem


def test_a_record_survives(tmp_path: Path) -> None:
    """What was written is read; the file is private."""
    written = EngineRecord("mlx", 2, "kvd-1/codec-1")
    write_record(tmp_path, RealFileSystem(), written)
    assert read_record(tmp_path) == written
    assert (tmp_path / RECORD_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"threads": "two", "attention": 7}', '{"threads": 0}', '{"threads": true}', "[" * 100_000],
    ids=["empty", "list", "cut", "types", "zero", "bool", "nested"],
)
def test_a_damaged_record_says_nothing(tmp_path: Path, content: str) -> None:
    """Neither a crash nor a made-up thread count."""
    (tmp_path / RECORD_FILE).write_text(content)
    assert read_record(tmp_path) == EngineRecord()
    assert parse_record(content.encode()) == (EngineRecord(), False)


def test_of_a_damaged_record_what_is_right_counts() -> None:
    """A whole record has every member; what a damaged one still says is followed."""
    assert parse_record(b'{"attention": "mlx", "threads": 2, "numerics": null}') == (EngineRecord("mlx", 2), True)
    assert parse_record(b'{"attention": "mlx", "threads": -2, "numerics": "n"}') == (
        EngineRecord("mlx", None, "n"),
        False,
    )
    assert parse_record(b'{"attention": "mlx"}') == (EngineRecord("mlx"), False)


def test_what_is_no_file_never_blocks_a_start(tmp_path: Path) -> None:
    """A pipe or a folder in the record's place reads as no record."""
    os.mkfifo(tmp_path / RECORD_FILE)
    assert read_record(tmp_path) == EngineRecord()
    (tmp_path / RECORD_FILE).unlink()
    (tmp_path / RECORD_FILE).mkdir()
    assert read_record(tmp_path) == EngineRecord()


def test_an_unchanged_record_is_not_written_again(tmp_path: Path) -> None:
    """The file keeps its inode: no wear, no window for a crash."""
    written = EngineRecord("mlx", 2, "n")
    write_record(tmp_path, RealFileSystem(), written)
    inode = (tmp_path / RECORD_FILE).stat().st_ino
    write_record(tmp_path, RealFileSystem(), written)
    assert (tmp_path / RECORD_FILE).stat().st_ino == inode
    write_record(tmp_path, RealFileSystem(), EngineRecord("mlx", 1, "n"))
    assert read_record(tmp_path).threads == 1


@pytest.mark.parametrize(
    ("recorded", "cores", "user", "restarts"),
    [(1, 2, "", True), (2, 2, "", False), (4, 2, "", False), (1, 2, "2", False), (None, 2, "", False)],
)
def test_recorded_threads_win_unless_a_flag_or_the_machine_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: int | None, cores: int, user: str, restarts: bool
) -> None:
    """Launched with 2 threads: the process starts again with the recorded number, if it has the cores and no flag."""
    started: list[tuple[str, str | None]] = []
    monkeypatch.setenv("KVD_THREADS", user)
    monkeypatch.setattr(launcher, "_report", launcher.LaunchReport("openblas", "/lib/x.so", 2))
    monkeypatch.setattr(record, "available_cores", lambda: cores)
    monkeypatch.setattr(record.os, "execv", lambda path, _: started.append((path, record.os.environ["KVD_THREADS"])))
    write_record(tmp_path, RealFileSystem(), EngineRecord("mlx", recorded, "n"))
    follow_recorded_threads(tmp_path)
    assert bool(started) == restarts
    if restarts:
        assert started[0][1] == str(recorded)
