"""A whole model on a GPU: prefill and decode over packed pages against mlx-lm with a bf16 cache, in one run.

The shape is Llama 3.1 8B's with random 4-bit weights: times do not depend on their values. Both sides run the same
ids in chunks of the same length, then decode from what they have computed. May import mlx, mlx_lm, numpy,
kvd.attention, kvd.model, kvd.quant.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from kvd.errors import InvalidParams
from kvd.ids import Fingerprint, FrameId
from kvd.quant.spec import PAGE_TOKENS

SHAPE: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
"""`config.json` of Llama 3.1 8B, without its RoPE scaling (positions cost the same)."""

CHUNKS: Final = (512, 2048)
_DECODE_STEPS: Final = 32


@dataclass(frozen=True, slots=True)
class ModelSpeed:
    """One side.

    Attributes:
        prefill_tokens_s: over the whole context, by tokens of a chunk.
        decode_ms: median step at the end of the context.
    """

    prefill_tokens_s: dict[int, float]
    decode_ms: float


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Both sides, and their ratios (above 1: kvd is faster)."""

    tokens: int
    kvd: ModelSpeed
    mlx_lm: ModelSpeed
    prefill_ratio: dict[int, float]
    decode_ratio: float

    def facts(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return asdict(self)


def run_gpu_model(tokens: int, tell: Callable[[str], None]) -> ModelReport:
    """Measure both sides at a context of `tokens`.

    Raises:
        InvalidParams: this machine has no GPU that kvd has kernels for.
    """
    import mlx.core as mx

    if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
        raise InvalidParams("--device gpu needs an NVIDIA GPU and mlx's CUDA backend", parameter="device")
    mx.random.seed(7)
    tell("a model of random weights")
    model = _model()
    ids = [int(each) for each in np.random.default_rng(7).integers(0, SHAPE["vocab_size"], tokens + _DECODE_STEPS)]
    tell("mlx-lm")
    theirs = _mlx_lm(model, ids, tokens)
    tell("kvd")
    ours = _kvd(model, ids, tokens)
    return ModelReport(
        tokens=tokens,
        kvd=ours,
        mlx_lm=theirs,
        prefill_ratio={n: round(ours.prefill_tokens_s[n] / theirs.prefill_tokens_s[n], 3) for n in CHUNKS},
        decode_ratio=round(theirs.decode_ms / ours.decode_ms, 3),
    )


def _model() -> Any:  # noqa: ANN401  mlx-lm's
    import mlx.core as mx
    from mlx import nn
    from mlx_lm.models.llama import Model, ModelArgs

    model = Model(ModelArgs.from_dict(SHAPE))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


def _timed(step: Callable[[list[int]], None], restart: Callable[[], None], ids: list[int], tokens: int) -> ModelSpeed:
    """Prefill in chunks of each length, then decode. `step` has computed its ids when it returns."""
    rates = {}
    for chunk in CHUNKS:
        restart()
        step(ids[:chunk])  # compiles
        restart()
        began = time.perf_counter()
        for start in range(0, tokens, chunk):
            step(ids[start : start + chunk])
        rates[chunk] = round(tokens / (time.perf_counter() - began), 1)
    times = []
    for at in range(_DECODE_STEPS):
        began = time.perf_counter()
        step(ids[tokens + at : tokens + at + 1])
        times.append(time.perf_counter() - began)
    return ModelSpeed(rates, round(1e3 * statistics.median(times[4:]), 3))


def _mlx_lm(model: Any, ids: list[int], tokens: int) -> ModelSpeed:  # noqa: ANN401
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    held: list[Any] = []

    def restart() -> None:
        held[:] = [make_prompt_cache(model)]

    def step(part: list[int]) -> None:
        (cache,) = held
        if len(part) == 1:
            mx.eval(model(mx.array([part]), cache=cache)[:, -1])
        else:
            model(mx.array([part]), cache=cache)
            mx.eval([each.state for each in cache])

    speed = _timed(step, restart, ids, tokens)
    held.clear()
    mx.clear_cache()
    return speed


def _kvd(model: Any, ids: list[int], tokens: int) -> ModelSpeed:  # noqa: ANN401
    from kvd.attention.select import pool_for, select_backend
    from kvd.model.cache import SequenceCache
    from kvd.model.cache_spec import build_cache_spec
    from kvd.model.dispatch import dispatching
    from kvd.model.forward import Forward
    from kvd.model.probes import probes_for
    from kvd.quant.calibration import page_formats

    spec = build_cache_spec(SHAPE, model_name="bench", fingerprint=Fingerprint("0" * 32), item_bytes=2)
    formats = page_formats(spec, "q4", None)
    (layout,) = [group.layout(each) for group, each in zip(spec.groups, formats, strict=True)]
    backend = select_backend("auto", probes_for(spec, zip(spec.groups, formats, strict=True), dtype="bfloat16")).backend
    pages = -(-(tokens + _DECODE_STEPS) // PAGE_TOKENS)
    pool = pool_for(backend, pages * layout.payload_bytes, layout.payload_bytes)
    table = [FrameId(pages - page) for page in range(pages)]
    for frame in table:
        pool.create(frame, layout)
    sequence = SequenceCache(pool=pool, spec=spec, layouts=[layout], backend=backend)
    forward = Forward(model)

    def step(part: list[int]) -> None:
        sequence.set_block_table(0, table)
        forward.step(sequence, part, wants_logits=len(part) == 1)

    with dispatching(model):
        return _timed(step, lambda: sequence.truncate(0), ids, tokens)


__all__ = ["ModelReport", "ModelSpeed", "run_gpu_model"]
