"""Eviction policies: whose pages go first, and the laws that hold for all of them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvd.ids import SpaceId
from kvd.vm import events as ev
from kvd.vm.eviction import POLICIES, ReusePolicy
from kvd.vm.page import SpaceUse
from tests.vm.desk import A, B, C, D, Desk, P


def used_at(*turns: int) -> SpaceUse:
    """A space that had these turns."""
    use = SpaceUse(A)
    for turn in turns:
        use.began(turn)
    return use


def round_of(desk: Desk, *spaces: SpaceId) -> None:
    """A turn of one token each, in this order."""
    for space in spaces:
        desk.turn(space, 1)


@pytest.mark.parametrize(
    ("turns", "now", "distance"),
    [
        ((), 7, 14.0),  # restored, never used: away as long as anybody can tell
        ((5,), 7, 4.0),
        ((3, 5), 7, 4.0),  # one gap is no habit
        ((1, 4, 7), 7, 3.0),
        ((1, 4, 7), 9, 1.0),
        ((1, 4, 7), 10, 1.5),  # overdue
        ((1, 4, 7), 17, 8.5),
        ((1, 4, 50), 50, 3.0),  # a pause does not make a habit rare
        ((1, 4, 50, 120), 120, 46.0),  # two do
    ],
)
def test_the_next_turn_is_estimated_from_the_shorter_of_two_gaps(
    turns: tuple[int, ...], now: int, distance: float
) -> None:
    """What is left of the gap; overdue, the absence less half a gap; without a habit, twice the absence."""
    assert ReusePolicy.distance_turns(used_at(*turns), now) == distance


def test_the_longer_a_space_is_overdue_the_farther_it_is() -> None:
    """An agent that has ended its work does not keep its frames because it was once busy."""
    use = used_at(1, 2, 3)
    distances = [ReusePolicy.distance_turns(use, now) for now in range(4, 30)]
    assert all(before < after for before, after in pairwise(distances))


def missed_in_a_round(policy: str) -> float:
    """Part of the pages missed by three agents of two pages that take turns, with room for four pages."""
    desk = Desk(6, policy=policy)
    desk.create(A, B, C)
    for space in (A, B, C):
        desk.turn(space, P + 1)
    for _ in range(3):  # of no tokens: the agents stay as long as they are
        for space in (A, B, C):
            desk.turn(space, 0)
    before = desk.pager.paging
    for _ in range(4):
        for space in (A, B, C):
            desk.turn(space, 0)
    after = desk.pager.paging
    assert desk.pager.statistics().eviction == policy
    return (after.faults - before.faults) / (after.demanded - before.demanded)


def test_in_a_round_reuse_lets_the_one_go_that_ran_last() -> None:
    """Three agents take turns with room for two: least recently used misses every page, reuse every other one."""
    assert missed_in_a_round("lru") == 1.0
    assert missed_in_a_round("reuse") == 0.5


def test_a_scan_over_many_agents_takes_from_scanned_agents_not_from_those_at_work() -> None:
    """Under reuse a batch over agents that come back rarely leaves the two at work in RAM."""
    others = [SpaceId(number) for number in range(10, 18)]
    faults = {}
    for policy in ("lru", "reuse"):
        desk = Desk(10, policy=policy)  # usable: 8 pages
        desk.create(A, B, *others)
        for space in (A, B):
            desk.turn(space, 2 * P)
        for space in others:
            desk.turn(space, P)
        for _ in range(3):  # habits: A and B often, the others once a scan
            for _ in range(4):
                round_of(desk, A, B)
            for space in others:
                desk.turn(space, P // 4)
        before = desk.pager.faults(A) + desk.pager.faults(B)
        for start in range(0, len(others), 2):
            round_of(desk, *others[start : start + 2], A, B)
        faults[policy] = desk.pager.faults(A) + desk.pager.faults(B) - before
    assert faults["reuse"] < faults["lru"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_expected_spaces_go_after_all_others_and_the_latest_of_them_first(policy: str) -> None:
    """What waits or is predicted outranks any estimate."""
    desk = Desk(8, policy=policy)  # usable: 6 pages
    desk.create(A, B, C, D)
    for space in (A, B, C):
        desk.turn(space, 2 * P)
    desk.send(ev.SpacesPredicted((A, B)))
    desk.send(ev.Activated(D))
    desk.send(ev.GrowthWanted(D, 2 * P))
    assert [desk.states(each) for each in (A, B, C)] == [["clean"] * 2, ["clean"] * 2, ["evicted"] * 2]
    desk.send(ev.GrowthWanted(D, 3 * P))
    assert [desk.states(each) for each in (A, B)] == [["clean"] * 2, ["clean", "evicted"]]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_shared_prefix_goes_with_the_space_that_goes_last(policy: str) -> None:
    """P18: sub-agents that share a prefix lose their own pages first; the prefix stays while one of them does."""
    desk = Desk(8, policy=policy)  # usable: 6 pages
    desk.create(A, D)
    desk.turn(A, 2 * P)
    for child in (B, C):
        desk.send(ev.Forked(A, child, 2 * P))
        desk.turn(child, P)
    desk.send(ev.Activated(D))
    desk.send(ev.GrowthWanted(D, 4 * P))
    assert [desk.states(each)[:2] for each in (A, B, C)] == [["clean"] * 2] * 3
    assert sum(desk.states(each)[2] == "evicted" for each in (B, C)) == 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_pages_of_many_sharers_are_offered_once_and_only_when_none_is_held(policy: str) -> None:
    """However many spaces map a page, it is one victim; a space at work keeps it for all."""
    desk = Desk(12, policy=policy)
    desk.create(A)
    desk.turn(A, 2 * P)
    for child in (B, C, D):
        desk.send(ev.Forked(A, child, 2 * P))
    order = POLICIES[policy]().order
    assert len(list(order(desk.pager.spaces))) == 2
    desk.send(ev.Activated(C))
    assert list(order(desk.pager.spaces)) == []
