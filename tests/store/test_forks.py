"""Forks by a note: durable with one line, and nothing it leans on changes before the child has a log of its own."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.store.errors import (
    DiskFault,
    LogDamaged,
    PageNotDurable,
    PageReferenced,
    RecordInvalid,
)
from kvd.store.fork_book import MAX_WAITING
from kvd.store.fork_notes import ForkNote, decode_note
from kvd.store.layout import DataFolder
from kvd.store.recovery import recover
from kvd.store.recovery_report import RecoveryReport
from kvd.store.swap_ops import CompactLogOp, DeleteLogOp, DeletePageOp, ForkLogOp
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import FINGERPRINT, ROOT, ModelAgent, layouts, open_store
from tests.support.store_turns import good, names, reads

FORKS = names().forks_path(FINGERPRINT)


def log_of(name: str) -> Path:
    """An agent's log."""
    return names().log_path(FINGERPRINT, "default", name)


def fork(store: SwapStore, parent: ModelAgent, name: str, tokens: int | None = None) -> ModelAgent:
    """A fork that must be durable."""
    child, note = parent.fork(name, tokens)
    result = store.perform(ForkLogOp(note))
    assert result.error is None, result.error
    assert result.image is not None
    assert result.image.branch.tokens == child.tokens
    return child


def killed(fs: LossyFileSystem, store: SwapStore, *, lossy: bool = True) -> tuple[RecoveryReport, SwapStore]:
    """The process dies without a farewell, with the power or without; what a start finds."""
    store._catalog.close()
    fs.crash() if lossy else fs.reboot_clean()
    _, report, again = open_store(fs)
    return report, again


# ---- one line, then a log -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [341, 300, 270, 256, 0])
def test_a_fork_is_one_short_line_and_becomes_a_log(
    store: SwapStore, fs: LossyFileSystem, ada: ModelAgent, tokens: int
) -> None:
    """Cut anywhere in the open page or at a border: the child is what the parent was, bit for bit, and can go on."""
    store.idle()
    before = store.statistics()
    child = fork(store, ada, "cam", tokens)
    after = store.statistics()
    assert after.bytes_written - before.bytes_written < 500
    assert after.fsyncs - before.fsyncs <= 2, "the line, and the name of the first one's file"
    assert fs.stat(log_of("cam")) is None
    store.idle()
    assert fs.stat(log_of("cam")) is not None
    assert fs.read(FORKS) == b"", "what has a log needs no note"
    reads(store, child)
    reads(store, good(store, child, 300))
    reads(store, ada)


def test_a_second_fork_flushes_once(store: SwapStore, ada: ModelAgent) -> None:
    """The file's name is durable since the first one."""
    fork(store, ada, "cam")
    store.idle()
    before = store.statistics().fsyncs
    fork(store, ada, "dan")
    assert store.statistics().fsyncs - before == 1


def test_forks_of_forks(store: SwapStore, fs: LossyFileSystem, ada: ModelAgent) -> None:
    """A child that has a note only can be forked at once: its log is made first."""
    cam = fork(store, ada, "cam", 320)
    dan = fork(store, cam, "dan", 310)
    report, again = killed(fs, store)
    assert report.agents["default", "dan"].branch.tokens == dan.tokens
    reads(again, cam)
    reads(again, dan)
    again.close()


def test_what_the_child_takes_counts_for_its_namespace_before_it_has_a_log(store: SwapStore, ada: ModelAgent) -> None:
    """P25: a quota sees the log that is promised, and then the log."""
    before = store.statistics().namespace_bytes["default"]
    fork(store, ada, "cam")
    promised = store.statistics().namespace_bytes["default"] - before
    store.idle()
    made = store.statistics().namespace_bytes["default"] - before
    assert made == len(store._fs.read(log_of("cam")))
    assert made <= promised <= made + 1024


# ---- crashes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lossy", [True, False])
def test_an_acknowledged_fork_survives_a_crash_at_once(disks: Path, *, lossy: bool) -> None:
    """P2: with nothing but its note on disk, whatever else the crash takes; also when the next start dies, too."""
    for seed in range(15):
        fs = LossyFileSystem(disks / f"{seed}", seed=seed)
        store = open_store(fs)[2]
        ada = good(store, ModelAgent("ada"), 300)
        child = fork(store, ada, "cam", 280)
        report, again = killed(fs, store, lossy=lossy)
        assert report.agents["default", "cam"].branch.tokens == child.tokens
        assert any("was finished" in fact for fact in report.facts)
        report, again = killed(fs, again)
        assert not report.facts
        reads(again, child)
        reads(again, ada)
        again.close()


def test_a_parent_that_goes_on_leaves_its_child_what_it_was(disks: Path) -> None:
    """P2 P3: the child's log is made before the parent's changes, so a crash finds one or the other."""
    for seed in range(15):
        fs = LossyFileSystem(disks / f"{seed}", seed=seed)
        store = open_store(fs)[2]
        ada = good(store, ModelAgent("ada"), 300)
        child = fork(store, ada, "cam", 290)
        if seed % 2:
            ada = good(store, ada, 250)
        else:
            assert store.perform(CompactLogOp("default", "ada", frozenset())).error is None
        _, again = killed(fs, store)
        reads(again, child)
        reads(again, ada)
        again.close()


@pytest.mark.parametrize("who", ["cam", "ada"])
def test_a_deleted_agent_does_not_come_back(disks: Path, who: str) -> None:
    """A child deleted right after its fork stays away; one whose parent is deleted stays."""
    for seed in range(15):
        fs = LossyFileSystem(disks / f"{seed}", seed=seed)
        store = open_store(fs)[2]
        ada = good(store, ModelAgent("ada"), 300)
        cam, dan = fork(store, ada, "cam"), fork(store, ada, "dan", 290)
        assert store.perform(DeleteLogOp("default", who)).error is None
        report, again = killed(fs, store)
        left = {"ada": ada, "cam": cam, "dan": dan}
        del left[who]
        assert {name for _, name in report.agents} == set(left)
        for agent in left.values():
            reads(again, agent)
        again.close()


def test_an_agent_whose_note_cannot_be_taken_back_is_not_deleted(
    store: SwapStore, fs: LossyFileSystem, ada: ModelAgent
) -> None:
    """P6: it would come back; the answer says that it is still there, and a second try deletes it for good."""
    child = fork(store, ada, "cam")
    fs.fail = lambda number, name, path: errno.EIO if name == "truncate" else None
    assert isinstance(store.perform(DeleteLogOp("default", "cam")).error, DiskFault)
    reads(store, child)
    fs.fail = lambda number, name, path: None
    assert store.perform(DeleteLogOp("default", "cam")).error is None
    report, again = killed(fs, store)
    assert {name for _, name in report.agents} == {"ada"}
    again.close()


def test_a_name_can_be_used_again_at_once(store: SwapStore, fs: LossyFileSystem, ada: ModelAgent) -> None:
    """Fork, delete, fork elsewhere under the same name: the last one is what is found."""
    fork(store, ada, "cam")
    assert store.perform(DeleteLogOp("default", "cam")).error is None
    child = fork(store, ada, "cam", 270)
    report, again = killed(fs, store)
    assert report.agents["default", "cam"].branch.tokens == child.tokens
    again.close()


# ---- what refuses, and why ------------------------------------------------------------------------------------------


def test_a_cut_inside_a_sealed_page_is_not_in_a_log(store: SwapStore, fs: LossyFileSystem, ada: ModelAgent) -> None:
    """Its KV is in a page file: the child needs a record of its own, and nothing was written."""
    before = fs.live_files()
    _, note = ada.fork("cam", 200)
    assert isinstance(store.perform(ForkLogOp(note)).error, RecordInvalid)
    _, note = replace(ada, tokens=(*ada.tokens, 1)).fork("cam")
    assert isinstance(store.perform(ForkLogOp(note)).error, RecordInvalid)
    _, note = replace(ada, branch=7).fork("cam")
    assert isinstance(store.perform(ForkLogOp(note)).error, RecordInvalid)
    assert fs.live_files() == before


def test_a_name_that_is_taken_is_left_alone(store: SwapStore, fs: LossyFileSystem, ada: ModelAgent) -> None:
    """By an agent, by one that has only a note, or by a file nobody knows."""
    good(store, ModelAgent("bob"), 10)
    fork(store, ada, "cam")
    fs.poke(log_of("dan"), b"what is this")
    for name in ("bob", "cam", "dan"):
        assert isinstance(store.perform(ForkLogOp(ada.fork(name)[1])).error, RecordInvalid)
    assert fs.read(log_of("dan")) == b"what is this"


def test_a_parent_never_waits_for_more_than_so_many_logs(store: SwapStore, ada: ModelAgent) -> None:
    """P35: a burst without a pause is not paid for by whoever comes next; those beyond it have records themselves."""
    for number in range(MAX_WAITING):
        fork(store, ada, f"child {number}")
    assert isinstance(store.perform(ForkLogOp(ada.fork("one more")[1])).error, RecordInvalid)
    store.idle()
    fork(store, ada, "one more")


def test_a_log_that_is_not_what_was_committed_is_nobodys_beginning(
    store: SwapStore, fs: LossyFileSystem, ada: ModelAgent
) -> None:
    """A short log is none to lean on."""
    fs.poke(log_of("ada"), fs.read(log_of("ada"))[:-1])
    assert isinstance(store.perform(ForkLogOp(ada.fork("cam")[1])).error, LogDamaged)


def test_pages_must_be_durable_and_stay(store: SwapStore, fs: LossyFileSystem, ada: ModelAgent) -> None:
    """P5: a note names no page without a file, and its pages cannot be deleted."""
    page = ada.pages[0][0].page_id
    fork(store, ada, "cam")
    assert store.perform(DeleteLogOp("default", "ada")).error is None
    assert isinstance(store.perform(DeletePageOp(page)).error, PageReferenced)
    bob = good(store, ModelAgent("bob"), 256)
    fs.unlink(names().page_path(FINGERPRINT, bob.pages[0][0].page_id))
    store._forget_page(bob.pages[0][0].page_id)
    assert isinstance(store.perform(ForkLogOp(bob.fork("dan")[1])).error, PageNotDurable)


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_rotten_kv_costs_the_open_page_and_no_token(store: SwapStore, fs: LossyFileSystem, ada: ModelAgent) -> None:
    """P3: nothing rotten is served; text and ids are in memory, KV is computed again."""
    child = fork(store, ada, "cam")
    data = bytearray(fs.read(log_of("ada")))
    data[-5] ^= 1
    fs.poke(log_of("ada"), bytes(data))
    store.idle()
    image = store._logs.image(("default", "cam"))
    assert image is not None
    assert image.branch.tokens == child.tokens
    assert image.branch.computed_tokens == 256
    assert len(image.branch.text) == len(child.tokens)


def test_a_removed_file_of_notes_costs_nothing(store: SwapStore, fs: LossyFileSystem, ada: ModelAgent) -> None:
    """P20: somebody deletes it under a running daemon: logs are made at once, and the next fork begins a new one."""
    cam = fork(store, ada, "cam")
    fs.unlink(FORKS)
    dan = fork(store, ada, "dan")
    assert fs.stat(log_of("cam")) is not None
    _, again = killed(fs, store)
    reads(again, cam)
    reads(again, dan)
    again.close()


def test_a_note_that_rotted_is_put_aside_and_said(disks: Path) -> None:
    """P3: a flipped bit in a note makes no agent, and the next start has nothing more to say."""
    for at in (3, 20, 60):
        fs = LossyFileSystem(disks / f"{at}")
        store = open_store(fs)[2]
        ada = good(store, ModelAgent("ada"), 300)
        fork(store, ada, "cam")
        fork(store, ada, "dan")
        store._catalog.close()
        fs.reboot_clean()
        data = bytearray(fs.read(FORKS))
        data[at] ^= 1
        fs.poke(FORKS, bytes(data))
        _, report, again = open_store(fs)
        assert {name for _, name in report.agents} == {"ada"}
        assert any("put aside" in fact for fact in report.facts)
        again.close()
        assert not open_store(fs)[1].facts


def test_notes_of_which_none_can_be_read_are_said(disks: Path) -> None:
    """P8: nothing tells a file that somebody else wrote from a note that was being written; neither goes in silence."""
    fs = LossyFileSystem(disks)
    store = open_store(fs)[2]
    fork(store, good(store, ModelAgent("ada"), 300), "cam")
    store._catalog.close()
    fs.reboot_clean()
    fs.poke(FORKS, bytes(5000))
    _, report, again = open_store(fs)
    assert {name for _, name in report.agents} == {"ada"}
    assert [fact for fact in report.facts if "forks.log" in fact]
    again.close()
    assert not open_store(fs)[1].facts


def test_a_parent_that_was_changed_by_others_makes_no_child(fs: LossyFileSystem) -> None:
    """P3: an older copy of a log does not end as the note says: the fork is lost, and said to be."""
    store = open_store(fs)[2]
    ada = good(store, ModelAgent("ada"), 300)
    old = fs.read(log_of("ada"))
    ada = good(store, ada, 20)
    fork(store, ada, "cam")
    store._catalog.close()
    fs.reboot_clean()
    fs.poke(log_of("ada"), old)
    _, report, again = open_store(fs)
    assert ("default", "cam") not in report.agents
    assert any("is lost" in fact for fact in report.facts)
    again.close()


def test_a_dry_run_says_what_a_start_would_do(store: SwapStore, fs: LossyFileSystem, ada: ModelAgent) -> None:
    """P8: `kvd doctor` sees forks that wait, and touches nothing."""
    fork(store, ada, "cam")
    before = fs.live_files()
    report = recover(DataFolder(ROOT, fs), FINGERPRINT, layouts, fs, dry_run=True)
    assert any("finished at the next start" in fact for fact in report.facts)
    assert fs.live_files() == before


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x90", b"\x91\x01", ForkNote("n", "p", "c", 0, 1, 1, 1.0).encode()[:-1], b"\x81\x01\x02"],
)
def test_what_is_no_note_is_refused(payload: bytes) -> None:
    """P3: whatever the bytes."""
    with pytest.raises(RecordInvalid):
        decode_note(payload)


def test_a_note_comes_back_as_it_was() -> None:
    """Every field."""
    note = ForkNote("ns", "ada", "cam", 3, 5, 1, 2.5, {"ttl_s": None, "pinned": False}, 9, b"0123456789abcdef")
    assert decode_note(note.encode()) == note
    with pytest.raises(RecordInvalid):
        replace(note, meta={"what": object()}).encode()
