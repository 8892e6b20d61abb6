"""A model folder that is not whole is refused from names and headers, with the file's name, before weights are read."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from kvd.model.errors import ModelCorrupt, ModelIncomplete
from kvd.model.folder import INDEX, ModelFolder, check_files, check_safetensors


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> ModelFolder:
    """A private copy of the tiny model."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    return ModelFolder("model", tmp_path / "model")


@pytest.fixture
def sharded(model: ModelFolder) -> ModelFolder:
    """The same model in two weight files with an index."""
    whole = model.path / "model.safetensors"
    tensors = load_file(whole)
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    placed = {tensor: names[number % 2] for number, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in tensors if placed[tensor] == name}, model.path / name)
    (model.path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    whole.unlink()
    return model


def test_whole_folders_pass(model: ModelFolder) -> None:
    """One weight file: nothing is said."""
    check_files(model)


def test_whole_sharded_folders_pass_also_without_an_index(sharded: ModelFolder) -> None:
    """Two weight files, with the index and by their names alone."""
    check_files(sharded)
    (sharded.path / INDEX).unlink()
    check_files(sharded)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard_is_named(sharded: ModelFolder, with_index: bool) -> None:
    """The index names it, or the other shard's name does (a download that was interrupted)."""
    (sharded.path / "model-00002-of-00002.safetensors").unlink()
    if not with_index:
        (sharded.path / INDEX).unlink()
    with pytest.raises(ModelIncomplete, match=r"model-00002-of-00002\.safetensors is missing") as caught:
        check_files(sharded)
    assert caught.value.data["file"] == str(sharded.path / "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_broken_index_is_named(sharded: ModelFolder, text: str) -> None:
    """What cannot be an index is corrupt."""
    (sharded.path / INDEX).write_text(text)
    with pytest.raises(ModelCorrupt, match=r"index\.json"):
        check_files(sharded)


def test_a_missing_configuration_or_weight_file_is_named(model: ModelFolder) -> None:
    """Both are incomplete models, not unreadable ones."""
    (model.path / "model.safetensors").unlink()
    with pytest.raises(ModelIncomplete, match=r"no model\*\.safetensors"):
        check_files(model)
    (model.path / "config.json").unlink()
    with pytest.raises(ModelIncomplete, match=r"config\.json is missing"):
        check_files(model)


def test_a_link_to_nothing_is_a_missing_file(model: ModelFolder) -> None:
    """The hub's cache is made of links; a blob that was cleared away leaves them."""
    (model.path / "model.safetensors").rename(model.path / "blob")
    (model.path / "model.safetensors").symlink_to("blob")
    check_files(model)
    (model.path / "blob").unlink()
    for look in (lambda: check_files(model), model.weights_bytes):
        with pytest.raises(ModelIncomplete, match=r"model\.safetensors is missing"):
            look()


def header_end(file: Path) -> int:
    """Where the tensors of a safetensors file begin."""
    return 8 + int(struct.unpack("<Q", file.read_bytes()[:8])[0])


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("nothing", "holds 0 bytes"),
        ("length", "holds 7 bytes"),
        ("header", "ends inside its header"),
        ("header's last byte", "ends inside its header"),
        ("no tensor", "is cut short"),
        ("last byte", "is cut short"),
    ],
)
def test_a_cut_weight_file_is_named_wherever_it_is_cut(model: ModelFolder, place: str, words: str) -> None:
    """Cuts at each border of the format; the message has the file and the two lengths."""
    file = model.path / "model.safetensors"
    end, size = header_end(file), file.stat().st_size
    keep = {"nothing": 0, "length": 7, "header": 100, "header's last byte": end - 1, "no tensor": end}.get(
        place, size - 1
    )
    with file.open("r+b") as stream:
        stream.truncate(keep)
    with pytest.raises(ModelCorrupt, match=words) as caught:
        check_files(model)
    assert caught.value.message.startswith(str(file))
    assert str(keep) in caught.value.message
    assert not isinstance(caught.value, ModelIncomplete)


def test_bytes_after_the_last_tensor_are_damage(model: ModelFolder) -> None:
    """Two bytes too many: the file is not what was written, whatever is in them."""
    file = model.path / "model.safetensors"
    whole = file.read_bytes()
    assert set(load_file(file)) == set(check_safetensors(file)) - {"__metadata__"}
    file.write_bytes(whole + b"ab")
    with pytest.raises(ModelCorrupt, match=f"has bytes after its end: {len(whole) + 2} bytes instead of {len(whole)}"):
        check_files(model)


def test_a_shard_without_a_tensor_of_the_index_is_corrupt(sharded: ModelFolder) -> None:
    """Two shards of different downloads: both are whole files, and together no model."""
    first, second = sharded.weight_files()
    shutil.copy(second, first)
    with pytest.raises(ModelCorrupt, match=r"00001-of-00002\.safetensors lacks the tensor"):
        check_files(sharded)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"data_offsets": [4]}}',
        b'{"a": {"data_offsets": [4, 2]}}',
        b'{"a": {"data_offsets": [-4, "x"]}}',
        b"[" * 50_000,
    ],
)
def test_a_garbage_header_is_corrupt(tmp_path: Path, header: bytes) -> None:
    """Whatever stands there, the error is kvd's and names the file."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    with pytest.raises(ModelCorrupt, match="unreadable safetensors header"):
        check_safetensors(file)


def test_a_garbage_length_allocates_nothing(tmp_path: Path) -> None:
    """A file that is no safetensors file states exabytes."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ModelCorrupt, match="does not begin as a safetensors file"):
        check_safetensors(file)


def test_a_licence_is_what_the_manifest_or_the_gguf_file_states(model: ModelFolder) -> None:
    """The source's own statement wins; a folder that kvd did not make states none."""
    assert model.license() is None
    manifest = model.path / "kvd-model.json"
    manifest.write_text(json.dumps({"gguf": {"license": "apache-2.0"}}))
    assert model.license() == "apache-2.0"
    manifest.write_text(json.dumps({"license": "Terms", "gguf": {"license": "gemma"}}))
    assert model.license() == "Terms"
