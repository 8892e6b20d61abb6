"""What is loaded before anybody demands it: at whose expense, and what became of it."""

from __future__ import annotations

import pytest

from kvd.ids import GroupId, SpaceId
from kvd.vm import events as ev
from kvd.vm.errors import IllegalEvent
from kvd.vm.prefetch import PrefetchFigures
from tests.vm.desk import PAGE_BYTES, A, B, C, D, Desk, P


def idle(desk: Desk, *spaces: SpaceId, pages: int = 2) -> None:
    """Spaces of so many clean pages that ran one after the other, the first longest ago."""
    desk.create(*spaces)
    for space in spaces:
        desk.turn(space, pages * P)


def test_a_predicted_space_comes_in_beside_one_that_runs_and_takes_from_who_is_not_expected() -> None:
    """Three agents take turns with room for two: while A runs, B replaces C, although C ran last."""
    desk = Desk(6)  # usable: 4 pages
    idle(desk, A, B, C)
    desk.send(ev.Activated(A))
    desk.settle()
    assert (desk.states(A), desk.states(B)) == (["clean"] * 2, ["evicted"] * 2)
    desk.send(ev.SpacesPredicted((B,)))
    desk.settle()
    assert desk.states(B) == ["clean"] * 2
    assert desk.states(C) == ["evicted"] * 2
    desk.send(ev.Deactivated(A))
    faults = desk.pager.statistics().faults
    desk.send(ev.Activated(B))
    assert desk.pager.is_ready(B)
    assert desk.pager.statistics().faults == faults
    figures = desk.pager.statistics().prefetched["predicted"]
    assert figures == PrefetchFigures(2, 2 * PAGE_BYTES, 2, 2 * PAGE_BYTES, 0, 0)


def test_a_prediction_takes_nothing_from_what_is_held_hinted_or_expected_sooner() -> None:
    """Held, waiting, predicted sooner: all stay; the space predicted last gets what is left, which is nothing."""
    desk = Desk(8)  # usable: 6 pages
    idle(desk, D, A, B, C)
    desk.send(ev.Pinned(A))
    desk.send(ev.PrefetchHinted(B, "queued"))
    desk.send(ev.SpacesPredicted((C, D)))
    desk.settle()
    assert [desk.states(each) for each in (A, B, C)] == [["clean"] * 2] * 3
    assert desk.states(D) == ["evicted"] * 2
    desk.send(ev.SpacesPredicted((D, C)))
    desk.settle()
    assert desk.states(D) == ["clean"] * 2, "what was predicted later makes room"
    assert desk.states(C) == ["evicted"] * 2


def test_nothing_is_dropped_for_a_page_that_does_not_fit_all_the_same() -> None:
    """An idle agent's small page is too little room for a predicted large one, so it stays."""
    desk = Desk(10.5)
    desk.send(ev.SpaceCreated(B, (3 * PAGE_BYTES,)))
    assert desk.pager.usable_bytes == 4.5 * PAGE_BYTES
    desk.turn(B, P)
    idle(desk, A, pages=1)
    idle(desk, C)
    desk.send(ev.Activated(C))
    assert (desk.states(A), desk.states(B)) == (["clean"], ["evicted"])
    desk.send(ev.SpacesPredicted((B,)))
    desk.settle()
    assert (desk.states(A), desk.states(B)) == (["clean"], ["evicted"])


def test_what_is_expected_is_evicted_last_and_of_that_the_latest_first() -> None:
    """A demand takes from idle spaces, then from the prediction that is furthest, then from who waits."""
    desk = Desk(8)
    idle(desk, A, B, C)
    desk.send(ev.PrefetchHinted(A, "queued"))
    desk.send(ev.SpacesPredicted((C, B)))
    desk.create(D)
    desk.send(ev.Activated(D))
    desk.send(ev.GrowthWanted(D, 2 * P))
    assert [desk.states(each) for each in (A, B, C)] == [["clean"] * 2, ["evicted"] * 2, ["clean"] * 2]
    desk.send(ev.GrowthWanted(D, 4 * P))
    assert [desk.states(each) for each in (A, C)] == [["clean"] * 2, ["evicted"] * 2]


def test_a_turn_that_waits_gets_room_that_comes_later_a_clients_hint_does_not() -> None:
    """`queued` is tried until it runs or is withdrawn; `hint` once; a turn that will not come is not loaded for."""
    desk = Desk(6)
    idle(desk, A, B, C)
    for reason in ("hint", "queued"):
        for space in (A, B, C):
            desk.send(ev.EvictionWanted(space))
        desk.send(ev.Activated(B))
        desk.send(ev.Activated(C))
        desk.settle()
        desk.send(ev.PrefetchHinted(A, reason))
        desk.settle()
        assert desk.states(A) == ["evicted"] * 2, "nothing that is held makes room"
        desk.send(ev.Deactivated(B))
        desk.settle()
        assert desk.states(A) == (["clean"] * 2 if reason == "queued" else ["evicted"] * 2)
        desk.send(ev.Deactivated(C))
    desk.send(ev.HintWithdrawn(A))
    desk.send(ev.EvictionWanted(A))
    desk.settle()
    assert desk.states(A) == ["evicted"] * 2


def test_nothing_is_loaded_ahead_while_a_demand_waits_and_one_load_is_left_to_it() -> None:
    """With three loads at once two are prefetches at most; a demand that comes is served before any more of them."""
    desk = Desk(40, loads=3)
    idle(desk, A, B, pages=6)
    for space in (A, B):
        desk.send(ev.EvictionWanted(space))
    desk.send(ev.SpacesPredicted((A,)))
    assert desk.loads == [], "the user wanted it on disk"
    desk.send(ev.PrefetchHinted(A, "queued"))
    assert len(desk.loads) == 2
    desk.send(ev.Activated(B))
    assert len(desk.loads) == 3, "the load that was left"
    while not desk.pager.is_ready(B):
        desk.send(ev.LoadDone(desk.loads.pop(0)))
    assert desk.states(A).count("clean") == 2, "no prefetch has started meanwhile"
    desk.settle()
    assert desk.states(A) == ["clean"] * 6


def test_pages_loaded_ahead_are_used_wasted_or_unknown() -> None:
    """A page is used once a space that runs needs it, also while it is still on its way; dropped before, wasted."""
    desk = Desk(20, loads=8)
    idle(desk, A, B, C, pages=3)
    for space in (A, B, C):
        desk.send(ev.EvictionWanted(space))
        desk.send(ev.PrefetchHinted(space))
        if space != A:
            desk.settle()
    hints = desk.pager.statistics().prefetched["hint"]
    assert (hints.pages, hints.used_pages, hints.wasted_pages, hints.unknown_pages) == (9, 0, 0, 9)
    desk.send(ev.Activated(A))
    desk.send(ev.EvictionWanted(B))
    desk.send(ev.SpaceClosed(C))
    hints = desk.pager.statistics().prefetched["hint"]
    assert (hints.used_pages, hints.wasted_pages, hints.unknown_pages) == (3, 6, 0)
    assert hints.page_bytes == hints.used_bytes + hints.wasted_bytes == 9 * PAGE_BYTES


def test_a_cut_uses_the_page_it_goes_through_and_a_bad_page_is_wasted() -> None:
    """A rollback needs one page of what was loaded ahead; a load that fails helped nobody."""
    desk = Desk(20)
    idle(desk, A, pages=2)
    desk.send(ev.EvictionWanted(A))
    desk.send(ev.PrefetchHinted(A))
    desk.send(ev.LoadFailed(desk.loads.pop(), "bad checksum"))
    desk.settle()
    desk.send(ev.CutWanted(A, 2))
    hints = desk.pager.statistics().prefetched["hint"]
    assert (hints.pages, hints.used_pages, hints.wasted_pages) == (2, 1, 1)


def test_a_prediction_of_a_space_that_is_gone_is_refused_and_of_one_that_goes_is_dropped() -> None:
    """Events name known spaces; closing one takes it out of what is predicted."""
    desk = Desk(20)
    idle(desk, A, B)
    desk.send(ev.SpacesPredicted((A, B)))
    for wrong in (ev.SpacesPredicted((A, D)), ev.PrefetchHinted(A, "predicted"), ev.HintWithdrawn(D)):
        with pytest.raises(IllegalEvent):
            desk.send(wrong)
    desk.send(ev.SpaceClosed(A))
    desk.send(ev.SpacesPredicted((B,)))
    assert desk.pager.statistics().spaces == 1


def test_the_distance_of_a_refault_is_what_was_evicted_in_between() -> None:
    """A page pushed out and demanded again after less than the pool holds is a refault, after more it is a fault."""
    desk = Desk(6)  # usable: 4 pages
    idle(desk, A, B, C, D)
    before = desk.pager.statistics()
    assert (before.faults, before.refaults, before.evictions) == (0, 0, 4)
    desk.turn(B, 0)  # 0 bytes were evicted since it went
    assert desk.pager.statistics().refaults == 2
    other = SpaceId(9)
    desk.create(other)
    desk.turn(other, 3 * P)
    desk.turn(A, 0)
    assert desk.pager.statistics().faults == 4
    assert desk.pager.statistics().refaults == 2, "7 pages went since, 4 fit"


def test_what_went_on_the_users_wish_or_was_never_in_ram_is_no_refault() -> None:
    """Only what was pushed out for room tells that the pool is too small."""
    desk = Desk(20)
    idle(desk, A)
    desk.send(ev.EvictionWanted(A))
    desk.turn(A, 0)
    figures = desk.pager.paging
    assert (figures.demanded, figures.faults, figures.refaults) == (2, 2, 0)


def test_a_page_that_somebody_holds_is_not_loaded_ahead() -> None:
    """P30: A lost its first page and so demands nothing; the second comes in for B, whose window is past the first."""
    desk = Desk(20, windows=(6,))
    desk.create(A)
    desk.turn(A, 2 * P)
    desk.send(ev.Forked(A, B, 2 * P))
    desk.turn(B, P + 1)
    first = desk.pager.page(A, GroupId(0), 0).ref.page_id
    for space in (A, B):
        desk.send(ev.EvictionWanted(space))
    desk.settle()
    desk.send(ev.FilesGone((first,)))
    desk.send(ev.Activated(A))
    assert desk.loads == []
    desk.send(ev.PrefetchHinted(B, "queued"))
    desk.settle()
    assert desk.pager.residency(B).stored_pages == 0
    assert desk.pager.statistics().prefetched["queued"].pages == 2, "the one that A holds is no guess"
