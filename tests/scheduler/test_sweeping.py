"""Pages that nobody maps any more: their files go when no log names them, and never while somebody may need them."""

from __future__ import annotations

import pytest

from kvd.scheduler.commit import sweep
from kvd.scheduler.waking import wake
from kvd.store.swap_ops import DeletePageOp, WakeLogOp
from tests.scheduler.harness import World, ref_of
from tests.scheduler.test_turn import text_of


@pytest.fixture
def shared(world: World) -> World:
    """After a restart: a fork sleeps; the agent it shares its pages with woke up and was deleted."""
    assert world.generate("a", text_of(60), max_tokens=1).turn.durable
    assert world.job("fork", "a", new_agent="b").error is None
    world.settle()
    world.close()
    world.read_agents = 0
    world.start()
    assert set(world.core.agents.asleep) == {ref_of("a"), ref_of("b")}
    wake_up(world, "a")
    assert world.job("delete", "a").facts["deleted"]
    world.settle()
    assert world.core.forgotten, "the sleeper's log names them"
    return world


def wake_up(world: World, name: str, *, swept: bool = False) -> None:
    """Wake an agent; `swept`: forgotten pages are offered for deletion while its log is being read."""
    waking = wake(world.core, [ref_of(name)], lambda: None)
    next(waking)
    if swept:
        world.core.sweep_due = True
        sweep(world.core)
        assert isinstance(world.swap.queue[0], WakeLogOp)
        assert any(isinstance(op, DeletePageOp) for op in world.swap.queue)
    while world.step_store():
        pass
    assert not list(waking)
    assert world.has(name)


@pytest.mark.parametrize("swept", [False, True])
def test_a_page_of_one_who_wakes_is_forgotten_no_more(shared: World, swept: bool) -> None:
    """P5 P40: also when its deletion is under way; once its last user is deleted, its file goes, and once only."""
    world = shared
    wake_up(world, "b", swept=swept)
    assert not world.core.forgotten
    pages = world.page_ids("b")
    world.settle()
    assert all(world.page_path(page) in world.fs.live_files() for page in pages)
    deletions = []
    assert world.job("delete", "b").facts["deleted"]
    deletions += [op.page_id for op in world.swap.queue if isinstance(op, DeletePageOp)]
    world.settle()
    assert len(deletions) == len(set(deletions))
    assert not world.core.forgotten
    assert not world.core.store._deletions
    assert not [path for path in world.fs.live_files() if path.suffix == ".safetensors"]


def test_a_page_may_be_forgotten_while_its_deletion_is_under_way(shared: World) -> None:
    """P5: it came to life between the two; each deletion gets its own answer."""
    world = shared
    waking = wake(world.core, [ref_of("b")], lambda: None)
    next(waking)
    world.core.sweep_due = True
    sweep(world.core)
    world.step_store()  # awake; the deletions are still to come
    assert not list(waking)
    agent = world.agent("b")
    world.core.discard_agent(agent)  # as after the deletion of its log, whose answer comes late
    sweep(world.core)
    deletions = [op.page_id for op in world.swap.queue if isinstance(op, DeletePageOp)]
    assert len(deletions) == 2 * len(set(deletions)) > 0
    world.settle()
    assert set(world.core.forgotten) == set(deletions), "the log is still there and names them"
    assert not world.core.store._deletions
