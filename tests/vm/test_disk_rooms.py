"""Pages of namespaces that have no room left on disk are put aside; everybody else's are written."""

from __future__ import annotations

from kvd.ids import Namespace, SpaceId
from kvd.vm import events as ev
from tests.vm.desk import PAGE_BYTES, A, B, Desk, P

WORK, PLAY = Namespace("work"), Namespace("play")


def make_desk(budget_pages: float = 20) -> Desk:
    """Space A is of `work`, B of `play`; both run."""
    desk = Desk(budget_pages, writes=1)
    for space, namespace in ((A, WORK), (B, PLAY)):
        desk.send(ev.SpaceCreated(space, (PAGE_BYTES,), namespace))
        desk.send(ev.Activated(space))
    return desk


def grow(desk: Desk, space: SpaceId, pages: int) -> None:
    """Seal so many pages."""
    desk.send(ev.GrowthWanted(space, pages * P))
    desk.append(space, pages * P)


def test_what_has_no_room_waits_and_holds_up_nobody() -> None:
    """P33: the page behind one that is put aside goes at once; a namespace without a quota never waits."""
    desk = make_desk()
    desk.send(ev.WritesAllowed(None, {WORK: 2 * PAGE_BYTES}))
    grow(desk, A, 4)
    grow(desk, B, 2)
    desk.settle()
    assert desk.states(A) == ["clean", "clean", "sealed_dirty", "sealed_dirty"]
    assert desk.states(B) == ["clean", "clean"]
    assert desk.pager.quota_held_bytes == {WORK: 2 * PAGE_BYTES}
    assert (desk.pager.is_held(A), desk.pager.is_held(B)) == (True, False)
    assert not desk.pager.writes_fail
    desk.send(ev.WritesAllowed(None, {WORK: PAGE_BYTES}))
    desk.settle()
    assert desk.states(A).count("clean") == 3
    desk.send(ev.WritesAllowed(None))
    desk.settle()
    assert desk.states(A) == ["clean"] * 4
    assert desk.pager.quota_held_bytes == {}


def test_writes_under_way_are_part_of_the_room() -> None:
    """P21: what the engine saw did not have them; two pages are not written into room for one."""
    desk = make_desk()
    desk.send(ev.WritesAllowed(None, {WORK: PAGE_BYTES}))
    grow(desk, A, 2)
    assert len(desk.writes) == 1
    desk.send(ev.WritesAllowed(None, {WORK: PAGE_BYTES}))
    desk.settle()
    assert desk.states(A) == ["clean", "sealed_dirty"]


def test_pages_without_room_are_no_room_for_others() -> None:
    """P21: they cannot be evicted, so a demand takes clean pages of others, and they stay."""
    desk = make_desk(8)
    desk.send(ev.WritesAllowed(None, {WORK: 0}))
    grow(desk, B, 3)
    desk.settle()
    desk.send(ev.Deactivated(B))
    grow(desk, A, 2)
    desk.send(ev.TurnCommitted(A))
    desk.send(ev.Deactivated(A))
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 3 * P))
    assert desk.pager.is_ready(A)
    assert desk.states(A)[:2] == ["sealed_dirty", "sealed_dirty"]
    assert "evicted" in desk.states(B)
    desk.send(ev.SpaceClosed(A))
    assert desk.pager.quota_held_bytes == {}
