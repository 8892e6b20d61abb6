"""The model's context: exactly at the limit, one below, one over; refused or shortened, never half done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from kvd.errors import ContextFull
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.sampling import Logits
from tests.scheduler.fake_model import CONTEXT_TOKENS
from tests.scheduler.harness import Outcome, World
from tests.support.prose import prose


@dataclass(frozen=True)
class OneToken:
    """A logits hook that always chooses one token."""

    token: int

    def __call__(self, ids: Sequence[int], logits: Logits) -> Logits:
        """All but the token are masked."""
        chosen = np.full_like(logits, -np.inf)
        chosen[self.token] = 0.0
        return chosen


@pytest.fixture
def run(make_world: Callable[..., World], codec: TextCodec) -> Callable[..., Outcome]:
    """Runs a turn whose every new token is ` the` on an agent `a`."""
    world = make_world()
    (the,) = codec.encode_content(" the")

    def turn(text: str, max_tokens: int, on_context_full: str = "error", **options: object) -> Outcome:
        return world.turn(
            "a", text, max_tokens=max_tokens, on_context_full=on_context_full, hooks=(OneToken(the),), **options
        )

    turn.world = world  # type: ignore[attr-defined]
    return turn


@pytest.mark.parametrize(
    ("prompt", "asked", "made"),
    [
        (CONTEXT_TOKENS - 3, 3, 3),  # exactly full
        (CONTEXT_TOKENS - 3, 2, 2),  # one below
        (CONTEXT_TOKENS - 3, 4, 3),  # one over
        (CONTEXT_TOKENS - 1, 1, 1),
        (CONTEXT_TOKENS - 1, 1_000_000, 1),
        (CONTEXT_TOKENS, 0, 0),
        (CONTEXT_TOKENS, 1, 0),
    ],
)
def test_stop_ends_exactly_at_the_limit(run: Callable[..., Outcome], prompt: int, asked: int, made: int) -> None:
    """With `stop` a turn makes what there is room for, says whether the context ended it, and loses nothing (P20)."""
    turn = run(prose(prompt, 1), asked, "stop").turn
    assert (turn.prompt_tokens, turn.completion_tokens, turn.text) == (prompt, made, " the" * made)
    assert turn.context_full is (made < asked)
    assert turn.finish_reason == ("length" if made else "injected")
    again = run(prose(prompt, 1) + turn.text, 0).turn
    assert (again.match, again.prompt_tokens) == ("exact", prompt + made)


@pytest.mark.parametrize(("prompt", "asked"), [(CONTEXT_TOKENS - 3, 4), (CONTEXT_TOKENS, 1), (CONTEXT_TOKENS + 1, 0)])
def test_error_refuses_one_too_many_with_both_figures(run: Callable[..., Outcome], prompt: int, asked: int) -> None:
    """With `error` (the default) nothing of the agent changes, and the figures say by how much it was too long."""
    world: World = run.world  # type: ignore[attr-defined]
    run(prose(40, 1), 2)
    before = world.text("a"), list(world.agent("a").branches), world.agent("a").seq
    refused = run(prose(prompt, 1), asked).error
    assert isinstance(refused, ContextFull)
    assert refused.data == {"prompt_tokens": prompt, "max_tokens": asked, "context_tokens": CONTEXT_TOKENS}
    assert (world.text("a"), list(world.agent("a").branches), world.agent("a").seq) == before
    assert run(world.text("a") + " on", 1).turn.match == "extend"


@pytest.mark.parametrize("asked", [0, 1])
def test_a_prompt_over_the_limit_is_refused_by_stop_too(run: Callable[..., Outcome], asked: int) -> None:
    """What is sent is never cut: only new tokens can be fewer than asked for."""
    world: World = run.world  # type: ignore[attr-defined]
    refused = run(prose(CONTEXT_TOKENS + 1, 1), asked, "stop").error
    assert isinstance(refused, ContextFull)
    assert refused.data["prompt_tokens"] == CONTEXT_TOKENS + 1
    assert not world.has("a")


@pytest.mark.parametrize(("added", "fits"), [(9, True), (10, True), (11, False)])
def test_inject_fills_the_context_exactly(make_world: Callable[..., World], added: int, fits: bool) -> None:
    """Appended text may fill the context to its last token and not one more; a refusal leaves what was there."""
    world = make_world()
    world.inject("a", prose(CONTEXT_TOKENS - 10, 1))
    outcome = world.inject("a", prose(added, 2))
    tokens = len(world.agent("a").branch.tokens)
    if fits:
        assert outcome.turn.appended_tokens == added
        assert tokens == CONTEXT_TOKENS - 10 + added
    else:
        assert isinstance(outcome.error, ContextFull)
        assert tokens == CONTEXT_TOKENS - 10


def test_a_stop_string_in_a_shortened_turn_is_a_stop(run: Callable[..., Outcome]) -> None:
    """`context_full` is said only when it was the context that ended the text."""
    turn = run(prose(CONTEXT_TOKENS - 6, 1), 100, "stop", stop=("e the",)).turn
    assert (turn.finish_reason, turn.context_full, turn.text) == ("stop", False, " th")


@pytest.mark.parametrize("line", ["x", "the ", "e\u0301", "👨‍👩‍👧", "\n", "<|im_start|>"])
def test_a_megabyte_is_refused_by_its_beginning(world: World, line: str) -> None:
    """A text far over the limit is not encoded whole: the refusal names a lower bound, whatever the text is made of."""
    text = line * (1_000_000 // len(line.encode()))
    encoded: list[int] = []
    encode = world.core.codec.encode_typed
    world.core.codec.encode_typed = lambda typed, *, at_start=False: (  # type: ignore[method-assign]
        encoded.append(len(typed.data)) or encode(typed, at_start=at_start)  # type: ignore[func-returns-value]
    )
    try:
        refused = world.generate("a", text, max_tokens=1).error
    finally:
        del world.core.codec.encode_typed  # type: ignore[attr-defined]
    assert isinstance(refused, ContextFull)
    assert refused.data["at_least"] is True
    assert 2 * CONTEXT_TOKENS < refused.data["prompt_tokens"] <= len(text.encode())  # type: ignore[operator]
    assert "at least" in refused.message
    assert sum(encoded) <= 170_000
    assert not world.has("a")


def test_what_fits_passes_the_look_at_its_beginning(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the beginning only refuses what is certain: a text that fills the context passes however it looks."""
    monkeypatch.setattr("kvd.scheduler.admission.FIRST_LOOK_BYTES_PER_TOKEN", 1)
    text = prose(CONTEXT_TOKENS - 1, 1)
    assert world.generate("a", text, max_tokens=1).turn.prompt_tokens == CONTEXT_TOKENS - 1
