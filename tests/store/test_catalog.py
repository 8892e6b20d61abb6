"""The catalog is derived: whatever happens to it, nothing but time is lost, and facts are returned."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.store.catalog import AgentRow, Catalog, CatalogContents, PageRow, open_catalog
from kvd.store.fs import RealFileSystem, folder_bytes
from tests.support.store_data import FINGERPRINT, ModelAgent, header_of, hex_of, memory_folder

FS = RealFileSystem()


@pytest.fixture
def path() -> Iterator[Path]:
    """Where the catalog is."""
    for folder in memory_folder():
        yield folder / "catalog.sqlite3"


def rows() -> tuple[PageRow, AgentRow]:
    """One row of each kind."""
    page = ModelAgent("ada").entry(0, 0)
    agent = AgentRow("default", "ada", "x.log", 3, 1000, bytes(16), 300, 1, 1.5)
    return PageRow.of(header_of(page, 0), file_bytes=1234, created_s=2.5), agent


def filled(path: Path) -> None:
    """Make a catalog with `rows` and close it properly."""
    catalog, _, _ = open_catalog(FS, path, FINGERPRINT)
    page, agent = rows()
    catalog.put_page(page)
    catalog.put_agent(agent)
    catalog.put_counter("bytes_written", 7)
    catalog.commit()
    catalog.close()


def reopen(path: Path, fingerprint: str = FINGERPRINT) -> tuple[CatalogContents, tuple[str, ...]]:
    """Open, read, close."""
    catalog, contents, facts = open_catalog(FS, path, fingerprint)
    catalog.close()
    return contents, facts


def test_rows_come_back_with_their_types(path: Path) -> None:
    """All fields; the page row gives the header back."""
    filled(path)
    contents, facts = reopen(path)
    page, agent = rows()
    assert facts == ()
    assert contents.pages == {page.page_id: page}
    assert contents.pages[page.page_id].header(FINGERPRINT) == header_of(ModelAgent("ada").entry(0, 0), 0)
    assert contents.agents == {("default", "ada"): agent}
    assert contents.counters == {"bytes_written": 7}


def test_it_is_durable_and_private(path: Path) -> None:
    """WAL, synchronous=FULL, 0600 for each of its files (P37); its bytes are counted (P25)."""
    catalog, _, facts = open_catalog(FS, path, FINGERPRINT)
    assert facts == ("catalog made anew: there is none",)
    catalog.put_page(rows()[0])
    catalog.commit()
    settings = [catalog._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    fullfsync = catalog._db.execute("PRAGMA fullfsync").fetchone()[0]
    files = sorted(path.parent.iterdir())
    modes = {stat.S_IMODE(file.stat().st_mode) for file in files}
    total = sum(file.stat().st_size for file in files)
    counted = folder_bytes(FS, path.parent)
    catalog.close()
    assert settings == ["wal", 2]
    assert fullfsync == 1
    assert len(files) == 3
    assert modes == {0o600}
    assert counted == total


def test_uncommitted_rows_are_forgotten(path: Path) -> None:
    """`rollback` and a close without `commit` lose what came since the last one."""
    catalog, _, _ = open_catalog(FS, path, FINGERPRINT)
    catalog.put_page(rows()[0])
    catalog.rollback()
    catalog.put_agent(rows()[1])
    catalog.commit()
    catalog.drop_agent("default", "ada")
    catalog.close()
    contents, _ = reopen(path)
    assert not contents.pages
    assert len(contents.agents) == 1


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE pages SET key = 'other'",
        "UPDATE pages SET file_bytes = file_bytes + 1",
        "UPDATE pages SET numerics = NULL",
        "UPDATE pages SET page_id = 'other'",
        "UPDATE agents SET seq = 4",
        "UPDATE agents SET log_checksum = x'00'",
        "UPDATE agents SET updated_s = 'x'",
        "UPDATE counters SET value = 8",
        "UPDATE pages SET row_xxh3 = x'00'",
        "UPDATE pages SET row_xxh3 = NULL",
    ],
)
def test_a_row_that_changed_by_itself_is_noticed(path: Path, change: str) -> None:
    """SQLite sees nothing wrong; the row checksum does, for every field. The catalog is made anew and says so."""
    filled(path)
    with sqlite3.connect(path) as database:
        database.execute(change)
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()
    contents, facts = reopen(path)
    assert facts == ("catalog made anew: 1 rows have wrong checksums",)
    assert contents == CatalogContents({}, {}, {}, 0)
    assert reopen(path)[1] == ()


def test_a_row_moved_to_another_table_is_noticed() -> None:
    """The checksum covers the table's name."""
    database = sqlite3.connect(":memory:")
    catalog = Catalog(database)
    database.execute("CREATE TABLE pages (a, b, c)")
    database.execute("CREATE TABLE agents (a, b, c)")
    database.execute("CREATE TABLE counters (name, value, row)")
    catalog.put_counter("x", 1)
    database.execute("INSERT INTO pages SELECT * FROM counters")
    contents = catalog.read()
    catalog.close()
    assert (contents.bad_rows, contents.counters) == (1, {"x": 1})


@pytest.mark.parametrize("content", [b"", b"not a database", bytes(4096), b"SQLite format 3\0" + bytes(500)])
def test_garbage_in_its_place_is_replaced(path: Path, content: bytes) -> None:
    """P5: whatever the file holds, a usable catalog comes out, with the reason."""
    path.write_bytes(content)
    contents, facts = reopen(path)
    assert contents == CatalogContents({}, {}, {}, 0)
    assert len(facts) == 1
    assert facts[0].startswith("catalog made anew: ")
    filled(path)
    assert len(reopen(path)[0].pages) == 1


def test_flipped_bits_never_give_a_wrong_row(path: Path) -> None:
    """P4: random flips anywhere in the file: rows are right or absent."""
    filled(path)
    good, original = reopen(path)[0], path.read_bytes()
    made_anew = 0
    for number in range(150):
        data = bytearray(original)
        bit = number * 7919 * 13 % (len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        for file in path.parent.iterdir():
            file.unlink()
        path.write_bytes(data)
        contents, facts = reopen(path)
        made_anew += bool(facts)
        assert facts or contents == good
        assert set(contents.pages.values()) <= set(good.pages.values())
        assert set(contents.agents.values()) <= set(good.agents.values())
    assert made_anew > 3


def test_it_belongs_to_one_model(path: Path) -> None:
    """P7: the catalog of other weights is not believed."""
    filled(path)
    contents, facts = reopen(path, hex_of("other weights"))
    assert not contents.pages
    assert facts == ("catalog made anew: it cannot be read (it is of another model or version)",)
