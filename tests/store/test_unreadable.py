"""What the disk refuses to read once, or for a whole run: nothing is made anew, deleted or forgotten for it (P8)."""

from __future__ import annotations

import errno
from pathlib import Path

from kvd.store.errors import (
    DiskFault,
    LogUnreadable,
    PageNotDurable,
    PageReferenced,
    QuotaExceeded,
)
from kvd.store.swap_ops import (
    AppendRecordOp,
    DeleteLogOp,
    DeletePageOp,
)
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import (
    FINGERPRINT,
    LAYOUTS,
    ModelAgent,
    open_store,
)
from tests.support.store_turns import good, names, reads, turn


def with_unreadable_log(fs: LossyFileSystem, quota_bytes: int = 1 << 40) -> tuple[ModelAgent, SwapStore]:
    """A store whose start could not read the log of `ada` (300 tokens); the disk is well again since."""
    _, _, store = open_store(fs)
    agent = good(store, ModelAgent("ada"), 300)
    store.close()
    path = names().log_path(FINGERPRINT, "default", "ada")
    fs.fail = lambda number, name, where: errno.EIO if name == "read" and where == path else None
    _, report, store = open_store(fs, quota_bytes=quota_bytes)
    fs.fail = lambda number, name, where: None
    assert report.unreadable == {path.name}
    return agent, store


def test_an_agent_whose_log_could_not_be_read_is_not_made_anew(fs: LossyFileSystem) -> None:
    """P8: a hiccup at start costs nothing: the record is refused, log and pages stay, the next start has it."""
    agent, store = with_unreadable_log(fs)
    path = names().log_path(FINGERPRINT, "default", "ada")
    old = fs.read(path)
    good(store, ModelAgent("bob"), 20)
    result = store.perform(AppendRecordOp(ModelAgent("ada").turn(3)[1]))
    assert isinstance(result.error, LogUnreadable)
    assert isinstance(result.error, DiskFault)
    for group, _ in enumerate(LAYOUTS):
        page = agent.pages[group][0]
        assert isinstance(store.perform(DeletePageOp(page.page_id)).error, PageReferenced)
    store.close()
    assert fs.read(path) == old
    assert not fs.listdir(names().quarantine_folder(FINGERPRINT))
    _, report, store = open_store(fs)
    assert set(report.agents) == {("default", "ada"), ("default", "bob")}
    assert not report.log_troubles
    reads(store, agent)
    store.close()


def test_a_full_quota_deletes_nothing_while_a_log_is_unreadable(fs: LossyFileSystem) -> None:
    """P8 P25: what looks like orphans may be its pages, and what is in quarantine its past."""
    agent, store = with_unreadable_log(fs, quota_bytes=100_000)
    aside = names().quarantine_folder(FINGERPRINT) / "old-0.log"
    fs.poke(aside, bytes(20_000))
    eve, results = ModelAgent("eve"), []
    while all(result.error is None for result in results):
        eve, results = turn(store, eve, 256)
    assert any(isinstance(result.error, QuotaExceeded) for result in results)
    assert fs.stat(aside) is not None
    store.close()
    _, _, store = open_store(fs)
    reads(store, agent)
    store.close()


def test_deleting_an_agent_whose_log_could_not_be_read_ends_the_caution(fs: LossyFileSystem) -> None:
    """Whoever wants it gone may have it gone; then its pages are what they look like."""
    agent, store = with_unreadable_log(fs)
    assert store.perform(DeleteLogOp("default", "ada")).error is None
    assert store.perform(DeletePageOp(agent.pages[0][0].page_id)).error is None
    good(store, ModelAgent("ada"), 3)
    store.close()


def test_a_log_that_is_read_at_the_second_try_is_served(fs: LossyFileSystem) -> None:
    """One EINTR-like fault at start costs nothing at all; nor does one at a page's header."""
    _, _, store = open_store(fs)
    agent = good(store, ModelAgent("ada"), 300)
    store.close()
    fs.database_path(names().catalog_path(FINGERPRINT)).unlink()
    failed: set[str] = set()

    def once(number: int, name: str, where: Path) -> int | None:
        first = name == "read" and where.suffix in (".log", ".safetensors") and str(where) not in failed
        failed.update([str(where)] if first else [])
        return errno.EIO if first else None

    fs.fail = once
    _, report, store = open_store(fs)
    assert len(failed) == 3
    assert not report.unreadable
    assert not report.missing_pages
    assert not report.log_troubles
    reads(store, agent)
    store.close()


def test_the_catalog_keeps_what_it_knows_of_an_unreadable_log(fs: LossyFileSystem) -> None:
    """P8: an older copy of the log at the next start is still told from the newest."""
    _, _, store = open_store(fs)
    agent = good(store, ModelAgent("ada"), 20)
    path = names().log_path(FINGERPRINT, "default", "ada")
    old = fs.read(path)
    good(store, agent, 20)
    store.close()
    fs.fail = lambda number, name, where: errno.EIO if name == "read" and where == path else None
    open_store(fs)[2].close()
    fs.fail = lambda number, name, where: None
    fs.poke(path, old)
    _, report, store = open_store(fs)
    assert [trouble.kind for trouble in report.log_troubles] == ["stale"]
    store.close()


def test_a_page_whose_header_could_not_be_read_at_start_counts_once_it_was_read(fs: LossyFileSystem) -> None:
    """Records that name it are refused only until it has proved good."""
    _, _, store = open_store(fs)
    agent = good(store, ModelAgent("ada"), 300)
    store.close()
    fs.database_path(names().catalog_path(FINGERPRINT)).unlink()
    fs.fail = lambda number, name, where: errno.EIO if name == "read" and where.suffix == ".safetensors" else None
    _, report, store = open_store(fs)
    fs.fail = lambda number, name, where: None
    assert len(report.missing_pages) == 2
    _, record, _ = agent.turn(1)
    assert isinstance(store.perform(AppendRecordOp(record)).error, PageNotDurable)
    reads(store, agent)
    good(store, agent, 1)
    store.close()
