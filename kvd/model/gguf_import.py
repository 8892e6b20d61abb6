"""A GGUF file of the llama architecture as an mlx-lm folder: config, safetensors weights, tokenizer.

GGUF stores the query and key projections of llama models with their rows permuted for interleaved rotary embedding:
rows 2i and 2i+1 of a head turn together, where mlx-lm's llama turns rows i and i + d/2. The permutation is undone
here (source: `permute` of llama.cpp's converter, inverted). May import this package only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.gguf_file import GgufFile
from kvd.model.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from kvd.model.progress import Reporter
from kvd.model.sources import WeightsDtype
from kvd.model.weights_file import TensorPlan, write_weights

GGUF_ARCHITECTURES: Final = ("llama",)
"""Values of `general.architecture` that can be imported."""

_LAYER_NAMES: Final[Mapping[str, str]] = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TOP_NAMES: Final[Mapping[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class ImportedGguf:
    """What an import wrote, for `kvd-model.json`."""

    architecture: str
    title: str
    license: str
    metadata_digest: str
    tensor_types: Mapping[str, int]
    weights_bytes: int
    parameters: int


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a q or k projection in half-split rotary order.

    Args:
        rows: [heads * head_dim, columns], rows of a head in interleaved order.
        heads: query heads for q, KV heads for k.

    Returns:
        The same rows, those of each head in the order 0, 2, 4, …, 1, 3, 5, …
    """
    n_rows, columns = rows.shape
    pairs = rows.reshape(heads, n_rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(n_rows, columns)


def build_config(file: GgufFile) -> dict[str, Any]:
    """The `config.json` for mlx-lm's llama.

    Stated defaults for absent metadata: KV heads as query heads, head width `embedding / heads`, rotary base 10000,
    epsilon 1e-5, no output matrix means tied embeddings.

    Raises:
        UnsupportedModel: another architecture, or a rotary scaling kvd cannot express.
        ModelCorrupt: a required figure is missing.
    """
    arch = file.architecture
    if arch not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedModel(f"GGUF architecture {arch!r} is not supported; supported: {known}", architecture=arch)
    scaling = file.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear") or "rope_freqs.weight" in file.shapes:
        raise UnsupportedModel(f"rotary scaling {scaling!r} of GGUF files is not supported; supported: none, linear")
    if file.get(f"{arch}.expert_count", 0):
        raise UnsupportedModel("mixtures of experts in GGUF files are not supported; supported: dense llama models")
    hidden = file.require(f"{arch}.embedding_length", int)
    heads = file.require(f"{arch}.attention.head_count", int)
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": file.require(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": file.require(f"{arch}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": file.get(f"{arch}.attention.key_length", hidden // heads),
        "rms_norm_eps": file.get(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": file.get(f"{arch}.rope.freq_base", 10000.0),
        "max_position_embeddings": file.require(f"{arch}.context_length", int),
        "vocab_size": _shape(file, "token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "rope_traditional": False,
    }
    if file.get(f"{arch}.rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModel("rotary embedding over a part of the head is not supported for llama GGUF files")
    if scaling == "linear":
        config["rope_scaling"] = {"type": "linear", "factor": file.get(f"{arch}.rope.scaling.factor", 1.0)}
    for name in ("bos", "eos"):
        if file.has(f"tokenizer.ggml.{name}_token_id"):
            config[f"{name}_token_id"] = file.require(f"tokenizer.ggml.{name}_token_id", int)
    return config


def import_gguf(source: Path, folder: Path, *, dtype: WeightsDtype, reporter: Reporter) -> ImportedGguf:
    """Write an mlx-lm folder for the GGUF file `source` into the existing `folder`.

    Everything that can be refused is refused before the weights are written. The caller makes the folder durable.

    Raises:
        UnsupportedModel: architecture, tokenizer or tensor type.
        ModelCorrupt: the file is damaged or incomplete.
    """
    file = GgufFile(source)
    config = build_config(file)
    tokenizer = build_tokenizer(file)
    plans = list(_plans(file, config))
    config["torch_dtype"] = dtype
    item_bytes = 4 if dtype == "float32" else 2
    parameters = sum(int(np.prod(plan.shape, dtype=np.int64)) for plan in plans)
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", build_tokenizer_config(file))
    reporter.stage(f"converting {source.name} to {dtype}", parameters * item_bytes)
    weights_bytes = write_weights(folder / "model.safetensors", plans, dtype=dtype, advance=reporter.advance)
    return ImportedGguf(
        architecture=file.architecture,
        title=file.get("general.name", source.stem),
        license=file.get("general.license", ""),
        metadata_digest=file.metadata_digest(),
        tensor_types=file.tensor_types,
        weights_bytes=weights_bytes,
        parameters=parameters,
    )


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.shapes:
        raise ModelCorrupt(f"{file.path} lacks the tensor {name}", tensor=name)
    return file.shapes[name]


def _plans(file: GgufFile, config: Mapping[str, Any]) -> Iterator[TensorPlan]:
    """Every tensor of the folder, checked against the file.

    Raises:
        ModelCorrupt: a tensor is missing.
        UnsupportedModel: the file has tensors that mlx-lm's llama has no place for (biases, for instance).
    """
    names = {gguf_name: name for gguf_name, name in _TOP_NAMES.items() if gguf_name != "output.weight"}
    if not config["tie_word_embeddings"]:
        names["output.weight"] = _TOP_NAMES["output.weight"]
    for layer in range(config["num_hidden_layers"]):
        names.update({f"blk.{layer}.{old}": f"model.layers.{layer}.{new}" for old, new in _LAYER_NAMES.items()})
    surplus = sorted(set(file.shapes) - set(names))
    if surplus:
        raise UnsupportedModel(f"unexpected tensors for a llama model: {', '.join(surplus[:5])}", tensors=surplus[:5])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for gguf_name, name in names.items():
        part = gguf_name.split(".")[2] if gguf_name.startswith("blk.") else ""
        yield TensorPlan(name, _shape(file, gguf_name), partial(_load, file, gguf_name, heads.get(part)))


def _load(file: GgufFile, name: str, rotary_heads: int | None) -> NDArray[np.float32]:
    """One tensor; q and k rows in half-split order."""
    values = file.tensor(name)
    return values if rotary_heads is None else unpermute(values, rotary_heads)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
