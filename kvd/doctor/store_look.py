"""One model's part of the data folder, looked at without changing it: logs, pages and catalog against each other.

`recover(dry_run=True)` reads logs and page headers. It does not open the catalog, since SQLite writes where it reads:
a copy of it is opened elsewhere. Under a running daemon logs grow, pages come before the records that name them and
leave after them, and the catalog is in flux: there two looks are taken, only what both saw counts, and the catalog is
left alone.

Imports kvd.ids, kvd.store and this package.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Final

from kvd.doctor.aside import NoRoomAside, aside
from kvd.doctor.context import Context
from kvd.doctor.folder_state import CATALOG_FILES, odd_type
from kvd.ids import PageId
from kvd.store.catalog import CATALOG_ERRORS, CatalogContents, open_catalog
from kvd.store.fs import RealFileSystem
from kvd.store.recovery import recover
from kvd.store.recovery_report import AgentRef, LogTrouble, RecoveryReport
from kvd.store.swap_dir import SwapDir

ABSENT: Final = "no file"
"""Recovery's reason for a page that a log names and that is not there."""

UNREADABLE: Final = "unreadable"
"""How recovery's reason for a page begins that the disk refused to read: it may be good."""

NO_FILE: Final = "in the place of the file is"
"""How the reason begins for a page or log whose name is that of a link or folder: the disk is well."""

_ROOM_BYTES: Final = 1 << 20
"""What SQLite may write beside a copy of the catalog and its log."""


@dataclass(frozen=True, slots=True)
class CatalogLook:
    """What a catalog says.

    Attributes:
        contents: its rows; None when there is none, it cannot be trusted, or it was not looked at.
        fault: why it cannot be trusted; empty when it can, when there is none, or when it was not looked at.
        unread: why it could not be looked at, which says nothing against it; empty when it was.
    """

    contents: CatalogContents | None = None
    fault: str = ""
    unread: str = ""


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
        catalog_unread: why it could not be looked at.
    """

    fingerprint: str
    live: bool
    report: RecoveryReport
    troubles: tuple[LogTrouble, ...]
    missing: dict[PageId, str]
    catalog: CatalogContents | None
    catalog_fault: str
    catalog_unread: str

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
    catalog = CatalogLook()
    if live:
        troubles = tuple(trouble for trouble in troubles if trouble.kind != "torn")
        if troubles or missing:
            again = dry_run(context, fingerprint)
            known = {(trouble.log, trouble.kind, trouble.offset) for trouble in again.log_troubles}
            troubles = tuple(each for each in troubles if (each.log, each.kind, each.offset) in known)
            missing = {page_id: why for page_id, why in missing.items() if page_id in again.missing_pages}
    else:
        catalog = read_catalog(context, fingerprint)
        troubles = tuple(_judged(trouble, report, catalog.contents) for trouble in troubles)
    return StoreLook(fingerprint, live, report, troubles, missing, catalog.contents, catalog.fault, catalog.unread)


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


def read_catalog(context: Context, fingerprint: str) -> CatalogLook:
    """The catalog's rows, from a copy."""
    source = context.folder.catalog_path(fingerprint)
    files: dict[str, bytes] = {}
    try:
        if context.fs.stat(source) is None:
            return CatalogLook()
        odd = {name: odd_type(source.with_name(name)) for name in CATALOG_FILES}
        faults = [f"{name} is {found}" for name, found in odd.items() if found]
        if faults:
            return CatalogLook(fault=", ".join(faults))
        for name in (CATALOG_FILES[0], CATALOG_FILES[1], CATALOG_FILES[3]):  # the index beside it is made anew
            with contextlib.suppress(FileNotFoundError):
                files[name] = context.fs.read(source.with_name(name))
    except OSError as error:
        return CatalogLook(unread=f"the disk refuses to read it: {error.strerror or error}")
    try:
        with aside() as folder:
            for name, data in files.items():
                (folder / name).write_bytes(data)
            room = folder / "room"  # SQLite grows files; where it could not, it would find fault with the catalog
            room.write_bytes(bytes(_ROOM_BYTES + len(files.get(CATALOG_FILES[1], b""))))
            room.unlink()
            try:
                catalog, contents, facts = open_catalog(RealFileSystem(), folder / CATALOG_FILES[0], fingerprint)
                catalog.close()
            except OSError:
                raise
            except CATALOG_ERRORS as error:
                return CatalogLook(fault=str(error))
    except NoRoomAside as error:
        return CatalogLook(unread=error.message)
    is_new = facts and not (contents.pages or contents.agents)  # rows of an older version are as good as any
    return CatalogLook(fault=facts[0].partition(": ")[2]) if is_new else CatalogLook(contents)


def dry_run(context: Context, fingerprint: str) -> RecoveryReport:
    """What recovery would find; every page's header is read, as no catalog stands in for it."""
    report = recover(
        context.folder,
        fingerprint,
        context.layouts(fingerprint),
        context.fs,
        full_groups=context.full_groups(fingerprint),
        dry_run=True,
    )
    return with_types(context, fingerprint, report)


def with_types(context: Context, fingerprint: str, report: RecoveryReport) -> RecoveryReport:
    """A report whose reasons name the type of what is no file, where recovery has the words of a disk that refuses."""
    swap, agents = SwapDir(context.folder, fingerprint, context.fs), context.folder.agents_folder(fingerprint)
    missing = dict(report.missing_pages)
    for page_id in [page_id for page_id, why in missing.items() if why.startswith(UNREADABLE)]:
        found = odd_type(swap.path(page_id))
        if found:
            missing[page_id] = f"{NO_FILE} {found}"
    odd = {each.log: odd_type(agents / each.log) for each in report.log_troubles if each.kind == "unreadable"}
    troubles = tuple(
        replace(each, reason=f"{NO_FILE} {odd[each.log]}") if odd.get(each.log) else each
        for each in report.log_troubles
    )
    return replace(report, missing_pages=missing, log_troubles=troubles)


__all__ = [
    "ABSENT",
    "NO_FILE",
    "UNREADABLE",
    "CatalogLook",
    "StoreLook",
    "dry_run",
    "look",
    "read_catalog",
    "with_types",
]
