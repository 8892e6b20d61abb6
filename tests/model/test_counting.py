"""Counting in windows says what encoding the whole says."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.model.counting import RUN, count_tokens
from kvd.model.tokenizer import TextCodec
from kvd.vm.text import Span, SpanKind, TypedText
from tests.support.tiny_model import CONTROL_TOKENS

WORDS = (
    "the",
    "time",
    " of",
    "\n",
    "\n\n",
    "   ",
    "é",
    "漢字",
    "\U0001f600",
    "x = 1",
    "...",
    "\t\t",
    "12345",
    "<|im_end|>",
)


@pytest.fixture(scope="module")
def codec(tiny_folder: Path) -> TextCodec:
    """The tiny model's, with a BOS."""
    plain = TextCodec.from_folder(tiny_folder)
    assert not plain.bos_ids
    return plain


def typed(*spans: tuple[SpanKind, str]) -> TypedText:
    """Typed text of spans."""
    data = [text.encode() for _, text in spans]
    return TypedText(b"".join(data), tuple(Span(kind, len(each)) for (kind, _), each in zip(spans, data, strict=True)))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(200, 900))
def test_windows_add_up(codec: TextCodec, seed: int, window: int) -> None:
    """P40: whatever the windows cut through: words, characters of several bytes, runs of white space."""
    random = Random(seed)
    text = "".join(random.choice(WORDS) + random.choice(("", " ")) for _ in range(random.randrange(900)))
    prompt = typed(("control", CONTROL_TOKENS[0]), ("content", text), ("control", CONTROL_TOKENS[1] + "\n"))
    whole = codec.encode_typed(prompt)[0]
    assert count_tokens(codec, prompt, window=window, overlap=150) == len(whole)


ENDLESS = (
    *(
        "a" * 5000,
        " " * 5000,
        "\n" * 3000,
        "ab" * 2500,
        "abc" * 1500,
        "é" * 3000,
        "漢字" * 1500,
        "1" * 3000,
        "=-" * 2000,
    ),
    "".join(Random(7).choices("abcdefghijklmnopqrstuvwxyz", k=4000)),
    "".join(Random(8).choices("ab", k=4000)),
)
"""Words longer than any overlap below: periodic ones of one and of several letters, white space, random ones."""


@pytest.mark.parametrize(("window", "overlap"), [(500, 60), (700, 150), (1500, 300)])
def test_texts_in_which_windows_find_no_step(codec: TextCodec, window: int, overlap: int) -> None:
    """P40: endless words: windows are joined until they cover them, or meet where both say the same; exact always."""
    for text in (*ENDLESS, ENDLESS[-2] + "a" * 3000, "the of " * 40 + ENDLESS[-2] + " of" * 900, "", "the"):
        counted = count_tokens(codec, typed(("content", text)), window=window, overlap=overlap)
        assert counted == len(codec.encode_content(text)), text[:20]


def test_windows_of_an_endless_word_are_several(codec: TextCodec) -> None:
    """Where it repeats they meet, and where they never meet they are joined: the counts above come from windows."""
    seen: list[int] = []
    encode = codec.encode_with_starts

    def watched(text: str, *, content: bool) -> tuple[list[int], list[int]]:
        seen.append(len(text))
        return encode(text, content=content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "encode_with_starts", watched)
        count_tokens(codec, typed(("content", "a" * 5000)), window=500, overlap=100)
        assert len(seen) > 5
        assert max(seen) < 5000


def test_bos_counts_once(tiny_folder: Path) -> None:
    """As `encode_typed`: at the start of an address space only, and not where the text brings its own."""
    plain = TextCodec.from_folder(tiny_folder)
    bos = plain.id_of(CONTROL_TOKENS[0])
    assert bos is not None
    codec = TextCodec.from_folder(tiny_folder)
    codec.bos_ids = (bos,)
    for prompt in (typed(), typed(("content", "the")), typed(("control", CONTROL_TOKENS[0]), ("content", "the"))):
        for at_start in (False, True):
            assert count_tokens(codec, prompt, at_start=at_start) == len(
                codec.encode_typed(prompt, at_start=at_start)[0]
            )


def test_a_count_can_be_left(codec: TextCodec) -> None:
    """Between two windows."""

    class Left(Exception):
        """The caller went."""

    def pause() -> None:
        raise Left

    text = " ".join(WORDS) * 200
    with pytest.raises(Left):
        count_tokens(codec, typed(("content", text)), pause=pause, window=40 * RUN, overlap=10 * RUN)
