"""What a `tokenizer.json` says about each token: its bytes, whether it is control, and the two encoders it yields.

Two tokenizers are built from one file. The *control* one is the file's own, for template text. The *content* one has
the control tokens taken out, so that no text a user types can become one, and adds no dummy space in front: kvd
encodes suffixes, and a suffix is not the start of a text.

Byte-level BPE (GPT-2 and later) is exact. So is SentencePiece-style BPE with byte fallback, but for `▁` in a text,
which its tokens cannot tell from a space: byte lengths then follow the encoder's character offsets. Other normalisers
may change text too, with the same consequence. May import kvd.model.errors only.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from kvd.model.errors import UnsupportedModel

_SPACE_MARK: Final = "▁"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of byte fallback; the encoder yields no other spelling (lower case is a token like any other)."""

_HTML_ELEMENTS: Final = frozenset(
    re.findall(
        r"\w+",
        "a b blockquote body br caption code dd del div dl dt em footer form h1 h2 h3 h4 h5 h6 head header hr html i"
        " iframe img input ins kbd label li link main mark math meta nav ol option p pre q s samp script section"
        " select small span strong style sub sup svg table tbody td textarea tfoot th thead title tr u ul var video",
    )
)
"""Elements of HTML that vocabularies have tokens for: text that users type, no markup of a template."""


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


def merge_pairs(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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
        reserved: ids content may never yield: `control` and other added tokens that look like a template's markup
            (HTML tags do not: they are text).
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
        self._added = {token["id"]: token for token in added}
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
            if token_id in self._added:
                marked = not self.byte_level and self._added[token_id].get("normalized")
                table[token_id] = (token.replace(_SPACE_MARK, " ") if marked else token).encode()
            elif self.byte_level:
                known = all(letter in letters for letter in token)
                table[token_id] = bytes(letters[letter] for letter in token) if known else token.encode()
            elif self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
                table[token_id] = bytes.fromhex(byte[1])
            else:
                table[token_id] = token.replace(_SPACE_MARK, " ").encode()
        return table

    def _uncovered_bytes(self) -> frozenset[int]:
        if not self.byte_level:
            return frozenset()
        return frozenset(byte for byte, letter in enumerate(byte_letters()) if letter not in self.ids)

    def content_can_share_the_model(self) -> bool:
        """Whether the BPE model can yield no reserved id by itself, so that taking added tokens away is enough.

        It can where it takes whole words that are tokens as they are, where unknown characters become the unknown
        token, and where a reserved token is a single character or byte. What merges make is no difference:
        `content_json` has to keep those tokens too.
        """
        model = self._spec["model"]
        all_bytes = self._byte_fallback and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
        unknown = model.get("unk_token") is not None and not all_bytes
        single = any(
            (len(token) == 1 or _BYTE_TOKEN.fullmatch(token)) and token_id in self.reserved
            for token, token_id in model["vocab"].items()
        )
        return not (unknown or single or model.get("ignore_merges"))

    def content_json(self) -> str:
        """`plain_spec` as JSON, with every reserved token taken out of reach."""
        spec = self.plain_spec()
        spec["added_tokens"] = [token for token in spec.get("added_tokens") or () if token["id"] not in self.reserved]
        model = spec["model"]
        needed = {part for left, right in merge_pairs(model) for part in (left, right, left + right)}
        model["vocab"] = {t: i for t, i in model["vocab"].items() if i not in self.reserved or t in needed}
        if model.get("unk_token") not in model["vocab"]:
            model["unk_token"] = None
        return json.dumps(spec, ensure_ascii=False)

    def plain_spec(self) -> dict[str, Any]:
        """The file's tokenizer without automatic additions (BOS, padding, truncation, dummy space)."""
        spec = {**self._spec, "post_processor": None, "truncation": None, "padding": None}
        spec["model"] = dict(self._spec["model"])
        for key in ("normalizer", "pre_tokenizer"):
            spec[key] = _without_dummy_space(copy.deepcopy(self._spec.get(key)))
        return spec


def _looks_like_markup(token: str) -> bool:
    """Whether a token that is no control token still is one for templates, such as `<tool_call>`; HTML is text."""
    if (token[:1], token[-1:]) not in {("<", ">"), ("[", "]")} or len(token) <= 2:
        return False
    return token[1:-1].removeprefix("/") not in _HTML_ELEMENTS or token[0] != "<"


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
