"""The tiny model as a GGUF file (q and k rows permuted, as converters do), and that file inside a wheel."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from kvd.model.pull import sha256
from kvd.model.sources import WheelSource

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + d/2 of each head become neighbours, element by element."""
    width = len(rows) // heads
    order = [
        head * width + half * (width // 2) + i for head in range(heads) for i in range(width // 2) for half in (0, 1)
    ]
    return rows[order]


def gguf_name(name: str) -> str:
    """GGUF's name of an mlx-lm llama tensor."""
    if name in _TOP:
        return _TOP[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def write_tiny_gguf(path: Path, folder: Path, *, quantised: str = "F32", architecture: str = "llama") -> Path:
    """Write the tiny model in `folder` as GGUF; matrices get the tensor type `quantised`, vectors stay F32."""
    config = json.loads((folder / "config.json").read_text())
    spec = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    special = {token["id"] for token in spec["added_tokens"]}
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(settings["chat_template"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    kind = gguf.GGMLQuantizationType[quantised]
    for name, values in load_file(folder / "model.safetensors").items():
        part = name.split(".")[-2]
        rows = interleave(values, heads[part]) if part in heads else values
        if rows.ndim == 1 or quantised == "F32":
            writer.add_tensor(gguf_name(name), rows)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(path: Path, gguf_file: Path, *, name: str = "tiny") -> WheelSource:
    """A wheel that holds `gguf_file`, and the source that pins it."""
    member = f"tiny_package/{gguf_file.name}"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, member)
    return WheelSource(name, "tiny-package==1.0", sha256(path), member, path.stat().st_size)
