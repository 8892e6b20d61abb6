"""A transformer block that runs outside mlx: compiled kernels and BLAS, on numpy arrays.

Theory of operation. Between two attention layers mlx would build a small graph and be asked to evaluate it, about seven
times a layer; each time its thread is woken, which costs more than a small step's arithmetic, and its elementwise
functions are scalar on a CPU. Here the residual stream comes in as an array that exists and goes out as one: nothing is
lazy, nothing is woken. Rows of a batch lie below each other as if they were tokens of one sequence: only the positions
of the rotary embedding and attention itself, both asked of the cache, know where one ends. What a block computes is
read off the module that mlx-lm loaded (weights, norms, rotary bases); which kind of block it is, off a table.
`kvd.model.cpu_assist` compares both before it uses this one.

May import mlx, numpy, kvd.model.block_kernels and kvd.native.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from kvd.model.block_kernels import Gate, gate_kernel, norm_kernel, rope_kernel
from kvd.native import products
from kvd.native.blas import blas

Floats = npt.NDArray[np.float32]

_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112


class HostCache(Protocol):
    """The part of a layer's cache that a host block needs (`kvd.model.layer_cache.KvLayerCache`)."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of each row's next token."""

    def step_host(self, queries: Floats, keys: Floats, values: Floats, scale: float) -> Floats:
        """Take in new keys and values and attend to everything.

        Args:
            queries: float32 [rows * n, heads, k_dim], after RoPE; the n tokens of a row follow each other.
            keys: float32 [rows * n, kv_heads, k_dim], after RoPE.
            values: float32 [rows * n, kv_heads, v_dim].
            scale: factor of the scores.

        Returns:
            float32 [rows * n, heads, v_dim].
        """


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What mlx-lm's module of a family computes.

    Attributes:
        gate: of the MLP.
        norm_offset: added to the norms' weights (Gemma stores them shifted by one).
        before_mlp: name of the norm in front of the MLP.
        after_attention: name of the norm behind attention, before the residual is added; None for none.
        after_mlp: the same behind the MLP.
    """

    gate: Gate
    norm_offset: float = 0.0
    before_mlp: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None


KINDS: Final[dict[str, BlockKind]] = {
    "mlx_lm.models.llama": BlockKind("silu"),
    "mlx_lm.models.qwen2": BlockKind("silu"),
    "mlx_lm.models.qwen3": BlockKind("silu"),
    "mlx_lm.models.gemma3_text": BlockKind(
        "gelu", 1.0, "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
    ),
}
"""Modules whose `TransformerBlock`, `Attention` and `MLP` are understood."""


class NotUnderstood(Exception):
    """A block is not one that `HostBlock` can run; mlx runs it."""


class Linear:
    """A plain linear layer.

    Args:
        layer: mlx's; its weight is used where it is.

    Raises:
        NotUnderstood: it is quantised, adapted or not float32.
    """

    def __init__(self, layer: Any) -> None:  # noqa: ANN401  the mlx door
        if type(layer) is not nn.Linear:
            raise NotUnderstood(f"{type(layer).__name__} is no plain linear layer")
        self._weight = matrix(layer.weight)
        self._bias: Floats | None = np.array(layer.bias, copy=False) if "bias" in layer else None
        self.width = len(self._weight)

    def __call__(self, x: Floats, name: str) -> Floats:
        """float32 [n, in] to [n, out], in scratch of that name."""
        out = times(x, self._weight, name)
        if self._bias is not None:
            out += self._bias
        return out


class Norm:
    """A root-mean-square norm.

    Args:
        layer: mlx's.
        offset: added to its weight.

    Raises:
        NotUnderstood: it is something else.
    """

    def __init__(self, layer: Any, offset: float) -> None:  # noqa: ANN401
        if type(layer).__name__ != "RMSNorm" or layer.weight.dtype != mx.float32:
            raise NotUnderstood(f"{type(layer).__name__} is no float32 RMS norm")
        self._weight: Floats = np.array(layer.weight) + np.float32(offset)
        self._epsilon = float(layer.eps)
        self._kernel = norm_kernel(len(self._weight))

    def __call__(self, x: Floats, out: Floats) -> Floats:
        """Rows of the norm's width, in any arrangement; `out` has the size of `x` and may be it."""
        rows = x.size // len(self._weight)
        self._kernel(x.ctypes.data, self._weight.ctypes.data, out.ctypes.data, rows, self._epsilon)
        return out


class Rope:
    """A rotary embedding of whole heads.

    Args:
        layer: mlx's `nn.RoPE`, or one of mlx-lm's with explicit frequencies.
        dim: width of a head.

    Raises:
        NotUnderstood: interleaved, partial, or of another kind.
    """

    def __init__(self, layer: Any, dim: int) -> None:  # noqa: ANN401
        if getattr(layer, "dims", None) != dim or getattr(layer, "traditional", True):
            raise NotUnderstood(f"{type(layer).__name__} does not turn whole heads in halves")
        if type(layer) is nn.RoPE:
            turns = float(layer.base) ** (-np.arange(0, dim, 2) / dim) * float(layer.scale)
        elif type(layer).__name__ == "Llama3RoPE":
            turns = 1 / np.array(layer._freqs, np.float64)
        else:
            raise NotUnderstood(f"{type(layer).__name__} is another kind of rotary embedding")
        self._turns = turns.astype(np.float64)
        self._kernel = rope_kernel(dim)
        self._at: tuple[tuple[int, ...], int] = ((), 0)
        self._tables: tuple[Floats, Floats] = (np.empty((0, 0), np.float32), np.empty((0, 0), np.float32))

    def __call__(self, x: Floats, starts: tuple[int, ...]) -> None:
        """Turn float32 [rows * n, heads, dim] in place; the n tokens of a row follow each other from its start on."""
        tokens, heads, _ = x.shape
        if self._at != (starts, tokens):  # every layer of a step asks for the same
            positions = np.array(starts)[:, None] + np.arange(tokens // len(starts))
            angles = positions.reshape(-1, 1) * self._turns
            self._tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            self._at = (starts, tokens)
        cos, sin = self._tables
        self._kernel(x.ctypes.data, cos.ctypes.data, sin.ctypes.data, tokens, heads)


class HostBlock(nn.Module):  # type: ignore[misc]  # mlx has no types
    """A transformer block of a family of `KINDS`; with a cache that is not kvd's it is the original.

    Args:
        original: mlx-lm's block; it keeps the weights alive.

    Raises:
        NotUnderstood: the block is of another kind.
        KernelUnavailable: this machine cannot run the kernels.
    """

    def __init__(self, original: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.original = original
        kind = KINDS.get(type(original).__module__)
        if kind is None or type(original).__name__ != "TransformerBlock" or type(original.mlp).__name__ != "MLP":
            raise NotUnderstood(f"{type(original).__module__} is not in the table")
        attention, mlp = original.self_attn, original.mlp
        self._heads, self._kv_heads = int(attention.n_heads), int(attention.n_kv_heads)
        self._scale = float(attention.scale)
        self._parts = {
            name: Linear(getattr(owner, name))
            for owner, names in (
                (attention, ("q_proj", "k_proj", "v_proj", "o_proj")),
                (mlp, ("gate_proj", "up_proj", "down_proj")),
            )
            for name in names
        }
        dim = self._parts["q_proj"].width // self._heads
        self._rope = Rope(attention.rope, dim)
        names = {"before_attention": "input_layernorm", "before_mlp": kind.before_mlp}
        names |= {"after_attention": kind.after_attention or "", "after_mlp": kind.after_mlp or ""}
        self._norms = {key: Norm(getattr(original, name), kind.norm_offset) for key, name in names.items() if name}
        self._norms |= {
            name: Norm(getattr(attention, name), kind.norm_offset)
            for name in ("q_norm", "k_norm")
            if hasattr(attention, name)
        }
        self._gate = gate_kernel(kind.gate)

    def __getattr__(self, key: str) -> Any:  # noqa: ANN401
        """What models ask of their blocks (`use_sliding`, `self_attn`) is the original's."""
        if key in self or "original" not in self:
            return super().__getattr__(key)
        return getattr(self["original"], key)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self._parts["o_proj"].width

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:  # noqa: ANN401
        """mx [rows, n, hidden] to the same; evaluated when the cache is kvd's, whose masks are its own business."""
        if not hasattr(cache, "step_host") or x.shape[0] != len(cache.starts) or x.dtype != mx.float32:
            out: mx.array = self.original(x, mask, cache)
            return out
        mx.eval(x)
        below: Floats = np.array(x, copy=False).reshape(-1, self.hidden)
        return mx.array(self.run(below, cache).reshape(x.shape))

    def run(self, x: Floats, cache: HostCache) -> Floats:
        """A step: float32 [rows * n, hidden] to the same, in scratch that the next step overwrites."""
        norms, parts, n = self._norms, self._parts, len(x)
        h = norms["before_attention"](x, scratch("normed", n, self.hidden))
        q, k, v = (parts[f"{name}_proj"](h, name) for name in "qkv")
        q, k, v = (each.reshape(n, heads, -1) for each, heads in zip((q, k, v), self._head_counts, strict=True))
        for name, each in (("q_norm", q), ("k_norm", k)):
            if name in norms:
                norms[name](each, each)
        starts = cache.starts
        self._rope(q, starts)
        self._rope(k, starts)
        attended = cache.step_host(q, k, v, self._scale).reshape(n, -1)
        residual = parts["o_proj"](attended, "projected")
        if "after_attention" in norms:
            norms["after_attention"](residual, residual)
        residual = np.add(residual, x, out=scratch("residual", n, self.hidden))
        h = norms["before_mlp"](residual, h)
        gate, up = parts["gate_proj"](h, "gate"), parts["up_proj"](h, "up")
        self._gate(gate.ctypes.data, up.ctypes.data, gate.size)
        out = parts["down_proj"](gate, "projected")
        if "after_mlp" in norms:
            norms["after_mlp"](out, out)
        out += residual
        return out

    @property
    def _head_counts(self) -> tuple[int, int, int]:
        return self._heads, self._kv_heads, self._kv_heads


def matrix(weight: Any) -> Floats:  # noqa: ANN401
    """An evaluated weight, float32 [out, in], as a view.

    Raises:
        NotUnderstood: it is not float32 or lies otherwise in memory.
    """
    if weight.dtype != mx.float32:
        raise NotUnderstood(f"weights are {weight.dtype}, not float32")
    view: Floats = np.array(weight, copy=False)
    if not view.flags.c_contiguous:
        raise NotUnderstood("weights do not lie row by row in memory")
    return view


def times(x: Floats, weight: Floats, name: str | None = None) -> Floats:
    """x weight^T: float32 [n, in] and [out, in] to [n, out], C-contiguous, fresh or, with a name, in scratch of it."""
    rows, inner = x.shape
    columns = len(weight)
    if products.fits(rows, inner):
        return products.times(x, weight)
    out = np.empty((rows, columns), np.float32) if name is None else scratch(name, rows, columns)
    a, b, c = x.ctypes.data, weight.ctypes.data, out.ctypes.data
    _sgemm()(_ROW_MAJOR, _PLAIN, _TRANSPOSED, rows, columns, inner, 1.0, a, inner, b, inner, 0.0, c, columns)
    return out


_held: dict[str, Floats] = {}


def scratch(name: str, rows: int, width: int) -> Floats:
    """An array [rows, width] with any content, kept from call to call; the engine thread runs one block at a time.

    Fresh arrays of a megabyte would come from new mappings, and touching those takes as long as filling them.
    """
    held = _held.get(name)
    if held is None or held.size < rows * width:
        held = _held[name] = np.empty(rows * width, np.float32)
    return held[: rows * width].reshape(rows, width)


@functools.cache
def _sgemm() -> Callable[..., None]:
    """`cblas_sgemm`."""
    whole, number, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    arguments: tuple[Any, ...] = (*[whole] * 6, number, address, whole, address, whole, number, address, whole)
    return ctypes.CFUNCTYPE(None, *arguments)(blas().sgemm)


__all__ = ["KINDS", "BlockKind", "HostBlock", "HostCache", "NotUnderstood", "matrix", "scratch", "times"]
