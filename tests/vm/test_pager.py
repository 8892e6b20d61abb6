"""The pager's single decisions: what it asks for, in which order, and what it refuses."""

from __future__ import annotations

from itertools import count

import pytest

from kvd.ids import GroupId, PageId, PageKey, SpaceId
from kvd.vm import events as ev
from kvd.vm.errors import IllegalEvent, IntegrityError, NoRoomForCopy, NotResident, SpaceInUse
from kvd.vm.pager import Pager

P = 4
PAGE_BYTES = 100
A, B, C, D = (SpaceId(n) for n in range(1, 5))


class Desk:
    """A pager and a disk that answers only when told to; every event is followed by the integrity check."""

    def __init__(self, budget_pages: float, *, groups: int = 1, writes: int = 2, loads: int = 4) -> None:
        self.groups = groups
        numbers = count(1)
        self.pager = Pager(
            int(budget_pages * PAGE_BYTES),
            group_count=groups,
            new_page_id=lambda: PageId(f"page-{next(numbers)}"),
            max_writes_in_flight=writes,
            max_loads_in_flight=loads,
            page_tokens=P,
        )
        self.writes: list[PageId] = []
        self.loads: list[PageId] = []

    def send(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        """Handle one event and note the transfers it starts."""
        out = self.pager.handle(event)
        self.pager.check_integrity()
        self.writes += [i.page for i in out if isinstance(i, ev.WritePage)]
        self.loads += [i.page for i in out if isinstance(i, ev.LoadPage | ev.LoadTail)]
        return out

    def settle(self) -> list[ev.Instruction]:
        """The disk answers everything, oldest first; returns what that led to."""
        out: list[ev.Instruction] = []
        while self.writes or self.loads:
            if self.writes:
                out += self.send(ev.WriteDone(self.writes.pop(0)))
            if self.loads:
                out += self.send(ev.LoadDone(self.loads.pop(0)))
        return out

    def create(self, *spaces: SpaceId) -> None:
        """Empty spaces."""
        for space in spaces:
            self.send(ev.SpaceCreated(space, (PAGE_BYTES,) * self.groups))

    def append(self, space: SpaceId, tokens: int) -> tuple[ev.Instruction, ...]:
        """One step's tokens, for which the space must be ready."""
        assert self.pager.is_ready(space)
        sealed = (self.pager.tokens(space) % P + tokens) // P
        keys = tuple(
            tuple(PageKey(f"{space}.{g}.{self.pager.tokens(space)}.{n}") for n in range(sealed))
            for g in range(self.groups)
        )
        return self.send(ev.TokensAppended(space, tokens, keys))

    def turn(self, space: SpaceId, tokens: int, *, commit: bool = True) -> None:
        """A whole turn with a fast disk, left inactive."""
        self.send(ev.Activated(space))
        self.send(ev.GrowthWanted(space, tokens))
        self.settle()
        self.append(space, tokens)
        self.settle()
        if commit:
            self.send(ev.TurnCommitted(space))
        self.send(ev.Deactivated(space))

    def states(self, space: SpaceId, group: int = 0) -> list[str]:
        """States of a segment's pages, the tail's last."""
        view = self.pager.segments(space)[group]
        return [str(p.state) for p in view.pages] + ([str(view.tail.state)] if view.tail else [])


def pages_of(out: tuple[ev.Instruction, ...] | list[ev.Instruction], kind: type) -> list[PageId]:
    """Pages named by the instructions of one kind."""
    return [i.page for i in out if isinstance(i, kind)]


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


def test_prefetch_uses_free_budget_and_evicts_nothing() -> None:
    """A hint loads what fits beside everything resident and gives up on the rest."""
    desk = Desk(6)  # usable: 4 pages
    desk.create(A, B)
    desk.turn(A, 16)
    desk.send(ev.EvictionWanted(A))
    desk.turn(B, 8)
    out = list(desk.send(ev.PrefetchHinted(A))) + desk.settle()
    assert len(pages_of(out, ev.LoadPage)) == 2
    assert not any(isinstance(i, ev.DropFrame) for i in out)
    assert desk.states(A) == ["clean", "clean", "evicted", "evicted"]
    assert desk.states(B) == ["clean", "clean"]
    assert desk.pager.statistics().prefetches == 2
    out = [*desk.send(ev.SpaceClosed(B)), *desk.settle()]
    assert pages_of(out, ev.LoadPage) == [], "what did not fit is not waited for"


def test_copies_in_flight_count_against_the_budget() -> None:
    """P21: a page being loaded counts twice, its frame and its read buffer, and a page being written too."""
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


def test_an_uncommitted_tail_is_never_dropped() -> None:
    """A tail the log does not hold to its end stays in RAM; the commit lets a wanted eviction go on."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6, commit=False)
    desk.send(ev.EvictionWanted(A))
    assert desk.states(A) == ["evicted", "filling"]
    desk.send(ev.TurnCommitted(A))
    assert desk.states(A) == ["evicted", "stashed"]


def test_a_fork_shares_sealed_pages_and_copies_only_the_cut_one() -> None:
    """Forking 10 of 14 tokens maps two pages and copies two tokens of the third, per group."""
    desk = Desk(20, groups=2)
    desk.create(A)
    desk.turn(A, 14)
    out = desk.send(ev.Forked(A, B, 10))
    copies = [i for i in out if isinstance(i, ev.CopyTokens)]
    assert [(i.group, i.tokens) for i in copies] == [(0, 2), (1, 2)]
    assert copies[0].source == desk.pager.segments(A)[0].pages[2].frame
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
    """The engine must activate first; nothing has changed."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 14)
    desk.send(ev.EvictionWanted(A))
    before = desk.pager.segments(A)
    with pytest.raises(NotResident, match="activate"):
        desk.send(ev.RolledBack(A, 10))
    with pytest.raises(NotResident):
        desk.send(ev.Forked(A, B, 13))
    assert desk.pager.segments(A) == before
    with pytest.raises(IllegalEvent):
        desk.pager.tokens(B)


def test_a_cut_inside_a_private_page_reuses_its_frame_in_the_end() -> None:
    """The cut page is copied first and dropped afterwards, so the space ends with fewer frames than before."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 14)
    source = desk.pager.segments(A)[0].pages[2]
    out = desk.send(ev.RolledBack(A, 10))
    assert [type(i) for i in out] == [ev.DropFrame, ev.CopyTokens, ev.DropFrame, ev.ForgetPage]
    assert out[1].source == out[2].frame == source.frame  # type: ignore[union-attr]
    assert desk.pager.statistics().resident_bytes == 3 * PAGE_BYTES


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
    before = desk.pager.statistics()
    with pytest.raises(NoRoomForCopy) as caught:
        desk.send(ev.Forked(A, C, 6))
    assert caught.value.retry_after_s is not None
    assert caught.value.data["shortage_bytes"] == PAGE_BYTES
    assert desk.pager.statistics() == before
    desk.send(ev.SpaceClosed(B))
    desk.send(ev.Forked(A, C, 6))
    assert desk.pager.tokens(C) == 6


def test_the_page_that_is_cut_is_never_a_victim_of_its_own_copy() -> None:
    """With no room left the copy's frame comes from another page, even when the cut one is next in line."""
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
    assert [type(i) for i in out] == [ev.DropFrame, ev.CopyTokens, ev.DropFrame, ev.ForgetPage]
    assert desk.states(C) == ["evicted", "filling"]


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
    """Its frame and swap copy go when the write ends; a failed write left no copy to forget."""
    desk = Desk(20)
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 4))
    desk.append(A, 4)
    (page,) = desk.writes
    assert desk.send(ev.SpaceClosed(A)) == ()
    out = desk.send(ev.WriteFailed(page, "disk") if fails else ev.WriteDone(page))
    assert [type(i) for i in out] == [ev.DropFrame] + ([] if fails else [ev.ForgetPage])
    assert desk.pager.statistics().in_flight_bytes == 0


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
    assert desk.pager.statistics() == before


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
