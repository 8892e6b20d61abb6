"""The two encoders of a vocabulary, built so that a vocabulary of a quarter million tokens costs little.

The control encoder is the file's own; the content encoder knows no reserved token (see `vocabulary`). Both share one
BPE model in memory where that is exact; else the content encoder gets a model of its own, without the reserved tokens.
May import this package only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from kvd.model.vocabulary import Vocabulary, merge_pairs

_OPTIONS: Final = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
"""Fields of a `tokenizer.json` BPE model that its constructor takes by the same names."""


def build_encoders(vocabulary: Vocabulary) -> tuple[Tokenizer, Tokenizer]:
    """The encoder for template text and the encoder for what users type.

    Raises:
        Exception: the `tokenizers` package refuses the file.
    """
    spec = vocabulary.plain_spec()
    added: list[Mapping[str, Any]] = list(spec.get("added_tokens") or ())
    model = _bpe(spec["model"])
    shell = json.dumps(
        {**spec, "added_tokens": [], "model": {**spec["model"], "vocab": {}, "merges": [], "unk_token": None}}
    )
    control = _assembled(model, shell, added)
    if control is None:
        control = Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
    free = [token for token in added if token["id"] not in vocabulary.reserved]
    content = _assembled(model, shell, free) if vocabulary.content_can_share_the_model() else None
    if content is None:
        content = Tokenizer.from_str(vocabulary.content_json())
    return control, content


def _bpe(model: Mapping[str, Any]) -> BPE:
    """The model itself, made from objects in memory: twice as fast as through another JSON text."""
    options = {name: model[name] for name in _OPTIONS if model.get(name) is not None}
    return BPE(vocab=dict(model["vocab"]), merges=list(merge_pairs(model)), **options)


def _assembled(model: BPE, shell: str, added: Iterable[Mapping[str, Any]]) -> Tokenizer | None:
    """A tokenizer around `model`, with everything else from `shell`; None if an added token would get another id."""
    parts = Tokenizer.from_str(shell)
    tokenizer = Tokenizer(model)
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(parts, name)
        if part is not None:
            setattr(tokenizer, name, part)
    for special, tokens in groupby(added, key=lambda token: bool(token["special"])):
        batch = list(tokens)
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([_added_token(token) for token in batch])
        if any(tokenizer.token_to_id(token["content"]) != token["id"] for token in batch):
            return None
    return tokenizer


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(token.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(token["content"], **flags)
