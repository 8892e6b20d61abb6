"""The swap thread: strict order among changes, reads overtake all but what they depend on, nothing ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import Draining
from kvd.store import DataFolder, RealFileSystem, SwapThread, recover
from kvd.store.fs_meter import MeteredFileSystem
from kvd.store.swap_ops import (
    AppendRecordOp,
    CompactLogOp,
    DeleteLogOp,
    DeletePageOp,
    FlushOp,
    ReadPageOp,
    ReadTailOp,
    SwapBroken,
    SwapOp,
    SwapResult,
    WritePageOp,
)
from tests.support.store_data import FINGERPRINT, LAYOUTS, ModelAgent, header_of, layouts, memory_folder


class Gate(MeteredFileSystem):
    """A disk whose writes wait until they are let through: makes queues of known content."""

    def __init__(self) -> None:
        super().__init__(RealFileSystem())
        self.open = threading.Event()
        self.reached = threading.Event()
        self.open.set()

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
        self.raise_at_delivery = False
        self.thread = SwapThread(
            folder=self.folder,
            fingerprint=FINGERPRINT,
            fs=self.fs,
            quota_bytes=1 << 30,
            layouts=layouts,
            recovered=recover(self.folder, FINGERPRINT, layouts, self.fs),
            deliver=self.deliver,
        )
        self.thread.start()

    def deliver(self, result: SwapResult) -> None:
        """Collect."""
        assert threading.current_thread().name == "kvd-swap"
        self.results.append(result)
        if self.raise_at_delivery:
            raise RuntimeError("a receiver's bug")

    def hold(self, op: SwapOp) -> None:
        """Submit a write and stop the thread inside it."""
        self.fs.open.clear()
        self.fs.reached.clear()
        self.thread.submit(op)
        assert self.fs.reached.wait(20)

    def done(self) -> list[SwapResult]:
        """Let everything through and wait for it."""
        self.fs.open.set()
        assert self.thread.flush(20)
        return [result for result in self.results if not isinstance(result.op, FlushOp)]

    def close(self) -> None:
        """End."""
        self.fs.open.set()
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
    results = desk.done()
    assert [result.op for result in results[1:]] == [writes[0], read_op(old), *writes[1:]]
    assert results[2].payload == old.payload


def test_a_read_waits_for_the_write_of_its_own_page_only(desk: Desk) -> None:
    """It sees what was written before it, and comes before what was submitted later for that page."""
    first, mine, other = page_op("first"), page_op("mine"), page_op("other")
    desk.hold(first)
    desk.thread.submit(mine)
    desk.thread.submit(other)
    desk.thread.submit(read_op(mine))
    desk.thread.submit(DeletePageOp(mine.header.page_id))
    results = desk.done()
    assert [result.op for result in results] == [
        first,
        mine,
        read_op(mine),
        other,
        DeletePageOp(mine.header.page_id),
    ]
    assert results[2].payload == mine.payload


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
    desk.thread.submit(read_op(page_op("c")))
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
        thread = SwapThread(
            folder=folder,
            fingerprint=FINGERPRINT,
            fs=fs,
            quota_bytes=1,
            layouts=layouts,
            recovered=recover(folder, FINGERPRINT, layouts, fs),
            deliver=lambda result: None,
        )
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
