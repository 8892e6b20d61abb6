"""Packed tails in turns and jobs: idle agents count by their length, and nobody can tell from what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import Branch
from kvd.scheduler.views import agent_info, residency, statistics
from tests.scheduler.harness import World
from tests.scheduler.porting import FILE, bring, export, kv_of, make_out
from tests.scheduler.test_turn import text_of


def tail_states(branch: Branch, world: World) -> set[str]:
    """States of a branch's tails, one per cache group."""
    return {str(s.tail.state) for s in world.core.pager.segments(branch.space) if s.tail is not None}


def bytes_of(world: World, name: str) -> int:
    """What an idle agent takes: whole pages, and of the open ones their tokens."""
    pages, tokens = divmod(world.agent(name).branch.computed, PAGE_TOKENS)
    return pages * world.set_bytes + tokens * (world.set_bytes // PAGE_TOKENS)


def test_an_idle_agent_takes_the_bytes_of_its_tokens(world: World) -> None:
    """P15, P21: in the pager's books, in `agent.info`, in the page map, and in the memory that there is."""
    world.generate("a", text_of(40), max_tokens=4)
    tail_tokens = world.agent("a").branch.computed % PAGE_TOKENS
    assert tail_tokens, "the test needs an open page"
    world.settle()
    figures, expected = statistics(world.core), bytes_of(world, "a")
    assert figures["resident_bytes"] == agent_info(world.core, world.agent("a"))["resident_bytes"] == expected
    assert figures["packed_bytes"] == world.core.memory.packed_bytes == tail_tokens * world.set_bytes // PAGE_TOKENS
    assert world.core.memory.pool.resident_bytes == expected - world.core.memory.packed_bytes
    assert (figures["tails_packed"], figures["tails_unpacked"]) == (2, 0)
    branches: list[dict[str, object]] = residency(world.core, world.agent("a").ref)["agents"][0]["branches"]  # type: ignore[index]
    tails = [segment["tail"] for segment in branches[0]["segments"]]  # type: ignore[attr-defined]
    assert {(tail["tokens"], tail["state"]) for tail in tails} == {(tail_tokens, "packed")}
    assert sum(tail["ram_bytes"] for tail in tails) == world.core.memory.packed_bytes


def test_a_turn_after_a_pause_says_what_a_turn_at_once_says(make_world: Callable[..., World]) -> None:
    """P14, P16: turn after turn with the tail packed in between: every one a hit to the token, with the same text."""
    at_once, paused = make_world(), make_world()
    text = text_of(11)
    for number in range(5):
        results = []
        for world in (at_once, paused):
            results.append(world.generate("a", text, max_tokens=30).turn)
            world.check()
        assert results[0] == results[1]
        assert results[1].cached_tokens == (
            0 if not number else results[1].prompt_tokens - results[1].appended_tokens - 1
        )
        text += results[0].text + text_of(2)
        paused.settle()
        assert tail_states(paused.agent("a").branch, paused) == {"packed"}
        paused.check()
    assert paused.core.memory.statistics.tails_loaded == 0
    assert paused.core.pager.statistics().unpacks == 8
    assert at_once.core.pager.statistics().packs == 0


@pytest.mark.parametrize("window", [None, 300])
def test_forks_and_rollbacks_of_a_packed_agent(make_world: Callable[..., World], window: int | None) -> None:
    """P19: cut in the open page, in a sealed one, at the end; copies are of tokens, and each goes on from there."""
    world = make_world(window=window)
    world.generate("a", text_of(40), max_tokens=4)
    world.settle()
    tokens = world.agent("a").branch.computed
    for number, at in enumerate((tokens, tokens - 3, PAGE_TOKENS + 7, PAGE_TOKENS)):
        child = f"child-{number}"
        frames = len(world.core.memory.pool)
        facts = world.job("fork", "a", new_agent=child, tokens=at).facts
        assert facts["durable"]
        branch = world.agent(child).branch
        assert tail_states(branch, world) == ({"packed"} if branch.computed % PAGE_TOKENS else set())
        if window is None:
            assert len(world.core.memory.pool) == frames, "no frame is made for a fork"
        world.check()
        after = world.generate(child, world.text(child) + " and", max_tokens=2).turn
        assert after.cached_tokens == branch.computed - after.completion_tokens - after.appended_tokens + 1
        world.settle()
        world.check()
    for at in (tokens - 5, PAGE_TOKENS + 3):
        assert world.job("rollback", "a", tokens=at).facts["durable"]
        world.check()
        world.settle()
        assert tail_states(world.agent("a").branch, world) == {"packed"}
    world.crash()
    world.check()
    assert world.agent("a").branch.computed == PAGE_TOKENS + 3


def test_a_packed_tail_that_the_disk_refused_is_kept_and_saved_later(world: World) -> None:
    """Rule 7: it is the only copy: pressure does not drop it, the retry writes it from RAM, a crash then finds it."""
    world.refuse_writes(only=".log")
    assert not world.generate("a", text_of(9), max_tokens=3).turn.durable
    world.settle()
    branch = world.agent("a").branch
    assert tail_states(branch, world) == {"packed"}
    world.job("evict", "a")
    assert tail_states(branch, world) == {"packed"}
    world.check()
    world.heal()
    world.save_unsaved()
    assert agent_info(world.core, world.agent("a"))["durable"]
    before = world.agent("a").branch.tokens
    world.crash()
    assert world.agent("a").branch.tokens == before
    assert world.generate("a", world.text("a") + " more", max_tokens=1).turn.cached_tokens == len(before) - 1
    world.check()


def test_a_packed_agent_is_exported_and_imported_whole(world: World) -> None:
    """Its open page is taken from RAM as it lies there."""
    make_out(world)
    world.generate("a", text_of(40), max_tokens=4)
    world.settle()
    before = kv_of(world, "a")
    reads = world.core.memory.statistics.tails_loaded
    assert export(world).facts["lost_tokens"] == 0
    assert bring(world, "b", FILE).facts["tokens"] == len(world.agent("a").branch.tokens)
    world.generate("b", world.text("b") + ".", max_tokens=0)
    assert kv_of(world, "a") == before
    assert world.core.memory.statistics.tails_loaded == reads + 2, "only the import's own"


def test_many_idle_agents_fit_where_their_frames_would_not(make_world: Callable[..., World]) -> None:
    """P18: twenty short agents in a budget of eight pages a group: nobody is evicted, the tails are packed instead."""
    world = make_world(budget_pages=20)
    texts = {f"agent-{number}": text_of(1) + str(number) for number in range(20)}
    for name, text in texts.items():
        world.generate(name, text, max_tokens=2)
        world.check()
    figures = world.core.pager.statistics()
    assert (figures.evictions, figures.faults) == (0, 0)
    assert figures.packs > 0
    for name in texts:
        assert world.generate(name, world.text(name) + ".", max_tokens=1).turn.swapped_in_pages == 0
    assert world.core.memory.statistics.tails_loaded == 0
