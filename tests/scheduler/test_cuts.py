"""Divergence, rollback and fork cost what they keep: pages, RAM and log bytes of what they abandon are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.errors import BudgetExceeded
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import MAX_BRANCHES
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of


def evicted(world: World, name: str = "a", lines: int = 100) -> str:
    """An agent of several pages that are on disk only; returns its text."""
    world.generate(name, text_of(lines), max_tokens=2)
    world.settle()
    assert world.job("evict", name).facts["resident_pages"] == 0
    return world.text(name)


def pages_read(world: World) -> int:
    """Pages and tails read since start."""
    hands = world.core.memory.statistics
    return hands.pages_loaded + hands.tails_loaded


def test_a_prompt_with_nothing_in_common_reads_nothing(world: World) -> None:
    """What is abandoned is not swapped in first."""
    evicted(world)
    before = pages_read(world)
    turn = world.generate("a", "x" + text_of(3), max_tokens=1).turn
    assert (turn.match, turn.cached_tokens, turn.swapped_in_pages) == ("diverge", 0, 0)
    assert pages_read(world) == before


def test_a_divergence_reads_what_it_keeps(world: World) -> None:
    """Of many pages only those before the cut, and the one that is cut, in each group."""
    text = evicted(world)
    branch = world.agent("a").branch
    assert len(branch.tokens) > 5 * PAGE_TOKENS
    keep_bytes = branch.text_bytes_of(PAGE_TOKENS + 20)
    before = pages_read(world)
    turn = world.generate("a", text[:keep_bytes] + "###", max_tokens=1).turn
    assert PAGE_TOKENS < turn.cached_tokens <= PAGE_TOKENS + 20
    assert turn.swapped_in_pages == pages_read(world) - before == 4
    world.check()


@pytest.mark.parametrize(("tokens", "reads"), [(PAGE_TOKENS, 0), (PAGE_TOKENS + 9, 2)])
def test_rollback_and_fork_read_the_page_that_is_cut(world: World, tokens: int, reads: int) -> None:
    """None at a page border, one a group otherwise, and the result is whole after a crash."""
    text = evicted(world)
    before = pages_read(world)
    assert world.job("fork", "a", new_agent="b", tokens=tokens).facts["durable"]
    assert pages_read(world) - before == reads
    world.job("evict", "a")
    before = pages_read(world)
    assert world.job("rollback", "a", tokens=tokens).facts["durable"]
    assert pages_read(world) - before == reads
    world.crash()
    for name in ("a", "b"):
        assert text.startswith(world.text(name))
        assert world.generate(name, world.text(name) + "!", max_tokens=1).turn.cached_tokens == tokens
    world.check()


def test_an_agent_that_outgrew_the_budget_can_be_cut(make_world: Callable[..., World]) -> None:
    """After a restart with less memory, what is kept decides, and the refusal names what was asked for."""
    world = make_world(budget_pages=60)
    text = evicted(world)
    world.budget_pages = 10
    world.crash()
    error = world.generate("a", text + "!", max_tokens=1).error
    assert isinstance(error, BudgetExceeded)
    assert world.job("fork", "a", new_agent="b", tokens=PAGE_TOKENS + 7).facts["durable"]
    assert world.generate("a", text[:40] + "#", max_tokens=1).turn.match == "diverge"
    world.core.make_current(world.agent("a"), world.agent("a").branches[1])
    assert world.job("rollback", "a", tokens=PAGE_TOKENS - 3).facts["durable"]
    assert world.generate("a", world.text("a") + "!", max_tokens=1).turn.cached_tokens == PAGE_TOKENS - 3


def test_a_pinned_agent_goes_back_to_another_branch_although_both_do_not_fit(make_world: Callable[..., World]) -> None:
    """The pin is for the branch that comes of it; the one it was on does not stand in the way."""
    world = make_world(budget_pages=20)
    first = text_of(38)
    world.generate("a", first, max_tokens=1)
    world.generate("a", "y" + text_of(20), max_tokens=1)
    assert world.job("pin", "a").facts["durable"]
    world.generate("a", world.text("a") + text_of(22), max_tokens=1)
    turn = world.generate("a", first[:-5] + "else", max_tokens=1).turn
    assert turn.match == "diverge"
    assert turn.cached_tokens > PAGE_TOKENS
    assert world.core.pager.residency(world.agent("a").branch.space).pinned
    pinned = [b for b in world.agent("a").branches.values() if world.core.pager.residency(b.space).pinned]
    assert pinned == [world.agent("a").branch]


def test_regenerating_writes_what_is_new_and_no_more(world: World) -> None:
    """P15, P26: over many divergences the log is rewritten rarely, never before the reply, and stays bounded."""
    base = text_of(20)
    world.generate("a", base, max_tokens=1)
    written: list[int] = []
    for number in range(30):
        before = world.swap.statistics().bytes_written
        turn = world.generate("a", f"{base} {number}" + text_of(5), max_tokens=4).turn
        assert turn.durable
        written.append(world.swap.statistics().bytes_written - before)
        assert turn.written_bytes <= written[-1]
    assert max(written) < 4 * written[1], "no reply waits for a rewrite"
    before = world.swap.statistics().bytes_written
    for number in range(30, 60):
        world.generate("a", f"{base} {number}" + text_of(5), max_tokens=4)
        world.settle()
    total = world.swap.statistics().bytes_written - before
    assert total < 3 * sum(written), "rewrites cost no more than the turns themselves"
    assert world.swap.statistics().logs_compacted
    assert len(world.agent("a").branches) == MAX_BRANCHES + 1
