"""One model's part of the data folder, looked at without changing it: logs, pages and catalog against each other.

`recover(dry_run=True)` reads logs and page headers. It does not open the catalog, since SQLite writes where it reads:
a copy of it is opened elsewhere. Under a running daemon logs grow, pages come before the records that name them and
leave after them, and the catalog is in flux: there two looks are taken, only what both saw counts, and the catalog is
left alone.

Imports kvd.store and this package.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvd.doctor.context import Context
from kvd.doctor.folder_state import CATALOG_FILES
from kvd.ids import PageId
from kvd.store.catalog import CATALOG_ERRORS, CatalogContents, open_catalog
from kvd.store.fs import RealFileSystem
from kvd.store.recovery import recover
from kvd.store.recovery_report import AgentRef, LogTrouble, RecoveryReport

ABSENT: Final = "no file"
"""Recovery's reason for a page that a log names and that is not there."""

UNREADABLE: Final = "unreadable"
"""How recovery's reason for a page begins that the disk refused to read: it may be good."""


@dataclass(frozen=True, slots=True)
class StoreLook:
    """What was found.

    Attributes:
        fingerprint: the model.
        live: a daemon runs on the folder.
        report: recovery's dry run.
        troubles: logs that are damaged; unfinished appends of a running daemon are none.
        missing: pages that logs name and that cannot be served, with the reason.
        catalog: what the catalog knows; None when it is not there, cannot be read, or a daemon writes it.
        catalog_fault: why it cannot be trusted; empty when it can or was not looked at.
    """

    fingerprint: str
    live: bool
    report: RecoveryReport
    troubles: tuple[LogTrouble, ...]
    missing: dict[PageId, str]
    catalog: CatalogContents | None
    catalog_fault: str

    def is_lost(self, page_id: PageId) -> bool:
        """Whether a missing page went since the catalog was written: nobody has been told yet."""
        return self.catalog is not None and page_id in self.catalog.pages

    def stale_agents(self) -> dict[AgentRef, str]:
        """Agents of which the catalog knows more than their logs, which are not damaged, with the words for it."""
        stale: dict[AgentRef, str] = {}
        damaged = {trouble.log for trouble in self.troubles}
        for ref, row in self.catalog.agents.items() if self.catalog is not None else ():
            image = self.report.agents.get(ref)
            if row.log_name in damaged:
                continue
            if image is None:
                stale[ref] = "its log is gone"
            elif row.seq > image.seq:
                stale[ref] = f"{row.seq - image.seq} of {row.seq} records are gone"
        return stale

    def rows_behind(self) -> int:
        """Pages and agents that the catalog does not know yet, or not as they are."""
        if self.catalog is None:
            return 0
        pages, agents = self.catalog.pages, self.catalog.agents
        behind = sum(
            page_id not in pages or pages[page_id].header(self.fingerprint) != header
            for page_id, header in self.report.pages.items()
        )
        return behind + sum(
            ref not in agents or agents[ref].seq < image.seq for ref, image in self.report.agents.items()
        )

    def rows_left(self) -> int:
        """Rows of pages that no log names any more."""
        if self.catalog is None:
            return 0
        return len(self.catalog.pages.keys() - self.report.pages.keys() - self.missing.keys())


def look(context: Context, fingerprint: str) -> StoreLook:
    """Look at one model's part of the data folder.

    Raises:
        OSError: the disk refused.
    """
    live = context.lock.held
    report = dry_run(context, fingerprint)
    troubles, missing = report.log_troubles, report.missing_pages
    catalog: CatalogContents | None = None
    fault = ""
    if live:
        troubles = tuple(trouble for trouble in troubles if trouble.kind != "torn")
        if troubles or missing:
            again = dry_run(context, fingerprint)
            known = {(trouble.log, trouble.kind, trouble.offset) for trouble in again.log_troubles}
            troubles = tuple(each for each in troubles if (each.log, each.kind, each.offset) in known)
            missing = {page_id: why for page_id, why in missing.items() if page_id in again.missing_pages}
    else:
        catalog, fault = read_catalog(context, fingerprint)
        troubles = tuple(_judged(trouble, report, catalog) for trouble in troubles)
    return StoreLook(fingerprint, live, report, troubles, missing, catalog, fault)


def _judged(trouble: LogTrouble, report: RecoveryReport, catalog: CatalogContents | None) -> LogTrouble:
    """A torn end is a corrupt one when the catalog knows of records there: they were committed. As recovery has it."""
    rows = catalog.agents.values() if catalog is not None else ()
    row = next((row for row in rows if row.log_name == trouble.log), None)
    if row is None or trouble.kind != "torn":
        return trouble
    ref = (row.namespace, row.agent)
    image = report.agents.get(ref)
    lost = image is None or image.seq < row.seq
    return replace(trouble, kind="corrupt", agent=ref) if lost else trouble


def read_catalog(context: Context, fingerprint: str) -> tuple[CatalogContents | None, str]:
    """The catalog's rows from a copy, and why it cannot be trusted (empty when it can, or when there is none)."""
    source = context.folder.catalog_path(fingerprint)
    with tempfile.TemporaryDirectory(prefix="kvd-doctor-") as temporary:
        copy = Path(temporary) / CATALOG_FILES[0]
        try:
            if context.fs.stat(source) is None:
                return None, ""
            for name in (CATALOG_FILES[0], CATALOG_FILES[1], CATALOG_FILES[3]):  # the index beside it is made anew
                with contextlib.suppress(FileNotFoundError):
                    (Path(temporary) / name).write_bytes(context.fs.read(source.with_name(name)))
        except OSError as error:
            return None, error.strerror or str(error)
        try:
            catalog, contents, facts = open_catalog(RealFileSystem(), copy, fingerprint)
        except CATALOG_ERRORS as error:
            return None, str(error)
        catalog.close()
    return (None, facts[0].partition(": ")[2]) if facts else (contents, "")


def dry_run(context: Context, fingerprint: str) -> RecoveryReport:
    """What recovery would find; every page's header is read, as no catalog stands in for it."""
    return recover(
        context.folder,
        fingerprint,
        context.layouts(fingerprint),
        context.fs,
        full_groups=context.full_groups(fingerprint),
        dry_run=True,
    )


__all__ = ["ABSENT", "UNREADABLE", "StoreLook", "dry_run", "look", "read_catalog"]
