"""The store carries out operations in order; each fault is one typed result, and nothing durable is lost by it."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from kvd.errors import AgentNotFound
from kvd.store.catalog import AgentRow
from kvd.store.errors import (
    DiskFault,
    LogCorrupt,
    PageCorrupt,
    PageMissing,
    PageNotDurable,
    PageReferenced,
    RecordInvalid,
)
from kvd.store.page_file import file_bytes_for
from kvd.store.swap_ops import (
    AppendRecordOp,
    CompactLogOp,
    DeleteLogOp,
    DeletePageOp,
    ReadPageOp,
    ReadTailOp,
)
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import (
    FINGERPRINT,
    LAYOUTS,
    ModelAgent,
    header_of,
    open_store,
)
from tests.support.store_turns import good, names, reads, turn, write_op


def test_a_turn_is_committed_and_read_back(store: SwapStore) -> None:
    """Pages, then the record; the result carries the agent and what was written."""
    agent, results = turn(store, ModelAgent("ada"), 300)
    assert results[-1].image is not None
    assert results[-1].image.branch.tokens == agent.tokens
    assert results[0].written_bytes == file_bytes_for(header_of(agent.pages[0][0], 0), LAYOUTS[0])
    reads(store, agent)
    statistics = store.statistics()
    assert (statistics.pages_written, statistics.records_appended, statistics.durable_pages) == (2, 1, 2)
    assert statistics.bytes_written == sum(result.written_bytes for result in results)
    assert statistics.log_bytes == results[-1].image.log_bytes


def test_bytes_per_turn_are_those_of_its_new_tokens(store: SwapStore) -> None:
    """P15: the hundredth turn of a long conversation writes as much as the second."""
    agent = good(store, ModelAgent("ada"), 20)
    written = []
    for _ in range(20):
        agent, results = turn(store, agent, 10)
        written.append(results[-1].written_bytes)
    assert max(written) - min(written) <= 64
    assert max(written) < 10 * sum(layout.token_bytes for layout in LAYOUTS) + 600


def test_records_do_not_wait_for_their_row(store: SwapStore) -> None:
    """The catalog is derived: a row is made once for all records since, after they were answered."""
    rows: list[int] = []
    put = store._catalog.put_agent

    def counting(row: AgentRow) -> None:
        rows.append(row.seq)
        put(row)

    store._catalog.put_agent = counting  # type: ignore[method-assign]
    agent = ModelAgent("ada")
    for _ in range(3):
        agent, results = turn(store, agent, 10)
        assert results[-1].error is None
    assert rows == []
    store.idle()
    store.idle()
    assert rows == [3]
    turn(store, agent, 10)
    assert store.perform(DeleteLogOp("default", "ada")).error is None
    store.idle()
    assert rows == [3], "a deleted agent has no row"


def test_a_record_is_refused_while_its_pages_are_not_durable(store: SwapStore, fs: LossyFileSystem) -> None:
    """A failed page write makes the turn not durable, with the reason; after the retry it is."""
    after, record, sealed = ModelAgent("ada").turn(300)
    fs.fail = lambda number, name, path: errno.ENOSPC if name == "write" and ".safetensors" in path.name else None
    failed = [store.perform(write_op(after, group, page)) for group, page in sealed]
    fs.fail = lambda number, name, path: None
    assert all(isinstance(result.error, DiskFault) for result in failed)
    assert failed[0].error.data["errno_name"] == "ENOSPC"
    before = fs.live_files()
    refused = store.perform(AppendRecordOp(record))
    assert isinstance(refused.error, PageNotDurable)
    assert set(refused.error.page_ids) == {page.page_id for _, page in sealed}
    assert fs.live_files() == before, "something was half written"
    assert [store.perform(write_op(after, group, page)).error for group, page in sealed] == [None, None]
    assert store.perform(AppendRecordOp(record)).error is None
    reads(store, after)
    assert store.statistics().write_errors == 3


def test_a_record_that_does_not_follow_is_refused_before_it_is_written(store: SwapStore, fs: LossyFileSystem) -> None:
    """A log never holds what replay would refuse."""
    agent = good(store, ModelAgent("ada"), 20)
    before = fs.live_files()
    _, record, _ = agent.turn(5)
    for bad in (replace(record, seq=9), replace(record, base_tokens=21), replace(record, text=b"")):
        assert isinstance(store.perform(AppendRecordOp(bad)).error, RecordInvalid)
    assert fs.live_files() == before
    assert store.perform(AppendRecordOp(record)).error is None


def test_a_corrupt_page_is_never_served_and_can_be_written_again(store: SwapStore, fs: LossyFileSystem) -> None:
    """P3 P4: verified at each load, put aside when bad, rewritten from a resident copy; records refuse it till then."""
    agent = good(store, ModelAgent("ada"), 300)
    page = agent.pages[0][0]
    path = names().page_path(FINGERPRINT, page.page_id)
    data = bytearray(fs.read(path))
    data[len(data) // 2] ^= 1
    fs.poke(path, bytes(data))
    result = store.perform(ReadPageOp(header_of(page, 0), LAYOUTS[0]))
    assert isinstance(result.error, PageCorrupt)
    assert result.payload is None
    assert fs.stat(path) is None
    assert len(fs.listdir(names().quarantine_folder(FINGERPRINT))) == 1
    assert result.facts
    assert isinstance(store.perform(ReadPageOp(header_of(page, 0), LAYOUTS[0])).error, PageMissing)
    _, record, _ = agent.turn(1)
    assert isinstance(store.perform(AppendRecordOp(record)).error, PageNotDurable)
    assert store.perform(write_op(agent, 0, page)).error is None
    assert store.perform(AppendRecordOp(record)).error is None
    assert (store.statistics().pages_corrupt, store.statistics().pages_missing) == (1, 1)


def test_a_wrong_question_does_not_cost_the_page(store: SwapStore, fs: LossyFileSystem) -> None:
    """Asking for a good page under another identity is an error; the file stays where it is."""
    agent = good(store, ModelAgent("ada"), 256)
    header = header_of(agent.pages[0][0], 0)
    result = store.perform(ReadPageOp(replace(header, domain="other"), LAYOUTS[0]))
    assert isinstance(result.error, PageCorrupt)
    assert store.perform(ReadPageOp(header, LAYOUTS[0])).error is None


def test_a_rotten_tail_is_never_served(store: SwapStore, fs: LossyFileSystem) -> None:
    """P4: tails are verified again when they are read, also by compaction, which then changes nothing."""
    agent = good(store, ModelAgent("ada"), 50)
    path = names().log_path(FINGERPRINT, "default", "ada")
    data = bytearray(fs.read(path))
    data[-1] ^= 1
    fs.poke(path, bytes(data))
    assert store.perform(ReadTailOp("default", "ada", 0, 0)).payload == agent.tail(0)
    assert isinstance(store.perform(ReadTailOp("default", "ada", 0, 1)).error, LogCorrupt)
    assert isinstance(store.perform(CompactLogOp("default", "ada")).error, LogCorrupt)
    assert fs.read(path) == bytes(data)


def rot_tail(store: SwapStore, fs: LossyFileSystem, branch: int) -> None:
    """Flip a byte of a branch's tail of group 1 in the log of `ada`."""
    image = store._logs.image(("default", "ada"))
    assert image is not None
    path = names().log_path(FINGERPRINT, "default", "ada")
    data = bytearray(fs.read(path))
    data[image.branches[branch].segment(1).fragments[0].offset] ^= 1
    fs.poke(path, bytes(data))


def test_a_rotten_tail_of_an_abandoned_branch_does_not_stop_compaction(store: SwapStore, fs: LossyFileSystem) -> None:
    """P15: such a branch is cut to its last page border, and said so; the current one is never cut."""
    agent = good(store, ModelAgent("ada"), 300)
    fork = replace(agent.turn(5)[1], branch=1, parent=0)
    assert store.perform(AppendRecordOp(fork)).error is None
    rot_tail(store, fs, 0)
    short = replace(fork, seq=3, parent=None, base_tokens=256, base_text_bytes=256, token_ids=(), token_bytes=())
    segments = tuple(replace(each, tail_start=0, tail_end=0, tail_kv=b"") for each in fork.segments)
    short = replace(short, spans=(), text=b"", computed_tokens=256, segments=segments)
    assert store.perform(AppendRecordOp(short)).error is None
    result = store.perform(CompactLogOp("default", "ada"))
    assert result.error is None
    assert any("branch 0" in fact for fact in result.facts)
    assert result.image is not None
    cut = result.image.branches[0]
    assert (cut.tokens, cut.text, cut.computed_tokens) == (agent.tokens[:256], b"x" * 256, 256)
    assert cut.segment(1).pages == agent.pages[1]
    assert store.perform(CompactLogOp("default", "ada")).error is None
    store._catalog.close()
    fs.crash()
    _, report, again = open_store(fs)
    assert report.agents["default", "ada"].branches[0] == cut
    assert not report.log_troubles
    again.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.EACCES])
def test_a_read_that_the_disk_refused_costs_neither_page_nor_tail(
    store: SwapStore, fs: LossyFileSystem, code: int
) -> None:
    """P3 P8: a hiccup is no damage: the error says so, nothing is put aside or forgotten, the next read has it all."""
    agent = good(store, ModelAgent("ada"), 300)
    before = fs.live_files()
    fs.fail = lambda number, name, path: code if name == "read" else None
    ops = [ReadPageOp(header_of(agent.pages[0][0], 0), LAYOUTS[0]), ReadTailOp("default", "ada", 0, 0)]
    for op in ops:
        error = store.perform(op).error
        assert isinstance(error, DiskFault)
        assert error.data["errno"] == code
    fs.fail = lambda number, name, path: None
    assert fs.live_files() == before
    reads(store, agent)
    assert (store.statistics().pages_corrupt, store.statistics().pages_missing) == (0, 0)
    good(store, agent, 1)


def test_a_corrupt_page_that_cannot_be_moved_is_corrupt_all_the_same(store: SwapStore, fs: LossyFileSystem) -> None:
    """P4: the error of the quarantine does not hide what is wrong, or the page would be taken for a hiccup."""
    agent = good(store, ModelAgent("ada"), 300)
    op = ReadPageOp(header_of(agent.pages[0][0], 0), LAYOUTS[0])
    path = names().page_path(FINGERPRINT, op.expected.page_id)
    fs.poke(path, fs.read(path)[:-1])
    fs.fail = lambda number, name, path: errno.EROFS if name == "rename" else None
    for _ in range(2):
        result = store.perform(op)
        assert isinstance(result.error, PageCorrupt)
        assert any("stays where it is" in fact for fact in result.facts)
    fs.fail = lambda number, name, path: None
    assert isinstance(store.perform(op).error, PageCorrupt)
    assert isinstance(store.perform(op).error, PageMissing)


def test_pages_named_by_a_log_cannot_be_deleted(store: SwapStore, fs: LossyFileSystem) -> None:
    """Row first, then file, and only when no log names the page any more."""
    agent = good(store, ModelAgent("ada"), 300)
    page = agent.pages[0][0]
    path = names().page_path(FINGERPRINT, page.page_id)
    assert isinstance(store.perform(DeletePageOp(page.page_id)).error, PageReferenced)
    assert store.perform(DeleteLogOp("default", "ada")).error is None
    assert store.perform(DeletePageOp(page.page_id)).error is None
    assert fs.stat(path) is not None, "the file waits for the commit of its row"
    assert isinstance(store.perform(ReadPageOp(header_of(page, 0), LAYOUTS[0])).error, PageMissing)
    store.idle()
    assert fs.stat(path) is None
    assert isinstance(store.perform(ReadTailOp("default", "ada", 0, 0)).error, AgentNotFound)
    assert store.perform(DeletePageOp(page.page_id)).error is None


def test_compaction_holds_one_branch_at_a_time(store: SwapStore, fs: LossyFileSystem) -> None:
    """P21: tails are read as the new log is written, not all before."""
    agent = good(store, ModelAgent("ada"), 300)
    for branch in (1, 2):
        fork = replace(agent.turn(5)[1], seq=branch + 1, branch=branch, parent=0, base_tokens=0, base_text_bytes=0)
        fork = replace(fork, token_ids=fork.token_ids[:1] * 5, computed_tokens=5)
        kv = [bytes(5 * layout.token_bytes) for layout in LAYOUTS]
        segments = (
            replace(each, kept_pages=0, tail_start=0, tail_end=5, tail_kv=data)
            for each, data in zip(fork.segments, kv, strict=True)
        )
        assert store.perform(AppendRecordOp(replace(fork, segments=tuple(segments)))).error is None
    calls: list[str] = []
    fs.fail = lambda number, name, path: calls.append(name) if name in ("read", "write") else None
    assert store.perform(CompactLogOp("default", "ada")).error is None
    first_write = calls.index("write")
    assert calls[:first_write].count("read") == 2
    assert calls[first_write:].count("read") == 4


def test_a_page_read_is_a_view_of_its_file(store: SwapStore) -> None:
    """P21: the bytes are there once, before they are in a frame."""
    agent = good(store, ModelAgent("ada"), 256)
    header = header_of(agent.pages[0][0], 0)
    payload = store.perform(ReadPageOp(header, LAYOUTS[0])).payload
    assert isinstance(payload, memoryview)
    assert payload.nbytes == LAYOUTS[0].payload_bytes
    assert len(payload.obj) == file_bytes_for(header, LAYOUTS[0]) + 1, "a longer file would show"


def test_a_deleted_page_can_be_written_again(store: SwapStore, fs: LossyFileSystem) -> None:
    """The pending removal of the old file does not hit the new one."""
    agent = ModelAgent("ada").turn(256)[0]
    op = write_op(agent, 0, agent.pages[0][0])
    for _ in range(2):
        assert store.perform(op).error is None
        assert store.perform(DeletePageOp(op.header.page_id)).error is None
    assert store.perform(op).error is None
    store.idle()
    assert store.perform(ReadPageOp(op.header, op.layout)).payload == op.payload


@pytest.mark.parametrize("disk_refuses", [False, True])
def test_compaction_without_open_pages_keeps_text_and_ids(
    store: SwapStore, fs: LossyFileSystem, disk_refuses: bool
) -> None:
    """P8: KV of open pages goes, full pages and everything else stay; a refusal half way leaves the log as it was."""
    agent = good(store, ModelAgent("ada"), 300)
    before = store.statistics().log_bytes
    if disk_refuses:
        fs.fail = lambda number, name, path: errno.EIO if name == "write" else None
        assert store.perform(CompactLogOp("default", "ada", open_pages=False)).error is not None
        fs.fail = lambda number, name, path: None
        assert store.perform(ReadTailOp("default", "ada", 0, 0)).error is None
        assert store.statistics().log_bytes == before
        return
    image = store.perform(CompactLogOp("default", "ada", open_pages=False)).image
    assert image is not None
    assert (image.branch.tokens, len(image.branch.text)) == (tuple(agent.tokens), 300)
    assert image.branch.computed_tokens == 256
    saved_bytes = before - store.statistics().log_bytes
    assert saved_bytes > 40 * sum(layout.token_bytes for layout in LAYOUTS)


def test_compaction_drops_dead_bytes_and_nothing_else(store: SwapStore) -> None:
    """The log shrinks, everything is read back, numbers go on."""
    agent = ModelAgent("ada")
    for tokens in (100, 100, 100, 100):
        agent = good(store, agent, tokens)
    before = store.statistics().log_bytes
    result = store.perform(CompactLogOp("default", "ada"))
    assert result.error is None
    assert result.image.dead_bytes == 0
    assert store.statistics().log_bytes == result.image.log_bytes < before
    reads(store, agent)
    agent = good(store, agent, 10)
    reads(store, agent)
    assert isinstance(store.perform(CompactLogOp("default", "nobody")).error, AgentNotFound)


@pytest.mark.parametrize("failing", ["create", "write", "fsync", "rename", "fsync_dir"])
def test_a_failed_compaction_leaves_a_log_that_works(store: SwapStore, fs: LossyFileSystem, failing: str) -> None:
    """Whichever of the two logs is there afterwards, it is read, appended to, and survives a crash."""
    agent = ModelAgent("ada")
    for tokens in (100, 100, 100):
        agent = good(store, agent, tokens)
    fs.fail = lambda number, name, path: errno.EIO if name == failing else None
    assert isinstance(store.perform(CompactLogOp("default", "ada")).error, DiskFault)
    fs.fail = lambda number, name, path: None
    reads(store, agent)
    agent = good(store, agent, 7)
    reads(store, agent)
    store._catalog.close()
    fs.crash()
    _, report, again = open_store(fs)
    assert report.agents["default", "ada"].seq == 4
    reads(again, agent)
    again.close()
