"""What a step costs on a Linux CPU outside attention, made cheaper: transformer blocks and the output projection.

Blocks of the families in `kvd.model.host_block.KINDS` are wrapped; with kvd's caches they run outside mlx. The output
projection of each row's last token is a product of few rows. The arithmetic is float32 as before, rounded in other
places. Assistance therefore belongs to the attention backend `cpu`, which the data folder records: with
`--attention mlx` a model runs as mlx-lm wrote it. Blocks are compared with the originals first, and left alone if they
disagree; nothing here is used on GPUs.

May import mlx, numpy, kvd.native and, inside functions, kvd.model.host_block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from kvd.native import KernelUnavailable

if TYPE_CHECKING:
    from kvd.model.host_block import HostBlock

Floats = npt.NDArray[np.float32]

AGREEMENT: Final = 1e-4
"""Greatest difference from the original block's output, relative to its largest value."""

_CHECKED_STEPS: Final = (5, 1, 3)
"""Tokens of the steps that a block is compared over."""


def install(model: Any) -> tuple[str, ...]:  # noqa: ANN401  the mlx-lm door
    """Wrap what can be made cheaper in a loaded model. Installing again changes nothing.

    Args:
        model: an mlx-lm model with `model.layers`, evaluated, in float32.

    Returns:
        What is assisted now, for reports: `blocks`, `output`; empty where nothing can be.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return ()
    try:
        from kvd.model.host_block import HostBlock, NotUnderstood
    except ImportError:  # llvmlite is not installed
        return ()
    layers = model.model.layers
    done: list[str] = []
    try:
        blocks = [layer if isinstance(layer, HostBlock) else HostBlock(layer) for layer in layers]
        if all(_agrees(block) for block in _one_of_each(blocks)):
            layers[:] = blocks
            done.append("blocks")
        if _output_weight(model) is not None:
            done.append("output")
    except (NotUnderstood, KernelUnavailable):
        return tuple(done)
    return tuple(done)


def project_last(model: Any, hidden: mx.array) -> Floats | None:  # noqa: ANN401
    """Logits of one token of each row, by one product.

    Args:
        model: an mlx-lm model.
        hidden: mx float32 [rows, 1, hidden].

    Returns:
        float32 [rows, vocab], owned by the caller; None where the output projection is no plain float32 matrix, or
        nothing is assisted here.
    """
    weight = _output_weight(model)
    if weight is None or hidden.dtype != mx.float32:
        return None
    try:
        from kvd.model.host_block import times
    except ImportError:
        return None
    mx.eval(hidden)
    x: Floats = np.ascontiguousarray(np.array(hidden, copy=False)[:, 0])
    try:
        logits: Floats = times(x, weight)
    except KernelUnavailable:
        return None
    return logits


def _output_weight(model: Any) -> Floats | None:  # noqa: ANN401
    """The output projection's matrix, float32 [vocab, hidden], as a view; None if it is something else."""
    if not isinstance(model, nn.Module):
        return None
    layer: Any = model.lm_head if hasattr(model, "lm_head") else getattr(model.model, "embed_tokens", None)
    if type(layer) not in (nn.Linear, nn.Embedding) or "bias" in layer or layer.weight.dtype != mx.float32:
        return None
    weight: Floats = np.array(layer.weight, copy=False)
    return weight if weight.flags.c_contiguous else None


def _one_of_each(blocks: list[HostBlock]) -> list[HostBlock]:
    """The first block, and the first that differs from it in its rotary base (sliding and full layers of Gemma)."""
    bases = {getattr(block.original.self_attn.rope, "base", None): block for block in reversed(blocks)}
    return list(bases.values())


def _agrees(block: HostBlock) -> bool:
    """Whether a block and its original give the same over several steps, each with an unquantised cache of its own."""
    from mlx_lm.models.cache import KVCache

    theirs, ours = KVCache(), _PlainHostCache()
    for seed, tokens in enumerate(_CHECKED_STEPS):
        x = np.random.default_rng(seed).standard_normal((tokens, block.hidden), dtype=np.float32)
        mask = "causal" if tokens > 1 else None
        right = np.array(block.original(mx.array(x[None]), mask, theirs))[0]
        mine = block.run(x, ours)
        if not np.abs(mine - right).max() <= AGREEMENT * np.abs(right).max():  # also catches NaN
            return False
    return True


class _PlainHostCache:
    """An unquantised cache with plain attention, to compare blocks with."""

    def __init__(self) -> None:
        self._keys: list[Floats] = []
        self._values: list[Floats] = []

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of the next token."""
        return (sum(map(len, self._keys)),)

    def step_host(self, queries: Floats, keys: Floats, values: Floats, scale: float) -> Floats:
        """See `kvd.model.host_block.HostCache.step_host`."""
        start = self.starts[0]
        self._keys.append(keys.copy())
        self._values.append(values.copy())
        repeats = queries.shape[1] // keys.shape[1]
        every_key, every_value = (np.concatenate(each).repeat(repeats, 1) for each in (self._keys, self._values))
        scores = np.einsum("nhd,thd->hnt", queries * np.float32(scale), every_key)
        hidden = np.arange(len(every_key))[None] > np.arange(start, start + len(queries))[:, None]
        scores[:, hidden] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out: Floats = np.einsum("hnt,thd->nhd", weights, every_value).astype(np.float32)
        return out


__all__ = ["AGREEMENT", "install", "project_last"]
