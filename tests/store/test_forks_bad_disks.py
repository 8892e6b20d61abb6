"""Forks by a note on disks that refuse, forget or are full, and in folders that others changed: none is lost."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from kvd.ids import PageId
from kvd.store.errors import DiskFault, LogUnreadable, PageNotDurable, QuotaExceeded, RecordInvalid
from kvd.store.fs import RealFileSystem
from kvd.store.swap_ops import CompactLogOp, DeleteLogOp, ForkLogOp, ReadTailOp
from kvd.store.swap_store import SwapStore
from tests.store.test_forks import FORKS, fork, killed, log_of
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import FINGERPRINT, ModelAgent, open_store
from tests.support.store_turns import good, names, reads, turn


@pytest.mark.parametrize("lossy", [True, False])
def test_a_record_that_was_refused_before_a_fork_does_not_cost_it(disks: Path, *, lossy: bool) -> None:
    """P2 P20: it may be in the parent's log all the same, after the one that the note names."""
    for seed in range(40):
        fs = LossyFileSystem(disks / f"{seed}", seed=seed)
        store = open_store(fs)[2]
        ada = good(store, ModelAgent("ada"), 300)
        failing = ("fsync", "truncate") if seed % 2 else ("fsync",)
        fs.fail = lambda number, name, path, failing=failing: errno.EIO if name in failing else None  # type: ignore[misc]
        assert isinstance(turn(store, ada, 5)[1][-1].error, DiskFault)
        fs.fail = lambda number, name, path: None
        cam = fork(store, ada, "cam", 290)
        _, again = killed(fs, store, lossy=lossy)
        reads(again, cam)
        again.close()


def test_a_compaction_that_may_not_last_is_made_to_before_a_fork(disks: Path) -> None:
    """P2: after a crash the parent's name may stand for the long log; the note must not name the short one then."""
    for seed in range(20):
        fs = LossyFileSystem(disks / f"{seed}", seed=seed)
        store = open_store(fs)[2]
        ada = good(store, good(store, ModelAgent("ada"), 300), 10)
        store.idle()
        fs.fail = lambda number, name, path: errno.EIO if name == "fsync_dir" else None
        assert isinstance(store.perform(CompactLogOp("default", "ada")).error, DiskFault)
        fs.fail = lambda number, name, path: None
        cam = fork(store, ada, "cam", 290)
        _, again = killed(fs, store)
        reads(again, cam)
        again.close()


@pytest.mark.parametrize("how", ["removed", "refused"])
def test_the_name_of_the_file_is_durable_whenever_a_note_is(disks: Path, how: str) -> None:
    """P2: somebody removes it while it is empty, or the disk refused it at first: the next note makes it again."""
    for seed in range(20):
        fs = LossyFileSystem(disks / f"{seed}", seed=seed)
        store = open_store(fs)[2]
        ada = good(store, ModelAgent("ada"), 300)
        if how == "removed":
            fork(store, ada, "dan")
            store.idle()
            fs.unlink(FORKS)
            fs.fsync_dir(FORKS.parent)
        else:
            refusing = "fsync_dir" if seed % 2 else "open_append"
            fs.fail = lambda number, name, path, refusing=refusing: (  # type: ignore[misc]
                errno.EIO if name == refusing and path in (FORKS, FORKS.parent) else None
            )
            assert isinstance(store.perform(ForkLogOp(ada.fork("dan")[1])).error, DiskFault)
            fs.fail = lambda number, name, path: None
            store.idle()
        cam = fork(store, ada, "cam", 290)
        _, again = killed(fs, store)
        reads(again, cam)
        again.close()


def test_one_bad_read_at_start_costs_no_fork(store: SwapStore, fs: LossyFileSystem, ada: ModelAgent) -> None:
    """P22: the parent can be read, and goes on; so must its child be there."""
    cam = fork(store, ada, "cam", 330)
    store._catalog.close()
    fs.reboot_clean()
    hiccups = iter([errno.EIO])
    fs.fail = lambda number, name, path: next(hiccups, None) if (name, path) == ("read", log_of("ada")) else None
    _, report, store = open_store(fs)
    assert not report.stuck_forks
    good(store, ada, 5)
    reads(store, cam)
    store.close()


def test_a_parent_that_a_fork_waits_for_is_not_changed_meanwhile(
    store: SwapStore, fs: LossyFileSystem, ada: ModelAgent
) -> None:
    """P22: two bad reads, then good ones: the parent, too, waits for the next start, or its child would be lost."""
    cam = fork(store, ada, "cam", 330)
    store._catalog.close()
    fs.reboot_clean()
    hiccups = iter([errno.EIO] * 2)
    fs.fail = lambda number, name, path: next(hiccups, None) if (name, path) == ("read", log_of("ada")) else None
    _, report, store = open_store(fs)
    assert not report.agents
    assert isinstance(turn(store, ModelAgent("ada"), 5)[1][-1].error, LogUnreadable)
    _, again = killed(fs, store)
    reads(again, cam)
    reads(again, ada)
    again.close()


def test_a_start_on_a_full_disk_serves_forks_that_have_no_logs_yet(
    store: SwapStore, fs: LossyFileSystem, ada: ModelAgent
) -> None:
    """P2 P20: what the disk refuses at a start is made up before anything changes; a deletion is for good."""
    cam, dan = fork(store, ada, "cam", 330), fork(store, ada, "dan", 320)
    store._catalog.close()
    fs.reboot_clean()
    fs.fail = lambda number, name, path: errno.ENOSPC if name == "create" else None
    _, report, store = open_store(fs)
    assert set(report.agents) == {("default", name) for name in ("ada", "cam", "dan")}
    assert isinstance(turn(store, ada, 5)[1][-1].error, DiskFault)
    fs.fail = lambda number, name, path: None
    reads(store, dan)
    after = good(store, ada, 5)
    eve = fork(store, dan, "eve", 310)
    assert store.perform(DeleteLogOp("default", "dan")).error is None
    _, again = killed(fs, store)
    for agent in (after, cam, eve):
        reads(again, agent)
    assert again._logs.image(("default", "dan")) is None
    again.close()


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
def test_what_is_no_file_makes_way_for_notes(tmp_path: Path, what: str) -> None:
    """P5: put there under a running daemon or before a start: forks are made, agents can be deleted."""
    fs, root = RealFileSystem(), tmp_path / "data"
    (tmp_path / "else").write_bytes(b"whose?")

    def replace_it(path: Path) -> None:
        path.unlink(missing_ok=True)
        if what == "folder":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(tmp_path / "else")

    folder, _, store = open_store(fs, root)
    path = folder.forks_path(FINGERPRINT)
    ada = good(store, ModelAgent("ada"), 300)
    fork(store, ada, "cam", 290)
    replace_it(path)
    fork(store, ada, "dan", 280)
    replace_it(path)
    assert store.perform(DeleteLogOp("default", "dan")).error is None
    store.close()
    folder.close()
    replace_it(path)
    folder, report, store = open_store(fs, root)
    assert set(report.agents) == {("default", "ada"), ("default", "cam")}
    assert any("put aside" in fact for fact in report.facts)
    assert (tmp_path / "else").read_bytes() == b"whose?"
    store.close()
    folder.close()


def test_a_folder_that_is_removed_while_a_fork_waits_stops_nobody(tmp_path: Path) -> None:
    """P20: parent and child can be written and deleted again, whoever comes first."""
    for first in ("delete the child", "go on"):
        root = tmp_path / first
        folder, _, store = open_store(RealFileSystem(), root)
        ada = good(store, ModelAgent("ada"), 300)
        fork(store, ada, "cam", 290)
        shutil.rmtree(root)
        if first == "go on":
            assert isinstance(turn(store, ada, 5)[1][-1].error, RecordInvalid | PageNotDurable)
            good(store, ModelAgent("ada", salt=1), 5)
        assert store.perform(DeleteLogOp("default", "cam")).error is None
        store.close()
        folder.close()


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_note_that_the_disk_refuses_is_no_fork(
    store: SwapStore, fs: LossyFileSystem, ada: ModelAgent, failing: str
) -> None:
    """P6: the answer is an error; the child may then be recorded itself, be deleted, and stay away."""
    fs.fail = lambda number, name, path: errno.EIO if name == failing and path in (None, FORKS) else None
    _, note = ada.fork("cam")
    assert isinstance(store.perform(ForkLogOp(note)).error, DiskFault)
    fs.fail = lambda number, name, path: None
    assert store.perform(DeleteLogOp("default", "cam")).error is None
    report, again = killed(fs, store)
    assert {name for _, name in report.agents} == {"ada"}
    reads(again, ada)
    again.close()


def test_while_a_childs_log_cannot_be_made_its_parents_is_left_alone(
    store: SwapStore, fs: LossyFileSystem, ada: ModelAgent
) -> None:
    """P20 P22: the parent's change is refused like any write, not done under the child's feet; then all is made up."""
    child = fork(store, ada, "cam", 330)
    before = fs.read(log_of("ada"))
    fs.fail = lambda number, name, path: errno.ENOSPC if name == "create" else None
    store.idle()
    assert any("no logs of their own yet" in fact for fact in store.perform(ReadTailOp("default", "ada", 0, 0)).facts)
    after, results = turn(store, ada, 5)
    assert isinstance(results[-1].error, DiskFault)
    assert isinstance(store.perform(CompactLogOp("default", "ada")).error, DiskFault)
    assert isinstance(store.perform(DeleteLogOp("default", "ada")).error, DiskFault)
    assert isinstance(store.perform(ReadTailOp("default", "cam", 1, 0)).error, DiskFault)
    assert fs.read(log_of("ada")) == before
    fs.fail = lambda number, name, path: None
    after = good(store, ada, 5)
    _, again = killed(fs, store)
    reads(again, child)
    reads(again, after)
    again.close()


def test_a_parent_that_cannot_be_read_keeps_its_forks_for_the_next_start(fs: LossyFileSystem) -> None:
    """P22: one bad start costs nothing; an agent that takes the name meanwhile is not overwritten by it."""
    store = open_store(fs)[2]
    ada = good(store, ModelAgent("ada"), 300)
    cam, dan = fork(store, ada, "cam"), fork(store, ada, "dan")
    store._catalog.close()
    fs.reboot_clean()
    fs.fail = lambda number, name, path: errno.EIO if name == "read" and path == log_of("ada") else None
    _, report, store = open_store(fs)
    assert {note.child for note in report.stuck_forks} == {"cam", "dan"}
    fs.fail = lambda number, name, path: None
    bob = good(store, ModelAgent("bob"), 300)
    assert isinstance(store.perform(ForkLogOp(bob.fork("eve")[1])).error, RecordInvalid), "a record does instead"
    good(store, ModelAgent("dan"), 7)
    assert store.perform(DeleteLogOp("default", "dan")).error is None
    report, again = killed(fs, store)
    assert {name for _, name in report.agents} == {"ada", "bob", "cam"}
    reads(again, cam)
    again.close()
    assert dan.tokens == cam.tokens


def test_forks_that_wait_for_their_logs_count_against_the_quota(fs: LossyFileSystem) -> None:
    """P25: each log would fit, all of them would not: those that do not are refused before anybody is told."""
    store = open_store(fs)[2]
    ada = good(store, ModelAgent("ada"), 511)
    store.idle()
    child_bytes = len(fs.read(log_of("ada")))
    for _ in range(20):  # what is kept free for the catalog depends on the quota
        store._usage.quota_bytes = store._usage.used_bytes + store._usage.reserved_bytes + child_bytes * 3
        store._usage.recount()
    errors = [store.perform(ForkLogOp(ada.fork(f"child {number}")[1])).error for number in range(6)]
    assert [type(error) for error in errors] == [type(None)] * 2 + [QuotaExceeded] * 4
    store.idle()
    store._usage.recount()
    assert store.statistics().used_bytes + store._usage.reserved_bytes <= store.statistics().quota_bytes
    store.close()


def test_a_log_that_is_made_while_room_is_sought_counts_once(fs: LossyFileSystem) -> None:
    """P25: making room makes the logs that are promised; the fork that fits then is not refused."""
    store = open_store(fs)[2]
    ada = good(store, ModelAgent("ada"), 511)
    store.idle()
    child_bytes = len(fs.read(log_of("ada")))
    fs.poke(
        names().page_path(FINGERPRINT, PageId(ada.pages[0][0].page_id[:2] + "ab" * 15)), bytes(child_bytes * 7 // 10)
    )  # nobody names it
    for _ in range(20):  # what is kept free for the catalog depends on the quota
        store._usage.recount()
        store._usage.quota_bytes = store._usage.used_bytes + store._usage.reserved_bytes + child_bytes * 3 // 2
    fork(store, ada, "cam")
    fork(store, ada, "dan")
    assert fs.stat(log_of("cam")) is not None
    store.close()


def test_a_quota_that_has_no_room_for_the_log_refuses_the_note(fs: LossyFileSystem) -> None:
    """P25: what is acknowledged can be kept."""
    store = open_store(fs)[2]
    ada = good(store, ModelAgent("ada"), 300)
    store.idle()
    child_bytes = len(fs.read(log_of("ada")))
    for _ in range(20):  # what is kept free for the catalog depends on the quota
        store._usage.quota_bytes = store._usage.used_bytes + store._usage.reserved_bytes + child_bytes // 2
        store._usage.recount()
    assert isinstance(store.perform(ForkLogOp(ada.fork("cam")[1])).error, QuotaExceeded)
    assert fs.stat(FORKS) is None
    store.close()
