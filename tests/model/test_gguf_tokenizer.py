"""Tokenizers of GGUF files without a large model: both kinds, their stated defaults, and refusals by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.gguf_file import GgufFile
from kvd.model.gguf_import import import_gguf
from kvd.model.gguf_pieces import TokenType
from kvd.model.gguf_sentencepiece import sentencepiece_spec
from kvd.model.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from kvd.model.progress import SilentReporter
from kvd.model.tokenizer import TextCodec
from tests.support.random_gguf import PIECES, write_random_gguf
from tests.support.reference_sentencepiece import ReferenceSentencePiece


def codec_of(path: Path, metadata: dict[str, Any] | None = None, tokenizer: str = "llama") -> TextCodec:
    """The codec of an imported file of one block."""
    folder = path / "folder"
    folder.mkdir()
    file = write_random_gguf(path / "m.gguf", layers=1, tokenizer=tokenizer, metadata=metadata)
    import_gguf(file, folder, dtype="float32", reporter=SilentReporter())
    return TextCodec.from_folder(folder)


def names(codec: TextCodec, text: str) -> list[str]:
    """Pieces of content, with their spaces."""
    return [codec.token_bytes(i).decode(errors="backslashreplace") for i in codec.encode_content(text)]


def test_pieces_join_by_score_not_by_order(tmp_path: Path) -> None:
    """`th` comes first, so `the` never becomes t + he; runs of blanks and HTML are matched whole; bytes fall back."""
    codec = codec_of(tmp_path)
    assert names(codec, "the the") == ["th", "e", " the"]
    assert names(codec, "  \n\n\n<b>ß日") == ["  ", "\n\n", "\n", "<b>", "\\xc3", "\\x9f", "日"]
    assert "<bos>" not in names(codec, "<bos><start_of_image>")
    assert codec.reserved_ids == {0, 1, 2, 3, 8}


def test_small_vocabularies_encode_as_sentencepiece_does() -> None:
    """Seeded vocabularies of two letters, where pieces overlap in every way: same ids as the plain algorithm."""
    for seed in range(60):
        draw = random.Random(seed)
        pieces = sorted({"".join(draw.choices("ab", k=draw.randrange(2, 6))) for _ in range(12)})
        draw.shuffle(pieces)
        tokens = ["<unk>", *pieces, "a", "b"]
        types = [int(TokenType.UNKNOWN), *[int(TokenType.NORMAL)] * (len(tokens) - 1)]
        scores = [-float(i) for i in range(len(tokens))]
        codec = TextCodec(sentencepiece_spec(tokens, scores, types, unknown="<unk>", space_prefix=False))
        oracle = ReferenceSentencePiece(tokens, scores, types)
        for _ in range(40):
            text = "".join(draw.choices("ab", k=draw.randrange(1, 20)))
            assert codec.encode_content(text) == oracle.encode(text), (pieces, text)


def test_bos_and_space_prefix_have_sentencepieces_defaults(tmp_path: Path) -> None:
    """A silent file gets a BOS and, in its own encoder, a space in front; kvd encodes suffixes and adds none."""
    silent = {"tokenizer.ggml.add_space_prefix": None}
    codec = codec_of(tmp_path, silent)
    assert codec.bos_ids == (2,)
    own = Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json"))
    assert own.encode("the").tokens == ["▁the"]
    assert own.decode(own.encode("the the").ids) == "the the"
    assert names(codec, "the") == ["th", "e"]


def test_a_stated_bos_policy_wins(tmp_path: Path) -> None:
    """`add_bos_token` false; and byte-level vocabularies add none unless they say so."""
    assert codec_of(tmp_path, {"tokenizer.ggml.add_bos_token": False}).bos_ids == ()
    (tmp_path / "b").mkdir()
    assert codec_of(tmp_path / "b", {"tokenizer.ggml.bos_token_id": 1}, "gpt2").bos_ids == ()


@pytest.mark.parametrize(
    ("pre", "stated", "bos_ids"),
    [(pre, None, (1,)) for pre in ("llama3", "llama-v3", "llama-bpe")]
    + [("llama-bpe", False, ()), ("qwen2", None, ()), ("gpt-2", True, (1,))],
)
def test_llama3_adds_a_bos_unless_it_is_told_not_to(
    tmp_path: Path, pre: str, stated: bool | None, bos_ids: tuple[int, ...]
) -> None:
    """Files of Llama 3 leave `add_bos_token` out; their models were trained with a BOS in front of every text."""
    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": stated}
    assert codec_of(tmp_path, metadata, "gpt2").bos_ids == bos_ids


def test_unused_tokens_stand_for_nothing(tmp_path: Path) -> None:
    """Padding of a vocabulary surfaces as nothing and cannot be typed."""
    kinds = [kind for _, _, kind in PIECES]
    kinds[-1] = int(TokenType.UNUSED)
    codec = codec_of(tmp_path, {"tokenizer.ggml.token_type": kinds})
    assert codec.is_control(len(PIECES) - 1)
    assert names(codec, "é") == ["\\xc3", "\\xa9"]


def test_qwens_text_is_composed_first(tmp_path: Path) -> None:
    """Its models saw NFC only; the bytes of the text still add up."""
    codec = codec_of(tmp_path, {"tokenizer.ggml.pre": "qwen2"}, "gpt2")
    assert codec.encode_content("e\u0301") == codec.encode_content("é")
    assert sum(codec.byte_lengths(codec.encode_content("e\u0301"), "e\u0301".encode())) == 3


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_named_pre_tokeniser_loads_and_round_trips(tmp_path: Path, pre: str) -> None:
    """Numbers, contractions, line ends: nothing is lost; numbers split as the name says."""
    codec = codec_of(tmp_path, {"tokenizer.ggml.pre": pre}, "gpt2")
    text = "I'll pay 1234 \r\n\n for  the\tcafé!"
    assert codec.surface(codec.encode_content(text))[0] == text.encode()


@pytest.mark.parametrize(
    ("error", "tokenizer", "metadata", "match"),
    [
        (UnsupportedModel, "gpt2", {"tokenizer.ggml.model": "t5"}, r"'t5'.*supported: gpt2, llama"),
        (UnsupportedModel, "gpt2", {"tokenizer.ggml.model": None}, r"'none'.*supported: gpt2, llama"),
        (UnsupportedModel, "gpt2", {"tokenizer.ggml.pre": "tekken"}, r"'tekken'.*supported: smollm"),
        (UnsupportedModel, "gpt2", {"tokenizer.ggml.merges": None}, "supported: gpt2 with merges"),
        (ModelCorrupt, "gpt2", {"tokenizer.ggml.merges": ["nope nope"]}, "the merge 'nope nope'"),
        (ModelCorrupt, "gpt2", {"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
        (ModelCorrupt, "llama", {"tokenizer.ggml.scores": [0.0]}, "1 scores"),
        (ModelCorrupt, "llama", {"tokenizer.ggml.scores": None}, "0 scores"),
        (ModelCorrupt, "llama", {"tokenizer.ggml.tokens": ["a"] * len(PIECES)}, "tokens twice"),
        (ModelCorrupt, "llama", {"tokenizer.ggml.tokens": list(range(len(PIECES)))}, "expected an array of str"),
    ],
    ids=str,
)
def test_unknown_and_broken_tokenizers_are_refused_before_anything_is_written(
    tmp_path: Path, error: type[Exception], tokenizer: str, metadata: dict[str, Any], match: str
) -> None:
    """The message names what is supported, or what does not fit."""
    file = write_random_gguf(tmp_path / "m.gguf", layers=1, tokenizer=tokenizer, metadata=metadata)
    (tmp_path / "out").mkdir()
    with pytest.raises(error, match=match):
        import_gguf(file, tmp_path / "out", dtype="float32", reporter=SilentReporter())
    assert list((tmp_path / "out").iterdir()) == []


def test_the_files_json_is_what_the_tokenizers_package_reads(tmp_path: Path) -> None:
    """Other programs that open the folder get the same ids: the encoders kvd assembles are no private dialect."""
    spec = build_tokenizer(GgufFile(write_random_gguf(tmp_path / "m.gguf", layers=0, tokenizer="llama")))
    whole, codec = Tokenizer.from_str(json.dumps(spec)), TextCodec(spec)
    text = "the  <b>aaaa</b>\n\nber <eos>日本"
    assert whole.encode(text, add_special_tokens=False).ids == codec.encode_control(text)
    assert 1 in codec.encode_control(text)


def test_a_token_of_absurd_length_is_refused_at_once(tmp_path: Path) -> None:
    """Splitting a piece costs the square of its length, so a file must not choose it; 512 letters are enough."""
    pieces, types = ["a", "a" * 512], [int(TokenType.NORMAL)] * 2
    assert sentencepiece_spec(pieces, [0.0, 0.0], types, unknown=None, space_prefix=False)["model"]["merges"] == []
    with pytest.raises(ModelCorrupt, match="token of 300000 letters"):
        sentencepiece_spec(["a", "a" * 300_000], [0.0, 0.0], types, unknown=None, space_prefix=False)
