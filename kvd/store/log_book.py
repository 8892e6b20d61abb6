"""All agents' logs of one model: append, compact, read tails, delete; and which pages they name.

A record is applied to the agent's image before it is written, so no log ever holds a record that cannot be replayed.
An agent that a fork's note made durable has no log yet: it is *promised* (`kvd.store.fork_book`), and its pages count.

Long because whatever changes a log keeps the books of all of them. Owned by the swap thread. May import kvd.errors,
kvd.ids and siblings of kvd.store.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from kvd.errors import AgentNotFound
from kvd.ids import PageId
from kvd.store.agent_image import AgentImage, Layouts, apply
from kvd.store.agent_log import FRAME, AgentLog, LogScan, Payload, log_seed, scan_log
from kvd.store.catalog import AgentRow
from kvd.store.errors import (
    LogCorrupt,
    LogDamaged,
    LogUnreadable,
    LogVanished,
    PageNotDurable,
    QuotaExceeded,
    RecordInvalid,
)
from kvd.store.fs import FileSystem, NotRegularFile
from kvd.store.layout import DataFolder
from kvd.store.log_replay import bare, cut_log, replay
from kvd.store.log_tails import read_tail
from kvd.store.record_codec import encode_parts
from kvd.store.records import AgentRecord
from kvd.store.recovery_report import AgentRef, RecoveryReport, agent_row
from kvd.store.sleeping import SleepingAgent
from kvd.store.snapshot import snapshot_records, stands_alone
from kvd.store.swap_dir import copy_aside, move_aside

Admit = Callable[[int], None]
"""Raises QuotaExceeded when that many bytes may not be written."""

VERIFIED_LOG_BYTES: Final = 1_000_000
"""Longest log that is read back as a whole: less than a millisecond."""

VERIFY_EVERY_S: Final = 60.0
"""How often, at most, a commit reads such a log back."""


@dataclass(slots=True)
class _Entry:
    image: AgentImage
    log: AgentLog
    verified_s: float
    """When the whole log was last known to be good."""
    damaged: bool = False
    """A replay would not get through the log; `image` is what was committed all the same."""
    unsure: bool = False
    """A compaction failed at its end and nobody could read since which of the two logs is there."""


class LogBook:
    """Logs and images of all agents. `append`, `compact`, `wake`, `delete` and `forget_lost` are the only mutators.

    An agent that sleeps has no image yet; what needs one wakes it.

    Attributes:
        renewed: damaged logs that were begun anew.
        namespace_bytes: what logs take as far as they are committed, by namespace.
        unreadable: names of logs that the disk refused to read at start. What they name is unknown: while there is one,
            no page may be deleted.
    """

    def __init__(
        self,
        folder: DataFolder,
        fingerprint: str,
        fs: FileSystem,
        layouts: Layouts,
        full_groups: frozenset[int] | None,
        recovered: RecoveryReport,
        facts: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._fs = fs
        self._layouts = layouts
        self._full_groups = full_groups
        self._facts = facts
        self._clock = clock
        self.renewed = 0
        self._entries: dict[AgentRef, _Entry] = {}
        self._references: Counter[PageId] = Counter()
        self._names_unsettled = False
        self.namespace_bytes: Counter[str] = Counter()
        self._counted: dict[AgentRef, int] = {}
        self.unreadable = set(recovered.unreadable)
        self._promised: dict[AgentRef, set[PageId]] = {}
        self._asleep: dict[AgentRef, SleepingAgent] = dict(recovered.asleep)
        for ref, agent in self._asleep.items():
            self._references.update(agent.page_ids)
            self._count(ref, agent.scan.good_bytes)
        for ref, image in recovered.agents.items():
            if ref in recovered.logs:  # the others are promised one
                self._put(ref, image, self._open(ref, recovered.logs[ref]))

    def image(self, ref: AgentRef) -> AgentImage | None:
        """The agent as its log says, None when it has none."""
        entry = self._entries.get(ref)
        return None if entry is None else entry.image

    def log_bytes(self, ref: AgentRef) -> int:
        """Length of the agent's log as far as it is committed; 0 when it has none."""
        known = ref in self._entries or ref in self._asleep
        return self._log(ref).good_bytes if known else 0

    def rows(self, now_s: float) -> list[AgentRow]:
        """Catalog rows of all agents."""
        return [
            *(agent.row for agent in self._asleep.values()),
            *(_row(each, now_s) for each in self._entries.values()),
        ]

    def row(self, ref: AgentRef, now_s: float) -> AgentRow:
        """Catalog row of one agent."""
        return _row(self._entries[ref], now_s)

    def references(self, page_id: str) -> int:
        """How many agents' logs name a page."""
        return self._references[PageId(page_id)]

    def wake(self, ref: AgentRef) -> AgentImage:
        """Read and verify the log of an agent that sleeps; one that is awake stays as it is.

        What is found wrong is treated as at a start: records from the first bad one on go to quarantine, and the agent
        is what is left. When it returns or raises LogCorrupt the agent sleeps no more.

        Raises:
            AgentNotFound: no such agent.
            LogCorrupt: nothing of its log is good; the log is in quarantine and the agent is unknown from now on.
            OSError: the disk refused; it goes on sleeping.
        """
        agent = self._asleep.get(ref)
        if agent is None:
            return self._entry(ref).image
        log = self._open(ref, agent.scan)
        try:
            data = self._fs.read(log.path)
        except (FileNotFoundError, NotADirectoryError, NotRegularFile):
            data = b""
        scan = scan_log(data, log_seed(self._fingerprint, log.path.name))
        image, last, why = replay(log.path.name, scan, self._layouts, self._full_groups)
        quarantine = self._folder.quarantine_folder(self._fingerprint)
        if image is None or last is None:
            move_aside(self._fs, log.path, quarantine)
            self._drop(ref)
            raise LogCorrupt(path=str(log.path), offset=0, reason=why or _reason(scan))
        if last.end < len(data):
            target = cut_log(self._fs, log.path, last.end, data[last.end :], quarantine)
            self._facts(
                f"log {log.path.name}: {len(data) - last.end} committed bytes changed ({why or _reason(scan)}); "
                f"put aside as {'' if target is None else target.name}"
            )
        self._drop(ref)
        self._put(ref, image, self._open(ref, bare(last)))
        return image

    def append(self, record: AgentRecord, durable: Collection[PageId], admit: Admit) -> AgentImage:
        """Commit a record. One that stands alone replaces a damaged log; the other branches come along.

        Args:
            record: the change.
            durable: pages with a durable file.
            admit: the quota.

        Raises:
            RecordInvalid, PageNotDurable, QuotaExceeded, LogUnreadable: nothing was written.
            LogDamaged: the log is damaged and the record needs it; nothing was written.
            LogVanished: committed bytes are gone; what is left is in quarantine and the agent is unknown from now on.
            OSError: the disk refused; the log is as before (or a damaged one was replaced, not durable yet).
        """
        ref = (record.namespace, record.agent)
        entry = self._sure(ref)
        if entry is not None:
            if not entry.damaged and self._clock() - entry.verified_s >= VERIFY_EVERY_S:
                self._verify(entry)
            if entry.damaged:
                if not stands_alone(record):
                    raise LogDamaged(path=str(entry.log.path))
                return self._renew(ref, entry, record, durable, admit)
        payload = encode_parts(record)
        frame_bytes = FRAME.size + sum(map(len, payload))
        log = entry.log if entry is not None else self._new_log(ref)
        image = apply(
            entry.image if entry is not None else None,
            record,
            payload_end=log.good_bytes + frame_bytes,
            layouts=self._layouts,
            full_groups=self._full_groups,
        )
        absent = tuple(sorted(page for page in image.branch.page_ids() if page not in durable))
        if absent:
            raise PageNotDurable(page_ids=absent)
        admit(frame_bytes)
        try:
            log.append(record.seq, payload)
        except LogVanished:
            self._lose(ref)
            raise
        self._put(ref, image, log, None if entry is None else entry.verified_s)
        return image

    # ---- forks ------------------------------------------------------------------------------------------------------

    def stands(self, ref: AgentRef) -> tuple[AgentImage, AgentLog]:
        """An agent whose log others may begin as: awake, and whole as far as a look now and then can tell.

        Raises:
            AgentNotFound: no such agent.
            LogDamaged: its log is not what was committed.
            OSError: the disk refused.
        """
        entry = self._entry(ref)
        self.settle()  # its name may be the one of before a compaction, after a crash
        if not entry.damaged and self._clock() - entry.verified_s >= VERIFY_EVERY_S:
            self._verify(entry)
        found = self._fs.stat(entry.log.path)
        if entry.damaged or found is None or found.file_bytes < entry.log.good_bytes:
            raise LogDamaged(path=str(entry.log.path))
        return entry.image, entry.log

    def is_free(self, ref: AgentRef) -> bool:
        """Whether an agent has neither a log nor a promise of one, nor any file in a log's place."""
        path = self._folder.log_path(self._fingerprint, *ref)
        known = ref in self._entries or ref in self._asleep or ref in self._promised
        return not known and path.name not in self.unreadable and self._fs.stat(path) is None

    def promise(self, ref: AgentRef, page_ids: set[PageId], log_bytes: int) -> None:
        """An agent's log is still to be made; the pages it will name, and its length, count from now on."""
        self._promised[ref] = page_ids
        self._references.update(page_ids)
        self._count(ref, log_bytes)

    def begin(self, record: AgentRecord) -> AgentImage:
        """Make a promised log, all or nothing; harmless to repeat.

        Raises:
            OSError: the disk refused.
        """
        ref = (record.namespace, record.agent)
        log, images = self._open(ref, None), list[AgentImage]()
        log.replace(self._frames([record], images))
        self._put(ref, images[0], log)
        return images[0]

    # ---- logs as a whole --------------------------------------------------------------------------------------------

    def compact(
        self, ref: AgentRef, keep: frozenset[int] | None, admit: Admit, *, open_pages: bool = True
    ) -> AgentImage:
        """Rewrite a log as snapshots, one branch in memory at a time; all or nothing.

        Without `open_pages` the new log has no KV: text and ids stay, and what they lack is computed again.

        A branch other than the current one whose tail is rotten is cut to its last page border.

        Raises:
            AgentNotFound: no such agent.
            LogCorrupt, FormatUnknown: the current branch's tail cannot be read; the log is as before.
            QuotaExceeded: the log is as before.
            OSError: the log is as before, or the new one, not durable yet; `settle` makes it so.
        """
        entry = self._entry(ref)
        image = entry.image if open_pages else entry.image.without_open_pages()
        admit(image.rewritten_bytes(image.branches if keep is None else keep))
        return self._rewrite(ref, entry, self._snapshots(entry, image, keep))

    def _renew(
        self, ref: AgentRef, entry: _Entry, record: AgentRecord, durable: Collection[PageId], admit: Admit
    ) -> AgentImage:
        """Begin a damaged log anew: the other branches as they were committed, then a record that stands alone.

        A copy of the old log goes to quarantine if there is room, then the new log takes its place in one move. A
        branch whose tail is rotten is cut to its last page border.
        """
        absent = {page.page_id for delta in record.segments for page in delta.new_pages}.difference(durable)
        if absent:
            raise PageNotDurable(page_ids=tuple(sorted(absent)))
        record = replace(record, meta={**entry.image.meta, **record.meta})
        records: Iterable[AgentRecord] = [record]
        wanted_bytes = FRAME.size + sum(map(len, encode_parts(record)))
        rest = entry.image.without(record.branch)
        if rest is not None:
            wanted_bytes += rest.rewritten_bytes(rest.branches)
            records = chain(self._snapshots(entry, rest, None, cut_current=True), records)
        admit(wanted_bytes)
        path, quarantine = entry.log.path, self._folder.quarantine_folder(self._fingerprint)
        try:
            admit(wanted_bytes + entry.image.log_bytes)
            copy = copy_aside(self._fs, path, quarantine)
            self._facts(f"log {path.name} is damaged; a copy of it was put aside as {copy.name}")
        except (OSError, QuotaExceeded) as error:  # never a reason to fail
            self._facts(f"log {path.name} is damaged; no copy of it was kept: {error}")
        image = self._rewrite(ref, entry, records)
        self.renewed += 1
        return image

    def _rewrite(self, ref: AgentRef, entry: _Entry, records: Iterable[AgentRecord]) -> AgentImage:
        images: list[AgentImage] = []
        try:
            entry.log.replace(self._frames(records, images))
        except OSError:
            entry.unsure = True
            with contextlib.suppress(OSError, RecordInvalid):
                self._sure(ref)
            raise
        self._put(ref, images[-1], entry.log)
        return images[-1]

    def _snapshots(
        self, entry: _Entry, image: AgentImage, keep: frozenset[int] | None, *, cut_current: bool = False
    ) -> Iterator[AgentRecord]:
        """`snapshot_records` of an image of the entry's log."""
        name = entry.log.path.name
        return snapshot_records(
            image,
            lambda branch, group, segment: self._tail(entry, branch, group, segment),
            keep=keep,
            cut_current=cut_current,
            on_cut=lambda branch: self._facts(f"log {name}: the tail of branch {branch} is rotten and was let go"),
        )

    def _frames(self, records: Iterable[AgentRecord], images: list[AgentImage]) -> Iterator[tuple[int, Payload]]:
        """Frames of a log of these records; `images` ends with the agent as they say."""
        image, end = None, 0
        for record in records:
            payload = encode_parts(record)
            end += FRAME.size + sum(map(len, payload))
            image = apply(image, record, payload_end=end, layouts=self._layouts, full_groups=self._full_groups)
            images[:] = [image]
            yield record.seq, payload

    def read_tail(self, ref: AgentRef, branch: int, group: int, segment: int = 0) -> bytes:
        """Tail KV of a branch, in layout order; empty when it has none.

        The log is being read anyway, so a short one is verified: what a replay would not get through is known then.

        Raises:
            AgentNotFound: no such agent, branch or segment.
            FormatUnknown: no layout for its format.
            LogCorrupt: the bytes are not what was committed.
            OSError: the disk refused.
        """
        entry = self._entry(ref)
        try:
            tail = self._tail(entry, branch, group, segment)
        except LogCorrupt:
            entry.damaged = True
            raise
        self._verify(entry)
        return tail

    def _tail(self, entry: _Entry, branch: int, group: int, segment: int) -> bytes:
        return read_tail(self._fs, entry.log.path, entry.image, self._layouts, (branch, group, segment))

    def delete(self, ref: AgentRef) -> int:
        """Delete a log and forget its agent; the deletion is durable when this returns.

        Returns:
            Bytes freed.
        """
        path = self._folder.log_path(self._fingerprint, *ref)
        found = self._fs.stat(path)
        if found is not None:
            self._fs.unlink(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._fs.fsync_dir(path.parent)  # also when there is no file: an earlier try may have failed just here
        self._drop(ref)
        self.unreadable.discard(path.name)
        return 0 if found is None else found.file_bytes

    def settle(self) -> None:
        """Make a compaction that failed at its very end durable; called before pages are deleted.

        Raises:
            OSError: still not durable.
        """
        if self._names_unsettled:
            self._fs.fsync_dir(self._folder.agents_folder(self._fingerprint))
            self._names_unsettled = False

    def forget_lost(self) -> list[AgentRef]:
        """Forget agents whose logs are gone or too short (the folder vanished); what is left goes to quarantine."""
        lost = []
        for ref in [*self._entries, *self._asleep]:
            log = self._log(ref)
            found = self._fs.stat(log.path)
            if found is None or found.file_bytes < log.good_bytes:
                self._lose(ref)
                lost.append(ref)
        folder = self._folder.agents_folder(self._fingerprint)
        self.unreadable = {name for name in self.unreadable if self._fs.stat(folder / name) is not None}
        return lost

    # ---- internals --------------------------------------------------------------------------------------------------

    def _entry(self, ref: AgentRef) -> _Entry:
        entry = self._sure(ref)
        if entry is None:
            raise AgentNotFound(f"There is no agent {ref[1]!r} in namespace {ref[0]!r}.")
        return entry

    def _sure(self, ref: AgentRef) -> _Entry | None:
        """The entry, with the log that is there; OSError when that cannot be told now (nothing may be written then).

        An agent that sleeps is woken. One of whose log nothing is good has none any more.
        """
        if ref in self._asleep:
            with contextlib.suppress(LogCorrupt):
                self.wake(ref)
        entry = self._entries.get(ref)
        if entry is not None and entry.unsure:
            self._reread(ref)
            self._entries[ref].unsure = False
        return self._entries.get(ref)

    def _log(self, ref: AgentRef) -> AgentLog:
        """The log of an agent, be it asleep or awake."""
        agent = self._asleep.get(ref)
        return self._entries[ref].log if agent is None else self._open(ref, agent.scan)

    def _open(self, ref: AgentRef, scan: LogScan | None, *, name_durable: bool = True) -> AgentLog:
        path = self._folder.log_path(self._fingerprint, *ref)
        return AgentLog(self._fs, path, log_seed(self._fingerprint, path.name), scan, name_durable=name_durable)

    def _new_log(self, ref: AgentRef) -> AgentLog:
        """A log for an agent that has none; a file that is there anyway is put aside.

        Raises:
            LogUnreadable: it has one that could not be read at start, and which is as good as it ever was.
        """
        log = self._open(ref, None)
        if log.path.name in self.unreadable:
            raise LogUnreadable(agent=ref[1], path=str(log.path))
        found = self._fs.stat(log.path)
        if found is not None and (found.file_bytes or found.is_special):
            self._put_aside(log)
        return log

    def _put_aside(self, log: AgentLog) -> None:
        moved = move_aside(self._fs, log.path, self._folder.quarantine_folder(self._fingerprint))
        if moved is not None:
            self._facts(f"log {log.path.name} put aside as {moved.name}")

    def _lose(self, ref: AgentRef) -> None:
        log = self._log(ref)
        self._drop(ref)
        with contextlib.suppress(OSError):
            self._put_aside(log)

    def _verify(self, entry: _Entry) -> None:
        """See whether a short log still is what was committed; what the disk refuses to read proves nothing."""
        if entry.log.good_bytes > VERIFIED_LOG_BYTES:
            return
        with contextlib.suppress(OSError):
            entry.damaged = entry.damaged or not entry.log.intact()
            entry.verified_s = self._clock()

    def _put(self, ref: AgentRef, image: AgentImage, log: AgentLog, verified_s: float | None = None) -> None:
        old = self._entries.get(ref)
        new_pages = image.page_ids()
        promised = self._promised.pop(ref, set())
        old_pages = old.image.page_ids() if old is not None else promised
        self._references.update(new_pages - old_pages)
        self._dereference(old_pages - new_pages)
        self._entries[ref] = _Entry(image, log, self._clock() if verified_s is None else verified_s)
        self._count(ref, log.good_bytes)

    def _drop(self, ref: AgentRef) -> None:
        entry, agent = self._entries.pop(ref, None), self._asleep.pop(ref, None)
        self._dereference(self._promised.pop(ref, set()))
        if entry is not None:
            self._dereference(entry.image.page_ids())
        if agent is not None:
            self._dereference(agent.page_ids)
        self._count(ref, 0)

    def _count(self, ref: AgentRef, log_bytes: int) -> None:
        self.namespace_bytes[ref[0]] += log_bytes - self._counted.pop(ref, 0)
        if log_bytes:
            self._counted[ref] = log_bytes

    def _dereference(self, page_ids: Collection[PageId]) -> None:
        for page_id in page_ids:
            self._references[page_id] -= 1
            if self._references[page_id] <= 0:
                del self._references[page_id]

    def _reread(self, ref: AgentRef) -> None:
        """After a rewrite failed: see which of the two logs is there (the new one is whole)."""
        log = self._entries[ref].log
        data, seed = self._fs.read(log.path), log_seed(self._fingerprint, log.path.name)
        # what follows the old log's committed part was refused, however whole it looks: nobody may take it for a record
        old = scan_log(data[: log.good_bytes], seed)
        if old.checksum == log.checksum and old.good_bytes == log.good_bytes:
            return
        scan = scan_log(data, seed)
        if scan.damage is not None:
            self._entries[ref].damaged = True
            return
        image, last, why = replay(log.path.name, scan, self._layouts, self._full_groups)
        if image is None or last is None or why:
            raise RecordInvalid(why or "the log is empty")
        self._names_unsettled = True
        self._put(ref, image, self._open(ref, bare(last), name_durable=False))


def _row(entry: _Entry, now_s: float) -> AgentRow:
    return agent_row(entry.image, entry.log.checksum, entry.log.last_offset, now_s)


def _reason(scan: LogScan) -> str:
    return "empty" if scan.damage is None else scan.damage.reason


__all__ = ["Admit", "LogBook"]
