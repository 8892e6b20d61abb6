"""Putting a model folder in place, or taking it away, so that no kill at any moment leaves half of one to be seen.

A folder is built under a hidden name next to its final one, made durable, then renamed. One lock file per model name
keeps two processes from building the same model; whoever holds it removes what a killed builder left. The lock is the
kernel's (`flock`), so it dies with its holder. Removing renames first, to the hidden name of unfinished work. May
import this package and kvd.errors.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvd.errors import InvalidParams
from kvd.model.errors import InstallFailed, ModelNotFound
from kvd.model.folder import MANIFEST, ModelFolder
from kvd.model.hub import is_hub_id
from kvd.model.progress import Reporter
from kvd.model.registry import did_you_mean, installed, is_name

_PARTIAL: Final = ".partial-"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: str) -> str:
    """`name`, if it can name a model folder.

    Raises:
        InvalidParams: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise InvalidParams(
            f"model name {name!r} must be 1 to 128 of A-Z a-z 0-9 . _ - and start with a letter or digit"
        )
    return name


@contextmanager
def model_lock(root: Path, name: str, reporter: Reporter) -> Iterator[None]:
    """Hold the lock of a model name, waiting for another process if need be."""
    locks = root / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.stage(f"another process is installing or removing {name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def install_folder(root: Path, name: str, build: Callable[[Path], Mapping[str, Any]]) -> ModelFolder:
    """Build a model folder and put it in place. The caller holds `model_lock`.

    Args:
        root: the model folder's parent.
        name: the model's name; `root / name` must not exist.
        build: fills the (empty) folder it is given and returns the facts for `kvd-model.json`.

    Raises:
        Exception: what `build` raises; the partial folder is removed and nothing was installed.
    """
    remove_partial(root, name)
    partial = Path(tempfile.mkdtemp(prefix=f".{name}{_PARTIAL}", dir=root))
    try:
        facts = build(partial)
        (partial / MANIFEST).write_text(json.dumps(facts, ensure_ascii=False, indent=1), encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp makes 0700; weights are no secret
        for file in partial.iterdir():
            make_durable(file)
        make_durable(partial)
        final = root / name
        partial.rename(final)
        make_durable(root)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return ModelFolder(name, final)


def removable(root: Path, name: str) -> str:
    """What `remove_folder` would remove, in words: a model that kvd put into the model folder, or what is left of one.

    Raises:
        ModelNotFound: neither is there, or kvd did not make it.
    """
    path = root / name
    if _NAME.fullmatch(name) and (path / MANIFEST).is_file() and not path.is_symlink():
        return str(path)
    if _leftovers(root, name):
        return f"what an interrupted command left of {name} in {root}"
    if is_hub_id(name):
        what = f"{name} is not in kvd's model folder; what the model hub gave, `hf cache rm model/{name}` removes"
    elif is_name(name) and os.path.exists(path):
        what = f"{path} was not installed by kvd, which leaves it alone"
    else:
        names = [model.name for model in installed(root)]
        what = f"no model {name!r}{did_you_mean(name, names)}; installed: {', '.join(names) or 'none'}"
    raise ModelNotFound(what, model=name)


def remove_folder(root: Path, name: str, reporter: Reporter) -> int:
    """Remove an installed model, its calibration with it. A daemon that has it loaded goes on until it stops.

    Killed at any moment it leaves a whole model or none; the same call removes what is left.

    Returns:
        Bytes of the removed files.

    Raises:
        ModelNotFound: see `removable`.
        InstallFailed: the disk refused. The model is still whole, or it is gone and some of its files are left under a
            hidden name: the same call removes them.
    """
    removable(root, name)
    path = root / name
    try:
        with model_lock(root, name, reporter):
            removable(root, name)  # another process may have removed it while this one waited
            if (path / MANIFEST).is_file() and not path.is_symlink():
                hidden = Path(tempfile.mkdtemp(prefix=f".{name}{_PARTIAL}", dir=root))
                path.rename(hidden / name)
                make_durable(root)
            left = _leftovers(root, name)
            freed_bytes = sum(_files_bytes(each) for each in left)
            for each in left:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InstallFailed(f"{path} cannot be removed ({reason})", folder=str(path)) from error
    return freed_bytes


def _leftovers(root: Path, name: str) -> list[Path]:
    """What killed installers and removers of a name left: hidden folders, and wheels that were kept to go on with."""
    if not _NAME.fullmatch(name):
        return []
    downloads = root / ".downloads"
    wheels = [*downloads.glob(f"{name}-{'[0-9a-f]' * 16}.whl"), *downloads.glob(f"{name}.pip-*")]
    return [*root.glob(f".{name}{_PARTIAL}*"), *wheels]


def _files_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def remove_partial(root: Path, name: str) -> None:
    """Remove what killed builders of `name` left. The caller holds `model_lock`."""
    for left in root.glob(f".{name}{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)


def make_durable(path: Path) -> None:
    """Flush a file or folder to the drive; macOS needs F_FULLFSYNC, where `fsync` stops at the drive's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is not None:
            try:
                fcntl.fcntl(descriptor, full)
            except OSError:  # some file systems (network, FAT) do not know it
                os.fsync(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
