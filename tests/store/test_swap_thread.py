"""The swap thread: strict order among changes, reads overtake all but what they depend on, nothing ends it.

Long because each rule of that order has a test of its own, on one desk.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import Draining
from kvd.store import DataFolder, RealFileSystem, SwapThread, recover
from kvd.store.errors import PageMissing
from kvd.store.fs_meter import MeteredFileSystem
from kvd.store.swap_ops import (
    AppendRecordOp,
    CheckPagesOp,
    CompactLogOp,
    DeleteLogOp,
    DeletePageOp,
    FlushOp,
    PagesChecked,
    ReadPageOp,
    ReadTailOp,
    SwapBroken,
    SwapOp,
    SwapResult,
    WritePageOp,
)
from kvd.store.swap_store import SwapStore
from kvd.store.swap_thread import READERS
from tests.support.store_data import FINGERPRINT, LAYOUTS, ModelAgent, header_of, layouts, memory_folder


class Gate(MeteredFileSystem):
    """A disk whose writes wait until they are let through: makes queues of known content."""

    def __init__(self) -> None:
        super().__init__(RealFileSystem())
        self.open = threading.Event()
        self.reached = threading.Event()
        self.open.set()
        self.reads_open = threading.Event()
        self.reads_open.set()
        self.reading = threading.Condition()
        self.readers = 0

    def read_into(self, path: Path, buffer: memoryview, *, drop_cache: bool = False) -> int:
        """Wait at the gate of the reads; may be called by several threads."""
        with self.reading:
            self.readers += 1
            self.reading.notify_all()
        assert self.reads_open.wait(20)
        n_bytes = super().read_into(path, buffer, drop_cache=drop_cache)
        with self.reading:
            self.readers -= 1
        return n_bytes

    def create(self, path: Path) -> int:
        """Wait at the gate."""
        self.reached.set()
        assert self.open.wait(20)
        return super().create(path)


class Desk:
    """A started thread with its results."""

    def __init__(self, root: Path) -> None:
        self.fs = Gate()
        self.folder = DataFolder(root / "data", self.fs)
        self.folder.open()
        self.results: list[SwapResult] = []
        self.delivered = threading.Condition()
        self.raise_at_delivery = False
        store = SwapStore(
            folder=self.folder,
            fingerprint=FINGERPRINT,
            fs=self.fs,
            quota_bytes=1 << 30,
            layouts=layouts,
            recovered=recover(self.folder, FINGERPRINT, layouts, self.fs),
        )
        self.thread = SwapThread(store=store, deliver=self.deliver)
        self.thread.start()

    def deliver(self, result: SwapResult) -> None:
        """Collect."""
        assert threading.current_thread().name.startswith("kvd-swap")
        with self.delivered:
            self.results.append(result)
            self.delivered.notify_all()
        if self.raise_at_delivery:
            raise RuntimeError("a receiver's bug")

    def hold(self, op: SwapOp) -> None:
        """Submit a write and stop the thread inside it."""
        self.fs.open.clear()
        self.fs.reached.clear()
        self.thread.submit(op)
        assert self.fs.reached.wait(20)

    def until(self, results: int) -> None:
        """Wait for so many results, whatever is held."""
        with self.delivered:
            assert self.delivered.wait_for(lambda: len(self.results) >= results, 20)

    def hold_reads(self, *ops: ReadPageOp, running: int) -> None:
        """Submit reads and stop them inside the disk; wait until so many are there."""
        self.fs.reads_open.clear()
        for op in ops:
            self.thread.submit(op)
        with self.fs.reading:
            assert self.fs.reading.wait_for(lambda: self.fs.readers == running, 20)

    def done(self) -> list[SwapResult]:
        """Let everything through and wait for it."""
        self.fs.open.set()
        self.fs.reads_open.set()
        assert self.thread.flush(20)
        return [result for result in self.results if not isinstance(result.op, FlushOp)]

    def close(self) -> None:
        """End."""
        self.fs.open.set()
        self.fs.reads_open.set()
        self.thread.close()
        self.folder.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A desk on an empty folder."""
    for folder in memory_folder():
        made = Desk(folder)
        yield made
        made.close()


def page_op(name: str, number: int = 0) -> WritePageOp:
    """Write page `number` of an agent, group 0."""
    agent = ModelAgent(name)
    return WritePageOp(header_of(agent.entry(0, number), 0), LAYOUTS[0], agent.page_bytes(0, number))


def read_op(op: WritePageOp) -> ReadPageOp:
    """Read that page."""
    return ReadPageOp(op.header, op.layout)


def test_changes_are_carried_out_in_the_order_of_submission(desk: Desk) -> None:
    """Writes, records, compactions and deletions never overtake each other."""
    agent, record, sealed = ModelAgent("ada").turn(300)
    ops: list[SwapOp] = [
        *(WritePageOp(header_of(p, g), LAYOUTS[g], agent.page_bytes(g, 0)) for g, p in sealed),
        AppendRecordOp(record),
        CompactLogOp("default", "ada"),
        DeleteLogOp("default", "ada"),
        *(DeletePageOp(page.page_id) for _, page in sealed),
        page_op("bob"),
    ]
    desk.hold(page_op("first"))
    for op in ops:
        desk.thread.submit(op)
    results = desk.done()
    assert [result.op for result in results[1:]] == ops
    assert [result.error for result in results] == [None] * len(results)


def test_reads_overtake_writes_of_other_pages(desk: Desk) -> None:
    """A page fault does not wait for write-behind."""
    old = page_op("old")
    desk.thread.submit(old)
    desk.done()
    writes = [page_op("new", number) for number in range(3)]
    desk.hold(writes[0])
    for op in writes[1:]:
        desk.thread.submit(op)
    desk.thread.submit(read_op(old))
    desk.until(3)
    assert desk.results[-1].op == read_op(old), "not even for the write that is under way"
    assert desk.results[-1].payload == old.payload
    results = desk.done()
    assert [result.op for result in results[2:]] == writes


def test_a_read_waits_for_the_write_of_its_own_page_only(desk: Desk) -> None:
    """It sees what was written before it, and comes before what was submitted later for that page."""
    first, mine, other = page_op("first"), page_op("mine"), page_op("other")
    desk.hold(first)
    desk.thread.submit(mine)
    desk.thread.submit(other)
    desk.thread.submit(read_op(mine))
    desk.thread.submit(DeletePageOp(mine.header.page_id))
    results = desk.done()
    ops = [result.op for result in results]
    at = ops.index(read_op(mine))
    assert ops[:at] + ops[at + 1 :] == [first, mine, other, DeletePageOp(mine.header.page_id)]
    assert ops.index(mine) < at < ops.index(DeletePageOp(mine.header.page_id)), "beside `other`, before or after it"
    assert results[at].payload == mine.payload


def test_several_pages_are_read_at_once(desk: Desk) -> None:
    """One reader leaves most of a disk idle: as many reads as there are readers run side by side, and no more."""
    writes = [page_op("a", number) for number in range(READERS + 2)]
    for op in writes:
        desk.thread.submit(op)
    desk.done()
    desk.hold_reads(*(read_op(op) for op in writes), running=READERS)
    assert desk.thread.statistics().queued_ops == 2
    results = desk.done()[len(writes) :]
    assert {result.op.expected.page_id: result.payload for result in results} == {
        op.header.page_id: op.payload for op in writes
    }
    statistics = desk.thread.statistics()
    assert statistics.pages_read == len(writes)
    assert statistics.bytes_read > sum(len(op.payload) for op in writes)
    assert statistics.reading_s > 0


def test_a_change_waits_for_earlier_reads_of_its_page(desk: Desk) -> None:
    """Neither is a page deleted under a read that was asked for before, nor does what comes after overtake that."""
    mine, other = page_op("mine"), page_op("other")
    desk.thread.submit(mine)
    desk.done()
    desk.hold_reads(read_op(mine), running=1)
    desk.thread.submit(DeletePageOp(mine.header.page_id))
    desk.thread.submit(other)
    late = read_op(mine)
    desk.thread.submit(late)
    results = desk.done()[1:]
    assert [type(result.op) for result in results] == [ReadPageOp, DeletePageOp, *[type(r.op) for r in results[2:]]]
    assert results[0].payload == mine.payload
    errors = [result.error for result in results if isinstance(result.op, ReadPageOp)]
    assert [type(error) for error in errors] == [type(None), PageMissing], "what was asked for later finds it gone"


def test_what_a_reader_cannot_settle_is_answered_once_by_the_thread_that_keeps_the_books(desk: Desk) -> None:
    """P4: a bad file is put aside, a page that is unknown is looked at, each with one answer."""
    write, unknown = page_op("a"), page_op("b")
    desk.thread.submit(write)
    desk.done()
    path = desk.folder.page_path(FINGERPRINT, write.header.page_id)
    path.write_bytes(path.read_bytes()[:-1])
    for op in (read_op(write), read_op(unknown)):
        desk.thread.submit(op)
    results = desk.done()[1:]
    assert sorted(type(result.error).__name__ for result in results) == ["PageCorrupt", "PageMissing"]
    assert not path.exists()
    statistics = desk.thread.statistics()
    assert (statistics.pages_corrupt, statistics.pages_missing, statistics.pages_read) == (1, 1, 0)


def test_closing_waits_for_reads_that_are_under_way(desk: Desk) -> None:
    """P2: everything accepted is answered, also what readers hold and what waits for them."""
    write = page_op("a")
    desk.thread.submit(write)
    desk.done()
    desk.hold_reads(read_op(write), read_op(write), running=2)
    desk.thread.submit(DeletePageOp(write.header.page_id))
    closing = threading.Thread(target=desk.thread.close)
    closing.start()
    desk.fs.reads_open.set()
    closing.join(20)
    assert not closing.is_alive()
    answered = [type(result.op) for result in desk.results if not isinstance(result.op, FlushOp)]
    assert answered == [WritePageOp, ReadPageOp, ReadPageOp, DeletePageOp]


def test_looks_at_page_files_come_after_everything_and_in_steps(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: somebody touched every file; commits and deletions that come later do not wait for thousands of reads."""
    monkeypatch.setattr("kvd.store.swap_store.LOOKED_FILES", 1)
    written = [page_op("a", number) for number in range(3)]
    for op in written:
        desk.thread.submit(op)
    desk.done()
    bad = written[1].header.page_id
    path = desk.folder.page_path(FINGERPRINT, bad)
    path.write_bytes(path.read_bytes()[:-1])
    held, later = page_op("b"), [page_op("c"), page_op("d")]
    desk.hold(held)
    desk.thread.submit(CheckPagesOp(frozenset(op.header.page_id for op in written)))
    desk.thread.submit(CheckPagesOp(frozenset({bad, "f" * 32})))
    for op in later:
        desk.thread.submit(op)
    desk.fs.open.set()
    expected = len(written) + len(later) + 1 + len(written)
    desk.until(expected + 1)  # and the flush that `done` made
    results = [result for result in desk.results if not isinstance(result.op, FlushOp)][len(written) :]
    assert [result.op for result in results[: 1 + len(later)]] == [held, *later]
    found = [result.value for result in results[1 + len(later) :]]
    assert len(found) == len(written), "one page a step, each page once"
    assert [each.bad for each in found if isinstance(each, PagesChecked) and each.bad] == [(bad,)]


def test_looks_wait_for_readers_and_end_with_the_thread(desk: Desk) -> None:
    """P2: a page that somebody waits for comes first; a stop does not wait for a look at all files."""
    write = page_op("a")
    desk.thread.submit(write)
    desk.done()
    desk.hold_reads(read_op(write), running=1)
    desk.thread.submit(CheckPagesOp(frozenset({write.header.page_id})))
    desk.thread.submit(page_op("b"))
    desk.until(len(desk.results) + 1)
    assert not [result for result in desk.results if isinstance(result.op, CheckPagesOp)]
    closing = threading.Thread(target=desk.thread.close)
    closing.start()
    with desk.thread._changed:
        assert desk.thread._for_readers.wait_for(lambda: desk.thread._closing, 20)
    desk.fs.reads_open.set()
    closing.join(20)
    assert not closing.is_alive()
    assert not [result for result in desk.results if isinstance(result.op, CheckPagesOp)]


def test_a_tail_read_waits_for_its_agents_records(desk: Desk) -> None:
    """And not for another agent's."""
    ada, ada_record, _ = ModelAgent("ada").turn(20)
    bob_record = ModelAgent("bob").turn(20)[1]
    desk.hold(page_op("first"))
    tail = ReadTailOp("default", "ada", 0, 1)
    for op in (AppendRecordOp(ada_record), AppendRecordOp(bob_record), tail):
        desk.thread.submit(op)
    results = desk.done()
    assert [result.op for result in results[1:]] == [AppendRecordOp(ada_record), tail, AppendRecordOp(bob_record)]
    assert results[2].payload == ada.tail(1)


def test_queued_bytes_are_told(desk: Desk) -> None:
    """P21: payloads that wait for the disk are part of the memory budget."""
    desk.hold(page_op("a"))
    desk.thread.submit(page_op("b"))
    desk.thread.submit(read_op(page_op("b")))
    statistics = desk.thread.statistics()
    assert statistics.queued_ops == 2
    assert statistics.queued_bytes == 2 * LAYOUTS[0].payload_bytes
    desk.done()
    after = desk.thread.statistics()
    assert (after.queued_ops, after.queued_bytes, after.pages_written) == (0, 0, 2)


def test_a_receivers_bug_does_not_stop_the_disk(desk: Desk) -> None:
    """It is counted; the next operation is carried out."""
    desk.raise_at_delivery = True
    desk.thread.submit(page_op("a"))
    desk.thread.submit(page_op("b"))
    desk.done()
    assert desk.thread.statistics().pages_written == 2
    assert desk.thread.statistics().deliver_errors >= 2


def test_operations_without_sense_are_refused_and_do_not_stop_the_disk(desk: Desk) -> None:
    """An id that is no id gets its typed error; the next operation is carried out."""
    for op in (DeletePageOp("../../etc"), DeleteLogOp("default", "nobody"), ReadTailOp("default", "nobody", 0, 0)):
        desk.thread.submit(op)
    desk.done()
    desk.thread.submit(page_op("a"))
    names = {type(result.op): result.error and result.error.name for result in desk.done()}
    assert names == {
        DeletePageOp: "invalid_params",
        DeleteLogOp: None,
        ReadTailOp: "agent_not_found",
        WritePageOp: None,
    }


def test_closing_finishes_what_is_queued(desk: Desk) -> None:
    """P2: everything accepted is done; later submissions are refused."""
    desk.hold(page_op("a"))
    desk.thread.submit(page_op("b"))
    desk.fs.open.set()
    desk.thread.close()
    desk.thread.close()
    assert [result.error for result in desk.results] == [None, None]
    with pytest.raises(Draining):
        desk.thread.submit(page_op("c"))


def test_a_thread_that_never_started_can_be_closed() -> None:
    """Start-up may fail in between."""
    for root in memory_folder():
        fs = RealFileSystem()
        folder = DataFolder(root / "data", fs)
        folder.open()
        store = SwapStore(
            folder=folder,
            fingerprint=FINGERPRINT,
            fs=fs,
            quota_bytes=1,
            layouts=layouts,
            recovered=recover(folder, FINGERPRINT, layouts, fs),
        )
        thread = SwapThread(store=store, deliver=lambda result: None)
        thread.close()
        folder.close()


def test_many_threads_may_submit(desk: Desk) -> None:
    """Each operation is answered exactly once."""
    ops = [page_op(f"agent-{number}") for number in range(24)]
    threads = [
        threading.Thread(target=lambda part=ops[start::4]: [desk.thread.submit(op) for op in part])
        for start in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.op.header.page_id for result in desk.done()) == sorted(op.header.page_id for op in ops)


class Bug(Exception):
    """No fault of the disk."""


@pytest.mark.parametrize("where", ["idle", "_finish"])
def test_a_bug_outside_an_operation_is_told_and_hangs_nobody(desk: Desk, where: str) -> None:
    """A thread that ends silently would leave everyone who waits for an answer waiting; this one says so, once."""

    def broken(*_: object) -> None:
        raise Bug("books do not agree")

    write, record = page_op("a"), AppendRecordOp(ModelAgent("ada").turn(3)[1])
    desk.hold(write)
    desk.thread.submit(record)
    setattr(desk.thread._store if where == "idle" else desk.thread, where, broken)
    flushed = FlushOp(threading.Event())
    desk.thread.submit(flushed)
    desk.fs.open.set()
    desk.thread._thread.join(20)
    assert not desk.thread._thread.is_alive()
    assert flushed.event.is_set()
    last = desk.results[-1]
    assert isinstance(last.op, SwapBroken)
    assert "books do not agree" in last.op.reason
    assert last.error is not None
    assert last.error.name == "internal"
    assert [type(result.op) for result in desk.results].count(SwapBroken) == 1
    with pytest.raises(Draining):
        desk.thread.submit(write)
    with pytest.raises(Draining):
        desk.thread.flush(20)
    assert desk.thread.statistics().queued_ops == 0
    desk.thread.close()


def test_a_change_wakes_no_reader(desk: Desk) -> None:
    """A commit is answered by the one thread that makes it: readers that wake with it would take turns with it."""
    looked = 0
    next_read = desk.thread._next_read

    def counting(*, for_readers: bool) -> object:
        nonlocal looked
        looked += for_readers
        return next_read(for_readers=for_readers)

    desk.thread._next_read = counting  # type: ignore[method-assign, assignment]
    writes = [page_op("a", number) for number in range(8)]
    for write in writes:
        desk.thread.submit(write)
    desk.done()
    assert looked <= READERS, "but for their look at the start"
    for write in writes:
        desk.thread.submit(read_op(write))
    desk.until(2 * len(writes))
    assert looked >= len(writes), "and reads wake them"
    assert all(result.error is None for result in desk.done())


def test_reads_that_wait_for_one_change_all_come(desk: Desk) -> None:
    """More reads than readers, freed by one write: none is left lying, whichever reader wakes."""
    write = page_op("a")
    desk.hold(write)
    for _ in range(3 * READERS):
        desk.thread.submit(read_op(write))
    desk.fs.open.set()
    desk.until(1 + 3 * READERS)
    assert all(result.error is None for result in desk.done())


def test_a_flush_waits_for_no_read_that_came_later(desk: Desk) -> None:
    """Or it might wait as long as somebody reads: only the reads that were open when it came are its own."""
    early, late = page_op("a"), page_op("b")
    for write in (early, late):
        desk.thread.submit(write)
    desk.done()
    may_end, reading, flushed = threading.Event(), threading.Event(), threading.Event()
    read_into = desk.fs.read_into

    def held(path: Path, buffer: memoryview, *, drop_cache: bool = False) -> int:
        if late.header.page_id in path.name:
            reading.set()
            assert may_end.wait(20)
        return read_into(path, buffer, drop_cache=drop_cache)

    desk.fs.read_into = held  # type: ignore[method-assign]
    desk.hold_reads(read_op(early), running=1)
    desk.thread.submit(FlushOp(flushed))
    desk.thread.submit(read_op(late))
    assert reading.wait(20)
    assert not flushed.is_set(), "the first read was there before it"
    desk.fs.reads_open.set()
    try:
        assert flushed.wait(20)
    finally:
        may_end.set()
    assert all(result.error is None for result in desk.done())
