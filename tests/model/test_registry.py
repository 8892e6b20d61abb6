"""Where models live and how a name becomes a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvd.model.errors import ModelCorrupt, ModelNotFound
from kvd.model.paths import model_dir
from kvd.model.registry import installed, resolve


@pytest.fixture
def root(tiny_folder: Path, tmp_path: Path) -> Path:
    """A model folder with one model, a half-built one and a stray file."""
    shutil.copytree(tiny_folder, tmp_path / "root" / "tiny")
    shutil.copytree(tiny_folder, tmp_path / "root" / ".tiny.partial-x")
    (tmp_path / "root" / "notes.txt").write_text("mine")
    (tmp_path / "root" / "empty").mkdir()
    return tmp_path / "root"


def test_the_model_folder_is_stated_or_the_platforms_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An argument wins over `KVD_MODEL_DIR`, which wins over the user data folder."""
    monkeypatch.setenv("KVD_MODEL_DIR", str(tmp_path / "env"))
    assert model_dir(tmp_path / "arg") == tmp_path / "arg"
    assert model_dir() == tmp_path / "env"
    monkeypatch.delenv("KVD_MODEL_DIR")
    assert model_dir().name == "kvd-models"


def test_only_whole_models_are_installed(root: Path, tmp_path: Path) -> None:
    """Partial folders, strays and a missing root are no models."""
    assert [model.name for model in installed(root)] == ["tiny"]
    assert installed(tmp_path / "nowhere") == ()


def test_names_and_paths_resolve(root: Path, tiny_folder: Path) -> None:
    """An installed name, and the path of any mlx-lm folder."""
    assert resolve("tiny", root).path == root / "tiny"
    model = resolve(tiny_folder, root)
    assert (model.name, model.path) == ("tiny", tiny_folder.resolve())
    assert model.manifest() == {}


def test_a_downloaded_hub_id_resolves(
    monkeypatch: pytest.MonkeyPatch, root: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """A snapshot in the hub's cache is used as it is; without one nothing is fetched."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    with pytest.raises(ModelNotFound):
        resolve("some-org/tiny", root)
    home = cache / "models--some-org--tiny"
    revision = "0" * 40
    shutil.copytree(tiny_folder, home / "snapshots" / revision)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(revision)
    model = resolve("some-org/tiny", root)
    assert model.name == "some-org/tiny"
    assert model.config()["model_type"] == "llama"


def test_an_unknown_name_lists_what_there_is(root: Path) -> None:
    """The error names installed and pullable models."""
    with pytest.raises(ModelNotFound, match=r"installed: tiny; .*smollm2-135m") as caught:
        resolve("tinny", root)
    assert caught.value.data["installed"] == ["tiny"]


def test_a_broken_config_is_corrupt(root: Path) -> None:
    """The error names the file."""
    (root / "tiny" / "config.json").write_text("{")
    with pytest.raises(ModelCorrupt, match=r"config\.json"):
        resolve("tiny", root).config()
