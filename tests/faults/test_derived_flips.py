"""P4 P8: flipped bits in what stands beside pages and logs: catalog, VERSION, engine.json, conditioning constants."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvd.quant.conditioning import Conditioning, load_conditioning, save_conditioning
from kvd.quant.errors import ConditioningDamaged
from kvd.record import RECORD_FILE, EngineRecord, read_record, write_record
from kvd.store.errors import DataFolderMalformed, DataFolderTooNew
from kvd.store.fs import RealFileSystem
from kvd.store.layout import DataFolder
from kvd.store.swap_ops import CompactLogOp
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import FINGERPRINT, ModelAgent, open_store
from tests.support.store_turns import good, names, reads

SQLITE_HEADER_BYTES = 100
WAL_HEADER_BYTES = 32


def flipped(data: bytes, at: int, bit: int) -> bytes:
    """The data with one bit changed."""
    bad = bytearray(data)
    bad[at] ^= 1 << bit
    return bytes(bad)


# ---- the catalog ----------------------------------------------------------------------------------------------------


def catalog_files(fs: LossyFileSystem) -> dict[str, bytes]:
    """The catalog's files by suffix, as they are now."""
    real = fs.database_path(names().catalog_path(FINGERPRINT))
    found = {suffix: real.with_name(real.name + suffix) for suffix in ("", "-wal", "-shm")}
    return {suffix: path.read_bytes() for suffix, path in found.items() if path.exists()}


def put_catalog(fs: LossyFileSystem, files: dict[str, bytes]) -> None:
    """Put them back, and nothing else."""
    real = fs.database_path(names().catalog_path(FINGERPRINT))
    shutil.rmtree(real.parent)
    real.parent.mkdir()
    for suffix, data in files.items():
        real.with_name(real.name + suffix).write_bytes(data)


@pytest.mark.parametrize("state", ["killed", "closed"])
def test_a_flip_anywhere_in_the_catalog_costs_nothing(fast_tmp: Path, tally: Counter[str], state: str) -> None:
    """Header page, rows, write-ahead log: agents and pages are exactly those of the logs; a bad catalog is named."""
    fs = LossyFileSystem(fast_tmp / "side")
    _, _, store = open_store(fs)
    agents = []
    for name in ("ada", "bob"):
        agent = good(store, ModelAgent(name), 300)
        agents.append(good(store, agent, 20))
        store.idle()
    if state == "closed":
        assert store.perform(CompactLogOp("default", "ada")).error is None
        agents[0] = good(store, agents[0], 1)
        store.close()
        files = catalog_files(fs)
    else:
        files = catalog_files(fs)
        store._catalog.close()
        assert len(files["-wal"]) > WAL_HEADER_BYTES
    rng = random.Random(state)
    head = SQLITE_HEADER_BYTES if state == "closed" else WAL_HEADER_BYTES
    tried = named = 0
    for suffix, data in files.items():
        places = {*range(min(head, len(data))), *(rng.randrange(len(data)) for _ in range(90 if data else 0))}
        for at in places:
            put_catalog(fs, {**files, suffix: flipped(data, at, rng.randrange(8))})
            folder, report, store = open_store(fs)
            assert {ref: image.seq for ref, image in report.agents.items()} == {
                ("default", agent.name): agent.seq for agent in agents
            }
            assert set(report.pages) == {page.page_id for agent in agents for group in agent.pages for page in group}
            assert not report.missing_pages
            assert not report.quarantined
            assert not report.log_troubles, "no good log may be called old because of a bad row"
            tried += 1
            named += bool(report.facts or report.adopted_pages)
            store.close()
            folder.close()
    tally["bit flips, tried"] += tried
    tally["bit flips, in the catalog"] += tried
    assert tried > 150
    assert named > 10
    folder, report, store = open_store(fs)
    assert not report.facts, "the catalog that was made anew is good"
    for agent in agents:
        reads(store, agent)
    store.close()
    folder.close()


# ---- small files ----------------------------------------------------------------------------------------------------


def test_a_flip_in_version_is_refused_by_name_or_changes_nothing(fast_tmp: Path, tally: Counter[str]) -> None:
    """Each bit: never another version in silence, and a refused folder is untouched."""
    fs, root = RealFileSystem(), fast_tmp / "data"
    folder = DataFolder(root, fs)
    folder.open()
    folder.close()
    right = (root / "VERSION").read_bytes()
    refused = 0
    for bit in range(8 * len(right)):
        bad = flipped(right, bit // 8, bit % 8)
        (root / "VERSION").write_bytes(bad)
        refusal = ""
        try:
            folder.open()
        except (DataFolderMalformed, DataFolderTooNew) as error:
            refusal = error.message
        if refusal:
            refused += 1
            assert str(root) in refusal
        else:
            assert folder.version() == 1
            folder.close()
        assert (root / "VERSION").read_bytes() == bad
    tally["bit flips, tried"] += 8 * len(right)
    tally["bit flips, in side files"] += 8 * len(right)
    assert refused >= 8


def test_a_flip_in_the_engines_record_never_stops_a_start(fast_tmp: Path, tally: Counter[str]) -> None:
    """Each bit: what is read is typed or absent, and the next start's record replaces it."""
    fs = RealFileSystem()
    right = EngineRecord("cpu", 1, "kvd-1/codec-1")
    write_record(fast_tmp, fs, right)
    data = (fast_tmp / RECORD_FILE).read_bytes()
    for bit in range(8 * len(data)):
        (fast_tmp / RECORD_FILE).write_bytes(flipped(data, bit // 8, bit % 8))
        found = read_record(fast_tmp)
        assert found.threads is None or found.threads > 0
        write_record(fast_tmp, fs, right)
        assert read_record(fast_tmp) == right
    tally["bit flips, tried"] += 8 * len(data)
    tally["bit flips, in side files"] += 8 * len(data)
    assert len(data) > 50


def test_a_flip_in_conditioning_constants_is_found_by_their_digest(fast_tmp: Path, tally: Counter[str]) -> None:
    """Each byte: the constants are the right ones or refused by name; a damaged file is replaced when it is needed."""
    rng = np.random.default_rng(0)
    right = Conditioning(
        rng.standard_normal((2, 1, 32), dtype=np.float32), 1 + rng.random((2, 1, 32), dtype=np.float32)
    )
    path = save_conditioning(right, fast_tmp)
    data = path.read_bytes()
    refused = 0
    for at in range(len(data)):
        path.write_bytes(flipped(data, at, at % 8))
        refusal = ""
        try:
            assert load_conditioning(path).digest == right.digest
        except ConditioningDamaged as error:
            refusal = error.message
        refused += path.name in refusal
    assert refused > 0.9 * len(data)
    tally["bit flips, tried"] += len(data)
    tally["bit flips, in side files"] += len(data)
    assert save_conditioning(right, fast_tmp) == path
    assert path.read_bytes() == data
