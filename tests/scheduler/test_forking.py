"""Forks and their notes: when one line does, when a record is needed, and that neither is seen from outside."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.ids import Namespace
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.steps import run_steps
from kvd.store.swap_ops import AppendRecordOp, ForkLogOp, SwapOp
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of


@pytest.fixture
def ops(world: World) -> list[SwapOp]:
    """Forks and records that were asked of the store, as they come."""
    seen: list[SwapOp] = []
    submit = world.swap.submit

    def watching(op: SwapOp) -> None:
        if isinstance(op, AppendRecordOp | ForkLogOp):
            seen.append(op)
        submit(op)

    world.swap.submit = watching  # type: ignore[method-assign]
    world.generate("a", text_of(60), max_tokens=2)
    world.settle()
    seen.clear()
    return seen


def test_a_fork_of_what_is_logged_is_noted(world: World, ops: list[SwapOp]) -> None:
    """P2 P15: no record, and the child is the parent: in memory, after a crash, and in its next turn."""
    facts = world.job("fork", "a", new_agent="b").facts
    assert (facts["durable"], facts["durable_reason"]) == (True, None)
    assert [type(op) for op in ops] == [ForkLogOp]
    text, computed = world.text("a"), world.agent("a").branch.computed
    turn = world.generate("b", text + " and", max_tokens=1).turn
    assert turn.durable
    assert turn.cached_tokens == computed
    after = world.text("b")
    world.crash()
    assert world.text("a") == text
    assert world.text("b") == after
    world.check()


def test_what_a_fork_is_told_of_itself_survives(world: World, ops: list[SwapOp]) -> None:
    """P2: its time of birth, its end, and that nobody pinned it, whatever its parent is."""
    world.job("pin", "a")
    told = world.job("fork", "a", new_agent="b", ttl_s=500.0).facts
    world.crash()
    child = world.agent("b")
    assert (child.created_s, child.ttl_s, child.pinned) == (told["created_s"], 500.0, False)
    assert world.agent("a").pinned
    assert any(isinstance(op, ForkLogOp) for op in ops)


@pytest.mark.parametrize("tokens", [PAGE_TOKENS, PAGE_TOKENS + 40])
def test_where_the_cut_goes_decides(world: World, ops: list[SwapOp], tokens: int) -> None:
    """At a border the log has all of it; inside a sealed page the KV is in a file, and the child gets a record."""
    assert len(world.agent("a").branch.tokens) > 2 * PAGE_TOKENS
    assert world.job("fork", "a", new_agent="b", tokens=tokens).facts["durable"]
    assert [type(op) for op in ops] == [ForkLogOp if tokens == PAGE_TOKENS else AppendRecordOp]
    world.crash()
    assert len(world.agent("b").branch.tokens) == tokens
    world.check()


def test_what_is_not_logged_is_recorded(world: World, ops: list[SwapOp]) -> None:
    """P6: of a turn the disk refused no log says anything yet."""
    world.refuse_writes()
    assert not world.generate("a", world.text("a") + " and more", max_tokens=1).turn.durable
    world.heal()
    ops.clear()
    assert world.job("fork", "a", new_agent="b").facts["durable"]
    assert [type(op) for op in ops] == [AppendRecordOp]
    world.crash()
    assert world.has("b")


def test_a_namespace_with_a_quota_on_disk_gets_records(world: World, ops: list[SwapOp]) -> None:
    """P25: they are held against the room there is before they are written."""
    world.core.disk_quotas.quotas[Namespace("default")] = 1 << 40
    assert world.job("fork", "a", new_agent="b").facts["durable"]
    assert [type(op) for op in ops] == [AppendRecordOp]


def test_a_disk_that_refuses_the_note_and_the_record_is_told(world: World, ops: list[SwapOp]) -> None:
    """P20: the child lives in RAM and says so; when the disk works again it is saved."""
    world.refuse_writes()
    facts = world.job("fork", "a", new_agent="b").facts
    assert not facts["durable"]
    assert facts["durable_reason"]
    assert [type(op) for op in ops] == [ForkLogOp, AppendRecordOp]
    world.heal()
    world.save_unsaved()
    text = world.text("b")
    world.crash()
    assert world.text("b") == text


def test_a_refused_note_alone_costs_a_record(world: World, ops: list[SwapOp]) -> None:
    """P20: the file of notes cannot be written, logs can."""
    world.refuse_writes(only="forks.log")
    assert world.job("fork", "a", new_agent="b").facts["durable"]
    assert [type(op) for op in ops] == [ForkLogOp, AppendRecordOp]
    world.crash()
    assert world.has("b")


def test_parent_and_child_part_and_neither_takes_the_other_along(world: World, ops: list[SwapOp]) -> None:
    """P2 P9: the parent is cut and goes on, then is deleted, before the child was ever written by itself."""
    text = world.text("a")
    assert world.job("fork", "a", new_agent="b").facts["durable"]
    assert world.job("fork", "a", new_agent="c").facts["durable"]
    assert world.job("rollback", "a", tokens=PAGE_TOKENS + 3).facts["durable"]
    assert world.job("delete", "a").facts["deleted"]
    assert world.job("delete", "c").facts["deleted"]
    world.crash()
    assert not world.has("a")
    assert not world.has("c")
    assert world.text("b") == text
    assert world.generate("b", text + "!", max_tokens=1).turn.match == "extend"
    world.check()


def tails(world: World, name: str) -> list[bytes]:
    """KV of an agent's open pages."""
    views = world.core.pager.tails(world.agent(name).branch.space)
    return [world.core.memory.tail_bytes(view, 0, view.tokens) for view in views if view is not None]


def test_an_open_page_is_copied_before_anything_writes_into_it(world: World, ops: list[SwapOp]) -> None:
    """P9: the answer does not wait for the copy; the parent, cut and told otherwise in that very page, does."""
    before = tails(world, "a")
    tokens = len(world.agent("a").branch.tokens)
    assert len(world.agent("a").branch.tokens) % PAGE_TOKENS > 40
    assert world.job("fork", "a", new_agent="b").facts["durable"]
    assert world.job("fork", "a", new_agent="c").facts["durable"]
    assert world.core.memory.has_late_copies
    assert world.job("rollback", "a", tokens=tokens - 30).facts["durable"]
    assert world.generate("a", world.text("a") + " something else altogether", max_tokens=20).turn.durable
    assert not world.core.memory.has_late_copies
    assert tails(world, "b") == tails(world, "c") == before
    assert tails(world, "a") != before
    world.check()


def test_steps_come_after_late_copies(world: World, ops: list[SwapOp]) -> None:
    """P9: they write into open pages without the pager having a hand in it."""
    assert world.job("fork", "a", new_agent="b").facts["durable"]
    assert world.core.memory.has_late_copies
    run_steps(world.core, [])
    assert not world.core.memory.has_late_copies


def test_a_fork_whose_copy_is_late_can_be_forked_cut_and_deleted(world: World, ops: list[SwapOp]) -> None:
    """P9: whatever is done with it comes after the copy."""
    before = tails(world, "a")
    for name in ("b", "c"):
        assert world.job("fork", "a", new_agent=name).facts["durable"]
    assert world.job("fork", "b", new_agent="d").facts["durable"]
    assert world.job("delete", "c").facts["deleted"]
    assert world.job("rollback", "b", tokens=len(world.agent("b").branch.tokens) - 9).facts["durable"]
    assert tails(world, "d") == before
    world.job("evict", "a")
    assert tails(world, "d") == before
    world.check()


def test_many_forks_at_once(make_world: Callable[..., World]) -> None:
    """One after the other from one parent and from one another, then a crash: all are there."""
    world = make_world(budget_pages=80)
    world.generate("a", text_of(40), max_tokens=2)
    for number in range(12):
        parent = "a" if number % 3 else f"b{number - 1}" if number else "a"
        assert world.job("fork", parent, new_agent=f"b{number}").facts["durable"]
    text = world.text("a")
    world.crash()
    for number in range(12):
        assert world.text(f"b{number}") == text
    world.check()
