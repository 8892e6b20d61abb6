"""A fork's note: one short frame that makes a new agent durable, as the beginning of another one's log.

Theory of operation. What a fork's own first record would say stands in its parent's log already: text, ids, names of
pages, the KV of the open page. Saying it again costs half a megabyte that is copied, encoded, summed and flushed as a
new file, while somebody waits. So a fork appends a *note* to `forks.log` (frames and chain as in `kvd.store.agent_log`)
and is durable with its one flush. The child's log is made from the parent's afterwards (`kvd.store.fork_book`), or by
`finish_forks` at the next start.

A note speaks of a parent's log up to the record it names, by number and chained checksum; whoever changes that log
makes the logs of its children first. So a note whose parent's log has no such record has been seen to, or the parent
was damaged since. Records that follow are none that anybody was told of: what the disk refused may be there.

Pure but for `finish_forks`. May import kvd.quant.spec, kvd.vm.text and siblings of kvd.store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgpack

from kvd.quant.spec import PAGE_TOKENS
from kvd.store.agent_image import AgentImage, BranchImage, Layouts, SegmentState, cut_fragments
from kvd.store.agent_log import AgentLog, frame_header, log_seed, scan_log
from kvd.store.errors import LogCorrupt, RecordInvalid
from kvd.store.fs import FileSystem, NotRegularFile, is_no_file, read_twice, write_file
from kvd.store.layout import DataFolder
from kvd.store.log_replay import replay
from kvd.store.log_tails import read_tail
from kvd.store.record_codec import encode_parts
from kvd.store.records import AgentRecord
from kvd.store.snapshot import ReadTail, snapshot_records
from kvd.store.swap_dir import aside_path, move_aside
from kvd.vm.text import cut_spans

NOTE_VERSION: Final = 1
MAX_NOTES_BYTES: Final = 64 << 20
"""A longer file was not made by kvd."""

_FIELDS: Final = 11


@dataclass(frozen=True, slots=True)
class ForkNote:
    """Which log a child's begins as.

    Attributes:
        namespace: of both.
        parent: the agent whose log it is.
        child: the new agent.
        branch: of the parent's branches, the one.
        tokens: its first ids, which the child has.
        child_branch: number of the child's branch.
        time_s: wall clock, seconds since the epoch.
        meta: of the child (`created_s`, `ttl_s`, ...).
        parent_seq, parent_checksum: the parent's last record.
    """

    namespace: str
    parent: str
    child: str
    branch: int
    tokens: int
    child_branch: int
    time_s: float
    meta: Mapping[str, object] = field(default_factory=dict)
    parent_seq: int = 0
    parent_checksum: bytes = b""

    @property
    def parent_ref(self) -> tuple[str, str]:
        """Namespace and name of the parent."""
        return self.namespace, self.parent

    @property
    def child_ref(self) -> tuple[str, str]:
        """Namespace and name of the child."""
        return self.namespace, self.child

    def encode(self) -> bytes:
        """As msgpack.

        Raises:
            RecordInvalid: it holds what msgpack cannot carry.
        """
        fields = (self.namespace, self.parent, self.child, self.branch, self.tokens, self.child_branch)
        rest = (float(self.time_s), dict(self.meta), self.parent_seq, self.parent_checksum)
        try:
            return bytes(msgpack.packb([NOTE_VERSION, *fields, *rest], use_bin_type=True))
        except (TypeError, ValueError, OverflowError) as error:
            raise RecordInvalid(f"it cannot be encoded ({error})") from error


def decode_note(payload: bytes | memoryview) -> ForkNote:
    """Read what `ForkNote.encode` made.

    Raises:
        RecordInvalid: anything else.
    """
    try:
        found: Any = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise RecordInvalid(f"it cannot be decoded ({error})") from error
    kinds = (int, str, str, str, int, int, int, float, dict, int, bytes)
    if not isinstance(found, list) or [type(each) for each in found] != list(kinds) or found[0] != NOTE_VERSION:
        raise RecordInvalid("it is no note of a version this kvd knows")
    return ForkNote(*found[1:])


# ---- what a note makes ----------------------------------------------------------------------------------------------


def child_image(parent: AgentImage, note: ForkNote) -> AgentImage:
    """The child as it begins; its open page's bytes are fragments of the *parent's* log.

    Raises:
        RecordInvalid: the parent's log does not hold all of it: an open page that is sealed by now, say.
    """
    branch = parent.branches.get(note.branch)
    if branch is None or not branch.uniform or not 0 <= note.tokens <= len(branch.tokens):
        raise RecordInvalid(f"no log has {note.tokens} tokens of branch {note.branch}")
    computed = min(branch.computed_tokens, note.tokens)
    is_whole = note.tokens == len(branch.tokens)
    text_bytes = len(branch.text) if is_whole else sum(branch.token_bytes[: note.tokens])
    child = BranchImage(
        tokens=branch.tokens[: note.tokens],
        token_bytes=branch.token_bytes[: note.tokens],
        spans=branch.spans if is_whole else tuple(cut_spans(branch.spans, text_bytes)),
        text=branch.text[:text_bytes],
        computed_tokens=computed,
        segments=tuple(_beginning(segment, computed) for segment in branch.segments),
        time_s=note.time_s,
        numerics=branch.numerics,
    )
    return AgentImage(
        note.namespace, note.child, {note.child_branch: child}, note.child_branch, meta=dict(note.meta), seq=1
    )


def _beginning(segment: SegmentState, computed: int) -> SegmentState:
    """A segment cut to its first tokens; a page that is cut must be the open one, whose KV is in the log."""
    pages, tail = divmod(computed, PAGE_TOKENS)
    if len(segment.pages) < pages or (tail and (len(segment.pages) != pages or segment.tail_tokens < tail)):
        raise RecordInvalid(f"no log has the KV of {computed} tokens of group {segment.group}")
    fragments = tuple(cut_fragments(segment.fragments, tail)) if tail else ()
    return replace(segment, pages=segment.pages[:pages], tail_tokens=tail, fragments=fragments)


def child_record(image: AgentImage, read: ReadTail) -> tuple[AgentRecord, str]:
    """The first record of a child's log, which says everything.

    Args:
        image: of `child_image`.
        read: its tails, from the parent's log.

    Returns:
        The record, and what was lost, in words: an open page whose bytes are rotten is computed again.
    """
    try:
        (record,) = snapshot_records(image, read)
    except LogCorrupt as error:
        (record,) = snapshot_records(image.without_open_pages(), read)
        return record, f"its open page is let go of: {error.message}"
    return record, ""


# ---- the file -------------------------------------------------------------------------------------------------------


def open_notes(fs: FileSystem, folder: DataFolder, fingerprint: str) -> AgentLog:
    """The file of notes, for appending; what is in it is none of this run's."""
    path = folder.forks_path(fingerprint)
    return AgentLog(fs, path, log_seed(fingerprint, path.name))


def keep_notes(fs: FileSystem, folder: DataFolder, fingerprint: str, notes: Sequence[ForkNote]) -> None:
    """Take back all notes but these, durably.

    Raises:
        OSError: the disk refused; the others may stand or not.
    """
    if notes:
        path = folder.forks_path(fingerprint)
        write_file(fs, path, _frames(notes, log_seed(fingerprint, path.name)))
    else:
        open_notes(fs, folder, fingerprint).clear()


def put_notes_aside(fs: FileSystem, folder: DataFolder, fingerprint: str) -> str:
    """Make way for notes where a folder, a link or a pipe has the name of their file; says so.

    Raises:
        OSError: the disk refused.
    """
    path = folder.forks_path(fingerprint)
    moved = move_aside(fs, path, folder.quarantine_folder(fingerprint))
    return f"{path.name} was no file" + ("" if moved is None else f"; put aside as {moved.name}")


@dataclass(frozen=True, slots=True)
class FinishedForks:
    """What a start found of forks.

    Attributes:
        facts: what a person should know.
        stuck: notes whose parent's log the disk refused to read: they stay for the next start, and so must that log.
        waiting: notes, and the agents they make, whose own logs the disk refused to make. Their open pages are in their
            parents' logs.
    """

    facts: tuple[str, ...] = ()
    stuck: tuple[ForkNote, ...] = ()
    waiting: tuple[tuple[ForkNote, AgentImage], ...] = ()


def finish_forks(
    fs: FileSystem,
    folder: DataFolder,
    fingerprint: str,
    layouts: Layouts,
    full_groups: frozenset[int] | None,
    *,
    dry_run: bool,
) -> FinishedForks:
    """Make the logs that notes promise, before logs are read; harmless to repeat.

    With `dry_run` nothing is changed and the facts say what would be.

    Raises:
        OSError: the disk refused; run it again.
    """
    path = folder.forks_path(fingerprint)
    found = fs.stat(path)
    if found is None:
        return FinishedForks()
    if not (found.file_bytes or found.is_folder or found.is_special):
        if not dry_run:
            _flush(fs, path)  # what a killed process took back may be back after a loss of power
        return FinishedForks()
    try:
        data = read_twice(lambda: fs.read(path, limit=MAX_NOTES_BYTES))
    except OSError as error:
        if not is_no_file(error):
            raise
        return FinishedForks((f"{path.name} is no file" if dry_run else put_notes_aside(fs, folder, fingerprint),))
    scan = scan_log(data, log_seed(fingerprint, path.name))
    facts: list[str] = []
    if scan.damage is not None and scan.damage.kind == "corrupt":
        facts.append(f"{path.name}: notes of forks changed ({scan.damage.reason}); what is left of them is put aside")
        if not dry_run:
            write_file(fs, aside_path(fs, path.name, folder.quarantine_folder(fingerprint)), [data])
    elif scan.damage is not None:  # one was being written, or nothing in the file can be read
        facts.append(f"{path.name}: what follows {len(scan.frames)} notes of forks is none ({scan.damage.reason})")
    stuck: list[ForkNote] = []
    waiting: dict[tuple[str, str], tuple[ForkNote, AgentImage]] = {}
    for frame in scan.frames:
        try:
            note = decode_note(frame.payload)
        except RecordInvalid as error:
            facts.append(f"{path.name}: a note cannot be read: {error.reason}")
            continue
        who = f"fork {note.child!r} of {note.parent!r}"
        if note.child_ref in waiting or fs.stat(folder.log_path(fingerprint, *note.child_ref)) is not None:
            continue
        try:
            image = _promised(fs, folder, fingerprint, note, layouts, full_groups)
        except RecordInvalid as error:
            facts.append(f"{who} is lost: {error.reason}")
            continue
        except OSError as error:
            stuck.append(note)
            facts.append(f"{who} waits for the disk: {error}")
            continue
        if dry_run:
            facts.append(f"{who} is finished at the next start")
            continue
        try:
            lost = _make(fs, folder, fingerprint, note, image, layouts)
        except OSError as error:
            waiting[note.child_ref] = note, image
            facts.append(f"{who} has no log of its own yet: {error}")
            continue
        facts += [f"{who} was finished", *([f"{who}: {lost}"] if lost else [])]
    if not dry_run:
        fs.fsync_dir(folder.agents_folder(fingerprint))  # logs whose names are in the system's cache only
        kept = [*stuck, *(note for note, _ in waiting.values())]
        if len(kept) < len(scan.frames) or scan.damage is not None:
            keep_notes(fs, folder, fingerprint, kept)
    return FinishedForks(tuple(facts), tuple(stuck), tuple(waiting.values()))


def _flush(fs: FileSystem, path: Path) -> None:
    handle = fs.open_append(path)
    try:
        fs.fsync(handle)
    finally:
        fs.close(handle)


def _promised(
    fs: FileSystem,
    folder: DataFolder,
    fingerprint: str,
    note: ForkNote,
    layouts: Layouts,
    full_groups: frozenset[int] | None,
) -> AgentImage:
    """What a note promises. Records after the one it names were refused, and may be there all the same.

    Raises:
        RecordInvalid: its parent's log does not say it any more.
        OSError: the disk refused to read that.
    """
    source = folder.log_path(fingerprint, *note.parent_ref)
    try:
        data = read_twice(lambda: fs.read(source))
    except (FileNotFoundError, NotRegularFile) as error:
        raise RecordInvalid("its parent's log is gone") from error
    scan = scan_log(data, log_seed(fingerprint, source.name))
    named = (note.parent_seq, note.parent_checksum)
    frames = [number for number, frame in enumerate(scan.frames, 1) if (frame.seq, frame.checksum) == named]
    if not frames:
        raise RecordInvalid("its parent's log has not the record that it names")
    parent, _, why = replay(source.name, replace(scan, frames=scan.frames[: frames[0]]), layouts, full_groups)
    if parent is None or why:
        raise RecordInvalid(why or "its parent's log is empty")
    return child_image(parent, note)


def _make(
    fs: FileSystem, folder: DataFolder, fingerprint: str, note: ForkNote, image: AgentImage, layouts: Layouts
) -> str:
    """Make the log of a child; returns what was lost."""
    source = folder.log_path(fingerprint, *note.parent_ref)
    record, lost = child_record(image, lambda *name: read_tail(fs, source, image, layouts, name))
    target = folder.log_path(fingerprint, *note.child_ref)
    AgentLog(fs, target, log_seed(fingerprint, target.name)).replace([(record.seq, encode_parts(record))])
    return lost


def _frames(notes: Iterable[ForkNote], seed: bytes) -> list[bytes]:
    parts: list[bytes] = []
    checksum = seed
    for seq, note in enumerate(notes, 1):
        payload = (note.encode(),)
        header, checksum = frame_header(seq, payload, checksum)
        parts += [header, *payload]
    return parts


__all__ = [
    "FinishedForks",
    "ForkNote",
    "child_image",
    "child_record",
    "decode_note",
    "finish_forks",
    "keep_notes",
    "open_notes",
    "put_notes_aside",
]
