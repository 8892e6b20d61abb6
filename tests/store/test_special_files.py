"""Pipes in the place of files: nothing waits for their other end, nothing of them is taken for content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvd.store.errors import DataFolderMalformed, PageMissing
from kvd.store.fs import NotRegularFile, RealFileSystem
from kvd.store.layout import DataFolder
from kvd.store.side_files import read_small_file, write_small_file
from kvd.store.swap_ops import AppendRecordOp, ReadPageOp, WritePageOp
from tests.support.store_data import FINGERPRINT, LAYOUTS, ModelAgent, header_of, open_store


def replace_by_pipe(path: Path) -> None:
    """Put a pipe that nobody holds in a file's place."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def test_no_open_waits_for_a_pipe(tmp_path: Path) -> None:
    """Reading, appending to and locking one are refused at once."""
    fs, path = RealFileSystem(), tmp_path / "pipe"
    os.mkfifo(path)
    for action in (fs.read, fs.open_append, fs.lock):
        with pytest.raises(NotRegularFile):
            action(path)
    found = fs.stat(path)
    assert found is not None
    assert found.is_special


def test_recovery_takes_pipes_for_missing_files(tmp_path: Path) -> None:
    """A page, a log and the catalog: the store starts, says so, and writes the real files again."""
    fs, root = RealFileSystem(), tmp_path / "data"
    folder, _, store = open_store(fs, root)
    agents = []
    for name in ("ada", "bob"):
        after, record, sealed = ModelAgent(name).turn(300)
        writes = [
            WritePageOp(header_of(page, group), LAYOUTS[group], after.page_bytes(group, 0)) for group, page in sealed
        ]
        agents.append((after, record, writes))
        assert [store.perform(op).error for op in (*writes, AppendRecordOp(record))] == [None] * 3
    store.close()
    folder.close()
    (ada, _, ada_writes), (_, bob_record, bob_writes) = agents
    page = ada.pages[0][0].page_id
    replace_by_pipe(folder.page_path(FINGERPRINT, page))
    replace_by_pipe(folder.log_path(FINGERPRINT, "default", "bob"))
    replace_by_pipe(folder.catalog_path(FINGERPRINT))
    folder, report, store = open_store(fs, root)
    assert report.missing_pages == {page: "no file"}
    assert set(report.agents) == {("default", "ada")}
    assert len(report.foreign_files) == 2
    read = ReadPageOp(header_of(ada.pages[0][0], 0), LAYOUTS[0])
    assert isinstance(store.perform(read).error, PageMissing)
    ops = (*ada_writes, *bob_writes, AppendRecordOp(bob_record))
    assert [store.perform(op).error for op in ops] == [None] * 5
    assert store.perform(read).payload == ada.page_bytes(0, 0)
    store.close()
    folder.close()


def test_a_pipe_is_no_version_and_no_setting(tmp_path: Path) -> None:
    """VERSION is malformed, a setting is missing and can be written."""
    fs = RealFileSystem()
    root = tmp_path / "data"
    root.mkdir(mode=0o700)
    os.mkfifo(root / "VERSION")
    with pytest.raises(DataFolderMalformed):
        DataFolder(root, fs).open()
    path = root / "engine.json"
    os.mkfifo(path)
    assert read_small_file(fs, path) is None
    write_small_file(fs, path, b"{}")
    assert read_small_file(fs, path) == b"{}"
