"""A model on disk, and whether its folder is whole.

`check_files` goes by names and headers: what is missing or cut is found before weights are read, from a few kilobytes
a file. Flipped bytes inside tensors are not seen here (the fingerprint changes with them). May import kvd.model.errors
only.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvd.model.errors import ModelCorrupt, ModelIncomplete

MANIFEST: Final = "kvd-model.json"
INDEX: Final = "model.safetensors.index.json"

_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own limit (safetensors' `MAX_HEADER_SIZE`): a length beyond it is garbage, and nothing is allocated."""

_SHARD: Final = re.compile(r"(model.*-)(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk.

    Attributes:
        name: what the user calls it (the folder's name when it was given by path).
        path: the folder.
    """

    name: str
    path: Path

    def config(self) -> dict[str, Any]:
        """`config.json`.

        Raises:
            ModelIncomplete: missing.
            ModelCorrupt: not a JSON object.
        """
        return read_object(self.path / "config.json")

    def manifest(self) -> dict[str, Any]:
        """`kvd-model.json`; empty for a folder kvd did not make.

        Raises:
            ModelCorrupt: not a JSON object.
        """
        path = self.path / MANIFEST
        return read_object(path) if path.exists() else {}

    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files in name order, as mlx-lm picks them.

        Raises:
            ModelIncomplete: there are none.
        """
        files = tuple(sorted(self.path.glob("model*.safetensors")))
        if not files:
            raise ModelIncomplete(f"{self.path} holds no model*.safetensors file", folder=str(self.path))
        return files

    def weights_bytes(self) -> int:
        """Bytes of the weight files.

        Raises:
            ModelIncomplete: there are none, or one is a link to nothing.
            ModelCorrupt: one cannot be looked at.
        """
        return sum(_size_bytes(file) for file in self.weight_files())

    def license(self) -> str | None:
        """The model's licence in a few words, as its source or its GGUF file states it; None when neither does.

        Raises:
            ModelCorrupt: as `manifest`.
        """
        manifest = self.manifest()
        gguf = manifest.get("gguf")
        stated = manifest.get("license") or (gguf.get("license") if isinstance(gguf, dict) else None)
        return str(stated) if stated else None


def check_files(folder: ModelFolder) -> tuple[dict[str, Any], ...]:
    """Check that the configuration and every weight file are there, each as long as it says, with its tensors.

    Returns:
        The headers of the weight files, in the order of `ModelFolder.weight_files`.

    Raises:
        ModelIncomplete: a file is missing.
        ModelCorrupt: a file is cut short, has too much, or is not what its name says. Both name the file.
    """
    folder.config()
    files = folder.weight_files()
    names = {file.name for file in files}
    indexed = _indexed(folder.path)
    for name in sorted({*indexed.values(), *_siblings(names)} - names):
        raise ModelIncomplete(
            f"{folder.path / name} is missing; its model has more weight files than are here",
            file=str(folder.path / name),
        )
    headers = {file.name: check_safetensors(file) for file in files}
    for tensor, name in indexed.items():
        if tensor not in headers[name]:
            raise _corrupt(folder.path / name, f"lacks the tensor {tensor}, which {INDEX} says is in it")
    return tuple(headers.values())


def check_safetensors(file: Path) -> dict[str, Any]:
    """The header of a safetensors file, which is exactly as long as its header says: bytes after it are damage too.

    Layout (safetensors' format page): 8 bytes little-endian length of the header, the header as JSON, then the bytes
    of the tensors, of which `data_offsets` gives begin and end.

    Raises:
        ModelIncomplete: it is a link to nothing.
        ModelCorrupt: it is not; the message says where it ends.
    """
    size = _size_bytes(file)
    try:
        with file.open("rb") as stream:
            start = stream.read(_LENGTH_BYTES)
            if len(start) < _LENGTH_BYTES:
                raise _corrupt(file, f"holds {size} bytes, less than a safetensors header")
            (header_bytes,) = struct.unpack("<Q", start)
            if header_bytes > _MAX_HEADER_BYTES:
                raise _corrupt(file, "does not begin as a safetensors file does")
            if _LENGTH_BYTES + header_bytes > size:
                raise _corrupt(file, f"ends inside its header: {size} bytes of {_LENGTH_BYTES + header_bytes}")
            header = json.loads(stream.read(header_bytes))
        needed = _LENGTH_BYTES + header_bytes + max(_ends(header), default=0)
    except OSError as error:
        raise _corrupt(file, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _corrupt(file, "has an unreadable safetensors header") from None
    if needed > size:
        raise _corrupt(file, f"is cut short: {size} bytes of {needed}")
    if needed < size:
        raise _corrupt(file, f"has bytes after its end: {size} bytes instead of {needed}")
    return dict(header)


def _ends(header: dict[str, Any]) -> Iterator[int]:
    """Where each tensor of a header ends, in bytes from the end of the header."""
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        if not 0 <= int(begin) <= int(end):
            raise ValueError(name)
        yield int(end)


def _indexed(path: Path) -> dict[str, str]:
    """The weight file of each tensor that the index names; none without an index."""
    index = path / INDEX
    if not index.exists():
        return {}
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise _corrupt(index, "does not map tensors to files")
    return files


def _siblings(names: set[str]) -> set[str]:
    """The names that `model-00001-of-00003.safetensors` and its like promise."""
    matches = [match for name in names if (match := _SHARD.fullmatch(name))]
    return {
        f"{match[1]}{number:05}-of-{match[3]}.safetensors"
        for match in matches
        for number in range(1, int(match[3]) + 1)
    }


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        ModelIncomplete: it is missing.
        ModelCorrupt: it cannot be read or is something else. Both name the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelIncomplete(f"{path} is missing", file=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path} cannot be read: {error}", file=str(path)) from None
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{path} does not hold a JSON object", file=str(path))
    return value


def _size_bytes(file: Path) -> int:
    """Length of a file; a link to nothing (the hub's cache is made of links) is a missing file."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        raise ModelIncomplete(f"{file} is missing: it is a link to nothing", file=str(file)) from None
    except OSError as error:
        raise _corrupt(file, f"cannot be read: {error.strerror or error}") from None


def _corrupt(file: Path, what: str) -> ModelCorrupt:
    return ModelCorrupt(f"{file} {what}", file=str(file))
