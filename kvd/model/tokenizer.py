"""TextCodec: the only door between text and token ids for the rest of kvd.

Promises. Content never yields a control id, whatever it spells. Every token has a byte length, and the lengths of an
encoded text add up to its UTF-8 bytes, also where the tokenizer drops or rewrites bytes: dropped bytes count for the
next token (the last one at the end). Generated ids surface as valid UTF-8 (see `kvd.model.incremental`).

May import kvd.errors, kvd.vm.text and this package.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Encoding, Tokenizer

from kvd.errors import InternalError, InvalidText
from kvd.model.encoders import build_encoders
from kvd.model.errors import ModelIncomplete, UntokenizableText
from kvd.model.folder import read_object
from kvd.model.incremental import IncrementalDecoder
from kvd.model.vocabulary import Vocabulary, token_ids
from kvd.vm.text import TypedText

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""`tokenizers` would start a thread a core for a batch, even of one text."""

END_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)
"""Control tokens that end a generation wherever a vocabulary has them, beside those the folder names: instruct models
are often published with only one of their two end tokens in `config.json`."""


def utf8(text: str) -> bytes:
    """`text` as UTF-8.

    Raises:
        InvalidText: it holds lone surrogates; `data` has the position of the first.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        message = f"text holds a lone surrogate at character {error.start}; send valid Unicode"
        raise InvalidText(message, character=error.start) from None


class TextCodec:
    """Encodes and decodes for one model. Immutable and safe to share between threads.

    Args:
        tokenizer: the parsed `tokenizer.json`.
        eos_ids: ids that end a generation, beside `END_TOKENS`.
        bos_ids: ids that a new agent's text starts with (the BOS policy): empty for models that add none, such as
            SmolLM2. They stand for no bytes of text.

    Attributes:
        eos_ids: ids that end a generation.
        bos_ids: as given.

    Raises:
        UnsupportedModel: the tokenizer is not BPE.
    """

    def __init__(
        self, tokenizer: Mapping[str, Any], *, eos_ids: Iterable[int] = (), bos_ids: Sequence[int] = ()
    ) -> None:
        vocabulary = Vocabulary(tokenizer)
        self._vocabulary = vocabulary
        self._control, self._content = build_encoders(vocabulary)
        ends = {vocabulary.ids[name] for name in END_TOKENS if vocabulary.ids.get(name) in vocabulary.control}
        self.eos_ids = frozenset(eos_ids) | ends
        self.bos_ids = tuple(bos_ids)
        literals = [vocabulary.token_bytes(i).decode() for i in vocabulary.reserved]
        self._border_letters = frozenset(letter for text in literals if text for letter in (text[0], text[-1]))

    @classmethod
    def from_folder(cls, folder: Path) -> TextCodec:
        """The codec of a model folder, from `tokenizer.json` and what its configuration files say of BOS and EOS.

        Raises:
            ModelCorrupt: a file is missing or not JSON.
            UnsupportedModel: the tokenizer is not BPE.
        """
        spec = read_object(folder / "tokenizer.json")
        settings = _read_optional(folder / "tokenizer_config.json")
        configs = [_read_optional(folder / name) for name in ("config.json", "generation_config.json")]
        ids = token_ids(spec)
        ends: set[int] = set()
        for config in configs:
            value = config.get("eos_token_id")
            ends.update(value if isinstance(value, list) else () if value is None else (value,))
        for key in ("eos_token", "eot_token"):
            ends.update(ids[t] for t in [token_text(settings.get(key))] if t in ids)
        bos = token_text(settings.get("bos_token"))
        adds_bos = bool(settings.get("add_bos_token", _adds_bos(spec, bos)))
        return cls(spec, eos_ids=ends, bos_ids=(ids[bos],) if adds_bos and bos in ids else ())

    @property
    def token_count(self) -> int:
        """Ids the tokenizer names; a model's output may have more rows, which surface as nothing."""
        return self._vocabulary.token_count

    @property
    def reserved_ids(self) -> frozenset[int]:
        """Ids that content never yields."""
        return self._vocabulary.reserved

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Token strings to ids, added tokens included."""
        return self._vocabulary.ids

    def is_control(self, token_id: int) -> bool:
        """Whether the id is a special token (or names none): it surfaces as nothing."""
        return token_id in self._vocabulary.control or not 0 <= token_id < self.token_count

    def id_of(self, token: str) -> int | None:
        """Id of a token by its string in the vocabulary, or None."""
        return self._vocabulary.ids.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of a token, often a part of a character; a control token's literal; empty for an unknown id."""
        return self._vocabulary.token_bytes(token_id)

    def may_spell_control(self, text: str) -> bool:
        """Whether `text` holds a letter that control tokens begin or end with, so could take part in spelling one."""
        return not self._border_letters.isdisjoint(text)

    def encode_content(self, text: str) -> list[int]:
        """Ids of text a client typed; control look-alikes stay text.

        Raises:
            InvalidText: lone surrogates.
        """
        utf8(text)
        return self._encode(self._content, text, content=True).ids

    def encode_control(self, text: str) -> list[int]:
        """Ids of template text; control literals become control tokens. Never for text a client typed.

        Raises:
            InvalidText: lone surrogates.
        """
        utf8(text)
        return self._encode(self._control, text, content=False).ids

    def encode_with_starts(self, text: str, *, content: bool) -> tuple[list[int], list[int]]:
        """Ids of content or of template text, and the character at which each begins (several may share one)."""
        encoding = self._encode(self._content if content else self._control, text, content=content)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def byte_lengths(self, ids: Sequence[int], text: bytes) -> list[int]:
        """Bytes of `text` that each of `ids` stands for, where `ids` came from encoding `text` as content or control.

        Returns:
            One length a token; they add up to `len(text)`.

        Raises:
            UntokenizableText: there are bytes but no ids.
            InternalError: the ids do not come from this text.
        """
        lengths = self._align(ids, text)
        if lengths is None:
            for tokenizer, content in ((self._content, True), (self._control, False)):
                encoding = self._encode(tokenizer, text.decode(), content=content)
                if encoding.ids == list(ids):
                    lengths = _offset_lengths(encoding, text)
        if lengths is None:
            raise InternalError("token ids and text do not belong together", ids=len(ids), text_bytes=len(text))
        if text and not lengths:
            raise UntokenizableText("the tokenizer has no token for this text", text_bytes=len(text))
        return lengths

    def encode_typed(self, typed: TypedText, *, at_start: bool = False) -> tuple[list[int], list[int]]:
        """Encode typed text span by span: control spans with control tokens, all others without.

        Args:
            typed: spans of valid UTF-8.
            at_start: the text begins an address space: the BOS policy applies, unless the text brings its own BOS.

        Returns:
            (ids, bytes of text each id stands for); the lengths add up to `len(typed.data)`.

        Raises:
            InvalidText: a span is not UTF-8.
            UntokenizableText: there is text but no byte of it has a token.
        """
        ids: list[int] = []
        lengths: list[int] = []
        carried = start = 0  # bytes of spans that yielded no token wait for the next one
        for span in typed.spans:
            data = typed.data[start : start + span.text_bytes]
            start += span.text_bytes
            span_ids, span_lengths = self._encode_span(data, content=span.kind != "control")
            if span_ids:
                span_lengths[0] += carried
                carried = 0
            else:
                carried += len(data)
            ids += span_ids
            lengths += span_lengths
        if carried and not ids:
            raise UntokenizableText("the tokenizer has no token for this text", text_bytes=carried)
        if carried:
            lengths[-1] += carried
        if at_start and self.bos_ids and tuple(ids[: len(self.bos_ids)]) != self.bos_ids:
            ids[:0] = self.bos_ids
            lengths[:0] = [0] * len(self.bos_ids)
        return ids, lengths

    def surface(self, ids: Iterable[int]) -> tuple[bytes, list[int]]:
        """The text that generated ids stand for and the bytes of it that each id stands for.

        Returns:
            (valid UTF-8, lengths); the lengths add up to the bytes. Control tokens have length 0.
        """
        decoder = self.decoder()
        text = b"".join([decoder.push(token_id) for token_id in ids])
        text += decoder.flush()
        return text, decoder.lengths

    def decoder(self) -> IncrementalDecoder:
        """A decoder for streaming; what it returns adds up to `surface` of the same ids."""
        return IncrementalDecoder(self)

    def _encode(self, tokenizer: Tokenizer, text: str, *, content: bool) -> Encoding:
        # not `encode`: that one holds Python's lock for seconds of a long text, and everybody waits, the event loop too
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
        if content and not self._vocabulary.reserved.isdisjoint(encoding.ids):
            raise InternalError("content encoded to a control token", text_bytes=len(text.encode()))
        return encoding

    def _encode_span(self, data: bytes, *, content: bool) -> tuple[list[int], list[int]]:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise InvalidText(f"text is not UTF-8 at byte {error.start}", byte=error.start) from None
        encoding = self._encode(self._content if content else self._control, text, content=content)
        ids: list[int] = encoding.ids
        lengths = self._align(ids, data)
        return ids, _offset_lengths(encoding, data) if lengths is None else lengths

    def _align(self, ids: Sequence[int], text: bytes) -> list[int] | None:
        """Lengths by walking the bytes of tokens and text together; None where the encoder rewrote the text."""
        pieces = [self._vocabulary.token_bytes(token_id) for token_id in ids]
        if b"".join(pieces) == text:
            return [len(piece) for piece in pieces]
        uncovered = self._vocabulary.uncovered
        lengths: list[int] = []
        position = 0
        for piece in pieces:
            start = position
            for byte in piece:
                while position < len(text) and text[position] != byte and text[position] in uncovered:
                    position += 1
                if position == len(text) or text[position] != byte:
                    return None
                position += 1
            lengths.append(position - start)
        if not uncovered.issuperset(text[position:]):
            return None
        if lengths:
            lengths[-1] += len(text) - position
        return lengths


def _offset_lengths(encoding: Encoding, text: bytes) -> list[int]:
    """Lengths from the encoder's character offsets, for text that it normalised.

    Each token takes the bytes from the end of the one before to its own end; where several tokens share a character the
    first takes it all; the last token takes what is left.
    """
    ends = [0]
    for letter in text.decode():
        ends.append(ends[-1] + len(letter.encode()))
    lengths: list[int] = []
    covered = 0
    for _, end in encoding.offsets:
        reached = max(covered, ends[end])
        lengths.append(reached - covered)
        covered = reached
    if lengths:
        lengths[-1] += len(text) - covered
    return lengths


def token_text(value: object) -> str | None:
    """A token as `tokenizer_config.json` spells it: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _adds_bos(spec: Mapping[str, Any], bos: str | None) -> bool:
    """Whether the tokenizer's post-processor puts `bos` first."""
    processor = spec.get("post_processor") or {}
    for part in (processor, *processor.get("processors", ())):
        if part.get("type") == "TemplateProcessing":
            first: Mapping[str, Any] = next(iter(part.get("single") or ()), {})
            return (first.get("SpecialToken") or {}).get("id") == bos
    return False


def _read_optional(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except ModelIncomplete:
        return {}
