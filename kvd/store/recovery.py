"""From a data folder in any state to agents that can be served.

Theory of operation. Logs are the truth. In order: (1) list page files and logs, and make the logs that forks were
promised (`kvd.store.fork_notes`), (2) read the logs that the catalog does not vouch for (`kvd.store.sleeping`; without
a catalog: all), cut torn ends, put corrupt rests aside, replay, (3) remove files that were being written, (4) look at
pages: one that a log names must have a file of the right length with the right identity, a file that no log names is an
orphan, (5) bring the catalog in line, (6) count every byte. Contents of pages are verified when they are loaded, not
here.

Nothing is deleted that a log names, and no log is deleted. When a log could not be read at all, or lost committed
records, orphans may be its pages: in the first case they stay, in the second they go to quarantine, as they do when no
catalog says which logs there were. Each step only removes what a second run would remove too, so recovery may be killed
anywhere and run again.

With `dry_run` nothing is changed and the report says what would be (`kvd doctor`, P8).

May import kvd.ids, kvd.quant.spec and siblings of kvd.store.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Literal

from kvd.ids import PageId
from kvd.store.agent_file_io import remove_unfinished
from kvd.store.agent_image import AgentImage, Layouts
from kvd.store.agent_log import LogScan, log_seed, scan_log
from kvd.store.catalog import CATALOG_ERRORS, AgentRow, Catalog, CatalogContents, PageRow, open_catalog
from kvd.store.fork_notes import FinishedForks, finish_forks
from kvd.store.fs import FileStat, FileSystem, is_temp_name, read_twice
from kvd.store.fs_meter import MeteredFileSystem
from kvd.store.layout import DataFolder, is_log_name
from kvd.store.log_replay import bare, cut_log, replay
from kvd.store.page_file import MAX_HEADER_BYTES, PageHeader, file_bytes_for, parse_header
from kvd.store.records import PageEntry
from kvd.store.recovery_report import AgentRef, LogTrouble, RecoveryReport, agent_row
from kvd.store.sleeping import READ_AGENTS, READ_BYTES, SleepingAgent, who_sleeps
from kvd.store.swap_dir import SwapDir, SwapScan, move_aside


def recover(
    folder: DataFolder,
    fingerprint: str,
    layouts: Layouts,
    fs: FileSystem,
    *,
    full_groups: frozenset[int] | None = None,
    dry_run: bool = False,
    read_agents: int = READ_AGENTS,
    read_bytes: int = READ_BYTES,
) -> RecoveryReport:
    """Bring one model's part of the data folder to a state that can be served.

    Args:
        folder: opened (locked) by this process, unless `dry_run`.
        fingerprint: the model.
        layouts: page layouts by (group, format_id); None for formats it does not know.
        fs: the disk.
        full_groups: groups whose pages hold every computed token; None: all.
        dry_run: change nothing, and read every log.
        read_agents: how many of the agents used last are read although the catalog vouches for them.
        read_bytes: bytes of their logs, together.

    Raises:
        OSError: the disk refused; run it again.
    """
    started_s = time.monotonic()
    if not dry_run:
        folder.make_model_folders(fingerprint)
    run = _Recovery(folder, fingerprint, layouts, fs, full_groups, dry_run=dry_run)
    return run.report(started_s, read_agents, read_bytes)


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
        self.fs = MeteredFileSystem(fs)
        self.full_groups = full_groups
        self.dry_run = dry_run
        self.swap = SwapDir(folder, fingerprint, self.fs)
        self.quarantine = folder.quarantine_folder(fingerprint)
        self.agents: dict[AgentRef, AgentImage] = {}
        self.logs: dict[AgentRef, LogScan] = {}
        self.asleep: dict[AgentRef, SleepingAgent] = {}
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
        self.is_blind = False

    def report(self, started_s: float, read_agents: int, read_bytes: int) -> RecoveryReport:
        """Run all steps."""
        catalog, contents, facts = self._open_catalog()
        self.is_blind = not (contents.pages or contents.agents)
        try:
            scan = self.swap.scan()
            forks = self._finish_forks()
            self._read_logs(contents, scan, forks, read_agents, read_bytes)
            self.agents.update({note.child_ref: image for note, image in forks.waiting})
            self._sweep(scan)
            self._check_pages(scan, contents)
            adopted, dropped, in_line = self._reconcile(catalog, contents)
            self._handle_orphans()
        finally:
            if catalog is not None:
                catalog.close()
        untouched = not (self.temp_files or self.orphans or self.quarantined)
        used = self.folder.usage(self.fingerprint, swap_bytes=scan.total_bytes if untouched else None)
        facts += forks.facts
        if contents.bad_rows:
            facts += (f"{contents.bad_rows} catalog rows have wrong checksums",)
        return RecoveryReport(
            agents=self.agents,
            logs=self.logs,
            pages=self.pages,
            file_bytes=self.file_bytes,
            file_times={page_id: scan.times[page_id] for page_id in self.pages},
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
            usage=used,
            counters=contents.counters,
            seconds=time.monotonic() - started_s,
            unreadable=self._unreadable(),
            asleep=self.asleep,
            read_bytes=self.fs.bytes_read,
            reads=self.fs.reads,
            is_catalog_in_line=in_line,
            stuck_forks=forks.stuck,
            waiting_forks=forks.waiting,
        )

    # ---- logs -------------------------------------------------------------------------------------------------------

    def _finish_forks(self) -> FinishedForks:
        return finish_forks(
            self.fs, self.folder, self.fingerprint, self.layouts, self.full_groups, dry_run=self.dry_run
        )

    def _read_logs(
        self, contents: CatalogContents, scan: SwapScan, forks: FinishedForks, read_agents: int, read_bytes: int
    ) -> None:
        agents_folder = self.folder.agents_folder(self.fingerprint)
        found: dict[str, FileStat] = {}
        if not self.dry_run:
            self.fs.fsync_dir(agents_folder)  # names that a killed process left in the system's cache only
        with contextlib.suppress(FileNotFoundError):
            found = dict(self.fs.entries(agents_folder))
        for name in [name for name, facts in found.items() if facts.is_special]:
            del found[name]
            self.foreign.append(str((agents_folder / name).relative_to(self.folder.root)))
        names = list(found)
        for note in forks.stuck:  # what their forks lean on must not change in this run
            name = self.folder.log_path(self.fingerprint, *note.parent_ref).name
            if found.pop(name, None) is not None:
                self.troubles.append(LogTrouble(name, note.parent_ref, "unreadable", 0, 0, "a fork could not read it"))
        committed = {row.log_name: row for row in contents.agents.values()}
        self.asleep = who_sleeps(
            self.fs, agents_folder, found, contents, scan.pages, read_agents=read_agents, read_bytes=read_bytes
        )
        sleeping = {agent.row.log_name for agent in self.asleep.values()}
        for name in found:
            path = agents_folder / name
            if name in sleeping:
                continue
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

    def _read_log(self, path: Path, committed: AgentRow | None) -> None:
        try:
            data = read_twice(lambda: self.fs.read(path))
        except OSError as error:
            self.troubles.append(LogTrouble(path.name, None, "unreadable", 0, 0, str(error)))
            return
        scan = scan_log(data, log_seed(self.fingerprint, path.name))
        image, last, why = replay(path.name, scan, self.layouts, self.full_groups)
        good = 0 if last is None else last.end
        ref = None if image is None else (image.namespace, image.agent)
        seq = 0 if image is None else image.seq
        stale = committed is not None and committed.seq > seq
        if good < len(data):
            torn = not why and scan.damage is not None and scan.damage.kind == "torn"
            kind: Literal["torn", "corrupt"] = "torn" if torn and not stale else "corrupt"
            reason = why or (scan.damage.reason if scan.damage is not None else "")
            self.troubles.append(LogTrouble(path.name, ref, kind, good, len(data) - good, reason))
            if not self.dry_run:
                rest = data[good:] if kind == "corrupt" else None
                target = cut_log(self.fs, path, good, rest, self.quarantine)
                self.quarantined += [] if target is None else [target.name]
        elif stale and committed is not None:
            reason = f"the catalog knows {committed.seq} records, the log has {seq}"
            self.troubles.append(LogTrouble(path.name, ref, "stale", good, 0, reason))
        if image is not None and ref is not None and last is not None:
            if not stale and (committed is None or committed.seq != seq):
                self._flush_log(path)
            self.agents[ref] = image
            self.logs[ref] = bare(last)

    def _flush_log(self, path: Path) -> None:
        """A killed process may have left a record that is in the system's cache only; from here on it counts."""
        if self.dry_run:
            return
        handle = self.fs.open_append(path)
        try:
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
                    header = read_twice(partial(self._header, page_id))
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
        vouched = {page_id for agent in self.asleep.values() for page_id in agent.page_ids}
        for page_id in vouched - named.keys():
            self.pages[page_id] = contents.pages[page_id].header(self.fingerprint)
            self.file_bytes[page_id] = scan.pages[page_id]
        self.orphans = {
            page_id: size for page_id, size in scan.pages.items() if page_id not in named and page_id not in vouched
        }

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
            # without a catalog nobody can say whether there was a log that named them
            if kinds["corrupt"] or kinds["stale"] or self.is_blind:
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

    def _reconcile(self, catalog: Catalog | None, contents: CatalogContents) -> tuple[int, int, bool]:
        """Make the catalog say what logs and files say; returns pages adopted, rows dropped, and whether it does."""
        now_s = time.time()
        adopted = [page_id for page_id in self.pages if self._row_differs(page_id, contents.pages.get(page_id))]
        dropped_pages = [page_id for page_id in contents.pages if page_id not in self.pages]
        unreadable = self._unreadable()
        dropped_agents = [
            ref
            for ref, row in contents.agents.items()
            if ref not in self.agents and ref not in self.asleep and row.log_name not in unreadable
        ]
        in_line = False
        if catalog is not None:
            with contextlib.suppress(*CATALOG_ERRORS):  # derived state: a slower next start is all that is lost
                for page_id in adopted:
                    catalog.put_page(
                        PageRow.of(self.pages[page_id], file_bytes=self.file_bytes[page_id], created_s=now_s)
                    )
                catalog.drop_pages(dropped_pages)
                for namespace, agent in dropped_agents:
                    catalog.drop_agent(namespace, agent)
                for ref, log in self.logs.items():
                    row = agent_row(self.agents[ref], log.checksum, log.last_offset, now_s)
                    if not row.says_the_same(contents.agents.get(ref)):
                        catalog.put_agent(row)
                catalog.commit()
                in_line = True
        return len(adopted), len(dropped_pages) + len(dropped_agents), in_line

    def _unreadable(self) -> frozenset[str]:
        return frozenset(trouble.log for trouble in self.troubles if trouble.kind == "unreadable")

    def _row_differs(self, page_id: PageId, row: PageRow | None) -> bool:
        return row is None or row.file_bytes != self.file_bytes[page_id] or row.key != self.pages[page_id].key


__all__ = ["recover"]
