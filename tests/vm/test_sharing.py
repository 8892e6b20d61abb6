"""Pages by their text: what a prompt finds, and that the index forgets what is cut or gone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.ids import SpaceId
from kvd.vm.sharing import PageTexts, SharedPlace, control_borders
from kvd.vm.text import Span, TypedText

A, B, C = SpaceId(1), SpaceId(2), SpaceId(3)


def content(data: bytes) -> TypedText:
    """Text a client typed."""
    return TypedText(data, (Span("content", len(data)),) if data else ())


def put(texts: PageTexts, space: SpaceId, *pages: bytes) -> None:
    """Pages of plain content."""
    for page in pages:
        texts.append(space, page, [])


def test_a_prompt_finds_the_pages_it_begins_with() -> None:
    """The longest text first, each place with those who map it; a page that only begins alike is not found (P10)."""
    texts = PageTexts()
    put(texts, A, b"one ", b"two ", b"three")
    put(texts, B, b"one ", b"two ", b"drei")
    found = texts.find(content(b"one two three and more"))
    assert found == [SharedPlace(3, 13, (A,)), SharedPlace(2, 8, (A, B)), SharedPlace(1, 4, (A, B))]
    assert texts.find(content(b"one two thre")) == found[1:]
    assert texts.find(content(b"two ")) == texts.find(content(b"")) == []


def test_equal_text_in_other_tokens_is_another_page() -> None:
    """Pages of one text may end at different places; a prompt finds all of them."""
    texts = PageTexts()
    put(texts, A, b"abcd", b"ef")
    put(texts, B, b"abc", b"defgh")
    found = texts.find(content(b"abcdefgh"))
    assert found == [SharedPlace(2, 8, (B,)), SharedPlace(2, 6, (A,)), SharedPlace(1, 4, (A,)), SharedPlace(1, 3, (B,))]


def test_control_text_matches_control_text_only() -> None:
    """A typed `<s>` never finds the pages of a message border; what the model wrote and what was typed are alike."""
    texts = PageTexts()
    texts.append(A, b"<s>hey", [0, 3])
    forged = TypedText(b"<s>hey", (Span("content", 6),))
    real = TypedText(b"<s>hey", (Span("control", 3), Span("generated", 1), Span("content", 2)))
    shifted = TypedText(b"<s>hey", (Span("control", 4), Span("content", 2)))
    assert [bool(texts.find(prompt)) for prompt in (forged, real, shifted)] == [False, True, False]


def test_a_page_may_begin_inside_control_text() -> None:
    """The kind of a page's first byte is that of the byte before it unless a border is between them."""
    texts = PageTexts()
    texts.append(A, b"ab<", [2])
    texts.append(A, b"s>cd", [2])
    spans = (Span("content", 2), Span("control", 3), Span("content", 2))
    assert control_borders(spans) == [2, 5]
    assert texts.find(TypedText(b"ab<s>cd", spans))[0] == SharedPlace(2, 7, (A,))
    assert texts.find(TypedText(b"ab<s>cd", (*spans[:1], Span("control", 5))))[0] == SharedPlace(1, 3, (A,))


def test_what_is_cut_or_gone_is_not_found() -> None:
    """Cutting keeps what lies before; the last one to go takes the place along, and nothing stays behind."""
    texts = PageTexts()
    put(texts, A, b"one ", b"two ")
    put(texts, B, b"one ", b"two ")
    texts.cut(A, 1)
    assert texts.find(content(b"one two "))[0] == SharedPlace(2, 8, (B,))
    assert (texts.pages(A), texts.end_bytes(A)) == (1, 4)
    put(texts, A, b"2 ")
    assert texts.find(content(b"one 2 "))[0] == SharedPlace(2, 6, (A,))
    texts.forget(B)
    texts.forget(A)
    texts.forget(C)
    assert len(texts) == 0
    assert texts.find(content(b"one two ")) == []


@settings(deadline=None)
@given(st.data())
def test_it_finds_what_comparing_every_text_finds(data: st.DataObject) -> None:
    """Any pages, kinds and cuts: exactly the runs whose bytes and kinds the prompt begins with."""
    kinds = st.sampled_from(["control", "content", "generated"])
    letters = st.text("ab", min_size=0, max_size=3)
    texts, kept = PageTexts(), dict[SpaceId, list[tuple[int, TypedText]]]()

    def typed() -> list[tuple[str, str]]:
        return data.draw(st.lists(st.tuples(letters, kinds), max_size=5))

    def make(pieces: list[tuple[str, str]]) -> TypedText:
        whole = "".join(letter for letter, _ in pieces).encode()
        return TypedText(whole, tuple(Span(kind, len(letter)) for letter, kind in pieces))  # type: ignore[arg-type]

    for space in (A, B, C):
        whole = make(typed())
        ends = sorted(data.draw(st.lists(st.integers(0, len(whole.data)), max_size=4)))
        borders, start = control_borders(whole.spans), 0
        for end in ends:
            texts.append(space, whole.data[start:end], [each - start for each in borders if start <= each < end])
            start = end
        count = data.draw(st.integers(0, len(ends)))
        texts.cut(space, count)
        kept[space] = [(end, whole) for end in ends[:count]]
    prompt = make(typed())

    def kinds_of(text: TypedText) -> list[bool]:
        return [span.kind == "control" for span in text.spans for _ in range(span.text_bytes)]

    def begins(whole: TypedText, end: int) -> bool:
        return prompt.data[:end] == whole.data[:end] and kinds_of(prompt)[:end] == kinds_of(whole)[:end]

    expected = {
        (number + 1, end, space)
        for space, pages in kept.items()
        for number, (end, whole) in enumerate(pages)
        if end <= len(prompt.data) and begins(whole, end)
    }
    found = texts.find(prompt)
    assert {(place.pages, place.end_bytes, space) for place in found for space in place.spaces} == expected
    assert [place.end_bytes for place in found] == sorted((place.end_bytes for place in found), reverse=True)
