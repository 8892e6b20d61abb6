"""Small GGUF files of any architecture with seeded random weights, in each tensor type, with either tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from tests.support.tiny_model import build_tokenizer

HIDDEN: Final = 64
MLP: Final = 96
HEADS: Final = 2
KV_HEADS: Final = 1
WINDOW: Final = 8

_BLOCK: Final[Mapping[str, str]] = {
    "attn_norm.weight": "E",
    "attn_q.weight": "QE",
    "attn_k.weight": "KE",
    "attn_v.weight": "KE",
    "attn_output.weight": "EQ",
    "ffn_norm.weight": "E",
    "ffn_gate.weight": "FE",
    "ffn_up.weight": "FE",
    "ffn_down.weight": "EF",
}
_EXTRA: Final[Mapping[str, Mapping[str, str]]] = {
    "llama": {},
    "qwen2": {"attn_q.bias": "Q", "attn_k.bias": "K", "attn_v.bias": "K"},
    "qwen3": {"attn_q_norm.weight": "D", "attn_k_norm.weight": "D"},
    "gemma3": {
        "attn_q_norm.weight": "D",
        "attn_k_norm.weight": "D",
        "post_attention_norm.weight": "E",
        "post_ffw_norm.weight": "E",
    },
}

PIECES: Final = (
    ("<pad>", -1000.0, 3),
    ("<eos>", -1000.0, 3),
    ("<bos>", -1000.0, 3),
    ("<unk>", -1000.0, 2),
    ("\n", -1000.0, 4),
    ("\n\n", -1000.0, 4),
    ("  ", -1000.0, 4),
    ("<b>", -1000.0, 4),
    ("<start_of_image>", -1000.0, 4),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *(
        (piece, -float(rank), 1)
        for rank, piece in enumerate(("th", "▁th", "▁the", "he", "▁h", "er", "aa", "aaaa", "▁a"))
    ),
    *((letter, -100.0 - rank, 1) for rank, letter in enumerate("▁abehrt<>s日é")),
)
"""(piece, score, type) of a SentencePiece vocabulary; `▁the` beats what would make `he` out of the same letters."""


def write_random_gguf(
    path: Path,
    arch: str = "llama",
    *,
    kind: str = "F32",
    layers: int = 2,
    head_dim: int = HIDDEN // HEADS,
    tied: bool = True,
    tokenizer: str = "gpt2",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    seed: int = 0,
) -> Path:
    """Write a file; its matrices have the tensor type `kind`, its vectors are F32.

    Args:
        path: where.
        arch: general.architecture.
        kind: tensor type of matrices; a type that the `gguf` package cannot make gets random valid blocks.
        layers: blocks.
        head_dim: width of a head.
        tied: no output matrix.
        tokenizer: `gpt2` or `llama`.
        metadata: keys to add, or (with None) to leave out; those without a `general.` or `tokenizer.` prefix belong to
            the architecture.
        tensors: float32 tensors to add or to put in place of the random ones; None leaves a tensor out.
        seed: of the weights.
    """
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    facts: dict[str, Any] = {
        "block_count": layers,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": 1e6,
        **({"attention.sliding_window": WINDOW} if arch == "gemma3" else {}),
        **_tokenizer(tokenizer),
        **(metadata or {}),
    }
    for key, value in facts.items():
        if value is not None:
            own = key.startswith(("general.", "tokenizer."))
            _add(writer, key if own else f"{arch}.{key}", value)
    widths = {"E": HIDDEN, "F": MLP, "Q": HEADS * head_dim, "K": KV_HEADS * head_dim, "D": head_dim}
    widths["V"] = len(facts["tokenizer.ggml.tokens"])
    letters = {"token_embd.weight": "VE", "output_norm.weight": "E", **({} if tied else {"output.weight": "VE"})}
    for layer in range(layers):
        letters |= {f"blk.{layer}.{name}": shape for name, shape in {**_BLOCK, **_EXTRA.get(arch, {})}.items()}
    values: dict[str, np.ndarray | None] = {}
    for name, shape in letters.items():
        size = tuple(widths[letter] for letter in shape)
        spread = 1.0 if name == "token_embd.weight" else 0.3
        noise = random.standard_normal(size).astype(np.float32) * np.float32(spread)
        values[name] = 1 + noise if name.endswith("norm.weight") else noise
    values.update(tensors or {})
    for name, tensor in values.items():
        if tensor is not None:
            _add_tensor(writer, name, tensor, kind, random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Bytes of random blocks whose values are finite: half-precision scales never have the exponent of infinity."""
    number = gguf.GGMLQuantizationType[kind]
    elements, block_bytes = gguf.GGML_QUANT_SIZES[number]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // elements, block_bytes), dtype=np.uint8)
    blocks &= 0xBB  # clears one exponent bit of any float16, whichever byte of the block it ends in
    return blocks.reshape(*shape[:-1], -1)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str, random: np.random.Generator) -> None:
    number = gguf.GGMLQuantizationType[kind]
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values)
        return
    try:
        data = gguf.quants.quantize(values, number)
    except NotImplementedError:
        data = random_blocks(kind, values.shape, random)
    writer.add_tensor(name, data, raw_dtype=number)


def _tokenizer(kind: str) -> dict[str, Any]:
    """Tokenizer metadata."""
    if kind == "gpt2":
        ids, merges = build_tokenizer(None)
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": list(ids),
            "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in ids],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
            "tokenizer.ggml.eos_token_id": 2,
        }
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": [piece for piece, _, _ in PIECES],
        "tokenizer.ggml.scores": [score for _, score, _ in PIECES],
        "tokenizer.ggml.token_type": [number for _, _, number in PIECES],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A metadata value by its Python type."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
