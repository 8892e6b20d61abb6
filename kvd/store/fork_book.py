"""Forks that have a note and no log yet, and making their logs (`kvd.store.fork_notes` says what a note is).

A log is made when the queue is empty, and before anything that it must not come after: a change of the child's log or
of the parent's, a read of the child's open page, the deletion of either. Where that fails, whatever wanted to happen
next fails with the same answer, and is tried again like anything the disk refused: nothing that a note leans on is
ever changed under it.

Once all logs are there the notes are taken back. An agent that a note still names is deleted only after that, or the
next start would make it anew.

Owned by the swap thread. May import kvd.errors, kvd.ids and siblings of kvd.store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from kvd.errors import KvdError
from kvd.ids import PageId
from kvd.store.agent_image import AgentImage, Layouts
from kvd.store.agent_log import FRAME
from kvd.store.errors import LogVanished, PageNotDurable, RecordInvalid
from kvd.store.fork_notes import ForkNote, child_image, child_record, keep_notes, open_notes, put_notes_aside
from kvd.store.fs import FileSystem, is_no_file
from kvd.store.layout import DataFolder
from kvd.store.log_book import Admit, LogBook
from kvd.store.log_tails import read_tail
from kvd.store.recovery_report import AgentRef

MAX_WAITING: Final = 64
"""Forks that may wait for their logs: their parent's next record waits for all of them, some 10 ms each on an SSD."""


class ForkBook:
    """Notes of forks and the logs they promise. All methods but `is_empty` mutate it.

    Args:
        folder, fingerprint, fs, layouts: as of the store.
        logs: where logs are made.
        facts: told what belongs into the log.
        made: told of each log that was made, by agent and length.
        stuck: notes that recovery left in the file, since it could not tell what they promise.
        waiting: notes that it left there, and what they promise.
    """

    def __init__(
        self,
        folder: DataFolder,
        fingerprint: str,
        fs: FileSystem,
        layouts: Layouts,
        logs: LogBook,
        facts: Callable[[str], None],
        made: Callable[[AgentRef, int], None],
        stuck: Sequence[ForkNote] = (),
        waiting: Sequence[tuple[ForkNote, AgentImage]] = (),
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._fs = fs
        self._layouts = layouts
        self._logs = logs
        self._facts = facts
        self._made = made
        self._stuck = list(stuck)  # whoever they promise a log to is unknown in this run; no notes are added to them
        self._waiting: dict[AgentRef, tuple[ForkNote, AgentImage, Path]] = {}
        self._promised: dict[AgentRef, int] = {}
        self._named: set[AgentRef] = set()  # by the file, as far as it may hold anything
        self._notes = open_notes(fs, folder, fingerprint)
        self._seq = 0
        for note, image in waiting:
            self._named.add(note.child_ref)
            source = folder.log_path(fingerprint, *note.parent_ref)
            self._wait(note, image, source, image.page_ids(), image.rewritten_bytes(image.branches))

    @property
    def promised_bytes(self) -> int:
        """What the logs that are still to be made will take, at most."""
        return sum(self._promised.values())

    @property
    def is_empty(self) -> bool:
        """Whether every fork has its log and no note stands."""
        return not self._waiting and not self._named

    def add(self, note: ForkNote, durable: Set[PageId], admit: Admit, flushing: Callable[[], None]) -> AgentImage:
        """Make a fork durable by a note.

        Args:
            note: what is wanted, without the parent's last record.
            durable: pages with a durable file.
            admit: the quota; what the child's log will take must fit as well.
            flushing: called when nothing is left to do but to flush.

        Raises:
            RecordInvalid, PageNotDurable, LogDamaged, AgentNotFound, QuotaExceeded: nothing was written, and a record
                of the child itself may do.
            OSError: the disk refused; the note is there or not, and the child is not known by it.
        """
        if note.parent_ref in self._waiting:
            self._make(note.parent_ref)
        if self._stuck:
            raise RecordInvalid("notes of earlier forks wait for the disk")
        if len(self._waiting) >= MAX_WAITING:
            raise RecordInvalid(f"{MAX_WAITING} forks wait for their logs")
        if not self._logs.is_free(note.child_ref):
            raise RecordInvalid(f"agent {note.child!r} has a log, or something in its place")
        parent, log = self._logs.stands(note.parent_ref)
        image = child_image(parent, note)
        pages = image.page_ids()
        if not pages <= durable:
            raise PageNotDurable(page_ids=tuple(sorted(pages - durable)))
        note = replace(note, parent_seq=parent.seq, parent_checksum=log.checksum)
        payload = (note.encode(),)
        log_bytes = image.rewritten_bytes(image.branches)
        admit(FRAME.size + len(payload[0]) + log_bytes)
        self._append(note.child_ref, payload, flushing)
        self._wait(note, image, log.path, pages, log_bytes)
        return image

    def _wait(self, note: ForkNote, image: AgentImage, source: Path, pages: set[PageId], log_bytes: int) -> None:
        self._waiting[note.child_ref] = (note, image, source)
        self._promised[note.child_ref] = log_bytes
        self._logs.promise(note.child_ref, pages, log_bytes)

    def _append(self, child: AgentRef, payload: tuple[bytes], flushing: Callable[[], None]) -> None:
        if self._named and not self._seq:  # what is in the file is of an earlier start, or was refused, or is in doubt
            self.settle_all()
            self._take_back()
        self._named.add(child)  # whatever becomes of it: a write that fails may be there all the same
        try:
            self._notes.append(self._seq + 1, payload, flushing)
        except (LogVanished, OSError) as error:
            if isinstance(error, OSError) and not is_no_file(error):
                raise
            # somebody removed the file: what it said is told by logs instead, and a new one begins
            self.settle_all()
            self.folder_vanished()
            self._take_back()
            self._named.add(child)
            self._notes.append(self._seq + 1, payload)
        self._seq += 1

    def settle(self, ref: AgentRef) -> None:
        """Make the logs of an agent and of its children.

        Raises:
            OSError: the disk refused; what is not made waits on.
        """
        if not self._waiting:
            return
        for child, (note, _, _) in list(self._waiting.items()):
            if ref in (child, note.parent_ref):
                self._make(child)

    def settle_all(self) -> None:
        """Make all logs; raises as `settle`."""
        for ref in list(self._waiting):
            self._make(ref)

    def let_go(self, ref: AgentRef) -> None:
        """An agent is about to be deleted: nothing leans on its log any more, and no note brings it back.

        Raises:
            OSError: the disk refused; it must not be deleted now.
        """
        self.settle(ref)
        left = [note for note in self._stuck if note.child_ref != ref]
        if ref in self._named or len(left) < len(self._stuck):
            self._named.add(ref)  # until the disk has said otherwise
            self.settle_all()
            self._stuck = left
            self._take_back()

    def tidy(self) -> None:
        """Make all logs and take the notes back, as far as the disk lets; the rest is tried again."""
        if self.is_empty:
            return
        try:
            self.settle_all()
            self._take_back()
        except (OSError, KvdError) as error:
            self._facts(f"{len(self._waiting)} forks have no logs of their own yet: {error}")

    def folder_vanished(self) -> None:
        """The file may be gone with the folder, and logs are made from what memory has; what is left is taken back."""
        self._notes = open_notes(self._fs, self._folder, self._fingerprint)
        self._seq = 0

    def _take_back(self) -> None:
        try:
            if self._stuck:
                keep_notes(self._fs, self._folder, self._fingerprint, self._stuck)
            else:
                self._notes.clear()
        except OSError as error:
            if not is_no_file(error):
                raise
            self._facts(put_notes_aside(self._fs, self._folder, self._fingerprint))
            self.folder_vanished()
        self._seq = 0
        self._named.clear()

    def _make(self, ref: AgentRef) -> None:
        _, image, source = self._waiting[ref]
        record, lost = child_record(image, partial(self._tail, source, image))
        made = self._logs.begin(record)
        del self._waiting[ref], self._promised[ref]
        if lost:
            self._facts(f"log of fork {ref[1]!r}: {lost}")
        self._made(ref, made.log_bytes)

    def _tail(self, source: Path, image: AgentImage, branch: int, group: int, segment: int) -> bytes:
        return read_tail(self._fs, source, image, self._layouts, (branch, group, segment))


__all__ = ["ForkBook"]
