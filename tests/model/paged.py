"""Small models in memory and sequences over real frames, for cache and dispatch tests."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

from kvd.attention import AttentionBackend, MlxBackend
from kvd.ids import Fingerprint, FrameId
from kvd.model.cache import SequenceCache
from kvd.model.spec import LayerSpec, ModelCacheSpec
from kvd.quant.calibration import layer_operators, page_formats
from kvd.quant.conditioning import Conditioning
from kvd.store.frame_pool import FramePool

VOCAB, HEADS, KV_HEADS, DIM = 128, 4, 2, 64


def small_llama(layers: int = 2, *, window: int | None = None, seed: int = 0) -> Any:
    """A llama with random weights; with a window its layers but the last are sliding, as in hybrid models."""
    mx.random.seed(seed)
    kinds = None if window is None else ["sliding_attention"] * (layers - 1) + ["full_attention"]
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=HEADS * DIM,
        num_hidden_layers=layers,
        intermediate_size=128,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        layer_types=kinds,
        sliding_window=window,
    )
    model = llama.Model(arguments)
    # nn.Linear's initial weights are small; larger ones make attention peaked and logits sensitive.
    for layer in model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            part = getattr(layer.self_attn, name)
            part.weight = part.weight * 2
    mx.eval(model.parameters())
    return model


def small_spec(layers: int = 2, *, window: int | None = None) -> ModelCacheSpec:
    """Geometry of `small_llama`."""
    full, sliding = LayerSpec("full", KV_HEADS, DIM, DIM), LayerSpec("sliding", KV_HEADS, DIM, DIM, window)
    return ModelCacheSpec(
        model_name="small",
        fingerprint=Fingerprint("0" * 32),
        layers=(full,) * layers if window is None else (sliding,) * (layers - 1) + (full,),
        query_heads=HEADS,
        context_tokens=4096,
        vocab_tokens=VOCAB,
        scratch_bytes=0,
    )


def random_constants(spec: ModelCacheSpec) -> tuple[Conditioning, ...]:
    """Conditioning constants of each group."""
    rng = np.random.default_rng(3)
    made = []
    for group in spec.groups:
        shape = (len(group.layer_indices), group.layer.kv_heads, group.layer.k_dim)
        scale = np.exp(rng.standard_normal(shape, dtype=np.float32) / 4)
        made.append(Conditioning(rng.standard_normal(shape, dtype=np.float32), scale))
    return tuple(made)


def sequence_over(
    pool: FramePool,
    spec: ModelCacheSpec,
    pages: int = 4,
    *,
    name: str = "q8",
    backend: AttentionBackend | None = None,
    first_frame: int = 0,
) -> SequenceCache:
    """A sequence whose groups have `pages` new frames each, numbered backwards."""
    constants = random_constants(spec)
    formats = page_formats(spec, name, constants)
    layouts = [group.layout(page_format) for group, page_format in zip(spec.groups, formats, strict=True)]
    sequence = SequenceCache(
        pool=pool,
        spec=spec,
        layouts=layouts,
        backend=backend or MlxBackend(),
        conditioning=layer_operators(spec, constants),
    )
    for group, layout in enumerate(layouts):
        table = frames_of(group, pages, first_frame)
        for frame in table:
            pool.create(frame, layout)
        sequence.set_block_table(group, table)
    return sequence


def frames_of(group: int, pages: int, first_frame: int = 0) -> list[FrameId]:
    """Frame numbers that `sequence_over` uses."""
    return [FrameId(first_frame + 1000 * group + pages - page) for page in range(pages)]


def ids_of(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def step(model: Any, sequence: SequenceCache, ids: list[int]) -> np.ndarray:
    """One step; logits [n, vocab]."""
    sequence.begin_step(len(ids))
    logits = model(mx.array([ids]), cache=sequence.layer_caches)
    sequence.end_step()
    return np.array(logits[0])


def replay(model: Any, sequence: SequenceCache, last_id: int) -> np.ndarray:
    """Logits [vocab] of the last token again."""
    sequence.begin_replay()
    logits = model(mx.array([[last_id]]), cache=sequence.layer_caches)
    sequence.end_step()
    return np.array(logits[0, 0])


def plain_logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits [n, vocab] of the model without any cache."""
    return np.array(model(mx.array([ids]))[0])


def relative_error(mine: np.ndarray, right: np.ndarray) -> float:
    """Root mean square difference, in standard deviations of `right`."""
    return float(np.sqrt(np.square(mine - right).mean()) / right.std())


def all_bytes(pool: FramePool, spec: ModelCacheSpec, pages: int = 4) -> list[bytes]:
    """Content of every frame of `sequence_over`."""
    return [pool.export(frame) for group in range(len(spec.groups)) for frame in frames_of(group, pages)]
