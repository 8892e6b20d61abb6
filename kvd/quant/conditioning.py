"""Static key conditioning: K' = H((K - c) / s), Q' = H(Q * s).

Theory of operation. Some key channels are large in every token; under 4-bit groups along the head dimension they eat
the range of their neighbours. Subtracting a static centre c and dividing by a static scale s per layer, KV head and
channel makes channels alike; the orthonormal Hadamard rotation H spreads what remains. Scores stay the same:
Q'.K' = (Q s).((K - c)/s) = Q.K - Q.c, and Q.c is equal for all keys of one query, so it drops out of the softmax.
It does *not* drop out of the log-sum-exp: backends add `scale * Q.c` to lse, so partial results of differently
conditioned segments merge and sinks compare with true scores.

H is the normalised Sylvester-Hadamard matrix on blocks of the largest power of two that divides the head width. It is
computed as a butterfly (`mx.hadamard_transform`), whose rounding does not depend on the number of rows, as a matrix
product's would: chunk sizes must not change a key's bits. Constants stay in the data folder while pages use them.

May import mlx, numpy, safetensors, kvd.quant.errors, kvd.errors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from kvd.errors import InvalidParams
from kvd.quant.errors import ConditioningDamaged

F32Array = npt.NDArray[np.float32]
WriteFile = Callable[[Path, bytes], None]
"""Puts a whole file under a path, or raises OSError and leaves what was there."""

_DIGEST_BYTES: Final = 6
_MAGIC: Final = b"kvd-conditioning-1"


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Constants of one cache group. Immutable; named by `digest`.

    Attributes:
        centre: float32 [layers, kv_heads, k_dim], subtracted from keys; layers in the group's order.
        scale: float32, same shape, positive; keys are divided by it.
    """

    centre: F32Array
    scale: F32Array

    def __post_init__(self) -> None:
        if self.centre.ndim != 3 or self.centre.shape != self.scale.shape:
            raise InvalidParams(f"constants must be [layers, kv_heads, k_dim]: {self.centre.shape}, {self.scale.shape}")
        if not (np.isfinite(self.centre).all() and np.isfinite(self.scale).all() and (self.scale > 0).all()):
            raise InvalidParams("conditioning constants must be finite and scales positive")

    @functools.cached_property
    def digest(self) -> str:
        """12 hex digits over shape and little-endian bytes: what a format's id and the file are named by."""
        shape = ",".join(map(str, self.centre.shape)).encode()
        body = b"".join(np.ascontiguousarray(a, dtype="<f4").tobytes() for a in (self.centre, self.scale))
        return hashlib.blake2b(_MAGIC + b"\0" + shape + b"\0" + body, digest_size=_DIGEST_BYTES).hexdigest()

    @functools.cached_property
    def layers(self) -> tuple[LayerConditioning, ...]:
        """Per-layer operators, in the group's layer order."""
        return tuple(LayerConditioning(c, s) for c, s in zip(self.centre, self.scale, strict=True))

    @classmethod
    def from_range(cls, low: F32Array, high: F32Array) -> Conditioning:
        """Constants from the range of each channel: centre = mid-range, scale = sqrt(half range).

        Args:
            low: float32 [layers, kv_heads, k_dim], least value seen.
            high: same shape, greatest value seen.
        """
        half = np.maximum((high - low) / np.float32(2), np.float32(1e-6))
        centre = low + (high - low) / np.float32(2)
        return cls(centre.astype(np.float32), np.sqrt(half).astype(np.float32))


class LayerConditioning:
    """The operators of one layer. Holds mlx constants: use it on one thread only.

    Args:
        centre: float32 [kv_heads, k_dim].
        scale: float32 [kv_heads, k_dim].
    """

    def __init__(self, centre: F32Array, scale: F32Array) -> None:
        self.centre = centre
        self.scale = scale
        self._device: tuple[Any, Any, Any] | None = None

    def _constants(self) -> tuple[Any, Any, Any]:
        """(centre, scale, 1/scale) as mx [1, kv_heads, 1, k_dim], made on first use by the thread that owns mlx."""
        if self._device is None:
            with np.errstate(all="ignore"):
                inverse = np.float32(1) / self.scale
            self._device = (
                mx.array(self.centre[None, :, None]),
                mx.array(self.scale[None, :, None]),
                mx.array(inverse[None, :, None]),
            )
        return self._device

    def condition_keys(self, keys: mx.array) -> mx.array:
        """K' = H((K - c) / s): mx [B, kv_heads, tokens, k_dim] to float32 of the same shape, lazy."""
        centre, _, inverse = self._constants()
        return hadamard((keys.astype(mx.float32) - centre) * inverse)

    def restore_keys(self, keys: mx.array) -> mx.array:
        """K = H(K') * s + c (H is its own inverse); same shapes, lazy."""
        centre, scale, _ = self._constants()
        restored: mx.array = hadamard(keys) * scale + centre
        return restored

    def condition_queries(self, queries: mx.array) -> mx.array:
        """Q' = H(Q * s): mx [B, heads, tokens, k_dim] to float32 of the same shape, lazy.

        Heads are grouped by KV head, as in grouped-query attention: head h uses KV head h // (heads / kv_heads).
        """
        _, scale, _ = self._constants()
        grouped = self._grouped(queries.astype(mx.float32))
        return hadamard((grouped * scale[:, :, None]).reshape(queries.shape))

    def centre_term(self, queries: mx.array) -> mx.array:
        """Q.c, which conditioned scores lack: mx [B, heads, tokens, k_dim] to float32 [B, heads, tokens], lazy."""
        centre, _, _ = self._constants()
        grouped = self._grouped(queries.astype(mx.float32))
        term: mx.array = (grouped * centre[:, :, None]).sum(axis=-1)
        return term.reshape(queries.shape[:-1])

    def _grouped(self, queries: mx.array) -> mx.array:
        """[B, heads, tokens, k_dim] to [B, kv_heads, heads per KV head, tokens, k_dim]."""
        batch, heads, tokens, dim = queries.shape
        kv_heads = self.centre.shape[0]
        return queries.reshape(batch, kv_heads, heads // kv_heads, tokens, dim)


def hadamard(x: mx.array) -> mx.array:
    """Orthonormal Hadamard rotation of the last axis, in blocks of the largest power of two that divides it; lazy."""
    dim = x.shape[-1]
    block = dim & -dim
    if block == dim:
        return mx.hadamard_transform(x, scale=dim**-0.5)
    blocks = x.reshape(*x.shape[:-1], dim // block, block)
    return mx.hadamard_transform(blocks, scale=block**-0.5).reshape(x.shape)


def conditioning_path(folder: Path, digest: str) -> Path:
    """Where the constants named `digest` live: `<folder>/<digest>.safetensors`."""
    return folder / f"{digest}.safetensors"


def write_private_file(path: Path, data: bytes) -> None:
    """Put a whole file (0600, its folder 0700) in place of an older one.

    For folders that need not survive a loss of power: macOS may still hold the data in the drive's cache.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def save_conditioning(constants: Conditioning, folder: Path, write: WriteFile = write_private_file) -> Path:
    """Write the constants unless a good file of them is there; a damaged one is replaced.

    Args:
        constants: what to keep.
        folder: `<data>/conditioning`.
        write: puts a whole file under a path. Pages depend on these constants, so a data folder needs one whose files
            survive a loss of power (`kvd.store.write_small_file` on the folder's disk).

    Returns:
        The file's path.

    Raises:
        OSError: the disk refused.
    """
    path = conditioning_path(folder, constants.digest)
    with contextlib.suppress(ConditioningDamaged):
        load_conditioning(path)
        return path
    # No metadata: a damaged byte there would go unnoticed, since the digest covers the tensors only.
    payload = safetensors.numpy.save(
        {"centre": np.ascontiguousarray(constants.centre), "scale": np.ascontiguousarray(constants.scale)}
    )
    write(path, payload)
    return path


def load_conditioning(path: Path, digest: str | None = None) -> Conditioning:
    """Read constants and verify them.

    Args:
        path: a file of `save_conditioning`.
        digest: the digest the caller needs; None takes the one in the file's name.

    Raises:
        ConditioningDamaged: no such file, unreadable, or its constants have another digest.
    """
    expected = digest if digest is not None else path.stem
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise ConditioningDamaged(
            f"cannot read conditioning constants {path.name}: not a regular file", digest=expected
        )
    try:
        tensors = safetensors.numpy.load(path.read_bytes())
        constants = Conditioning(tensors["centre"], tensors["scale"])
    except (OSError, KeyError, ValueError, InvalidParams, safetensors.SafetensorError) as error:
        raise ConditioningDamaged(
            f"cannot read conditioning constants {path.name}: {error}", digest=expected
        ) from error
    if constants.digest != expected:
        raise ConditioningDamaged(
            f"conditioning constants {path.name} have digest {constants.digest}, not {expected}", digest=expected
        )
    return constants
