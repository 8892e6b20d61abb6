"""A `tokenizer.json` and `tokenizer_config.json` from a GGUF file's metadata.

GGUF keeps a byte-level BPE vocabulary (`gpt2`) as tokens, types and merges and only *names* the pre-tokeniser; the
table below says what each name means. A SentencePiece vocabulary (`llama`) has scores in place of merges. May import
this package only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.gguf_file import GgufFile
from kvd.model.gguf_pieces import TokenType, added_tokens
from kvd.model.gguf_sentencepiece import marked_tokens, sentencepiece_spec

TOKENIZERS: Final = ("gpt2", "llama")
"""Values of `tokenizer.ggml.model` that can be imported: byte-level BPE with merges, SentencePiece BPE with scores."""

_LLAMA3_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTE_LEVEL, "use_regex": False}]


_GPT2: Final = [{**_BYTE_LEVEL, "use_regex": True}]
_GPT2_DIGITS: Final = [{"type": "Digits", "individual_digits": True}, *_GPT2]
_QWEN2: Final = _split(_LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"))

PRE_TOKENIZERS: Final[Mapping[str, list[dict[str, Any]]]] = {
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "gpt-2": _GPT2,
    "default": _GPT2,
    "llama-bpe": _split(_LLAMA3_PATTERN),
    "llama3": _split(_LLAMA3_PATTERN),
    "llama-v3": _split(_LLAMA3_PATTERN),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""`tokenizer.ggml.pre` of byte-level vocabularies to the pre-tokeniser it names."""

_LLAMA3: Final = frozenset({"llama-bpe", "llama3", "llama-v3"})
"""Pre-tokenisers of Llama 3: its models take a word that is a token as it is, before any merge, and expect a BOS."""

_COMPOSED: Final = frozenset({"qwen2"})
"""Pre-tokenisers whose models were trained on text in Unicode's composed form (NFC)."""


def build_tokenizer(file: GgufFile) -> dict[str, Any]:
    """The `tokenizer.json` object of a GGUF file.

    Stated defaults for absent metadata: all tokens normal, and for SentencePiece vocabularies a space in front of
    texts (`add_space_prefix`), as their own default is.

    Raises:
        UnsupportedModel: another kind of tokenizer, or an unknown pre-tokeniser.
        ModelCorrupt: the vocabulary contradicts itself.
    """
    model = file.get("tokenizer.ggml.model", "none")
    if model not in TOKENIZERS:
        raise UnsupportedModel(
            f"tokenizer model {model!r} is not supported; supported: {', '.join(TOKENIZERS)}", tokenizer=model
        )
    tokens = file.array("tokenizer.ggml.tokens", str)
    types = file.array("tokenizer.ggml.token_type", int) or [int(TokenType.NORMAL)] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ModelCorrupt(f"{file.path}: the tokenizer has {len(tokens)} tokens and {len(types)} token types")
    if model == "llama":
        tokens = marked_tokens(tokens, types)
    if len(set(tokens)) != len(tokens):
        raise ModelCorrupt(f"{file.path}: the tokenizer has {len(tokens) - len(set(tokens))} tokens twice")
    if model == "gpt2":
        return _byte_level_spec(file, tokens, types)
    scores = file.array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens) or any(score != score for score in scores):
        raise ModelCorrupt(
            f"{file.path}: the tokenizer has {len(tokens)} tokens and {len(scores)} scores, or no numbers"
        )
    unknown = file.get("tokenizer.ggml.unknown_token_id", -1)
    if unknown < 0 and TokenType.UNKNOWN in types:
        unknown = types.index(TokenType.UNKNOWN)
    return sentencepiece_spec(
        tokens,
        scores,
        types,
        unknown=tokens[unknown] if 0 <= unknown < len(tokens) else None,
        space_prefix=file.get("tokenizer.ggml.add_space_prefix", True),
    )


def _byte_level_spec(file: GgufFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """The `tokenizer.json` object of a byte-level BPE vocabulary."""
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModel(f"pre-tokeniser {pre!r} is not supported; supported: {known}", pre_tokenizer=pre)
    merges = [merge.split(" ") for merge in file.array("tokenizer.ggml.merges", str)]
    if not merges:
        raise UnsupportedModel("tokenizer model 'gpt2' with 0 merges is not supported; supported: gpt2 with merges")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    for merge in merges:
        if len(merge) != 2 or any(part not in vocab for part in (*merge, "".join(merge))):
            raise ModelCorrupt(f"{file.path}: the merge {' '.join(merge)!r} is not of two tokens that make a third")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokens, types, normalized=False),
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
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
            "ignore_merges": pre in _LLAMA3,
            "vocab": vocab,
            "merges": merges,
        },
    }


def build_tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The `tokenizer_config.json` object: named tokens, BOS policy, chat template.

    Stated defaults for absent metadata: a BOS is added for SentencePiece vocabularies and for byte-level ones with the
    pre-tokeniser of Llama 3 (`llama3`, `llama-v3`, `llama-bpe`), not for others; no template means no chat.
    """
    tokens = file.array("tokenizer.ggml.tokens", str)
    model, pre = file.get("tokenizer.ggml.model", "none"), file.get("tokenizer.ggml.pre", "default")
    adds_bos = model == "llama" or (model == "gpt2" and pre in _LLAMA3)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", adds_bos),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id", -1)
        if 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    if file.has("tokenizer.chat_template"):
        config["chat_template"] = file.require("tokenizer.chat_template", str)
    return config


def check_token_ids(file: GgufFile, tokenizer: Mapping[str, Any], rows: int) -> None:
    """Refuse a vocabulary that the embedding matrix does not cover.

    Args:
        file: for the message.
        tokenizer: what `build_tokenizer` made.
        rows: rows of the embedding matrix; more than tokens is padding.

    Raises:
        ModelCorrupt: a token has no row.
    """
    count = len(tokenizer["model"]["vocab"])
    if count > rows:
        raise ModelCorrupt(f"{file.path}: {count} tokens, but {rows} rows of embeddings")
