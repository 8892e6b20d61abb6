"""P4: flipped bits of every class of byte are never served."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from kvd.store.agent_log import log_seed, scan_log
from kvd.store.errors import PageCorrupt
from kvd.store.layout import DataFolder
from kvd.store.page_file import decode_page, encode_page, header_bytes
from kvd.store.recovery import recover
from kvd.store.swap_ops import AppendRecordOp, ReadPageOp, ReadTailOp, WritePageOp
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import (
    FINGERPRINT,
    LAYOUTS,
    ROOT,
    ModelAgent,
    header_of,
    kv_of,
    layouts,
    open_store,
    tiny_layout,
)


def test_every_class_of_byte_of_a_page_file_is_covered(tally: Counter[str]) -> None:
    """Length, header, padding, every tensor, checksum: a few hundred single flipped bits, all refused."""
    layout = tiny_layout()
    header = header_of(ModelAgent("ada").entry(0, 0), 0)
    data = b"".join(encode_page(header, layout, kv_of(layout, 1)))
    head = len(header_bytes(header, layout))
    regions = {"length": (0, 8), "header": (8, head), "checksum": (len(data) - 16, len(data))}
    regions |= {
        tensor.name: (head + tensor.offset_bytes, head + tensor.offset_bytes + tensor.tensor_bytes)
        for tensor in layout.tensors
    }
    rng = random.Random(11)
    flips = 0
    for begin, end in regions.values():
        bits = {begin * 8, end * 8 - 1, *(rng.randrange(begin * 8, end * 8) for _ in range(24))}
        for bit in bits:
            bad = bytearray(data)
            bad[bit // 8] ^= 1 << bit % 8
            with pytest.raises(PageCorrupt):
                decode_page(bytes(bad), header, layout)
            flips += 1
    assert flips > 300
    tally["bit flips, tried"] += flips
    tally["bit flips, in page files"] += flips
    assert decode_page(data, header, layout) == kv_of(layout, 1)


def test_a_flipped_bit_anywhere_on_the_disk_is_never_served(fast_tmp: Path, tally: Counter[str]) -> None:
    """Any file of the folder, any bit: what is served afterwards is right or absent, and the trouble is said."""
    fs = LossyFileSystem(fast_tmp / "side", seed=1)
    _, _, store = open_store(fs)
    states = {0: ModelAgent("ada")}
    agent = states[0]
    for tokens in (100, 300, 40):
        agent, record, sealed = agent.turn(tokens)
        for group, page in sealed:
            store.perform(WritePageOp(header_of(page, group), LAYOUTS[group], agent.page_bytes(group, 0)))
        assert store.perform(AppendRecordOp(record)).error is None
        states[agent.seq] = agent
    store.close()
    original = {path: data for path, data in fs.live_files().items() if FINGERPRINT in path.parts}
    rng = random.Random(2)
    said = 0
    for number in range(120):
        for path, data in original.items():
            fs.poke(path, data)
        path = sorted(original)[number % len(original)]
        bad = bytearray(original[path])
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        fs.poke(path, bytes(bad))
        fs.catalog_after_crash = "delete" if number % 2 else "keep"
        fs._treat_catalog()
        said += serve_and_compare(fs, states)
    assert said == 120
    tally["bit flips, tried"] += 120
    tally["bit flips, served"] += 0


def test_a_flip_of_every_byte_of_a_log_is_found(fast_tmp: Path, tally: Counter[str]) -> None:
    """No byte of a frame, a text or a tail is outside the chain of checksums; what is before the bad record stands."""
    fs = LossyFileSystem(fast_tmp / "side")
    _, _, store = open_store(fs)
    agent = ModelAgent("ada")
    for tokens in (20, 1, 30):
        agent, record, _ = agent.turn(tokens)
        assert store.perform(AppendRecordOp(record)).error is None
    store.close()
    path = DataFolder(ROOT, fs).log_path(FINGERPRINT, "default", "ada")
    data, seed = fs.read(path), log_seed(FINGERPRINT, path.name)
    ends = [frame.end for frame in scan_log(data, seed).frames]
    assert ends[-1] == len(data)
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        found = scan_log(bytes(bad), seed)
        good = [end for end in ends if end <= at]
        assert [frame.end for frame in found.frames] == good
        assert found.damage is not None
        assert found.damage.kind == ("torn" if at >= ends[-2] else "corrupt"), "a rotten record is no unfinished one"
    tally["bit flips, tried"] += len(data)
    tally["bit flips, in logs"] += len(data)
    assert len(data) > 3000


def serve_and_compare(fs: LossyFileSystem, states: dict[int, ModelAgent]) -> bool:
    """Serve everything once; whether damage was noticed anywhere."""
    _, report, store = open_store(fs)
    noticed = bool(report.log_troubles or report.missing_pages)
    image = report.agents.get(("default", "ada"))
    if image is not None:
        expected = states[image.seq]
        assert image.branch.tokens == expected.tokens
        for group, layout in enumerate(LAYOUTS):
            tail = store.perform(ReadTailOp("default", "ada", 0, group))
            assert tail.error is not None or tail.payload == expected.tail(group)
            noticed |= tail.error is not None
            for number, page in enumerate(image.branch.segment(group).pages):
                assert page == expected.entry(group, number)
                loaded = store.perform(ReadPageOp(report.pages.get(page.page_id, header_of(page, group)), layout))
                assert loaded.error is not None or loaded.payload == expected.page_bytes(group, number)
                noticed |= loaded.error is not None
    store.close()
    return noticed


def test_a_flip_after_recovery_is_noticed_when_the_tail_is_read(fast_tmp: Path, tally: Counter[str]) -> None:
    """Bits also rot while the daemon runs."""
    fs = LossyFileSystem(fast_tmp / "side")
    _, _, store = open_store(fs)
    agent, record, _ = ModelAgent("ada").turn(50)
    store.perform(AppendRecordOp(record))
    path = DataFolder(ROOT, fs).log_path(FINGERPRINT, "default", "ada")
    original = fs.read(path)
    kv_bytes = sum(len(segment.tail_kv) for segment in record.segments)
    rng = random.Random(4)
    for _ in range(60):
        bad = bytearray(original)
        bad[len(bad) - 1 - rng.randrange(kv_bytes)] ^= 1 << rng.randrange(8)
        fs.poke(path, bytes(bad))
        tails = [store.perform(ReadTailOp("default", "ada", 0, group)) for group in range(2)]
        assert sum(tail.error is not None for tail in tails) == 1
        assert all(tail.error is not None or tail.payload == agent.tail(tail.op.group) for tail in tails)
    store.close()
    tally["bit flips, tried"] += 60
    fs.poke(path, original)
    assert recover(DataFolder(ROOT, fs), FINGERPRINT, layouts, fs).agents["default", "ada"].seq == 1
