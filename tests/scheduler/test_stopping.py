"""Stop strings and half characters: what a client sees, and which tokens stay."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvd.model.incremental import IncrementalDecoder
from kvd.scheduler.stopping import StopWatch


class ByteCodec:
    """Tokens are the byte strings they are made with; id -1 and ids beyond are control tokens."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def is_control(self, token_id: int, /) -> bool:
        """Whether it surfaces as nothing."""
        return not 0 <= token_id < len(self.pieces)

    def token_bytes(self, token_id: int, /) -> bytes:
        """Raw bytes."""
        return self.pieces[token_id]

    def decoder(self) -> IncrementalDecoder:
        """A fresh decoder."""
        return IncrementalDecoder(self)

    def text(self, ids: list[int]) -> bytes:
        """What these ids surface as, an unfinished character at the end left out."""
        decoder = self.decoder()
        return b"".join(decoder.push(token) for token in ids)


def run(pieces: list[bytes], stop: tuple[str, ...]) -> tuple[str, StopWatch, list[int], ByteCodec]:
    """Feed all pieces as tokens, as decoding does; flush when nothing stopped it."""
    codec = ByteCodec(pieces)
    watch = StopWatch(codec, stop)
    given_text = ""
    fed: list[int] = []
    for token in range(len(pieces)):
        fed.append(token)
        given_text += watch.feed(token)
        if watch.stopped:
            break
    else:
        given_text += watch.flush()
    return given_text, watch, fed, codec


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "kept"),
    [
        ([b"one", b" two"], (), "one two", 2),
        ([b"one", b"END"], ("END",), "one", 1),
        ([b"one E", b"N", b"D more"], ("END",), "one ", 0),
        ([b"one ", b"E", b"N", b"D more"], ("END",), "one ", 1),
        ([b"aE", b"N", b"X"], ("END",), "aENX", 3),
        ([b"ab", b"ab", b"abc"], ("ababc",), "ab", 1),
        ([b"xyz"], ("z", "y"), "x", 0),
        ([b"x", b"yz"], ("yz", "z"), "x", 1),
        ([b"END"], ("END",), "", 0),
        (["é".encode()[:1], "é".encode()[1:], b"!"], ("!",), "é", 2),
        ([b"a", "é".encode()[:1]], (), "a", 1),
        ([b"a", b"\xff", b"b"], (), "a\N{REPLACEMENT CHARACTER}b", 3),
    ],
)
def test_stop_strings_end_the_text(pieces: list[bytes], stop: tuple[str, ...], text: str, kept: int) -> None:
    """A stop string ends generation even across tokens; what could become one is held back until it cannot."""
    given_text, watch, _, _ = run(pieces, stop)
    assert given_text == text
    assert watch.kept_tokens == kept


PIECES = st.lists(
    st.one_of(
        st.sampled_from([b"a", b"b", b"ab", b"ba", b" ", "é".encode(), "🙂".encode(), b"aab"]),
        st.binary(min_size=1, max_size=4),
        st.sampled_from([b"\xc3", b"\xa9", b"\xf0", b"\x9f", b"\x99", b"\x82", b"\xe6\x97"]),
    ),
    max_size=25,
)
STOPS = st.lists(st.sampled_from(["ab", "ba", "aba", "é", "🙂", "a b", "\N{REPLACEMENT CHARACTER}a", "bb"]), max_size=3)


@given(pieces=PIECES, stop=STOPS.map(tuple))
@example(pieces=[b"a", b"a", b"b"], stop=("ab",))
def test_nothing_of_a_stop_string_surfaces(pieces: list[bytes], stop: tuple[str, ...]) -> None:
    """What is given out is a prefix of the text, whole characters, without any stop string, as long as can be."""
    given_text, watch, fed, codec = run(pieces, stop)
    whole = codec.text(fed).decode()
    assert whole.startswith(given_text)
    assert not any(each in given_text for each in stop)
    if watch.stopped:
        assert watch.stop_string in stop
        assert whole[len(given_text) :].startswith(watch.stop_string)
    else:
        assert watch.stop_string is None
        assert given_text == whole
        assert not any(each in whole for each in stop)


@given(pieces=PIECES, stop=STOPS.map(tuple))
def test_kept_tokens_stand_for_text_that_was_given_out(pieces: list[bytes], stop: tuple[str, ...]) -> None:
    """What stays spells, a broken end as U+FFFD, a prefix of what the client got; one token more would not."""
    given_text, watch, fed, codec = run(pieces, stop)
    kept = watch.kept_tokens

    def fits(count: int) -> bool:
        decoder = codec.decoder()
        text = b"".join(decoder.push(token) for token in fed[:count]) + decoder.flush()
        return given_text.encode().startswith(text)

    assert fits(kept)
    assert not any(fits(count) for count in range(kept + 1, len(fed) + 1))


@given(pieces=PIECES, stop=STOPS.map(tuple))
def test_text_comes_as_early_as_it_can(pieces: list[bytes], stop: tuple[str, ...]) -> None:
    """Held back is at most one character less than the longest stop string: streaming stays prompt."""
    codec = ByteCodec(pieces)
    watch = StopWatch(codec, stop)
    given_text = ""
    longest = max((len(each) for each in stop), default=1)
    for token in range(len(pieces)):
        given_text += watch.feed(token)
        if watch.stopped:
            break
        assert len(codec.text(list(range(token + 1))).decode()) - len(given_text) < longest


def test_control_tokens_surface_as_nothing() -> None:
    """A control token ends an unfinished character and adds no text; it may stay."""
    codec = ByteCodec([b"a"])
    watch = StopWatch(codec, ())
    assert watch.feed(0) + watch.feed(7) + watch.flush() == "a"
    assert watch.kept_tokens == 2
