"""The model fingerprint: what KV depends on in a model, as 32 hex digits.

It covers every byte of the weights, the tokenizer, the chat template, the configuration with its quantisation, and the
dtype the model computes in, so another checkpoint of the same name and shape misses every cached page. File digests
are cached by size, modification time and inode, in a hidden file beside the weights (or in memory only, where the
folder cannot be written). May import this package only.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvd.ids import Fingerprint
from kvd.model.registry import ModelFolder

FINGERPRINT_VERSION: Final = 1
CACHE_FILE: Final = ".kvd-digests.json"

_TEXT_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_COSMETIC_KEYS: Final = frozenset({"_name_or_path", "transformers_version"})
"""Keys of `config.json` that tools rewrite and nothing computes with."""


@dataclass(frozen=True, slots=True)
class FingerprintReport:
    """A fingerprint and what it cost.

    Attributes:
        fingerprint: 32 hex digits.
        hashed_bytes: bytes read to compute it; 0 for the weights when every digest was cached.
    """

    fingerprint: Fingerprint
    hashed_bytes: int


def fingerprint(model: ModelFolder, *, compute_dtype: str) -> FingerprintReport:
    """Fingerprint of a model folder.

    Args:
        model: the folder.
        compute_dtype: dtype of activations, such as `float32`; part of the fingerprint.

    Raises:
        ModelCorrupt: no weights, or `config.json` cannot be read.
    """
    cache = _read_cache(model.path)
    config = {key: value for key, value in model.config().items() if key not in _COSMETIC_KEYS}
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"kvd-fingerprint {FINGERPRINT_VERSION}\ncompute {compute_dtype}\n".encode())
    digest.update(json.dumps(config, sort_keys=True).encode() + b"\n")
    files = [*model.weight_files(), *(path for name in _TEXT_FILES if (path := model.path / name).is_file())]
    known: dict[str, dict[str, object]] = {}
    hashed_bytes = 0
    for path in files:
        identity = _identity(path)
        entry = cache.get(path.name)
        if entry is None or entry.get("identity") != identity:
            entry = {"identity": identity, "digest": _file_digest(path)}
            hashed_bytes += path.stat().st_size
        known[path.name] = entry
        digest.update(f"{path.name} {entry['digest']}\n".encode())
    if hashed_bytes:
        _write_cache(model.path, known)
    return FingerprintReport(Fingerprint(digest.hexdigest()), hashed_bytes)


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _read_cache(folder: Path) -> Mapping[str, dict[str, Any]]:
    try:
        value = json.loads((folder / CACHE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    entries = value.get("files") if isinstance(value, dict) and value.get("version") == FINGERPRINT_VERSION else None
    if not isinstance(entries, dict):
        return {}
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict) and "digest" in entry}


def _write_cache(folder: Path, files: Mapping[str, Mapping[str, object]]) -> None:
    text = json.dumps({"version": FINGERPRINT_VERSION, "files": files}, indent=1)
    with suppress(OSError):  # a read-only model folder costs hashing at each start, nothing else
        descriptor, temporary = tempfile.mkstemp(prefix=CACHE_FILE, dir=folder)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(folder / CACHE_FILE)
