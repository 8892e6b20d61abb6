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


@pytest.mark.parametrize("text", ["", "a" * 5000, " " * 5000, "\n" * 3000, "ab" * 2500, "the of " * 10], ids=repr)
def test_texts_in_which_windows_find_no_step(codec: TextCodec, text: str) -> None:
    """One endless word: windows are joined until they cover it, or meet where it repeats."""
    prompt = typed(("content", text))
    assert abs(count_tokens(codec, prompt, window=500, overlap=60) - len(codec.encode_content(text))) <= 1
    assert count_tokens(codec, prompt, window=10_000) == len(codec.encode_content(text))


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
