"""Branches an agent keeps beside its current one: four at most, and no more bytes than the limit."""

from __future__ import annotations

from collections.abc import Callable

from kvd.scheduler.branches import other_branch_bytes
from kvd.scheduler.limits import LimitSettings
from kvd.scheduler.views import agent_info
from tests.scheduler.harness import World, ref_of
from tests.support.prose import prose

BASE = prose(520, "base")
"""Two pages and a bit, which all branches share."""


def diverge(world: World, number: int) -> None:
    """The agent takes another way after `BASE`: a page and a bit of its own."""
    outcome = world.generate("a", BASE + prose(300, f"way-{number}"), max_tokens=1)
    assert outcome.turn.match == ("diverge" if number else "new")


def figures(world: World) -> tuple[int, int]:
    """Branches beside the current one, and what they take alone."""
    agent = world.agent("a")
    return len(agent.other_branches), other_branch_bytes(world.core, agent)


def test_without_a_limit_four_branches_stay_whatever_they_take(make_world: Callable[..., World]) -> None:
    """Their common pages count once, and not at all where the current branch has them."""
    world = make_world(budget_pages=60)
    for number in range(7):
        diverge(world, number)
    # each alone has the page where it parts from the others, whole, and its tail
    assert figures(world) == (4, 4 * 2 * world.set_bytes)
    info = agent_info(world.core, world.agent("a"))
    assert (info["other_branch_bytes"], info["branch_limit_bytes"]) == (4 * 2 * world.set_bytes, None)


def test_branches_used_longest_ago_go_when_they_take_too_much(make_world: Callable[..., World]) -> None:
    """P25, P27: bounded at each turn; the ones used last stay, and coming back to one of them is a hit."""
    world = make_world(budget_pages=60, limits=LimitSettings(branch_limit_bytes=1))
    limit_bytes = 5 * world.set_bytes
    world.limits = LimitSettings(branch_limit_bytes=limit_bytes)
    world.crash()
    for number in range(5):
        diverge(world, number)
        assert figures(world)[1] <= limit_bytes
    assert figures(world)[0] == 2
    assert agent_info(world.core, world.agent("a"))["branch_limit_bytes"] == limit_bytes
    back = world.generate("a", BASE + prose(300, "way-3"), max_tokens=0).turn
    assert back.cached_tokens == back.prompt_tokens
    gone = world.generate("a", BASE + prose(300, "way-0"), max_tokens=0).turn
    assert gone.cached_tokens == 520


def test_the_current_branch_is_never_let_go_of(make_world: Callable[..., World]) -> None:
    """With no room for any other one it is alone; after a restart, too."""
    world = make_world(budget_pages=60, limits=LimitSettings(branch_limit_bytes=0))
    for number in range(3):
        diverge(world, number)
        assert figures(world) == (0, 0)
    world.settle()
    world.crash()
    assert world.core.agents.find(ref_of("a")) is not None
    result = world.generate("a", BASE + prose(300, "way-2"), max_tokens=1).turn
    assert result.cached_tokens == 819
