"""Recovery: what it adopts, deletes, puts aside, reports, and never touches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.store.layout import DataFolder
from kvd.store.recovery import recover
from kvd.store.recovery_report import RecoveryReport
from kvd.store.swap_ops import AppendRecordOp, CompactLogOp, ReadPageOp, WritePageOp
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import CATALOG, LossyFileSystem
from tests.support.store_data import (
    FINGERPRINT,
    LAYOUTS,
    ROOT,
    ModelAgent,
    header_of,
    hex_of,
    layouts,
    memory_folder,
    open_store,
)


@pytest.fixture
def fs() -> Iterator[LossyFileSystem]:
    """A disk with a data folder that holds two agents: `ada` (2 pages a group, tail) and `bob` (1 page, no tail)."""
    for folder in memory_folder():
        disk = LossyFileSystem(folder / "side")
        _, _, store = open_store(disk)
        for name, turns in (("ada", (300, 250)), ("bob", (256,))):
            agent = ModelAgent(name)
            for tokens in turns:
                agent = commit(store, agent, tokens)
        store.close()
        yield disk


def commit(store: SwapStore, agent: ModelAgent, tokens: int) -> ModelAgent:
    """One durable turn."""
    after, record, sealed = agent.turn(tokens)
    for group, page in sealed:
        payload = after.page_bytes(group, page.runs[0].start // 256)
        assert store.perform(WritePageOp(header_of(page, group), LAYOUTS[group], payload)).error is None
    result = store.perform(AppendRecordOp(record))
    assert result.error is None, result.error
    return after


def run(fs: LossyFileSystem) -> RecoveryReport:
    """Recover."""
    return recover(folder_of(fs), FINGERPRINT, layouts, fs)


def folder_of(fs: LossyFileSystem) -> DataFolder:
    """Names."""
    return DataFolder(ROOT, fs)


def log_of(fs: LossyFileSystem, agent: str) -> Path:
    """The agent's log."""
    return folder_of(fs).log_path(FINGERPRINT, "default", agent)


def page_of(fs: LossyFileSystem, agent: str, group: int, number: int) -> Path:
    """The page's file."""
    return folder_of(fs).page_path(FINGERPRINT, ModelAgent(agent).entry(group, number).page_id)


def flip(fs: LossyFileSystem, path: Path, at: int) -> None:
    """Flip a bit, durably."""
    data = bytearray(fs.read(path))
    data[at] ^= 4
    fs.poke(path, bytes(data))


def test_a_clean_folder_has_nothing_to_report(fs: LossyFileSystem) -> None:
    """All agents and pages, no work done."""
    report = run(fs)
    assert {ref: image.seq for ref, image in report.agents.items()} == {("default", "ada"): 2, ("default", "bob"): 1}
    assert len(report.pages) == 6
    assert report.swap_bytes == sum(report.file_bytes.values())
    assert not any([report.missing_pages, report.orphans, report.log_troubles, report.facts, report.adopted_pages])


@pytest.mark.parametrize("fate", ["delete", "garbage", "older"])
def test_a_lost_catalog_is_rebuilt_from_logs_and_headers(fs: LossyFileSystem, fate: str) -> None:
    """P5: every page is adopted again with the header its file states, whatever happened to the catalog."""
    before = run(fs)
    fs.remember_catalog()
    _, _, store = open_store(fs)
    commit(store, ModelAgent("eve"), 256)
    store.close()
    side = fs.database_path(folder_of(fs).catalog_path(FINGERPRINT))
    if fate == "garbage":
        side.write_bytes(b"not a database")
    else:
        fs.catalog_after_crash = fate
        fs._treat_catalog()
    report = run(fs)
    assert report.adopted_pages == (2 if fate == "older" else 8)
    assert report.pages.items() > before.pages.items()
    assert bool(report.facts) == (fate != "older")
    again = run(fs)
    assert not any([again.adopted_pages, again.facts, again.dropped_rows])
    assert again.pages == report.pages


def test_orphans_and_temporary_files_are_deleted_and_foreign_files_stay(fs: LossyFileSystem) -> None:
    """P5 P25: a page no log names goes, with its bytes reported; files kvd did not make are counted and kept."""
    _, _, store = open_store(fs)
    eve, _, sealed = ModelAgent("eve").turn(256)
    for group, page in sealed:
        store.perform(WritePageOp(header_of(page, group), LAYOUTS[group], eve.page_bytes(group, 0)))
    store.close()
    swap = folder_of(fs).swap_folder(FINGERPRINT)
    temp = page_of(fs, "ada", 0, 0).with_name(".x.safetensors.0123456789ab.tmp")
    foreign = swap / "film.mov"
    misplaced = swap / f"{hex_of('misplaced')}.safetensors"
    for path in (temp, foreign, misplaced):
        fs.poke(path, b"12345")
    used = run_used(fs)
    report = run(fs)
    assert set(report.orphans) == {page.page_id for _, page in sealed}
    assert report.orphans_deleted == 2
    assert report.orphan_bytes > sum(layout.payload_bytes for layout in LAYOUTS)
    assert len(report.temp_files_deleted) == 1
    assert {Path(name).name for name in report.foreign_files} == {foreign.name, misplaced.name}
    assert fs.stat(temp) is None
    assert fs.stat(foreign) is not None
    assert fs.stat(misplaced) is not None
    assert report.dropped_rows == 2
    assert report.used_bytes == used - report.orphan_bytes - 5


def test_unfinished_files_beside_the_pages_are_removed_too(fs: LossyFileSystem) -> None:
    """P25: settings and constants are written as pages are, so a crash leaves the same kind of litter."""
    ours = [ROOT / f".{name}.0123456789ab.tmp" for name in ("engine.json", "VERSION", "CACHEDIR.TAG")]
    fs.mkdir(ROOT / "conditioning")
    ours.append(ROOT / "conditioning" / ".00.safetensors.0123456789ab.tmp")
    kept = [ROOT / ".somebody.else.0123456789ab.tmp", ROOT / "conditioning" / "00.safetensors"]
    for path in (*ours, *kept):
        fs.poke(path, b"x")
    assert {ROOT / name for name in run(fs).temp_files_deleted} == set(ours)
    assert [fs.stat(path) for path in ours] == [None] * 4
    assert None not in [fs.stat(path) for path in kept]


def run_used(fs: LossyFileSystem) -> int:
    """Bytes under the root now."""
    return folder_of(fs).used_bytes()


def test_pages_with_wrong_files_are_missing_with_a_reason(fs: LossyFileSystem) -> None:
    """P3 P4: gone, cut, of another page, not a page: never among the pages that can be served; bad files are kept."""
    fs.unlink(page_of(fs, "ada", 0, 0))
    cut = page_of(fs, "ada", 0, 1)
    fs.poke(cut, fs.read(cut)[:-1])
    other = page_of(fs, "ada", 1, 0)
    fs.poke(other, fs.read(page_of(fs, "ada", 1, 1)))
    junk = page_of(fs, "bob", 0, 0)
    fs.poke(junk, b"\xff" * 100)
    fs.database_path(folder_of(fs).catalog_path(FINGERPRINT)).unlink()
    report = run(fs)
    reasons = dict(report.missing_pages)
    assert reasons[ModelAgent("ada").entry(0, 0).page_id] == "no file"
    assert reasons[ModelAgent("ada").entry(0, 1).page_id].endswith("bytes")
    assert reasons[ModelAgent("ada").entry(1, 0).page_id] == "header of another page"
    assert reasons[ModelAgent("bob").entry(0, 0).page_id] == "header unreadable"
    assert len(report.pages) == 2
    assert len(report.quarantined) == 3
    assert set(report.agents) == {("default", "ada"), ("default", "bob")}
    assert report.quarantine_bytes > 0


def test_a_page_of_other_weights_is_not_adopted(fs: LossyFileSystem) -> None:
    """P7: a folder renamed to another fingerprint serves nothing: logs do not continue its seed."""
    other = hex_of("other weights")
    fs.rename(ROOT / FINGERPRINT, ROOT / other)
    report = recover(folder_of(fs), other, layouts, fs)
    assert not report.agents
    assert not report.pages
    assert {trouble.kind for trouble in report.log_troubles} == {"corrupt", "torn"}


def test_disk_use_is_counted_before_the_first_write(fs: LossyFileSystem) -> None:
    """P6: after a crash the figures start at what is there."""
    fs.crash()
    _, report, store = open_store(fs)
    assert report.used_bytes == folder_of(fs).used_bytes() > 0
    assert store.statistics().used_bytes == report.used_bytes
    assert store.statistics().swap_bytes == report.swap_bytes > 0
    assert store.statistics().bytes_written_lifetime > 0
    store.close()


def test_a_torn_end_is_cut_and_reported(fs: LossyFileSystem) -> None:
    """P8: an append that never finished costs only itself."""
    data = fs.read(log_of(fs, "ada"))
    fs.poke(log_of(fs, "ada"), data + data[:100])
    report = run(fs)
    assert [(t.kind, t.lost_bytes, t.agent) for t in report.log_troubles] == [("torn", 100, ("default", "ada"))]
    assert fs.read(log_of(fs, "ada")) == data
    assert not report.quarantined


def test_a_rotten_middle_keeps_what_is_before_and_puts_the_rest_aside(fs: LossyFileSystem) -> None:
    """P4 P8: good records before it are served, the rest is in quarantine, pages it named too, and it is said."""
    data = fs.read(log_of(fs, "ada"))
    flip(fs, log_of(fs, "ada"), 60)
    report = run(fs)
    assert ("default", "ada") not in report.agents
    assert [trouble.kind for trouble in report.log_troubles] == ["corrupt"]
    assert fs.stat(log_of(fs, "ada")) is not None, "a log is never deleted"
    aside = {name: fs.read(folder_of(fs).quarantine_folder(FINGERPRINT) / name) for name in report.quarantined}
    assert len(aside) == 1 + 4
    assert any(len(content) == len(data) for content in aside.values())
    assert report.orphans_deleted == 0
    assert len(report.orphans) == 4
    again = run(fs)
    assert not any([again.log_troubles, again.orphans])


def test_a_rotten_last_record_is_told_from_a_torn_one_by_the_catalog(fs: LossyFileSystem) -> None:
    """P4 P8: the catalog knows that the record was committed, so this is damage, not an unfinished append."""
    flip(fs, log_of(fs, "ada"), len(fs.read(log_of(fs, "ada"))) - 1)
    report = run(fs)
    assert [trouble.kind for trouble in report.log_troubles] == ["corrupt"]
    assert report.agents["default", "ada"].seq == 1
    assert report.quarantined


def test_an_older_copy_of_a_log_is_reported(fs: LossyFileSystem) -> None:
    """P8: a log restored from a backup is served as far as it goes, and said to be stale, once."""
    old = fs.read(log_of(fs, "bob"))
    _, report, store = open_store(fs)
    bob, _, _ = ModelAgent("bob").turn(256)
    commit(store, bob, 5)
    store.close()
    fs.poke(log_of(fs, "bob"), old)
    report = run(fs)
    assert [(trouble.kind, trouble.agent) for trouble in report.log_troubles] == [("stale", ("default", "bob"))]
    assert report.agents["default", "bob"].seq == 1
    assert not run(fs).log_troubles


def test_a_vanished_log_is_reported_and_its_pages_are_kept_aside(fs: LossyFileSystem) -> None:
    """P8: the catalog knew the agent; nothing is deleted in silence."""
    fs.unlink(log_of(fs, "bob"))
    report = run(fs)
    assert [(trouble.kind, trouble.agent) for trouble in report.log_troubles] == [("stale", ("default", "bob"))]
    assert report.orphans_deleted == 0
    assert len(report.quarantined) == 2


def test_an_unreadable_log_costs_nothing_but_itself(fs: LossyFileSystem) -> None:
    """EIO on one log: the others are served, and no page is deleted, since it may be the unreadable log's."""
    log = log_of(fs, "ada")
    fs.fail = lambda number, name, path: 5 if name == "read" and path == log else None
    report = run(fs)
    fs.fail = lambda number, name, path: None
    assert set(report.agents) == {("default", "bob")}
    assert [trouble.kind for trouble in report.log_troubles] == ["unreadable"]
    assert len(report.orphans) == 4
    assert report.orphans_deleted == 0
    assert set(run(fs).agents) == {("default", "ada"), ("default", "bob")}


def test_a_log_under_another_agents_name_is_not_taken_for_it(fs: LossyFileSystem) -> None:
    """P10: a log proves whose it is."""
    fs.poke(log_of(fs, "bob"), fs.read(log_of(fs, "ada")))
    report = run(fs)
    assert set(report.agents) == {("default", "ada")}


def test_pages_of_unknown_formats_are_kept(fs: LossyFileSystem) -> None:
    """P9: losing a format's constants does not delete what it would take to read it again."""
    report = recover(folder_of(fs), FINGERPRINT, lambda group, format_id: None, fs)
    assert {group for group, _ in report.unknown_formats} == {0, 1}
    assert len(report.pages) == 6
    assert not report.orphans


def test_other_models_are_left_alone(fs: LossyFileSystem) -> None:
    """P9: recovery of one model does not touch another's folder."""
    other = hex_of("other model")
    before = {path: data for path, data in fs.live_files().items() if FINGERPRINT in path.parts}
    report = recover(folder_of(fs), other, layouts, fs)
    after = {path: data for path, data in fs.live_files().items() if FINGERPRINT in path.parts}
    assert not report.agents
    assert before == after
    assert report.used_bytes > report.swap_bytes + report.log_bytes


def test_a_page_served_after_recovery_is_the_page(fs: LossyFileSystem) -> None:
    """Headers from files and from the catalog are equal, and both read the page."""
    with_catalog = run(fs).pages
    for path in fs.side.rglob(f"{CATALOG}*"):
        path.unlink()
    _, report, store = open_store(fs)
    assert report.pages == with_catalog
    for header in report.pages.values():
        assert store.perform(ReadPageOp(header, LAYOUTS[header.group])).error is None
    assert store.perform(CompactLogOp("default", "ada")).error is None
    store.close()
