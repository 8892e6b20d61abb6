"""A fake model whose pages are known in advance, and what it must store and say.

Two layers of different geometry, so two cache groups. K and V of a token depend on its id and position alone,
elementwise, so the bytes of every page of every branch are known to the last bit, whatever the step partition. Logits
come from attention over all cached pages: one wrong byte anywhere changes them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from kvd.attention.reference import ReferenceBackend
from kvd.ids import Fingerprint, FrameId
from kvd.model.cache import SequenceCache
from kvd.model.forward import Forward
from kvd.model.spec import LayerSpec, ModelCacheSpec
from kvd.quant.codec import encode
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.core import FormatBook
from kvd.store.frame_pool import FramePool

DIM = 32
LAYERS = (LayerSpec("full", 1, DIM, DIM), LayerSpec("full", 2, DIM, DIM))
CONTEXT_TOKENS = 2048


@dataclass(frozen=True)
class Weights:
    """Random tables of a fake model, float32; shared by all models of one vocabulary and seed, never written."""

    queries: np.ndarray
    tables: tuple[tuple[np.ndarray, np.ndarray], ...]
    places: np.ndarray
    head: np.ndarray


@functools.cache
def make_weights(vocab: int, seed: int) -> Weights:
    """Draw the tables."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    tables = tuple((normal(vocab, layer.kv_heads, DIM), normal(vocab, layer.kv_heads, DIM)) for layer in LAYERS)
    head = normal(vocab, DIM)
    head[:3] = 0.0  # control tokens are never the greedy choice
    return Weights(normal(vocab, DIM), tables, normal(2, CONTEXT_TOKENS, 1, DIM), head)


class FakeModel:
    """Deterministic stand-in for an mlx-lm model: `model(ids, cache)`, `args`, `lm_head`.

    Args:
        vocab: rows of the vocabulary.
        seed: of its weights.
    """

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.args = SimpleNamespace(tie_word_embeddings=False)
        self.fail_at: int | None = None
        self.fail_on: int | None = None
        self.batches: list[int] = []
        self.steps = 0
        self.tokens_seen = 0
        self._weights = make_weights(vocab, seed)

    def kv(self, layer: int, ids: Sequence[int], start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [kv_heads, n, DIM] of `ids` at positions from `start` on."""
        index = np.asarray(ids, dtype=np.int64)
        k, v = (
            (table[index] + self._weights.places[side, start : start + len(index)]).swapaxes(0, 1)
            for side, table in enumerate(self._weights.tables[layer])
        )
        return np.ascontiguousarray(k), np.ascontiguousarray(v)

    def model(self, ids: mx.array, cache: Any) -> mx.array:
        """Hidden states [rows, 1, DIM] of the last tokens (nobody asks for others, and no K or V depends on them)."""
        self.steps += 1
        rows = np.array(ids)
        self.batches.append(len(rows))
        starts = np.broadcast_to(np.array(cache[0].offset), len(rows)).tolist()
        hidden = mx.array(self._weights.queries[rows[:, -1:]])
        for layer, each in enumerate(cache):
            pairs = [self.kv(layer, row, start) for row, start in zip(rows, starts, strict=True)]
            each.update_and_fetch(mx.array(np.stack([k for k, _ in pairs])), mx.array(np.stack([v for _, v in pairs])))
            if self.steps == self.fail_at or self.fail_on in rows:
                raise RuntimeError("the model broke in the middle of a step")
            queries = mx.broadcast_to(hidden[:, None], (len(rows), LAYERS[layer].kv_heads, 1, DIM))
            out = each.attend(queries, scale=DIM**-0.5, mask=each.make_mask(1))
            hidden = hidden + mx.sum(out, axis=1)
        self.tokens_seen += rows.size
        return hidden

    def lm_head(self, hidden: mx.array) -> mx.array:
        """Logits [1, 1, vocab]."""
        return hidden @ mx.array(self._weights.head).T


def make_spec(vocab: int, seed: int = 0, *, window: int | None = None) -> ModelCacheSpec:
    """Cache geometry of the fake model; its second layer may slide."""
    full, second = LAYERS
    return ModelCacheSpec(
        model_name="fake",
        fingerprint=Fingerprint(hashlib.blake2b(b"fake %d" % seed, digest_size=16).hexdigest()),
        layers=(full, second if window is None else replace(second, kind="sliding", window=window)),
        query_heads=2,
        context_tokens=CONTEXT_TOKENS,
        vocab_tokens=vocab,
        scratch_bytes=1,
    )


def make_formats(spec: ModelCacheSpec, name: str = "q4") -> FormatBook:
    """One named format for both groups."""
    formats = [group.format(name) for group in spec.groups]
    layouts = {
        (number, str(page_format.format_id)): group.layout(page_format)
        for number, (group, page_format) in enumerate(zip(spec.groups, formats, strict=True))
    }
    return FormatBook(tuple(page_format.format_id for page_format in formats), layouts, {})


class Truth:
    """What the fake model must store and say, computed without any of the code under test but codec and attention."""

    def __init__(self, model: FakeModel, spec: ModelCacheSpec, formats: FormatBook) -> None:
        self._model = model
        self._spec = spec
        self._layouts = [formats.layouts[number, name] for number, name in enumerate(formats.default_ids)]

    def page_bytes(self, group: int, ids: Sequence[int], page: int) -> bytes:
        """Tokens of page `page` of a group as a frame holds them: `pool.extract(frame, 0, n)`."""
        layout = self._layouts[group]
        start = page * PAGE_TOKENS
        piece = ids[start : start + PAGE_TOKENS]
        parts: list[bytes] = []
        for at, layer in enumerate(layout.layer_indices):
            layer_format = layout.page_format.layers[at]
            k, v = self._model.kv(layer, piece, start)
            for values, side in ((k, layer_format.k), (v, layer_format.v)):
                encoded = encode(values, side)
                parts += [encoded.codes.tobytes(), encoded.scales.tobytes(), encoded.biases.tobytes()]
        return b"".join(parts)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after `ids`, from pages made here."""
        pool = FramePool(1 << 30)
        cache = SequenceCache(
            pool=pool, spec=self._spec, layouts=self._layouts, backend=ReferenceBackend(), tokens=len(ids)
        )
        number = 0
        for group, layout in enumerate(self._layouts):
            table: list[FrameId] = []
            for page in range(-(-len(ids) // PAGE_TOKENS)):
                number += 1
                pool.create(FrameId(number), layout)
                tokens = min(PAGE_TOKENS, len(ids) - page * PAGE_TOKENS)
                pool.insert(FrameId(number), 0, tokens, self.page_bytes(group, ids, page))
                table.append(FrameId(number))
            cache.set_block_table(group, table)
        return Forward(self._model).replay(cache, ids[-1])

    def is_greedy(self, ids: Sequence[int], prompt_tokens: int) -> bool:
        """Whether each token from `prompt_tokens` on is the most likely one after those before it."""
        return all(int(np.argmax(self.logits(ids[:n]))) == ids[n] for n in range(prompt_tokens, len(ids)))
