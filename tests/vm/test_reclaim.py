"""Eviction in the background: between its marks, by quotas, and for the machine's sake."""

from __future__ import annotations

import pytest

from kvd.ids import Namespace, SpaceId
from kvd.vm import events as ev
from kvd.vm.budget import Budget
from tests.vm.desk import PAGE_BYTES, A, B, C, Desk

WORK, PLAY = Namespace("work"), Namespace("play")


def marked_desk(*, writes: int = 2) -> Desk:
    """20 pages are usable; from 18 on pages go in the background, down to 15."""
    desk = Desk(22.4, writes=writes, high_free_percent=10, low_free_percent=25)
    desk.create(A, B, C)
    figures = desk.pager.statistics()
    assert [figures.usable_bytes, figures.high_mark_bytes, figures.low_mark_bytes] == [2000, 1800, 1500]
    return desk


def test_nothing_goes_that_is_free_to_keep() -> None:
    """Up to the high mark every idle page stays (P22: nothing is evicted that is within the limit)."""
    desk = marked_desk()
    desk.turn(A, 9 * 4)
    desk.turn(B, 9 * 4)
    desk.send(ev.Tick())
    assert desk.pager.statistics().resident_bytes == 1800
    assert desk.pager.statistics().evictions == 0


def test_above_the_high_mark_idle_pages_go_down_to_the_low_one() -> None:
    """P21: those used longest ago go, at the end of the request that exceeded the mark, not during it."""
    desk = marked_desk()
    desk.turn(A, 9 * 4)
    desk.send(ev.Activated(B))
    desk.send(ev.GrowthWanted(B, 40))
    desk.append(B, 40)
    desk.settle()
    desk.send(ev.TurnCommitted(B))
    desk.send(ev.Deactivated(B))
    figures = desk.pager.statistics()
    assert (figures.resident_bytes, figures.evictions, figures.reclaimed) == (1500, 4, 4)
    assert desk.states(A) == ["clean"] * 5 + ["evicted"] * 4
    assert desk.states(B) == ["clean"] * 10


def test_between_the_marks_what_comes_to_rest_stays() -> None:
    """After the low mark was reached, eviction begins again only above the high one."""
    desk = marked_desk()
    desk.turn(A, 9 * 4)
    desk.turn(B, 10 * 4)
    desk.turn(C, 3 * 4)
    desk.send(ev.Tick())
    assert desk.pager.statistics().resident_bytes == 1800
    assert desk.pager.statistics().reclaimed == 4


def test_dirty_pages_are_written_first_and_go_then() -> None:
    """The disk is given the work before anybody waits for it; each page goes when its write has ended."""
    desk = marked_desk(writes=1)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 19 * 4))
    desk.append(A, 19 * 4)
    desk.send(ev.Deactivated(A))
    assert desk.pager.statistics().resident_bytes == 1900
    desk.settle()
    assert desk.pager.statistics().resident_bytes == 1500


def test_what_is_held_stays_above_the_marks_and_is_over_when_all_else_is_gone() -> None:
    """Marks below what runs do nothing to it, and nothing that comes to rest below the high mark goes for them."""
    desk = marked_desk()
    desk.turn(A, 4)
    desk.turn(B, 18 * 4)
    desk.send(ev.Activated(B))
    desk.send(ev.Tick())
    assert (desk.states(A), desk.states(B)) == (["evicted"], ["clean"] * 18)
    desk.send(ev.Tick())
    assert desk.states(B) == ["clean"] * 18


def test_what_is_read_ahead_stays_below_the_high_mark() -> None:
    """A prediction fills free room up to the mark only: it would be evicted again at once."""
    desk = marked_desk()
    desk.turn(A, 10 * 4)
    desk.send(ev.EvictionWanted(A))
    desk.turn(B, 12 * 4)
    desk.send(ev.SpacesPredicted((B,)))
    desk.send(ev.PrefetchHinted(A, "queued"))
    desk.settle()
    figures = desk.pager.statistics()
    assert figures.resident_bytes == figures.high_mark_bytes
    assert figures.reclaimed == 0


def test_memory_that_the_machine_wants_comes_from_idle_pages_only() -> None:
    """P23: as many bytes as are wanted, clean before dirty, never from what runs; what is missing is missing."""
    desk = Desk(12)
    desk.create(A, B)
    desk.turn(A, 4 * 4)
    desk.turn(B, 4 * 4)
    desk.send(ev.Activated(B))
    assert [type(each) for each in desk.send(ev.MemoryWanted(150))] == [ev.DropFrame] * 2
    assert desk.states(A) == ["clean", "clean", "evicted", "evicted"]
    desk.send(ev.MemoryWanted(10_000))
    assert (desk.states(A), desk.states(B)) == (["evicted"] * 4, ["clean"] * 4)
    assert desk.pager.statistics().reclaimed == 4


@pytest.mark.parametrize(
    ("pages", "high", "low"), [(14, 0, 0), (60, 1, 2), (200, 3, 9)], ids=["tiny", "small", "larger"]
)
def test_gaps_are_whole_pages_and_a_tiny_pool_has_none(pages: int, high: int, low: int) -> None:
    """By default a fiftieth and a twentieth of what is usable are free at the marks."""
    budget = Budget(pages * PAGE_BYTES, max_copies=2)
    budget.set_formats([(PAGE_BYTES,)])
    assert budget.usable_bytes - budget.high_mark_bytes == high * PAGE_BYTES
    assert budget.usable_bytes - budget.low_mark_bytes == low * PAGE_BYTES


@pytest.mark.parametrize(("high", "low"), [(-1, 5), (6, 5), (0, 101)])
def test_marks_that_make_no_sense_are_refused(high: int, low: int) -> None:
    """The error names what is allowed."""
    with pytest.raises(ValueError, match="0 <= high <= low <= 100"):
        Budget(1, max_copies=1, high_free_percent=high, low_free_percent=low)


# ---- quotas of namespaces -------------------------------------------------------------------------------------------


def two_namespaces() -> Desk:
    """A and B are of work, C is of play; ten pages are usable, work should have four."""
    desk = Desk(12)
    for space, namespace in ((A, WORK), (B, WORK), (C, PLAY)):
        desk.send(ev.SpaceCreated(space, (PAGE_BYTES,), namespace))
    desk.send(ev.QuotaChanged(WORK, 4 * PAGE_BYTES))
    return desk


def test_a_namespace_over_its_quota_gives_up_its_own_pages() -> None:
    """P21: what another namespace used longer ago stays, though there is room for neither to lose anything."""
    desk = two_namespaces()
    desk.turn(C, 5 * 4)
    desk.turn(A, 3 * 4)
    desk.turn(B, 3 * 4)
    assert desk.states(C) == ["clean"] * 5
    assert desk.states(A) == ["clean", "evicted", "evicted"]
    assert desk.states(B) == ["clean"] * 3
    assert desk.pager.statistics().namespaces == {WORK: 400, PLAY: 500}


def test_what_runs_may_exceed_a_quota_until_it_rests() -> None:
    """A quota binds nobody who runs: pages are not taken from under a step; they go when the request has ended."""
    desk = two_namespaces()
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 6 * 4))
    desk.append(A, 6 * 4)
    desk.settle()
    assert desk.pager.statistics().namespaces[WORK] == 600
    desk.send(ev.Deactivated(A))
    assert desk.pager.statistics().namespaces[WORK] == 400


def test_a_smaller_quota_is_met_at_once_and_none_at_all_gives_the_room_back() -> None:
    """Idle pages go down to it; without a quota the namespace shares what there is."""
    desk = two_namespaces()
    desk.turn(A, 4 * 4)
    desk.send(ev.QuotaChanged(WORK, 150))
    assert desk.states(A) == ["clean"] + ["evicted"] * 3
    desk.send(ev.QuotaChanged(WORK, None))
    desk.turn(A, 1)
    desk.turn(B, 4 * 4)
    assert desk.pager.statistics().namespaces[WORK] == 900


def test_reading_ahead_keeps_to_the_quota() -> None:
    """A hint takes its namespace's own idle pages, and leaves alone what others have."""
    desk = two_namespaces()
    desk.turn(C, 2 * 4)
    desk.turn(A, 3 * 4)
    desk.turn(B, 3 * 4)
    desk.send(ev.PrefetchHinted(A))
    desk.settle()
    assert desk.states(A) == ["clean"] * 3
    assert desk.states(B) == ["clean", "evicted", "evicted"]
    assert desk.states(C) == ["clean"] * 2


def test_a_fork_belongs_to_its_parents_namespace() -> None:
    """Pages are shared inside a namespace only, and count there once."""
    desk = two_namespaces()
    desk.turn(A, 2 * 4)
    desk.send(ev.Forked(A, SpaceId(9), 8))
    assert desk.pager.statistics().namespaces == {WORK: 200}
