"""Text matching: how much of what an agent holds a prompt repeats (EXACT, EXTEND, DIVERGE).

Theory of operation. Two typed texts agree up to the first byte that differs or that is control text in one and not in
the other; borders between content and generated text do not count, so what the model wrote matches when a client sends
it back. What agrees is then cut back to a token start on a character border: tokens may split characters, and KV exists
for whole tokens only. Ids are never compared, since the same text may have other ids in another context; the stored ids
stay as they are.

A token of length 0 stands for bytes of an invalid sequence that an earlier token surfaced as U+FFFD. It belongs to the
token before it and is kept or cut with it.

Source: "Agent Memory Below the Prompt", prefix matching on characters and its 50 % rule. Here the rule only names a
match; pages that exist are always used.

May import kvd.vm.text and kvd.vm.errors only.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, Literal

from kvd.vm.errors import BrokenText
from kvd.vm.text import Span, SpanKind, TypedText

MatchKind = Literal["new", "exact", "extend", "diverge"]

SNIPPET_CHARACTERS: Final = 40
"""Characters of text that a divergence shows of each side."""

HALF: Final = 0.5
"""The seed's threshold: a common part of less than this share of the stored text is named `less than half`."""

_COMPARE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredText:
    """The text of one branch of an agent with the places of its tokens. Build it with `of`.

    Attributes:
        text: what the branch holds.
        token_ends: offset in bytes where each token ends, ascending; a token starts where the one before it ends.
        computed_tokens: tokens with KV; the last token may be pending.
    """

    text: TypedText
    token_ends: array[int]
    computed_tokens: int

    @classmethod
    def of(cls, text: TypedText, token_bytes: Iterable[int], computed_tokens: int) -> StoredText:
        """From the length in bytes of each token (0: it belongs to the token before it).

        Raises:
            BrokenText: lengths or spans do not tile the text, or more tokens are computed than there are.
        """
        ends = array("q", accumulate(token_bytes))
        text_bytes = ends[-1] if ends else 0
        check_spans(text)
        if text_bytes != len(text.data) or not 0 <= computed_tokens <= len(ends):
            raise BrokenText(
                f"{len(ends)} tokens of {text_bytes} bytes, {computed_tokens} computed, for {len(text.data)} bytes"
            )
        return cls(text, ends, computed_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of the branch, a pending one included."""
        return len(self.token_ends)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where prompt and stored text part.

    Attributes:
        position_bytes: offset of the first character that differs, in both texts.
        position_chars: the same in characters.
        token: index of the stored token that holds this position.
        expected: what the stored text has there, escaped, at most `SNIPPET_CHARACTERS` characters before escaping.
        found: what the prompt has there; empty when it ends.
        stored_kind: kind of the stored text there.
        prompt_kind: kind of the prompt there, None when it ends.
    """

    position_bytes: int
    position_chars: int
    token: int
    expected: str
    found: str
    stored_kind: SpanKind
    prompt_kind: SpanKind | None


@dataclass(frozen=True, slots=True)
class Match:
    """What of a branch serves a prompt.

    Attributes:
        kind: `new` (nothing stored), `exact` (all of both), `extend` (all stored, the prompt goes on), `diverge`.
        keep_tokens: stored tokens that stay.
        keep_bytes: bytes of text they stand for; the prompt is encoded from here on.
        computed_tokens: of `keep_tokens`, those with KV.
        matched_bytes: bytes that agree, before cutting back to a token.
        matched_ratio: `matched_bytes` as a share of the stored text; 0 when nothing is stored.
        reason: one short, stable phrase.
        divergence: where and why, for `diverge` only.
    """

    kind: MatchKind
    keep_tokens: int
    keep_bytes: int
    computed_tokens: int
    matched_bytes: int
    matched_ratio: float
    reason: str
    divergence: Divergence | None = None

    @property
    def reach_tokens(self) -> int:
        """Tokens that need no step of their own: those with KV, and a pending one at the end of a branch that matches.

        A pending token is computed together with what the prompt has behind it. Something else that has its KV saves
        nothing by that.
        """
        is_pending = self.kind != "diverge" and self.keep_tokens - self.computed_tokens == 1
        return self.computed_tokens + is_pending


NEW_MATCH: Final = Match("new", 0, 0, 0, 0, 0.0, "no stored text")
"""The match of a branch that holds nothing."""


def match(stored: StoredText, prompt: TypedText) -> Match:
    """Match a prompt against one branch.

    Args:
        stored: what the branch holds.
        prompt: the agent's whole text as the client has it now.

    Raises:
        BrokenText: the prompt's spans do not tile it.
    """
    check_spans(prompt)
    if not stored.tokens:
        return NEW_MATCH
    matched = typed_prefix_bytes(stored.text, prompt)
    stored_bytes = len(stored.text.data)
    if matched == stored_bytes:
        kind: MatchKind = "exact" if matched == len(prompt.data) else "extend"
        reason = "all stored text matched"
        return Match(kind, stored.tokens, stored_bytes, stored.computed_tokens, matched, 1.0, reason)
    keep_tokens = _whole_tokens(stored, matched)
    ratio = matched / stored_bytes
    divergence = _divergence(stored, prompt, matched)
    verb = "prompt ended" if divergence.prompt_kind is None else "diverged"
    share = f"matched {int(100 * ratio)} % of the stored text{'' if ratio >= HALF else ', less than half'}"
    return Match(
        kind="diverge",
        keep_tokens=keep_tokens,
        keep_bytes=stored.token_ends[keep_tokens - 1] if keep_tokens else 0,
        computed_tokens=min(keep_tokens, stored.computed_tokens),
        matched_bytes=matched,
        matched_ratio=ratio,
        reason=f"{verb} at byte {divergence.position_bytes} ({share})",
        divergence=divergence,
    )


def best_match(branches: Mapping[int, StoredText], prompt: TypedText, current: int) -> tuple[int, Match]:
    """The branch that saves most work for a prompt.

    Most tokens that need no step of their own count first (`Match.reach_tokens`): ids without KV have to be computed in
    any case. Then one that need not be forked wins, then most ids, then the current branch, then the one with the
    highest number (the latest).

    Where the current branch matches whole, another that goes on otherwise may save more: it agrees further, or KV of
    the current one was lost. The match is then named after the current branch all the same: nothing that the client was
    told has changed.

    Args:
        branches: what each branch of the agent holds.
        prompt: the agent's whole text as the client has it now.
        current: the branch in use; it is the answer when there are no branches.
    """
    matches = {branch: match(stored, prompt) for branch, stored in branches.items()}
    if not matches:
        return current, NEW_MATCH

    def rank(branch: int) -> tuple[int, bool, int, bool, int]:
        found = matches[branch]
        return found.reach_tokens, found.kind != "diverge", found.keep_tokens, branch == current, branch

    best = max(matches, key=rank)
    found, own = matches[best], matches.get(current, NEW_MATCH)
    if found.kind == "diverge" and own.kind in ("exact", "extend"):
        reason = f"{own.reason}; {found.computed_tokens} tokens have KV in an abandoned continuation"
        found = replace(found, kind=own.kind, reason=reason, divergence=None)
    return best, found


def check_spans(text: TypedText) -> None:
    """Refuse a text whose spans do not tile its bytes.

    Raises:
        BrokenText: a span has a negative length, or the lengths do not add up.
    """
    lengths = [span.text_bytes for span in text.spans]
    if sum(lengths) != len(text.data) or min(lengths, default=0) < 0:
        raise BrokenText(f"spans of {sum(lengths)} bytes for a text of {len(text.data)} bytes")


def common_prefix_bytes(left: bytes, right: bytes) -> int:
    """Length of the longest common prefix; compares slices, so its cost is that of memcmp."""
    end = min(len(left), len(right))
    low = 0
    while low < end and left[low : low + _COMPARE_BYTES] == right[low : low + _COMPARE_BYTES]:
        low += _COMPARE_BYTES
    high = min(end, low + _COMPARE_BYTES)
    low = min(low, end)
    # left[:low] agrees; left[:high + 1] does not, or the texts end at high.
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _control_runs(spans: Sequence[Span]) -> list[tuple[int, bool]]:
    """(end offset in bytes, is control) of the spans; empty ones are left out."""
    ends = accumulate(span.text_bytes for span in spans)
    return [(end, span.kind == "control") for end, span in zip(ends, spans, strict=True) if span.text_bytes]


def typed_prefix_bytes(left: TypedText, right: TypedText) -> int:
    """Bytes that agree in value and in being control text or not."""
    limit = common_prefix_bytes(left.data, right.data)
    left_runs, right_runs = _control_runs(left.spans), _control_runs(right.spans)
    i = j = position = 0
    while position < limit:
        (left_end, left_control), (right_end, right_control) = left_runs[i], right_runs[j]
        if left_control != right_control:
            return position
        position = min(left_end, right_end)
        i += left_end == position
        j += right_end == position
    return limit


def character_border(data: bytes, position: int) -> int:
    """The last place at or before `position` of the UTF-8 text `data` that is inside no character."""
    while not _on_border(data, position):
        position -= 1
    return position


def _on_border(data: bytes, position: int) -> bool:
    """True when no character of the UTF-8 text `data` spans `position`."""
    return position >= len(data) or data[position] & 0xC0 != 0x80


def _whole_tokens(stored: StoredText, matched: int) -> int:
    """Tokens that end at or before `matched` on the last character border where a token ends."""
    ends, data = stored.token_ends, stored.text.data
    tokens = bisect_right(ends, matched)
    while tokens and not _on_border(data, ends[tokens - 1]):
        tokens = bisect_left(ends, ends[tokens - 1])
    return tokens


def _kind_at(spans: Sequence[Span], position: int) -> SpanKind | None:
    end = 0
    for span in spans:
        end += span.text_bytes
        if position < end:
            return span.kind
    return None


def _divergence(stored: StoredText, prompt: TypedText, matched: int) -> Divergence:
    data = stored.text.data
    position = character_border(data, matched)
    stored_kind = _kind_at(stored.text.spans, matched)
    assert stored_kind is not None
    return Divergence(
        position_bytes=position,
        position_chars=len(data[:position].decode("utf-8", errors="replace")),
        token=bisect_right(stored.token_ends, position),
        expected=_snippet(data, position),
        found=_snippet(prompt.data, position),
        stored_kind=stored_kind,
        prompt_kind=_kind_at(prompt.spans, matched),
    )


def _snippet(data: bytes, position: int) -> str:
    """Up to `SNIPPET_CHARACTERS` characters from `position`, with unprintable ones escaped."""
    piece = data[position : position + 4 * SNIPPET_CHARACTERS]
    text = piece.decode("utf-8", errors="replace")[:SNIPPET_CHARACTERS]
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)
