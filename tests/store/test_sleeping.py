"""Agents whose logs are not read at start: who they are, what that reads, and what waking them finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.ids import PageId
from kvd.store.agent_log import FRAME
from kvd.store.catalog import AgentRow, CatalogContents, open_catalog
from kvd.store.errors import DiskFault, LogCorrupt, PageReferenced
from kvd.store.recovery import recover
from kvd.store.recovery_report import RecoveryReport
from kvd.store.sleeping import sleeping
from kvd.store.swap_ops import AppendRecordOp, DeleteLogOp, DeletePageOp, ReadTailOp, WakeLogOp
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import FINGERPRINT, ModelAgent, layouts, memory_folder, open_store
from tests.support.store_turns import good, names, reads

AGENTS = ("ada", "bob", "eve")
TOKENS = 300
"""One page of each group, and a tail."""


@pytest.fixture
def fs() -> Iterator[LossyFileSystem]:
    """An empty disk."""
    for folder in memory_folder():
        yield LossyFileSystem(folder / "side")


@pytest.fixture
def agents(fs: LossyFileSystem) -> dict[str, ModelAgent]:
    """Three agents of two turns each, left by a store that was closed."""
    _, _, store = open_store(fs)
    made = {name: good(store, good(store, ModelAgent(name), TOKENS), 20) for name in AGENTS}
    store.close()
    return made


def log_of(name: str) -> Path:
    """Its log."""
    return names().log_path(FINGERPRINT, "default", name)


def start(fs: LossyFileSystem, *, read_agents: int = 0) -> tuple[RecoveryReport, SwapStore]:
    """Recover and make a store; nobody is read who need not be."""
    _, report, store = open_store(fs, read_agents=read_agents)
    return report, store


def refs(*agents: str) -> set[tuple[str, str]]:
    """Their names."""
    return {("default", name) for name in agents}


def test_a_start_reads_28_bytes_of_each_log_and_no_page(fs: LossyFileSystem, agents: dict[str, ModelAgent]) -> None:
    """Nothing is read before it is needed: the catalog, and one record's head for each agent."""
    fs.log.clear()
    report, store = start(fs)
    assert set(report.asleep) == refs(*AGENTS)
    assert not report.agents
    assert (report.reads, report.read_bytes) == (len(AGENTS), len(AGENTS) * FRAME.size)
    assert [line for line in fs.log if "safetensors" in line] == []
    assert not report.orphans
    assert store.statistics().durable_pages == len(AGENTS) * 2
    store.close()


def test_a_whole_read_of_the_folder_says_the_same(fs: LossyFileSystem, agents: dict[str, ModelAgent]) -> None:
    """P5 P6: pages, bytes and lists are those of a start that reads every log."""
    lazy, store = start(fs)
    store.close()
    eager, store = start(fs, read_agents=99)
    store.close()
    assert set(eager.agents) == set(lazy.asleep)
    assert (lazy.pages, lazy.file_bytes, lazy.usage) == (eager.pages, eager.file_bytes, eager.usage)
    for ref, agent in lazy.asleep.items():
        image = eager.agents[ref]
        assert set(agent.page_ids) == image.page_ids()
        assert (agent.row.tokens, agent.row.seq) == (len(image.branch.tokens), image.seq)
        assert agent.summary.computed_tokens == image.branch.computed_tokens
        assert agent.summary.text_bytes == len(image.branch.text)


def test_an_agent_that_wakes_is_the_one_that_slept(fs: LossyFileSystem, agents: dict[str, ModelAgent]) -> None:
    """P3 P14: its image, pages and tail, bit for bit; the next turn goes on where it was."""
    _, store = start(fs)
    woken = store.perform(WakeLogOp("default", "ada"))
    assert woken.error is None
    assert woken.image is not None
    assert woken.image.branch.tokens == agents["ada"].tokens
    assert {header.page_id for header in woken.value} == woken.image.page_ids()  # type: ignore[attr-defined]
    reads(store, agents["ada"])
    again = store.perform(WakeLogOp("default", "ada"))
    assert again.image == woken.image
    agents["ada"] = good(store, agents["ada"], 10)
    store.close()
    report, store = start(fs)
    assert report.asleep["default", "ada"].row.seq == agents["ada"].seq
    store.close()


def test_whoever_works_on_a_sleeping_log_wakes_it(fs: LossyFileSystem, agents: dict[str, ModelAgent]) -> None:
    """A record for an agent nobody woke continues its log; it is never taken for new."""
    _, store = start(fs)
    after = good(store, agents["bob"], 30)
    assert store.perform(ReadTailOp("default", "eve", 0, 1)).payload == agents["eve"].tail(1)
    store.close()
    report, store = start(fs, read_agents=99)
    assert report.agents["default", "bob"].branch.tokens == after.tokens
    store.close()


def test_pages_of_sleepers_are_kept_and_go_with_them(fs: LossyFileSystem, agents: dict[str, ModelAgent]) -> None:
    """P25: a page that a sleeper's log names is not deleted; when the sleeper is deleted it can be."""
    _, store = start(fs)
    page = agents["ada"].entry(0, 0).page_id
    assert isinstance(store.perform(DeletePageOp(page)).error, PageReferenced)
    before = store.statistics().log_bytes
    assert store.perform(DeleteLogOp("default", "ada")).error is None
    assert store.perform(DeletePageOp(page)).error is None
    assert store.statistics().log_bytes < before
    store.close()
    report, store = start(fs)
    assert set(report.asleep) == refs("bob", "eve")
    store.close()


# ---- who is read at start all the same -----------------------------------------------------------------------------


def test_agents_used_last_are_read_while_that_is_cheap(fs: LossyFileSystem, agents: dict[str, ModelAgent]) -> None:
    """As many as `read_agents`, and of `read_bytes` together."""
    folder, log_bytes = names(), {name: len(fs.read(log_of(name))) for name in AGENTS}
    folder.fs = fs
    one = recover(folder, FINGERPRINT, layouts, fs, read_agents=1)
    assert set(one.agents) == refs("eve")
    none = recover(folder, FINGERPRINT, layouts, fs, read_agents=9, read_bytes=log_bytes["eve"] - 1)
    assert not none.agents
    two = recover(folder, FINGERPRINT, layouts, fs, read_agents=9, read_bytes=log_bytes["eve"] + log_bytes["bob"])
    assert set(two.agents) == refs("eve", "bob")


def test_what_the_catalog_did_not_hear_of_is_read(fs: LossyFileSystem, agents: dict[str, ModelAgent]) -> None:
    """P2: a record that was durable before a kill, and of which the catalog knows nothing, is not lost."""
    _, store = start(fs)
    fs.remember_catalog()
    after = good(store, agents["ada"], 40)
    store.close()
    fs.catalog_after_crash = "older"
    fs._treat_catalog()
    report, store = start(fs)
    assert set(report.agents) == refs("ada")
    assert report.agents["default", "ada"].branch.tokens == after.tokens
    assert not report.log_troubles
    store.close()


@pytest.mark.parametrize("damage", ["head", "short", "long", "older", "page gone", "page short"])
def test_a_fact_that_disagrees_has_the_log_read(
    fs: LossyFileSystem, agents: dict[str, ModelAgent], damage: str
) -> None:
    """P4 P8: another head, length, state or page file: the catalog's word is not taken, and what is wrong is said."""
    path, data = log_of("ada"), fs.read(log_of("ada"))
    row = start_row(fs, "ada")
    page = names().page_path(FINGERPRINT, agents["ada"].entry(0, 0).page_id)
    match damage:
        case "head":
            flipped = bytearray(data)
            flipped[row.last_offset + 20] ^= 4
            fs.poke(path, bytes(flipped))
        case "short":
            fs.poke(path, data[:-5])
        case "long":
            fs.poke(path, data + b"more")
        case "older":
            fs.poke(path, data[: row.last_offset] + bytes(len(data) - row.last_offset))
        case "page gone":
            fs.unlink(page)
        case "page short":
            fs.poke(page, fs.read(page)[:-1])
    report, store = start(fs)
    assert set(report.agents) | {trouble.agent for trouble in report.log_troubles} == refs("ada")
    assert set(report.asleep) == refs("bob", "eve")
    assert bool(report.log_troubles) != damage.startswith("page")
    assert bool(report.missing_pages) == damage.startswith("page")
    store.close()


def start_row(fs: LossyFileSystem, name: str) -> AgentRow:
    """The catalog's row of an agent."""
    catalog, contents, _ = open_catalog(fs, names().catalog_path(FINGERPRINT), FINGERPRINT)
    catalog.close()
    return contents.agents["default", name]


def test_a_pinned_agent_is_read(fs: LossyFileSystem) -> None:
    """It is to be in RAM."""
    _, _, store = open_store(fs)
    _, record, _ = ModelAgent("ada").turn(20)
    record.meta["pinned"] = True
    assert store.perform(AppendRecordOp(record)).error is None
    store.close()
    report, store = start(fs)
    assert set(report.agents) == refs("ada")
    store.close()


def test_rows_that_do_not_say_enough_vouch_for_nobody() -> None:
    """Rows of an older catalog, and rubbish."""
    row = AgentRow("default", "ada", "x.log", 1, 100, bytes(16), 3, 1, 1.0)
    assert sleeping(row) is None
    assert sleeping(AgentRow("default", "ada", "x.log", 1, 100, bytes(16), 3, 1, 1.0, 0, b"", b"\xc1")) is None
    assert sleeping(AgentRow("default", "ada", "x.log", 1, 100, bytes(16), 3, 1, 1.0, 0, b"123", b"\x90")) is None


def test_rows_of_the_catalog_before_are_taken_over(fs: LossyFileSystem, agents: dict[str, ModelAgent]) -> None:
    """An older kvd's catalog: counters and rows stay, every log is read once, the next start reads none."""
    path = names().catalog_path(FINGERPRINT)
    catalog, contents, _ = open_catalog(fs, path, FINGERPRINT)
    catalog.close()
    make_version_1(fs, path, contents)
    report, store = start(fs)
    assert report.facts == ("catalog made anew: it was of version 1; its rows were taken over",)
    assert set(report.agents) == refs(*AGENTS)
    assert report.counters == contents.counters
    assert report.adopted_pages == 0
    assert not report.log_troubles
    store.close()
    report, store = start(fs)
    assert (report.facts, set(report.asleep)) == ((), refs(*AGENTS))
    store.close()


def make_version_1(fs: LossyFileSystem, path: Path, contents: CatalogContents) -> None:
    """A catalog as the first version had it: rows of agents end with `updated_s`."""
    import sqlite3

    from kvd.store.catalog import _identity, _row_checksum

    real = fs.database_path(path)
    for suffix in ("", "-wal", "-shm"):
        real.with_name(real.name + suffix).unlink(missing_ok=True)
    database = sqlite3.connect(real)
    database.executescript(
        """
        CREATE TABLE pages (page_id TEXT PRIMARY KEY, key TEXT, domain TEXT, grp INTEGER, format_id TEXT, runs TEXT,
            numerics TEXT, page_tokens INTEGER, file_bytes INTEGER, created_s REAL, row_xxh3 BLOB) WITHOUT ROWID;
        CREATE TABLE agents (namespace TEXT, agent TEXT, log_name TEXT, seq INTEGER, log_bytes INTEGER,
            log_checksum BLOB, tokens INTEGER, branches INTEGER, updated_s REAL, row_xxh3 BLOB,
            PRIMARY KEY (namespace, agent)) WITHOUT ROWID;
        CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER, row_xxh3 BLOB) WITHOUT ROWID;
        """
    )
    from dataclasses import astuple

    tables = {
        "pages": [astuple(row) for row in contents.pages.values()],
        "agents": [astuple(row)[:9] for row in contents.agents.values()],
        "counters": list(contents.counters.items()),
    }
    for table, rows in tables.items():
        for row in rows:
            marks = ",".join("?" * (len(row) + 1))
            database.execute(f"INSERT INTO {table} VALUES ({marks})", (*row, _row_checksum(table, row)))
    database.execute(f"PRAGMA user_version={_identity(1, FINGERPRINT)}")
    database.commit()
    database.close()


# ---- what waking may find -------------------------------------------------------------------------------------------


def rot(fs: LossyFileSystem, name: str, offset: int) -> None:
    """Flip a bit of a log."""
    data = bytearray(fs.read(log_of(name)))
    data[offset] ^= 1
    fs.poke(log_of(name), bytes(data))


def test_a_rotten_record_is_found_when_its_agent_wakes(fs: LossyFileSystem, agents: dict[str, ModelAgent]) -> None:
    """P4 P8: what is before it is served, the rest is in quarantine, and the next start has nothing to say."""
    first = start_row(fs, "ada").last_offset
    rot(fs, "ada", first + FRAME.size + 40)
    report, store = start(fs)
    assert set(report.asleep) == refs(*AGENTS), "its head is good: nobody has looked at the rest"
    woken = store.perform(WakeLogOp("default", "ada"))
    assert woken.error is None
    assert woken.image is not None
    assert (woken.image.seq, woken.image.branch.tokens) == (1, agents["ada"].tokens[:TOKENS])
    assert any("committed bytes changed" in fact for fact in woken.facts)
    assert len([path for path in fs.live_files() if "quarantine" in path.parts]) == 1
    after = store.perform(AppendRecordOp(ModelAgent("ada").turn(TOKENS)[0].turn(7)[1]))
    assert after.error is None
    store.close()
    report, store = start(fs)
    assert not report.log_troubles
    assert report.asleep["default", "ada"].row.tokens == TOKENS + 7
    store.close()


def test_a_log_with_nothing_good_costs_its_agent_and_no_other(
    fs: LossyFileSystem, agents: dict[str, ModelAgent]
) -> None:
    """P4: the name is free again, the file is in quarantine, the others wake as ever."""
    rot(fs, "ada", FRAME.size + 40)
    _, store = start(fs)
    error = store.perform(WakeLogOp("default", "ada")).error
    assert isinstance(error, LogCorrupt)
    assert len([path for path in fs.live_files() if "quarantine" in path.parts]) == 1
    for name in ("bob", "eve"):
        assert store.perform(WakeLogOp("default", name)).error is None
        reads(store, agents[name])
    good(store, ModelAgent("ada", salt=1), 10)
    store.close()
    report, store = start(fs)
    assert not report.log_troubles
    assert report.asleep["default", "ada"].row.tokens == 10
    store.close()


def test_a_log_that_the_disk_refuses_to_read_stays_as_it_is(fs: LossyFileSystem, agents: dict[str, ModelAgent]) -> None:
    """P8: what cannot be read is not taken for lost; the next try may succeed."""
    _, store = start(fs)
    fs.fail = lambda number, name, path: 5 if name == "read" and path == log_of("ada") else None
    assert isinstance(store.perform(WakeLogOp("default", "ada")).error, DiskFault)
    fs.fail = lambda number, name, path: None
    assert store.perform(WakeLogOp("default", "ada")).error is None
    reads(store, agents["ada"])
    store.close()


def test_a_page_that_is_another_one_is_not_of_the_agent_that_wakes(
    fs: LossyFileSystem, agents: dict[str, ModelAgent]
) -> None:
    """P4 P10: the catalog's row says another key than the log: the file goes to quarantine, and is not served."""
    page = PageId(agents["ada"].entry(0, 0).page_id)
    _, store = start(fs)
    known = store._pages[page]
    store._pages[page] = type(known)(**{name: getattr(known, name) for name in known.__slots__} | {"key": "0" * 32})
    woken = store.perform(WakeLogOp("default", "ada"))
    assert page not in {header.page_id for header in woken.value}  # type: ignore[attr-defined]
    assert not fs.stat(names().page_path(FINGERPRINT, page))
    store.close()
