"""Installed models, and from a name, a path or a hub id to a model folder.

A model folder is any mlx-lm folder; the ones kvd made also hold `kvd-model.json`. Names that start with a dot are
unfinished work and never seen here. May import kvd.errors and this package.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from kvd.errors import KvdError
from kvd.model.errors import ModelIncomplete, ModelNotFound
from kvd.model.folder import MANIFEST, ModelFolder
from kvd.model.hub import hub_snapshot, is_hub_id
from kvd.model.paths import model_dir
from kvd.model.sources import CATALOGUE

__all__ = ["MANIFEST", "ModelFolder", "did_you_mean", "installed", "is_name", "not_found", "offer", "resolve"]


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
        ModelNotFound: the message says what to do and lists installed and pullable names.
        ModelIncomplete: a folder is there, but it holds no `config.json`.
    """
    text = str(name_or_path)
    for model in installed(directory):
        if model.name == text:
            return model
    path = Path(os.path.expanduser(text))
    if text and os.path.isfile(path / "config.json"):
        return ModelFolder(path.resolve().name, path.resolve())
    snapshot = hub_snapshot(text)
    if snapshot is not None:
        return snapshot
    raise not_found(text, directory)


def not_found(text: str, directory: str | Path | None = None) -> KvdError:
    """The error for a name or path that is no model here, with what its user should do instead."""
    # os.path says no where a name is too long, holds a NUL or names an unknown user; Path raises
    path = Path(os.path.expanduser(text))
    if path.suffix.lower() == ".gguf":
        there = "is a GGUF file" if os.path.isfile(path) else "would be a GGUF file, and there is none"
        return ModelNotFound(f"{text} {there}; `kvd model import FILE` makes a model of one", model=text)
    place = model_dir(directory) / text
    if is_name(text) and os.path.isdir(place):
        again = f"remove it with `kvd model rm {text}`" if (place / MANIFEST).is_file() else "move it away"
        return ModelIncomplete(
            f"{place / 'config.json'} is missing, so {text} cannot be loaded; {again}, then install the model again",
            file=str(place / "config.json"),
        )
    if text and os.path.isdir(path) and text not in CATALOGUE:
        return ModelIncomplete(
            f"{path / 'config.json'} is missing: {text} is no folder in mlx-lm's layout", file=str(path / "config.json")
        )
    names = [model.name for model in installed(directory)]
    if os.path.isfile(path):
        what = f"{text} is a file, and a model is a folder in mlx-lm's layout"
    elif is_hub_id(text):
        what = f"no model {text!r} here: `kvd model pull {text}` fetches it from the model hub"
    elif text in CATALOGUE:
        what = f"no model {text!r} here: `kvd model pull {text}` fetches it"
    else:
        what = f"no model {text!r}{did_you_mean(text, [*names, *CATALOGUE])}"
    return ModelNotFound(
        f"{what}; {offer(directory)}; or give the path of an mlx-lm folder",
        model=text,
        installed=names,
        pullable=list(CATALOGUE),
    )


def is_name(text: str) -> bool:
    """Whether `text` is one path component that a model's folder may have as its name."""
    return bool(text) and not text.startswith(".") and Path(text).name == text


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """` (did you mean X?)` for the name closest to a mistyped one; nothing when none is close."""
    known = {name.lower(): name for name in names}
    close = difflib.get_close_matches(text.lower(), known, n=1)
    return f" (did you mean {known[close[0]]}?)" if close else ""


def offer(directory: str | Path | None = None) -> str:
    """The models that can be had without the hub: those installed, and those of the catalogue."""
    names = ", ".join(model.name for model in installed(directory))
    return f"installed: {names or 'none'}; `kvd model pull` knows: {', '.join(CATALOGUE)}"
