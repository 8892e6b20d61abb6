"""Matching: kinds, cuts, reasons and where a prompt parted from what is stored."""

from __future__ import annotations

import sys

import pytest

from kvd.vm.errors import BrokenText
from kvd.vm.prefix import StoredText, best_match, common_prefix_bytes, match
from kvd.vm.text import Span, SpanKind, TypedText


def typed(*parts: tuple[SpanKind, str]) -> TypedText:
    """Typed text from (kind, text) parts."""
    pieces = [(kind, text.encode()) for kind, text in parts]
    return TypedText(b"".join(data for _, data in pieces), tuple(Span(kind, len(data)) for kind, data in pieces))


def stored(*parts: tuple[SpanKind, str], lengths: list[int] | None = None, computed: int | None = None) -> StoredText:
    """Stored text with a token per byte unless told otherwise, all computed."""
    text = typed(*parts)
    token_bytes = lengths if lengths is not None else [1] * len(text.data)
    return StoredText.of(text, token_bytes, len(token_bytes) if computed is None else computed)


HELLO = stored(("control", "<s>"), ("content", "hello world"), lengths=[3, 5, 6])


def test_nothing_stored_is_new() -> None:
    """A branch without tokens serves nothing and says so."""
    found = match(stored(), typed(("content", "x")))
    assert (found.kind, found.keep_tokens, found.matched_ratio, found.reason) == ("new", 0, 0.0, "no stored text")


def test_all_of_both_is_exact() -> None:
    """The same text keeps every token; a pending one counts as kept, not as computed."""
    found = match(
        stored(("control", "<s>"), ("content", "hello world"), lengths=[3, 5, 6], computed=2),
        typed(("control", "<s>"), ("content", "hello world")),
    )
    assert (found.kind, found.keep_tokens, found.keep_bytes, found.computed_tokens) == ("exact", 3, 14, 2)
    assert found.reason == "all stored text matched"
    assert found.divergence is None


def test_a_longer_prompt_extends() -> None:
    """P14, P16: everything stored is kept to the exact token."""
    found = match(HELLO, typed(("control", "<s>"), ("content", "hello world, again")))
    assert (found.kind, found.keep_tokens, found.keep_bytes, found.matched_ratio) == ("extend", 3, 14, 1.0)


def test_a_divergence_cuts_back_to_a_token_and_tells_where() -> None:
    """The seventh byte of the content differs: the token before it is kept."""
    found = match(HELLO, typed(("control", "<s>"), ("content", "hello, you")))
    assert (found.kind, found.keep_tokens, found.keep_bytes, found.matched_bytes) == ("diverge", 2, 8, 8)
    assert found.reason == "diverged at byte 8 (matched 57 % of the stored text)"
    assert found.divergence is not None
    assert (found.divergence.expected, found.divergence.found) == (" world", ", you")
    assert (found.divergence.position_chars, found.divergence.token) == (8, 2)
    assert (found.divergence.stored_kind, found.divergence.prompt_kind) == ("content", "content")


def test_a_prompt_that_is_a_strict_prefix_matches_wholly_and_keeps_whole_tokens() -> None:
    """`hel` is all of the prompt's content, but its token ends later: only the control token is kept."""
    found = match(HELLO, typed(("control", "<s>"), ("content", "hel")))
    assert (found.kind, found.matched_bytes, found.keep_tokens, found.keep_bytes) == ("diverge", 6, 1, 3)
    assert found.reason == "prompt ended at byte 6 (matched 42 % of the stored text, less than half)"
    assert found.divergence is not None
    assert (found.divergence.found, found.divergence.prompt_kind) == ("", None)


def test_the_half_rule_only_names_the_match() -> None:
    """Below half of the stored text, tokens are kept all the same."""
    found = match(stored(("content", "abcdefgh")), typed(("content", "abcX")))
    assert (found.keep_tokens, found.reason) == (
        3,
        "diverged at byte 3 (matched 37 % of the stored text, less than half)",
    )
    found = match(stored(("content", "abcdefgh")), typed(("content", "abcdX")))
    assert (found.keep_tokens, found.reason) == (4, "diverged at byte 4 (matched 50 % of the stored text)")


def test_control_text_matches_only_control_text() -> None:
    """A typed `<|im_start|>` is not a message border, in either direction."""
    real = (("content", "a"), ("control", "<|im_start|>"), ("content", "b"))
    forged = (("content", "a<|im_start|>b"),)
    for one, other in ((real, forged), (forged, real)):
        found = match(stored(*one), typed(*other))
        assert (found.kind, found.keep_tokens) == ("diverge", 1)
        assert found.divergence is not None
        assert {found.divergence.stored_kind, found.divergence.prompt_kind} == {"control", "content"}


def test_generated_text_matches_when_it_comes_back_as_content() -> None:
    """P17: what the model wrote keeps its ids when the client sends it back, however the spans are cut."""
    kept = stored(("control", "<a>"), ("generated", "one two"), ("generated", " three"))
    found = match(kept, typed(("control", "<a>"), ("content", "one"), ("content", " two three"), ("control", "<e>")))
    assert found.kind == "extend"


def test_adjacent_control_spans_are_one() -> None:
    """Borders inside control text do not count; empty spans neither."""
    kept = stored(("control", "<a>"), ("content", ""), ("control", "<b>"))
    assert match(kept, typed(("control", "<a><b>"))).kind == "exact"


def test_a_cut_never_splits_a_character() -> None:
    """Three one-byte tokens make one character: all go when a byte of it differs, though two bytes agree."""
    kept = stored(("content", "a中"), lengths=[1, 1, 1, 1])
    found = match(kept, typed(("content", "a丮")))
    assert common_prefix_bytes("a中".encode(), "a丮".encode()) == 3
    assert (found.keep_tokens, found.keep_bytes) == (1, 1)
    assert found.divergence is not None
    assert (found.divergence.position_bytes, found.divergence.expected, found.divergence.found) == (1, "中", "丮")


def test_a_token_across_a_character_border_is_cut_as_a_whole() -> None:
    """A token that holds a whole character and half of the next cannot be kept for the first alone."""
    kept = stored(("content", "aéé"), lengths=[1, 3, 1])
    found = match(kept, typed(("content", "aéx")))
    assert (found.keep_tokens, found.keep_bytes) == (1, 1)


def test_tokens_without_bytes_go_with_the_token_before_them() -> None:
    """Bytes of an invalid sequence surfaced by an earlier token stay or go together with it."""
    kept = stored(("generated", "a\ufffdb"), lengths=[1, 3, 0, 0, 1])
    assert match(kept, typed(("content", "a\ufffdX"))).keep_tokens == 4
    assert match(kept, typed(("content", "aX"))).keep_tokens == 1
    assert match(kept, typed(("content", "a\ufffdb"))).keep_tokens == 5


def test_snippets_are_short_and_escaped() -> None:
    """At most 40 characters, line breaks and control characters visible."""
    found = match(stored(("content", "x\n\\é" + "y" * 100)), typed(("content", "\x1b" + "中" * 100)))
    assert found.divergence is not None
    assert found.divergence.expected == "x\\n\\\\é" + "y" * 36
    assert found.divergence.found == "\\x1b" + "中" * 39


def test_the_branch_that_keeps_most_wins_and_ties_stay() -> None:
    """Flipping back to an abandoned branch is a hit; equal branches do not make the agent move."""
    branches = {1: stored(("content", "abc")), 2: stored(("content", "abd")), 3: stored(("content", "abd"))}
    assert best_match(branches, typed(("content", "abcd")), current=2)[0] == 1
    assert best_match(branches, typed(("content", "abd")), current=2)[0] == 2
    assert best_match(branches, typed(("content", "abd")), current=1)[0] == 3
    assert best_match(branches, typed(("content", "abX")), current=1)[0] == 1
    branch, found = best_match({}, typed(("content", "a")), current=7)
    assert (branch, found.kind) == (7, "new")


def test_tokens_with_kv_count_more_than_ids() -> None:
    """A branch whose KV was lost keeps ids that must be computed again; a sibling with KV saves more."""
    branches = {
        1: stored(("content", "abcdefX"), computed=0),
        2: stored(("content", "abcdeY")),
    }
    assert best_match(branches, typed(("content", "abcdefg")), current=1)[0] == 2


def test_what_need_not_be_forked_wins_over_the_current_branch() -> None:
    """A branch that matches exactly is as good as one that diverges at its end, and costs no branch (rarer is not)."""
    branches = {1: stored(("content", "abc")), 2: stored(("content", "abcX"))}
    assert best_match(branches, typed(("content", "abc")), current=2)[0] == 1


def test_a_pending_token_does_not_send_a_turn_to_an_abandoned_branch() -> None:
    """An answer that was cut short and asked for anew leaves a branch that goes on: the agent still extends its own."""
    branches = {
        1: stored(("content", "abc"), ("generated", "def")),
        2: stored(("content", "abc"), ("generated", "d"), computed=3),
    }
    prompt = typed(("content", "abc"), ("generated", "d"), ("content", "!"))
    best, found = best_match(branches, prompt, current=2)
    assert (best, found.kind, found.keep_tokens, found.computed_tokens) == (2, "extend", 4, 3)
    best, found = best_match(branches, typed(("content", "abc"), ("generated", "d")), current=2)
    assert (best, found.kind) == (2, "exact")
    branches[2] = stored(("content", "abc"), ("generated", "d"), computed=2)  # more than the pending one has no KV
    best, found = best_match(branches, prompt, current=2)
    assert (best, found.kind, found.keep_tokens, found.computed_tokens) == (1, "extend", 4, 4)
    assert found.reason == "all stored text matched; 4 tokens have KV in an abandoned continuation"
    assert found.divergence is None
    assert best_match(branches, prompt, current=1)[1].kind == "diverge"


def test_an_empty_prompt_keeps_nothing() -> None:
    """It is a strict prefix of everything."""
    found = match(HELLO, typed())
    assert (found.kind, found.keep_tokens, found.matched_ratio) == ("diverge", 0, 0.0)


@pytest.mark.parametrize("spans", [(), (Span("content", 2),), (Span("content", 4), Span("control", -1))])
def test_spans_that_do_not_tile_the_text_are_refused(spans: tuple[Span, ...]) -> None:
    """On both sides, before anything is compared."""
    text = TypedText(b"abc", spans)
    with pytest.raises(BrokenText):
        match(HELLO, text)
    with pytest.raises(BrokenText):
        StoredText.of(text, [3], 1)


@pytest.mark.parametrize(("lengths", "computed"), [([2], 1), ([3], 2), ([], 0)])
def test_tokens_that_do_not_tile_the_text_are_refused(lengths: list[int], computed: int) -> None:
    """Lengths must add up, and no more tokens can be computed than there are."""
    with pytest.raises(BrokenText):
        StoredText.of(typed(("content", "abc")), lengths, computed)


def test_a_megabyte_is_compared_in_a_few_calls() -> None:
    """P20: the cost of a long context is that of comparing memory, not of a loop over bytes or tokens."""
    body = "the quick brown fox " * 50_000
    kept = stored(("content", body), lengths=[4] * 250_000)
    prompt = typed(("content", body[:-3] + "X"))
    assert match(kept, prompt).keep_tokens == 249_999
    assert _calls(kept, prompt) < 500


def _calls(kept: StoredText, prompt: TypedText) -> int:
    """Calls of functions, Python's own and others, that a comparison makes."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        match(kept, prompt)
    finally:
        sys.setprofile(None)
    return calls
