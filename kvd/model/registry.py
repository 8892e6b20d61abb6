"""Installed models, and from a name, a path or a hub id to a model folder.

A model folder is any mlx-lm folder; the ones kvd made also hold `kvd-model.json`. Names that start with a dot are
unfinished work and never seen here. May import kvd.errors and this package.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvd.model.errors import ModelCorrupt, ModelNotFound
from kvd.model.paths import model_dir
from kvd.model.sources import CATALOGUE

MANIFEST: Final = "kvd-model.json"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk.

    Attributes:
        name: what the user calls it (the folder's name when it was given by path).
        path: the folder.
    """

    name: str
    path: Path

    def config(self) -> dict[str, Any]:
        """`config.json`.

        Raises:
            ModelCorrupt: missing or not a JSON object.
        """
        return _read(self.path / "config.json")

    def manifest(self) -> dict[str, Any]:
        """`kvd-model.json`; empty for a folder kvd did not make.

        Raises:
            ModelCorrupt: not a JSON object.
        """
        path = self.path / MANIFEST
        return _read(path) if path.exists() else {}

    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files in name order, as mlx-lm picks them.

        Raises:
            ModelCorrupt: there are none.
        """
        files = tuple(sorted(self.path.glob("model*.safetensors")))
        if not files:
            raise ModelCorrupt(f"{self.path} holds no model*.safetensors file", folder=str(self.path))
        return files

    def weights_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(file.stat().st_size for file in self.weight_files())


def installed(directory: str | Path | None = None) -> tuple[ModelFolder, ...]:
    """Models in the model folder (`kvd.model.paths.model_dir`), by name."""
    root = model_dir(directory)
    if not root.is_dir():
        return ()
    folders = (path for path in sorted(root.iterdir()) if not path.name.startswith("."))
    return tuple(ModelFolder(path.name, path) for path in folders if (path / "config.json").is_file())


def resolve(name_or_path: str | Path, directory: str | Path | None = None) -> ModelFolder:
    """The model folder a user means: an installed name, the path of an mlx-lm folder, or a hub id already downloaded.

    Nothing is fetched: a model comes only by `kvd model pull` or by the hub's own tool.

    Raises:
        ModelNotFound: the message lists installed and pullable names.
    """
    text = str(name_or_path)
    for model in installed(directory):
        if model.name == text:
            return model
    path = Path(text).expanduser()
    if (path / "config.json").is_file():
        return ModelFolder(path.resolve().name, path.resolve())
    snapshot = _hub_snapshot(text)
    if snapshot is not None:
        return ModelFolder(text, snapshot)
    names = [model.name for model in installed(directory)]
    raise ModelNotFound(
        f"no model {text!r}: installed: {', '.join(names) or 'none'}; `kvd model pull` knows: {', '.join(CATALOGUE)}; "
        "or give the path of an mlx-lm folder",
        model=text,
        installed=names,
        pullable=list(CATALOGUE),
    )


def _hub_snapshot(model_id: str) -> Path | None:
    """The local snapshot of a hub id such as `org/name`, if the hub's cache holds a whole model."""
    if model_id.count("/") != 1 or model_id.startswith((".", "/", "~")):
        return None
    from huggingface_hub import snapshot_download  # imported late: it is slow and rarely needed
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(model_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return path if (path / "config.json").is_file() and any(path.glob("model*.safetensors")) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelCorrupt(f"{path} cannot be read: {error}", file=str(path)) from None
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{path} does not hold a JSON object", file=str(path))
    return value
