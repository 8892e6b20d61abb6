"""One turn on a healthy disk: matching, exact resumption, text that surfaces, refusals, cancellation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd.errors import BudgetExceeded, Cancelled, ContextFull, InvalidParams
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import MAX_BRANCHES
from kvd.scheduler.turn import TurnState
from kvd.vm.text import Span, TypedText
from tests.scheduler.fake_model import CONTEXT_TOKENS
from tests.scheduler.harness import World, content

LINE = " the memory of a small system course little know last water"


def text_of(lines: int) -> str:
    """About 11 tokens a line, no two lines alike."""
    return "".join(f"{LINE} {number}\n" for number in range(lines))


def test_a_new_agent_computes_all_and_reuses_nothing(world: World) -> None:
    """The first turn is `new`; its tokens are computed once each, the last one not yet (P1)."""
    outcome = world.generate("a", text_of(3), max_tokens=5)
    turn, branch = outcome.turn, world.agent("a").branch
    assert (turn.match, turn.cached_tokens, turn.finish_reason) == ("new", 0, "length")
    # the fake model likes half characters: those at the end do not stay, and their KV is cut
    assert 0 < turn.completion_tokens <= 5
    assert len(branch.tokens) == turn.prompt_tokens + turn.completion_tokens
    assert world.model.tokens_seen == turn.prompt_tokens + 4 == world.core.stats.tokens_computed
    assert outcome.streamed == turn.text
    assert turn.durable
    assert [event["type"] for event in outcome.events if event["type"] != "text"] == [
        "matched",
        "prefill",
        "first_token",
        "usage",
        "durable",
    ]


@pytest.mark.parametrize("lines", [1, 23, 40])
def test_an_extended_prompt_resumes_at_the_exact_token(world: World, lines: int) -> None:
    """Five turns, each a hit: every token with KV is reused, whatever its place in a page (P14, P16)."""
    text = text_of(lines)
    for number in range(5):
        before = world.agent("a").branch.computed if number else 0
        seen = world.model.tokens_seen
        turn = world.generate("a", text, max_tokens=3).turn
        assert turn.match == ("extend" if number else "new")
        assert turn.cached_tokens == before
        assert world.model.tokens_seen - seen == world.agent("a").branch.computed - before
        text = world.text("a") + " and so on"


def test_exact_with_a_pending_token_computes_just_that_one(world: World) -> None:
    """The same text again needs the KV of the pending token and nothing else."""
    first = world.generate("a", text_of(3), max_tokens=2).turn
    again = world.generate("a", world.text("a"), max_tokens=1).turn
    assert again.match == "exact"
    assert again.prompt_tokens == first.prompt_tokens + 2
    assert again.cached_tokens == again.prompt_tokens - 1
    assert world.core.stats.tokens_replayed == 0


def test_exact_without_a_pending_token_replays_the_last_one(world: World) -> None:
    """With all KV there, one token runs again for its logits and writes nothing; the continuation is the same."""
    text = text_of(24)
    world.inject("a", text)
    steps = world.core.stats.tokens_computed
    turn = world.generate("a", text, max_tokens=3).turn
    assert (turn.match, turn.cached_tokens) == ("exact", turn.prompt_tokens - 1)
    assert world.core.stats.tokens_replayed == 1
    assert world.core.stats.tokens_computed == steps + 2
    assert world.generate("b", text, max_tokens=3).turn.text == turn.text


def test_a_diverging_prompt_forks_and_the_old_branch_stays_a_hit(world: World) -> None:
    """The common part is reused to the token, the divergence is reported, flipping back costs nothing (P12, P16)."""
    base = text_of(30)
    first = world.generate("a", base + " one", max_tokens=2).turn
    old_text, old_computed = world.text("a"), world.agent("a").branch.computed
    turn = world.generate("a", base + " two", max_tokens=2).turn
    assert turn.match == "diverge"
    assert turn.divergence is not None
    assert turn.divergence["character"] == len(base) + 1
    assert str(turn.divergence["found"]) == "two"
    assert turn.cached_tokens >= first.prompt_tokens - 6
    assert world.truth.is_greedy(world.agent("a").branch.tokens, turn.prompt_tokens)
    back = world.generate("a", old_text + " more", max_tokens=1).turn
    assert (back.match, back.cached_tokens) == ("extend", old_computed)
    assert len(world.agent("a").branches) == 2


def test_an_answer_that_was_asked_for_anew_and_is_shorter_is_extended(world: World) -> None:
    """The branch of the longer answer has the pending token's KV, and yet an ordinary turn is no divergence."""
    world.generate("a", text_of(30), max_tokens=8)
    world.generate("a", text_of(30), max_tokens=3)
    assert len(world.agent("a").branches) == 2
    short = world.text("a")
    computed = world.agent("a").branch.computed
    assert computed == len(world.agent("a").branch.tokens) - 1
    turn = world.generate("a", short + " and then", max_tokens=2).turn
    assert (turn.match, turn.match_reason) == ("extend", "all stored text matched")
    assert turn.cached_tokens == computed
    assert len(world.agent("a").branches) == 2


def test_a_strict_prefix_is_a_divergence_with_all_of_it_matched(world: World) -> None:
    """A prompt that ends inside the stored text keeps its whole tokens."""
    world.generate("a", text_of(30), max_tokens=2)
    kept = world.text("a")[: len(text_of(12))]
    turn = world.generate("a", kept, max_tokens=1).turn
    assert turn.match == "diverge"
    assert turn.match_reason.startswith("prompt ended")
    assert turn.cached_tokens >= turn.prompt_tokens - 3


def test_a_prompt_that_ends_inside_a_stored_token(world: World) -> None:
    """A cut inside a character's tokens goes back to the character's start; nothing of it is reused twice."""
    world.inject("a", "the 日本語 memory")
    turn = world.generate("a", "the 日本", max_tokens=1).turn
    assert turn.match == "diverge"
    assert world.text("a").startswith("the 日本")
    other = world.generate("a", "the 日x", max_tokens=1).turn
    assert other.match == "diverge"
    assert world.text("a").startswith("the 日x")


def test_branches_beyond_the_limit_are_let_go_of(world: World) -> None:
    """An agent keeps a few abandoned branches; the rest leaves RAM, log and disk (P25)."""
    base = text_of(30)
    for number in range(MAX_BRANCHES + 4):
        world.generate("a", f"{base} {number}" + text_of(26), max_tokens=1)
    agent = world.agent("a")
    assert len(agent.branches) == MAX_BRANCHES + 1
    world.job("compact", "a")
    world.settle()
    assert agent.dropped_branches == []
    mapped = {
        page.ref.page_id
        for branch in agent.branches.values()
        for segment in world.core.pager.segments(branch.space)
        for page in segment.pages
    }
    files = [path for path in world.fs.live_files() if path.suffix == ".safetensors"]
    assert len(files) == len(mapped)
    world.crash()
    assert set(world.agent("a").branches) == set(agent.branches)


def test_what_looks_like_control_text_is_not(world: World) -> None:
    """Text a client typed never matches template text of the same bytes (DESIGN 7)."""
    marker = b"<|im_start|>user\n"
    typed = TypedText(marker + b"hello", (Span("control", len(marker)), Span("content", 5)))
    world.generate("a", typed, max_tokens=1)
    turn = world.generate("a", content(marker + b"hello"), max_tokens=1).turn
    assert (turn.match, turn.cached_tokens) == ("diverge", 0)
    same = world.generate("a", typed, max_tokens=1).turn
    assert same.cached_tokens > 0


def test_generated_text_that_comes_back_as_content_matches(world: World) -> None:
    """Clients send the model's words back as their own: ids stay as they were generated (P17)."""
    world.generate("a", text_of(2), max_tokens=6)
    ids, computed = list(world.agent("a").branch.tokens), world.agent("a").branch.computed
    turn = world.generate("a", world.text("a") + " and", max_tokens=1).turn
    assert turn.cached_tokens == computed
    assert world.agent("a").branch.tokens[: len(ids)] == ids


@pytest.mark.parametrize("sharing", ["namespace", "agent"])
def test_an_agent_never_continues_another_ones_context(make_world: Callable[..., World], sharing: str) -> None:
    """Identity is explicit: equal text gives equal answers and no shared address space (P10, P19)."""
    world = make_world(sharing=sharing)
    text = text_of(30)
    first = world.generate("a", text, max_tokens=2).turn
    second = world.generate("b", text, max_tokens=2).turn
    whole = first.prompt_tokens // PAGE_TOKENS * PAGE_TOKENS if sharing == "namespace" else 0
    assert (second.match, second.cached_tokens, second.text) == ("new", whole, first.text)
    assert world.agent("a").branch.space != world.agent("b").branch.space
    world.generate("a", world.text("a") + " only a", max_tokens=1)
    assert "only a" not in world.text("b")


def test_a_stop_string_never_reaches_client_or_agent(world: World) -> None:
    """The text ends before it, the branch too, and the next turn goes on from there."""
    free = world.generate("free", text_of(3), max_tokens=12).turn.text
    stop = free[4:7]
    outcome = world.generate("a", text_of(3), max_tokens=12, stop=(stop,))
    turn = outcome.turn
    assert turn.finish_reason == "stop"
    assert turn.text == outcome.streamed == free[: free.index(stop)]
    assert (text_of(3) + turn.text).startswith(world.text("a"))
    after = world.generate("a", text_of(3) + turn.text + "!", max_tokens=1).turn
    assert after.match == "extend"


def test_a_stop_string_across_a_page_border_cuts_back_into_the_sealed_page(world: World) -> None:
    """Overshoot that filled a page is cut inside it: a private copy of its head stays, and it is what it was."""
    ids = world.codec.encode_content(text_of(40))
    text = world.codec.surface(ids[: PAGE_TOKENS - 2])[0].decode()
    free = world.generate("free", text, max_tokens=8).turn.text
    tail = next(free[-n:] for n in range(2, len(free)) if free.index(free[-n:]) == len(free) - n)
    turn = world.generate("a", text, max_tokens=30, stop=(tail,)).turn
    assert turn.finish_reason == "stop"
    branch = world.agent("a").branch
    assert branch.computed < len(world.agent("free").branch.tokens)
    world.check()
    world.crash()
    assert world.generate("a", world.text("a") + " on", max_tokens=2).turn.cached_tokens == branch.computed


def longest_word(world: World) -> tuple[int, str]:
    """The longest token of plain letters behind a blank, and its text."""
    texts = {token: world.codec.token_bytes(token) for token in range(world.codec.token_count)}
    words = [token for token, data in texts.items() if data[:1] == b" " and data[1:].isalpha()]
    token = max(words, key=lambda each: len(texts[each]))
    return token, texts[token].decode()


def test_what_was_told_before_a_stop_string_inside_a_token_is_the_agents(world: World) -> None:
    """What is injected stands behind the text that the client has, and not before its end; after a crash, too."""
    token, word = longest_word(world)
    assert len(word) > 4
    stop = (word[3:] + word[:2],)
    outcome = world.generate("a", text_of(2), max_tokens=8, stop=stop, logit_bias=((token, 1e6),))
    turn, told = outcome.turn, text_of(2) + word[:3]
    assert (turn.text, outcome.streamed, turn.finish_reason) == (word[:3], word[:3], "stop")
    assert turn.completion_tokens == 0, "what is encoded anew is no token that the model chose"
    branch = world.agent("a").branch
    assert world.text("a") == told
    assert len(branch.tokens) - branch.computed == 1
    assert branch.typed.spans[-1].kind == "generated"
    world.check()
    world.crash()
    assert world.inject("a", " And so").turn.match == "extend"
    assert world.text("a") == told + " And so"
    again = world.generate("a", told + " And so on", max_tokens=2).turn
    assert (again.match, again.match_reason) == ("extend", "all stored text matched")
    assert world.truth.is_greedy(world.agent("a").branch.tokens, again.prompt_tokens)


def test_what_would_be_several_tokens_is_told_and_not_kept(world: World) -> None:
    """All but one of them would need a step, which a turn that is over must not depend on; both are an extension."""
    token, word = longest_word(world)
    encode = world.core.encode

    def by_characters(typed: TypedText, *, at_start: bool) -> tuple[list[int], list[int]]:
        if [span.kind for span in typed.spans] != ["generated"]:
            return encode(typed, at_start=at_start)
        ids = [world.codec.encode_content(character)[0] for character in typed.data.decode()]
        return ids, [1] * len(ids)

    world.core.encode = by_characters  # type: ignore[method-assign]
    options: dict[str, Any] = {"max_tokens": 8, "stop": (word[3:] + word[:2],), "logit_bias": ((token, 1e6),)}
    outcome = world.generate("a", text_of(2), **options)
    assert (outcome.error, outcome.turn.text) == (None, word[:3])
    assert world.text("a") == text_of(2)
    world.check()
    world.core.encode = encode  # type: ignore[method-assign]
    assert world.generate("a", text_of(2) + word[:3] + " on", max_tokens=1).turn.match == "extend"


def test_a_turn_cancelled_while_its_kv_was_away_keeps_nothing_that_was_not_there(world: World) -> None:
    """KV that was lost cuts the agent inside the prompt: what was told stands behind all of that, or not at all."""
    prompt, (token, _) = text_of(20), longest_word(world)
    seen: list[str] = []

    def preempt_and_cancel(state: TurnState) -> None:
        residence = state.residence
        branch = None if residence is None else residence._branch
        if residence is None or branch is None:
            return
        if branch.computed > PAGE_TOKENS and not seen:
            seen.append("wanted")
            state.slot_wanted = True
        elif residence.is_away and seen == ["wanted"]:
            residence._drop_tails(branch)
            seen.append("cancelled")
            state.cancelled = True

    options: dict[str, Any] = {"stop": ("zzzz",), "logit_bias": ((token, 1e6),)}
    outcome = world.generate("a", prompt, max_tokens=30, on_step=preempt_and_cancel, **options)
    assert isinstance(outcome.error, Cancelled)
    assert seen == ["wanted", "cancelled"]
    assert len(world.agent("a").branch.tokens) <= PAGE_TOKENS
    assert (prompt + outcome.streamed).startswith(world.text("a"))
    world.check()


def test_the_end_token_ends_the_turn_and_is_not_text(world: World) -> None:
    """A control token that ends a generation is never part of the text; everything before it has KV."""
    end = min(world.codec.eos_ids)
    turn = world.generate("a", text_of(2), max_tokens=5, logit_bias=((end, 1e6),)).turn
    assert (turn.finish_reason, turn.text, turn.completion_tokens) == ("stop", "", 0)
    branch = world.agent("a").branch
    assert branch.computed == len(branch.tokens) == turn.prompt_tokens


def test_half_a_character_never_surfaces_or_stays(world: World) -> None:
    """Half a character at the end is dropped; broken ones that were given out stay (P11: stream and agent alike)."""
    lead = world.codec.encode_content("é")[0]
    assert world.codec.token_bytes(lead) == "é".encode()[:1]
    outcome = world.generate("a", text_of(2), max_tokens=3, logit_bias=((lead, 1e6),))
    assert outcome.streamed == outcome.turn.text == "\N{REPLACEMENT CHARACTER}" * 2
    assert outcome.turn.completion_tokens == 2
    assert world.text("a") == text_of(2) + outcome.turn.text
    world.check()


def test_sampling_goes_on_after_a_crash_as_if_nothing_happened(make_world: Callable[..., World]) -> None:
    """With a seed, the continuation after a crash draws what an unbroken twin draws (DESIGN 6)."""
    whole, broken = make_world(), make_world()
    options = {"temperature": 1.5, "seed": 11}
    for world in (whole, broken):
        world.generate("a", text_of(26), max_tokens=4, **options)
    broken.crash()
    texts = [
        world.generate("a", world.text("a") + " so", max_tokens=6, **options).turn.text for world in (whole, broken)
    ]
    assert texts[0] == texts[1]


def test_injected_text_is_computed_and_saved(world: World) -> None:
    """`inject` appends without matching or generating, to a new agent too."""
    assert world.inject("a", "the first").turn.match == "new"
    turn = world.inject("a", " and the second").turn
    assert (turn.match, turn.finish_reason, turn.completion_tokens) == ("extend", "injected", 0)
    branch = world.agent("a").branch
    assert world.text("a") == "the first and the second"
    assert branch.computed == len(branch.tokens) == turn.prompt_tokens


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused_for_a_new_agent(world: World) -> None:
    """There is nothing to compute logits from; no agent comes into being."""
    outcome = world.generate("a", "", max_tokens=1)
    assert isinstance(outcome.error, InvalidParams)
    assert not world.has("a")
    assert not world.core.pager.statistics().spaces


def test_an_empty_prompt_of_an_agent_that_has_text_is_refused(world: World) -> None:
    """A client that lost its text hears of it; the agent keeps its own."""
    world.generate("a", text_of(2), max_tokens=1)
    before = world.text("a")
    outcome = world.generate("a", "", max_tokens=1)
    assert isinstance(outcome.error, InvalidParams)
    assert world.text("a") == before


@pytest.mark.parametrize(
    ("lines", "max_tokens", "error"),
    [(8, CONTEXT_TOKENS, ContextFull), (400, 1, ContextFull), (100, 1, BudgetExceeded), (8, 1500, BudgetExceeded)],
)
def test_what_can_never_fit_is_refused_with_both_figures(
    make_world: Callable[..., World], lines: int, max_tokens: int, error: type[Exception]
) -> None:
    """A refusal names need and limit and leaves agent, branches and books as they were (P22)."""
    world = make_world(budget_pages=12)
    world.generate("a", text_of(4), max_tokens=1)
    before = world.text("a"), list(world.agent("a").branches), world.agent("a").seq
    outcome = world.generate("a", "x" + text_of(lines), max_tokens=max_tokens)
    assert isinstance(outcome.error, error)
    assert sum(isinstance(value, int) for value in outcome.error.data.values()) >= 2
    assert (world.text("a"), list(world.agent("a").branches), world.agent("a").seq) == before
    assert isinstance(world.generate("new", text_of(lines), max_tokens=max_tokens).error, error)
    assert not world.has("new")
    assert world.generate("a", world.text("a") + "!", max_tokens=1).turn.match == "extend"


def test_a_bias_outside_the_vocabulary_is_refused_before_anything_is_computed(world: World) -> None:
    """Sampling parameters are checked first: the agent is unchanged, a new one does not come into being."""
    bias = ((world.spec.vocab_tokens, 1.0),)
    outcome = world.generate("a", text_of(2), max_tokens=1, logit_bias=bias)
    assert isinstance(outcome.error, InvalidParams)
    assert not world.has("a")
    assert world.model.tokens_seen == 0


# ---- cancellation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(1, 7))
def test_a_cancelled_prefill_keeps_whole_chunks(make_world: Callable[..., World], after: int) -> None:
    """What was computed is kept, saved, on a character border, and the next turn starts there (P34)."""
    world = make_world(chunk_tokens=50)
    text = "é日🙂".join(text_of(5).split(" "))
    outcome = world.generate("a", text, max_tokens=2, cancel_after=after)
    assert isinstance(outcome.error, Cancelled)
    steps = world.core.stats.tokens_computed
    assert steps % 50 == 0
    assert steps <= 50 * after
    if not steps:
        assert not world.has("a")
        return
    branch = world.agent("a").branch
    assert steps - 4 < branch.computed <= steps
    assert len(branch.tokens) - branch.computed <= 1
    assert text.startswith(world.text("a"))
    world.crash()
    turn = world.generate("a", text, max_tokens=1).turn
    assert turn.cached_tokens >= branch.computed - 4


def test_a_cancelled_decode_keeps_what_was_given_out(world: World) -> None:
    """The text streamed so far is in the agent; the error says how much there is."""
    outcome = world.generate("a", text_of(2), max_tokens=50, cancel_after=6)
    assert isinstance(outcome.error, Cancelled)
    assert 0 < outcome.error.data["completion_tokens"] < 50  # type: ignore[operator]
    assert outcome.error.data["durable"] is True
    assert text_of(2) + outcome.streamed == world.text("a")


def test_a_cancelled_divergence_that_came_to_nothing_leaves_the_agent_as_it_was(world: World) -> None:
    """No half-made branch stays current, in RAM or in the log."""
    world.generate("a", text_of(30), max_tokens=1)
    world.job("evict", "a")  # so that the new branch has to wait for its pages
    before = world.text("a"), list(world.agent("a").branches)
    made = []

    def cancel(state: TurnState) -> None:
        state.cancelled = len(world.agent("a").branches) > 1
        made.append(state.cancelled)

    outcome = world.generate("a", text_of(20) + " other" * 30, max_tokens=1, on_step=cancel)
    assert made[-1], "a branch was made"
    assert isinstance(outcome.error, Cancelled)
    assert (world.text("a"), list(world.agent("a").branches)) == before
    world.crash()
    assert (world.text("a"), list(world.agent("a").branches)) == before


def test_a_turn_that_waits_for_pages_can_be_cancelled(world: World) -> None:
    """Cancellation does not wait for the disk; the pages that come later are welcome."""
    world.generate("a", text_of(60), max_tokens=1)
    world.job("evict", "a")
    outcome = world.generate("a", world.text("a") + " on", max_tokens=1, cancel_after=1)
    assert isinstance(outcome.error, Cancelled)
    world.settle()
    world.check()
    assert world.generate("a", world.text("a") + " on", max_tokens=1).turn.match == "extend"
