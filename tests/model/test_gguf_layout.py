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
    assert peak < 50 * len(data)


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
