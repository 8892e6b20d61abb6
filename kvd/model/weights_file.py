"""A streaming safetensors writer: one tensor in memory at a time, bfloat16 without a bfloat16 numpy.

May import this package only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvd.model.sources import WeightsDtype

_NAMES: Final[Mapping[WeightsDtype, tuple[str, int]]] = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to write: its name, its shape, and how to get its float32 values when its turn comes."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], NDArray[np.float32]]


def to_bytes(values: NDArray[np.float32], dtype: WeightsDtype) -> bytes:
    """Little-endian bytes of `values` in `dtype`; bfloat16 rounds to nearest, ties to even (finite values)."""
    if dtype == "float32":
        return np.ascontiguousarray(values, dtype="<f4").tobytes()
    if dtype == "float16":
        return np.ascontiguousarray(values).astype("<f2").tobytes()
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_weights(
    path: Path, plans: Sequence[TensorPlan], *, dtype: WeightsDtype, advance: Callable[[int], None]
) -> int:
    """Write `plans` to `path` in order and return the bytes of the payload.

    The caller makes the file durable. `advance` is told the bytes of each tensor written.

    Raises:
        ValueError: a plan loads another shape than it promised.
        OSError: the disk refused; the file is incomplete.
    """
    type_name, item_bytes = _NAMES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for plan in plans:
        end = offset + item_bytes * int(np.prod(plan.shape, dtype=np.int64))
        header[plan.name] = {"dtype": type_name, "shape": list(plan.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the payload; keep it aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for plan in plans:
            values = plan.load()
            if values.shape != plan.shape:
                raise ValueError(f"{plan.name}: loaded {values.shape}, planned {plan.shape}")
            data = to_bytes(values, dtype)
            file.write(data)
            advance(len(data))
    return offset
