"""Qwen 2, Qwen 3 and Gemma 3 forward passes from their definitions, in float32 numpy, on GGUF tensors as stored.

It shares with the code under test only the reading of the file (`GgufFile`, which other tests hold against the `gguf`
package's own reader, too slow for large vocabularies): no renamed tensors, no norm shifts, no configuration, no cache.
Rotary pairs are rows i and i + d/2, as these files store them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np

from kvd.model.gguf_file import GgufFile

T = TypeVar("T", int, float)


class PlainTransformer:
    """One model; call it with ids for logits.

    Args:
        path: a GGUF file of architecture qwen2, qwen3 or gemma3.
    """

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.tensors = self.file.shapes.keys()
        self.arch = self.file.architecture
        self.embedding = self.file.tensor("token_embd.weight")
        self.gemma = self.arch == "gemma3"
        self.heads = self.figure("attention.head_count", int)
        self.kv_heads = self.figure("attention.head_count_kv", int)
        self.epsilon = self.figure("attention.layer_norm_rms_epsilon", float)

    def figure(self, name: str, kind: type[T]) -> T:
        """Metadata of the architecture."""
        return self.file.require(f"{self.arch}.{name}", kind)

    def weight(self, name: str) -> np.ndarray:
        """A dequantised tensor, rows first."""
        return self.file.tensor(name)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """RMS norm; the stored weight is the whole factor."""
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.weight(name)

    def project(self, x: np.ndarray, name: str) -> np.ndarray:
        """A linear map, with its bias where the file has one."""
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def sees_all(self, layer: int) -> bool:
        """Gemma 3: layers 5, 11, 17 … see everything; others a window."""
        return not self.gemma or layer % 6 == 5

    def rotate(self, x: np.ndarray, base: float) -> np.ndarray:
        """Half-split rotary embedding of [tokens, heads, width]."""
        tokens, _, width = x.shape
        half = width // 2
        angle = np.arange(tokens)[:, None] / base ** (2 * np.arange(half) / width)
        cos, sin = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, first * sin + second * cos], -1)

    def attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        """Causal grouped-query attention over [tokens, hidden]; a window counts the token itself."""
        tokens, block = len(x), f"blk.{layer}"
        q = self.project(x, f"{block}.attn_q").reshape(tokens, self.heads, -1)
        k = self.project(x, f"{block}.attn_k").reshape(tokens, self.kv_heads, -1)
        v = self.project(x, f"{block}.attn_v").reshape(tokens, self.kv_heads, -1)
        if f"{block}.attn_q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{block}.attn_q_norm.weight"), self.norm(k, f"{block}.attn_k_norm.weight")
        base = self.figure("rope.freq_base", float) if self.sees_all(layer) else 10_000.0
        q, k = self.rotate(q, base), self.rotate(k, base)
        distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
        seen = distance >= 0
        if not self.sees_all(layer):
            seen &= distance < self.figure("attention.sliding_window", int)
        out = np.empty_like(q)
        for head in range(self.heads):
            group = head * self.kv_heads // self.heads
            scores = np.where(seen, q[:, head] @ k[:, group].T / np.sqrt(np.float32(q.shape[-1])), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, group]
        return self.project(out.reshape(tokens, -1), f"{block}.attn_output")

    def mlp(self, x: np.ndarray, layer: int) -> np.ndarray:
        """Gated MLP: SiLU, or GELU in its tanh form for Gemma."""
        gate, up = self.project(x, f"blk.{layer}.ffn_gate"), self.project(x, f"blk.{layer}.ffn_up")
        if self.gemma:
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi, dtype=np.float32) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        return self.project(gate * up, f"blk.{layer}.ffn_down")

    def hidden(self, ids: list[int], layers: int) -> np.ndarray:
        """The residual stream [tokens, hidden] after the first `layers` layers."""
        x = self.embedding[ids]
        if self.gemma:
            x = x * bfloat16(x.shape[-1] ** 0.5)
        for layer in range(layers):
            block = f"blk.{layer}"
            y = self.attention(self.norm(x, f"{block}.attn_norm.weight"), layer)
            x = x + (self.norm(y, f"{block}.post_attention_norm.weight") if self.gemma else y)
            y = self.mlp(self.norm(x, f"{block}.ffn_norm.weight"), layer)
            x = x + (self.norm(y, f"{block}.post_ffw_norm.weight") if self.gemma else y)
        return x

    def final(self, ids: list[int], *, layers: int | None = None) -> np.ndarray:
        """What the output projection meets: [tokens, hidden]; after the first `layers` layers, if given."""
        return self.norm(self.hidden(ids, layers or self.figure("block_count", int)), "output_norm.weight")

    def logits(self, final: np.ndarray) -> np.ndarray:
        """The output projection of rows of `final`: [rows, vocab]."""
        return final @ (self.weight("output.weight") if "output.weight" in self.tensors else self.embedding).T

    def __call__(self, ids: list[int]) -> np.ndarray:
        """Logits [tokens, vocab]."""
        return self.logits(self.final(ids))


def bfloat16(value: float) -> np.float32:
    """`value` rounded to bfloat16: Gemma was trained with its embedding scale rounded so."""
    bits = int(np.float32(value).view(np.uint32))
    return np.uint32(bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32)
