"""Groups with a window: only what the next step sees is in RAM, the rest comes back when it is seen again."""

from __future__ import annotations

import pytest

from kvd.ids import GroupId, PageId, PageKey
from kvd.vm import events as ev
from kvd.vm.errors import NotResident
from kvd.vm.pager import Pager
from kvd.vm.window import first_seen_page, most_pages
from tests.vm.desk import PAGE_BYTES, A, B, Desk, P, pages_of

FULL, SLIDING = GroupId(0), GroupId(1)
WINDOW = 5


def make_desk(budget_pages: float = 40, window: int = WINDOW) -> Desk:
    """A desk with one group that sees everything and one with a window."""
    return Desk(budget_pages, groups=2, windows=(None, window))


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 1000])
@pytest.mark.parametrize("page_tokens", [4, 256])
def test_a_page_is_seen_as_long_as_any_of_its_keys_is(window: int, page_tokens: int) -> None:
    """Against a search over all keys, for the next step and for a replay of the last token."""
    for tokens in range(3 * page_tokens + 2):
        queries = [tokens] if tokens == 0 else [tokens - 1, tokens]
        first_key = min(max(0, query - window + 1) for query in queries)
        assert first_seen_page(tokens, window, page_tokens) == first_key // page_tokens
        assert first_seen_page(tokens, None, page_tokens) == 0


@pytest.mark.parametrize("window", [1, 4, 5, 9])
@pytest.mark.parametrize("step", [1, 3, 8])
def test_the_most_pages_are_those_of_the_worst_step(window: int, step: int) -> None:
    """Against a search over every place a step can begin at: never less, and reached when the space is long enough."""
    for end in range(1, 60):
        needs = [
            -(-(begin + n) // P) - first_seen_page(begin, window, P)
            for begin in range(end)
            for n in range(1, step + 1)
            if begin + n <= end
        ]
        most = most_pages(end, window, step, P)
        assert max(needs) <= most <= -(-end // P)
        if end > window + step + 2 * P:
            assert max(needs) == most
        assert most_pages(end, None, step, P) == -(-end // P)


def test_pages_behind_the_window_lose_their_frames_once_they_are_durable() -> None:
    """Also while the space is active; those still dirty are written first (P21), and none counts as evicted."""
    desk = make_desk()
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 18))
    desk.append(A, 18)
    assert not {"clean", "evicted"} & set(desk.states(A, 1)), "nothing is durable yet"
    before = desk.pager.statistics()
    assert before.behind_window_pages == 3
    assert before.behind_window_bytes == 3 * PAGE_BYTES
    desk.settle()
    assert desk.states(A, 0) == ["clean"] * 4 + ["filling"]
    assert desk.states(A, 1) == ["evicted"] * 3 + ["clean", "filling"]
    after = desk.pager.statistics()
    assert (after.window_drops, after.evictions, after.behind_window_bytes) == (3, 0, 0)
    assert desk.pager.is_ready(A)
    assert desk.pager.first_page(A, SLIDING) == (18 - WINDOW) // P == 3
    assert len(desk.pager.block_table(A, SLIDING)) == 2
    assert len(desk.pager.block_table(A, FULL)) == 5
    now = desk.pager.residency(A)
    assert (now.total_pages, now.behind_window_pages, now.resident_pages, now.stored_pages) == (10, 3, 7, 0)
    assert (now.resident_bytes, now.needed_bytes, now.total_bytes) == (7 * PAGE_BYTES, 7 * PAGE_BYTES, 10 * PAGE_BYTES)
    assert desk.pager.working_set_bytes(A, 3) == (6 + 3) * PAGE_BYTES


def test_a_resumed_space_loads_its_window_only() -> None:
    """P1, P31: after a restart, an eviction or a hint only the pages that the next step sees are read."""
    desk = make_desk()
    desk.create(A)
    desk.turn(A, 18)
    desk.send(ev.EvictionWanted(A))
    assert set(desk.states(A, 0)) == {"evicted", "stashed"}
    loads = pages_of(list(desk.send(ev.PrefetchHinted(A))) + desk.settle(), ev.LoadPage)
    sliding = [page.ref.page_id for page in desk.pager.segments(A)[SLIDING].pages]
    assert [page for page in loads if page in sliding] == [sliding[3]]
    images = tuple(
        ev.SegmentImage(group, tuple(ev.PageRef(PageId(f"{group}-{n}"), PageKey(f"{group}-{n}")) for n in range(4)), 2)
        for group in (FULL, SLIDING)
    )
    other = make_desk()
    other.send(ev.SpaceRestored(A, (PAGE_BYTES,) * 2, images))
    assert other.pager.residency(A).stored_pages == 7
    other.send(ev.Activated(A))
    other.settle()
    assert other.pager.is_ready(A)
    assert other.states(A, 1) == ["evicted"] * 3 + ["clean", "filling"]
    assert other.pager.faults(A) == 5


def test_a_rollback_brings_pages_back_before_the_next_step() -> None:
    """The window moves back with the end: what comes into it is demanded, and a step waits for it."""
    desk = make_desk()
    desk.create(A)
    desk.turn(A, 18)
    desk.send(ev.Activated(A))
    desk.send(ev.RolledBack(A, 12))
    assert not desk.pager.is_ready(A)
    with pytest.raises(NotResident):
        desk.pager.block_table(A, SLIDING)
    desk.settle()
    assert desk.pager.is_ready(A)
    assert desk.states(A, 1) == ["evicted", "clean", "clean"]
    assert desk.pager.first_page(A, SLIDING) == 1


def test_a_cut_through_a_page_behind_the_window_reads_it_and_lets_it_go() -> None:
    """P14: a fork inside a page that no step sees any more copies its tokens; the parent's frame goes again."""
    desk = make_desk()
    desk.create(A)
    desk.turn(A, 18)
    with pytest.raises(NotResident):
        desk.send(ev.Forked(A, B, 6))
    desk.send(ev.CutWanted(A, 6))
    desk.settle()
    assert desk.pager.can_cut(A)
    assert desk.states(A, 1)[1] == "clean"
    desk.send(ev.Forked(A, B, 6))
    desk.send(ev.CutWanted(A, None))
    assert desk.states(A, 1) == ["evicted"] * 3 + ["clean", "filling"]
    desk.send(ev.Activated(B))
    desk.settle()
    assert desk.states(B, 1) == ["clean", "filling"]
    assert desk.states(A, 1)[0] == "clean", "shared with a space that sees it"
    desk.send(ev.SpaceClosed(B))
    assert desk.states(A, 1)[0] == "evicted", "nobody sees it any more"


def test_a_shared_page_stays_while_another_window_needs_it() -> None:
    """P18: a parent that runs on does not take its child's window away."""
    desk = make_desk()
    desk.create(A)
    desk.turn(A, 8)
    desk.send(ev.Forked(A, B, 8))
    desk.turn(A, 16)
    assert desk.states(B, 1) == ["clean", "clean"]
    assert desk.pager.segments(A)[SLIDING].pages[0].behind_window
    assert not desk.pager.segments(B)[SLIDING].pages[0].behind_window
    assert desk.pager.statistics().behind_window_pages == 2
    desk.send(ev.EvictionWanted(B))
    assert desk.states(B, 1) == ["evicted", "evicted"], "the parent does not hold what it cannot see"


def test_what_the_disk_refuses_stays_in_ram() -> None:
    """Without a durable copy a page behind the window keeps its frame (a page is never in neither tier)."""
    desk = make_desk()
    desk.create(A)
    desk.send(ev.Activated(A))
    desk.send(ev.GrowthWanted(A, 18))
    desk.append(A, 18)
    while desk.writes:
        desk.send(ev.WriteFailed(desk.writes.pop(0), "full"))
    assert desk.pager.statistics().behind_window_bytes == 3 * PAGE_BYTES
    assert not {"clean", "evicted"} & set(desk.states(A, 1))
    for _ in range(60):
        desk.send(ev.Tick())
        desk.settle()
    assert desk.states(A, 1) == ["evicted"] * 3 + ["clean", "filling"]


def test_a_page_lost_behind_the_window_harms_nobody_until_it_is_seen() -> None:
    """The space runs on; a cut that would see the page goes deeper instead, to where nothing lost is in sight."""
    desk = make_desk()
    desk.create(A)
    desk.turn(A, 30)
    desk.send(ev.CutWanted(A, 9))
    full, sliding = (desk.pager.segments(A)[group].pages[2].ref.page_id for group in (FULL, SLIDING))
    assert desk.loads == [sliding]
    assert full not in desk.loads
    desk.send(ev.LoadFailed(desk.loads.pop(), "bad checksum"))
    desk.send(ev.CutWanted(A, None))
    assert desk.pager.lost_at(A) is None
    assert desk.pager.residency(A).lost_pages == 0
    desk.turn(A, 3)
    assert desk.pager.resumable_at(A, 33) == 33
    assert [desk.pager.resumable_at(A, tokens) for tokens in (18, 17, 16, 9, 8, 5)] == [18, 17, 8, 8, 8, 5]
    desk.send(ev.RolledBack(A, 16))
    assert desk.pager.lost_at(A) == 8
    desk.send(ev.RolledBack(A, 8))
    assert desk.pager.lost_at(A) is None


def test_a_window_that_moves_back_to_another_loss_goes_on() -> None:
    """The deepest resumable position is one from which no lost page is seen, in any group."""
    desk = make_desk()
    desk.create(A)
    desk.turn(A, 30)
    for tokens in (5, 9):
        desk.send(ev.CutWanted(A, tokens))
        desk.send(ev.LoadFailed(desk.loads.pop(), "bad checksum"))
    desk.send(ev.CutWanted(A, None))
    assert desk.pager.resumable_at(A, 13) == 4
    assert desk.pager.lost_at(A) is None


def test_room_comes_from_behind_the_window_before_others_lose_theirs() -> None:
    """A dirty page that goes by itself once it is written is no reason to evict what an idle space may need."""
    desk = make_desk(24)
    desk.create(A, B)
    desk.turn(B, 8)
    resident = desk.pager.residency(B).resident_pages
    desk.send(ev.Activated(A))
    for _ in range(10):
        desk.send(ev.GrowthWanted(A, 4))
        if not desk.pager.is_ready(A):
            desk.settle()
        desk.append(A, 4)
    assert desk.pager.residency(B).resident_pages == resident
    assert desk.pager.statistics().evictions == 0
    assert desk.pager.statistics().window_drops >= 6


def test_pages_that_a_write_limit_holds_back_are_no_room() -> None:
    """P21 P26: what goes once it is written, and is not allowed to be, does not count: clean pages of others go."""
    desk = make_desk(24)
    desk.create(A, B)
    desk.turn(B, 8)
    resident = desk.pager.residency(B).resident_pages
    desk.send(ev.WritesAllowed(0))
    desk.send(ev.Activated(A))
    steps = 0
    while desk.pager.residency(B).resident_pages == resident:
        desk.send(ev.GrowthWanted(A, 4))
        assert desk.pager.is_ready(A), "it waits for pages that may not be written"
        desk.append(A, 4)
        steps += 1
    assert steps > WINDOW // 4 + 1, "there were pages behind the window by then"
    assert desk.pager.statistics().behind_window_bytes > 0
    assert desk.pager.statistics().window_drops == 0
    assert desk.writes == []


def test_windows_are_checked() -> None:
    """One for each group, and none that sees nothing."""
    for windows in ((None,), (None, 0), (None, 1, 2)):
        with pytest.raises(ValueError, match="windows of at least one token"):
            Pager(100, group_count=2, new_page_id=lambda: None, windows=windows)  # type: ignore[arg-type,return-value]
