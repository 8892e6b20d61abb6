"""Matching against a definition that goes byte by byte: what is kept is equal, whole, and as much as can be."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvd.vm.prefix import StoredText, common_prefix_bytes, match
from kvd.vm.text import Span, SpanKind, TypedText

ALPHABET = "ab<é中🙂\ufffd"
KINDS: tuple[SpanKind, ...] = ("control", "content", "generated")
Part = tuple[SpanKind, str]


def typed(parts: list[Part]) -> TypedText:
    """Typed text from (kind, text) parts."""
    pieces = [(kind, text.encode()) for kind, text in parts]
    return TypedText(b"".join(data for _, data in pieces), tuple(Span(kind, len(data)) for kind, data in pieces))


def control_flags(text: TypedText) -> list[bool]:
    """For each byte, whether it is control text."""
    return [span.kind == "control" for span in text.spans for _ in range(span.text_bytes)]


part_lists = st.lists(st.tuples(st.sampled_from(KINDS), st.text(ALPHABET, max_size=6)), max_size=6)


@st.composite
def stored_texts(draw: st.DrawFn) -> StoredText:
    """A text cut into tokens anywhere, inside characters too, with tokens of no bytes in between."""
    text = typed(draw(part_lists))
    left = len(text.data)
    lengths: list[int] = []
    while left:
        lengths.append(draw(st.integers(1, min(left, 5))))
        left -= lengths[-1]
        lengths.extend([0] * draw(st.sampled_from([0, 0, 0, 1, 2])))
    return StoredText.of(text, lengths, draw(st.integers(max(0, len(lengths) - 1), len(lengths))))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[StoredText, TypedText]:
    """A stored text and a prompt that shares some of it, often across a change of spans."""
    stored = draw(stored_texts())
    characters = stored.text.data.decode()
    flags = control_flags(stored.text)
    cut = draw(st.integers(0, len(characters)))
    parts: list[Part] = []
    position = 0
    for character in characters[:cut]:
        kind: SpanKind = "control" if flags[position] else draw(st.sampled_from(("content", "generated")))
        if draw(st.integers(0, 30)) == 30:
            kind = draw(st.sampled_from(KINDS))
        parts.append((kind, character))
        position += len(character.encode())
    return stored, typed(parts + draw(part_lists))


def agreeing_bytes(left: TypedText, right: TypedText) -> int:
    """The definition: bytes before the first that differs in value or in being control text."""
    count = 0
    both = zip(left.data, control_flags(left), right.data, control_flags(right), strict=False)
    for left_byte, left_control, right_byte, right_control in both:
        if (left_byte, left_control) != (right_byte, right_control):
            break
        count += 1
    return count


def is_border(data: bytes, position: int) -> bool:
    """Whether both sides of a cut are whole characters."""
    try:
        data[:position].decode()
        data[position:].decode()
    except UnicodeDecodeError:
        return False
    return True


@given(pairs())
@settings(max_examples=400, deadline=None)
def test_what_is_kept_is_equal_whole_and_maximal(pair: tuple[StoredText, TypedText]) -> None:
    """The kept prefix equals the prompt's byte for byte and kind for kind, ends on a character, and none is longer."""
    stored, prompt = pair
    found = match(stored, prompt)
    agreeing = agreeing_bytes(stored.text, prompt)
    if not stored.tokens:
        assert found.kind == "new"
        return
    assert found.matched_bytes == agreeing
    ends = list(stored.token_ends)
    assert found.keep_bytes == (ends[found.keep_tokens - 1] if found.keep_tokens else 0)
    assert stored.text.data[: found.keep_bytes] == prompt.data[: found.keep_bytes]
    assert is_border(stored.text.data, found.keep_bytes)
    assert is_border(prompt.data, found.keep_bytes)
    possible = [n for n, end in enumerate(ends, start=1) if end <= agreeing and is_border(stored.text.data, end)]
    assert found.keep_tokens == max(possible, default=0)
    assert found.computed_tokens == min(found.keep_tokens, stored.computed_tokens)


@given(pairs())
@settings(max_examples=300, deadline=None)
def test_the_kind_says_what_agreed(pair: tuple[StoredText, TypedText]) -> None:
    """EXACT is all of both, EXTEND all of the stored text only, everything else DIVERGE with its place."""
    stored, prompt = pair
    found = match(stored, prompt)
    if not stored.tokens:
        return
    all_stored = found.matched_bytes == len(stored.text.data)
    all_prompt = found.matched_bytes == len(prompt.data)
    assert found.kind == ("exact" if all_stored and all_prompt else "extend" if all_stored else "diverge")
    if found.kind != "diverge":
        assert found.keep_tokens == stored.tokens
        assert found.divergence is None
        return
    divergence = found.divergence
    assert divergence is not None
    assert found.keep_bytes <= divergence.position_bytes <= found.matched_bytes
    assert divergence.position_chars == len(stored.text.data[: divergence.position_bytes].decode())
    starts = [0, *stored.token_ends]
    assert starts[divergence.token] <= divergence.position_bytes < starts[divergence.token + 1]
    assert (divergence.prompt_kind is None) == all_prompt


@given(stored_texts(), part_lists, part_lists)
@settings(max_examples=200, deadline=None)
def test_a_longer_prompt_never_keeps_less(stored: StoredText, first: list[Part], more: list[Part]) -> None:
    """Monotone: appending to a prompt keeps at least as many tokens."""
    assert match(stored, typed(first)).keep_tokens <= match(stored, typed(first + more)).keep_tokens


@given(stored_texts())
@settings(max_examples=200, deadline=None)
def test_a_text_matches_itself_and_each_of_its_token_borders(stored: StoredText) -> None:
    """P14: cutting a prompt at any kept border keeps exactly the tokens before it."""
    data, flags = stored.text.data, control_flags(stored.text)
    if stored.tokens:
        assert match(stored, stored.text).kind == "exact"
    for end in set(stored.token_ends):
        if not is_border(data, end):
            continue
        spans = tuple(Span("control" if control else "generated", 1) for control in flags[:end])
        found = match(stored, TypedText(data[:end], spans))
        assert found.keep_bytes == end
        assert found.keep_tokens == sum(each <= end for each in stored.token_ends)


@given(before=st.text(ALPHABET, max_size=5), mark=st.text(ALPHABET, min_size=1, max_size=6), after=part_lists)
@example(before="", mark="<|im_start|>", after=[])
@settings(max_examples=200, deadline=None)
def test_typed_text_never_matches_a_control_token(before: str, mark: str, after: list[Part]) -> None:
    """Whatever a client types, none of it is taken for control text, nor control text for what was typed."""
    real = typed([("content", before), ("control", mark), *after])
    forged = typed([("content", before + mark), *after])
    border = len(before.encode())
    for stored, prompt in ((real, forged), (forged, real)):
        found = match(StoredText.of(stored, [1] * len(stored.data), len(stored.data)), prompt)
        assert found.matched_bytes == found.keep_bytes == border


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 3))
def test_the_common_prefix_is_the_longest(left: bytes, right: bytes, blocks: int) -> None:
    """Also where the texts part near a border of the blocks that are compared at once."""
    shared = b"x" * (blocks * 65_536 - 20 if blocks else 0)
    found = common_prefix_bytes(shared + left, shared + right)
    expected = len(shared)
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        expected += 1
    assert found == expected
