"""The fingerprint changes with everything KV depends on, and is cheap the second time."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kvd.model.errors import ModelCorrupt
from kvd.model.fingerprint import CACHE_FILE, FingerprintReport, fingerprint
from kvd.model.registry import ModelFolder
from tests.support.tiny_model import make_tiny_model


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> ModelFolder:
    """A private copy of the tiny model."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    return ModelFolder("model", tmp_path / "model")


def measure(model: ModelFolder, dtype: str = "float32") -> FingerprintReport:
    """The fingerprint in float32."""
    return fingerprint(model, compute_dtype=dtype)


def edit(path: Path, key: str, value: object) -> None:
    """Change one entry of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def test_another_checkpoint_of_the_same_shape_differs(model: ModelFolder, tmp_path: Path) -> None:
    """P7: same name, same shapes, same sizes, other weights: another fingerprint, hence no cached page matches."""
    other = ModelFolder("model", make_tiny_model(tmp_path / "other" / "model", seed=1))
    assert model.weights_bytes() == other.weights_bytes()
    assert measure(model).fingerprint != measure(other).fingerprint


def test_replacing_weights_in_place_is_seen(model: ModelFolder) -> None:
    """P7: one flipped byte in the weights, with the old modification time put back, is another model.

    The replacement is a new file (as every download is), so its inode differs.
    """
    before = measure(model)
    path = model.path / "model.safetensors"
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    fresh = model.path / "fresh"
    fresh.write_bytes(data)
    os.utime(fresh, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    fresh.replace(path)
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert measure(model).fingerprint != before.fingerprint


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("tokenizer.json", "version", "1.1"),
        ("tokenizer_config.json", "chat_template", "other"),
        ("config.json", "rope_theta", 500.0),
        ("config.json", "quantization", {"group_size": 64, "bits": 4}),
    ],
)
def test_tokenizer_template_and_configuration_count(model: ModelFolder, file: str, key: str, value: object) -> None:
    """P7: the same weights read otherwise are another model."""
    before = measure(model).fingerprint
    edit(model.path / file, key, value)
    assert measure(model).fingerprint != before


def test_the_compute_dtype_counts_and_cosmetics_do_not(model: ModelFolder) -> None:
    """KV computed in bfloat16 is not KV computed in float32; a rewritten version key changes nothing."""
    before = measure(model).fingerprint
    assert measure(model, "bfloat16").fingerprint != before
    edit(model.path / "config.json", "transformers_version", "9")
    assert measure(model).fingerprint == before


def test_weights_are_hashed_once(model: ModelFolder) -> None:
    """The second fingerprint reads no weights; a touched file is read again and gives the same digest."""
    first, second = measure(model), measure(model)
    assert first.hashed_bytes > model.weights_bytes()
    assert second.hashed_bytes == 0
    assert second.fingerprint == first.fingerprint
    os.utime(model.path / "model.safetensors", ns=(1, 1))
    third = measure(model)
    assert third.hashed_bytes == model.weights_bytes()
    assert third.fingerprint == first.fingerprint


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "files": {"model.safetensors": 3}}', "\x00"])
def test_a_broken_cache_is_ignored(model: ModelFolder, text: str) -> None:
    """The cache is a hint: whatever it holds, the fingerprint is right."""
    before = measure(model).fingerprint
    (model.path / CACHE_FILE).write_text(text)
    assert measure(model).fingerprint == before


def test_a_folder_without_weights_has_none(model: ModelFolder) -> None:
    """No weights, no fingerprint."""
    (model.path / "model.safetensors").unlink()
    with pytest.raises(ModelCorrupt, match=r"no model\*\.safetensors"):
        measure(model)
