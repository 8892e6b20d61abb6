"""JSON that is nested deeper than the parser goes: `json.loads` raises RecursionError, which is no ValueError."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvd.model.describe import stored_calibration
from kvd.model.errors import ModelCorrupt
from kvd.model.fingerprint import CACHE_FILE, fingerprint
from kvd.model.folder import ModelFolder
from kvd.model.tokenizer import TextCodec
from kvd.quant.calibration import CALIBRATION_FILE, CONDITIONING_FILE, load_calibration

DEEP = "[" * 200_000


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_nesting_in_a_text_file_is_damage(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    """A file nested deeper than the parser goes is a corrupt model that names it, never a bug of the program."""
    folder = shutil.copytree(tiny_folder, tmp_path / "deep")
    (folder / name).write_text(DEEP)
    with pytest.raises(ModelCorrupt, match=name):
        TextCodec.from_folder(folder)


def test_nesting_in_kvds_own_files_is_as_if_they_were_not_there(tiny_folder: Path, tmp_path: Path) -> None:
    """Digests are computed again, a calibration is none: both can be made anew."""
    folder = ModelFolder("deep", Path(shutil.copytree(tiny_folder, tmp_path / "deep")))
    expected = fingerprint(folder, compute_dtype="float32").fingerprint
    for name in (CACHE_FILE, CALIBRATION_FILE):
        (folder.path / name).write_text(DEEP)
    assert fingerprint(folder, compute_dtype="float32").fingerprint == expected
    (folder.path / CONDITIONING_FILE).write_bytes(b"")
    assert load_calibration(folder.path, expected) is None
    assert stored_calibration(folder) is None
