"""Agents' logs: what a frame proves, and how torn ends are told from rotten middles."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from kvd.store.agent_log import FRAME, MAGIC, AgentLog, frame_header, log_seed, scan_log
from kvd.store.errors import LogVanished, RecordInvalid
from kvd.store.fs import make_folder
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import FINGERPRINT

SEED = log_seed(FINGERPRINT, "a.log")
PAYLOADS = [b"first", b"second record", b"", b"the last one, a bit longer than the others"]
PATH = Path("/agents/a.log")


def log_bytes(payloads: list[bytes], *, first_seq: int = 1, seed: bytes = SEED) -> bytes:
    """A whole log."""
    data, previous = b"", seed
    for seq, payload in enumerate(payloads, first_seq):
        head, previous = frame_header(seq, (payload,), previous)
        data += head + payload
    return data


def starts(data: bytes) -> list[int]:
    """Where the frames start."""
    return [frame.offset for frame in scan_log(data, SEED).frames]


def disk(tmp_path: Path) -> LossyFileSystem:
    """A disk with a folder for logs."""
    fs = LossyFileSystem(tmp_path / "side")
    make_folder(fs, PATH.parent)
    return fs


def test_frames_come_back_in_order() -> None:
    """All payloads, numbers and places."""
    data = log_bytes(PAYLOADS)
    scan = scan_log(data, SEED)
    assert [bytes(frame.payload) for frame in scan.frames] == PAYLOADS
    assert [frame.seq for frame in scan.frames] == [1, 2, 3, 4]
    assert [data[frame.payload_offset : frame.end] for frame in scan.frames] == PAYLOADS
    assert (scan.good_bytes, scan.damage) == (len(data), None)
    assert scan_log(b"", SEED).good_bytes == 0


def test_every_cut_is_torn_and_keeps_the_records_before_it() -> None:
    """P3: an append cut at any byte: the records before it, and how many bytes were torn."""
    data = log_bytes(PAYLOADS)
    ends = [frame.end for frame in scan_log(data, SEED).frames]
    for cut in range(len(data)):
        scan = scan_log(data[:cut], SEED)
        assert len(scan.frames) == sum(end <= cut for end in ends)
        assert (scan.damage is None) == (cut == scan.good_bytes)
        assert scan.damage is None or (scan.damage.kind, scan.damage.lost_bytes) == ("torn", cut - scan.good_bytes)


def test_garbage_and_zeros_after_the_last_record_are_torn() -> None:
    """What a crash leaves after the last record never hides it."""
    data = log_bytes(PAYLOADS)
    rng = random.Random(3)
    for rest in (b"\0" * 500, rng.randbytes(500), MAGIC, MAGIC + b"\0" * 60, log_bytes([b"x"])[:-1]):
        scan = scan_log(data + rest, SEED)
        assert len(scan.frames) == 4
        assert scan.damage is not None
        assert (scan.damage.kind, scan.damage.lost_bytes) == ("torn", len(rest))


def test_every_flipped_bit_before_the_last_record_is_corruption() -> None:
    """P4 P8: any bit of any earlier record, its length, number, magic and checksum included: never `torn`."""
    data = log_bytes(PAYLOADS)
    offsets = starts(data)
    for bit in range(offsets[-1] * 8):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        scan = scan_log(bytes(bad), SEED)
        assert scan.damage is not None
        assert scan.damage.kind == "corrupt", f"bit {bit} passed as torn"
        assert len(scan.frames) == sum(offset <= bit // 8 for offset in offsets) - 1
        assert [bytes(frame.payload) for frame in scan.frames] == PAYLOADS[: len(scan.frames)]


def test_a_flipped_bit_in_the_last_record_is_seen() -> None:
    """P4: it cannot be told from an unfinished append by the log alone, but it is never served."""
    data = log_bytes(PAYLOADS)
    for bit in range(starts(data)[-1] * 8, len(data) * 8):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        assert len(scan_log(bytes(bad), SEED).frames) == 3


def test_a_frame_proves_its_place() -> None:
    """Records dropped, repeated, swapped or carried over from another log, agent or model are not accepted."""
    frames = [log_bytes(PAYLOADS)[frame.offset : frame.end] for frame in scan_log(log_bytes(PAYLOADS), SEED).frames]
    for order in ([1, 2, 3], [0, 2, 3], [0, 0, 1], [0, 2, 1, 3], [0, 1, 3]):
        scan = scan_log(b"".join(frames[index] for index in order), SEED)
        good = 0
        while good < len(order) and order[good] == good:
            good += 1
        assert len(scan.frames) == good
        assert scan.damage is not None
    assert not scan_log(log_bytes(PAYLOADS), log_seed(FINGERPRINT, "b.log")).frames
    assert not scan_log(log_bytes(PAYLOADS), log_seed("0" * 32, "a.log")).frames


def test_a_compacted_log_may_start_at_any_number_but_has_no_gap() -> None:
    """Numbers go on over compaction; inside a log they are consecutive even when the chain is intact."""
    scan = scan_log(log_bytes(PAYLOADS, first_seq=41), SEED)
    assert [frame.seq for frame in scan.frames] == [41, 42, 43, 44]
    head, checksum = frame_header(1, (b"x",), SEED)
    gap, _ = frame_header(3, (b"y",), checksum)
    scan = scan_log(head + b"x" + gap + b"y", SEED)
    assert len(scan.frames) == 1
    assert scan.damage is not None
    assert scan.damage.reason == "sequence"


def test_a_failed_append_is_cut_off_before_the_next(tmp_path: Path) -> None:
    """Whatever operation fails, the log's good part stays, and the next append follows it."""
    for failing in ("open_append", "write", "fsync", "fsync_dir"):
        fs = disk(tmp_path)
        log = AgentLog(fs, PATH, SEED)
        if failing != "fsync_dir":  # only the first append flushes the folder
            log.append(1, (b"one",))
        fs.fail = lambda number, name, path, failing=failing: (
            errno.EIO if name == failing or (name == "truncate" and number % 2) else None
        )
        for _ in range(3):
            with pytest.raises(OSError):
                log.append(2 if failing != "fsync_dir" else 1, (b"never",))
        fs.fail = lambda number, name, path: None
        if failing == "fsync_dir":
            log.append(1, (b"one",))
        log.append(2, (b"two",))
        fs.crash()
        scan = scan_log(fs.read(PATH), SEED)
        assert [bytes(frame.payload) for frame in scan.frames] == [b"one", b"two"]
        assert scan.damage is None


def test_the_first_append_makes_the_name_durable(tmp_path: Path) -> None:
    """A new log is found after a crash; later appends do not flush the folder again."""
    fs = disk(tmp_path)
    log = AgentLog(fs, PATH, SEED)
    log.append(1, (b"one",))
    fs.log.clear()
    log.append(2, (b"two",))
    assert not [entry for entry in fs.log if entry.startswith("fsync_dir")]
    fs.crash()
    assert len(scan_log(fs.read(PATH), SEED).frames) == 2


def test_a_log_that_lost_committed_bytes_takes_no_more(tmp_path: Path) -> None:
    """Nothing is appended to a log that something else cut or removed."""
    fs = disk(tmp_path)
    log = AgentLog(fs, PATH, SEED)
    log.append(1, (b"one",))
    fs.poke(PATH, fs.read(PATH)[:-1])
    with pytest.raises(LogVanished) as caught:
        log.append(2, (b"two",))
    assert caught.value.data["committed_bytes"] == FRAME.size + 3
    fs.unlink(PATH)
    with pytest.raises(LogVanished):
        log.append(2, (b"two",))


def test_compaction_is_all_or_nothing(tmp_path: Path) -> None:
    """A failure at any operation leaves the old log or the whole new one."""
    for failing in ("create", "write", "fsync", "rename", "fsync_dir"):
        fs = disk(tmp_path)
        log = AgentLog(fs, PATH, SEED)
        log.append(1, (b"one",))
        log.append(2, (b"two",))
        old = fs.read(PATH)
        fs.fail = lambda number, name, path, failing=failing: errno.ENOSPC if name == failing else None
        with pytest.raises(OSError):
            log.replace([(2, (b"snap", b"shot"))])
        fs.fail = lambda number, name, path: None
        assert fs.read(PATH) in (old, log_bytes([b"snapshot"], first_seq=2))
        assert (fs.read(PATH) == old) == (failing != "fsync_dir")


def test_what_does_not_fit_a_frame_is_refused() -> None:
    """Numbers are 32 bits and start at 1."""
    for seq in (0, -1, 1 << 32):
        with pytest.raises(RecordInvalid):
            frame_header(seq, (), SEED)
