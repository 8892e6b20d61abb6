"""The SQLite catalog: which pages and agents there are. Derived state: logs and page headers are the truth.

Theory of operation. It spares recovery from reading the header of every page file, and remembers how far each log was
committed, so that a log that lost committed records is told from one that is merely torn. Each row carries a checksum
over all its fields: SQLite's own integrity check does not see most flipped bits. A catalog that cannot be read, has a
bad row or another schema is made anew, and what was dropped is returned as facts (P5, P8).

Writes are collected in one transaction until `commit`; losing it costs a slower recovery, nothing else. WAL with
`synchronous=FULL`, and `fullfsync` on macOS.

May import kvd.ids and siblings of kvd.store. Owned by one thread at a time.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Final

import msgpack
import xxhash

from kvd.ids import Fingerprint, FormatId, PageId, PageKey
from kvd.store.fs import FileSystem
from kvd.store.page_file import PageHeader, runs_of_text

CATALOG_VERSION: Final = 2
_SCHEMA: Final = """
CREATE TABLE pages (page_id TEXT PRIMARY KEY, key TEXT, domain TEXT, grp INTEGER, format_id TEXT, runs TEXT,
    numerics TEXT, page_tokens INTEGER, file_bytes INTEGER, created_s REAL, row_xxh3 BLOB) WITHOUT ROWID;
CREATE INDEX pages_by_key ON pages (key);
CREATE TABLE agents (namespace TEXT, agent TEXT, log_name TEXT, seq INTEGER, log_bytes INTEGER, log_checksum BLOB,
    tokens INTEGER, branches INTEGER, updated_s REAL, last_offset INTEGER, pages BLOB, summary BLOB, row_xxh3 BLOB,
    PRIMARY KEY (namespace, agent)) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER, row_xxh3 BLOB) WITHOUT ROWID;
"""
CATALOG_ERRORS: Final = (sqlite3.Error, OSError, ValueError, TypeError, OverflowError)
"""What a damaged database can raise. ValueError: text, even that of SQLite's own error message, that is not UTF-8."""

_FILES: Final = ("", "-wal", "-shm", "-journal")


@dataclass(frozen=True, slots=True)
class PageRow:
    """A sealed page with a durable file. Fields as in `PageHeader`; `runs` is `start+tokens,…`."""

    page_id: str
    key: str
    domain: str
    group: int
    format_id: str
    runs: str
    numerics: str
    page_tokens: int
    file_bytes: int
    created_s: float

    @classmethod
    def of(cls, header: PageHeader, *, file_bytes: int, created_s: float) -> PageRow:
        """The row of a page."""
        runs = ",".join(f"{run.start}+{run.tokens}" for run in header.runs)
        return cls(
            header.page_id,
            header.key,
            header.domain,
            header.group,
            header.format_id,
            runs,
            header.numerics,
            header.page_tokens,
            file_bytes,
            created_s,
        )

    def header(self, fingerprint: str) -> PageHeader:
        """The page's header; the catalog is of one model."""
        return PageHeader(
            page_id=PageId(self.page_id),
            key=PageKey(self.key),
            fingerprint=Fingerprint(fingerprint),
            domain=self.domain,
            group=self.group,
            format_id=FormatId(self.format_id),
            runs=runs_of_text(self.runs),
            numerics=self.numerics,
            page_tokens=self.page_tokens,
        )


@dataclass(frozen=True, slots=True)
class AgentRow:
    """How far an agent's log was committed when the row was written; the log may be further, never less far.

    Attributes:
        last_offset: where its last record starts in the log; -1 when that is not known.
        pages: ids of all pages its branches map (`kvd.store.sleeping.pack_pages`).
        summary: what a list shows of it (`kvd.store.sleeping.pack_summary`); empty when that is not known.
    """

    namespace: str
    agent: str
    log_name: str
    seq: int
    log_bytes: int
    log_checksum: bytes
    tokens: int
    branches: int
    updated_s: float
    last_offset: int = -1
    pages: bytes = b""
    summary: bytes = b""

    def says_the_same(self, other: AgentRow | None) -> bool:
        """Whether another row says the same of the log; when it was written counts for nothing."""
        return other is not None and replace(other, updated_s=self.updated_s) == self


@dataclass(frozen=True, slots=True)
class CatalogContents:
    """Every row whose checksum holds.

    Attributes:
        bad_rows: rows that were left out.
    """

    pages: dict[PageId, PageRow]
    agents: dict[tuple[str, str], AgentRow]
    counters: dict[str, int]
    bad_rows: int


class Catalog:
    """An open catalog. Use `open_catalog`.

    Raises:
        CATALOG_ERRORS: any method, when the database is damaged or the disk refuses.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def put_page(self, row: PageRow) -> None:
        """Insert or replace a page's row."""
        self._put("pages", astuple(row))

    def put_agent(self, row: AgentRow) -> None:
        """Insert or replace an agent's row."""
        self._put("agents", astuple(row))

    def put_counter(self, name: str, value: int) -> None:
        """Set a counter."""
        self._put("counters", (name, value))

    def drop_pages(self, page_ids: Iterable[str]) -> None:
        """Delete rows of pages; unknown ones are fine."""
        self._db.executemany("DELETE FROM pages WHERE page_id = ?", [(page_id,) for page_id in page_ids])

    def drop_agent(self, namespace: str, agent: str) -> None:
        """Delete an agent's row; an unknown one is fine."""
        self._db.execute("DELETE FROM agents WHERE namespace = ? AND agent = ?", (namespace, agent))

    def commit(self) -> None:
        """Make everything since the last commit durable."""
        self._db.commit()

    def rollback(self) -> None:
        """Forget everything since the last commit."""
        self._db.rollback()

    def close(self) -> None:
        """Close without committing."""
        self._db.close()

    def read(self) -> CatalogContents:
        """Read all rows and check each."""
        bad = 0
        pages: dict[PageId, PageRow] = {}
        agents: dict[tuple[str, str], AgentRow] = {}
        counters: dict[str, int] = {}
        for table in ("pages", "agents", "counters"):
            for *fields, checksum in self._db.execute(f"SELECT * FROM {table}"):  # noqa: S608  # constant names
                if checksum != _row_checksum(table, fields):
                    bad += 1
                elif table == "pages":
                    page = PageRow(*fields)
                    pages[PageId(page.page_id)] = page
                elif table == "agents":
                    agent = AgentRow(*fields)
                    agents[agent.namespace, agent.agent] = agent
                else:
                    counters[fields[0]] = fields[1]
        return CatalogContents(pages, agents, counters, bad)

    def write(self, contents: CatalogContents) -> None:
        """Insert all rows (committed later)."""
        for page in contents.pages.values():
            self.put_page(page)
        for agent in contents.agents.values():
            self.put_agent(agent)
        for name, value in contents.counters.items():
            self.put_counter(name, value)

    def _put(self, table: str, fields: tuple[object, ...]) -> None:
        row = (*fields, _row_checksum(table, fields))
        marks = ",".join("?" * len(row))
        self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row)  # noqa: S608  # constant names


def _row_checksum(table: str, fields: Iterable[object]) -> bytes:
    """xxh3_128 over the table's name and every field, with their types and lengths (msgpack)."""
    return xxhash.xxh3_128_digest(msgpack.packb([table, *fields], use_bin_type=True, default=repr))


def open_catalog(fs: FileSystem, path: Path, fingerprint: str) -> tuple[Catalog, CatalogContents, tuple[str, ...]]:
    """Open the catalog, or make a new one in the place of one that cannot be trusted.

    Args:
        fs: the disk.
        path: the database file.
        fingerprint: the model it must be of.

    Returns:
        The catalog, its contents, and facts about what was dropped (empty when all was well).

    Raises:
        CATALOG_ERRORS: not even a new one can be made.
    """
    real = fs.database_path(path)
    sound = True
    for suffix in _FILES:
        name = path.name + suffix
        found = fs.stat(path.with_name(name))
        # SQLite follows links, and so does chmod: what they lead to is not ours
        sound = sound and (found is None or not (found.is_special or found.is_folder))
        sound = sound and not real.with_name(name).is_symlink()
    reason = "there is none" if sound else "it is no regular file"
    kept = CatalogContents({}, {}, {}, 0)
    if sound and fs.stat(path) is not None:
        try:
            catalog = Catalog(_connect(fs, path))
        except CATALOG_ERRORS as error:
            reason = f"it cannot be opened ({error})"
        else:
            try:
                version = _version_of(catalog, fingerprint)
                contents = catalog.read()
            except CATALOG_ERRORS as error:
                reason = f"it cannot be read ({error})"
            else:
                if not contents.bad_rows and version == CATALOG_VERSION:
                    return catalog, contents, ()
                reason = f"{contents.bad_rows} rows have wrong checksums"
                if not contents.bad_rows:
                    reason, kept = f"it was of version {version}; its rows were taken over", contents
            catalog.close()
    for suffix in _FILES:
        with contextlib.suppress(FileNotFoundError):
            real.with_name(real.name + suffix).unlink()
    catalog = Catalog(_connect(fs, path))
    catalog._db.executescript(_SCHEMA)
    catalog.write(kept)
    _set_identity(catalog, fingerprint)
    return catalog, kept, (f"catalog made anew: {reason}",)


def connect_catalog(fs: FileSystem, path: Path) -> Catalog:
    """The catalog that was read a moment ago and found good.

    Raises:
        CATALOG_ERRORS: it cannot be opened any more.
    """
    return Catalog(_connect(fs, path))


def _connect(fs: FileSystem, path: Path) -> sqlite3.Connection:
    real = fs.database_path(path)
    if fs.stat(path) is None:
        fs.close(fs.open_append(path))  # 0600 from the first moment on; SQLite gives its side files the same mode
    fs.chmod(path, 0o600)
    connection = sqlite3.connect(real, timeout=5.0, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA fullfsync=ON")  # macOS: F_FULLFSYNC; no effect elsewhere
        connection.execute("PRAGMA checkpoint_fullfsync=ON")
        # the log is emptied often and cut: it counts against the quota (`disk_usage.CATALOG_GROWTH_BYTES`)
        connection.execute("PRAGMA wal_autocheckpoint=32")
        connection.execute("PRAGMA journal_size_limit=131072")
        connection.execute("PRAGMA trusted_schema=OFF")
    except BaseException:
        connection.close()
        raise
    return connection


def _identity(version: int, fingerprint: str) -> int:
    """A 31-bit number in the database header that binds it to a model and a schema."""
    return xxhash.xxh3_64_intdigest(f"{version} {fingerprint}".encode()) & 0x7FFFFFFF


def _version_of(catalog: Catalog, fingerprint: str) -> int:
    """The catalog's version; ValueError for what no kvd up to this one made for the model.

    Of version 1 the agents' rows ended with `updated_s`: what they do not say is not known, so their logs are read.
    """
    (found,) = catalog._db.execute("PRAGMA user_version").fetchone()
    for version in range(1, CATALOG_VERSION + 1):
        if found == _identity(version, fingerprint):
            return version
    raise ValueError("it is of another model or version")


def _set_identity(catalog: Catalog, fingerprint: str) -> None:
    catalog._db.execute(f"PRAGMA user_version={_identity(CATALOG_VERSION, fingerprint)}")
    catalog._db.commit()


__all__ = [
    "CATALOG_ERRORS",
    "CATALOG_VERSION",
    "AgentRow",
    "Catalog",
    "CatalogContents",
    "PageRow",
    "connect_catalog",
    "open_catalog",
]
