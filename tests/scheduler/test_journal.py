"""What happens to agents and their pages, as events: gathered, in order, with the reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.journal import GATHER_S, KINDS
from kvd.vm.events import MemoryWanted
from kvd_client.events import EVENT_KINDS
from tests.scheduler.harness import World, ref_of
from tests.scheduler.test_engine import Runner, make_runner  # noqa: F401
from tests.scheduler.test_turn import text_of


def told(world: World, *kinds: str) -> list[dict[str, Any]]:
    """Events so far, those of these kinds, gathered ones included; each without number and time."""
    world.core.journal.gather()
    world.now_s += GATHER_S
    world.core.journal.tick()
    batch = world.core.journal.ring.read(0, 10_000)
    events = [{k: v for k, v in each.items() if k not in ("seq", "time_s")} for each in batch.events]
    return [each for each in events if not kinds or each["type"] in kinds]


def whose(name: str, **facts: object) -> dict[str, object]:
    """An agent's event."""
    return {"agent": name, "namespace": "default", **facts}


def test_the_client_knows_every_kind() -> None:
    """What can be subscribed to is the same on both sides."""
    assert set(EVENT_KINDS) == set(KINDS)
    assert len(set(KINDS)) == len(KINDS)


def test_an_eviction_of_many_pages_is_one_event(world: World) -> None:
    """With the count and the bytes that came free, and the reason; so is what was written before."""
    world.generate("a", text_of(60), max_tokens=2)
    world.settle()
    pages = world.core.pager.residency(world.agent("a").branch.space)
    assert world.job("evict", "a").error is None
    assert pages.resident_pages > 2
    (eviction,) = told(world, "eviction")
    assert eviction == whose(
        "a", type="eviction", pages=pages.resident_pages, bytes=pages.resident_bytes, reason="asked"
    )
    assert sum(each["pages"] for each in told(world, "swap_out")) == world.core.memory.statistics.pages_written


def test_a_fault_stands_before_the_hit_that_needed_it(world: World) -> None:
    """What an agent's pages did is told before what its turn did with them."""
    text = world.generate("a", text_of(60), max_tokens=2) and world.text("a")
    world.settle()
    world.job("evict", "a")
    seen = len(told(world))
    world.generate("a", text + " on", max_tokens=1)
    later = [each["type"] for each in told(world)[seen:]]
    assert later.index("turn_begun") < later.index("fault") < later.index("hit")
    fault = told(world, "fault")[-1]
    assert fault["pages"] == len(world.page_ids("a")) * 2 + 2, "sealed pages of both groups and their tails"


def test_a_miss_says_where_the_texts_part(world: World) -> None:
    """Kind, position, and what each says there; an extension is a hit."""
    world.generate("a", text_of(10), max_tokens=2)
    world.generate("a", world.text("a") + " more", max_tokens=1)
    kept = text_of(5)
    world.generate("a", kept + "<script>", max_tokens=1)
    matches = told(world, "hit", "miss")
    assert [(each["type"], each["match"]) for each in matches] == [
        ("miss", "new"),
        ("hit", "extend"),
        ("miss", "diverge"),
    ]
    parted = matches[2]["divergence"]
    assert parted["byte"] == len(kept.encode())
    assert parted["found"].startswith("<script>")
    assert text_of(10).startswith(kept + parted["expected"].replace("\\n", "\n")[:3])
    assert matches[0]["divergence"] is None
    assert matches[2]["cached_tokens"] > 0


def test_a_lost_page_is_told_with_its_fault(world: World) -> None:
    """P4: a flipped bit is an event, with the agent's name and why."""
    world.generate("a", text_of(60), max_tokens=2)
    world.settle()
    world.job("evict", "a")
    world.spoil_page(world.page_ids("a")[1])
    world.generate("a", world.text("a") + " on", max_tokens=1)
    (lost,) = told(world, "page_lost")
    assert (lost["agent"], lost["pages"]) == ("a", 1)
    assert "corrupt" in lost["fault"] or "storage" in lost["fault"]
    assert lost["reason"]


def test_page_files_that_went_are_told(world: World) -> None:
    """P8: what others did to the swap folder."""
    world.generate("a", text_of(60), max_tokens=2)
    world.settle()
    world.core.memory.copies_lost(world.page_ids("a")[:2])
    assert told(world, "page_files_lost") == [{"type": "page_files_lost", "pages": 2}]


def test_reasons_of_evictions(make_world: Callable[..., World]) -> None:
    """`room` for another agent; `background` for memory's sake; `window` behind the window of a group."""
    world = make_world(budget_pages=16, window=PAGE_TOKENS)
    for name in "abc":
        world.generate(name, name + text_of(60), max_tokens=2)
        world.settle()
    world.core.memory.apply(MemoryWanted(1))
    reasons = {each["reason"] for each in told(world, "eviction")}
    assert {"room", "background", "window"} <= reasons
    by_agent = {each["agent"] for each in told(world, "eviction") if each["reason"] == "room"}
    assert "c" not in by_agent, "who came last pushed the others out"


def test_pages_read_ahead_are_no_faults(world: World) -> None:
    """A hint's pages are told as `prefetch`, with the reason."""
    world.generate("a", text_of(60), max_tokens=2)
    world.settle()
    world.job("evict", "a")
    world.job("prefetch", "a")
    world.settle()
    (ahead,) = told(world, "prefetch")
    assert (ahead["agent"], ahead["reason"]) == ("a", "hint")
    assert told(world, "fault") == []


def test_what_was_moved_by_an_agent_that_is_gone_is_still_told(world: World) -> None:
    """Pages are summed up under their agent's name before its spaces close."""
    world.generate("a", text_of(60), max_tokens=2)
    world.settle()
    world.job("evict", "a")
    world.job("delete", "a")
    assert [each["agent"] for each in told(world, "eviction")] == ["a"]


def test_health_of_the_disk_and_limits_are_told_when_they_change(world: World) -> None:
    """Once each, with the reason; what stays the same is not told."""
    world.refuse_writes()
    world.generate("a", text_of(60), max_tokens=2)
    told(world)
    world.heal()
    for _ in range(40):
        world.tick()
        world.step_store()
    world.save_unsaved()
    disk = told(world, "disk")
    assert [each["disk"] for each in disk] == ["refuses", "ok"]
    assert disk[0]["disk_reason"]
    budget_bytes = world.core.pager.budget.budget_bytes
    world.core.pager.budget.set_budget(budget_bytes - 1)
    assert told(world, "budget") == [{"type": "budget", "budget_bytes": budget_bytes - 1, "namespace_quotas": {}}]


def test_turns_and_operations_from_their_arrival_to_their_end(make_runner: Callable[..., Runner]) -> None:  # noqa: F811
    """One story a turn, under one number; the end has its figures, that of a failed one the error's name."""
    engine = make_runner()
    engine.turn("a", text_of(20), max_tokens=3).wait()
    engine.job("pin", "a").wait()
    engine.job("pin", "nobody").wait()
    engine.turn("a", "", max_tokens=3).wait()
    events = engine.look(lambda core: core.journal.ring.read(0, 1000).events)
    story = [(each["type"], each.get("agent")) for each in events if each["type"] not in ("swap_out", "eviction")]
    assert story == [
        ("turn_queued", "a"),
        ("turn_begun", "a"),
        ("miss", "a"),
        ("turn_ended", "a"),
        ("operation", "a"),
        ("operation", "nobody"),
        ("turn_queued", "a"),
        ("turn_ended", "a"),
    ]
    ends = [each for each in events if each["type"] == "turn_ended"]
    assert {each.get("request") for each in events if each["type"].startswith("turn")} == {1, ends[1]["request"]}
    assert (ends[0]["outcome"], ends[0]["completion_tokens"], ends[0]["durable"]) == ("ok", 3, True)
    assert (ends[1]["outcome"], ends[1]["completion_tokens"]) == ("invalid_params", None)
    assert [each["outcome"] for each in events if each["type"] == "operation"] == ["ok", "agent_not_found"]
    figures = engine.look(lambda core: (core.agents.get(ref_of("a")).turns, core.stats.turns))
    for each in figures:
        assert (each.turns, each.completion_tokens) == (1, 3), "one that was refused is not counted"
