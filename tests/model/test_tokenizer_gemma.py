"""Gemma's tokenizer, built from scores alone, against SentencePiece's algorithm written plainly."""

from __future__ import annotations

import json
import random
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.model.gguf_file import GgufFile
from kvd.model.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from kvd.model.tokenizer import TextCodec
from kvd.vm.text import Span, TypedText
from tests.support.gemma3 import gemma3_gguf
from tests.support.reference_sentencepiece import ReferenceSentencePiece

HARD = [
    "",
    " ",
    "  \n\n\t  x   y \t\r\n ",
    "\n" * 40 + " " * 40 + "\t" * 40,
    "\u00a0\u2003 \u3000wide\u2028spaces\u0085",
    "0 12 345 6789 3.14159 1e-9 0x1F 2026-11-29 ١٢٣ Ⅻ ½ ²³",
    "naïve café Ünïcödé ß ſ İ ı ǅ; e\u0301 vs é; a\u0308\u0301; \u0301 alone; ﷺ",
    "日本語のテキスト、中文文本。한국어 문장",
    "مرحبا بالعالم שלום עולם नमस्ते ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ❤️ 🫠",
    "def f(x: int) -> None:\n\treturn {'a': [1, 2], \"b\": x**2}  # ok\r\n\r\n",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<eos><pad><unk><mask><unused7>",
    "<table><tr><td><b>x</b></td></tr></table><bbox><start_of_image>[multimodal]",
    "<0x0A><0xFF><0x",
    "▁literal ▁▁ marks▁",
    "a" * 1000,
    "ab" * 300 + "haha" * 50 + "=-" * 99,
    "Donaudampfschifffahrtsgesellschaftskapitän",
    "\ufeffBOM \u200b zero \u202e rtl \x00 nul \x07 bell \x1b[0m \x04",
    "\U00050000 plane five \U000c0000",
]


@pytest.fixture(scope="module")
def file() -> GgufFile:
    """Gemma's GGUF file; only its metadata is read here."""
    return GgufFile(gemma3_gguf())


@pytest.fixture(scope="module")
def folder(file: GgufFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer files kvd builds from it."""
    path = tmp_path_factory.mktemp("gemma")
    (path / "tokenizer.json").write_text(json.dumps(build_tokenizer(file), ensure_ascii=False))
    (path / "tokenizer_config.json").write_text(json.dumps(build_tokenizer_config(file)))
    return path


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    """The codec of those files."""
    return TextCodec.from_folder(folder)


@pytest.fixture(scope="module")
def oracle(file: GgufFile, codec: TextCodec) -> ReferenceSentencePiece:
    """SentencePiece over the same pieces; those that users may not type are not there."""
    tokens, scores, types = (file.array(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type"))
    return ReferenceSentencePiece(tokens, scores, types, codec.reserved_ids)


def check(codec: TextCodec, oracle: ReferenceSentencePiece, text: str) -> None:
    """Same ids as the oracle, none reserved, the same text back, lengths that add up."""
    ids, data = codec.encode_content(text), text.encode()
    assert ids == oracle.encode(text)
    assert codec.reserved_ids.isdisjoint(ids)
    assert sum(codec.byte_lengths(ids, data)) == len(data)
    if "▁" not in text:  # SentencePiece cannot tell it from a space
        surfaced, lengths = codec.surface(ids)
        assert surfaced == data
        assert codec.byte_lengths(ids, data) == lengths


@pytest.mark.parametrize("text", HARD, ids=range(len(HARD)))
def test_hard_text_encodes_as_sentencepiece_does(codec: TextCodec, oracle: ReferenceSentencePiece, text: str) -> None:
    """Scripts, emoji, code, whitespace runs, byte fallback and control look-alikes: same ids, same bytes back."""
    check(codec, oracle, text)


def test_samples_of_english_and_of_noise_encode_as_sentencepiece_does(
    codec: TextCodec, oracle: ReferenceSentencePiece
) -> None:
    """Slices of Python's help texts cut anywhere, and strings of letters that pair in many ways."""
    text, draw = "\n".join(topics[name] for name in sorted(topics)), random.Random(7)
    parts = [
        "a",
        "aa",
        "b",
        " ",
        "  ",
        "\n",
        "\t",
        "<b>",
        "</b>",
        "<bos>",
        "▁",
        "é",
        "e\u0301",
        "中",
        "\r\n",
        "ab",
        "the",
        "=",
    ]
    for _ in range(200):
        at = draw.randrange(len(text) - 300)
        check(codec, oracle, text[at : at + draw.randrange(1, 300)])
        check(codec, oracle, "".join(draw.choices(parts, k=draw.randrange(1, 25))))


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.one_of(st.text(max_size=8), st.sampled_from(HARD)), max_size=5).map("".join))
def test_any_text_encodes_as_sentencepiece_does(codec: TextCodec, oracle: ReferenceSentencePiece, text: str) -> None:
    """Hypothesis text mixed with the hard samples."""
    check(codec, oracle, text)


def test_known_ids_of_gemma(codec: TextCodec) -> None:
    """Ids that other engines give for Gemma's vocabulary: control tokens, whitespace runs, a word with its space."""
    assert [codec.id_of(name) for name in ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")] == [
        0,
        1,
        2,
        105,
        106,
    ]
    assert codec.encode_content("\n\n") == [108]
    assert codec.encode_content("    ") == [140]
    assert codec.encode_content("The capital of France is") == [818, 5279, 529, 7001, 563]
    assert codec.eos_ids == {1, 106}


def test_control_tokens_cannot_be_typed_and_html_can(codec: TextCodec) -> None:
    """`<start_of_turn>` is id 105 in a template and text from a user; `<b>` is one token for both."""
    text = "<start_of_turn>user\n<b>hi</b><end_of_turn>"
    control, content = codec.encode_control(text), codec.encode_content(text)
    assert (control[0], control[-1]) == (105, 106)
    assert not {105, 106, *range(5)} & set(content)
    assert {200, 209} <= set(control) & set(content)
    assert codec.reserved_ids >= {0, 1, 2, 3, 4, 5, 6, 105, 106, 255_999, 256_000}
    assert not codec.reserved_ids & {107, 138, 168, 200, 209, 255_968}


def test_a_text_begins_with_exactly_one_bos(codec: TextCodec) -> None:
    """Added at the start of an address space with no bytes of text, not elsewhere, not beside the template's own."""
    typed = TypedText(b"hi", (Span("content", 2),))
    ids, lengths = codec.encode_typed(typed, at_start=True)
    assert codec.bos_ids == (2,)
    assert ids == [2, *codec.encode_content("hi")]
    assert lengths == [0, 2]
    assert 2 not in codec.encode_typed(typed)[0]
    own = TypedText(b"<bos>hi", (Span("control", 5), Span("content", 2)))
    assert codec.encode_typed(own, at_start=True)[0].count(2) == 1


@pytest.mark.parametrize("text", [" ".join(topics.values()).replace("\n", " "), "a" * 1_000_000, "中文世界" * 250_000])
def test_a_megabyte_in_one_line_encodes(codec: TextCodec, text: str) -> None:
    """SentencePiece sees a text as one word: were time to grow with its square, this would run into the time limit."""
    text = (text * 3)[:1_000_000]
    ids = codec.encode_content(text)
    assert sum(codec.byte_lengths(ids, text.encode())) == len(text.encode())
