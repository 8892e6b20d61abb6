"""Gemma 3 over pages: sliding and full layers, several windows long, against mlx-lm's own unquantised caches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvd.attention import AttentionBackend, MlxBackend, ReferenceBackend
from kvd.model.dispatch import dispatching
from kvd.model.forward import Forward
from kvd.model.loader import LoadedModel, load
from kvd.model.registry import ModelFolder
from kvd.store.frame_pool import FramePool
from tests.model.paged import relative_error, sequence_over
from tests.support.tiny_gemma import BOS, WINDOW, make_tiny_gemma

TOKENS = 4 * WINDOW + 37
PAGES = 6


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """The tiny Gemma in memory, its attention routed to kvd's caches."""
    model = load(ModelFolder("gemma", make_tiny_gemma(tmp_path_factory.mktemp("gemma") / "m")))
    with dispatching(model.model):
        yield model


@pytest.fixture(scope="module")
def ids(loaded: LoadedModel) -> list[int]:
    """A prompt of several windows."""
    return [int(i) for i in np.random.default_rng(5).integers(3, loaded.codec.token_count, TOKENS)]


def own_logits(loaded: LoadedModel, ids: list[int]) -> np.ndarray:
    """Logits [n, vocab] of each token, by mlx-lm with its own caches, in chunks as it likes them."""
    cache = make_prompt_cache(loaded.model)
    parts = [loaded.model(mx.array([ids[at : at + 200]]), cache=cache)[0] for at in range(0, len(ids), 200)]
    return np.concatenate([np.array(part) for part in parts])


def paged_logits(
    loaded: LoadedModel, ids: list[int], steps: list[int], name: str, backend: AttentionBackend | None = None
) -> np.ndarray:
    """Logits [steps, vocab] after each step, over kvd's pages."""
    layouts = [group.layout(group.format(name)) for group in loaded.spec.groups]
    pool = FramePool(budget_bytes=PAGES * sum(layout.payload_bytes for layout in layouts))
    sequence = sequence_over(pool, loaded.spec, PAGES, name=name, backend=backend)
    forward, out, at = Forward(loaded.model), [], 0
    for step in steps:
        logits = forward.step(sequence, ids[at : at + step], wants_logits=True)
        assert logits is not None
        out.append(logits)
        at += step
    return np.stack(out)


STEPS = [512, 200, 1, 1, 255, 1, 200, *[1] * (TOKENS - 1170)]


@pytest.mark.parametrize(("name", "limit"), [("q8", 0.03), ("k8v4", 0.15)])
def test_pages_follow_mlx_lms_own_caches(loaded: LoadedModel, ids: list[int], name: str, limit: float) -> None:
    """P31: prefill and decode past several windows stay within the quantisation error of an unquantised run."""
    right = own_logits(loaded, ids)[np.cumsum(STEPS) - 1]
    assert relative_error(paged_logits(loaded, ids, STEPS, name), right) < limit


def test_the_backend_agrees_with_the_reference(loaded: LoadedModel, ids: list[int]) -> None:
    """The same pages, attended to by `reference` in float32 over dequantised values, give the same logits."""
    steps = [512, 512, 100, 1, 1]
    mine = paged_logits(loaded, ids, steps, "q4", MlxBackend())
    right = paged_logits(loaded, ids, steps, "q4", ReferenceBackend())
    assert relative_error(mine, right) < 2e-3


def test_the_window_is_what_tells_the_layers_apart(loaded: LoadedModel, ids: list[int]) -> None:
    """A token older than the window changes sliding layers through the full ones only: the model's own behaviour."""
    first, second = ids[:WINDOW], ids[WINDOW : 2 * WINDOW + 40]
    changed = [*first[:-1], first[-1] ^ 1]
    a, b = (own_logits(loaded, [*start, *second])[-1] for start in (first, changed))
    mine, other = (
        paged_logits(loaded, [*start, *second], [WINDOW, WINDOW + 40], "q8")[-1] for start in (first, changed)
    )
    assert relative_error(mine - other, a - b) < 0.5
    assert not np.array_equal(mine, other)


def test_a_text_starts_with_one_bos(loaded: LoadedModel) -> None:
    """The folder asks for BOS: a new text gets it once, a text that goes on gets none, and it stands for no bytes."""
    from kvd.vm.text import Span, TypedText

    bos = loaded.codec.id_of(BOS)
    data = b"the world of pages"
    typed = TypedText(data, (Span("content", len(data)),))
    ids, lengths = loaded.codec.encode_typed(typed, at_start=True)
    later, _ = loaded.codec.encode_typed(typed, at_start=False)
    assert (ids[0], lengths[0], ids.count(bos or 0)) == (bos, 0, 1)
    assert ids[1:] == later


def test_weights_are_tied(tmp_path: Path, loaded: LoadedModel) -> None:
    """Without an output matrix in the file, logits come from the embeddings."""
    del tmp_path
    assert not hasattr(loaded.model, "lm_head")
    assert loaded.weights_bytes < 4 * 2 * loaded.spec.vocab_tokens * 128 + 4_000_000
