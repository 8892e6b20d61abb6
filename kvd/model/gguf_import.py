"""A GGUF file as an mlx-lm folder: config, safetensors weights, tokenizer.

GGUF stores the query and key projections of llama models with their rows permuted for interleaved rotary embedding:
rows 2i and 2i+1 of a head turn together, where mlx-lm's llama turns rows i and i + d/2. The permutation is undone
here (source: `permute` of llama.cpp's converter, inverted). Norms of Gemma are stored with the one that mlx-lm's code
adds; it is taken off. May import this package only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvd.model.cache_spec import check_supported
from kvd.model.errors import ModelCorrupt
from kvd.model.gguf_families import FAMILIES, build_config, family_of, tensor_names
from kvd.model.gguf_file import GgufFile
from kvd.model.gguf_tokenizer import build_tokenizer, build_tokenizer_config, check_token_ids
from kvd.model.progress import Reporter
from kvd.model.sources import WeightsDtype
from kvd.model.template import check_template
from kvd.model.weights_file import TensorPlan, write_weights

GGUF_ARCHITECTURES: Final = tuple(FAMILIES)
"""Values of `general.architecture` that can be imported."""


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


def import_gguf(source: Path, folder: Path, *, dtype: WeightsDtype, reporter: Reporter) -> ImportedGguf:
    """Write an mlx-lm folder for the GGUF file `source` into the existing `folder`.

    Everything that can be refused is refused before anything is written: a file that was cut short, a shape or a chat
    template kvd cannot run, tensors that are missing or misshapen or of a type nobody can read, a tokenizer kvd cannot
    run. Only values that are no numbers are found later, as each tensor is read. The caller makes the folder durable,
    or removes what is there after an error.

    Raises:
        UnsupportedModel: architecture, shape, tokenizer or tensor type; the message names those that are supported.
        ModelCorrupt: the file is damaged or incomplete.
    """
    file = GgufFile(source)
    config = build_config(file)
    file.check_types()
    plans = _plans(file, config, dtype)
    tokenizer = build_tokenizer(file)
    settings = build_tokenizer_config(file)
    check_template(settings.get("chat_template", ""))
    check_token_ids(file, tokenizer, config["vocab_size"])
    check_supported(config)
    config["torch_dtype"] = dtype
    item_bytes = 4 if dtype == "float32" else 2
    parameters = sum(int(np.prod(plan.shape, dtype=np.int64)) for plan in plans)
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", tokenizer, indent=None)  # half a million merges: no line for each
    _write_json(folder / "tokenizer_config.json", settings)
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


def _plans(file: GgufFile, config: Mapping[str, Any], dtype: WeightsDtype) -> list[TensorPlan]:
    """Every tensor of the folder, checked against the file."""
    family = family_of(file)
    rotary = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    most = float(np.finfo(np.float16 if dtype == "float16" else np.float32).max)
    plans: list[TensorPlan] = []
    for name, new_name in tensor_names(file, config).items():
        part = name.split(".")[2] if name.startswith("blk.") else ""
        heads = rotary.get(part) if family.interleaved else None
        shift = -1.0 if family.shifted_norms and name.endswith("norm.weight") else 0.0
        plans.append(TensorPlan(new_name, file.shapes[name], partial(_load, file, name, heads, shift, most)))
    return plans


def _load(file: GgufFile, name: str, rotary_heads: int | None, shift: float, most: float) -> NDArray[np.float32]:
    """One tensor; q and k rows in half-split order, norms without the one that mlx-lm adds.

    Raises:
        ModelCorrupt: a value is no number, or beyond `most`: every answer of such a model would be no number either.
    """
    with np.errstate(all="ignore"):  # a damaged scale overflows while it is multiplied; the check below says so
        values = file.tensor(name)
        low, high = (float(bound) for bound in (values.min(initial=0), values.max(initial=0)))
    if not (-most <= low and high <= most):  # also with NaN, which both bounds pass on
        raise ModelCorrupt(f"{file.path}: the tensor {name} holds values that are no finite numbers", tensor=name)
    if rotary_heads is not None:
        return unpermute(values, rotary_heads)
    return values + np.float32(shift) if shift else values


def _write_json(path: Path, value: Mapping[str, Any], *, indent: int | None = 1) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent), encoding="utf-8")
