"""One agent's log: framed, chained, append only. The fsync of an append is the commit.

Theory of operation. A frame is

    magic FF 'KVL' | length u32 | seq u32 | xxh3_128 (16) | payload

and its checksum covers length, seq, payload and the previous frame's checksum; the first frame continues a seed made of
the model's fingerprint and the log's own file name. So a frame proves its place: it cannot be dropped, moved, repeated
or carried to another agent or model. The magic has a byte that UTF-8 text never holds.

Reading stops at the first bad frame. What follows it decides what happened: an append that a crash cut short leaves
nothing after itself (`torn`: the turn was never acknowledged); good frames after a bad one mean that committed bytes
rotted (`corrupt`): they are put aside, never dropped in silence. A length field can itself be hit, so the rest of the
file is searched for frames before it is called torn.

May import siblings of kvd.store only.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import xxhash

from kvd.store.errors import LogVanished, RecordInvalid
from kvd.store.fs import FileSystem, write_file
from kvd.store.record_codec import MAX_RECORD_BYTES

MAGIC: Final = b"\xffKVL"
FRAME: Final = struct.Struct("<4sII16s")
_CHAINED: Final = struct.Struct("<II")
Payload = tuple[bytes, ...]
"""A frame's payload in parts that follow one another, so that KV is not copied to be written."""

_SEQ_WINDOW: Final = 1 << 20
"""How far ahead of the expected number a frame that follows damage may be."""


@dataclass(frozen=True, slots=True)
class LogFrame:
    """One verified frame.

    Attributes:
        offset: its first byte in the log.
        seq: its number.
        payload_offset: first byte of its payload.
        payload: the msgpack bytes.
        checksum: its 16 bytes, which the next frame continues.
    """

    offset: int
    seq: int
    payload_offset: int
    payload: memoryview
    checksum: bytes

    @property
    def end(self) -> int:
        """First byte after the frame."""
        return self.payload_offset + len(self.payload)


@dataclass(frozen=True, slots=True)
class LogDamage:
    """Why reading stopped before the end of the file.

    Attributes:
        kind: `torn` (an append that never finished) or `corrupt` (committed bytes changed).
        offset: where the bad frame starts; everything before it is good.
        lost_bytes: bytes from there to the end of the file.
        reason: what was wrong.
    """

    kind: Literal["torn", "corrupt"]
    offset: int
    lost_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class LogScan:
    """A log as read.

    Attributes:
        frames: the good frames from the start.
        good_bytes: where they end.
        checksum: checksum of the last one, or the seed.
        damage: what follows them, None when the file ends there.
        last_offset: where the last good frame starts; 0 without any.
    """

    frames: tuple[LogFrame, ...]
    good_bytes: int
    checksum: bytes
    damage: LogDamage | None
    last_offset: int = 0


def log_seed(fingerprint: str, name: str) -> bytes:
    """What the first frame's checksum continues: binds a log to its model and its file name."""
    return xxhash.xxh3_128(f"kvd agent log 1\0{fingerprint}\0{name}".encode()).digest()


def chain_checksum(length: int, seq: int, parts: Iterable[bytes | memoryview], previous: bytes) -> bytes:
    """xxh3_128 over length, seq, payload (in parts) and the previous frame's checksum."""
    digest = xxhash.xxh3_128(_CHAINED.pack(length, seq))
    for part in parts:
        digest.update(part)
    digest.update(previous)
    return digest.digest()


def frame_header(seq: int, parts: Payload, previous: bytes) -> tuple[bytes, bytes]:
    """The frame's first 28 bytes and its checksum.

    Raises:
        RecordInvalid: the payload is too long, or `seq` does not fit.
    """
    payload_bytes = sum(map(len, parts))
    if payload_bytes > MAX_RECORD_BYTES or not 0 < seq < 1 << 32:
        raise RecordInvalid(f"a payload of {payload_bytes} bytes", seq=seq)
    checksum = chain_checksum(payload_bytes, seq, parts, previous)
    return FRAME.pack(MAGIC, payload_bytes, seq, checksum), checksum


def scan_log(data: bytes, seed: bytes) -> LogScan:
    """Read frames up to the first bad one. The first frame may have any number; each later one is the next."""
    view = memoryview(data)
    frames: list[LogFrame] = []
    previous, at = seed, 0
    damage: LogDamage | None = None
    while at < len(data):
        frame, reason = _frame_at(view, at, previous)
        if frame is not None and frames and frame.seq != frames[-1].seq + 1:
            frame, reason = None, "sequence"
        if frame is None:
            committed = _frame_follows(data, at, frames[-1].seq + 1 if frames else 1)
            damage = LogDamage("corrupt" if committed else "torn", at, len(data) - at, reason)
            break
        frames.append(frame)
        previous, at = frame.checksum, frame.end
    return LogScan(tuple(frames), at, previous, damage, frames[-1].offset if frames else 0)


def is_last_frame(head: bytes, *, seq: int, checksum: bytes, frame_bytes: int) -> bool:
    """Whether the first bytes of a frame are those of a record that is known by number, checksum and length.

    The checksum continues those of all frames before it: a log that ends with this frame is the one that was committed,
    as far as can be told without reading it.
    """
    if len(head) < FRAME.size:
        return False
    magic, length, found_seq, found = FRAME.unpack_from(head)
    return bool((magic, FRAME.size + length, found_seq, found) == (MAGIC, frame_bytes, seq, checksum))


def _frame_at(view: memoryview, at: int, previous: bytes) -> tuple[LogFrame | None, str]:
    """The frame that starts at `at`, or why there is none."""
    if at + FRAME.size > len(view):
        return None, "length"
    magic, length, seq, checksum = FRAME.unpack_from(view, at)
    if magic != MAGIC:
        return None, "magic"
    start = at + FRAME.size
    if start + length > len(view):
        return None, "length"
    payload = view[start : start + length]
    if chain_checksum(length, seq, (payload,), previous) != checksum:
        return None, "checksum"
    return LogFrame(at, seq, start, payload, checksum), ""


def _frame_follows(data: bytes, bad: int, expected_seq: int) -> bool:
    """Whether committed frames follow the bad one at `bad`.

    A later frame counts when its checksum continues the bad frame's, as stored or as computed, or that of another
    candidate, or when it ends exactly with the file: none of that happens by chance in an unfinished append.
    """
    view = memoryview(data)
    candidates: set[bytes] = set()
    if bad + FRAME.size <= len(data):
        magic, length, seq, stored = FRAME.unpack_from(data, bad)
        end = bad + FRAME.size + length
        if magic == MAGIC and end < len(data) and _plausible(data, end, expected_seq):
            return True
        candidates.add(stored)
    at = bad
    while (at := data.find(MAGIC, at + 1)) != -1 and at + FRAME.size <= len(data):
        if not _plausible(data, at, expected_seq):
            continue
        _, length, seq, stored = FRAME.unpack_from(data, at)
        end = at + FRAME.size + length
        payload = view[at + FRAME.size : end]
        if end == len(data) or any(chain_checksum(length, seq, (payload,), known) == stored for known in candidates):
            return True
        candidates = {*sorted(candidates)[:4], stored}
    return False


def _plausible(data: bytes, at: int, expected_seq: int) -> bool:
    """Whether the bytes at `at` look like a frame that may follow one numbered `expected_seq`."""
    if at + FRAME.size > len(data):
        return False
    magic, length, seq, _ = FRAME.unpack_from(data, at)
    inside = at + FRAME.size + length <= len(data)
    return bool(magic == MAGIC and inside and expected_seq < seq <= expected_seq + _SEQ_WINDOW)


class AgentLog:
    """One log, open for appending. Owned by the swap thread; `append`, `clear` and `replace` are the only mutators.

    Attributes:
        good_bytes: end of what is committed.
        checksum: of the last frame, or the seed.
        last_offset: where the last frame starts.

    Args:
        fs: the disk.
        path: the file.
        seed: see `log_seed`.
        scan: what `scan_log` found; None for a log to be made. Bytes after its good part are cut before an append.
        name_durable: False when the file's name may not survive a crash yet; the next append then sees to it.
    """

    def __init__(
        self, fs: FileSystem, path: Path, seed: bytes, scan: LogScan | None = None, *, name_durable: bool = True
    ) -> None:
        self._fs = fs
        self.path = path
        self._seed = seed
        self.good_bytes = 0 if scan is None else scan.good_bytes
        self.checksum = seed if scan is None else scan.checksum
        self.last_offset = 0 if scan is None else scan.last_offset
        self._name_durable = scan is not None and name_durable

    def append(self, seq: int, payload: Payload, flushing: Callable[[], None] | None = None) -> int:
        """Add a frame; when this returns it survives a loss of power.

        `flushing` is called when nothing is left to do but to flush.

        When it raises, the log's good part is unchanged; bytes that a failed append may have left are cut off at once
        if the disk allows it and before the next append otherwise.

        Returns:
            Offset of the payload in the log.

        Raises:
            LogVanished: committed bytes are gone; nothing was written.
            OSError: the disk refused.
        """
        header, checksum = frame_header(seq, payload, self.checksum)
        found = self._fs.stat(self.path)
        file_bytes = 0 if found is None else found.file_bytes
        if found is None:
            self._name_durable = False  # somebody removed it while it was empty
        if file_bytes < self.good_bytes:
            raise LogVanished(path=str(self.path), committed_bytes=self.good_bytes, file_bytes=file_bytes)
        handle = self._fs.open_append(self.path)
        try:
            if file_bytes > self.good_bytes:
                self._fs.truncate(handle, self.good_bytes)
            try:
                for part in (header, *payload):
                    self._fs.write(handle, part)
                if flushing is not None:
                    flushing()
                self._fs.fsync(handle)
                if not self._name_durable:
                    self._fs.fsync_dir(self.path.parent)
            except OSError:
                with contextlib.suppress(OSError):
                    self._fs.truncate(handle, self.good_bytes)
                raise
        finally:
            self._fs.close(handle)
        self._name_durable = True
        place = self.good_bytes + FRAME.size
        self.last_offset = self.good_bytes
        self.good_bytes += FRAME.size + sum(map(len, payload))
        self.checksum = checksum
        return place

    def clear(self) -> None:
        """Take everything back, durably; the file stays.

        Raises:
            OSError: the disk refused; what was in it may be there or not.
        """
        if self._fs.stat(self.path) is not None:
            handle = self._fs.open_append(self.path)
            try:
                self._fs.truncate(handle, 0)
                self._fs.fsync(handle)
            finally:
                self._fs.close(handle)
        self.good_bytes, self.checksum, self.last_offset = 0, self._seed, 0

    def intact(self) -> bool:
        """Whether a replay would get through everything committed.

        Raises:
            OSError: the disk refused to read it.
        """
        scan = scan_log(self._fs.read(self.path, limit=self.good_bytes), self._seed)
        return scan.good_bytes == self.good_bytes and scan.checksum == self.checksum

    def replace(self, records: Iterable[tuple[int, Payload]]) -> None:
        """Compaction: put a new log in the old one's place, all or nothing.

        Args:
            records: number and payload of each frame; taken one by one, so that no two need be in memory. What the
                iterator raises leaves the old log.

        Raises:
            OSError: the disk refused; the old log or (once renamed) the whole new one is there: the caller reads it.
        """
        checksum, end, last_offset = self._seed, 0, 0

        def parts() -> Iterator[bytes]:
            nonlocal checksum, end, last_offset
            for seq, payload in records:
                header, checksum = frame_header(seq, payload, checksum)
                last_offset, end = end, end + FRAME.size + sum(map(len, payload))
                yield header
                yield from payload

        self.good_bytes = write_file(self._fs, self.path, parts())
        self.checksum, self.last_offset, self._name_durable = checksum, last_offset, True


__all__ = [
    "FRAME",
    "MAGIC",
    "AgentLog",
    "LogDamage",
    "LogFrame",
    "LogScan",
    "Payload",
    "chain_checksum",
    "frame_header",
    "is_last_frame",
    "log_seed",
    "scan_log",
]
