"""A full disk quota: room comes from what is worth least, newer turns become durable, and text is never the price."""

from __future__ import annotations

from collections.abc import Callable

from kvd.scheduler.views import agent_info, statistics
from kvd.store.fs import folder_bytes
from kvd.store.swap_store import SwapStore
from tests.scheduler.harness import ROOT, World
from tests.scheduler.test_turn import text_of


def fill(world: World, names: str, lines: int = 40) -> dict[str, str]:
    """Agents with their own texts, durable; returns the texts."""
    texts = {}
    for name in names:
        prompt = f"{name} says: {text_of(lines)}"
        texts[name] = prompt + world.generate(name, prompt).turn.text
        world.settle()
    return texts


def tighten(world: World, *, free_bytes: int) -> None:
    """From here on the quota is what is used now and a little more."""
    store = world.swap._store
    assert isinstance(store, SwapStore)
    usage = store._usage
    usage.recount()
    usage._clock = lambda: world.now_s
    usage.quota_bytes = usage.used_bytes + free_bytes
    usage.recount()
    usage.quota_bytes += usage.reserved_bytes


def until_saved(world: World) -> None:
    """Time passes until nothing is unsaved."""
    for _ in range(60):
        world.settle()
        world.save_unsaved()
        if all(agent.unsaved is None for agent in world.core.agents):
            return
    raise AssertionError([agent.unsaved for agent in world.core.agents])


def test_the_agent_used_longest_ago_pays_and_keeps_its_text(make_world: Callable[..., World]) -> None:
    """P25 P8: the quota holds, the new turn is durable in the end, what was given up is logged, no text is lost."""
    world = make_world()
    texts = fill(world, "abc")
    tighten(world, free_bytes=30_000)
    new = world.generate("d", f"d says: {text_of(60)}")
    texts["d"] = f"d says: {text_of(60)}" + new.turn.text
    until_saved(world)
    given_up = world.events("kv_given_up")
    assert given_up
    assert all(facts["agents"] == ["default/a"] for facts in given_up[:1]), given_up
    assert int(str(statistics(world.core)["pages_given_up"])) > 0
    assert agent_info(world.core, world.agent("d"))["durable"]
    store = world.swap._store
    assert isinstance(store, SwapStore)
    assert folder_bytes(world.fs, ROOT) <= store.statistics().quota_bytes
    world.crash()
    for name, text in texts.items():
        assert world.text(name) == text
    again = world.generate("a", texts["a"]).turn
    assert "are computed again" in again.match_reason
    assert world.generate("d", texts["d"]).turn.cached_tokens > 500


def test_an_agents_tail_goes_before_its_head(make_world: Callable[..., World]) -> None:
    """P14: what remains of the agent is its beginning, which is reused to the token."""
    world = make_world()
    texts = fill(world, "a", lines=90) | fill(world, "b")
    tighten(world, free_bytes=30_000)
    world.generate("c", f"c says: {text_of(25)}")
    until_saved(world)
    given_up = int(str(statistics(world.core)["pages_given_up"]))
    assert 0 < given_up < 2 * len(world.page_ids("a"))
    turn = world.generate("a", texts["a"]).turn
    assert turn.cached_tokens >= 256, turn.match_reason


def test_branches_that_are_not_current_go_first(make_world: Callable[..., World]) -> None:
    """P25: a divergence's old branch is worth less than anything that somebody is at."""
    world = make_world()
    texts = fill(world, "ab")
    changed = texts["b"][: len(texts["b"]) // 3] + " but then " + text_of(40)
    texts["b"] = changed + world.generate("b", changed).turn.text
    world.settle()
    texts |= fill(world, "c")
    tighten(world, free_bytes=30_000)
    world.generate("d", f"d says: {text_of(20)}")
    until_saved(world)
    assert [facts["agents"] for facts in world.events("kv_given_up")][:1] == [["default/b"]]
    for name in "ab":
        turn = world.generate(name, texts[name]).turn
        assert turn.cached_tokens == turn.prompt_tokens - 1, (name, turn.match_reason)


def test_pinned_unsaved_and_last_used_agents_keep_everything(make_world: Callable[..., World]) -> None:
    """Nobody pays for a turn that nothing can be given up for: it says why it is not durable, and lives in RAM."""
    world = make_world(budget_pages=80)
    texts = fill(world, "ab")
    for name in "ab":
        assert world.job("pin", name).facts["durable"]
    tighten(world, free_bytes=20_000)
    outcome = world.generate("c", f"c says: {text_of(60)}")
    assert not outcome.turn.durable
    assert "quota" in str(outcome.turn.durable_reason)
    for _ in range(5):
        world.settle()
        world.save_unsaved()
    assert not world.events("kv_given_up")
    for name, text in texts.items():
        turn = world.generate(name, text).turn
        assert turn.cached_tokens == turn.prompt_tokens - 1
