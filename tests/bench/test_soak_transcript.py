"""Transcripts of the soak: which texts they allow, before and after the daemon died, and that they outlive a client."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.bench.soak_client import cut
from kvd.bench.soak_transcript import Claim, Shelf, Transcript
from kvd.bench.soak_verify import Violation

NEW = Transcript("a", "text", (Claim.exactly(""),), absent=True, daemon_pid=1)
SAID = NEW.answered("one two", durable=True, daemon_pid=1)


@pytest.mark.parametrize(
    ("claim", "text_bytes", "expected"),
    [
        (Claim.exactly("abc"), 3, (b"abc", True)),
        (Claim.exactly("abc"), 2, None),
        (Claim.exactly("abc"), 4, None),
        (Claim("a", "abc"), 2, (b"ab", True)),
        (Claim("a", "abc"), 0, None),
        (Claim("a", "abc", grows=True), 9, (b"abc", False)),
        (Claim("", "aé"), 2, None),
        (Claim("", "aé"), 3, ("aé".encode(), True)),
    ],
    ids=str,
)
def test_a_claim_allows_what_it_says(claim: Claim, text_bytes: int, expected: tuple[bytes, bool] | None) -> None:
    """A text is low and more of high, on a character border; beyond high only if it may have grown."""
    assert claim.candidate(text_bytes) == expected


def test_an_answer_leaves_one_possibility() -> None:
    """And a request without one leaves what was, and what it may have come to."""
    assert SAID.text == "one two"
    asked = SAID.unanswered(Claim("one two", "one two three", grows=True))
    assert asked.text is None
    assert [claim.low for claim in asked.claims] == ["one two", "one two"]
    assert not asked.absent
    assert NEW.unanswered(Claim("", "x")).absent, "a first request may not have made the agent"
    assert SAID.unanswered(may_vanish=True).absent


def test_a_turn_that_ends_inside_a_token_may_keep_less_than_it_gave() -> None:
    """A stop string in a token: what comes before it is given out, and the token is not kept."""
    answered = SAID.answered("one two thr", durable=True, daemon_pid=1, least="one two ")
    assert answered.text is None
    assert answered.claims[0].candidate(len("one two t")) == (b"one two t", True)
    assert answered.claims[0].candidate(len("one")) is None


def test_what_was_not_durable_may_go_with_its_daemon_and_only_then() -> None:
    """P2: durable is a promise for ever, `durable: false` one for the life of the daemon."""
    lax = SAID.answered("one two three", durable=False, daemon_pid=1)
    assert lax.as_seen_by(1).text == "one two three"
    after = lax.as_seen_by(2)
    assert {claim.high for claim in after.claims} == {"one two", "one two three"}
    assert SAID.as_seen_by(2).text == "one two"
    first = NEW.answered("x", durable=False, daemon_pid=1)
    assert not first.as_seen_by(1).absent
    assert first.as_seen_by(2).absent
    chat = Transcript("c", "chat").conversed((), tokens=40, durable=True, daemon_pid=1)
    chat = chat.conversed((), tokens=90, durable=False, daemon_pid=1)
    assert (chat.floor_tokens, chat.as_seen_by(2).floor_tokens) == (90, 40)


def test_a_shelf_outlives_its_client(tmp_path: Path) -> None:
    """Transcripts and journal are read back; a line and a file that SIGKILL tore are passed over."""
    shelf = Shelf.open(tmp_path / "shelf")
    shelf.put(SAID.unanswered(Claim("one two", "é", grows=True)))
    shelf.put(
        Transcript("b", "chat").conversed(({"role": "user", "content": "hi"},), tokens=3, durable=True, daemon_pid=7)
    )
    shelf.note("turn", outcome="length")
    with (shelf.folder / "journal.jsonl").open("a") as journal:
        journal.write('{"event": "tu')
    (shelf.folder / "torn.new").write_text("{")
    again = Shelf.open(tmp_path / "shelf")
    assert again.transcripts == shelf.transcripts
    assert [entry["event"] for entry in again.journal()] == ["turn"]
    again.forget("a")
    assert set(Shelf.open(tmp_path / "shelf").transcripts) == {"b"}


def test_a_cut_ends_on_a_character() -> None:
    """What the daemon says it kept must be the beginning of the text."""
    assert cut("aé", 3) == "aé"
    for text_bytes in (2, 4):
        with pytest.raises(Violation):
            cut("aé", text_bytes)
