"""What pins hold: the heads of pinned spaces, no more than the limit, whatever they grow to."""

from __future__ import annotations

import pytest

from kvd.errors import InternalError
from kvd.ids import Namespace, SpaceId
from kvd.vm import events as ev
from kvd.vm.errors import SpaceInUse
from tests.vm.desk import PAGE_BYTES, A, B, C, Desk


def held(desk: Desk, space: SpaceId) -> int:
    """Pages that a space's pin holds."""
    return len(desk.pager.pinned_pages(space))


def pressed(desk: Desk, pages: int) -> None:
    """Somebody else needs so many pages for a turn."""
    if C not in {space.space for space in desk.pager.spaces}:
        desk.create(C)
    desk.turn(C, pages * 4)


def test_a_pinned_space_that_grows_beyond_the_limit_is_held_from_its_head_on() -> None:
    """P21: half of the usable ten pages may be pinned; the rest of the space goes when somebody needs the room."""
    desk = Desk(12)
    desk.create(A)
    desk.turn(A, 4 * 4)
    desk.send(ev.Pinned(A))
    assert held(desk, A) == 4
    desk.turn(A, 3 * 4)
    assert held(desk, A) == 5
    assert desk.states(A) == ["clean"] * 7
    pressed(desk, 5)
    assert desk.states(A) == ["clean"] * 5 + ["evicted"] * 2
    assert desk.pager.statistics().unpinned_bytes == 2 * PAGE_BYTES


def test_a_request_on_a_space_that_is_partly_pinned_gets_all_of_it() -> None:
    """While it runs everything is held; afterwards what its pin holds stays."""
    desk = Desk(12)
    desk.create(A)
    desk.turn(A, 7 * 4)
    desk.send(ev.Pinned(A))
    pressed(desk, 4)
    desk.send(ev.Activated(A))
    desk.settle()
    assert desk.pager.is_ready(A)
    desk.send(ev.Deactivated(A))
    pressed(desk, 1)
    assert desk.states(A)[:5] == ["clean"] * 5


def test_a_smaller_budget_takes_from_the_last_pin_first_and_a_larger_one_gives_back() -> None:
    """P21: pins never hold more than their part of what there is now; the first to be pinned is the last to lose."""
    desk = Desk(16)  # usable: 14 pages, 7 may be pinned
    desk.create(A, B)
    desk.turn(A, 4 * 4)
    desk.turn(B, 3 * 4)
    desk.send(ev.Pinned(A))
    desk.send(ev.Pinned(B))
    assert (held(desk, A), held(desk, B)) == (4, 3)
    desk.send(ev.BudgetChanged(12 * PAGE_BYTES))
    assert (held(desk, A), held(desk, B)) == (4, 1)
    desk.send(ev.BudgetChanged(6 * PAGE_BYTES))
    assert (held(desk, A), held(desk, B)) == (2, 0)
    assert desk.pager.statistics().resident_bytes <= 4 * PAGE_BYTES
    desk.send(ev.BudgetChanged(16 * PAGE_BYTES))
    desk.settle()
    assert (held(desk, A), held(desk, B)) == (4, 3)
    assert desk.states(A) + desk.states(B) == ["clean"] * 7, "what is held again is read again"


def test_unpinning_makes_room_for_other_pins() -> None:
    """What one pin gives back another one gets, and its pages come in."""
    desk = Desk(10)  # usable: 8 pages
    desk.create(A, B)
    desk.turn(A, 3 * 4)
    desk.turn(B, 3 * 4)
    desk.send(ev.Pinned(A))
    desk.send(ev.Pinned(B))
    assert (held(desk, A), held(desk, B)) == (3, 1)
    desk.send(ev.Unpinned(A))
    assert (held(desk, A), held(desk, B)) == (0, 3)
    desk.send(ev.SpaceClosed(B))
    assert desk.pager.statistics().unpinned_bytes == 0


def test_a_page_that_two_pinned_spaces_map_counts_once() -> None:
    """The common beginning of a fork is held for both."""
    desk = Desk(8)  # usable: 6 pages, 3 may be pinned
    desk.create(A)
    desk.turn(A, 3 * 4)
    desk.send(ev.Forked(A, B, 12))
    desk.send(ev.Pinned(A))
    desk.send(ev.Pinned(B))
    assert (held(desk, A), held(desk, B)) == (3, 3)
    assert desk.pager.statistics().unpinned_bytes == 0


def test_a_space_whose_pin_holds_nothing_is_pinned_all_the_same() -> None:
    """The user's wish stands: it cannot be evicted by wish, and is held once there is room."""
    desk = Desk(12, pin_limit=0)
    desk.create(A)
    desk.turn(A, 4)
    desk.send(ev.Pinned(A))
    assert held(desk, A) == 0
    assert desk.pager.residency(A).pinned
    with pytest.raises(SpaceInUse):
        desk.send(ev.EvictionWanted(A))


@pytest.mark.parametrize(("limit", "pages"), [(250, 2), (0.3, 3), (1.0, 9), (10_000, 9), (0, 0)])
def test_the_limit_is_bytes_or_a_part_and_never_everything(limit: int | float, pages: int) -> None:
    """P21: an int is bytes, a float a part of what is usable; a tenth is always left to who runs."""
    desk = Desk(12, pin_limit=limit)
    desk.create(A)
    desk.turn(A, 10 * 4)
    desk.send(ev.Pinned(A))
    assert held(desk, A) == pages


def test_pins_of_a_namespace_with_a_quota_hold_as_large_a_part_of_that() -> None:
    """Somebody beside them has to run inside the quota, too."""
    desk = Desk(22)
    desk.send(ev.SpaceCreated(A, (PAGE_BYTES,), Namespace("work")))
    desk.create(B)
    desk.send(ev.QuotaChanged(Namespace("work"), 6 * PAGE_BYTES))
    desk.turn(A, 5 * 4)
    desk.turn(B, 5 * 4)
    desk.send(ev.Pinned(A))
    desk.send(ev.Pinned(B))
    assert (held(desk, A), held(desk, B)) == (3, 5)
    desk.send(ev.QuotaChanged(Namespace("work"), None))
    assert held(desk, A) == 5


def test_a_rollback_of_a_pinned_space_makes_room_for_its_own_rest() -> None:
    """What is cut away counts no more."""
    desk = Desk(12)
    desk.create(A)
    desk.turn(A, 7 * 4)
    desk.send(ev.Pinned(A))
    desk.send(ev.RolledBack(A, 4 * 4))
    assert held(desk, A) == 4
    assert desk.pager.statistics().unpinned_bytes == 0


def test_books_that_do_not_agree_are_found() -> None:
    """`check_integrity` counts what pins hold again."""
    desk = Desk(12)
    desk.create(A)
    desk.turn(A, 7 * 4)
    desk.send(ev.Pinned(A))
    (space,) = desk.pager.spaces
    space.use.unpinned_pages.clear()
    with pytest.raises(InternalError, match="pins hold 700 bytes, 500 are the limit"):
        desk.pager.check_integrity()
