"""Tails between turns: packed to the bytes of their tokens, put back for a step, never in neither tier."""

from __future__ import annotations

import pytest

from kvd.vm import events as ev
from tests.vm.desk import PAGE_BYTES, A, B, C, Desk, P, pages_of

TOKEN_BYTES = PAGE_BYTES // P


def idle(desk: Desk) -> list[ev.Instruction]:
    """Time in which nobody does anything; what it leads to."""
    return [instruction for _ in range(3) for instruction in desk.send(ev.Tick())]


@pytest.mark.parametrize("commit", [True, False])
def test_an_idle_tail_counts_by_its_tokens_durable_or_not(commit: bool) -> None:
    """P21: whole frames are for who runs; the bytes in the books are those of the tokens, per group."""
    desk = Desk(40, groups=2)
    desk.create(A)
    desk.turn(A, 7, commit=commit)
    assert desk.pager.statistics().resident_bytes == 4 * PAGE_BYTES
    out = idle(desk)
    assert [type(i) for i in out] == [ev.PackTail, ev.PackTail]
    assert desk.states(A) == ["clean", "packed"]
    figures = desk.pager.statistics()
    assert (figures.packed_bytes, figures.packs) == (2 * 3 * TOKEN_BYTES, 2)
    assert figures.resident_bytes == 2 * PAGE_BYTES + figures.packed_bytes
    assert figures.dirty_bytes == (0 if commit else figures.packed_bytes)
    found = desk.pager.residency(A)
    assert (found.resident_pages, found.stored_pages, found.resident_bytes) == (4, 0, figures.resident_bytes)
    assert found.needed_bytes == found.total_bytes == 4 * PAGE_BYTES, "what it takes when it runs"
    assert idle(desk) == []


def test_a_turn_that_follows_soon_finds_its_frame() -> None:
    """Between turns that follow each other within a second or so nothing is copied."""
    desk = Desk(20)
    desk.create(A)
    for _ in range(5):
        desk.turn(A, 1)
        desk.send(ev.Tick())
        assert desk.states(A)[-1] in ("filling", "clean")
    assert desk.pager.statistics().packs == 0


def test_a_turn_puts_the_tail_into_a_frame_and_loads_nothing() -> None:
    """The tokens come back with the activation itself, and the space goes on where it was."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    idle(desk)
    tail = desk.pager.segments(A)[0].tail
    assert tail is not None
    assert (tail.frame, tail.ram_bytes) == (None, 2 * TOKEN_BYTES)
    out = desk.send(ev.Activated(A))
    assert [(i.page, i.tokens) for i in out if isinstance(i, ev.UnpackTail)] == [(tail.page_id, 2)]
    assert desk.pager.is_ready(A)
    desk.send(ev.GrowthWanted(A, 3))
    desk.append(A, 3)
    desk.settle()
    assert desk.states(A) == ["clean", "clean", "filling"]
    assert (desk.pager.statistics().unpacks, desk.pager.statistics().faults) == (1, 0)


def test_an_activation_waits_for_the_room_that_its_frame_takes_beyond_the_packed_bytes() -> None:
    """A packed tail's own bytes count as there: what is missing is the rest of the frame, and that is waited for."""
    desk = Desk(5.5)  # usable: 3.5 pages
    desk.create(A, B)
    desk.turn(A, 2)
    desk.send(ev.Activated(B))
    desk.send(ev.GrowthWanted(B, 3 * P))
    assert desk.pager.is_ready(B)
    assert desk.states(A) == ["packed"]
    assert desk.send(ev.Activated(A)) == ()
    assert not desk.pager.is_ready(A)
    assert desk.pager.statistics().waiting_spaces == 1
    desk.send(ev.GrowthWanted(B, 2 * P))
    assert desk.pager.is_ready(A)


def test_tails_are_packed_before_anything_is_evicted() -> None:
    """P18: a demand that idle tails make room for costs nobody a page; the longest idle is packed first."""
    desk = Desk(10)  # usable: 8 pages
    desk.create(A, B, C)
    desk.turn(A, 5)
    desk.turn(B, 5)
    desk.turn(C, 5)
    desk.send(ev.Activated(C))
    out = desk.send(ev.GrowthWanted(C, 3 + 2 * P))
    assert [type(i) for i in out if not isinstance(i, ev.MapFrame)] == []
    out = desk.send(ev.GrowthWanted(C, 3 + 2 * P + 1))
    assert [type(i) for i in out][:2] == [ev.PackTail, ev.PackTail]
    assert desk.states(A) == desk.states(B) == ["clean", "packed"]
    assert desk.pager.is_ready(C)
    assert desk.pager.statistics().evictions == 0


def test_a_durable_packed_tail_may_go_and_another_may_not() -> None:
    """Rule 7: under more pressure the log's copy is enough where there is one."""
    for commit, state in ((True, "stashed"), (False, "packed")):
        desk = Desk(7.5)  # usable: 5.5 pages
        desk.create(A, B)
        desk.turn(A, 5, commit=commit)
        desk.turn(B, 4 * P)
        assert desk.states(A) == ["clean", "packed"]
        desk.send(ev.Activated(B))
        desk.send(ev.GrowthWanted(B, P))
        assert desk.states(A) == ["evicted", state]
        assert desk.pager.is_ready(B)


def test_a_pinned_or_queued_space_keeps_its_frame() -> None:
    """Who was promised to stay, and who runs next, is not packed for being idle."""
    desk = Desk(20)
    desk.create(A, B, C)
    for space in (A, B, C):
        desk.turn(space, 6)
    desk.send(ev.Pinned(A))
    desk.send(ev.PrefetchHinted(B, "queued"))
    idle(desk)
    assert [desk.states(space)[-1] for space in (A, B, C)] == ["filling", "filling", "packed"]
    desk.send(ev.Unpinned(A))
    desk.send(ev.HintWithdrawn(B))
    idle(desk)
    assert [desk.states(space)[-1] for space in (A, B)] == ["packed", "packed"]
    desk.send(ev.Pinned(A))
    assert desk.states(A)[-1] == "filling", "a pin brings everything into frames"


def test_a_fork_of_a_packed_tail_copies_its_tokens_alone() -> None:
    """P19: no frame is made for either, and each goes on alone."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 7)
    idle(desk)
    frames = desk.pager.statistics().pages["clean"]
    out = desk.send(ev.Forked(A, B, 6))
    (copy,) = out
    assert isinstance(copy, ev.CopyTail)
    assert (copy.frame, copy.tokens) == (None, 2)
    assert copy.source == desk.pager.segments(A)[0].tail.page_id  # type: ignore[union-attr]
    assert desk.pager.statistics().pages["clean"] == frames
    assert desk.pager.statistics().packed_bytes == (3 + 2) * TOKEN_BYTES
    desk.turn(B, 1)
    desk.turn(A, 2)
    assert (desk.pager.tokens(A), desk.pager.tokens(B)) == (9, 7)


def test_a_rollback_in_a_packed_tail_gives_the_bytes_back() -> None:
    """What is cut off takes no room any more; what is left is durable again with the next commit."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 7)
    idle(desk)
    (cut,) = desk.send(ev.RolledBack(A, 5))
    assert isinstance(cut, ev.CutPacked)
    assert cut.tokens == 1
    assert desk.pager.statistics().packed_bytes == TOKEN_BYTES
    desk.send(ev.EvictionWanted(A))
    assert desk.states(A) == ["evicted", "packed"]
    desk.send(ev.TurnCommitted(A))
    assert desk.states(A) == ["evicted", "stashed"]
    assert desk.pager.statistics().resident_bytes == 0


def test_a_log_that_is_lost_keeps_packed_tails_in_ram() -> None:
    """Their bytes are nowhere else until the next commit."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    idle(desk)
    desk.send(ev.LogLost(A))
    desk.send(ev.EvictionWanted(A))
    assert desk.states(A) == ["evicted", "packed"]


def test_a_closed_space_leaves_nothing_packed() -> None:
    """The bytes go with the space."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    idle(desk)
    tail = desk.pager.segments(A)[0].tail
    assert tail is not None
    assert pages_of(desk.send(ev.SpaceClosed(A)), ev.DropPacked) == [tail.page_id]
    assert desk.pager.statistics().resident_bytes == 0


def test_a_tail_loaded_ahead_is_packed_when_nobody_comes() -> None:
    """A hint that came to nothing costs the tokens' bytes, and the page still counts as loaded ahead."""
    desk = Desk(20)
    desk.create(A)
    desk.turn(A, 6)
    desk.send(ev.EvictionWanted(A))
    desk.send(ev.PrefetchHinted(A))
    desk.settle()
    assert desk.states(A) == ["clean", "filling"]
    idle(desk)
    assert desk.states(A) == ["clean", "packed"]
    assert desk.pager.statistics().prefetched["hint"].unknown_pages == 2
    desk.send(ev.Activated(A))
    assert desk.pager.statistics().prefetched["hint"].used_pages == 2
