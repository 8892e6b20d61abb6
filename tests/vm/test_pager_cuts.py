"""Forks and rollbacks: what is shared, what is copied, what is refused."""

from __future__ import annotations

import pytest

from kvd.ids import GroupId, PageId, PageKey
from kvd.vm import events as ev
from kvd.vm.errors import IllegalEvent, NoRoomForCopy, NotResident
from tests.vm.desk import PAGE_BYTES, A, B, C, D, Desk, P, pages_of


def test_cuts_that_take_no_room_work_while_the_budget_is_out_of_reach() -> None:
    """A rollback or fork at a page border, and a cut that frees as much as it copies, are never refused for room."""
    desk = Desk(12)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 23))
    desk.append(A, 23)
    desk.settle()
    desk.send(ev.BudgetChanged(PAGE_BYTES))
    desk.send(ev.Forked(A, B, 16))
    desk.send(ev.RolledBack(A, 18))
    desk.send(ev.RolledBack(A, 16))
    assert desk.states(A) == desk.states(B) == ["clean"] * 4
    with pytest.raises(NoRoomForCopy):
        desk.send(ev.RolledBack(A, 14))


def test_a_fork_shares_sealed_pages_and_copies_only_the_cut_one() -> None:
    """Forking 10 of 14 tokens maps two pages and copies two tokens of the third, per group, without a frame."""
    desk = Desk(20, groups=2)
    desk.create(A)
    desk.turn(A, 14)
    out = desk.send(ev.Forked(A, B, 10))
    copies = [i for i in out if isinstance(i, ev.CopyTail)]
    assert [(i.group, i.tokens) for i in copies] == [(0, 2), (1, 2)]
    assert copies[0].source == desk.pager.segments(A)[0].pages[2].ref.page_id
    assert copies[0].frame == desk.pager.segments(A)[0].pages[2].frame
    assert desk.pager.statistics().packed_bytes == 2 * 2 * PAGE_BYTES // P
    assert [p.ref for p in desk.pager.segments(B)[0].pages] == [p.ref for p in desk.pager.segments(A)[0].pages[:2]]
    assert desk.pager.tokens(B) == 10
    tail = desk.pager.segments(B)[0].tail
    assert tail is not None
    assert tail.durable_tokens == 0
    desk.send(ev.TurnCommitted(B))
    tail = desk.pager.segments(B)[0].tail
    assert tail is not None
    assert tail.durable_tokens == 2


def test_a_fork_at_the_end_copies_the_tail_and_each_goes_on_alone() -> None:
    """P19: parent and child append to tails of their own; only sealed pages are common."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    desk.send(ev.Forked(A, B, 6))
    desk.turn(B, 3)
    desk.turn(A, 1)
    assert (desk.pager.tokens(A), desk.pager.tokens(B)) == (7, 9)
    a, b = desk.pager.segments(A)[0], desk.pager.segments(B)[0]
    assert a.refs[0] == b.refs[0]
    assert {a.tail.page_id if a.tail else None} & {b.refs[1].page_id, b.tail.page_id if b.tail else None} == set()


def test_a_cut_at_a_page_border_needs_no_copy_and_no_resident_page() -> None:
    """Rolling an evicted space back to a border only unmaps; pages nobody maps are forgotten."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 14)
    pages = [p.ref.page_id for p in desk.pager.segments(A)[0].pages]
    desk.send(ev.EvictionWanted(A))
    out = desk.send(ev.RolledBack(A, 8))
    assert out == (ev.ForgetPage(pages[2]),)
    assert desk.pager.tokens(A) == 8


def test_a_cut_inside_a_page_that_is_not_resident_is_refused_unchanged() -> None:
    """The engine must say that a cut is to come; nothing has changed."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 14)
    desk.send(ev.EvictionWanted(A))
    before = desk.pager.segments(A)
    with pytest.raises(NotResident, match="CutWanted"):
        desk.send(ev.RolledBack(A, 10))
    with pytest.raises(NotResident):
        desk.send(ev.Forked(A, B, 13))
    assert desk.pager.segments(A) == before
    with pytest.raises(IllegalEvent):
        desk.pager.tokens(B)


def test_a_cut_to_come_loads_only_the_page_it_goes_through() -> None:
    """Of an evicted space one page per group is read, kept until the cut is done, and nothing is read at a border."""
    desk = Desk(20, groups=2)
    desk.create(A)
    desk.turn(A, 22)
    desk.send(ev.EvictionWanted(A))
    assert not any(isinstance(i, ev.LoadPage) for i in desk.send(ev.CutWanted(A, 8)))
    assert desk.pager.can_cut(A)
    out = desk.send(ev.CutWanted(A, 10))
    assert pages_of(out, ev.LoadPage) == [segment.pages[2].ref.page_id for segment in desk.pager.segments(A)]
    assert not desk.pager.can_cut(A)
    desk.settle()
    assert desk.pager.can_cut(A)
    desk.send(ev.EvictionWanted(A))
    assert desk.states(A)[2] == "clean", "what a cut needs is kept"
    desk.send(ev.Forked(A, B, 10))
    assert desk.states(B) == ["evicted", "evicted", "packed"]
    assert desk.pager.faults(A) == 2
    desk.send(ev.CutWanted(A, None))
    desk.send(ev.EvictionWanted(A))
    assert set(desk.states(A)) == {"evicted", "stashed"}


def test_a_page_kept_for_a_cut_is_no_victim() -> None:
    """A demand that needs all room takes everything of an idle space but what a cut needs."""
    desk = Desk(6)  # usable: 4 pages
    desk.create(A, B)
    desk.turn(A, 16)
    desk.send(ev.CutWanted(A, 9))
    desk.send(ev.Activated(B))
    desk.send(ev.GrowthWanted(B, 12))
    assert desk.states(A) == ["evicted", "evicted", "clean", "evicted"]
    assert desk.pager.is_ready(B)


def test_a_cut_inside_a_private_page_keeps_only_the_tokens() -> None:
    """What is left of the cut page is copied first; then its frame goes, and nothing takes one in its stead."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 14)
    source = desk.pager.segments(A)[0].pages[2]
    out = desk.send(ev.RolledBack(A, 10))
    assert [type(i) for i in out] == [ev.DropFrame, ev.CopyTail, ev.DropFrame, ev.ForgetPage]
    assert out[1].frame == out[2].frame == source.frame  # type: ignore[union-attr]
    assert desk.pager.statistics().resident_bytes == 2 * PAGE_BYTES + 2 * PAGE_BYTES // P


def test_a_cut_to_the_present_length_changes_nothing() -> None:
    """Not even frames for growth are given back."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 9))
    assert desk.send(ev.RolledBack(A, 6)) == ()
    assert desk.pager.is_ready(A)
    tail = desk.pager.segments(A)[0].tail
    assert tail is not None
    assert tail.durable_tokens == 2


def test_a_cut_inside_the_tail_makes_it_volatile_until_the_next_commit() -> None:
    """What follows the cut may differ from what the log holds."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 7)
    assert desk.send(ev.RolledBack(A, 5)) == ()
    tail = desk.pager.segments(A)[0].tail
    assert tail is not None
    assert (tail.tokens, tail.durable_tokens) == (1, 0)


def test_a_stashed_tail_can_be_cut_and_is_loaded_shorter() -> None:
    """The log holds the shorter tail as a prefix, so no load is needed to cut it."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 7)
    desk.send(ev.EvictionWanted(A))
    desk.send(ev.RolledBack(A, 5))
    out = desk.send(ev.Activated(A))
    assert [i.tokens for i in out if isinstance(i, ev.LoadTail)] == [1]


def test_no_room_for_a_copy_is_an_error_that_changes_nothing() -> None:
    """When active spaces hold everything and the copy reserve is used up, the fork is refused and can be retried."""
    desk = Desk(6)  # usable: 4 pages, then one copy
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 16))
    desk.append(A, 16)
    desk.settle()
    desk.send(ev.Forked(A, B, 6))
    desk.send(ev.Forked(A, C, 6))
    before = desk.pager.statistics()
    with pytest.raises(NoRoomForCopy) as caught:
        desk.send(ev.Forked(A, D, 6))
    assert caught.value.retry_after_s is not None
    assert caught.value.data["shortage_bytes"] == 2 * PAGE_BYTES // P
    assert desk.pager.statistics() == before
    desk.send(ev.SpaceClosed(B))
    desk.send(ev.Forked(A, D, 6))
    assert desk.pager.tokens(D) == 6


def test_the_page_that_is_cut_is_never_a_victim_of_its_own_copy() -> None:
    """With no room left the copy's bytes come from another page, even when the cut one is next in line."""
    desk = Desk(6, writes=1)  # usable: 4 pages, then one copy
    refs = tuple(ev.PageRef(PageId(name), PageKey(name)) for name in "xy")
    desk.send(ev.SpaceRestored(C, (PAGE_BYTES,), (ev.SegmentImage(GroupId(0), refs, 0),)))
    desk.send(ev.Activated(C))
    desk.settle()
    desk.send(ev.Deactivated(C))
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 8))
    desk.append(A, 8)
    desk.send(ev.Deactivated(A))
    desk.send(ev.PrefetchHinted(C))
    desk.send(ev.Forked(A, B, 6))  # uses the copy reserve, to be won back when A's dirty page is written
    assert desk.states(C) == ["clean", "clean"]
    out = desk.send(ev.RolledBack(C, 7))
    assert [type(i) for i in out] == [ev.DropFrame, ev.CopyTail, ev.DropFrame, ev.ForgetPage]
    assert desk.states(C) == ["evicted", "packed"]


@pytest.mark.parametrize("tokens", [4, 5, 3, 0])
def test_a_cut_gives_growth_back(tokens: int) -> None:
    """What was wanted for tokens after the old end is not wanted after the new one, wherever the cut falls."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 9))
    desk.send(ev.RolledBack(A, tokens))
    assert desk.pager.segments(A)[0].growth_frames == ()
    assert desk.pager.is_ready(A)
    assert desk.pager.statistics().resident_bytes == -(-tokens // P) * PAGE_BYTES
