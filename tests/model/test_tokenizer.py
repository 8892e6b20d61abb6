"""TextCodec on the tiny byte-level tokenizer, on a rewriting normaliser, and on a SentencePiece-style one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvd.errors import InternalError, InvalidText
from kvd.model.errors import ModelCorrupt, UnsupportedModel, UntokenizableText
from kvd.model.tokenizer import TextCodec
from kvd.model.vocabulary import Vocabulary
from kvd.vm.text import Span, TypedText
from tests.support.tiny_model import CONTROL_TOKENS

text_with_look_alikes = st.lists(st.one_of(st.text(max_size=6), st.sampled_from([*CONTROL_TOKENS, "<|", "|>", " the"])))


@pytest.fixture(scope="module")
def tiny_spec(tiny_folder: Path) -> dict[str, Any]:
    """The tiny model's `tokenizer.json`."""
    return json.loads((tiny_folder / "tokenizer.json").read_text())


@pytest.fixture(scope="module")
def piece_spec() -> dict[str, Any]:
    """A SentencePiece-style BPE: dummy space, `▁` for spaces, byte fallback, BOS by the post-processor."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abehlo", "he", "▁he", "ll"]
    specials = [
        {
            "id": i,
            "content": t,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, t in enumerate(tokens[:3])
    ]
    return {
        "version": "1.0",
        "added_tokens": specials,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteFallback"},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": ["h e", "▁ he", "l l"],
        },
    }


@given(parts=text_with_look_alikes)
def test_content_round_trips_and_never_yields_a_control_id(tiny_codec: TextCodec, parts: list[str]) -> None:
    """Whatever a user types comes back byte for byte, without a reserved id."""
    text = "".join(parts)
    ids = tiny_codec.encode_content(text)
    assert tiny_codec.reserved_ids.isdisjoint(ids)
    assert tiny_codec.surface(ids)[0] == text.encode()
    assert sum(tiny_codec.byte_lengths(ids, text.encode())) == len(text.encode())


@given(parts=st.lists(st.tuples(st.sampled_from(["control", "content", "generated"]), st.text(max_size=6)), max_size=6))
def test_typed_text_has_a_length_for_each_id(tiny_codec: TextCodec, parts: list[tuple[Any, str]]) -> None:
    """The lengths of typed text add up, span by span."""
    data = "".join(text for _, text in parts).encode()
    typed = TypedText(data, tuple(Span(kind, len(text.encode())) for kind, text in parts))
    ids, lengths = tiny_codec.encode_typed(typed)
    assert len(ids) == len(lengths)
    assert sum(lengths) == len(data)


def test_only_control_spans_may_spell_control_tokens(tiny_codec: TextCodec) -> None:
    """The same bytes are id 2 as control and several ids as content."""
    data = b"<|im_end|>"
    assert tiny_codec.encode_typed(TypedText(data, (Span("control", 10),))) == ([2], [10])
    for kind in ("content", "generated"):
        ids, _ = tiny_codec.encode_typed(TypedText(data, (Span(kind, 10),)))
        assert 2 not in ids


def test_lone_surrogates_are_refused_with_their_place(tiny_codec: TextCodec) -> None:
    """A lone surrogate is `invalid_text` at every door."""
    for encode in (tiny_codec.encode_content, tiny_codec.encode_control):
        with pytest.raises(InvalidText) as caught:
            encode("ab\ud800c")
        assert caught.value.data == {"character": 2}
    with pytest.raises(InvalidText):
        tiny_codec.encode_typed(TypedText(b"\xff", (Span("content", 1),)))


def test_control_tokens_have_bytes_but_no_surface(tiny_codec: TextCodec) -> None:
    """`token_bytes` of a control token is its literal; it surfaces as nothing; unknown ids too."""
    assert tiny_codec.token_bytes(2) == b"<|im_end|>"
    the = tiny_codec.id_of("Ġthe")
    assert the is not None
    assert tiny_codec.surface([1, the, 2, 10**6]) == (b" the", [0, 4, 0, 0])
    assert tiny_codec.is_control(10**6)
    assert not tiny_codec.is_control(the)


def test_end_tokens_and_bos_policy_come_from_the_folder(tiny_codec: TextCodec) -> None:
    """ChatML ends at `<|im_end|>` and `<|endoftext|>`; the tiny model, as SmolLM2, adds no BOS."""
    assert tiny_codec.eos_ids == {0, 2}
    assert tiny_codec.bos_ids == ()


def test_added_tokens_that_are_text_surface_but_cannot_be_typed(tiny_spec: dict[str, Any]) -> None:
    """A non-special `<tool_call>` is visible in generated text, and content never yields its id."""
    spec = copy.deepcopy(tiny_spec)
    new_id = len(spec["model"]["vocab"])
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": new_id, "content": "<tool_call>", "special": False})
    codec = TextCodec(spec)
    assert codec.encode_control("<tool_call>") == [new_id]
    assert new_id not in codec.encode_content("<tool_call>")
    assert codec.surface([new_id]) == (b"<tool_call>", [11])


def test_a_rewriting_normaliser_keeps_lengths_that_add_up(tiny_spec: dict[str, Any]) -> None:
    """With NFC the ids stand for other bytes than the text; lengths then follow the encoder's offsets."""
    codec = TextCodec({**tiny_spec, "normalizer": {"type": "NFC"}})
    text = "x e\u0301 日 y"
    ids, lengths = codec.encode_typed(TypedText(text.encode(), (Span("content", len(text.encode())),)))
    assert b"".join(codec.token_bytes(i) for i in ids) == "x é 日 y".encode()
    assert sum(lengths) == len(text.encode())
    assert codec.byte_lengths(ids, text.encode()) == lengths


def test_text_without_any_token_is_refused(tiny_spec: dict[str, Any]) -> None:
    """Bytes the vocabulary lacks are dropped; text of nothing else is refused."""
    spec = copy.deepcopy(tiny_spec)
    del spec["model"]["vocab"]["Ą"]  # byte 04
    codec = TextCodec(spec)
    assert codec.byte_lengths(codec.encode_content("\x04a"), b"\x04a") == [2]
    with pytest.raises(UntokenizableText):
        codec.encode_typed(TypedText(b"\x04", (Span("content", 1),)))
    with pytest.raises(UntokenizableText):
        codec.byte_lengths([], b"\x04")


def test_ids_of_another_text_are_our_bug(tiny_codec: TextCodec) -> None:
    """Lengths of ids that do not belong to the text are never invented."""
    with pytest.raises(InternalError):
        tiny_codec.byte_lengths(tiny_codec.encode_content("other"), b"text")


def test_sentencepiece_style_suffixes_get_no_dummy_space(piece_spec: dict[str, Any]) -> None:
    """`hello` is a suffix, not the start of a text; bytes fall back; the file's own encoder would add a space."""
    codec = TextCodec(piece_spec)
    names = [codec.token_bytes(i) for i in codec.encode_content("hello he é")]
    assert names == [b"he", b"ll", b"o", b" he", b" ", b"\xc3", b"\xa9"]
    assert codec.surface(codec.encode_content("hello he é"))[0] == "hello he é".encode()
    own = Tokenizer.from_str(json.dumps(piece_spec)).encode("hello", add_special_tokens=False).tokens
    assert own[0] == "▁he"


@pytest.mark.parametrize("odd", ["<0xZZ>", "<0x0a>", "<0x+1>", "<0x 1>", "<0x123", "<0xA>"])
def test_only_the_256_byte_tokens_stand_for_bytes(piece_spec: dict[str, Any], odd: str) -> None:
    """A token that merely begins like one is text as it is spelt, and no byte of a text leads to it."""
    spec = copy.deepcopy(piece_spec)
    new_id = len(spec["model"]["vocab"])
    spec["model"]["vocab"][odd] = new_id
    codec = TextCodec(spec)
    assert codec.token_bytes(new_id) == odd.encode()
    assert codec.token_bytes(spec["model"]["vocab"]["<0xFF>"]) == b"\xff"
    for reserved, shares in ((odd, True), ("<0x0A>", False)):
        token = {"id": spec["model"]["vocab"][reserved], "content": reserved, "special": True, "normalized": False}
        vocabulary = Vocabulary({**spec, "added_tokens": [*spec["added_tokens"], token]})
        assert vocabulary.content_can_share_the_model() == shares


def test_bos_is_added_at_the_start_once(piece_spec: dict[str, Any], tmp_path: Path) -> None:
    """A model that wants BOS gets it at position 0 with no bytes of text, unless the template brings it."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(piece_spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    codec = TextCodec.from_folder(tmp_path)
    assert codec.bos_ids == (1,)
    assert codec.eos_ids == {2}
    plain = TypedText(b"he", (Span("content", 2),))
    assert codec.encode_typed(plain, at_start=True)[1] == [0, 2]
    assert codec.encode_typed(plain)[1] == [2]
    own = TypedText(b"<s>he", (Span("control", 3), Span("content", 2)))
    assert codec.encode_typed(own, at_start=True) == ([1, *codec.encode_content("he")], [3, 2])


def test_other_tokenizer_models_are_refused(tiny_spec: dict[str, Any], tmp_path: Path) -> None:
    """Unigram is not BPE; a folder without tokenizer.json is no model."""
    with pytest.raises(UnsupportedModel, match="BPE"):
        TextCodec({**tiny_spec, "model": {"type": "Unigram", "vocab": []}})
    with pytest.raises(ModelCorrupt, match=r"tokenizer\.json"):
        TextCodec.from_folder(tmp_path)
