"""Turns of a model with a sliding group: RAM, reads and losses are those of its window."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.errors import BudgetExceeded
from kvd.quant.spec import PAGE_TOKENS
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of

FULL, SLIDING = 0, 1
WINDOW = 200


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A world with room for everything, whose second group sees a window."""
    return make_world(window=WINDOW)


def states(world: World, name: str = "a") -> list[str]:
    """States of the sliding group's sealed pages."""
    segment = world.core.pager.segments(world.agent(name).branch.space)[SLIDING]
    return [str(page.state) for page in segment.pages]


def long_agent(world: World, name: str = "a") -> str:
    """An agent of six pages and a window that begins in its fifth or sixth; returns its text."""
    world.generate(name, text_of(100), max_tokens=2)
    world.settle()
    assert len(world.page_ids(name)) == 5
    return world.text(name)


def test_a_long_prompt_keeps_its_window_only_and_is_answered_alike(world: World) -> None:
    """P31: what lies before the window is on disk alone, and greedy answers are those of a model that keeps it all."""
    text = long_agent(world)
    branch = world.agent("a").branch
    assert world.truth.is_greedy(branch.tokens, len(branch.tokens) - 2)
    assert states(world)[:4] == ["evicted"] * 4
    facts = world.job("prefetch", "a").facts
    assert facts["behind_window_pages"] >= 4
    assert facts["needed_bytes"] < facts["total_bytes"]
    turn = world.generate("a", text, max_tokens=1).turn
    assert (turn.match, turn.swapped_in_pages, turn.durable) == ("exact", 0, True)
    assert world.truth.is_greedy(world.agent("a").branch.tokens, turn.prompt_tokens)


def test_a_restart_reads_the_window(world: World) -> None:
    """P2, P14: after a crash the resumed turn reads every page of the full group, and of the other one or two."""
    text = long_agent(world)
    computed = world.agent("a").branch.computed
    world.crash()
    turn = world.generate("a", text + " and", max_tokens=2).turn
    assert turn.cached_tokens == computed
    first = (computed - WINDOW) // PAGE_TOKENS
    assert world.core.memory.statistics.pages_loaded == 5 + (5 - first)
    branch = world.agent("a").branch
    assert world.truth.is_greedy(branch.tokens, turn.prompt_tokens)


@pytest.mark.parametrize("tokens", [PAGE_TOKENS, 2 * PAGE_TOKENS + 70, 900])
def test_rollback_and_fork_bring_the_older_window_back(world: World, tokens: int) -> None:
    """P14: cut to where the window was long ago, an agent goes on from the exact token with what was stored."""
    long_agent(world)
    for name, job, more in (("b", "fork", {"new_agent": "b"}), ("a", "rollback", {})):
        assert world.job(job, "a", tokens=tokens, **more).facts["durable"]
        text = world.text(name)
        computed = world.agent(name).branch.computed
        turn = world.generate(name, text + "###", max_tokens=2).turn
        assert "page lost" not in turn.match_reason
        assert turn.cached_tokens == computed
        assert world.truth.is_greedy(world.agent(name).branch.tokens, turn.prompt_tokens)


def test_a_corrupt_page_behind_the_window_is_found_by_who_needs_it(world: World) -> None:
    """P4: the agent runs on and stays durable; a divergence back to the page says so and computes it again."""
    text = long_agent(world)
    world.spoil_page(world.page_ids("a", SLIDING)[1])
    world.crash()
    longer = world.generate("a", text + " more", max_tokens=1).turn
    assert "page lost" not in longer.match_reason
    assert longer.durable
    assert longer.cached_tokens > 5 * PAGE_TOKENS
    cut = world.agent("a").branch.text_bytes_of(PAGE_TOKENS + 90)
    turn = world.generate("a", text[:cut] + "###", max_tokens=2).turn
    assert f"page lost at token {PAGE_TOKENS}" in turn.match_reason
    assert turn.cached_tokens == PAGE_TOKENS
    assert turn.durable
    assert world.truth.is_greedy(world.agent("a").branch.tokens, turn.prompt_tokens)
    again = world.generate("a", text + " more", max_tokens=1).turn
    assert again.cached_tokens >= longer.cached_tokens, "the abandoned branch was left alone"
    assert again.durable
    world.crash()
    assert world.generate("a", text + " more", max_tokens=1).turn.durable


@pytest.mark.parametrize("tokens", [2 * PAGE_TOKENS + 9, 2 * PAGE_TOKENS, PAGE_TOKENS + 9])
def test_a_missing_page_behind_the_window_does_no_harm(world: World, tokens: int) -> None:
    """P5, P8: turns, forks and restarts stay durable without the file; a rollback that needs it computes it again."""
    text = long_agent(world)
    gone = world.page_ids("a", SLIDING)[1]
    world.fs.unlink(world.page_path(gone))
    world.crash(lossy=False)
    turn = world.generate("a", text + " more", max_tokens=1).turn
    assert turn.durable, turn.durable_reason
    assert turn.cached_tokens > 5 * PAGE_TOKENS
    fork = world.job("fork", "a", new_agent="b", tokens=len(world.agent("a").branch.tokens)).facts
    assert fork["durable"], fork["durable_reason"]
    world.crash(lossy=False)
    assert world.generate("b", world.text("b") + " more", max_tokens=1).turn.durable
    facts = world.job("rollback", "a", tokens=tokens).facts
    assert facts["durable"], facts["durable_reason"]
    assert len(world.agent("a").branch.tokens) == tokens
    after = world.generate("a", world.text("a") + "###", max_tokens=2).turn
    assert after.durable, after.durable_reason
    assert world.truth.is_greedy(world.agent("a").branch.tokens, after.prompt_tokens)
    assert gone not in world.page_ids("a", SLIDING)


def test_a_disk_that_refuses_loses_nothing(make_world: Callable[..., World]) -> None:
    """P26: in RAM alone, pages behind the window stay until the disk takes them; then they go."""
    world = make_world(window=WINDOW)
    world.refuse_writes()
    turn = world.generate("a", text_of(100), max_tokens=2).turn
    assert not turn.durable
    assert not {"clean", "evicted"} & set(states(world))
    assert world.core.pager.statistics().behind_window_bytes > 0
    back = world.job("rollback", "a", tokens=300).facts
    assert not back["durable"]
    text = world.text("a")
    assert "page lost" not in world.generate("a", text + "###", max_tokens=1).turn.match_reason
    world.heal()
    for _ in range(70):
        world.settle()
    world.save_unsaved()
    assert world.agent("a").unsaved is None
    assert world.core.pager.statistics().behind_window_bytes == 0


def test_a_prompt_fits_when_its_window_does(make_world: Callable[..., World]) -> None:
    """P21, P22: a budget that is too small for all tokens of all layers admits it, and is never exceeded meanwhile."""
    budget = 12  # pages of either group on average: six and six without a window, fewer with the reserves
    plain = make_world(budget_pages=budget)
    assert isinstance(plain.generate("a", text_of(100), max_tokens=1).error, BudgetExceeded)
    small = make_world(budget_pages=budget, window=WINDOW, chunk_tokens=64)
    turn = small.generate("a", text_of(100), max_tokens=4).turn
    assert turn.durable
    assert small.truth.is_greedy(small.agent("a").branch.tokens, turn.prompt_tokens)
    small.check()
    peak_bytes = small.core.pager.statistics().peak_total_bytes
    assert peak_bytes <= small.core.pager.statistics().budget_bytes
    tiny = make_world(budget_pages=9, window=WINDOW, chunk_tokens=64)
    assert isinstance(tiny.generate("a", text_of(100), max_tokens=4).error, BudgetExceeded)


def test_a_pin_counts_the_window(make_world: Callable[..., World]) -> None:
    """A pinned agent holds what its next step sees, so more agents can be pinned beside each other."""
    world = make_world(window=WINDOW, budget_pages=40, sharing="agent")
    for name in ("a", "b", "c"):
        long_agent(world, name)
        world.job("pin", name)
    held = sum(world.agent(name).pinned for name in ("a", "b", "c"))
    plain = make_world(budget_pages=40, sharing="agent")
    for name in ("a", "b", "c"):
        long_agent(plain, name)
        plain.job("pin", name)
    assert held > sum(plain.agent(name).pinned for name in ("a", "b", "c"))
    assert world.core.pager.statistics().pinned_bytes == sum(
        world.core.pager.residency(world.agent(name).branch.space).needed_bytes
        for name in ("a", "b", "c")
        if world.agent(name).pinned
    )
