"""A disk that is full, read-only or failing: refusals are typed, nothing durable is lost, work goes on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.store.errors import DiskFault, PageNotDurable
from kvd.store.swap_ops import AppendRecordOp, CompactLogOp, ReadPageOp, ReadTailOp, SwapOp, WritePageOp
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import LAYOUTS, ModelAgent, header_of, memory_folder, open_store

MUTATING = {"create", "open_append", "write", "truncate", "fsync", "rename", "unlink", "mkdir", "fsync_dir"}


@pytest.fixture
def fast_tmp() -> Iterator[Path]:
    """Where the catalogs lie."""
    yield from memory_folder()


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
def test_a_fault_at_every_operation(fast_tmp: Path, code: int, lasting: int) -> None:
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
