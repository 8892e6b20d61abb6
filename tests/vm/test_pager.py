"""The pager's events: growing, sealing, loading, restoring, losing, closing; and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.ids import GroupId, PageId, PageKey
from kvd.vm import events as ev
from kvd.vm.errors import IllegalEvent, IntegrityError, NotResident
from tests.vm.desk import PAGE_BYTES, A, B, Desk, P, pages_of


def test_growth_maps_frames_for_every_group_and_a_step_fills_them() -> None:
    """Growth of 6 tokens over pages of 4 maps two pages per group; the full ones are sealed with the given keys."""
    desk = Desk(20, groups=2)
    desk.create(A)
    desk.send(ev.Activated(A))
    out = desk.send(ev.GrowthWanted(A, 6))
    assert [(i.group, i.space) for i in out if isinstance(i, ev.MapFrame)] == [(0, A), (0, A), (1, A), (1, A)]
    table = desk.pager.block_table(A, GroupId(0))
    desk.append(A, 6)
    assert desk.pager.tokens(A) == 6
    assert desk.pager.block_table(A, GroupId(0)) == table
    (page,) = desk.pager.segments(A)[1].pages
    assert page.ref.key == "1.1.0.0"
    assert desk.pager.segments(A)[0].tail_tokens == 2


def test_pages_that_are_not_wanted_leave_alone() -> None:
    """P14: clean ones that nobody holds, and nothing else of their space."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 14)
    pages = [page.ref.page_id for page in desk.pager.segments(A)[0].pages]
    before = desk.states(A)
    assert before[:3] == ["clean"] * 3
    desk.send(ev.PagesUnwanted((pages[1], PageId("unknown"))))
    assert desk.states(A) == [before[0], "evicted", *before[2:]]
    desk.send(ev.Activated(A))
    desk.send(ev.PagesUnwanted(tuple(pages)))
    assert desk.states(A)[0] == "clean"


def test_the_exact_token_survives_eviction_and_restore() -> None:
    """P14: a space of 6 tokens evicted to disk and log comes back with 6 tokens, not rounded to a page."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    out = desk.send(ev.EvictionWanted(A))
    assert desk.states(A) == ["evicted", "stashed"]
    assert sum(isinstance(i, ev.DropFrame) for i in out) == 2
    out = desk.send(ev.Activated(A))
    assert [(type(i), getattr(i, "tokens", None)) for i in out] == [(ev.LoadPage, None), (ev.LoadTail, 2)]
    assert not desk.pager.is_ready(A)
    desk.settle()
    assert desk.pager.is_ready(A)
    assert desk.pager.tokens(A) == 6


def test_an_unused_growth_frame_goes_back_at_deactivation_and_when_less_is_wanted() -> None:
    """Frames mapped for tokens that never came are given back."""
    desk = Desk(20)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 12))
    out = desk.send(ev.GrowthWanted(A, 4))
    assert sum(isinstance(i, ev.DropFrame) for i in out) == 2
    out = desk.send(ev.Deactivated(A))
    assert sum(isinstance(i, ev.DropFrame) for i in out) == 1
    assert desk.pager.statistics().resident_bytes == 0


def test_sealed_pages_are_written_at_once_and_within_the_bound() -> None:
    """Write-behind starts with the step that sealed the pages, two at a time."""
    desk = Desk(20)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 16))
    out = desk.append(A, 16)
    assert len(pages_of(out, ev.WritePage)) == 2
    assert desk.states(A) == ["writing", "writing", "sealed_dirty", "sealed_dirty"]
    desk.settle()
    assert desk.states(A) == ["clean"] * 4


def test_a_failed_write_leaves_the_page_resident_and_is_retried_at_tick() -> None:
    """A page is never in neither tier: a refused write keeps the frame, and the next Tick tries again."""
    desk = Desk(20)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 4))
    desk.append(A, 4)
    page = desk.writes.pop()
    assert desk.send(ev.WriteFailed(page, "no space left")) == ()
    assert desk.states(A) == ["sealed_dirty"]
    desk.send(ev.Deactivated(A))
    assert desk.send(ev.EvictionWanted(A)) == ()
    assert pages_of(desk.send(ev.Tick()), ev.WritePage) == [page]
    out = desk.send(ev.WriteDone(page))
    assert [type(i) for i in out] == [ev.DropFrame]


def test_a_lost_page_is_reported_to_every_space_that_maps_it() -> None:
    """After LoadFailed each space knows its first lost token; cutting back to it, the rest is used again."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 14)
    desk.send(ev.Forked(A, B, 12))
    desk.send(ev.EvictionWanted(A))
    desk.send(ev.EvictionWanted(B))
    desk.send(ev.Activated(A))
    bad = desk.pager.segments(A)[0].pages[1].ref.page_id
    desk.loads.remove(bad)
    desk.send(ev.LoadFailed(bad, "checksum"))
    desk.settle()
    assert (desk.pager.lost_at(A), desk.pager.lost_at(B)) == (4, 4)
    assert not desk.pager.is_ready(A)
    with pytest.raises(NotResident):
        desk.pager.block_table(A, GroupId(0))
    assert ev.ForgetPage(bad) not in desk.send(ev.RolledBack(A, 4))
    assert desk.pager.lost_at(A) is None
    assert desk.pager.is_ready(A)
    assert ev.ForgetPage(bad) in desk.send(ev.RolledBack(B, 4))
    assert desk.pager.lost_at(B) is None


def test_what_follows_a_lost_page_is_not_loaded() -> None:
    """Pages after the first lost position will be cut; loading them would be waste."""
    desk = Desk(20, loads=1)
    desk.create(A)
    desk.turn(A, 12)
    desk.send(ev.EvictionWanted(A))
    desk.send(ev.Activated(A))
    assert [type(i) for i in desk.send(ev.LoadFailed(desk.loads.pop(), "missing"))] == [ev.DropFrame]
    assert desk.pager.lost_at(A) == 0
    assert desk.pager.statistics().waiting_spaces == 0


def test_closing_forgets_pages_that_nobody_else_maps() -> None:
    """Shared pages stay with the other space; swap copies of the rest are forgotten, frames dropped."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 14)
    pages = [p.ref.page_id for p in desk.pager.segments(A)[0].pages]
    desk.send(ev.Forked(A, B, 8))
    out = desk.send(ev.SpaceClosed(A))
    assert pages_of(out, ev.ForgetPage) == [pages[2]]
    assert desk.states(B) == ["clean", "clean"]
    out = desk.send(ev.SpaceClosed(B))
    assert sorted(pages_of(out, ev.ForgetPage)) == sorted(pages[:2])
    assert desk.pager.statistics().resident_bytes == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_page_closed_while_it_is_written_waits_for_the_write(fails: bool) -> None:
    """Its frame and swap copy go when the write ends; what is known of it is forgotten even when there is no copy."""
    desk = Desk(20)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 4))
    desk.append(A, 4)
    (page,) = desk.writes
    assert desk.send(ev.SpaceClosed(A)) == ()
    out = desk.send(ev.WriteFailed(page, "disk") if fails else ev.WriteDone(page))
    assert [type(i) for i in out] == [ev.DropFrame, ev.ForgetPage]
    assert desk.pager.statistics().in_flight_bytes == 0


def test_a_page_that_was_never_written_is_forgotten_too() -> None:
    """A rollback before write-behind ran: whoever keeps facts by page id hears that the page is gone."""
    desk = Desk(20, writes=1)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 8))
    desk.append(A, 8)
    pages = [p.ref.page_id for p in desk.pager.segments(A)[0].pages]
    assert desk.states(A) == ["writing", "sealed_dirty"]
    assert pages_of(desk.send(ev.RolledBack(A, 4)), ev.ForgetPage) == [pages[1]]


def test_a_page_whose_copy_is_lost_is_written_again() -> None:
    """It is dirty again until the write is done, so nothing drops it; one that is not in RAM fails when it is read."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 8)
    pages = [p.ref.page_id for p in desk.pager.segments(A)[0].pages]
    out = desk.send(ev.CopiesLost((pages[1], PageId("unknown"))))
    assert pages_of(out, ev.WritePage) == [pages[1]]
    desk.send(ev.EvictionWanted(A))
    assert desk.states(A) == ["evicted", "writing"]
    desk.settle()
    assert desk.states(A) == ["evicted", "evicted"]


@pytest.mark.parametrize("event", [ev.CopiesLost, ev.FilesGone])
@pytest.mark.parametrize("end", [ev.LoadDone, ev.LoadFailed])
def test_a_page_whose_file_went_while_it_was_read_is_dirty(event: type, end: type) -> None:
    """Rule 7: it was read before the file went, so what came is all there is; it must not be dropped as it is."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 4)
    desk.send(ev.EvictionWanted(A))
    (page,) = [p.ref.page_id for p in desk.pager.segments(A)[0].pages]
    desk.send(ev.Activated(A))
    assert desk.loads == [page]
    desk.send(event((page,)))
    assert desk.states(A) == ["loading"]
    desk.loads.clear()
    if end is ev.LoadFailed:
        desk.send(ev.LoadFailed(page, "missing"))
        assert desk.states(A) == ["lost"]
        return
    out = desk.send(ev.LoadDone(page))
    assert pages_of(out, ev.WritePage) == [page]
    assert desk.pager.is_ready(A)
    desk.send(ev.Deactivated(A))
    desk.send(ev.EvictionWanted(A))
    assert desk.states(A) == ["writing"]
    desk.settle()
    assert desk.states(A) == ["evicted"]


def test_a_page_nobody_wants_any_more_is_not_written_for_its_file() -> None:
    """Its last user went while it was on its way."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 4)
    desk.send(ev.EvictionWanted(A))
    (page,) = [p.ref.page_id for p in desk.pager.segments(A)[0].pages]
    desk.send(ev.Activated(A))
    desk.send(ev.FilesGone((page,)))
    desk.send(ev.SpaceClosed(A))
    out = desk.settle()
    assert pages_of(out, ev.WritePage) == []
    assert pages_of(out, ev.ForgetPage) == [page]


def test_a_tail_whose_log_is_lost_is_not_dropped() -> None:
    """Rule 7: it is durable nowhere until the next commit."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    desk.send(ev.LogLost(A))
    desk.send(ev.EvictionWanted(A))
    assert desk.states(A) == ["evicted", "packed"]
    desk.send(ev.TurnCommitted(A))
    assert desk.states(A) == ["evicted", "stashed"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_page_closed_while_it_is_loaded_waits_for_the_load(fails: bool) -> None:
    """A frame is never dropped, and so never reused, under a load that still writes into it."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    desk.send(ev.EvictionWanted(A))
    desk.send(ev.Activated(A))
    page, tail = desk.loads
    assert desk.send(ev.SpaceClosed(A)) == ()
    out = desk.send(ev.LoadFailed(page, "bad") if fails else ev.LoadDone(page))
    assert [type(i) for i in out] == [ev.DropFrame, ev.ForgetPage]
    assert [type(i) for i in desk.send(ev.LoadDone(tail))] == [ev.DropFrame]


def test_a_restored_space_shares_pages_that_are_known() -> None:
    """Looking pages up before computing: a new space that names known pages maps them, resident or not."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 14)
    refs = desk.pager.segments(A)[0].refs
    desk.send(ev.SpaceRestored(B, (PAGE_BYTES,), (ev.SegmentImage(GroupId(0), refs[:2], 0),)))
    desk.send(ev.Activated(B))
    assert desk.pager.is_ready(B)
    assert desk.pager.residency(B).shared_pages == 2
    desk.send(ev.SpaceClosed(A))
    assert desk.states(B) == ["clean", "clean"]


def test_equal_keys_do_not_make_one_page() -> None:
    """P10: identity is the page id; two agents that computed the same tokens keep pages of their own."""
    desk = Desk(20)
    image = ev.SegmentImage(GroupId(0), (ev.PageRef(PageId("x"), PageKey("same")),), 0)
    twin = ev.SegmentImage(GroupId(0), (ev.PageRef(PageId("y"), PageKey("same")),), 0)
    desk.send(ev.SpaceRestored(A, (PAGE_BYTES,), (image,)))
    desk.send(ev.SpaceRestored(B, (PAGE_BYTES,), (twin,)))
    assert desk.pager.statistics().shared_pages == 0
    desk.send(ev.SpaceClosed(A))
    assert desk.states(B) == ["evicted"]


@pytest.mark.parametrize(
    "segments",
    [
        (),
        (ev.SegmentImage(GroupId(1), (), 0),),
        (ev.SegmentImage(GroupId(0), (), P),),
        (ev.SegmentImage(GroupId(0), (ev.PageRef(PageId("x"), PageKey("k")),) * 2, 0),),
        (ev.SegmentImage(GroupId(0), (), 1), ev.SegmentImage(GroupId(0), (), 1)),
    ],
)
def test_a_restored_space_that_contradicts_itself_is_refused(segments: tuple[ev.SegmentImage, ...]) -> None:
    """Missing groups, overlong tails and pages named twice; the pager does not know the space afterwards."""
    desk = Desk(20)
    with pytest.raises(IllegalEvent):
        desk.send(ev.SpaceRestored(A, (PAGE_BYTES,), segments))
    desk.create(A)


def test_a_known_page_under_another_key_is_refused() -> None:
    """A page id names one content for ever."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 4)
    (ref,) = desk.pager.segments(A)[0].refs
    image = ev.SegmentImage(GroupId(0), (ev.PageRef(ref.page_id, PageKey("other")),), 0)
    with pytest.raises(IllegalEvent, match="another key"):
        desk.send(ev.SpaceRestored(B, (PAGE_BYTES,), (image,)))


def test_events_that_cannot_have_happened_are_refused() -> None:
    """Unknown spaces and pages, growth of an idle space, tokens without frames or keys, cuts beyond the end."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    impossible: list[ev.Event] = [
        ev.Activated(B),
        ev.SpaceCreated(A, (PAGE_BYTES,)),
        ev.SpaceCreated(B, (PAGE_BYTES, PAGE_BYTES)),
        ev.GrowthWanted(A, 1),
        ev.TokensAppended(A, 1, ((),)),
        ev.RolledBack(A, 7),
        ev.Forked(A, A, 4),
        ev.Forked(A, B, 7),
        ev.WriteDone(PageId("unknown")),
        ev.LoadDone(desk.pager.segments(A)[0].pages[0].ref.page_id),
    ]
    before = desk.pager.statistics()
    for event in impossible:
        with pytest.raises(IllegalEvent):
            desk.send(event)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 2))
    for event in (ev.TokensAppended(A, 2, ((),)), ev.TokensAppended(A, 3, ((PageKey("k"),),))):
        with pytest.raises(IllegalEvent):
            desk.send(event)
    desk.send(ev.Deactivated(A))
    assert replace(desk.pager.statistics(), demanded=before.demanded) == before


def test_residency_and_statistics_say_what_is_where() -> None:
    """The figures of a space with a dirty page, a clean one and a tail, beside a fork."""
    desk = Desk(20, writes=1)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 10))
    desk.append(A, 10)
    desk.send(ev.WriteDone(desk.writes.pop(0)))
    desk.send(ev.Forked(A, B, 4))
    found = desk.pager.residency(A)
    assert (found.tokens, found.active, found.total_pages, found.resident_pages) == (10, True, 3, 3)
    assert (found.dirty_pages, found.shared_pages, found.lost_pages, found.loading_pages) == (1, 1, 0, 0)
    assert (found.resident_bytes, found.total_bytes, found.lost_at) == (3 * PAGE_BYTES, 3 * PAGE_BYTES, None)
    statistics = desk.pager.statistics()
    assert statistics.pages["clean"] == statistics.pages["writing"] == statistics.pages["filling"] == 1
    assert statistics.dirty_bytes == 2 * PAGE_BYTES
    assert statistics.pinned_bytes == 3 * PAGE_BYTES
    assert (statistics.spaces, statistics.active_spaces, statistics.writes) == (2, 1, 2)


def test_the_integrity_check_finds_books_that_do_not_agree() -> None:
    """Bytes booked without a page, a page without a mapping: each is named in `data`."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    desk.pager._budget.resident_bytes += 1
    with pytest.raises(IntegrityError) as caught:
        desk.pager.check_integrity()
    assert caught.value.data["problems"] == ["200 bytes resident, 201 booked"]
    desk.pager._budget.resident_bytes -= 1
    segment = desk.pager._spaces[A].segments[0]
    page = segment.sealed.pop()
    with pytest.raises(IntegrityError) as caught:
        desk.pager.check_integrity()
    assert f"page {page.page_id} has 1 users and 0 mappings" in str(caught.value)


def test_a_long_context_comes_back_whole() -> None:
    """P20: 400 pages in two groups grow turn by turn, are evicted and return; every page is loaded exactly once."""
    desk = Desk(2000, groups=2, writes=8, loads=8)
    desk.create(A)
    for _ in range(50):
        desk.turn(A, 8 * P)
    desk.send(ev.EvictionWanted(A))
    assert desk.pager.residency(A).resident_pages == 0
    loaded = pages_of([*desk.send(ev.Activated(A)), *desk.settle()], ev.LoadPage)
    assert len(loaded) == len(set(loaded)) == desk.pager.statistics().faults == 800
    assert desk.pager.is_ready(A)
    assert desk.pager.tokens(A) == 400 * P
