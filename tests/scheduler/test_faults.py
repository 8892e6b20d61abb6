"""Turns and control operations while disk, model or data folder misbehave: nothing goes silently, everything heals."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from kvd.errors import BudgetExceeded, Busy, Cancelled
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import Baseline
from kvd.scheduler.errors import NotDeleted
from kvd.vm.errors import SpaceInUse
from kvd.vm.events import RolledBack
from tests.scheduler.harness import ROOT, World
from tests.scheduler.test_turn import text_of


def evicted(world: World, name: str = "a", lines: int = 60) -> str:
    """An agent of several pages that are on disk only; returns its text."""
    world.generate(name, text_of(lines), max_tokens=2)
    world.settle()
    assert world.job("evict", name).facts["resident_pages"] == 0
    return world.text(name)


# ---- lost pages -----------------------------------------------------------------------------------------------------


def test_a_lost_page_costs_computing_and_nothing_else(world: World) -> None:
    """A flipped bit is never served: ids stay, KV is computed again from there on, the client is told where (P4)."""
    text = evicted(world)
    ids = list(world.agent("a").branch.tokens)
    world.spoil_page(world.page_ids("a")[1])
    turn = world.generate("a", text + " on", max_tokens=2).turn
    assert turn.match == "extend"
    assert turn.cached_tokens == PAGE_TOKENS
    assert f"page lost at token {PAGE_TOKENS}" in turn.match_reason
    assert world.agent("a").branch.tokens[: len(ids)] == ids
    assert world.truth.is_greedy(world.agent("a").branch.tokens, turn.prompt_tokens)
    assert turn.durable
    world.crash()
    world.job("evict", "a")
    assert world.generate("a", world.text("a"), max_tokens=1).turn.cached_tokens >= turn.prompt_tokens


def test_a_fork_of_an_agent_with_a_lost_page_is_whole_and_durable(world: World) -> None:
    """The child gets every token; a loss that the page that is cut shows is made good before the reply says durable."""
    text = evicted(world)
    world.spoil_page(world.page_ids("a")[1])
    tokens = PAGE_TOKENS + 30
    facts = world.job("fork", "a", new_agent="b", tokens=tokens).facts
    assert facts["durable"]
    assert facts["computed_tokens"] == facts["tokens"] == tokens
    whole = world.job("fork", "a", new_agent="c").facts
    assert (whole["durable"], whole["tokens"]) == (True, len(world.agent("a").branch.tokens))
    world.crash()
    assert text.startswith(world.text("b"))
    assert world.generate("b", world.text("b") + " b", max_tokens=1).turn.cached_tokens == tokens
    assert world.text("c") == text


def test_an_abandoned_branch_helps_one_whose_kv_was_lost(world: World) -> None:
    """KV comes from where it is; nothing that the client was told has changed, so the turn is no divergence."""
    world.generate("a", text_of(30), max_tokens=8)
    world.generate("a", text_of(30), max_tokens=4)
    agent, text = world.agent("a"), world.text("a")
    branch, before = agent.branch, len(agent.branch.tokens)
    branch.drop_kv_from(branch.computed - 2)
    world.core.memory.apply(RolledBack(branch.space, branch.computed))
    turn = world.generate("a", text + " on", max_tokens=2).turn
    assert (turn.match, turn.divergence, turn.cached_tokens) == ("extend", None, before)
    assert turn.match_reason == f"all stored text matched; {before} tokens have KV in an abandoned continuation"
    assert agent.branch is not branch
    assert world.text("a").startswith(text + " on")
    assert world.truth.is_greedy(agent.branch.tokens, turn.prompt_tokens)
    world.check()


def test_a_divergence_from_a_branch_with_a_lost_page_says_so(world: World) -> None:
    """What the old branch lost is reported in the turn that found out."""
    text = evicted(world)
    world.spoil_page(world.page_ids("a")[0])
    turn = world.generate("a", text[: len(text_of(50))] + " else", max_tokens=1).turn
    assert turn.match == "diverge"
    assert turn.cached_tokens == 0
    assert "page lost at token 0" in turn.match_reason
    assert turn.durable


@pytest.mark.parametrize("tokens", [5, PAGE_TOKENS, PAGE_TOKENS + 40, 2 * PAGE_TOKENS + 1])
def test_a_rollback_with_a_lost_page_is_whole_and_durable(world: World, tokens: int) -> None:
    """The cut may lie before, in or after what was lost; the page that is cut may still be on its way."""
    evicted(world)
    ids = list(world.agent("a").branch.tokens)
    world.spoil_page(world.page_ids("a")[1])
    facts = world.job("rollback", "a", tokens=tokens).facts
    assert facts["durable"]
    assert world.agent("a").branch.tokens == ids[:tokens]
    world.crash()
    assert world.agent("a").branch.tokens == ids[:tokens]
    assert world.agent("a").branch.computed == tokens


def test_a_cancelled_turn_after_a_lost_page_keeps_all_text(world: World) -> None:
    """Cancelling while lost KV is computed again never cuts the conversation."""
    text = evicted(world)
    world.spoil_page(world.page_ids("a")[0])
    error = world.generate("a", text + " more", max_tokens=2, cancel_after=8).error
    assert isinstance(error, Cancelled)
    assert world.text("a") == text
    world.crash()
    assert world.text("a") == text
    assert world.generate("a", text + " more", max_tokens=2).turn.match == "extend"


def test_pin_and_save_of_a_branch_with_lost_kv_compute_it_first(world: World) -> None:
    """No record can say that KV is missing in the middle, so it is made good before the commit."""
    text = evicted(world)
    world.spoil_page(world.page_ids("a")[0])
    world.generate("a", "x" + text, max_tokens=1)  # diverges at once and finds the loss in the old branch
    world.generate("a", text[:40], max_tokens=1)
    agent = world.agent("a")
    behind = next(branch for branch in agent.branches.values() if branch.behind)
    world.core.make_current(agent, behind)
    assert world.job("pin", "a").facts["durable"]
    assert behind.saved
    assert world.text("a") == text


def test_a_tail_that_was_cut_while_it_was_on_disk_is_read_as_far_as_it_counts(world: World) -> None:
    """The log may hold more of a tail than is wanted of it."""
    evicted(world)
    branch = world.agent("a").branch
    keep = branch.computed - 3
    world.core.memory.apply(RolledBack(branch.space, keep))
    branch.cut(branch.border_at_most(keep))
    world.core.memory.apply(RolledBack(branch.space, branch.computed))
    turn = world.generate("a", world.text("a") + " on", max_tokens=1).turn
    assert "lost" not in turn.match_reason
    assert turn.cached_tokens == keep
    world.check()


def test_an_agent_may_go_while_its_pages_are_on_their_way(world: World) -> None:
    """A frame whose load is under way when its last user goes is given back when the answer comes (P23)."""
    evicted(world)
    world.job("prefetch", "a")
    assert world.core.pager.statistics().in_flight_bytes > 0
    assert world.job("delete", "a").facts["deleted"]
    world.settle()
    assert world.core.pager.statistics().resident_bytes == 0
    assert world.core.memory.pool.resident_bytes == 0
    assert not [path for path in world.fs.live_files() if path.suffix in (".safetensors", ".log")]


# ---- a disk that refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", ["", ".log", ".safetensors"])
def test_a_refused_turn_lives_in_ram_and_is_saved_when_the_disk_heals(world: World, only: str) -> None:
    """`durable: false` with the reason; the answer is right all the same; later it is on disk with nothing missing."""
    world.generate("a", text_of(30), max_tokens=1)
    saved = world.text("a")
    world.refuse_writes(only=only)
    turn = world.generate("a", saved + text_of(30), max_tokens=2).turn
    assert not turn.durable
    assert turn.durable_reason
    assert "No space left" in turn.durable_reason
    newest, computed = world.text("a"), world.agent("a").branch.computed
    assert world.job("save", "a").facts["durable"] is False
    world.heal()
    world.tick()
    world.save_unsaved()
    assert world.agent("a").unsaved is None
    world.crash()
    assert world.text("a") == newest
    assert world.generate("a", newest + "!", max_tokens=1).turn.cached_tokens == computed


def test_a_crash_before_the_retry_goes_back_to_what_was_promised(world: World) -> None:
    """A turn that was reported as not durable may be gone; the one before it is not."""
    world.generate("a", text_of(30), max_tokens=1)
    saved = world.text("a")
    world.refuse_writes()
    assert not world.generate("a", saved + " and more", max_tokens=1).turn.durable
    world.crash()
    assert world.text("a") == saved


def test_an_old_branch_the_disk_refused_is_saved_with_the_next_turn(world: World) -> None:
    """A divergence after a refused turn loses neither branch: flipping back after a crash is a hit."""
    world.generate("a", text_of(30), max_tokens=1)
    world.refuse_writes()
    world.generate("a", world.text("a") + text_of(3), max_tokens=2)
    old, computed = world.text("a"), world.agent("a").branch.computed
    world.heal()
    world.tick()
    assert world.generate("a", text_of(20) + " else", max_tokens=1).turn.durable
    world.crash()
    assert world.generate("a", old + " on", max_tokens=1).turn.cached_tokens == computed


def test_memory_full_of_what_the_disk_refused_is_a_busy_error_and_heals(make_world: Callable[..., World]) -> None:
    """Nothing unsaved is dropped to make room, nobody waits for ever, and the pages come out when the disk heals."""
    world = make_world(budget_pages=12)
    world.refuse_writes()
    names = [f"agent-{number}" for number in range(6)]
    outcomes = [world.generate(name, f"{name} {text_of(22)}", max_tokens=1) for name in names]
    busy = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert busy
    assert all(isinstance(error, Busy) and error.retry_after_s for error in busy)
    kept = {name: world.text(name) for name in names if world.has(name)}
    world.heal()
    for _ in range(3):
        world.settle()
        world.save_unsaved()
    for name in names:
        assert world.generate(name, f"{name} {text_of(22)}", max_tokens=1).turn.durable
        assert world.text(name).startswith(kept.get(name, name))


def test_a_delete_the_disk_refuses_leaves_the_agent(world: World) -> None:
    """The agent is gone from RAM only when its log is gone from disk."""
    world.generate("a", text_of(30), max_tokens=1)
    world.fs.fail = lambda number, name, path: errno.EROFS if name == "unlink" else None
    assert isinstance(world.job("delete", "a").error, NotDeleted)
    assert world.generate("a", world.text("a") + "!", max_tokens=1).turn.match == "extend"
    world.heal()
    assert world.job("delete", "a").facts["deleted"]
    world.settle()
    assert not [path for path in world.fs.live_files() if path.suffix == ".safetensors"]


def test_an_unsaved_agent_can_be_deleted(world: World) -> None:
    """State the disk refused does not stand in the way; afterwards nothing of the agent is left anywhere."""
    world.generate("a", text_of(30), max_tokens=1)
    world.refuse_writes()
    assert not world.generate("a", world.text("a") + text_of(30), max_tokens=1).turn.durable
    assert not world.generate("never-saved", text_of(2), max_tokens=1).turn.durable
    world.heal()
    for name in ("a", "never-saved"):
        assert world.job("delete", name).facts["deleted"]
    world.settle()
    assert world.core.memory.pool.resident_bytes == 0
    world.crash()
    assert len(world.core.agents) == 0


# ---- a data folder that somebody changes ----------------------------------------------------------------------------


def test_a_log_that_somebody_deleted_is_written_anew(world: World) -> None:
    """The next turn begins a new log that says everything, of every branch that RAM has whole."""
    world.generate("a", text_of(30), max_tokens=1)
    world.generate("a", text_of(20) + " else", max_tokens=1)
    branches = set(world.agent("a").branches)
    world.fs.remove_tree(world.log_path("a"))
    assert world.generate("a", world.text("a") + " on", max_tokens=1).turn.durable
    assert world.events("log_rebuilt")
    text, computed = world.text("a"), world.agent("a").branch.computed
    world.crash()
    assert set(world.agent("a").branches) <= branches
    assert world.generate("a", text + "!", max_tokens=1).turn.cached_tokens == computed


def test_a_control_operation_on_an_evicted_agent_whose_log_vanished(world: World) -> None:
    """Its tail was in the log only: the first try says so, the retry computes it again and saves."""
    text = evicted(world)
    world.fs.remove_tree(world.log_path("a"))
    assert world.job("pin", "a").facts["durable"] is False
    world.save_unsaved()
    assert world.agent("a").unsaved is None
    world.crash()
    assert world.text("a") == text


def test_a_data_folder_that_vanished_comes_back_from_ram(world: World) -> None:
    """Pages whose files are gone are written again from RAM before the record that names them (DESIGN 7)."""
    world.generate("a", text_of(60), max_tokens=1)
    world.settle()
    world.fs.remove_tree(ROOT)
    turn = world.generate("a", world.text("a") + " on", max_tokens=1).turn
    assert turn.durable, turn.durable_reason
    assert world.events("pages_vanished")
    text, computed = world.text("a"), world.agent("a").branch.computed
    world.crash()
    turn = world.generate("a", text + "!", max_tokens=1).turn
    assert turn.cached_tokens == computed
    assert "lost" not in turn.match_reason


def test_a_record_that_does_not_follow_is_replaced_by_one_that_stands_alone(world: World) -> None:
    """Should our books of the log ever be wrong, the turn is saved all the same and the operator hears of it."""
    world.generate("a", text_of(30), max_tokens=1)
    branch = world.agent("a").branch
    branch.baseline = Baseline(tokens=5, text_bytes=3, logged_pages=9, pages=9, tail=200)
    assert world.generate("a", world.text("a") + " on", max_tokens=1).turn.durable
    assert world.events("record_invalid")
    text = world.text("a")
    world.crash()
    assert world.text("a") == text


# ---- a model that fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_an_agent_survives_a_failure_in_the_middle_of_a_turn(make_world: Callable[..., World], steps: int) -> None:
    """In prefill or decode: KV of whole steps stays, nothing of the failed one counts, no page is deleted too early."""
    world = make_world(chunk_tokens=100)
    world.generate("a", text_of(24), max_tokens=1)
    before = world.text("a")
    world.model.fail_at = world.model.steps + steps
    with pytest.raises(RuntimeError):
        world.generate("a", before + text_of(20), max_tokens=9)
    world.core.pager.check_integrity()
    world.check()
    agent = world.agent("a")
    assert not agent.branch.behind
    assert agent.branch.saved == (agent.unsaved is None)
    assert (before + text_of(20)).startswith(world.text("a")) or world.text("a").startswith(before + text_of(20))
    computed = agent.branch.computed
    turn = world.generate("a", before + text_of(20), max_tokens=2).turn
    assert turn.cached_tokens >= computed - 4
    assert turn.durable
    world.crash()
    assert world.text("a").startswith(before)


def test_a_failed_turn_is_saved_by_the_next_retry(make_world: Callable[..., World]) -> None:
    """What a failed turn gained is not lost with the next crash."""
    world = make_world(chunk_tokens=100)
    world.model.fail_at = 3
    with pytest.raises(RuntimeError):
        world.generate("a", text_of(40), max_tokens=2)
    assert world.agent("a").unsaved == "the request failed: the model broke in the middle of a step"
    world.save_unsaved()
    world.crash()
    assert world.generate("a", text_of(40), max_tokens=1).turn.cached_tokens >= 195


def test_a_failure_before_anything_was_computed_leaves_no_agent(world: World) -> None:
    """A new agent whose first step failed does not exist; one that has text keeps it."""
    world.model.fail_at = 1
    with pytest.raises(RuntimeError):
        world.generate("a", text_of(2), max_tokens=1)
    assert not world.has("a")
    assert world.core.pager.statistics().spaces == 0
    world.model.fail_at = None
    world.generate("a", text_of(30), max_tokens=1)
    before, branches = world.text("a"), list(world.agent("a").branches)
    world.model.fail_at = world.model.steps + 1
    with pytest.raises(RuntimeError):
        world.generate("a", text_of(20) + " else", max_tokens=1)
    assert world.text("a") == before
    assert list(world.agent("a").branches) == branches


# ---- pins -----------------------------------------------------------------------------------------------------------


def test_a_pin_follows_the_current_branch(world: World) -> None:
    """After a divergence the abandoned branch may be evicted and the new one may not, in this run and the next."""
    world.generate("a", text_of(30), max_tokens=1)
    world.job("pin", "a")
    world.generate("a", text_of(20) + " else" + text_of(20), max_tokens=1)
    world.settle()
    for _ in range(2):
        held = {
            branch.branch_id: world.core.pager.residency(branch.space).pinned
            for branch in world.agent("a").branches.values()
        }
        assert [number for number, pinned in held.items() if pinned] == [world.agent("a").current]
        world.crash()
    world.settle()
    now = world.core.pager.residency(world.agent("a").branch.space)
    assert now.resident_pages == now.total_pages
    assert isinstance(world.job("evict", "a").error, SpaceInUse)
    world.job("unpin", "a")
    assert world.job("evict", "a").facts["resident_pages"] == 0


def test_what_pinned_agents_leave_is_too_little_is_said_at_once(make_world: Callable[..., World]) -> None:
    """A request that could only run without somebody's pin is refused; without this it would wait for ever."""
    world = make_world(budget_pages=16, sharing="agent")
    world.generate("pinned", text_of(50), max_tokens=1)
    assert world.job("pin", "pinned").facts["pinned"]
    error = world.generate("a", text_of(80), max_tokens=1).error
    assert isinstance(error, BudgetExceeded)
    assert error.data["pinned_bytes"]
    world.job("unpin", "pinned")
    assert world.generate("a", text_of(80), max_tokens=1).turn.durable


def test_at_most_half_of_the_budget_can_be_pinned(make_world: Callable[..., World]) -> None:
    """The refusal has the figures and pins nothing; pinning twice is the same as once."""
    world = make_world(budget_pages=16)
    for name in ("a", "b"):
        world.generate(name, text_of(50), max_tokens=1)
    assert world.job("pin", "a").facts["pinned"]
    assert world.job("pin", "a").facts["pinned"]
    error = world.job("pin", "b").error
    assert isinstance(error, BudgetExceeded)
    assert not world.agent("b").pinned


def test_pins_beyond_a_smaller_budget_hold_what_they_may_after_a_start(make_world: Callable[..., World]) -> None:
    """P21: a daemon that is started with less memory works; it says which pins hold less than their agents need."""
    world = make_world(budget_pages=40)
    world.generate("a", text_of(60), max_tokens=1)
    world.job("pin", "a")
    world.budget_pages = 10
    world.crash()
    assert world.agent("a").pinned
    held = sum(world.core.pager.pinned_pages(world.agent("a").branch.space).values())
    assert 0 < held <= world.core.pager.budget.pin_limit_bytes
    needed = world.core.pager.residency(world.agent("a").branch.space).needed_bytes
    assert f"default/a needs {needed} bytes and its pin holds {held}" in world.notices[0]
    assert world.generate("b", text_of(20), max_tokens=1).turn.durable
    assert isinstance(world.generate("a", world.text("a") + "!", max_tokens=1).error, BudgetExceeded)
    facts = world.job("fork", "a", new_agent="b2", tokens=PAGE_TOKENS + 3).facts
    assert (facts["durable"], facts["tokens"]) == (True, PAGE_TOKENS + 3)
    assert world.generate("a", text_of(10), max_tokens=1).turn.match == "diverge"
    assert world.job("rollback", "a", tokens=10).facts["durable"], "what is cut need not fit"


# ---- formats --------------------------------------------------------------------------------------------------------


def test_an_agent_in_a_format_nobody_knows_keeps_its_text(world: World) -> None:
    """KV in an unknown format is computed again in a known one; text and ids stay."""
    world.generate("a", text_of(30), max_tokens=1)
    text, ids = world.text("a"), list(world.agent("a").branch.tokens)
    world.use_format("q8")
    world.crash()
    assert "unknown formats" in world.notices[0]
    assert world.text("a") == text
    assert world.agent("a").branch.tokens == ids
    assert world.job("pin", "a").facts["durable"]
    turn = world.generate("a", text + "!", max_tokens=2).turn
    assert turn.cached_tokens == len(ids)
    world.crash()
    assert world.notices == []
    assert world.generate("a", world.text("a") + "!", max_tokens=2).turn.cached_tokens > len(ids)
