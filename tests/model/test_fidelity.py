"""SmolLM2, converted, computes what the GGUF file says: against a plain numpy pass of its own weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvd.model.loader import LoadedModel, load
from kvd.model.registry import ModelFolder

LOGIT_TOLERANCE = 5e-4
"""Largest difference of a logit. Both sides are float32 and sum in another order over 30 layers."""


class PlainLlama:
    """The llama forward pass from its definition, on GGUF tensors as they are stored.

    Query and key rows stay in the file's order, where rows 2i and 2i+1 of a head form a rotary pair; so a wrong
    permutation in the conversion cannot cancel out here.
    """

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in reader.tensors}
        fields = {
            key: reader.fields[f"llama.{key}"].contents()
            for key in ("block_count", "attention.head_count", "attention.head_count_kv", "rope.freq_base")
        }
        self.layers, self.heads, self.kv_heads, self.base = fields.values()
        self.epsilon = reader.fields["llama.attention.layer_norm_rms_epsilon"].contents()

    def weight(self, name: str) -> np.ndarray:
        """A dequantised tensor, rows first."""
        tensor = self.tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return values.reshape([int(n) for n in reversed(tensor.shape)])

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """RMS norm."""
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.weight(name)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Interleaved rotary embedding of [tokens, heads, width]."""
        tokens, _, width = x.shape
        angle = np.arange(tokens)[:, None] * self.base ** (-np.arange(0, width, 2) / width)
        cos, sin = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def attention(self, x: np.ndarray, block: str) -> np.ndarray:
        """Causal grouped-query attention over [tokens, hidden]."""
        tokens = len(x)
        q, k, v = (
            (x @ self.weight(f"{block}.attn_{part}.weight").T).reshape(tokens, heads, -1)
            for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        q, k = self.rotate(q), self.rotate(k)
        out = np.empty_like(q)
        for head in range(self.heads):
            group = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, group].T / np.sqrt(q.shape[-1])
            scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, group]
        return out.reshape(tokens, -1) @ self.weight(f"{block}.attn_output.weight").T

    def __call__(self, ids: list[int]) -> np.ndarray:
        """Logits [tokens, vocab]."""
        embedding = self.weight("token_embd.weight")
        x = embedding[ids]
        for layer in range(self.layers):
            block = f"blk.{layer}"
            x = x + self.attention(self.norm(x, f"{block}.attn_norm.weight"), block)
            y = self.norm(x, f"{block}.ffn_norm.weight")
            gate = y @ self.weight(f"{block}.ffn_gate.weight").T
            up = y @ self.weight(f"{block}.ffn_up.weight").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weight(f"{block}.ffn_down.weight").T
        return self.norm(x, "output_norm.weight") @ embedding.T


@pytest.fixture(scope="module")
def model(smollm2: ModelFolder) -> LoadedModel:
    """SmolLM2 in memory."""
    loaded = load(smollm2)
    if loaded.dtype != "float32":
        pytest.skip("the tolerance is stated for float32")
    return loaded


def greedy(model: LoadedModel, ids: list[int], tokens: int) -> str:
    """Greedy continuation with mlx_lm's own cache, as text."""
    cache = make_prompt_cache(model.model)
    step, out = mx.array([ids]), []
    for _ in range(tokens):
        out.append(int(mx.argmax(model.model(step, cache=cache)[0, -1]).item()))
        if out[-1] in model.codec.eos_ids:
            break
        step = mx.array([out[-1:]])
    return model.codec.surface(out)[0].decode()


@pytest.mark.real_model
def test_logits_are_those_of_the_files_own_weights(model: LoadedModel, gguf_path: Path) -> None:
    """All logits of a short prompt agree with the plain forward pass within the stated tolerance."""
    ids = model.codec.encode_content("In 1969, Neil Armstrong walked on the")
    expected = PlainLlama(gguf_path)(ids)
    found = np.array(model.model(mx.array([ids]))[0])
    assert np.abs(expected).max() > 5
    assert np.abs(found - expected).max() < LOGIT_TOLERANCE
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.real_model
def test_the_model_knows_the_capital_of_france(model: LoadedModel) -> None:
    """Plain continuation and a chat turn both say Paris; the chat turn ends by itself."""
    assert greedy(model, model.codec.encode_content("The capital of France is"), 3).startswith(" Paris")
    assert model.template is not None
    typed = model.template.render([{"role": "user", "content": "What is the capital of France?"}])
    answer = greedy(model, model.codec.encode_typed(typed, at_start=True)[0], 24)
    assert answer == "The capital of France is Paris."
