"""A disk that is full, read-only or failing: refusals are typed, nothing durable is lost, work goes on."""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections import Counter
from pathlib import Path

import pytest

from kvd.store.catalog import Catalog
from kvd.store.errors import DiskFault, PageNotDurable
from kvd.store.swap_ops import (
    AppendRecordOp,
    CompactLogOp,
    DeleteLogOp,
    DeletePageOp,
    FlushOp,
    ReadPageOp,
    ReadTailOp,
    SwapOp,
    WritePageOp,
)
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import LAYOUTS, ModelAgent, header_of, open_store
from tests.support.store_turns import good, reads

MUTATING = {"create", "open_append", "write", "truncate", "fsync", "rename", "unlink", "mkdir", "fsync_dir"}


def insist(store: SwapStore, op: SwapOp, refusals: list[BaseException]) -> None:
    """Do it again until it succeeds, as the engine does; each failure must be a fault of the disk."""
    for _ in range(20):
        result = store.perform(op)
        if result.error is None:
            return
        assert isinstance(result.error, DiskFault | PageNotDurable), result.error
        refusals.append(result.error)
    raise AssertionError(f"{op} never succeeded")


def work(store: SwapStore, refusals: list[BaseException]) -> ModelAgent:
    """Turns with and without sealed pages, and a compaction."""
    agent = ModelAgent("ada")
    for tokens in (100, 300, 10, 250):
        agent, record, sealed = agent.turn(tokens)
        for group, page in sealed:
            payload = agent.page_bytes(group, page.runs[0].start // 256)
            insist(store, WritePageOp(header_of(page, group), LAYOUTS[group], payload), refusals)
        insist(store, AppendRecordOp(record), refusals)
        if tokens == 10:
            insist(store, CompactLogOp("default", "ada"), refusals)
    return agent


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("lasting", [1, 7])
def test_a_fault_at_every_operation(fast_tmp: Path, tally: Counter[str], code: int, lasting: int) -> None:
    """At each operation the disk refuses once or for a while; afterwards a crash; then everything is there."""
    fs = LossyFileSystem(fast_tmp / "count")
    _, _, store = open_store(fs)
    begin = fs.operations
    work(store, [])
    store.close()
    end = fs.operations
    assert end - begin > 40
    refused = 0
    for at in range(begin + 1, end + 1):
        fs = LossyFileSystem(fast_tmp / f"side-{at}", seed=at)
        _, _, store = open_store(fs)
        fs.fail = lambda number, name, path, at=at: code if at <= number < at + lasting and name in MUTATING else None
        refusals: list[BaseException] = []
        agent = work(store, refusals)
        refused += len(refusals)
        store._catalog.close()
        fs.fail = lambda number, name, path: None
        fs.crash()
        _, report, store = open_store(fs)
        assert report.agents["default", "ada"].seq == agent.seq
        assert not report.missing_pages
        for group, layout in enumerate(LAYOUTS):
            assert store.perform(ReadTailOp("default", "ada", 0, group)).payload == agent.tail(group)
            for number, page in enumerate(agent.pages[group]):
                loaded = store.perform(ReadPageOp(header_of(page, group), layout))
                assert loaded.payload == agent.page_bytes(group, number)
        store.close()
    assert refused >= (end - begin) * 0.5
    tally["disk faults, operations of the store refused"] += refused


def test_a_read_only_disk_still_serves(fast_tmp: Path) -> None:
    """What is there is read; turns are refused with the reason."""
    fs = LossyFileSystem(fast_tmp / "side")
    _, _, store = open_store(fs)
    agent = work(store, [])
    fs.fail = lambda number, name, path: errno.EROFS if name in MUTATING else None
    for group in range(len(LAYOUTS)):
        assert store.perform(ReadTailOp("default", "ada", 0, group)).payload == agent.tail(group)
    after, record, _ = agent.turn(3)
    result = store.perform(AppendRecordOp(record))
    assert isinstance(result.error, DiskFault)
    assert result.error.data["errno_name"] == "EROFS"
    fs.fail = lambda number, name, path: None
    assert store.perform(AppendRecordOp(record)).error is None
    assert store.perform(ReadTailOp("default", "ada", 0, 0)).payload == after.tail(0)
    store.close()


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("method", ["put_page", "put_agent", "put_counter", "drop_pages", "drop_agent", "commit"])
def test_what_sqlite_refuses_costs_no_turn(
    fast_tmp: Path, tally: Counter[str], monkeypatch: pytest.MonkeyPatch, method: str, times: int
) -> None:
    """P5 P8: the catalog is derived: turns and deletions are durable without it, and no restart calls a log lost."""
    fs = LossyFileSystem(fast_tmp / "side")
    _, _, store = open_store(fs)
    bob = good(store, ModelAgent("bob"), 300)

    good_method = getattr(Catalog, method)

    def refuse(*arguments: object) -> None:
        nonlocal refused
        if refused == times:
            good_method(*arguments)
            return
        refused += 1
        raise sqlite3.OperationalError("database or disk is full")

    refused = 0
    with monkeypatch.context() as patch:
        if method not in ("drop_agent", "commit"):
            patch.setattr(Catalog, method, refuse)
        agent = good(store, work(store, []), 3)
        patch.setattr(Catalog, method, refuse)
        assert store.perform(DeleteLogOp("default", "bob")).error is None
        for group in bob.pages:
            result = store.perform(DeletePageOp(group[0].page_id))
            assert result.error is None
        result = store.perform(FlushOp(threading.Event()))
        assert result.error is None
    reads(store, agent)
    agent = good(store, agent, 300)
    store.idle()
    fs.crash()
    _, report, store = open_store(fs)
    assert set(report.agents) == {("default", "ada")}
    assert not report.log_troubles
    assert not report.missing_pages
    reads(store, agent)
    store.close()
    assert refused
    tally["disk faults, refused by SQLite"] += refused
