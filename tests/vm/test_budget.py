"""Budget arithmetic: the reserves keep writing, reading and copying possible."""

from __future__ import annotations

import pytest

from kvd.vm.budget import Budget


def budget_of(budget_bytes: int, *formats: tuple[int, ...], max_copies: int = 6) -> Budget:
    """A budget that knows these formats."""
    budget = Budget(budget_bytes, max_copies=max_copies)
    budget.set_formats(formats)
    return budget


def test_the_reserves_are_one_page_in_flight_and_one_copy_per_group() -> None:
    """A small budget keeps back the least that makes progress possible."""
    budget = budget_of(1000, (30, 20), (40, 5))
    assert budget.flight_reserve_bytes == 62  # a sixteenth of the budget is more than one page of 40
    assert budget.usable_bytes == 1000 - 62 - 50
    assert budget_of(500, (30, 20), (40, 5)).flight_reserve_bytes == 40


def test_a_large_budget_reserves_for_all_transfers() -> None:
    """Beyond sixteen times the transfers, the reserve stops growing."""
    assert budget_of(100_000, (100,)).flight_reserve_bytes == 600


def test_a_budget_smaller_than_its_reserves_has_nothing_usable() -> None:
    """`usable_bytes` is never negative and nothing may be mapped."""
    budget = budget_of(50, (40, 40))
    assert budget.usable_bytes == 0
    assert not budget.can_map(1)


@pytest.mark.parametrize("resident_bytes", [0, 300, 700])
def test_with_nothing_in_flight_a_usable_frame_can_always_be_loaded_or_written(resident_bytes: int) -> None:
    """No deadlock: whatever is resident within the limits, one transfer fits."""
    budget = budget_of(1000, (100,))
    budget.book(resident_bytes=resident_bytes)
    assert budget.usable_bytes == 800
    assert budget.can_load(100)
    assert budget.can_write(100)


def test_transfers_leave_the_copy_reserve_alone() -> None:
    """With 700 bytes of frames usable up to 800, two copies of 100 in flight fit and a third would take the reserve."""
    budget = budget_of(1000, (100,))
    budget.book(resident_bytes=700, copied_bytes=200)
    assert not budget.can_write(100)
    assert budget.copy_shortage_bytes(100) <= 0


def test_pages_that_come_in_take_their_frames_and_one_copy() -> None:
    """P21: a page on its way in has a buffer or its frame, and one of them both; so a turn's pages come in at once."""
    budget = budget_of(1000, (100,), (50,))
    for number in range(8):  # as many as are usable: the reserve for copies of partial pages stays free
        assert budget.can_load(100)
        budget.book(resident_bytes=100)
        budget.load_begins(100)
        assert (budget.resident_bytes, budget.in_flight_bytes) == (100 * number + 100, 100)
    assert budget.peak_total_bytes == 900
    assert not budget.can_load(100)
    assert not budget.can_write(100), "the only copy that fits is taken"
    for _ in range(8):
        budget.load_ends(100)
    assert budget.in_flight_bytes == 0
    assert budget.can_write(100)


def test_the_largest_of_the_pages_that_come_in_is_what_is_copied() -> None:
    """Formats differ in size."""
    budget = budget_of(1000, (100,), (50,))
    for page_bytes in (50, 100, 50):
        budget.book(resident_bytes=page_bytes)
        budget.load_begins(page_bytes)
    assert budget.in_flight_bytes == 100
    budget.load_ends(100)
    assert budget.in_flight_bytes == 50


def test_a_copy_may_use_its_reserve_but_not_the_one_for_transfers() -> None:
    """At 800 of 1000 bytes one more page can be copied; then 100 bytes stay free for a write."""
    budget = budget_of(1000, (100,))
    budget.book(resident_bytes=800)
    assert not budget.can_map(100)
    assert budget.copy_shortage_bytes(100) == 0
    budget.book(resident_bytes=100)
    assert budget.copy_shortage_bytes(100) == 100
    assert budget.can_write(100)
    assert budget.shortage_bytes(0) == 100


def test_a_shrunk_budget_allows_one_write_at_a_time() -> None:
    """Only while it converges, and only with nothing else in flight."""
    budget = budget_of(1000, (100,))
    budget.book(resident_bytes=800)
    budget.set_budget(300)
    assert budget.converging
    assert budget.can_write(100)
    budget.book(copied_bytes=100)
    assert not budget.can_write(100)
    budget.book(resident_bytes=-700, copied_bytes=-100)
    budget.settle()
    assert not budget.converging


def test_the_peak_is_kept() -> None:
    """The most that was resident stays known after it is given back."""
    budget = budget_of(1000, (100,))
    budget.book(resident_bytes=500)
    budget.book(resident_bytes=-400)
    assert (budget.resident_bytes, budget.peak_resident_bytes) == (100, 500)
