"""Reading a GGUF file: typed metadata, tensors as float32. The only door to the `gguf` package.

May import kvd.model.errors only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvd.model.errors import ModelCorrupt, UnsupportedModel

T = TypeVar("T", str, int, float, bool)

TENSOR_TYPES: Final = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
"""Tensor types the `gguf` package dequantises and kvd accepts."""


class GgufFile:
    """A GGUF file, mapped read only.

    Raises:
        ModelCorrupt: the file is missing, truncated or no GGUF.
    """

    def __init__(self, path: Path) -> None:
        import gguf  # imported late: it costs a quarter second and only imports need it

        self.path = path
        self._gguf: Any = gguf
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelCorrupt(f"{path} is not a readable GGUF file: {error}", file=str(path)) from None
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.get("general.architecture", "unknown")

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor names and shapes, rows first (GGUF stores the innermost dimension first)."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    @cached_property
    def tensor_types(self) -> Mapping[str, int]:
        """Tensor types and how many tensors have them."""
        counts: dict[str, int] = {}
        for tensor in self._tensors.values():
            counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + 1
        return dict(sorted(counts.items()))

    def has(self, key: str) -> bool:
        """Whether the metadata has `key`."""
        return key in self._reader.fields

    def get(self, key: str, default: T) -> T:
        """A scalar of the metadata, or `default`.

        Raises:
            ModelCorrupt: the value has another type.
        """
        if not self.has(key):
            return default
        value: Any = self._reader.fields[key].contents()
        kind = type(default)
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind):
            raise ModelCorrupt(f"{self.path}: {key} is {value!r}, expected {kind.__name__}", key=key)
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """A scalar that must be there.

        Raises:
            ModelCorrupt: absent or of another type.
        """
        if not self.has(key):
            raise ModelCorrupt(f"{self.path} lacks the metadata {key}", key=key)
        return self.get(key, kind())

    def array(self, key: str) -> list[Any]:
        """An array of the metadata; empty when absent."""
        return list(self._reader.fields[key].contents()) if self.has(key) else []

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor dequantised to float32, of shape `shapes[name]`.

        Raises:
            UnsupportedModel: its type is not one of `TENSOR_TYPES`.
        """
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        if kind not in TENSOR_TYPES:
            known = ", ".join(TENSOR_TYPES)
            raise UnsupportedModel(f"tensor type {kind} of {name} is not supported; supported: {known}", type=kind)
        values = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(values, dtype=np.float32).reshape(self.shapes[name])

    def metadata_digest(self) -> str:
        """blake2b-128 of all metadata, keys in order; two files that differ only in weights have the same."""
        digest = hashlib.blake2b(digest_size=16)
        for key in sorted(self._reader.fields):
            if not key.startswith("GGUF."):  # the container's own counters and offsets
                value = json.dumps(self._reader.fields[key].contents(), ensure_ascii=True, default=str)
                digest.update(f"{key}={value}\n".encode())
        return digest.hexdigest()
