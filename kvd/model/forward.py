"""One step of the model over paged KV, of one sequence or of several: ids in, float32 logits of the last token out.

The only place that calls the model. Hidden states of a chunk are projected to the vocabulary for the last token
alone: for SmolLM2 the projection of 512 tokens would cost as much again as a sixth of the chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvd.errors import InternalError
from kvd.model import cpu_assist
from kvd.model.batch_cache import BatchCache
from kvd.model.cache import SequenceCache
from kvd.model.spec import ModelCacheSpec

Floats = npt.NDArray[np.float32]

BUFFER_CACHE_BYTES = 16_000_000
"""MLX keeps freed buffers for reuse; beyond this they go back, so that the budget means what it says."""


def limit_buffer_cache() -> None:
    """Bound MLX's cache of freed buffers for this process."""
    mx.set_cache_limit(BUFFER_CACHE_BYTES)


def clear_buffer_cache() -> None:
    """Give all of MLX's freed buffers back."""
    mx.clear_cache()


@dataclass(frozen=True, slots=True)
class ArrayMemory:
    """MLX's own memory, in bytes.

    Attributes:
        active_bytes: of arrays that are alive.
        cache_bytes: of freed buffers that MLX keeps for reuse.
        peak_bytes: the most that `active_bytes` has been.
    """

    active_bytes: int
    cache_bytes: int
    peak_bytes: int


def array_memory() -> ArrayMemory:
    """What MLX holds now."""
    return ArrayMemory(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())


def device_kind() -> Literal["cpu", "gpu"]:
    """What kind of device MLX runs on."""
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"


def gpu_info() -> Mapping[str, object]:
    """What mlx says of the GPU it computes on; empty on a CPU."""
    return {} if device_kind() == "cpu" else dict(mx.device_info())


def stated_scratch_bytes(spec: ModelCacheSpec) -> int:
    """What the process may take beside weights, pages and idle state: a step's scratch and MLX's freed buffers."""
    return spec.scratch_bytes + BUFFER_CACHE_BYTES


def project(model: Any, hidden: mx.array) -> mx.array:  # noqa: ANN401  the mlx door
    """Hidden states mx [1, n, hidden] to logits mx [1, n, vocab]: by the output matrix, or by tied embeddings.

    A model has an `lm_head` exactly when it does not tie; what configurations say of it differs from family to family.
    """
    out: mx.array = model.lm_head(hidden) if hasattr(model, "lm_head") else model.model.embed_tokens.as_linear(hidden)
    return out


def step(
    model: Any,  # noqa: ANN401  the mlx door
    batch: BatchCache,
    ids: Sequence[Sequence[int]],
    *,
    replays: Collection[int] = (),
    assisted: bool = False,
) -> Floats:
    """A step of several sequences: KV of each row's `ids` into its frames, and each row's last logits.

    Args:
        model: an mlx-lm model whose text part is `model.model`.
        batch: the sequences.
        ids: one row of ids per sequence, all equally many; of a row that replays, its last id.
        replays: rows that compute their last token again, from KV that exists; not one byte of it changes.
        assisted: project by matrix-vector products where that can be (`kvd.model.cpu_assist`).

    Returns:
        float32 [rows, vocab], owned by the caller: hooks and samplers may write into a row.

    Raises:
        InternalError: rows of different lengths, not one per sequence, or what `BatchCache.begin_step` refuses.
        NonFiniteValues: a row's keys or values are not finite. After any error no row's tokens count, and no step runs.
    """
    lengths = {len(row) for row in ids}
    if len(ids) != len(batch) or len(lengths) != 1:
        raise InternalError(f"{len(ids)} rows of {sorted(lengths)} ids for a batch of {len(batch)}")
    batch.begin_step(lengths.pop(), replays=replays)
    try:
        hidden = model.model(mx.array([list(row) for row in ids], dtype=mx.int32), cache=batch.layer_caches)
        logits = _last_logits(model, hidden, assisted=assisted)
    except BaseException:
        batch.abort_step()
        raise
    batch.end_step()
    return logits


def _last_logits(model: Any, hidden: mx.array, *, assisted: bool) -> Floats:  # noqa: ANN401
    """Hidden states mx [rows, n, hidden] to float32 [rows, vocab] of the last token of each, owned by the caller."""
    last = hidden[:, -1:]
    if assisted and (logits := cpu_assist.project_last(model, last)) is not None:
        return logits
    out = project(model, last).astype(mx.float32)
    mx.eval(out)
    # a copy: the array's buffer goes back to MLX, and hooks write into the logits
    return np.array(out[:, 0])


class Forward:
    """Runs a loaded mlx-lm model. Owner: the engine thread.

    Args:
        model: an mlx-lm model whose text part is `model.model` (embeddings, layers, norm).
        assisted: project by a matrix-vector product where that can be (`kvd.model.cpu_assist`).
    """

    def __init__(self, model: Any, *, assisted: bool = False) -> None:  # noqa: ANN401  the mlx door
        self._model = model
        self.assisted = assisted

    def step(self, sequence: SequenceCache, ids: Sequence[int], *, wants_logits: bool) -> Floats | None:
        """Compute KV of `ids` (written to the sequence's frames) and, if wanted, the last one's logits [vocab]."""
        sequence.begin_step(len(ids))
        logits = self._run(sequence, ids, wants_logits=wants_logits)
        sequence.end_step()
        return logits

    def replay(self, sequence: SequenceCache, last_id: int) -> Floats:
        """Logits of the last token again, from KV that exists; not one byte of it changes."""
        sequence.begin_replay()
        logits = self._run(sequence, [last_id], wants_logits=True)
        sequence.end_step()
        assert logits is not None
        return logits

    def step_batch(self, batch: BatchCache, ids: Sequence[Sequence[int]], *, replays: Collection[int] = ()) -> Floats:
        """See `step`: float32 [rows, vocab]."""
        return step(self._model, batch, ids, replays=replays, assisted=self.assisted)

    def _run(self, sequence: SequenceCache, ids: Sequence[int], *, wants_logits: bool) -> Floats | None:
        hidden = self._model.model(mx.array([list(ids)], dtype=mx.int32), cache=sequence.layer_caches)
        if not wants_logits:
            return (
                None  # each layer's KV is written or queued when the model hands it over; the rest is never evaluated
            )
        logits: Floats = _last_logits(self._model, hidden, assisted=self.assisted)[0]
        return logits
