"""Which page formats the daemon can read and which one new agents get. Part of the composition root.

A format is readable while its layout is known: every named format of the model's geometry, with the conditioning
constants of the calibration and all constants kept in the data folder (pages there may still use them).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvd.config import ConfigError
from kvd.ids import FormatId
from kvd.model.loader import LoadedModel
from kvd.model.spec import CacheGroup
from kvd.quant.calibration import load_calibration
from kvd.quant.conditioning import (
    Conditioning,
    LayerConditioning,
    WriteFile,
    load_conditioning,
    save_conditioning,
    write_private_file,
)
from kvd.quant.errors import ConditioningDamaged
from kvd.quant.spec import NAMED_FORMATS, UNCALIBRATED_FORMAT, PageFormat, PageLayout
from kvd.scheduler.core import FormatBook


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """The formats in use.

    Attributes:
        name: named format of new agents.
        reason: why it was chosen.
        book: layouts and constants.
        notices: for the operator.
    """

    name: str
    reason: str
    book: FormatBook
    notices: tuple[str, ...]


def choose_formats(
    loaded: LoadedModel, wanted: str, conditioning_dir: Path, write: WriteFile = write_private_file
) -> FormatChoice:
    """Pick the format of new agents and collect every readable one.

    Args:
        loaded: the model; its folder may hold a calibration.
        wanted: `auto` or a named format.
        conditioning_dir: constants that pages in the data folder may use.
        write: puts a whole, durable file under a path.

    Raises:
        ConfigError: `q4c` was asked for and the model is not calibrated.
    """
    spec = loaded.spec
    calibration = load_calibration(loaded.folder.path, spec.fingerprint)
    own = calibration.conditioning if calibration is not None else ()
    notices: list[str] = []
    if wanted == "auto":
        if calibration is not None:
            name, reason = calibration.chosen, "calibrated: smallest within 2 % perplexity"
        else:
            name, reason = UNCALIBRATED_FORMAT, "not calibrated"
            notices.append(f"{spec.model_name} is not calibrated; run `kvd calibrate {spec.model_name}`")
    else:
        name, reason = wanted, "chosen by a flag"
    if name == "q4c":
        if not own:
            raise ConfigError(f"q4c needs a calibration: run `kvd calibrate {spec.model_name}`", setting="kv-format")
        for constants in own:
            save_conditioning(constants, conditioning_dir, write)
    kept, complaints = _kept_constants(conditioning_dir)
    notices += complaints
    layouts: dict[tuple[int, str], PageLayout] = {}
    conditioning: dict[tuple[str, int], LayerConditioning] = {}
    defaults: list[str] = []
    for number, group in enumerate(spec.groups):
        candidates: list[tuple[PageFormat, Conditioning | None]] = [
            (group.format(plain), None) for plain in NAMED_FORMATS if plain != "q4c"
        ]
        fitting = [own[number]] if own else []
        fitting += [
            constants for constants in kept if _fits(constants, group) and constants.digest not in _digests(fitting)
        ]
        candidates += [(group.format("q4c", constants.digest), constants) for constants in fitting]
        for page_format, used in candidates:
            layout = group.layout(page_format)
            layouts[number, layout.format_id] = layout
            if used is not None:
                for layer, operators in zip(group.layer_indices, used.layers, strict=True):
                    conditioning[layout.format_id, layer] = operators
        default = group.format(name, own[number].digest if name == "q4c" else None)
        defaults.append(FormatId(default.format_id))
    return FormatChoice(name, reason, FormatBook(tuple(defaults), layouts, conditioning), tuple(notices))


def _digests(constants: list[Conditioning]) -> set[str]:
    return {each.digest for each in constants}


def _fits(constants: Conditioning, group: CacheGroup) -> bool:
    return constants.centre.shape == (len(group.layer_indices), group.layer.kv_heads, group.layer.k_dim)


def _kept_constants(folder: Path) -> tuple[list[Conditioning], list[str]]:
    """Constants kept in the data folder; a damaged file is a notice, its pages are computed again."""
    kept: list[Conditioning] = []
    complaints: list[str] = []
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        try:
            kept.append(load_conditioning(path))
        except ConditioningDamaged as error:
            complaints.append(error.message)
    return kept, complaints
