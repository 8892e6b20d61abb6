"""The result of calibration: which format a model takes, the scores behind it, the conditioning constants, their files.

`calibration.json` and `conditioning.safetensors` lie in the model's folder. They are stale when the model's fingerprint
or the codec's version differs. May import numpy, safetensors, this package and kvd.model.spec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors
import safetensors.numpy

from kvd.errors import InvalidParams
from kvd.model.spec import ModelCacheSpec
from kvd.quant.codec import CODEC_VERSION
from kvd.quant.conditioning import Conditioning, LayerConditioning
from kvd.quant.spec import PageFormat

CALIBRATION_FILE: Final = "calibration.json"
CONDITIONING_FILE: Final = "conditioning.safetensors"


@dataclass(frozen=True, slots=True)
class FormatScore:
    """How one format did.

    Attributes:
        format: its name.
        ppl: perplexity over the tokens it was scored on.
        ratio: relative to FP on the same tokens.
        bytes_per_token: KV bytes of one token over all layers, measured from what the codec made.
    """

    format: str
    ppl: float
    ratio: float
    bytes_per_token: float


@dataclass(frozen=True)
class Calibration:
    """What calibration found.

    Attributes:
        fingerprint: of the model.
        codec_version: of the codec.
        chosen: name of the format `auto` means for this model.
        ppl_fp: perplexity without quantisation.
        scored_tokens: tokens the perplexities are over.
        scores: formats that were tried, in order.
        conditioning: constants, one per cache group.
        elapsed_s: seconds it took.
    """

    fingerprint: str
    codec_version: int
    chosen: str
    ppl_fp: float
    scored_tokens: int
    scores: tuple[FormatScore, ...]
    conditioning: tuple[Conditioning, ...]
    elapsed_s: float

    def facts(self) -> dict[str, object]:
        """Plain data: the chosen format, its bytes per token, every score; ratios unrounded, for who prints them."""
        chosen = next(score for score in self.scores if score.format == self.chosen)
        return {
            "kv_format": self.chosen,
            "bytes_per_token": chosen.bytes_per_token,
            "ppl_ratio": chosen.ratio,
            "ppl_fp": round(self.ppl_fp, 3),
            "scored_tokens": self.scored_tokens,
            "scores": {score.format: score.ratio for score in self.scores},
            "elapsed_s": round(self.elapsed_s, 1),
        }

    def page_formats(self, spec: ModelCacheSpec, name: str | None = None) -> tuple[PageFormat, ...]:
        """One page format per cache group: the chosen one, or `name` with this calibration's constants."""
        return page_formats(spec, self.chosen if name is None else name, self.conditioning)


def page_formats(
    spec: ModelCacheSpec, name: str, conditioning: Sequence[Conditioning] | None = None
) -> tuple[PageFormat, ...]:
    """The named format for each cache group.

    Args:
        spec: the model's geometry.
        name: one of `NAMED_FORMATS`.
        conditioning: constants per group; needed by `q4c`.

    Raises:
        InvalidParams: unknown name, or `q4c` without constants.
    """
    if name == "q4c" and conditioning is None:
        raise InvalidParams("format q4c needs conditioning constants; run `kvd calibrate` first", format=name)
    digests = [c.digest if name == "q4c" else None for c in conditioning or ()] or [None] * len(spec.groups)
    return tuple(group.format(name, digest) for group, digest in zip(spec.groups, digests, strict=True))


def layer_operators(spec: ModelCacheSpec, conditioning: Sequence[Conditioning]) -> dict[int, LayerConditioning]:
    """Conditioning operators by layer index in the model (what `SequenceCache` takes)."""
    return {
        index: constants.layers[at]
        for group, constants in zip(spec.groups, conditioning, strict=True)
        for at, index in enumerate(group.layer_indices)
    }


def save_calibration(calibration: Calibration, folder: Path) -> None:
    """Write `calibration.json` and `conditioning.safetensors` into a model folder.

    The JSON comes last, so it never names constants that are not there; each file is the old one or all of the new one.
    """
    tensors = {}
    for number, constants in enumerate(calibration.conditioning):
        tensors[f"groups.{number}.centre"] = np.ascontiguousarray(constants.centre)
        tensors[f"groups.{number}.scale"] = np.ascontiguousarray(constants.scale)
    _replace(folder / CONDITIONING_FILE, safetensors.numpy.save(tensors))
    record = {
        "fingerprint": calibration.fingerprint,
        "codec_version": calibration.codec_version,
        "chosen": calibration.chosen,
        "ppl_fp": calibration.ppl_fp,
        "scored_tokens": calibration.scored_tokens,
        "scores": [asdict(score) for score in calibration.scores],
        "conditioning": [constants.digest for constants in calibration.conditioning],
        "elapsed_s": calibration.elapsed_s,
    }
    _replace(folder / CALIBRATION_FILE, (json.dumps(record, indent=1) + "\n").encode())


def load_calibration(folder: Path, fingerprint: str) -> Calibration | None:
    """The stored calibration of a model.

    Args:
        folder: the model's folder.
        fingerprint: the model's fingerprint now.

    Returns:
        None when there is none, or it is unreadable or stale: calibrating again is always possible.
    """
    try:
        record: Mapping[str, Any] = json.loads((folder / CALIBRATION_FILE).read_text(encoding="utf-8"))
        tensors = safetensors.numpy.load((folder / CONDITIONING_FILE).read_bytes())
        conditioning = tuple(
            Conditioning(tensors[f"groups.{number}.centre"], tensors[f"groups.{number}.scale"])
            for number in range(len(record["conditioning"]))
        )
        result = Calibration(
            fingerprint=record["fingerprint"],
            codec_version=record["codec_version"],
            chosen=record["chosen"],
            ppl_fp=record["ppl_fp"],
            scored_tokens=record["scored_tokens"],
            scores=tuple(FormatScore(**score) for score in record["scores"]),
            conditioning=conditioning,
            elapsed_s=record["elapsed_s"],
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InvalidParams, safetensors.SafetensorError):
        return None
    current = result.fingerprint == fingerprint and result.codec_version == CODEC_VERSION
    whole = [constants.digest for constants in conditioning] == record["conditioning"]
    return result if current and whole else None


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that there is either the old one or all of the new one."""
    partial = path.with_suffix(f"{path.suffix}.{os.getpid()}.tmp")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
