"""From a data folder in any state to agents that can be served.

Theory of operation. Logs are the truth. In order: (1) remove files that were being written, (2) read every log, cut
torn ends, put corrupt rests aside, replay, (3) list page files: a page that a log names must have a file of the right
length with the right identity, a file that no log names is an orphan, (4) bring the catalog in line, (5) count every
byte. Contents of pages are verified when they are loaded, not here.

Nothing is deleted that a log names, and no log is deleted. When a log could not be read at all, or lost committed
records, orphans may be its pages: in the first case they stay, in the second they go to quarantine. Each step only
removes what a second run would remove too, so recovery may be killed anywhere and run again.

With `dry_run` nothing is changed and the report says what would be (`kvd doctor`, P8).

May import kvd.ids, kvd.quant.spec and siblings of kvd.store.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from kvd.ids import PageId
from kvd.store.agent_file_io import remove_unfinished
from kvd.store.agent_image import AgentImage, Layouts, apply
from kvd.store.agent_log import LogScan, log_seed, scan_log
from kvd.store.catalog import CATALOG_ERRORS, AgentRow, Catalog, CatalogContents, PageRow, open_catalog
from kvd.store.errors import RecordInvalid
from kvd.store.fs import FileSystem, folder_bytes, is_temp_name, write_file
from kvd.store.layout import DataFolder, is_log_name, log_name
from kvd.store.page_file import MAX_HEADER_BYTES, PageHeader, file_bytes_for, parse_header
from kvd.store.record_codec import decode_record
from kvd.store.records import PageEntry
from kvd.store.recovery_report import AgentRef, LogTrouble, RecoveryReport, agent_row
from kvd.store.swap_dir import SwapDir, SwapScan, aside_path, move_aside

T = TypeVar("T")


def recover(
    folder: DataFolder,
    fingerprint: str,
    layouts: Layouts,
    fs: FileSystem,
    *,
    full_groups: frozenset[int] | None = None,
    dry_run: bool = False,
) -> RecoveryReport:
    """Bring one model's part of the data folder to a state that can be served.

    Args:
        folder: opened (locked) by this process, unless `dry_run`.
        fingerprint: the model.
        layouts: page layouts by (group, format_id); None for formats it does not know.
        fs: the disk.
        full_groups: groups whose pages hold every computed token; None: all.
        dry_run: change nothing.

    Raises:
        OSError: the disk refused; run it again.
    """
    started_s = time.monotonic()
    if not dry_run:
        folder.make_model_folders(fingerprint)
    run = _Recovery(folder, fingerprint, layouts, fs, full_groups, dry_run=dry_run)
    return run.report(started_s)


class _Recovery:
    """One run; fields fill up in the order of the steps."""

    def __init__(
        self,
        folder: DataFolder,
        fingerprint: str,
        layouts: Layouts,
        fs: FileSystem,
        full_groups: frozenset[int] | None,
        *,
        dry_run: bool,
    ) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.layouts = layouts
        self.fs = fs
        self.full_groups = full_groups
        self.dry_run = dry_run
        self.swap = SwapDir(folder, fingerprint, fs)
        self.quarantine = folder.quarantine_folder(fingerprint)
        self.agents: dict[AgentRef, AgentImage] = {}
        self.logs: dict[AgentRef, LogScan] = {}
        self.troubles: list[LogTrouble] = []
        self.quarantined: list[str] = []
        self.temp_files: list[str] = []
        self.foreign: list[str] = []
        self.pages: dict[PageId, PageHeader] = {}
        self.file_bytes: dict[PageId, int] = {}
        self.missing: dict[PageId, str] = {}
        self.unknown: set[tuple[int, str]] = set()
        self.orphans: dict[PageId, int] = {}
        self.orphans_deleted = 0

    def report(self, started_s: float) -> RecoveryReport:
        """Run all steps."""
        catalog, contents, facts = self._open_catalog()
        try:
            self._read_logs(contents)
            scan = self.swap.scan()
            self._sweep(scan)
            self._check_pages(scan, contents)
            adopted, dropped = self._reconcile(catalog, contents)
            self._handle_orphans()
        finally:
            if catalog is not None:
                catalog.close()
        if contents.bad_rows:
            facts += (f"{contents.bad_rows} catalog rows have wrong checksums",)
        return RecoveryReport(
            agents=self.agents,
            logs=self.logs,
            pages=self.pages,
            file_bytes=self.file_bytes,
            missing_pages=self.missing,
            unknown_formats=tuple(sorted(self.unknown)),
            orphans=tuple(self.orphans),
            orphans_deleted=self.orphans_deleted,
            orphan_bytes=sum(self.orphans.values()),
            temp_files_deleted=tuple(self.temp_files),
            foreign_files=tuple(self.foreign),
            quarantined=tuple(self.quarantined),
            log_troubles=tuple(self.troubles),
            adopted_pages=adopted,
            dropped_rows=dropped,
            facts=facts,
            swap_bytes=folder_bytes(self.fs, self.folder.swap_folder(self.fingerprint)),
            log_bytes=folder_bytes(self.fs, self.folder.agents_folder(self.fingerprint)),
            quarantine_bytes=folder_bytes(self.fs, self.quarantine),
            used_bytes=self.folder.used_bytes(),
            counters=contents.counters,
            seconds=time.monotonic() - started_s,
            unreadable=self._unreadable(),
        )

    # ---- logs -------------------------------------------------------------------------------------------------------

    def _read_logs(self, contents: CatalogContents) -> None:
        agents_folder = self.folder.agents_folder(self.fingerprint)
        names: list[str] = []
        if not self.dry_run:
            self.fs.fsync_dir(agents_folder)  # names that a killed process left in the system's cache only
        with contextlib.suppress(FileNotFoundError):
            names = self.fs.listdir(agents_folder)
        for name in [name for name in names if self._is_special(agents_folder / name)]:
            names.remove(name)
            self.foreign.append(str((agents_folder / name).relative_to(self.folder.root)))
        committed = {row.log_name: row for row in contents.agents.values()}
        for name in names:
            path = agents_folder / name
            if is_log_name(name):
                self._read_log(path, committed.get(name))
            elif is_temp_name(name):
                self._remove_temp(path)
            else:
                self.foreign.append(str(path.relative_to(self.folder.root)))
        for name in committed.keys() - set(names):
            row = committed[name]
            ref = (row.namespace, row.agent)
            self.troubles.append(LogTrouble(name, ref, "stale", 0, row.log_bytes, "the catalog knows it, it is gone"))

    def _is_special(self, path: Path) -> bool:
        found = self.fs.stat(path)
        return found is not None and found.is_special

    def _read_log(self, path: Path, committed: AgentRow | None) -> None:
        try:
            data = _read_twice(lambda: self.fs.read(path))
        except OSError as error:
            self.troubles.append(LogTrouble(path.name, None, "unreadable", 0, 0, str(error)))
            return
        scan = scan_log(data, log_seed(self.fingerprint, path.name))
        image, good, why = self._replay(path.name, scan)
        ref = None if image is None else (image.namespace, image.agent)
        seq = 0 if image is None else image.seq
        stale = committed is not None and committed.seq > seq
        if good < len(data):
            torn = not why and scan.damage is not None and scan.damage.kind == "torn"
            kind: Literal["torn", "corrupt"] = "torn" if torn and not stale else "corrupt"
            reason = why or (scan.damage.reason if scan.damage is not None else "")
            self.troubles.append(LogTrouble(path.name, ref, kind, good, len(data) - good, reason))
            self._cut_log(path, data, good, aside=kind == "corrupt")
        elif stale and committed is not None:
            reason = f"the catalog knows {committed.seq} records, the log has {seq}"
            self.troubles.append(LogTrouble(path.name, ref, "stale", good, 0, reason))
        if image is not None and ref is not None:
            if not stale and (committed is None or committed.seq != seq):
                self._flush_log(path)
            last = next(frame for frame in reversed(scan.frames) if frame.end <= good)
            self.agents[ref] = image
            self.logs[ref] = LogScan((), good, last.checksum, None)  # no frames: images of many agents keep no KV

    def _replay(self, name: str, scan: LogScan) -> tuple[AgentImage | None, int, str]:
        """Image, end of the part that replays, and why it ends before the scan's end."""
        image: AgentImage | None = None
        good = 0
        for frame in scan.frames:
            try:
                record = decode_record(frame.payload)
                if record.seq != frame.seq or log_name(record.namespace, record.agent) != name:
                    raise RecordInvalid("its frame names another one", seq=frame.seq)
                image = apply(image, record, payload_end=frame.end, layouts=self.layouts, full_groups=self.full_groups)
            except RecordInvalid as error:
                return image, good, error.message
            good = frame.end
        return image, good, ""

    def _flush_log(self, path: Path) -> None:
        """A killed process may have left a record that is in the system's cache only; from here on it counts."""
        if self.dry_run:
            return
        handle = self.fs.open_append(path)
        try:
            self.fs.fsync(handle)
        finally:
            self.fs.close(handle)

    def _cut_log(self, path: Path, data: bytes, good: int, *, aside: bool) -> None:
        """Cut a log to its good part; the rest goes to quarantine first when it was committed."""
        if self.dry_run:
            return
        if aside:
            target = aside_path(self.fs, path.name, self.quarantine)
            write_file(self.fs, target, [data[good:]])
            self.quarantined.append(target.name)
        handle = self.fs.open_append(path)
        try:
            self.fs.truncate(handle, good)
            self.fs.fsync(handle)
        finally:
            self.fs.close(handle)

    # ---- pages ------------------------------------------------------------------------------------------------------

    def _sweep(self, scan: SwapScan) -> None:
        for path in scan.temp_files:
            self._remove_temp(path)
        self.foreign += [str(path.relative_to(self.folder.root)) for path in scan.foreign_files]
        self.temp_files += remove_unfinished(self.fs, self.folder.exports_folder(), dry_run=self.dry_run)
        root = self.folder.root
        ours_in_root = (".VERSION.", ".CACHEDIR.TAG.", ".engine.json.")
        for folder, ours in (
            (self.quarantine, ("",)),
            (root / "conditioning", ("",)),
            (self.folder.exports_folder(), ("",)),
            (root, ours_in_root),
        ):
            with contextlib.suppress(FileNotFoundError):
                for name in self.fs.listdir(folder):
                    if is_temp_name(name) and name.startswith(ours):
                        self._remove_temp(folder / name)

    def _remove_temp(self, path: Path) -> None:
        self.temp_files.append(str(path.relative_to(self.folder.root)))
        if not self.dry_run:
            self.fs.unlink(path)

    def _check_pages(self, scan: SwapScan, contents: CatalogContents) -> None:
        named: dict[PageId, tuple[PageEntry, int, str]] = {}
        for image in self.agents.values():
            for branch in image.branches.values():
                for segment in branch.segments:
                    for page in segment.pages:
                        named[page.page_id] = (page, segment.group, segment.format_id)
        for page_id, (entry, group, format_id) in named.items():
            file_bytes = scan.pages.get(page_id)
            if file_bytes is None:
                self.missing[page_id] = "no file"
                continue
            row = contents.pages.get(page_id)
            header = None if row is None else row.header(self.fingerprint)
            reason = self._mismatch(header, entry, group, format_id, file_bytes)
            if reason or row is None or row.file_bytes != file_bytes:  # the catalog cannot say: ask the file
                try:
                    header = _read_twice(partial(self._header, page_id))
                except OSError as error:
                    self.missing[page_id] = f"unreadable ({error})"
                    continue
                reason = self._mismatch(header, entry, group, format_id, file_bytes)
            if header is None or reason:
                self.missing[page_id] = reason
                self._put_aside(page_id)
            else:
                self.pages[page_id] = header
                self.file_bytes[page_id] = file_bytes
        self.orphans = {page_id: size for page_id, size in scan.pages.items() if page_id not in named}

    def _header(self, page_id: PageId) -> PageHeader | None:
        """What the page's file says it is; None when it is no page file."""
        path = self.swap.path(page_id)
        head = self.fs.read(path, limit=8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > MAX_HEADER_BYTES:
            return None
        parsed = parse_header(self.fs.read(path, limit=8 + length))
        return None if parsed is None else parsed[0]

    def _mismatch(
        self, header: PageHeader | None, entry: PageEntry, group: int, format_id: str, file_bytes: int
    ) -> str:
        """Why the file is not the page the log names; empty when it may be."""
        if header is None:
            return "header unreadable"
        identity = (header.page_id, header.key, header.runs, header.group, header.format_id, header.fingerprint)
        if identity != (entry.page_id, entry.key, entry.runs, group, format_id, self.fingerprint):
            return "header of another page"
        layout = self.layouts(group, format_id)
        if layout is None:
            self.unknown.add((group, format_id))
        elif file_bytes != file_bytes_for(header, layout):
            return f"{file_bytes} instead of {file_bytes_for(header, layout)} bytes"
        return ""

    def _put_aside(self, page_id: PageId) -> None:
        if not self.dry_run:
            target = move_aside(self.fs, self.swap.path(page_id), self.quarantine)
            if target is not None:
                self.quarantined.append(target.name)

    def _handle_orphans(self) -> None:
        kinds = Counter(trouble.kind for trouble in self.troubles)
        if self.dry_run or kinds["unreadable"]:
            return
        for page_id in self.orphans:
            if kinds["corrupt"] or kinds["stale"]:
                self._put_aside(page_id)
            else:
                self.swap.delete(page_id)
                self.orphans_deleted += 1

    # ---- catalog ----------------------------------------------------------------------------------------------------

    def _open_catalog(self) -> tuple[Catalog | None, CatalogContents, tuple[str, ...]]:
        path = self.folder.catalog_path(self.fingerprint)
        if self.dry_run:
            return None, CatalogContents({}, {}, {}, 0), ()
        try:
            return open_catalog(self.fs, path, self.fingerprint)
        except CATALOG_ERRORS as error:
            return None, CatalogContents({}, {}, {}, 0), (f"no catalog: {error}",)

    def _reconcile(self, catalog: Catalog | None, contents: CatalogContents) -> tuple[int, int]:
        """Make the catalog say what logs and files say; returns pages adopted and rows dropped."""
        now_s = time.time()
        adopted = [page_id for page_id in self.pages if self._row_differs(page_id, contents.pages.get(page_id))]
        dropped_pages = [page_id for page_id in contents.pages if page_id not in self.pages]
        unreadable = self._unreadable()
        dropped_agents = [
            ref for ref, row in contents.agents.items() if ref not in self.agents and row.log_name not in unreadable
        ]
        if catalog is not None:
            with contextlib.suppress(*CATALOG_ERRORS):  # derived state: a slower next start is all that is lost
                for page_id in adopted:
                    catalog.put_page(
                        PageRow.of(self.pages[page_id], file_bytes=self.file_bytes[page_id], created_s=now_s)
                    )
                catalog.drop_pages(dropped_pages)
                for namespace, agent in dropped_agents:
                    catalog.drop_agent(namespace, agent)
                for ref, image in self.agents.items():
                    row = agent_row(image, self.logs[ref].checksum, now_s)
                    old = contents.agents.get(ref)
                    if old is None or (old.seq, old.log_checksum) != (row.seq, row.log_checksum):
                        catalog.put_agent(row)
                catalog.commit()
        return len(adopted), len(dropped_pages) + len(dropped_agents)

    def _unreadable(self) -> frozenset[str]:
        return frozenset(trouble.log for trouble in self.troubles if trouble.kind == "unreadable")

    def _row_differs(self, page_id: PageId, row: PageRow | None) -> bool:
        return row is None or row.file_bytes != self.file_bytes[page_id] or row.key != self.pages[page_id].key


def _read_twice(read: Callable[[], T]) -> T:
    """What `read` gives at the first or second try: one hiccup of the disk must not cost an agent a whole run."""
    try:
        return read()
    except OSError:
        return read()


__all__ = ["recover"]
