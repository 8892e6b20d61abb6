"""Logs that rot under a running daemon: found, never appended to, replaced in one move with all that is still good."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.store.errors import DiskFault, LogCorrupt, LogDamaged, PageNotDurable, QuotaExceeded
from kvd.store.layout import DataFolder
from kvd.store.log_book import VERIFIED_LOG_BYTES, VERIFY_EVERY_S
from kvd.store.records import AgentRecord, PageEntry, SegmentDelta
from kvd.store.swap_ops import AppendRecordOp, CompactLogOp, ReadTailOp, SwapResult, WritePageOp
from kvd.store.swap_store import SwapStore
from kvd.vm.text import Span
from tests.support.lossy_disk import LossyFileSystem, SimulatedCrash
from tests.support.store_data import FINGERPRINT, LAYOUTS, ROOT, ModelAgent, header_of, memory_folder, open_store


def log_path(name: str = "ada") -> Path:
    """The agent's log."""
    return DataFolder(ROOT, LossyFileSystem(ROOT)).log_path(FINGERPRINT, "default", name)


def quarantined(fs: LossyFileSystem) -> list[bytes]:
    """Contents of what was put aside."""
    folder = DataFolder(ROOT, fs).quarantine_folder(FINGERPRINT)
    return [fs.read(folder / name) for name in fs.listdir(folder)]


def flip(fs: LossyFileSystem, at: int, path: Path | None = None) -> bytes:
    """Flip a bit of a log; returns what the log then holds."""
    data = bytearray(fs.read(path or log_path()))
    data[at] ^= 4
    fs.poke(path or log_path(), bytes(data))
    return bytes(data)


def alone(agent: ModelAgent, tokens: int) -> tuple[ModelAgent, AgentRecord]:
    """The next turn as a record that says everything."""
    after, record, _ = agent.turn(tokens)
    count = len(after.tokens)
    segments = tuple(
        SegmentDelta(group, layout.format_id, 0, after.pages[group], 0, count % 256, after.tail(group))
        for group, layout in enumerate(LAYOUTS)
    )
    return after, replace(
        record,
        base_tokens=0,
        base_text_bytes=0,
        token_ids=after.tokens,
        token_bytes=(1,) * count,
        spans=(Span("generated", count),),
        text=b"x" * count,
        segments=segments,
    )


def write_pages(store: SwapStore, agent: ModelAgent, pages: list[tuple[int, PageEntry]]) -> None:
    """Pages that must become durable."""
    for group, page in pages:
        payload = agent.page_bytes(group, page.runs[0].start // 256)
        assert store.perform(WritePageOp(header_of(page, group), LAYOUTS[group], payload)).error is None


def good(store: SwapStore, agent: ModelAgent, tokens: int) -> ModelAgent:
    """A turn that must be durable."""
    after, record, sealed = agent.turn(tokens)
    write_pages(store, after, sealed)
    assert store.perform(AppendRecordOp(record)).error is None
    return after


def tail(store: SwapStore, agent: ModelAgent, group: int = 0) -> SwapResult:
    """Read a tail."""
    return store.perform(ReadTailOp("default", agent.name, agent.branch, group))


def holds(store: SwapStore, agent: ModelAgent) -> None:
    """The store has the branch, with its tails."""
    image = store._logs.image(("default", agent.name))
    assert image is not None
    assert image.branches[agent.branch].tokens == agent.tokens
    for group in range(len(LAYOUTS)):
        assert tail(store, agent, group).payload == agent.tail(group)


def two_branches(store: SwapStore) -> tuple[ModelAgent, ModelAgent, int]:
    """Branch 0 with a page and a tail, then branch 1 with a tail only; and where the record of branch 1 begins."""
    main = good(store, ModelAgent("ada"), 300)
    border = store.statistics().log_bytes
    other, record = alone(ModelAgent("ada", seq=main.seq, branch=1, salt=1, created=True), 40)
    assert store.perform(AppendRecordOp(record)).error is None
    return replace(main, seq=other.seq), other, border


def test_a_delta_is_refused_once_a_tail_turned_out_rotten(fs: LossyFileSystem, store: SwapStore) -> None:
    """P4: nothing behind a bad record is ever called durable; the log is left alone until a whole record comes."""
    agent = good(store, ModelAgent("ada"), 40)
    damaged = flip(fs, len(fs.read(log_path())) - 10)
    assert isinstance(tail(store, agent, 1).error, LogCorrupt)
    for _ in range(2):
        assert isinstance(store.perform(AppendRecordOp(agent.turn(5)[1])).error, LogDamaged)
    assert fs.read(log_path()) == damaged
    after, record = alone(agent, 5)
    assert store.perform(AppendRecordOp(record)).error is None
    after = good(store, after, 7)
    store._catalog.close()  # SQLite's locks go with the process
    fs.crash()
    _, report, again = open_store(fs)
    assert report.log_troubles == ()
    holds(again, after)
    assert quarantined(fs) == [damaged]
    again.close()


def test_the_other_branches_come_along(fs: LossyFileSystem, store: SwapStore) -> None:
    """P4: what is intact of the log is in the new one, tails included; seen again after a crash."""
    main, other, border = two_branches(store)
    flip(fs, border + 40 + len(fs.read(log_path())[border:]) - 60)  # in the tail of branch 1
    assert isinstance(tail(store, other, 1).error, LogCorrupt)
    other, record = alone(other, 3)
    result = store.perform(AppendRecordOp(record))
    assert result.error is None
    assert result.image is not None
    assert result.image.current == 1
    assert result.image.meta == {"named": True}
    store._catalog.close()  # SQLite's locks go with the process
    fs.crash()
    _, report, again = open_store(fs)
    assert (report.log_troubles, report.missing_pages) == ((), {})
    holds(again, main)
    holds(again, other)
    again.close()


def test_a_rotten_tail_of_another_branch_is_cut_and_said(fs: LossyFileSystem, store: SwapStore) -> None:
    """P4: of a branch whose tail is gone, what lies before its last page border stays."""
    main, other, border = two_branches(store)
    flip(fs, border - 10)  # in the tail of branch 0
    assert isinstance(tail(store, main, 1).error, LogCorrupt)
    _, record = alone(other, 3)
    result = store.perform(AppendRecordOp(record))
    assert result.error is None
    assert result.image is not None
    assert result.image.branches[0].tokens == main.tokens[:256]
    assert result.image.branches[0].page_ids() == {pages[0].page_id for pages in main.pages}
    assert any("branch 0 is rotten" in fact for fact in result.facts)


def test_a_whole_record_that_names_pages_that_are_not_durable_changes_nothing(
    fs: LossyFileSystem, store: SwapStore
) -> None:
    """No log, new or old, names a page that a crash may take."""
    agent = good(store, ModelAgent("ada"), 40)
    damaged = flip(fs, len(fs.read(log_path())) - 10)
    assert isinstance(tail(store, agent, 1).error, LogCorrupt)
    _, record = alone(agent, 256)
    assert isinstance(store.perform(AppendRecordOp(record)).error, PageNotDurable)
    assert fs.read(log_path()) == damaged
    assert quarantined(fs) == []


def test_a_crash_while_a_log_is_replaced_loses_nothing(fs: LossyFileSystem) -> None:
    """P3: at each operation of the replacement the disk dies: the old log or the new one is there, whole."""
    seen: set[int] = set()
    for step in range(1, 40):
        for folder in memory_folder():
            disk = LossyFileSystem(folder / "side", seed=step)
            _, _, store = open_store(disk)
            agent = good(store, ModelAgent("ada"), 40)
            kept = good(store, agent, 9)
            flip(disk, len(disk.read(log_path())) - 10)  # in the second record
            assert isinstance(tail(store, kept, 1).error, LogCorrupt)
            _, record = alone(kept, 5)
            disk.crash_at = disk.operations + step
            try:
                store.perform(AppendRecordOp(record))
                finished = True
            except SimulatedCrash:
                finished = False
            store._catalog.close()
            disk.crash_at = None
            disk.crash()
            _, report, again = open_store(disk)
            image = report.agents["default", "ada"]
            assert len(image.branch.tokens) in ((54,) if finished else (40, 54))
            seen.add(len(image.branch.tokens))
            again.close()
        if finished:
            break
    assert finished
    assert seen == {40, 54}


@pytest.mark.parametrize("failing", ["create", "write", "fsync", "rename", "fsync_dir"])
def test_a_disk_that_refuses_leaves_a_log_that_is_known_to_be_damaged(
    fs: LossyFileSystem, store: SwapStore, failing: str
) -> None:
    """P2: the turn is not durable, no later one is by mistake, and it works once the disk does."""
    agent = good(store, ModelAgent("ada"), 40)
    agent = good(store, agent, 9)
    flip(fs, len(fs.read(log_path())) - 10)
    assert isinstance(tail(store, agent, 1).error, LogCorrupt)
    after, record = alone(agent, 5)
    fs.fail = lambda number, name, path: (
        errno.EIO if name == failing and path is not None and "agents" in path.parts else None
    )
    assert isinstance(store.perform(AppendRecordOp(record)).error, DiskFault)
    fs.fail = lambda number, name, path: None
    replaced = store._logs.image(("default", "ada"))
    assert replaced is not None
    if replaced.seq == record.seq:  # the new log is in place
        assert failing == "fsync_dir"
    else:
        assert isinstance(store.perform(AppendRecordOp(agent.turn(5)[1])).error, LogDamaged)
        assert store.perform(AppendRecordOp(record)).error is None
    after = good(store, after, 4)
    store._catalog.close()  # SQLite's locks go with the process
    fs.crash()
    _, report, again = open_store(fs)
    assert report.log_troubles == ()
    holds(again, after)
    again.close()


def test_without_room_for_the_old_log_the_new_one_is_written_all_the_same(
    fs: LossyFileSystem, store: SwapStore
) -> None:
    """A copy of what is bad is never a reason for a turn not to be durable."""
    agent = good(store, ModelAgent("ada"), 40)
    damaged = flip(fs, len(fs.read(log_path())) - 10)
    assert isinstance(tail(store, agent, 1).error, LogCorrupt)
    usage, (after, record) = store._usage, alone(agent, 5)
    usage.quota_bytes = 10_000_000
    store.idle()  # the catalog grows no more
    usage.recount()
    room = usage.quota_bytes - usage.reserved_bytes - usage.used_bytes
    fs.poke(ROOT / "film.mov", bytes(room - len(damaged) * 3 // 2))
    usage.recount()
    result = store.perform(AppendRecordOp(record))
    assert result.error is None
    assert any("no copy of it was kept" in fact for fact in result.facts)
    assert quarantined(fs) == []
    holds(store, after)
    usage.quota_bytes = 1
    usage.recount()
    assert isinstance(store.perform(AppendRecordOp(after.turn(1)[1])).error, QuotaExceeded)


# ---- damage that no tail read would find ----------------------------------------------------------------------------


def heals(fs: LossyFileSystem, store: SwapStore, agent: ModelAgent) -> None:
    """The next delta is refused, the whole record is durable."""
    assert isinstance(store.perform(AppendRecordOp(agent.turn(5)[1])).error, LogDamaged)
    after, record = alone(agent, 5)
    assert store.perform(AppendRecordOp(record)).error is None
    store._catalog.close()  # SQLite's locks go with the process
    fs.crash()
    _, report, again = open_store(fs)
    assert report.log_troubles == ()
    holds(again, after)
    again.close()


def test_a_tail_read_verifies_the_whole_of_a_short_log(fs: LossyFileSystem, store: SwapStore) -> None:
    """P4: a flip in the text of a record is found when the agent comes back; its tail is served, being good."""
    agent = good(store, ModelAgent("ada"), 40)
    flip(fs, 60)
    assert tail(store, agent).payload == agent.tail(0)
    heals(fs, store, agent)


def test_a_commit_verifies_a_short_log_now_and_then(fs: LossyFileSystem, store: SwapStore) -> None:
    """P4: an agent that never leaves RAM finds out too, a minute later at most."""
    now_s = store._logs._clock()
    store._logs._clock = lambda: now_s
    agent = good(store, ModelAgent("ada"), 40)
    flip(fs, 60)
    agent = good(store, agent, 5)
    now_s += VERIFY_EVERY_S
    heals(fs, store, agent)


def test_verifying_costs_nothing_most_of_the_time(fs: LossyFileSystem, store: SwapStore) -> None:
    """P26: no log is read at every commit, no long one at all, and one that cannot be read is no damaged one."""
    reads: list[Path | None] = []
    now_s = store._logs._clock()
    store._logs._clock = lambda: now_s
    agent = good(store, ModelAgent("ada"), 2)

    def watch(number: int, name: str, path: Path | None) -> int | None:
        if name == "read":
            reads.append(path)
        return None

    fs.fail = watch
    read_bytes = store.statistics().bytes_read
    for _ in range(20):
        agent = good(store, agent, 1)
    assert store.statistics().bytes_read == read_bytes
    now_s += VERIFY_EVERY_S
    agent = good(store, agent, 1)
    assert store.statistics().bytes_read > read_bytes
    entry = store._logs._entries["default", "ada"]
    now_s += VERIFY_EVERY_S
    real = entry.log.intact
    refused: Callable[[], bool] = lambda: (_ for _ in ()).throw(OSError(errno.EIO, "bad sector"))  # noqa: E731
    entry.log.intact = refused  # type: ignore[method-assign]
    agent = good(store, agent, 1)
    entry.log.intact = real  # type: ignore[method-assign]
    read_bytes = store.statistics().bytes_read
    while entry.log.good_bytes <= VERIFIED_LOG_BYTES:
        entry.log.good_bytes += VERIFIED_LOG_BYTES
    store._logs._verify(entry)
    assert store.statistics().bytes_read == read_bytes


def test_a_compaction_heals_what_is_not_a_tail(fs: LossyFileSystem, store: SwapStore) -> None:
    """P4: it writes what was committed, not what the file says now."""
    agent = good(store, ModelAgent("ada"), 40)
    agent = good(store, agent, 5)
    flip(fs, 60)
    assert tail(store, agent).error is None
    assert store.perform(CompactLogOp("default", "ada")).error is None
    agent = good(store, agent, 5)
    store._catalog.close()  # SQLite's locks go with the process
    fs.crash()
    _, report, again = open_store(fs)
    assert report.log_troubles == ()
    holds(again, agent)
    again.close()


def test_a_compaction_that_fails_does_not_adopt_the_damaged_log(fs: LossyFileSystem, store: SwapStore) -> None:
    """P4: after a failed rewrite the log is read to see which one is there; a damaged one is not the agent's past."""
    agent = good(store, ModelAgent("ada"), 40)
    agent = good(store, agent, 5)
    flip(fs, len(fs.read(log_path())) - 10)
    fs.fail = lambda number, name, path: errno.EIO if name == "create" else None
    result = store.perform(CompactLogOp("default", "ada"))
    assert isinstance(result.error, LogCorrupt | DiskFault)
    fs.fail = lambda number, name, path: None
    image = store._logs.image(("default", "ada"))
    assert image is not None
    assert image.branch.tokens == agent.tokens
    heals(fs, store, agent)
