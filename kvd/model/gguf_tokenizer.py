"""A `tokenizer.json` and `tokenizer_config.json` from a GGUF file's metadata.

GGUF keeps a BPE vocabulary as tokens, types and merges and only *names* the pre-tokeniser; the table below says what
each name means. May import this package only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvd.model.errors import UnsupportedModel
from kvd.model.gguf_file import GgufFile

_TYPE_UNKNOWN: Final = 2
_TYPE_CONTROL: Final = 3
_TYPE_USER_DEFINED: Final = 4

_LLAMA3_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTE_LEVEL, "use_regex": False}]


PRE_TOKENIZERS: Final[Mapping[str, list[dict[str, Any]]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}, {**_BYTE_LEVEL, "use_regex": True}],
    "gpt-2": [{**_BYTE_LEVEL, "use_regex": True}],
    "default": [{**_BYTE_LEVEL, "use_regex": True}],
    "llama-bpe": _split(_LLAMA3_PATTERN),
    "qwen2": _split(_LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")),
}
"""`tokenizer.ggml.pre` to the pre-tokeniser it names."""


def build_tokenizer(file: GgufFile) -> dict[str, Any]:
    """The `tokenizer.json` object of a GGUF file with a byte-level BPE vocabulary.

    Raises:
        UnsupportedModel: another kind of tokenizer, or an unknown pre-tokeniser.
    """
    model = file.get("tokenizer.ggml.model", "none")
    pre = file.get("tokenizer.ggml.pre", "default")
    merges = file.array("tokenizer.ggml.merges")
    if model != "gpt2" or not merges:
        raise UnsupportedModel(
            f"tokenizer model {model!r} with {len(merges)} merges is not supported; supported: gpt2 with merges",
            tokenizer=model,
        )
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModel(f"pre-tokeniser {pre!r} is not supported; supported: {known}", pre_tokenizer=pre)
    tokens: list[str] = file.array("tokenizer.ggml.tokens")
    types = file.array("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _TYPE_USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_TYPE_UNKNOWN, _TYPE_CONTROL, _TYPE_USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def build_tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The `tokenizer_config.json` object: named tokens, BOS policy, chat template.

    Stated defaults for absent metadata: no BOS is added; no template means no chat.
    """
    tokens: list[str] = file.array("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", False),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id", -1)
        if 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    if file.has("tokenizer.chat_template"):
        config["chat_template"] = file.require("tokenizer.chat_template", str)
    return config
