"""A complete, tiny, seeded Gemma 3 folder for tests: sliding layers, one in three of full attention, a BOS token.

Made as `tests.support.tiny_model` makes a llama, with the same tokenizer and chat template. The window is not a whole
number of pages, so the edge of what a sliding layer sees falls inside a page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from tests.support.tiny_model import build_tokenizer, write_tokenizer

WINDOW: Final = 300
BOS: Final = "<|endoftext|>"

LAYERS, PATTERN, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, CONTEXT = 6, 3, 4, 1, 64, 128, 256, 4096


def make_tiny_gemma(path: str | Path, seed: int = 0) -> Path:
    """Write a complete model folder and return it. Equal arguments give equal bytes.

    Args:
        path: folder to make (may exist; its model files are replaced).
        seed: of the weights.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    ids, merges = build_tokenizer(None)
    config = {
        "model_type": "gemma3_text",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": WINDOW,
        "sliding_window_pattern": PATTERN,
        "vocab_size": len(ids),
        "max_position_embeddings": CONTEXT,
        "eos_token_id": ids["<|im_end|>"],
        "bos_token_id": ids[BOS],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(_weights(np.random.default_rng(seed), ids), folder / "model.safetensors", metadata={"format": "mlx"})
    write_tokenizer(folder, ids, merges, bos=BOS, add_bos=True)
    return folder


def _weights(rng: np.random.Generator, ids: dict[str, int]) -> dict[str, np.ndarray]:
    """Random float32 weights; norms are near zero, since Gemma adds one to them; logits spread by about 3."""

    def normal(rows: int, columns: int, gain: float) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def norm(width: int) -> np.ndarray:
        return (rng.standard_normal(width) * 0.1).astype(np.float32)

    embeddings = normal(len(ids), HIDDEN, 3.0)
    embeddings[[i for token, i in ids.items() if token.startswith("<|")]] = 0.0  # never the greedy choice
    weights = {"model.embed_tokens.weight": embeddings, "model.norm.weight": norm(HIDDEN)}
    for i in range(LAYERS):
        base = f"model.layers.{i}"
        weights |= {
            f"{base}.input_layernorm.weight": norm(HIDDEN),
            f"{base}.post_attention_layernorm.weight": norm(HIDDEN),
            f"{base}.pre_feedforward_layernorm.weight": norm(HIDDEN),
            f"{base}.post_feedforward_layernorm.weight": norm(HIDDEN),
            f"{base}.self_attn.q_norm.weight": norm(HEAD_DIM) + np.float32(0.5),
            f"{base}.self_attn.k_norm.weight": norm(HEAD_DIM) + np.float32(0.5),
            f"{base}.self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN, 1.0),
            f"{base}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN, 1.0),
            f"{base}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN, 1.0),
            f"{base}.self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM, 1.0),
            f"{base}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN, 1.0),
            f"{base}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN, 1.0),
            f"{base}.mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE, 1.0),
        }
    return weights


__all__ = ["BOS", "WINDOW", "make_tiny_gemma"]
