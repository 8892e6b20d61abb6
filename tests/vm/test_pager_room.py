"""Making room: who is evicted, in which order, and that the budget holds."""

from __future__ import annotations

import pytest

from kvd.ids import GroupId, PageId, PageKey, SpaceId
from kvd.vm import events as ev
from kvd.vm.errors import SpaceInUse
from tests.vm.desk import PAGE_BYTES, A, B, C, D, Desk, pages_of


def test_the_least_recently_used_space_is_evicted_first_and_its_tail_end_before_its_head() -> None:
    """Room for C comes from A, used before B, from the end of A backwards."""
    desk = Desk(10)  # usable: 8 pages
    desk.create(A, B, C)
    desk.turn(A, 14)
    desk.turn(B, 16)
    desk.send(ev.Activated(C))
    desk.send(ev.GrowthWanted(C, 8))
    assert desk.pager.is_ready(C)
    assert desk.states(A) == ["clean", "clean", "evicted", "stashed"]
    assert desk.states(B) == ["clean"] * 4


def test_clean_pages_go_before_dirty_ones() -> None:
    """Inside a space, a page that must be written first is the last to be chosen."""
    desk = Desk(6, writes=1)  # usable: 4 pages
    desk.create(A, B)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 12))
    desk.append(A, 12)
    desk.send(ev.WriteDone(desk.writes.pop(0)))
    desk.send(ev.WriteFailed(desk.writes.pop(0), "later"))
    desk.send(ev.Deactivated(A))
    assert desk.states(A) == ["clean", "sealed_dirty", "sealed_dirty"]
    desk.send(ev.Activated(B))
    desk.send(ev.GrowthWanted(B, 8))
    assert desk.states(A) == ["evicted", "sealed_dirty", "sealed_dirty"]
    assert desk.pager.is_ready(B)


def test_dirty_victims_are_written_and_then_dropped_for_the_demand_that_waits() -> None:
    """A demand that needs a dirty page's room gets it when the write is done, not before."""
    desk = Desk(4, writes=1)  # usable: 2 pages
    desk.create(A, B)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 8))
    desk.append(A, 8)
    desk.send(ev.Deactivated(A))
    assert desk.send(ev.Activated(B)) == ()
    assert desk.send(ev.GrowthWanted(B, 4)) == ()
    assert not desk.pager.is_ready(B)
    out = desk.send(ev.WriteDone(desk.writes.pop(0)))
    assert [type(i) for i in out] == [ev.DropFrame, ev.MapFrame, ev.WritePage]
    assert desk.pager.is_ready(B)


def test_a_full_disk_makes_clean_pages_of_later_spaces_go_instead() -> None:
    """Pages whose write failed are not waited for: a demand takes what can be had."""
    desk = Desk(6, writes=1)  # usable: 4 pages
    desk.create(A, B, C)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 8))
    desk.append(A, 8)
    while desk.writes:
        desk.send(ev.WriteFailed(desk.writes.pop(0), "no space left"))
    desk.send(ev.Deactivated(A))
    desk.create(D)
    desk.send(
        ev.SpaceRestored(
            SpaceId(9), (PAGE_BYTES,), (ev.SegmentImage(GroupId(0), (ev.PageRef(PageId("x"), PageKey("x")),), 0),)
        )
    )
    desk.send(ev.Activated(SpaceId(9)))
    desk.settle()
    desk.send(ev.Deactivated(SpaceId(9)))
    desk.send(ev.Activated(C))
    desk.send(ev.GrowthWanted(C, 8))
    assert desk.pager.is_ready(C)
    assert desk.states(A) == ["sealed_dirty", "sealed_dirty"]
    assert desk.states(SpaceId(9)) == ["evicted"]


def test_pages_of_active_and_pinned_spaces_stay() -> None:
    """Demand waits rather than take a page from a running or a pinned space; unpinning lets it go on."""
    desk = Desk(6)  # usable: 4 pages
    desk.create(A, B, C)
    desk.turn(A, 8)
    desk.send(ev.Pinned(A))
    desk.send(ev.Activated(B))
    desk.send(ev.GrowthWanted(B, 8))
    desk.append(B, 4)
    desk.settle()
    desk.send(ev.Activated(C))
    assert desk.send(ev.GrowthWanted(C, 4)) == ()
    assert desk.pager.statistics().waiting_spaces == 1
    assert desk.states(A) == ["clean", "clean"]
    desk.send(ev.Unpinned(A))
    assert desk.pager.is_ready(C)
    assert desk.states(A) == ["clean", "evicted"]


def test_a_shared_page_counts_as_used_when_any_of_its_spaces_is() -> None:
    """The fork's use keeps the common pages; only what the parent alone maps goes."""
    desk = Desk(8)  # usable: 6 pages
    desk.create(A, C)
    desk.turn(A, 16)
    desk.send(ev.Forked(A, B, 8))
    desk.send(ev.Activated(B))
    desk.send(ev.Deactivated(B))
    desk.send(ev.Activated(C))
    desk.send(ev.GrowthWanted(C, 16))
    assert desk.pager.is_ready(C)
    assert desk.states(A) == ["clean", "clean", "evicted", "evicted"]
    assert desk.pager.statistics().shared_pages == 2


def test_demand_is_served_first_come_first_served() -> None:
    """A small demand does not overtake a large one that waits for room."""
    desk = Desk(6)  # usable: 4 pages
    desk.create(A, B, C)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 8))
    desk.send(ev.Activated(B))
    desk.send(ev.GrowthWanted(B, 12))
    desk.send(ev.Activated(C))
    desk.send(ev.GrowthWanted(C, 4))
    assert (desk.pager.is_ready(B), desk.pager.is_ready(C)) == (False, False)
    desk.send(ev.Deactivated(A))
    assert (desk.pager.is_ready(B), desk.pager.is_ready(C)) == (True, True)


def test_pages_are_loaded_from_head_to_tail_within_the_bound() -> None:
    """Loads start at the head, two at a time here, and go on as they end."""
    desk = Desk(20, loads=2)
    desk.create(A)
    desk.turn(A, 18)
    desk.send(ev.EvictionWanted(A))
    order = [p.ref.page_id for p in desk.pager.segments(A)[0].pages]
    first = desk.send(ev.Activated(A))
    assert pages_of(first, ev.LoadPage) == order[:2]
    later = desk.settle()
    assert pages_of(later, ev.LoadPage) == order[2:]
    assert isinstance(later[-1], ev.LoadTail)


def test_a_hint_takes_room_from_clean_pages_of_spaces_used_before() -> None:
    """In a full pool a hint drops what is clean and idle, tail end first, and gives up on what does not fit."""
    desk = Desk(6)  # usable: 4 pages
    desk.create(A, B, C)
    desk.turn(A, 12)
    desk.send(ev.EvictionWanted(A))
    desk.turn(C, 4)
    desk.send(ev.Pinned(C))
    desk.turn(B, 12)
    assert desk.states(B) == ["clean"] * 3
    desk.send(ev.PrefetchHinted(A))
    desk.settle()
    assert desk.states(A) == ["clean"] * 3
    assert desk.states(B) == ["evicted"] * 3
    assert desk.states(C) == ["clean"], "what is pinned stays"
    assert desk.pager.statistics().prefetched["hint"].pages == 3
    desk.send(ev.PrefetchHinted(B))
    desk.settle()
    assert desk.states(A) == ["clean"] * 3, "one hint takes nothing from another"
    out = [*desk.send(ev.SpaceClosed(A)), *desk.settle()]
    assert pages_of(out, ev.LoadPage) == [], "what did not fit is not waited for"


def test_a_full_disk_gets_one_trial_at_a_time_ever_more_rarely() -> None:
    """P38: however many pages are dirty, one is tried after 1, 2, 4 ... 30 seconds; one success frees the rest."""
    desk = Desk(40)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 80))
    desk.append(A, 80)
    for _ in range(2):
        desk.send(ev.WriteFailed(desk.writes.pop(0), "full"))
    assert desk.pager.writes_fail
    trials = []
    for second in range(1, 125):
        desk.send(ev.Tick())
        if desk.writes:
            trials.append(second)
            (page,) = desk.writes
            desk.writes.clear()
            desk.send(ev.WriteFailed(page, "full"))
    assert trials == [1, 3, 7, 15, 31, 61, 91, 121]
    desk.send(ev.RetryWanted())
    (page,) = desk.writes
    desk.send(ev.RetryWanted())
    assert desk.writes == [page], "one at a time"
    desk.settle()
    assert set(desk.states(A)) == {"clean"}
    assert not desk.pager.writes_fail


def test_a_page_that_alone_cannot_be_written_does_not_stop_the_others() -> None:
    """The next trial is another page's."""
    desk = Desk(20, writes=1)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 12))
    desk.append(A, 12)
    bad = desk.writes.pop(0)
    desk.send(ev.WriteFailed(bad, "no such folder"))
    desk.send(ev.Tick())
    while desk.writes and desk.writes[0] != bad:
        desk.send(ev.WriteDone(desk.writes.pop(0)))
    assert desk.states(A) == ["writing", "clean", "clean"]


def test_copies_in_flight_count_against_the_budget() -> None:
    """P21: pages that come in count once each and one of them twice, a page being written twice."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 4)
    desk.send(ev.EvictionWanted(A))
    desk.send(ev.Activated(A))
    statistics = desk.pager.statistics()
    assert (statistics.resident_bytes, statistics.in_flight_bytes) == (PAGE_BYTES, PAGE_BYTES)
    desk.settle()
    desk.send(ev.GrowthWanted(A, 4))
    desk.append(A, 4)
    statistics = desk.pager.statistics()
    assert (statistics.resident_bytes, statistics.in_flight_bytes) == (2 * PAGE_BYTES, PAGE_BYTES)
    assert statistics.peak_resident_bytes == 2 * PAGE_BYTES
    assert statistics.peak_total_bytes == 3 * PAGE_BYTES


def test_what_can_never_fit_is_told_beforehand() -> None:
    """P22: `fits` compares a working set with what is usable, which excludes the reserves for copies."""
    desk = Desk(10)
    desk.create(A)
    assert desk.pager.usable_bytes == 8 * PAGE_BYTES
    assert desk.pager.working_set_bytes(A, 32) == 8 * PAGE_BYTES
    assert desk.pager.fits(desk.pager.working_set_bytes(A, 32))
    assert not desk.pager.fits(desk.pager.working_set_bytes(A, 33))


def test_filling_far_beyond_the_budget_never_exceeds_it() -> None:
    """P21: thirty spaces of five pages through a budget of twelve; frames and copies stay inside it all the time."""
    desk = Desk(12)
    for number in range(1, 31):
        desk.create(SpaceId(number))
        desk.turn(SpaceId(number), 18)
        statistics = desk.pager.statistics()
        assert statistics.resident_bytes + statistics.in_flight_bytes <= 12 * PAGE_BYTES
    assert desk.pager.statistics().peak_resident_bytes <= 12 * PAGE_BYTES
    assert desk.pager.statistics().evictions >= 30 * 5 - 12


def test_a_smaller_budget_is_reached_by_evicting() -> None:
    """After BudgetChanged idle pages go at once, active ones when they are released."""
    desk = Desk(12)
    desk.create(A, B)
    desk.turn(A, 16)
    desk.send(ev.Activated(B))
    desk.send(ev.GrowthWanted(B, 16))
    desk.append(B, 16)
    desk.settle()
    desk.send(ev.BudgetChanged(4 * PAGE_BYTES))
    assert desk.states(A) == ["evicted"] * 4
    assert desk.states(B) == ["clean"] * 4
    desk.send(ev.Deactivated(B))
    assert desk.pager.statistics().resident_bytes == 2 * PAGE_BYTES


def test_a_smaller_budget_full_of_dirty_pages_is_still_reached() -> None:
    """With no room for a copy, one write at a time is allowed beyond the budget, or nothing could ever be evicted."""
    desk = Desk(12)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 24))
    desk.append(A, 24)
    while desk.writes:
        desk.send(ev.WriteFailed(desk.writes.pop(0), "later"))
    desk.send(ev.Deactivated(A))
    desk.send(ev.BudgetChanged(3 * PAGE_BYTES))
    desk.send(ev.Tick())
    assert len(desk.writes) == 1
    desk.settle()
    assert desk.pager.statistics().resident_bytes == PAGE_BYTES


def test_an_uncommitted_tail_is_never_dropped() -> None:
    """A tail the log does not hold to its end stays in RAM; the commit lets a wanted eviction go on."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6, commit=False)
    desk.send(ev.EvictionWanted(A))
    assert desk.states(A) == ["evicted", "packed"]
    desk.send(ev.TurnCommitted(A))
    assert desk.states(A) == ["evicted", "stashed"]


def test_a_space_in_use_is_not_evicted() -> None:
    """Eviction of an active or pinned space is the caller's mistake and named so."""
    desk = Desk(20)
    desk.create(A)
    desk.send(ev.Pinned(A))
    with pytest.raises(SpaceInUse) as caught:
        desk.send(ev.EvictionWanted(A))
    assert caught.value.name == "agent_busy"


def test_eviction_on_wish_leaves_pages_others_may_want() -> None:
    """A page another space maps stays until that space is to be evicted too."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 12)
    desk.send(ev.Forked(A, B, 8))
    desk.send(ev.EvictionWanted(A))
    assert desk.states(A) == ["clean", "clean", "evicted"]
    desk.send(ev.EvictionWanted(B))
    assert desk.states(A) == ["evicted"] * 3


def test_every_budget_that_fits_a_demand_serves_it() -> None:
    """Two spaces that only just fit what is usable are both ready in the end, whatever else was resident."""
    desk = Desk(8, writes=1, loads=1)  # usable: 6 pages
    desk.create(A, B, C)
    desk.turn(C, 22)
    desk.turn(A, 8)
    desk.turn(B, 8)
    for space in (A, B):
        desk.send(ev.Activated(space))
        desk.send(ev.GrowthWanted(space, 4))
    assert desk.pager.fits(sum(desk.pager.working_set_bytes(space, 4) for space in (A, B)))
    desk.settle()
    assert desk.pager.is_ready(A)
    assert desk.pager.is_ready(B)
