"""A GGUF file that was cut or damaged is found before a conversion starts, wherever it was, and costs no memory."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.gguf_file import GgufFile
from kvd.model.gguf_import import import_gguf
from kvd.model.progress import SilentReporter
from tests.support.random_gguf import write_random_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound file of two blocks with a SentencePiece vocabulary."""
    return write_random_gguf(tmp_path_factory.mktemp("layout") / "whole.gguf", tokenizer="llama")


def with_bytes(path: Path, data: bytes) -> Path:
    """`path`, holding `data`."""
    path.write_bytes(data)
    return path


def test_a_cut_file_is_corrupt_wherever_it_was_cut(whole: Path, tmp_path: Path) -> None:
    """Header, metadata, tensor descriptions, data: nothing is written, and the message names the file (P8)."""
    data = whole.read_bytes()
    reader = gguf.GGUFReader(whole)
    infos = [tensor.field.offset for tensor in reader.tensors]
    ends = [tensor.data_offset + tensor.n_bytes for tensor in reader.tensors]
    draw = random.Random(2)
    places = {*range(64), *infos, *(at + 5 for at in infos), *(end - 1 for end in ends), reader.data_offset - 1}
    places |= {draw.randrange(max(ends)) for _ in range(150)}
    out = tmp_path / "out"
    out.mkdir()
    for n_bytes in sorted(places):
        broken = with_bytes(tmp_path / "broken.gguf", data[:n_bytes])
        with pytest.raises(ModelCorrupt, match=r"broken\.gguf"):
            import_gguf(broken, out, dtype="float32", reporter=SilentReporter())
    assert list(out.iterdir()) == []
    GgufFile(with_bytes(tmp_path / "broken.gguf", data[: max(ends)]))


def test_garbage_in_the_front_is_a_typed_error_and_allocates_little(whole: Path, tmp_path: Path) -> None:
    """Counts, lengths, types and figures of all ones or any noise: refused or read, never gigabytes, never a crash."""
    data, out = whole.read_bytes(), tmp_path / "out"
    out.mkdir()
    front = gguf.GGUFReader(whole).data_offset
    draw = random.Random(5)
    outcomes = {"read": 0, "refused": 0}
    tracemalloc.start()
    try:
        for turn in range(250):
            at = 4 + turn if turn < 60 else draw.randrange(4, front)
            noise = draw.choice((b"\xff" * 8, b"\xff\xff\xff\x7f", b"\0" * 8, draw.randbytes(4)))
            path = with_bytes(tmp_path / "noise.gguf", data[:at] + noise + data[at + len(noise) :])
            try:
                import_gguf(path, out, dtype="float32", reporter=SilentReporter())
                outcomes["read"] += 1
            except (ModelCorrupt, UnsupportedModel):
                outcomes["refused"] += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert outcomes["refused"] > 50
    assert peak < 4 * len(data)


def front(tensors: int, entries: int) -> bytes:
    """The first bytes of a file."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)


def entry(kind: int, value: bytes) -> bytes:
    """A metadata entry of the key `k`."""
    return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + value


HUGE = 400 << 20


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (front(0, 1) + entry(9, struct.pack("<IQ", 0, HUGE - 64)), "64 MiB"),  # numbers of one byte
        (front(0, 1) + entry(9, struct.pack("<IQ", 8, HUGE // 8 - 64)), "64 MiB"),  # empty texts
        (front(0, 1) + entry(8, struct.pack("<Q", HUGE - 64)), "64 MiB"),  # one text
        (front(0, 5_000_000), "metadata entries, expected 65536 at most"),
        (front(70_000, 0), "70000 tensors"),
    ],
    ids=["numbers", "texts", "text", "entries", "tensors"],
)
def test_counts_that_a_large_file_has_room_for_cost_nothing(tmp_path: Path, data: bytes, words: str) -> None:
    """A file of 400 MB (with a hole) has room for counts that would take gigabytes as objects: none is made."""
    path = with_bytes(tmp_path / "hole.gguf", data)
    os.truncate(path, HUGE)
    with pytest.raises(ModelCorrupt):
        GgufFile(path)  # what is imported late is imported now
    tracemalloc.start()
    try:
        with pytest.raises(ModelCorrupt, match=words):
            GgufFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_numbers_stay_in_the_file_until_they_are_asked_for(tmp_path: Path) -> None:
    """Ten million numbers in metadata that nobody reads take no memory; asked for, they are Python's."""
    count = 10_000_000
    path = with_bytes(tmp_path / "n.gguf", front(0, 1) + entry(9, struct.pack("<IQ", 0, count) + b"\1\2\3"))
    os.truncate(path, path.stat().st_size + count - 3)
    GgufFile(path)
    tracemalloc.start()
    try:
        file = GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert file.is_array("k")
    with pytest.raises(ModelCorrupt, match="k is an array of 10000000, expected an array of str"):
        file.array("k", str)
    found = file.array("k", int)
    assert (found[:4], len(found), type(found[0])) == ([1, 2, 3, 0], count, int)


@pytest.mark.parametrize("kind", [str, int, float, bool])
@pytest.mark.parametrize("stored", [0, 6, 7, 8])
def test_an_empty_array_is_one_of_anything(tmp_path: Path, kind: type, stored: int) -> None:
    """Nothing is of the wrong type in it."""
    path = with_bytes(tmp_path / "e.gguf", front(0, 1) + entry(9, struct.pack("<IQ", stored, 0)))
    assert GgufFile(path).array("k", kind) == []


def test_foreign_files_are_named(tmp_path: Path) -> None:
    """Missing, a folder, a pipe, empty, another format: each is a typed error at once."""
    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("none.gguf", ".", "pipe.gguf"):
        with pytest.raises(ModelCorrupt):
            GgufFile(tmp_path / name)
    for data in (b"", b"PK\x03\x04" + b"\0" * 100, b"GGUF"):
        with pytest.raises(ModelCorrupt, match=r"x\.gguf"):
            GgufFile(with_bytes(tmp_path / "x.gguf", data))


@pytest.mark.parametrize(("version", "words"), [(1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")])
def test_other_versions_are_refused_with_those_supported(tmp_path: Path, version: int, words: str) -> None:
    """Version 1 had other lengths; a big-endian file has its version swapped."""
    path = with_bytes(tmp_path / "v.gguf", b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(UnsupportedModel, match=f"{words}.*supported: little-endian GGUF versions 2, 3"):
        GgufFile(path)


def test_metadata_and_tensors_are_what_the_gguf_package_reads(whole: Path) -> None:
    """Same keys and values, same shapes and values, as an independent reader finds."""
    reader, own = gguf.GGUFReader(whole), GgufFile(whole)
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        theirs = field.contents()
        found = own.array(key) if isinstance(theirs, list) else own.get(key, type(theirs)())
        assert found == theirs, key
    assert list(own.shapes) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        np.testing.assert_array_equal(own.tensor(tensor.name), tensor.data.reshape(own.shapes[tensor.name]))
