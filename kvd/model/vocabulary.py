"""What a `tokenizer.json` says about each token: its bytes, whether it is control, and the two encoders it yields.

Two tokenizers are built from one file. The *control* one is the file's own, for template text. The *content* one has
the control tokens taken out, so that no text a user types can become one, and adds no dummy space in front: kvd
encodes suffixes, and a suffix is not the start of a text.

Byte-level BPE (GPT-2 and later) is exact. SentencePiece-style BPE with byte fallback is best effort: its normaliser may
change text, and byte lengths then follow the encoder's character offsets. May import kvd.model.errors only.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from kvd.model.errors import UnsupportedModel

_SPACE_MARK: Final = "▁"


@cache
def byte_letters() -> tuple[str, ...]:
    """The letter byte-level BPE writes each of the 256 bytes with.

    Source: GPT-2's encoder: printable Latin-1 letters stand for themselves, the others for 256, 257, … in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return tuple(chr(byte) if byte in printable else chr(next(spare)) for byte in range(256))


def _nodes(part: object) -> Iterator[Mapping[str, Any]]:
    """All objects of a tokenizer.json component, sequences flattened."""
    if isinstance(part, Mapping):
        yield part
        for value in part.values():
            if isinstance(value, list):
                for item in value:
                    yield from _nodes(item)


def _merge_pairs(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Merges in either spelling of the file format: `"a b"` or `["a", "b"]`."""
    for merge in model.get("merges", ()):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def token_ids(spec: Mapping[str, Any]) -> dict[str, int]:
    """Token strings of a `tokenizer.json` to ids, added tokens included.

    Raises:
        UnsupportedModel: the tokenizer is not BPE.
    """
    model = spec.get("model") or {}
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), Mapping):
        raise UnsupportedModel(f"tokenizer model {model.get('type')!r} is not supported; supported: BPE")
    return {**model["vocab"], **{token["content"]: token["id"] for token in spec.get("added_tokens") or ()}}


class Vocabulary:
    """Facts about the tokens of one tokenizer. Immutable.

    Args:
        spec: the parsed `tokenizer.json`.

    Attributes:
        ids: token string to id, added tokens included.
        control: ids of special tokens: they surface as nothing.
        reserved: ids content may never yield: `control` and other added tokens that look like markup.
        byte_level: whether tokens are exact byte strings.
        uncovered: bytes that no token can stand for; the tokenizer drops them without a trace.

    Raises:
        UnsupportedModel: the tokenizer is not BPE.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self.ids = token_ids(spec)
        self.byte_level = any(
            node.get("type") == "ByteLevel" for key in ("pre_tokenizer", "decoder") for node in _nodes(spec.get(key))
        )
        self._byte_fallback = bool(spec["model"].get("byte_fallback"))
        added = spec.get("added_tokens") or ()
        control = {token["id"] for token in added if token["special"]}
        markup = {token["id"] for token in added if _looks_like_markup(token["content"])}
        self._added_ids = frozenset(token["id"] for token in added)
        self.token_count = 1 + max(self.ids.values())
        self._bytes = self._byte_table()
        # Rows of the output projection that no token names exist in padded vocabularies; they stand for nothing.
        self.control = frozenset(control | {i for i, raw in enumerate(self._bytes) if raw is None})
        self.reserved = frozenset(self.control | markup)
        self.uncovered = self._uncovered_bytes()

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of a token; for a control token its literal; empty for an id that names no token."""
        return (self._bytes[token_id] or b"") if 0 <= token_id < self.token_count else b""

    def _byte_table(self) -> list[bytes | None]:
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}
        table: list[bytes | None] = [None] * self.token_count
        for token, token_id in self.ids.items():
            if token_id in self._added_ids:
                table[token_id] = token.encode()
            elif self.byte_level:
                known = all(letter in letters for letter in token)
                table[token_id] = bytes(letters[letter] for letter in token) if known else token.encode()
            elif self._byte_fallback and len(token) == 6 and token.startswith("<0x"):
                table[token_id] = bytes([int(token[3:5], 16)])
            else:
                table[token_id] = token.replace(_SPACE_MARK, " ").encode()
        return table

    def _uncovered_bytes(self) -> frozenset[int]:
        if not self.byte_level:
            return frozenset()
        return frozenset(byte for byte, letter in enumerate(byte_letters()) if letter not in self.ids)

    def control_json(self) -> str:
        """The file's tokenizer without automatic additions (BOS, padding, truncation, dummy space)."""
        return json.dumps(self._plain_spec(), ensure_ascii=False)

    def content_json(self) -> str:
        """The same with every reserved token taken out of reach."""
        spec = self._plain_spec()
        spec["added_tokens"] = [token for token in spec.get("added_tokens") or () if token["id"] not in self.reserved]
        model = spec["model"]
        needed = {part for left, right in _merge_pairs(model) for part in (left, right, left + right)}
        model["vocab"] = {t: i for t, i in model["vocab"].items() if i not in self.reserved or t in needed}
        if model.get("unk_token") not in model["vocab"]:
            model["unk_token"] = None
        return json.dumps(spec, ensure_ascii=False)

    def _plain_spec(self) -> dict[str, Any]:
        spec = {**self._spec, "post_processor": None, "truncation": None, "padding": None}
        spec["model"] = dict(self._spec["model"])
        for key in ("normalizer", "pre_tokenizer"):
            spec[key] = _without_dummy_space(copy.deepcopy(self._spec.get(key)))
        return spec


def _looks_like_markup(token: str) -> bool:
    return (token[:1], token[-1:]) in {("<", ">"), ("[", "]")} and len(token) > 2


def _without_dummy_space(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normaliser or pre-tokeniser that puts nothing in front of the text."""
    if part is None:
        return None
    kind = part.get("type")
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        part.update(prepend_scheme="never", split=part.get("split", True))
        part.pop("add_prefix_space", None)
    elif kind == "ByteLevel":
        part["add_prefix_space"] = False
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            part[key] = [kept for item in part[key] if (kept := _without_dummy_space(item)) is not None]
    return part
