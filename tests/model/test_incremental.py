"""Generated ids surface as valid UTF-8, a token at a time, with exact byte lengths."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvd.model.incremental import IncrementalDecoder

CONTROL = b"<control>"


class Pieces:
    """A vocabulary whose token i is the i-th piece; `CONTROL` pieces are control tokens."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def is_control(self, token_id: int) -> bool:
        """Whether the piece is `CONTROL`."""
        return self.pieces[token_id] == CONTROL

    def token_bytes(self, token_id: int) -> bytes:
        """The piece."""
        return self.pieces[token_id]


def surface(pieces: list[bytes]) -> tuple[bytes, list[int]]:
    """Text and lengths of all pieces."""
    decoder = IncrementalDecoder(Pieces(pieces))
    text = b"".join([decoder.push(i) for i in range(len(pieces))]) + decoder.flush()
    return text, decoder.lengths


def expected(pieces: list[bytes]) -> bytes:
    """Python's own replacement decoding, message by message."""
    runs = [b""]
    for piece in pieces:
        if piece == CONTROL:
            runs.append(b"")
        else:
            runs[-1] += piece
    return "".join(run.decode("utf-8", "replace") for run in runs).encode()


raw_pieces = st.lists(st.one_of(st.binary(max_size=3), st.just(CONTROL)), max_size=30)
text_pieces = st.builds(
    lambda text, cuts: [text.encode()[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), None], strict=True)],
    st.text(max_size=30),
    st.lists(st.integers(0, 60), max_size=12),
)


@given(st.one_of(raw_pieces, text_pieces))
@example([b"\xe0", b"\x80\xf0\x90", b"\x80", CONTROL, b"\x80"])
@example([b"\xed\xa0\x80"])
@example([b"\xf4\x90\x80\x80", b"\xc0\xaf"])
def test_text_is_the_unicode_replacement_decoding_and_lengths_add_up(pieces: list[bytes]) -> None:
    """Any bytes in any pieces give what `errors="replace"` gives, and sum(lengths) == len(text)."""
    text, lengths = surface(pieces)
    assert text == expected(pieces)
    assert sum(lengths) == len(text)
    assert len(lengths) == len(pieces)


@given(st.one_of(raw_pieces, text_pieces))
def test_every_prefix_streams_what_it_surfaces_as(pieces: list[bytes]) -> None:
    """What was streamed is always a prefix of the surface, never half a character; `flush` completes it."""
    decoder = IncrementalDecoder(Pieces(pieces))
    streamed = b""
    for i in range(len(pieces)):
        part = decoder.push(i)
        part.decode()  # valid UTF-8 on its own
        streamed += part
        whole, _ = surface(pieces[: i + 1])
        assert whole.startswith(streamed)
        assert (whole == streamed) == (decoder.pending_bytes == 0)


@given(text_pieces)
def test_valid_text_counts_each_byte_for_its_own_token(pieces: list[bytes]) -> None:
    """Where the pieces are cut out of valid text, a token's length is its bytes."""
    text, lengths = surface(pieces)
    assert text == b"".join(pieces)
    assert lengths == [len(piece) for piece in pieces]


def test_an_invalid_sequence_counts_for_the_token_of_its_first_byte() -> None:
    """E6 97 and then `x`: one U+FFFD, three bytes, all for the token that holds E6."""
    text, lengths = surface([b"a\xe6", b"\x97", b"x"])
    assert text.decode() == "a\N{REPLACEMENT CHARACTER}x"
    assert lengths == [4, 0, 1]


def test_a_control_token_surfaces_as_nothing_and_ends_a_character() -> None:
    """No character spans a message border."""
    text, lengths = surface([b"\xe6\x97", CONTROL, b"\xa5"])
    assert text.decode() == "\N{REPLACEMENT CHARACTER}" * 2
    assert lengths == [3, 0, 3]
