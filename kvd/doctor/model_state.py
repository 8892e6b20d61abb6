"""A model's geometry and page formats without its weights: from headers, configuration and calibration.

The fingerprint is that of `kvd.model.loader.load`. It is computed over a folder of links, so that the digests it
remembers are not written beside the user's model: a look changes nothing. Imports kvd.errors, kvd.model, kvd.formats,
kvd.quant and this package.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from kvd.doctor.aside import aside
from kvd.errors import EnvironmentFault
from kvd.model.cache_spec import build_cache_spec, check_supported
from kvd.model.errors import ModelIncomplete
from kvd.model.fingerprint import CACHE_FILE, FingerprintReport, fingerprint
from kvd.model.folder import check_files
from kvd.model.registry import ModelFolder, installed, resolve
from kvd.model.spec import ModelCacheSpec
from kvd.quant.calibration import CALIBRATION_FILE, load_calibration
from kvd.quant.spec import PageLayout

if TYPE_CHECKING:
    from kvd.formats import FormatChoice
    from kvd.model.loader import LoadedModel

_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

Layouts = Callable[[int, str], PageLayout | None]


@dataclass(frozen=True, slots=True)
class ModelState:
    """What `kvd serve` would find.

    Attributes:
        folder: the model's folder.
        spec: geometry, with the fingerprint.
        formats: page formats, as the daemon would choose them.
        dtype: dtype of activations on this device.
        calibrated: whether a calibration of this very model is there.
        tensors: in the weight files.
        weights_bytes: of the weight files.
        hashed_bytes: read to compute the fingerprint; 0 when its digests were remembered.
    """

    folder: ModelFolder
    spec: ModelCacheSpec
    formats: FormatChoice
    dtype: str
    calibrated: bool
    tensors: int
    weights_bytes: int
    hashed_bytes: int

    def layout(self, group: int, format_id: str) -> PageLayout | None:
        """The layout of pages in a format, None when it is unknown."""
        return self.formats.book.layouts.get((group, format_id))


def model_state(name: str, model_dir: Path, conditioning_dir: Path) -> ModelState:
    """Look at a model.

    Args:
        name: installed name, path or hub id.
        model_dir: folder of installed models.
        conditioning_dir: constants in the data folder; read only.

    Raises:
        KvdError: there is none, it is not whole, kvd cannot run it, or there is no room for a folder of links.
    """
    import mlx.core as mx

    from kvd.formats import choose_formats

    folder = resolve(name, model_dir)
    config = folder.config()
    check_supported(config)
    headers = check_files(folder)
    tokenizer = folder.path / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelIncomplete(f"{tokenizer} is missing", file=str(tokenizer))
    dtype = "float32" if mx.default_device().type == mx.DeviceType.cpu else _stored_dtype(headers)
    found = _fingerprint_aside(folder, dtype)
    spec = build_cache_spec(
        config, model_name=folder.name, fingerprint=found.fingerprint, item_bytes=_ITEM_BYTES[dtype]
    )
    loaded = cast("LoadedModel", SimpleNamespace(spec=spec, folder=folder))  # all that a choice of formats looks at
    return ModelState(
        folder=folder,
        spec=spec,
        formats=choose_formats(loaded, "auto", conditioning_dir, _write_nothing),
        dtype=dtype,
        calibrated=load_calibration(folder.path, spec.fingerprint) is not None,
        tensors=sum(len(header) - ("__metadata__" in header) for header in headers),
        weights_bytes=folder.weights_bytes(),
        hashed_bytes=found.hashed_bytes,
    )


def names_by_fingerprint(model_dir: Path) -> dict[str, str]:
    """Which installed model a fingerprint is of, as far as calibrations tell; good enough for a message only."""
    names: dict[str, str] = {}
    for model in installed(model_dir):
        try:
            record = json.loads((model.path / CALIBRATION_FILE).read_text(encoding="utf-8"))
            names[str(record["fingerprint"])] = model.name
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return names


def _stored_dtype(headers: Iterable[dict[str, Any]]) -> str:
    """Dtype of the last norm, which is what a loaded model computes in where weights stay as stored."""
    for header in headers:
        for name, entry in header.items():
            if name.endswith("model.norm.weight"):
                return _DTYPES.get(entry.get("dtype"), "float32")
    return "float32"


def _fingerprint_aside(folder: ModelFolder, dtype: str) -> FingerprintReport:
    paths = [path for path in folder.path.iterdir() if path.is_file() and path.name != CACHE_FILE]
    remembered = b""
    with contextlib.suppress(OSError):  # then everything is hashed
        remembered = (folder.path / CACHE_FILE).read_bytes()
    with aside() as links:
        (links / CACHE_FILE).write_bytes(remembered)
        for path in paths:
            (links / path.name).symlink_to(path.resolve())
        try:
            return fingerprint(ModelFolder(folder.name, links), compute_dtype=dtype)
        except OSError as error:  # it writes nothing that it insists on, so this is the model's disk
            raise EnvironmentFault(f"the files of {folder.path} cannot be read: {error.strerror or error}") from error


def _write_nothing(path: Path, data: bytes) -> None:
    """A look writes nothing."""


__all__ = ["Layouts", "ModelState", "model_state", "names_by_fingerprint"]
