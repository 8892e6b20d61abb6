"""What is known of a model folder without loading it, for people and for programs.

May import this package, kvd.errors and kvd.quant (inside functions).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvd.errors import KvdError
from kvd.model.folder import ModelFolder, check_files


def describe(folder: ModelFolder) -> dict[str, Any]:
    """Facts about a model folder from its files: plain data.

    Raises:
        ModelCorrupt: configuration, manifest or weights are missing, cut short or unreadable.
    """
    check_files(folder)
    config = folder.config()
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, dict) else config  # multimodal repositories nest the language model
    manifest = folder.manifest()
    heads = text.get("num_attention_heads")
    return {
        "name": folder.name,
        "path": str(folder.path),
        "model_type": config.get("model_type"),
        "layers": text.get("num_hidden_layers"),
        "heads": heads,
        "kv_heads": text.get("num_key_value_heads", heads),
        "context_tokens": text.get("max_position_embeddings"),
        "vocab_tokens": text.get("vocab_size"),
        "weights_bytes": folder.weights_bytes(),
        "weights_dtype": manifest.get("weights_dtype", text.get("torch_dtype") or text.get("dtype")),
        "supported": is_supported(config),
        "license": folder.license(),
        "kv_format": (stored_calibration(folder) or {}).get("kv_format"),
    }


def is_supported(config: Mapping[str, Any]) -> bool:
    """Whether kvd can load a model of this configuration, as far as it says."""
    from kvd.model.cache_spec import check_supported

    try:
        check_supported(dict(config))
    except KvdError:
        return False
    return True


def describe_or_damage(folder: ModelFolder) -> dict[str, Any]:
    """`describe`, or the name and path of a model that cannot be described with the reason as `damage`."""
    try:
        return {**describe(folder), "damage": None}
    except KvdError as error:
        return {"name": folder.name, "path": str(folder.path), "damage": error.message}


def stored_calibration(folder: ModelFolder) -> Mapping[str, Any] | None:
    """What the calibration beside a model found, as `Calibration.facts()`; None when it cannot be read.

    Whether it is stale is told when the model is loaded.
    """
    from kvd.quant.calibration import CALIBRATION_FILE

    try:
        record = json.loads((folder.path / CALIBRATION_FILE).read_text(encoding="utf-8"))
        scores = {str(score["format"]): score for score in record["scores"]}
        chosen = scores[record["chosen"]]
        return {
            "kv_format": str(record["chosen"]),
            "bytes_per_token": float(chosen["bytes_per_token"]),
            "ppl_ratio": float(chosen["ratio"]),
            "scores": {name: float(score["ratio"]) for name, score in scores.items()},
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def calibration_line(facts: Mapping[str, Any]) -> str:
    """What a calibration found, as one sentence. `facts` are `Calibration.facts()`."""
    chosen = facts["kv_format"]
    others = ", ".join(
        f"{name} {100 * (ratio - 1):+.1f} %" for name, ratio in facts["scores"].items() if name != chosen
    )
    return (
        f"page format {chosen}: {facts['bytes_per_token']:.0f} bytes a token, perplexity "
        f"{100 * (facts['ppl_ratio'] - 1):+.1f} % against full precision ({others or 'the first one tried'})"
    )
