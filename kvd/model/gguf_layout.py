"""The container of a GGUF file: metadata and where each tensor lies, checked against the file's size.

Theory of operation. All counts and lengths in the file are untrusted. Each is compared with the bytes that are left
before anything is read or made, and all that is not tensor data has to lie in the first 64 MiB, so a damaged count
costs an error, not memory. Arrays of numbers stay views of the file until somebody asks for them. Every tensor's last
byte must lie inside the file: a file that was cut anywhere is found here, before a conversion starts. Source of the
layout: the GGUF specification, versions 2 and 3 (little endian). May import kvd.model.errors only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvd.model.errors import ModelCorrupt, UnsupportedModel

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[Mapping[int, str]] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_MIN_ENTRY_BYTES: Final = 12
"""The least a metadata entry or a tensor description takes: a name's length and a type."""
_ENTRY_COUNT_BYTES: Final = 8
_MAX_ENTRIES: Final = 1 << 16
"""Metadata entries, and tensors; models have thousands at most. As objects in memory each takes half a kilobyte."""
MAX_FRONT_BYTES: Final = 1 << 26
"""All that lies before the tensors' data; vocabularies of a quarter million tokens with their merges take 20 MB."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies.

    Attributes:
        shape: rows first (the file stores the innermost dimension first).
        type_id: GGML's number of the tensor type.
        start: its first byte in the file.
        n_bytes: its bytes.
    """

    shape: tuple[int, ...]
    type_id: int
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Metadata by key (arrays of numbers as NumPy arrays, of text as lists), and tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]


def read_layout(data: NDArray[np.uint8], *, name: str, block_sizes: Mapping[int, tuple[int, int]]) -> Layout:
    """The layout of a whole GGUF file.

    Args:
        data: [file bytes], usually a memory map.
        name: the file's name, for messages.
        block_sizes: GGML tensor type to (elements of a block, bytes of a block).

    Raises:
        ModelCorrupt: no GGUF, cut short, a count or length that cannot be, or more than `MAX_FRONT_BYTES` before the
            data.
        UnsupportedModel: another version or byte order, or a tensor type that is not in `block_sizes`.
    """
    return _Cursor(data, name, block_sizes).layout()


class _Cursor:
    """A position in the file that never passes its end."""

    def __init__(self, data: NDArray[np.uint8], name: str, block_sizes: Mapping[int, tuple[int, int]]) -> None:
        self._data = data.data
        self._name = name
        self._block_sizes = block_sizes
        self._at = 0
        self._most = min(len(self._data), MAX_FRONT_BYTES)

    def layout(self) -> Layout:
        """Everything before the data, and the bounds of the data."""
        if bytes(self._take(4)) != MAGIC:
            raise self._refusal("no GGUF file")
        version = self._whole("<I")
        if version not in VERSIONS:
            kind = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
            known = ", ".join(map(str, VERSIONS))
            raise UnsupportedModel(f"{self._name} is {kind}; supported: little-endian GGUF versions {known}")
        tensors, entries = self._count(_MIN_ENTRY_BYTES), self._count(_MIN_ENTRY_BYTES)
        if max(tensors, entries) > _MAX_ENTRIES:
            raise self._refusal(f"{tensors} tensors and {entries} metadata entries, expected {_MAX_ENTRIES} at most")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            if key in metadata:
                raise self._refusal(f"metadata {key!r} is there twice")
            metadata[key] = self._value(self._whole("<I"))
        places = [self._tensor() for _ in range(tensors)]
        return Layout(metadata, self._placed(places, metadata))

    def _placed(self, places: list[tuple[str, TensorPlace]], metadata: Mapping[str, Any]) -> dict[str, TensorPlace]:
        """Tensors with absolute positions, each inside the file."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._refusal(f"general.alignment is {alignment!r}, expected a power of two")
        start = -(-self._at // alignment) * alignment
        found: dict[str, TensorPlace] = {}
        for name, place in places:
            end = start + place.start + place.n_bytes
            if end > len(self._data):
                raise self._refusal(f"cut short: tensor {name} ends at byte {end} of {len(self._data)}")
            if place.start % alignment:
                raise self._refusal(f"tensor {name} does not start at a multiple of {alignment} bytes")
            if name in found:
                raise self._refusal(f"tensor {name} is there twice")
            found[name] = TensorPlace(place.shape, place.type_id, start + place.start, place.n_bytes)
        return found

    def _tensor(self) -> tuple[str, TensorPlace]:
        """A tensor description; its start counts from the beginning of the data."""
        name = self._string()
        n_dimensions = self._whole("<I")
        if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
            raise self._refusal(f"tensor {name} has {n_dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self._whole("<Q") for _ in range(n_dimensions))[::-1]
        type_id = self._whole("<I")
        start = self._whole("<Q")
        if type_id not in self._block_sizes:
            raise UnsupportedModel(f"{self._name}: tensor {name} has the unknown type {type_id}", type=type_id)
        elements, block_bytes = self._block_sizes[type_id]
        if not all(shape) or shape[-1] % elements:
            raise self._refusal(f"tensor {name} has shape {shape}, which is no multiple of its blocks of {elements}")
        return name, TensorPlace(shape, type_id, start, math.prod(shape) // elements * block_bytes)

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        raise self._refusal(f"unknown metadata type {kind}")

    def _array(self) -> list[str] | NDArray[Any]:
        kind = self._whole("<I")
        if kind == _STRING:
            return [self._string() for _ in range(self._count(_ENTRY_COUNT_BYTES))]
        if kind in _SCALARS:
            form = np.dtype(_SCALARS[kind] if kind != 7 else "?")
            count = self._count(form.itemsize)
            return np.frombuffer(self._take(count * form.itemsize), dtype=form)
        raise self._refusal(f"an array of metadata type {kind}")

    def _string(self) -> str:
        length = self._whole("<Q")
        raw = self._take(length)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self._refusal(f"text at byte {self._at - length} is not UTF-8") from None

    def _count(self, least_bytes: int) -> int:
        """A count of things of at least `least_bytes` each, which the rest of the file has room for."""
        count = self._whole("<Q")
        if count * least_bytes > self._most - self._at:
            raise self._too_much(f"{count} entries announced at byte {self._at - 8}", self._at + count * least_bytes)
        return count

    def _whole(self, form: str) -> int:
        number: int = self._scalar(form)  # type: ignore[assignment]  # the caller's format is one of a whole number
        return number

    def _scalar(self, form: str) -> object:
        value: object = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _take(self, n_bytes: int) -> memoryview:
        end = self._at + n_bytes
        if end > self._most:
            raise self._too_much(f"{n_bytes} bytes expected at byte {self._at}", end)
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _too_much(self, what: str, end: int) -> ModelCorrupt:
        """The refusal of something that would end at byte `end`, beyond the file or what may lie before the data."""
        if end > len(self._data):
            return self._refusal(f"cut short: {what} of {len(self._data)}")
        return self._refusal(f"{what}, but all before the tensors' data has to lie in {MAX_FRONT_BYTES >> 20} MiB")

    def _refusal(self, reason: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self._name} is not a readable GGUF file: {reason}", file=self._name)
