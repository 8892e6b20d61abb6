"""Page states: the table of moves is the one the design states."""

from __future__ import annotations

import pytest

from kvd.ids import GroupId, PageId
from kvd.vm.budget import Budget
from kvd.vm.errors import IllegalTransition
from kvd.vm.page import IN_FLIGHT, IN_RAM, READABLE, RESIDENT, TRANSITIONS, PageState
from kvd.vm.page_table import PageTable

S = PageState


def test_every_state_has_a_row_and_only_released_ends() -> None:
    """Each state says where a page may go; every state can be reached and left."""
    assert set(TRANSITIONS) == set(PageState)
    assert [state for state, targets in TRANSITIONS.items() if not targets] == [S.RELEASED]
    reached = set().union(*TRANSITIONS.values())
    assert reached == set(PageState)


def test_a_frame_is_given_up_only_from_durable_states() -> None:
    """A page is never in neither tier: the moves that drop the frame of a mapped page start where a copy exists."""
    drops = {(a, b) for a, targets in TRANSITIONS.items() for b in targets if a in RESIDENT and b not in RESIDENT}
    assert {a for a, b in drops if b in (S.EVICTED, S.STASHED)} == {S.CLEAN, S.FILLING}
    assert {b for a, b in drops if a is S.FILLING} == {S.PACKED, S.STASHED, S.RELEASED}
    assert TRANSITIONS[S.PACKED] == {S.FILLING, S.STASHED, S.RELEASED}
    assert not any(a in IN_FLIGHT and b is S.RELEASED for a, b in drops)


def test_a_page_being_written_may_be_read_and_one_being_loaded_not() -> None:
    """Steps read pages while they are copied to swap, never before their bytes have come."""
    assert S.WRITING in READABLE
    assert not READABLE & {S.LOADING, S.LOADING_TAIL}
    assert READABLE < RESIDENT
    assert {S.PACKED} == IN_RAM - RESIDENT
    assert IN_FLIGHT < RESIDENT


def test_an_illegal_move_carries_the_history_and_changes_nothing() -> None:
    """The error tells where the page has been, with the ticks."""
    table = PageTable(Budget(1000, max_copies=1), 4)
    table.tick = 7
    page = table.create(PageId("p"), GroupId(0), 100, S.FILLING)
    table.tick = 8
    table.move(page, S.SEALED_DIRTY)
    with pytest.raises(IllegalTransition, match=r"filling@7 -> sealed_dirty@8") as caught:
        table.move(page, S.EVICTED)
    assert caught.value.data["history"] == [[7, "filling"], [8, "sealed_dirty"]]
    assert page.state is S.SEALED_DIRTY
    assert page.frame == 0


def test_the_lowest_free_frame_is_reused() -> None:
    """Frame numbers stay dense, so a pool need not grow beyond what was ever held at once."""
    table = PageTable(Budget(1000, max_copies=1), 4)
    pages = [table.create(PageId(str(n)), GroupId(0), 10, S.FILLING) for n in range(4)]
    table.move(pages[2], S.RELEASED)
    assert table.move(pages[1], S.RELEASED) == 1
    assert table.create(PageId("new"), GroupId(0), 10, S.FILLING).frame == 1
    assert table.issued_frames == 4
