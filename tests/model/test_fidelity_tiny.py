"""Imported Qwen 2, Qwen 3 and Gemma 3 compute what their GGUF files say: tiny random files against plain numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from kvd.model.gguf_import import import_gguf
from kvd.model.progress import SilentReporter
from tests.support.random_gguf import WINDOW, write_random_gguf
from tests.support.reference_transformer import PlainTransformer

RELATIVE_TOLERANCE = 2e-5
"""Largest difference of a logit by the largest logit: both sides are float32 and sum in another order."""

CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"arch": "qwen2"},
    "qwen2-untied-quantised": {"arch": "qwen2", "tied": False, "kind": "Q8_0"},
    "qwen3": {"arch": "qwen3"},
    "qwen3-wide-heads": {"arch": "qwen3", "head_dim": 64, "tied": False},
    "gemma3": {"arch": "gemma3", "layers": 7, "tokenizer": "llama"},
    "gemma3-wide-heads": {"arch": "gemma3", "layers": 6, "head_dim": 64, "tokenizer": "llama"},
}


def logits(folder: Path, ids: list[int]) -> np.ndarray:
    """Logits [tokens, vocab] of mlx-lm's model, without a cache."""
    model, _ = load_model(folder)
    return np.array(model(mx.array([ids]))[0])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_are_those_of_the_files_own_weights(case: dict[str, Any], tmp_path: Path) -> None:
    """Biases, head norms, two rotary bases, windows, shifted norms and the embedding scale: every one matters here.

    The prompt is several windows long and Gemma has layers of both kinds.
    """
    path = write_random_gguf(tmp_path / "m.gguf", **case)
    folder = tmp_path / "m"
    folder.mkdir()
    import_gguf(path, folder, dtype="float32", reporter=SilentReporter())
    ids = np.random.default_rng(1).integers(4, 250, 4 * WINDOW + 5).tolist()
    expected = PlainTransformer(path)(ids)
    found = logits(folder, ids)
    assert np.ptp(expected) > 1
    assert np.abs(found - expected).max() < RELATIVE_TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3"])
def test_the_comparison_notices_a_permuted_head(arch: str, tmp_path: Path) -> None:
    """The oracle is not blind: rows of the query projection in llama's order give other logits."""
    settings: dict[str, Any] = {"arch": arch, "layers": 6 if arch == "gemma3" else 2}
    path = write_random_gguf(tmp_path / "m.gguf", **settings)
    weight = PlainTransformer(path).weight("blk.0.attn_q.weight")
    swapped = write_random_gguf(tmp_path / "s.gguf", **settings, tensors={"blk.0.attn_q.weight": weight[::-1].copy()})
    ids = list(range(10, 30))
    right, wrong = PlainTransformer(path)(ids), PlainTransformer(swapped)(ids)
    assert np.abs(right - wrong).max() > 100 * RELATIVE_TOLERANCE * np.abs(right).max()
