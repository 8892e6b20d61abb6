"""Where models live and how a name becomes a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvd.model.errors import ModelCorrupt, ModelIncomplete, ModelNotFound
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


@pytest.mark.parametrize("typed", ["tinny", "Tiny", "tin", "smollm2", "gemma3-270M"])
def test_an_unknown_name_lists_what_there_is_and_what_was_meant(root: Path, typed: str) -> None:
    """The error names installed and pullable models, and the one that is spelled nearly so."""
    meant = {"s": "smollm2-135m", "g": "gemma3-270m"}.get(typed[0], "tiny")
    with pytest.raises(
        ModelNotFound, match=rf"no model '{typed}' \(did you mean {meant}\?\); installed: tiny;"
    ) as caught:
        resolve(typed, root)
    assert caught.value.data["installed"] == ["tiny"]
    assert caught.value.data["pullable"] == ["smollm2-135m", "gemma3-270m"]


def test_nothing_is_suggested_for_a_name_like_no_other(root: Path) -> None:
    """A guess that is no better than the list is left out; what can be pulled says how."""
    with pytest.raises(ModelNotFound, match="no model 'xyzzy'; installed: tiny; `kvd model pull` knows: smollm2-135m"):
        resolve("xyzzy", root)
    with pytest.raises(ModelNotFound, match="no model 'gemma3-270m' here: `kvd model pull gemma3-270m` fetches it"):
        resolve("gemma3-270m", root)


@pytest.mark.parametrize(
    "text", ["", "x" * 5000, "y/" + "x" * 5000, "a\0b", "~nobody-of-that-name/x", "./", "a//b", "*"]
)
def test_text_that_can_be_no_path_is_a_name_that_is_not_there(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Too long, a NUL, an unknown user, nothing at all: kvd's error, whatever the system thinks of it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ModelNotFound, ModelIncomplete)) as caught:
        resolve(text, root)
    assert isinstance(caught.value, ModelIncomplete) == (text == "./")


def test_a_gguf_file_is_to_be_imported(root: Path, tmp_path: Path) -> None:
    """Given to `--model`, there or not, it is told from a name: `kvd model import`."""
    file = tmp_path / "Model.GGUF"
    with pytest.raises(ModelNotFound, match="there is none; `kvd model import FILE`"):
        resolve(file, root)
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="is a GGUF file; `kvd model import FILE`"):
        resolve(file, root)


def test_a_path_that_is_no_model_says_what_it_lacks(root: Path, tmp_path: Path) -> None:
    """A folder lacks `config.json`; a file is no folder."""
    with pytest.raises(ModelIncomplete, match=rf"{tmp_path}/config\.json is missing") as caught:
        resolve(tmp_path, root)
    assert caught.value.data["file"] == str(tmp_path / "config.json")
    with pytest.raises(ModelNotFound, match=r"notes\.txt is a file, and a model is a folder"):
        resolve(root / "notes.txt", root)


def test_an_installed_folder_without_configuration_says_how_to_go_on(root: Path) -> None:
    """One that kvd made can be removed by kvd; another is the user's to move."""
    with pytest.raises(ModelIncomplete, match=r"empty/config\.json is missing.*move it away"):
        resolve("empty", root)
    (root / "tiny" / "config.json").unlink()
    (root / "tiny" / "kvd-model.json").write_text("{}")
    with pytest.raises(ModelIncomplete, match="remove it with `kvd model rm tiny`"):
        resolve("tiny", root)


def test_a_folder_of_the_catalogues_name_does_not_hide_the_model(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stray folder in the working directory is not taken for the default model, which then would not be pulled."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    with pytest.raises(ModelNotFound, match="kvd model pull smollm2-135m"):
        resolve("smollm2-135m", root)


def test_a_broken_config_is_corrupt(root: Path) -> None:
    """The error names the file."""
    (root / "tiny" / "config.json").write_text("{")
    with pytest.raises(ModelCorrupt, match=r"config\.json"):
        resolve("tiny", root).config()
