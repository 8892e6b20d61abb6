"""`durable` is what a kill would find, and what is not durable becomes so by itself."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import Busy, Cancelled
from kvd.ids import GroupId, SpaceId
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.errors import EngineBroken
from kvd.scheduler.upkeep import MAX_SAVE_WAIT_S, Upkeep
from kvd.scheduler.views import agent_info, residency, statistics
from kvd.vm.events import CopiesLost, PageRef, Tick
from tests.scheduler.harness import World, ref_of
from tests.scheduler.test_turn import text_of


def is_durable(world: World, name: str) -> bool:
    """What `agent.info` says."""
    return bool(agent_info(world.core, world.agent(name))["durable"])


# ---- what `durable` means -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["fork", "rollback"])
def test_a_job_that_stops_half_way_is_not_durable_and_is_saved_later(world: World, operation: str) -> None:
    """RAM has changed and the log has not: info says so before anything else can go wrong, and a retry writes it."""
    world.generate("a", text_of(60), max_tokens=2)
    world.settle()
    world.job("evict", "a")
    tokens = PAGE_TOKENS + 40
    world.spoil_page(world.page_ids("a")[1])  # what is lost must be computed, and that is where the job is stopped
    name, more = ("b", {"new_agent": "b"}) if operation == "fork" else ("a", {})

    def stop() -> str | None:
        changed = world.has("b") if operation == "fork" else len(world.agent("a").branch.tokens) == tokens
        return "enough" if changed else None

    outcome = world.job(operation, "a", stop=stop, tokens=tokens, **more)
    assert isinstance(outcome.error, Cancelled)
    assert len(world.agent(name).branch.tokens) == tokens
    assert not is_durable(world, name)
    world.save_unsaved()
    assert is_durable(world, name)
    world.crash()
    assert len(world.agent(name).branch.tokens) == tokens


def test_durable_speaks_of_every_branch(world: World) -> None:
    """A turn the disk refused stays unsaved in `agent.info` when a later turn of another branch succeeds."""
    world.generate("a", text_of(30), max_tokens=1)
    world.refuse_writes(only=".log")
    refused = world.generate("a", text_of(30) + " more" + text_of(2), max_tokens=1).turn
    assert not refused.durable
    old = world.agent("a").branch
    world.heal()
    old.doubtful = True  # it cannot be recorded without being read first
    assert world.generate("a", "x" + text_of(2), max_tokens=1).turn.durable
    assert not is_durable(world, "a")
    world.save_unsaved()
    assert is_durable(world, "a")
    text = old.text.decode()
    world.crash()
    assert world.generate("a", text + "!", max_tokens=1).turn.match == "extend"


def test_pages_that_neither_tier_has_are_found_out_and_computed_again(world: World) -> None:
    """A record that names a page without a copy reads the branch instead of failing for ever."""
    world.generate("a", text_of(60), max_tokens=2)
    world.job("fork", "a", new_agent="b")
    world.settle()
    world.job("evict", "a")
    world.job("evict", "b")
    page = world.page_ids("a")[0]
    world.spoil_page(page)
    world.generate("a", world.text("a") + "!", max_tokens=1)  # finds it; the store knows no copy any more
    assert page in world.page_ids("b")
    facts = world.job("pin", "b").facts
    assert facts["durable"], facts["durable_reason"]
    assert page not in world.page_ids("b")
    text, computed = world.text("b"), world.agent("b").branch.computed
    world.crash()
    assert world.generate("b", text + "!", max_tokens=1).turn.cached_tokens == computed


def test_a_doubtful_branch_is_read_before_it_is_recorded(world: World) -> None:
    """The same when the pager does not know of the loss: only the store does."""
    text = text_of(60)
    world.generate("a", text, max_tokens=2)
    world.settle()
    world.job("evict", "a")
    page = world.page_ids("a")[1]
    world.fs.remove_tree(world.page_path(page))
    world.swap._store._forget_page(page)
    assert world.job("pin", "a").facts["durable"]
    assert not world.agent("a").branch.doubtful
    assert page not in world.page_ids("a")
    world.check()


def test_copies_are_written_again_one_at_a_time(world: World) -> None:
    """P21: rewriting what the data folder lost takes no more room than any other write."""
    world.generate("a", text_of(60), max_tokens=2)
    world.settle()
    pages = world.page_ids("a")
    world.core.memory.apply(CopiesLost(tuple(pages)))
    figures = world.core.pager.statistics()
    assert figures.in_flight_bytes <= max(world.core.page_bytes(world.agent("a").branch.space))
    assert figures.dirty_bytes > figures.in_flight_bytes
    world.settle()
    assert world.core.pages_durable(world.agent("a").branch.space)


def test_nothing_is_appended_to_a_log_that_is_known_to_be_damaged(world: World) -> None:
    """A bit of a tail's KV flips while the agent is swapped out: the turn that finds out begins a new log (P4)."""
    world.generate("a", text_of(10), max_tokens=2)
    world.settle()
    world.job("evict", "a")
    path = world.log_path("a")
    data = bytearray(world.fs.live_files()[path])
    data[len(data) // 2] ^= 1
    world.fs.poke(path, bytes(data))
    turn = world.generate("a", world.text("a") + " on", max_tokens=2).turn
    assert "page lost" in turn.match_reason
    assert turn.durable, turn.durable_reason
    assert world.events("log_rewritten")
    text, computed = world.text("a"), world.agent("a").branch.computed
    world.crash()
    assert world.text("a") == text
    assert world.generate("a", text + "!", max_tokens=1).turn.cached_tokens == computed


# ---- a disk that is full --------------------------------------------------------------------------------------------


def test_a_full_disk_costs_a_turn_nothing_and_a_line_once(world: World) -> None:
    """P38: no turn waits for a tick, no second page is tried, and the log hears of it when it begins and ends."""
    world.refuse_writes(only=".safetensors")
    assert not world.generate("a", text_of(60), max_tokens=1).turn.durable
    began_s, failures = world.now_s, world.core.memory.statistics.write_failures
    for _ in range(5):
        assert not world.generate("a", world.text("a") + " on", max_tokens=1).turn.durable
    assert world.now_s == began_s
    assert world.core.memory.statistics.write_failures - failures <= 10
    assert len(world.events("page_write_failed")) == 1
    assert len(world.events("turn_not_durable")) == 1
    assert world.job("evict", "a").facts["resident_pages"] > 0
    world.heal()
    turn = world.generate("a", world.text("a") + " on", max_tokens=1).turn
    assert turn.durable, "the first turn after the disk healed is durable, whatever the back-off says"
    assert len(world.events("page_writes_resumed")) == len(world.events("turn_saved")) == 1


def test_pages_of_others_that_cannot_be_written_do_not_make_a_turn_undurable(world: World) -> None:
    """P33: only one agent's pages meet bad sectors; another's turn is durable all the same."""
    world.refuse_writes()
    assert world.generate("bad", text_of(60), max_tokens=1).turn.durable is False
    bad = {page for group in (0, 1) for page in world.page_ids("bad", group)}
    assert bad

    def fail(number: int, name: str, path: Path | None) -> int | None:
        return errno.EIO if name in ("create", "write") and any(page in str(path) for page in bad) else None

    world.fs.fail = fail
    good = world.generate("good", text_of(80), max_tokens=1).turn
    assert good.durable is True
    assert world.generate("bad", text_of(60) + " more", max_tokens=1).turn.durable is False
    world.crash()
    assert world.generate("good", text_of(80), max_tokens=1).turn.cached_tokens == good.prompt_tokens - 1


def test_a_full_disk_is_tried_ever_more_rarely(world: World) -> None:
    """Many dirty pages, one write a try."""
    world.refuse_writes(only=".safetensors")
    world.generate("a", text_of(60), max_tokens=1)
    failures = world.core.memory.statistics.write_failures
    for _ in range(120):
        world.core.memory.apply(Tick())
        while world.step_store():
            pass
    assert world.core.memory.statistics.write_failures - failures < 10


# ---- upkeep ---------------------------------------------------------------------------------------------------------


def test_saves_go_first_and_get_rarer(world: World) -> None:
    """Unsaved agents come before requests, the one that waited longest first; compactions only when nothing waits."""
    now = [0.0]
    upkeep = Upkeep(world.core, lambda: now[0], 1.0)
    assert upkeep.next_job(idle=True) is None
    world.generate("c", text_of(2), max_tokens=1)
    world.refuse_writes()
    for name in ("a", "b"):
        world.generate(name, text_of(2), max_tokens=1)
    world.agent("c").compaction_due = True
    first, second = upkeep.next_job(idle=False), upkeep.next_job(idle=False)
    assert first is not None
    assert second is not None
    assert {first[0], second[0]} == {ref_of("a"), ref_of("b")}
    waits = []
    for _ in range(8):
        upkeep.save_ended(ref_of("a"), durable=False)
        assert upkeep.next_job(idle=False) is None
        assert upkeep.next_job(idle=True) == (ref_of("c"), "compact")
        began = now[0]
        while upkeep.next_job(idle=False) is None:
            now[0] += 1.0
        waits.append(now[0] - began)
    assert waits == [1, 2, 4, 8, 16, MAX_SAVE_WAIT_S, MAX_SAVE_WAIT_S, MAX_SAVE_WAIT_S]
    upkeep.save_ended(ref_of("a"), durable=True)
    assert upkeep.next_job(idle=False) is not None
    world.agent("c").compaction_due = False


# ---- books that broke -----------------------------------------------------------------------------------------------


def test_an_instruction_that_is_lost_half_way_is_nobodys_own_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOMEM while a frame is made: the pager has booked it, so the engine must not go on (13)."""

    def create(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(world.core.memory.pool, "create", create)
        with pytest.raises(EngineBroken, match="no memory"):
            world.generate("a", text_of(2), max_tokens=1)
    world.crash()


# ---- figures --------------------------------------------------------------------------------------------------------


def test_pages_read_for_others_are_not_counted(make_world: Callable[..., World]) -> None:
    """`swapped_in_pages` is the turn's own, `swapped_pages` what is only on disk, `resident` what can be read."""
    world = make_world(sharing="agent")
    for name in ("a", "b"):
        world.generate(name, text_of(60), max_tokens=1)
    world.settle()
    for name in ("a", "b"):
        world.job("evict", name)
    world.job("prefetch", "b")
    info = agent_info(world.core, world.agent("b"))
    loading = world.core.pager.residency(world.agent("b").branch.space).loading_pages
    assert loading > 0
    assert info["swapped_pages"] == world.core.pager.residency(world.agent("b").branch.space).total_pages - loading
    (pages,) = [agent["branches"][0]["segments"] for agent in residency(world.core, ref_of("b"))["agents"]]  # type: ignore[attr-defined]
    for segment in pages:
        assert all(page["resident"] == (page["state"] == "clean") for page in segment["pages"])
    turn = world.generate("a", world.text("a") + "!", max_tokens=1).turn
    assert turn.swapped_in_pages == sum(len(world.page_ids("a", group)) for group in (0, 1))


def test_a_commit_says_what_it_wrote(world: World) -> None:
    """P15: the record, and the pages it is the first to name; a second turn writes its own tokens only."""
    first = world.generate("a", text_of(30), max_tokens=1).turn
    pages = sum(
        len(world.page_ids("a", group)) * size
        for group, size in enumerate(world.core.page_bytes(world.agent("a").branch.space))
    )
    assert pages > 0
    assert first.written_bytes > pages
    second = world.generate("a", world.text("a") + "!", max_tokens=1).turn
    assert 0 < second.written_bytes < first.written_bytes / 10
    assert second.appended_tokens == 1


def test_the_peak_counts_copies_in_flight(world: World) -> None:
    """P21: what the budget must hold is frames and copies together."""
    world.generate("a", text_of(60), max_tokens=1)
    figures = statistics(world.core)
    peak, resident = figures["peak_budget_bytes"], figures["peak_resident_bytes"]
    assert isinstance(peak, int)
    assert isinstance(resident, int)
    assert resident < peak <= world.core.pager.statistics().budget_bytes


def test_a_turn_may_bring_logits_hooks(world: World) -> None:
    """They run after what the sampling parameters ask for and see every id so far."""
    seen: list[int] = []

    def only_seven(ids: object, logits: np.ndarray) -> np.ndarray:
        seen.append(len(ids))  # type: ignore[arg-type]
        logits[:] = -np.inf
        logits[7] = 0.0
        return logits

    world.generate("a", text_of(1), max_tokens=3, hooks=(only_seven,))
    tokens = world.agent("a").branch.tokens
    assert tokens[-3:] == [7, 7, 7]
    assert seen == [len(tokens) - 3, len(tokens) - 2, len(tokens) - 1]


def test_memory_that_is_full_of_unsaved_pages_says_busy(world: World) -> None:
    """Nothing is dropped that is nowhere else, and nobody waits for ever."""
    world.refuse_writes()
    outcomes = [world.generate(f"agent-{n}", f"{n}{text_of(60)}", max_tokens=1) for n in range(6)]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert all(isinstance(error, Busy) for error in errors)
    assert errors


def test_a_record_looks_at_the_pages_that_it_names(world: World) -> None:
    """P15: the turns of a long conversation cost what is new in them, not a picture of every page there is."""
    named: list[int] = []
    refs = world.core.pager.refs

    def counting(space: SpaceId, group: GroupId, first: int = 0) -> tuple[PageRef, ...]:
        found = refs(space, group, first)
        named.append(len(found))
        return found

    world.core.pager.refs = counting  # type: ignore[method-assign]
    assert world.generate("a", text_of(90), max_tokens=1).turn.durable
    pages = len(world.page_ids("a"))
    assert pages > 3
    assert named == [pages, pages], "one for each group"
    named.clear()
    assert world.generate("a", world.text("a") + " and", max_tokens=1).turn.durable
    assert sum(named) <= 2 * (len(world.page_ids("a")) - pages)
    named.clear()
    assert world.job("fork", "a", new_agent="b").facts["durable"]
    assert not named, "the log of its parent names them"
