"""Broken streams go on at the exact token: after a kill, a lost connection, with all that is derived of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvd.errors import Cancelled, InvalidParams
from kvd.ids import GroupId
from kvd.scheduler.errors import NotResumable
from kvd.scheduler.requests import Resume
from kvd.scheduler.sampling import Logits
from kvd.scheduler.turn import TurnState
from tests.scheduler.harness import Outcome, World
from tests.support.prose import prose

PROMPT = prose(250, "resumed")
MAX_TOKENS = 24
"""The page that is sealed at 256 tokens has answer in it."""


class Killed(BaseException):
    """The process went away in the middle of a turn."""


def broken(world: World, how: str, after: int, text: str = PROMPT, **options: Any) -> Outcome:
    """A resumable turn that ends when its stream has told `after` tokens: by a kill, or a lost connection."""
    seen = Outcome()

    def look(state: TurnState) -> None:
        emit = state.request.emit
        events = emit.__closure__[0].cell_contents.events  # type: ignore[index]  # of the harness's own outcome
        seen.events = events
        if len(seen.tokens) >= after:
            if how == "kill":
                raise Killed
            state.cancelled = True

    options.setdefault("max_tokens", MAX_TOKENS)
    try:
        outcome = world.turn("a", text, resumable=True, on_step=look, **options)
    except Killed:
        world.crash()
    else:
        assert isinstance(outcome.error, Cancelled)
    return seen


def resumed(world: World, seen: Outcome, text: str = PROMPT, **options: Any) -> Outcome:
    """The same call, behind what was seen."""
    options.setdefault("max_tokens", MAX_TOKENS)
    return world.turn("a", text, resumable=True, resume=Resume(seen.tokens, seen.resume_key), **options)


class Alternating:
    """A mask with a state: ids of one parity, by their place in the answer, as it was first called."""

    def __init__(self) -> None:
        self.start: int | None = None

    def __call__(self, ids: Sequence[int], logits: Logits) -> Logits:
        """Forbid every second id."""
        if self.start is None:
            self.start = len(ids)
        logits[(len(ids) - self.start) % 2 :: 2] = -np.inf
        return logits


@pytest.mark.parametrize("how", ["kill", "connection"])
@pytest.mark.parametrize(
    ("after", "options"),
    [(1, {}), (8, {"temperature": 0.9, "seed": 7}), (9, {"repetition_penalty": 1.3}), (23, {})],
)
def test_the_stream_goes_on_at_the_exact_token(
    make_world: Callable[..., World], how: str, after: int, options: dict[str, Any]
) -> None:
    """P14: no token twice, none missing, the same text as without a break; nothing of it is sampled anew."""
    whole = make_world().turn("a", PROMPT, max_tokens=MAX_TOKENS, resumable=True, **options)
    assert len(whole.tokens) == MAX_TOKENS
    world = make_world()
    seen = broken(world, how, after, **options)
    assert seen.tokens == whole.tokens[: len(seen.tokens)]
    again = resumed(world, seen, **options)
    assert seen.tokens + again.tokens == whole.tokens
    assert again.streamed == again.turn.text == whole.turn.text
    assert again.turn.completion_tokens == whole.turn.completion_tokens
    assert again.turn.prompt_tokens == whole.turn.prompt_tokens
    assert again.turn.resumed_tokens == min(len(seen.tokens), again.turn.completion_tokens)
    assert again.turn.finish_reason == "length"
    assert world.text("a") == PROMPT + whole.turn.text
    kinds = [event["type"] for event in again.events]
    assert kinds.count("first_token") == 1


def test_tokens_that_are_there_are_not_computed_again(make_world: Callable[..., World]) -> None:
    """P1, P40: a lost connection leaves prompt and answer in place; both are reused, and only the prompt counts."""
    world = make_world()
    seen = broken(world, "connection", 16)
    before = world.core.stats.tokens_computed
    again = resumed(world, seen)
    computed = world.core.stats.tokens_computed - before
    assert computed <= MAX_TOKENS - 16 + 4  # half a character is cut at the end of a cancelled turn
    assert again.turn.prompt_tokens - 1 <= again.turn.cached_tokens <= again.turn.prompt_tokens
    assert "resumed behind" in again.turn.match_reason


def test_progress_never_passes_its_end(make_world: Callable[..., World]) -> None:
    """P40: tokens of the answer that are there count in both figures; the last chunk is all of them."""
    world = make_world()
    seen = broken(world, "connection", 16)
    world.settle()
    page = world.core.pager.refs(world.agent("a").branch.space, GroupId(0), 0)[0].page_id
    assert world.job("evict", "a").error is None
    world.fs.unlink(world.page_path(page))
    told = [event for event in resumed(world, seen).events if event["type"] == "prefill"]
    assert told, "the page is lost, and what the agent still had of the answer is behind it"
    assert told[-1]["done_tokens"] == told[-1]["total_tokens"]
    assert all(event["done_tokens"] <= event["total_tokens"] for event in told)


@pytest.mark.parametrize("how", ["kill", "connection"])
def test_what_is_derived_from_tokens_comes_out_the_same(make_world: Callable[..., World], how: str) -> None:
    """Stop strings across the break, log-probabilities, masks with a state, all as without it."""
    plain = make_world().turn("a", PROMPT, max_tokens=MAX_TOKENS, resumable=True)
    text = plain.turn.text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    for options in ({"stop": (stop,)}, {"logprobs": 2}, {"hooks": True}, {"logprobs": 1, "stop": (stop, "zzz")}):

        def fresh(options: dict[str, Any] = options) -> dict[str, Any]:
            return {**options, "hooks": (Alternating(),)} if "hooks" in options else options

        whole = make_world().turn("a", PROMPT, max_tokens=MAX_TOKENS, resumable=True, **fresh())
        for after in (1, len(whole.tokens) - 1):
            world = make_world()
            seen = broken(world, how, after, **fresh())
            again = resumed(world, seen, **fresh())
            assert seen.tokens + again.tokens == whole.tokens, options
            assert (again.streamed, again.turn.text) == (whole.streamed, whole.turn.text)
            assert again.turn.stop_string == whole.turn.stop_string
            assert again.turn.logprobs == whole.turn.logprobs


def test_a_stream_may_break_again(make_world: Callable[..., World]) -> None:
    """Each break goes on behind all that was told, by kills and lost connections in turn."""
    whole = make_world().turn("a", PROMPT, max_tokens=MAX_TOKENS, resumable=True)
    world = make_world()
    seen = broken(world, "connection", 3)
    for number, how in enumerate(("kill", "connection", "kill")):
        resume = Resume(seen.tokens, seen.resume_key)
        more = broken(world, how, 5 * (number + 1) - 3, resume=resume)
        assert more.resume_key == seen.resume_key
        seen.events += more.events
    again = resumed(world, seen)
    assert again.turn.text == whole.turn.text
    assert seen.tokens + again.tokens == whole.tokens


def test_all_was_told_but_the_end(make_world: Callable[..., World]) -> None:
    """The turn was committed, its answer lost: it is told once more, and nothing is added."""
    world = make_world()
    whole = world.turn("a", PROMPT, max_tokens=MAX_TOKENS, resumable=True)
    for crash in (False, True):
        if crash:
            world.crash()
        again = resumed(world, whole)
        assert again.tokens == ()
        assert again.turn.text == whole.turn.text
        assert again.turn.finish_reason == "length"
        assert world.text("a") == PROMPT + whole.turn.text


def test_another_prompt_is_refused(make_world: Callable[..., World]) -> None:
    """P10: an agent whose tokens are others now goes on with nothing: an error says so, and nothing has changed."""
    world = make_world()
    seen = broken(world, "connection", 5)
    text = world.text("a")
    for prompt in (PROMPT + "x", PROMPT[:-1]):
        refused = resumed(world, seen, prompt)
        assert isinstance(refused.error, NotResumable)
        assert refused.error.data["resumed_tokens"] == len(seen.tokens)
        assert world.text("a") == text
    assert resumed(world, seen).error is None


def test_another_client_in_between(make_world: Callable[..., World]) -> None:
    """What somebody else made of the agent meanwhile is neither taken over nor lost."""
    whole = make_world().turn("a", PROMPT, max_tokens=MAX_TOKENS, resumable=True)
    world = make_world()
    seen = broken(world, "connection", 9)
    other = world.generate("a", PROMPT + " And now for something else.", max_tokens=3).turn
    again = resumed(world, seen)
    assert again.turn.text == whole.turn.text
    repeated = world.generate("a", PROMPT + " And now for something else." + other.text, max_tokens=1).turn
    assert repeated.match == "exact"


def test_tokens_that_no_stream_tells_are_refused(world: World) -> None:
    """The end of a text, and ids outside the vocabulary: nothing has changed."""
    whole = world.turn("a", PROMPT, max_tokens=4, resumable=True)
    for token in (world.core.spec.vocab_tokens, next(iter(world.core.codec.eos_ids))):
        refused = world.turn("a", PROMPT, max_tokens=8, resumable=True, resume=Resume((token,), whole.resume_key))
        assert isinstance(refused.error, InvalidParams)
    assert world.text("a") == PROMPT + whole.turn.text


@pytest.mark.parametrize("at", [0, 2, 5, 9])
def test_a_resumed_turn_cancelled_anywhere_leaves_a_whole_agent(make_world: Callable[..., World], at: int) -> None:
    """P2, P34: cancelled at any wait, a crash behind it; it can be resumed again, to the same text."""
    whole = make_world().turn("a", PROMPT, max_tokens=MAX_TOKENS, resumable=True)
    world = make_world()
    seen = broken(world, "connection", 11)
    stopped = resumed(world, seen, cancel_after=at)
    assert stopped.error is None or isinstance(stopped.error, Cancelled)
    world.crash()
    again = resumed(world, seen)
    assert again.turn.text == whole.turn.text
