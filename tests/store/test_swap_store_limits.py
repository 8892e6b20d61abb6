"""The store under pressure: quota, vanished folders and logs, broken catalogs, compactions that fail at their end."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace

from kvd.store.disk_usage import catalog_reserve_bytes, log_reserve_bytes
from kvd.store.errors import (
    DiskFault,
    LogVanished,
    PageNotDurable,
    QuotaExceeded,
    RecordInvalid,
)
from kvd.store.fs import folder_bytes
from kvd.store.swap_ops import (
    AppendRecordOp,
    CompactLogOp,
    DeletePageOp,
    FlushOp,
)
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import (
    FINGERPRINT,
    ROOT,
    ModelAgent,
    open_store,
)
from tests.support.store_turns import good, names, reads, turn, write_op


def test_every_byte_counts_against_the_quota(fs: LossyFileSystem) -> None:
    """P21 P25: a page that does not fit is refused with all three figures; foreign files count."""
    _, _, store = open_store(fs, quota_bytes=100_000)
    try:
        agent, results = ModelAgent("ada"), []
        while all(result.error is None for result in results):
            agent, results = turn(store, agent, 256)
        error = next(result.error for result in results if result.error is not None)
        assert isinstance(error, QuotaExceeded)
        assert error.data["quota_bytes"] == 100_000
        open_bytes = 100_000 - catalog_reserve_bytes(100_000)
        assert error.data["used_bytes"] + error.data["wanted_bytes"] > open_bytes, "the catalog's share stays free"
        assert folder_bytes(fs, ROOT) == store.statistics().used_bytes <= 100_000
    finally:
        store.close()


def test_growing_foreign_files_are_noticed(fs: LossyFileSystem) -> None:
    """P25: what somebody else puts into the folder is counted before the quota is passed."""
    _, _, store = open_store(fs, quota_bytes=200_000)
    try:
        agent = good(store, ModelAgent("ada"), 20)
        fs.poke(ROOT / "film.mov", bytes(195_000))
        store._usage.recount()
        _, results = turn(store, agent, 256)
        assert all(isinstance(result.error, QuotaExceeded | PageNotDurable) for result in results)
        fs.unlink(ROOT / "film.mov")
        store._usage._clock = lambda: time.monotonic() + 2  # a refusal stands for a second
        good(store, agent, 256)
    finally:
        store.close()


def test_orphans_and_quarantine_make_room_first(fs: LossyFileSystem) -> None:
    """P25: files that nobody needs never cause a refusal."""
    _, _, store = open_store(fs, quota_bytes=160_000)
    try:
        agent = good(store, ModelAgent("ada"), 256)
        used = store.statistics().used_bytes
        eve = ModelAgent("eve").turn(256)[0]
        orphan = names().page_path(FINGERPRINT, eve.pages[0][0].page_id)
        fs.mkdir(orphan.parent) if fs.stat(orphan.parent) is None else None
        fs.poke(orphan, bytes(30_000))
        quarantined = names().quarantine_folder(FINGERPRINT) / "old-0.safetensors"
        fs.poke(quarantined, bytes(160_000 - catalog_reserve_bytes(160_000) - used - 30_000 - 100))
        store._usage.recount()
        agent, results = turn(store, agent, 256)
        assert [result.error for result in results] == [None] * 3
        assert fs.stat(orphan) is None
        reads(store, agent)
        while fs.stat(quarantined) is not None:
            agent, results = turn(store, agent, 256)
            assert [result.error for result in results] == [None] * 3
        assert store.statistics().used_bytes <= 160_000
    finally:
        store.close()


def test_a_vanished_folder_is_made_again_and_nothing_in_it_is_relied_on(store: SwapStore, fs: LossyFileSystem) -> None:
    """Somebody removed the folder: it is reported, later turns are refused until the agent is written anew."""
    agent = good(store, ModelAgent("ada"), 300)
    good(store, ModelAgent("bob"), 20)
    fs.remove_tree(ROOT)
    after, record, sealed = agent.turn(256)
    result = store.perform(write_op(after, *sealed[0]))
    assert result.error is None
    assert any("vanished" in fact for fact in result.facts)
    assert isinstance(store.perform(AppendRecordOp(record)).error, RecordInvalid), "a delta without its base"
    assert store.statistics().durable_pages == 1
    whole = ModelAgent("ada", seq=agent.seq).turn(556)
    for group, page in whole[2]:
        assert store.perform(write_op(whole[0], group, page)).error is None
    assert store.perform(AppendRecordOp(whole[1])).error is None
    reads(store, whole[0])
    store._catalog.close()
    fs.crash()
    _, report, again = open_store(fs)
    assert set(report.agents) == {("default", "ada")}
    reads(again, whole[0])
    again.close()


def test_a_log_that_was_cut_by_somebody_is_put_aside(store: SwapStore, fs: LossyFileSystem) -> None:
    """Committed bytes are missing: the turn is refused, what is left goes to quarantine, a whole record starts anew."""
    agent = good(store, ModelAgent("ada"), 20)
    path = names().log_path(FINGERPRINT, "default", "ada")
    fs.poke(path, fs.read(path)[:-1])
    _, record, _ = agent.turn(5)
    result = store.perform(AppendRecordOp(record))
    assert isinstance(result.error, LogVanished)
    assert len(fs.listdir(names().quarantine_folder(FINGERPRINT))) == 1
    assert store.perform(AppendRecordOp(ModelAgent("ada").turn(25)[1])).error is None


def test_a_removed_agents_folder_is_made_again(store: SwapStore, fs: LossyFileSystem) -> None:
    """Only the logs are gone: pages stay."""
    agent = good(store, ModelAgent("ada"), 256)
    fs.remove_tree(names().agents_folder(FINGERPRINT))
    result = store.perform(AppendRecordOp(agent.turn(5)[1]))
    assert isinstance(result.error, LogVanished)
    whole, record, _ = ModelAgent("ada").turn(261)
    assert store.perform(AppendRecordOp(record)).error is None
    reads(store, whole)


def test_a_broken_catalog_never_fails_a_turn(store: SwapStore, fs: LossyFileSystem) -> None:
    """P5: SQLite errors are facts; the catalog is made anew from what is known."""
    agent = good(store, ModelAgent("ada"), 256)
    store._catalog._catalog._db.execute("DROP TABLE pages")
    agent, results = turn(store, agent, 256)
    assert [result.error for result in results] == [None] * 3
    assert any("catalog" in fact for result in results for fact in result.facts)
    store._catalog._catalog.close()
    agent, results = turn(store, agent, 256)
    assert [result.error for result in results] == [None] * 3
    store.idle()
    store._catalog.close()
    fs.crash()
    _, report, again = open_store(fs)
    assert not any([report.adopted_pages, report.facts])
    reads(again, agent)
    again.close()


def test_flush_answers_even_when_the_disk_does_not(store: SwapStore, fs: LossyFileSystem) -> None:
    """Nobody waits for ever."""
    agent = ModelAgent("ada").turn(256)[0]
    store.perform(write_op(agent, 0, agent.pages[0][0]))
    store.perform(DeletePageOp(agent.pages[0][0].page_id))
    fs.fail = lambda number, name, path: errno.EIO
    event = threading.Event()
    assert store.perform(FlushOp(event)).error is None
    assert event.is_set()
    fs.fail = lambda number, name, path: None


def test_a_failed_compaction_that_cannot_be_looked_at_costs_nothing(fs: LossyFileSystem) -> None:
    """Which log is there is found out before the next record; until then records are refused, never misplaced."""
    _, _, store = open_store(fs)
    agent = ModelAgent("ada")
    for tokens in (100, 100, 100):
        agent = good(store, agent, tokens)
    path = names().log_path(FINGERPRINT, "default", "ada")
    fs.fail = lambda number, name, where: errno.EIO if name == "fsync_dir" or (name, where) == ("read", path) else None
    assert isinstance(store.perform(CompactLogOp("default", "ada")).error, DiskFault)
    assert isinstance(store.perform(AppendRecordOp(agent.turn(7)[1])).error, DiskFault)
    fs.fail = lambda number, name, where: None
    agent = good(store, agent, 7)
    reads(store, agent)
    assert not fs.listdir(names().quarantine_folder(FINGERPRINT))
    store.close()
    _, report, store = open_store(fs)
    assert not report.log_troubles
    reads(store, agent)
    store.close()


def test_refused_writes_do_not_count_the_folder_over_and_over(fs: LossyFileSystem) -> None:
    """P38: with the quota full, refusals cost one count of the folder a second, or until something is deleted."""
    _, _, store = open_store(fs, quota_bytes=100_000)
    usage, now_s, counts = store._usage, 50.0, 0
    count = usage.recount

    def counted() -> None:
        nonlocal counts
        counts += 1
        count()

    usage._clock, usage.recount = (lambda: now_s), counted
    agent = good(store, ModelAgent("ada"), 20)
    _, _, sealed = agent.turn(256)
    op, other = (write_op(agent, *each) for each in sealed)
    assert store.perform(op).error is None
    fs.poke(ROOT / "film.mov", bytes(90_000))
    count()
    assert isinstance(store.perform(other).error, QuotaExceeded)
    first = counts
    assert first > 0
    for _ in range(20):
        assert isinstance(store.perform(other).error, QuotaExceeded)
    assert counts == first
    now_s += 1.1
    assert isinstance(store.perform(other).error, QuotaExceeded)
    assert counts == 2 * first
    assert store.perform(DeletePageOp(op.header.page_id)).error is None
    store.idle()
    fs.unlink(ROOT / "film.mov")
    assert store.perform(other).error is None, "a deletion makes another count worth while"
    assert counts > 2 * first
    store.close()


def test_pages_dropped_by_a_compaction_that_is_not_durable_yet_are_not_deleted(fs: LossyFileSystem) -> None:
    """The old log, which names them, may come back: deleting first makes the new log durable, or refuses."""
    came_back = 0
    for seed in range(12):
        fs = LossyFileSystem(fs.side.with_name(f"side-{seed}"), seed=seed)
        _, _, store = open_store(fs)
        agent = good(store, ModelAgent("ada"), 256)
        fork = replace(agent.turn(0)[1], kind="turn", branch=1, parent=0, base_tokens=0, base_text_bytes=0)
        empty = tuple(replace(segment, kept_pages=0, tail_end=0) for segment in fork.segments)
        assert store.perform(AppendRecordOp(replace(fork, computed_tokens=0, segments=empty))).error is None
        fs.fail = lambda number, name, path: errno.EIO if name == "fsync_dir" else None
        compact = CompactLogOp("default", "ada", keep_branches=frozenset())
        assert isinstance(store.perform(compact).error, DiskFault)
        pages = [page.page_id for group in agent.pages for page in group]
        deletions = [store.perform(DeletePageOp(page_id)) for page_id in pages]
        store.idle()
        assert all(isinstance(result.error, DiskFault) for result in deletions)
        fs.fail = lambda number, name, path: None
        if seed % 2:
            assert [store.perform(DeletePageOp(page_id)).error for page_id in pages] == [None] * len(pages)
            store.idle()
        store._catalog.close()
        fs.crash()
        _, report, again = open_store(fs)
        assert not report.missing_pages
        came_back += 0 in report.agents["default", "ada"].branches
        again.close()
    assert 0 < came_back < 12


def test_what_the_catalog_takes_is_not_kept_free_once_more(fs: LossyFileSystem) -> None:
    """P25: its reserve shrinks as it grows, down to what SQLite's own log may still need; refusals name it."""
    whole = catalog_reserve_bytes(1 << 30)
    assert catalog_reserve_bytes(1 << 30, database_bytes=100_000, log_bytes=50_000) == whole - 150_000
    slack = catalog_reserve_bytes(1 << 30, database_bytes=1 << 29)
    assert 0 < slack < whole
    assert catalog_reserve_bytes(1 << 30, database_bytes=1 << 29, log_bytes=slack) == 0


def test_pages_leave_room_for_records(fs: LossyFileSystem) -> None:
    """P25: when pages fill the quota, a record still fits; the figures of a refusal add up."""
    _, _, store = open_store(fs, quota_bytes=200_000)
    waiting = good(store, ModelAgent("eve"), 20)
    agent, error = ModelAgent("ada"), None
    while error is None:
        agent, _, sealed = agent.turn(256)
        error = next((r.error for r in (store.perform(write_op(agent, *each)) for each in sealed) if r.error), None)
    assert isinstance(error, QuotaExceeded)
    figures = error.data
    assert figures["used_bytes"] + figures["reserved_bytes"] + figures["wanted_bytes"] > figures["quota_bytes"]
    assert figures["reserved_bytes"] >= log_reserve_bytes(200_000)
    assert str(figures["reserved_bytes"]) in error.message
    good(store, waiting, 20)
    store.close()
