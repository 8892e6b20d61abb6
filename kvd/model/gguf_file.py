"""Reading a GGUF file: typed metadata, tensors as float32. The only door to the `gguf` package.

The container is read by `gguf_layout`, which trusts no length in the file; the package knows the block formats of the
tensor types. May import kvd.model.errors and `gguf_layout` only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.gguf_layout import read_layout

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

T = TypeVar("T", str, int, float, bool)

_NUMBERS: Final[Mapping[type, str]] = {int: "iu", float: "f", bool: "b"}
"""Kinds of NumPy's types whose elements become a type of Python's."""


@cache
def can_dequantise(type_id: int) -> bool:
    """Whether the installed `gguf` package turns a block of this tensor type into floats; asked by trying one."""
    import gguf  # imported late: it costs a quarter second and only imports need it

    kind = gguf.GGMLQuantizationType(type_id)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        with np.errstate(all="ignore"):
            gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def tensor_types() -> tuple[str, ...]:
    """Names of the tensor types that can be imported."""
    import gguf

    return tuple(kind.name for kind in gguf.GGMLQuantizationType if can_dequantise(int(kind)))


class GgufFile:
    """A GGUF file, mapped read only, whose every tensor lies inside the file.

    Raises:
        ModelCorrupt: the file is missing, truncated or no GGUF.
        UnsupportedModel: another version or byte order of the format, or an unknown tensor type.
    """

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        self._gguf: Any = gguf
        try:
            if not path.is_file():  # a pipe would block, a folder fails late
                raise FileNotFoundError("no such file" if not path.exists() else "no regular file")
            self._data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise ModelCorrupt(f"{path} is not a readable GGUF file: {error}", file=str(path)) from None
        sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
        layout = read_layout(self._data, name=str(path), block_sizes=sizes)
        self._metadata, self._tensors = layout.metadata, layout.tensors

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.get("general.architecture", "unknown")

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor names and shapes, rows first."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @cached_property
    def tensor_types(self) -> Mapping[str, int]:
        """Tensor types and how many tensors have them."""
        counts: dict[str, int] = {}
        for name in self._tensors:
            kind = self._kind(name).name
            counts[kind] = counts.get(kind, 0) + 1
        return dict(sorted(counts.items()))

    def has(self, key: str) -> bool:
        """Whether the metadata has `key`."""
        return key in self._metadata

    def get(self, key: str, default: T) -> T:
        """A scalar of the metadata, or `default`.

        Raises:
            ModelCorrupt: the value has another type.
        """
        if not self.has(key):
            return default
        value: Any = self._metadata[key]
        kind = type(default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelCorrupt(f"{self.path}: {key} is {_brief(value)}, expected {kind.__name__}", key=key)
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """A scalar that must be there.

        Raises:
            ModelCorrupt: absent or of another type.
        """
        if not self.has(key):
            raise ModelCorrupt(f"{self.path} lacks the metadata {key}", key=key)
        return self.get(key, kind())

    def array(self, key: str, kind: type | None = None) -> list[Any]:
        """An array of the metadata; empty when absent.

        Raises:
            ModelCorrupt: the value is no array, or has elements that are no `kind`.
        """
        value: Any = self._metadata.get(key, [])
        if isinstance(value, list) and (kind in (None, str) or not value):
            return list(value)
        if isinstance(value, np.ndarray) and (
            kind is None or value.dtype.kind in _NUMBERS.get(kind, "") or not value.size
        ):
            return list(value.tolist())
        wanted = kind.__name__ if kind else "values"
        raise ModelCorrupt(f"{self.path}: {key} is {_brief(value)}, expected an array of {wanted}", key=key)

    def is_array(self, key: str) -> bool:
        """Whether the metadata has an array under `key`."""
        return isinstance(self._metadata.get(key), list | np.ndarray)

    def check_types(self) -> None:
        """Refuse tensor types that cannot be dequantised, before a conversion starts.

        Raises:
            UnsupportedModel: names the tensor, its type and the types that can be imported.
        """
        for name in self._tensors:
            self._check_type(name)

    def _check_type(self, name: str) -> None:
        if not can_dequantise(self._tensors[name].type_id):
            kind, known = self._kind(name).name, ", ".join(tensor_types())
            raise UnsupportedModel(f"tensor type {kind} of {name} is not supported; supported: {known}", type=kind)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor dequantised to float32, of shape `shapes[name]`.

        Raises:
            UnsupportedModel: its type is one `tensor_types` lacks.
        """
        self._check_type(name)
        place, kind = self._tensors[name], self._kind(name)
        elements, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        row_bytes = place.shape[-1] // elements * block_bytes
        raw = self._data[place.start : place.start + place.n_bytes].reshape(*place.shape[:-1], row_bytes)
        values = self._gguf.quants.dequantize(raw, kind)
        return np.asarray(values, dtype=np.float32).reshape(place.shape)

    def metadata_digest(self) -> str:
        """blake2b-128 of all metadata, keys in order; two files that differ only in weights have the same."""
        digest = hashlib.blake2b(digest_size=16)
        for key in sorted(self._metadata):
            value = json.dumps(self._metadata[key], ensure_ascii=True, default=np.ndarray.tolist)
            digest.update(f"{key}={value}\n".encode())
        return digest.hexdigest()

    def _kind(self, name: str) -> GGMLQuantizationType:
        import gguf

        return gguf.GGMLQuantizationType(self._tensors[name].type_id)


def _brief(value: object) -> str:
    """A value for a message, without the rest of a long one."""
    text = f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
