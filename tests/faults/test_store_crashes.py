"""Power loss at every operation of the disk: what was acknowledged is there, bit for bit (P2, P3, P5, P6)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvd.store.fs import folder_bytes, is_temp_name
from kvd.store.records import PageEntry
from kvd.store.recovery import recover
from kvd.store.recovery_report import RecoveryReport
from kvd.store.swap_ops import (
    AppendRecordOp,
    CompactLogOp,
    DeleteLogOp,
    DeletePageOp,
    ForkLogOp,
    ReadPageOp,
    ReadTailOp,
    SwapOp,
    WritePageOp,
)
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem, SimulatedCrash
from tests.support.store_data import (
    FINGERPRINT,
    LAYOUTS,
    ROOT,
    ModelAgent,
    header_of,
    layouts,
    open_store,
)

HALF = ".page.0123456789ab.tmp"
CATALOG_FATES = ("keep", "delete", "older", "garbage")


@dataclass
class Ledger:
    """What the disk promised: states of each agent by record number, the last acknowledged one, and deletions.

    `maybe` is what was under way when the crash came: it may or may not have happened.
    """

    states: dict[str, dict[int, ModelAgent]] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)
    maybe_deleted: set[str] = field(default_factory=set)
    done: bool = False


def perform(store: SwapStore, op: SwapOp) -> None:
    """Do it; it must succeed."""
    result = store.perform(op)
    assert result.error is None, result.error


def commit_turn(store: SwapStore, ledger: Ledger, agent: ModelAgent, tokens: int) -> ModelAgent:
    """Pages first, then the record; the ledger is updated when the disk has answered."""
    after, record, sealed = agent.turn(tokens)
    ledger.states.setdefault(agent.name, {})[after.seq] = after
    for group, page in sealed:
        perform(store, WritePageOp(header_of(page, group), LAYOUTS[group], content_of(after, group, page)))
    perform(store, AppendRecordOp(record))
    ledger.acknowledged[agent.name] = after.seq
    return after


def commit_fork(store: SwapStore, ledger: Ledger, agent: ModelAgent, name: str, tokens: int) -> ModelAgent:
    """A fork, by its note alone."""
    child, note = agent.fork(name, tokens)
    ledger.states.setdefault(name, {})[child.seq] = child
    perform(store, ForkLogOp(note))
    ledger.acknowledged[name] = child.seq
    return child


def content_of(agent: ModelAgent, group: int, page: PageEntry) -> bytes:
    """What the page's file must hold."""
    number = page.runs[0].start // 256
    return agent.page_bytes(group, number)


def workload(fs: LossyFileSystem, ledger: Ledger, *, tidy: bool = True) -> None:
    """Agents, turns that seal pages and turns that do not, forks, compaction, deletions with and without pages."""
    _, _, store = open_store(fs)
    try:
        script(fs, store, ledger)
        if tidy:
            store.close()
        ledger.done = True
    finally:
        store._catalog.close()  # as the death of a process does: SQLite's locks go, nothing is committed


def script(fs: LossyFileSystem, store: SwapStore, ledger: Ledger) -> None:
    """The operations of `workload`."""
    ada = commit_turn(store, ledger, ModelAgent("ada"), 200)
    bob = commit_turn(store, ledger, ModelAgent("bob"), 300)
    ada = commit_turn(store, ledger, ada, 100)
    store.idle()
    fs.remember_catalog()
    cam = commit_fork(store, ledger, ada, "cam", 280)  # noted only: what comes next makes its log
    perform(store, CompactLogOp("default", "ada"))
    ada = commit_turn(store, ledger, ada, 1)
    commit_fork(store, ledger, ada, "dan", 301)
    commit_turn(store, ledger, cam, 30)
    ledger.maybe_deleted.add("dan")
    perform(store, DeleteLogOp("default", "dan"))
    del ledger.acknowledged["dan"]
    ledger.states["dan"] = {}
    ledger.maybe_deleted.add("bob")
    perform(store, DeleteLogOp("default", "bob"))
    del ledger.acknowledged["bob"]
    ledger.states["bob"] = {}
    for group in range(len(LAYOUTS)):
        for page in bob.pages[group]:
            perform(store, DeletePageOp(page.page_id))
    ada = commit_turn(store, ledger, ada, 300)
    commit_fork(store, ledger, ada, "eve", 512)


def check(fs: LossyFileSystem, ledger: Ledger) -> RecoveryReport:
    """Recover, then compare with the ledger and read everything back."""
    folder, report, store = open_store(fs)
    try:
        for name in ("ada", "bob", "cam", "dan", "eve"):
            image = report.agents.get(("default", name))
            acknowledged = ledger.acknowledged.get(name, 0)
            if image is None:
                assert acknowledged == 0 or name in ledger.maybe_deleted, f"{name} lost {acknowledged} records"
                continue
            assert acknowledged <= image.seq <= acknowledged + 1
            assert image.seq in ledger.states.get(name, {}), f"{name} came back"
            compare(store, ledger.states[name][image.seq])
        named = set().union(*(image.page_ids() for image in report.agents.values()))
        assert set(report.pages) == named, "a named page is missing, or an orphan is served"
        assert not report.missing_pages
        assert not [trouble for trouble in report.log_troubles if trouble.kind == "unreadable"]
        for path in fs.live_files():
            assert not is_temp_name(path.name)
            if path.suffix == ".safetensors" and "quarantine" not in path.parts:
                assert path.stem in named, "an orphan is left"
        assert report.used_bytes == folder_bytes(fs, ROOT) == store.statistics().used_bytes
    finally:
        store.close()
        folder.close()
    return report


def compare(store: SwapStore, agent: ModelAgent) -> None:
    """Everything the agent's state names is there, bit for bit."""
    image = store._logs.image(("default", agent.name))
    assert image.branch.tokens == agent.tokens
    for group, layout in enumerate(LAYOUTS):
        assert image.branch.segment(group).pages == agent.pages[group]
        for page in agent.pages[group]:
            result = store.perform(ReadPageOp(header_of(page, group), layout))
            assert result.error is None, result.error
            assert result.payload == content_of(agent, group, page)
        tail = store.perform(ReadTailOp("default", agent.name, agent.branch, group))
        assert tail.payload == agent.tail(group), tail.error


def operations_of_workload(fast_tmp: Path) -> int:
    """How many operations of the disk the whole workload takes."""
    fs = LossyFileSystem(fast_tmp / "count")
    ledger = Ledger()
    workload(fs, ledger)
    assert ledger.done
    return fs.operations


@pytest.mark.parametrize("fate", CATALOG_FATES)
def test_power_loss_at_every_operation_keeps_what_was_acknowledged(
    fast_tmp: Path, tally: Counter[str], fate: str
) -> None:
    """P2 P3 P5 P6: whatever the catalog's fate, no acknowledged turn, page or byte of a tail is lost."""
    total = operations_of_workload(fast_tmp)
    crashes = 0
    for at in range(1, total + 1):
        fs = LossyFileSystem(fast_tmp / f"side-{at}", seed=at * 7919 + CATALOG_FATES.index(fate))
        fs.crash_at = at
        fs.catalog_after_crash = fate
        ledger = Ledger()
        with pytest.raises(SimulatedCrash):
            workload(fs, ledger)
        crashes += 1
        fs.crash()
        check(fs, ledger)
    assert crashes == total > 100
    tally["power losses, in the store"] += crashes


def test_a_kill_and_then_power_loss_keep_what_was_served_in_between(fast_tmp: Path, tally: Counter[str]) -> None:
    """P2: what recovery found after kill -9 was perhaps only in the system's cache; once served, it is durable."""
    for at in range(1, operations_of_workload(fast_tmp) + 1):
        fs = LossyFileSystem(fast_tmp / f"side-{at}", seed=at)
        fs.crash_at = at
        ledger = Ledger()
        with pytest.raises(SimulatedCrash):
            workload(fs, ledger)
        fs.reboot_clean()
        served = check(fs, ledger)
        fs.crash()
        assert check(fs, ledger).agents == served.agents
        tally["power losses, in the store"] += 1


def test_a_finished_workload_survives_a_crash_without_any_farewell(fast_tmp: Path) -> None:
    """P2: a stop has nothing left to do: without `close`, the last acknowledged turn is there."""
    for seed in range(20):
        fs = LossyFileSystem(fast_tmp / f"side-{seed}", seed=seed)
        ledger = Ledger()
        workload(fs, ledger, tidy=False)
        fs.crash()
        report = check(fs, ledger)
        assert report.agents["default", "ada"].seq == ledger.acknowledged["ada"]
        assert ("default", "bob") not in report.agents


def test_recovery_killed_anywhere_can_be_run_again(fast_tmp: Path, tally: Counter[str]) -> None:
    """P5: recovery of a messy folder, killed at each of its operations, ends in the same state when run again."""
    total = operations_of_workload(fast_tmp)
    tried = 0
    for at in range(3, total, 5):
        step = 1
        while True:
            fs = LossyFileSystem(fast_tmp / f"side-{at}-{step}", seed=at)
            fs.crash_at = at
            ledger = Ledger()
            with pytest.raises(SimulatedCrash):
                workload(fs, ledger)
            fs.crash()
            fs.crash_at = step
            try:
                open_store(fs)[2].close()
            except SimulatedCrash:
                fs.crash()
                check(fs, ledger)
                tried += 1
            else:
                break
            step += 3
    assert tried > 50
    tally["power losses, in recovery"] += tried


def test_recovery_twice_is_recovery_once(fast_tmp: Path) -> None:
    """P8: a second run finds nothing left to do and the same agents."""
    total = operations_of_workload(fast_tmp)
    for at in range(1, total, 4):
        fs = LossyFileSystem(fast_tmp / f"side-{at}", seed=at)
        fs.crash_at = at
        with pytest.raises(SimulatedCrash):
            workload(fs, Ledger())
        fs.crash()
        folder, first, store = open_store(fs)
        store.close()
        files = fs.live_files()
        second = recover(folder, FINGERPRINT, layouts, fs)
        folder.close()
        assert second.agents == first.agents
        assert second.pages == first.pages
        assert not any([second.orphans, second.temp_files_deleted, second.log_troubles, second.quarantined])
        assert not any([second.adopted_pages, second.dropped_rows, second.facts])
        assert fs.live_files() == files


def test_a_dry_run_changes_nothing_and_says_what_would_happen(fast_tmp: Path) -> None:
    """P8: `kvd doctor` sees temporary files, orphans and torn logs without touching them."""
    fs = LossyFileSystem(fast_tmp / "side")
    ledger = Ledger()
    workload(fs, ledger)
    folder, _, store = open_store(fs)
    _, _, sealed = ModelAgent("eve").turn(256)
    for group, page in sealed:
        perform(store, WritePageOp(header_of(page, group), LAYOUTS[group], ModelAgent("eve").page_bytes(group, 0)))
    store.close()
    swap = folder.page_path(FINGERPRINT, sealed[0][1].page_id).parent
    fs.poke(swap / HALF, b"half a page")
    log = folder.log_path(FINGERPRINT, "default", "ada")
    handle = fs.open_append(log)
    fs.write(handle, b"\xffKVL torn")
    fs.close(handle)
    before = fs.live_files()
    report = recover(folder, FINGERPRINT, layouts, fs, dry_run=True)
    assert fs.live_files() == before
    assert {page.page_id for _, page in sealed} == set(report.orphans)
    assert report.orphans_deleted == 0
    assert len(report.temp_files_deleted) == 1
    assert [trouble.kind for trouble in report.log_troubles] == ["torn"]
    real = recover(folder, FINGERPRINT, layouts, fs)
    assert real.orphans_deleted == 2
    gone = {swap / HALF, *(folder.page_path(FINGERPRINT, page.page_id) for _, page in sealed)}
    assert set(before) - set(fs.live_files()) == gone
    folder.close()
