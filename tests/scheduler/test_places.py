"""Waiting requests hear where they stand: at once, at changes, and not in floods."""

from __future__ import annotations

from kvd.ids import RequestId
from kvd.scheduler.places import TELL_S, Place, Places, estimated_wait_s

ONE, TWO = RequestId(1), RequestId(2)


def at(*positions: int) -> dict[RequestId, Place]:
    """Places in the queue of the first requests."""
    return {RequestId(number + 1): Place(position, "slot") for number, position in enumerate(positions)}


def test_a_change_is_told_once_and_not_too_soon() -> None:
    """P38: changes within a second are told together, as the place is then; what stays is not told again."""
    places = Places()
    assert places.due(1, 0.0, lambda: at(1, 2)) == at(1, 2)
    assert places.due(1, 5.0, lambda: at(9, 9)) == {}, "nothing can have changed"
    assert places.due(2, 5.0, lambda: at(1, 4)) == {TWO: Place(4, "slot")}
    assert places.due(3, 5.2, lambda: at(1, 3)) == {}
    assert places.due(4, 5.4, lambda: at(1, 2)) == {}
    assert places.due(4, 5.9, lambda: at(1, 2)) == {}
    assert places.due(4, 5.0 + TELL_S, lambda: at(1, 2)) == {TWO: Place(2, "slot")}
    assert places.due(5, 9.0, lambda: at(1, 2)) == {}


def test_a_place_that_came_back_is_not_told() -> None:
    """What was told last is true again when the time has come."""
    places = Places()
    places.note(ONE, Place(1, "slot"), 0.0)
    assert places.due(1, 0.1, lambda: at(2)) == {}
    assert places.due(2, 2.0, lambda: at(1)) == {}


def test_waiting_for_memory_is_another_place() -> None:
    """A request that got its slot and now waits for room hears so."""
    places = Places()
    places.note(ONE, Place(1, "slot"), 0.0)
    assert places.due(1, 2.0, lambda: {ONE: Place(1, "memory")}) == {ONE: Place(1, "memory")}


def test_requests_that_went_are_forgotten() -> None:
    """A request that comes back to the line (preempted) is told at once."""
    places = Places()
    places.note(ONE, Place(1, "slot"), 0.0)
    assert places.due(1, 0.1, dict) == {}
    assert places.due(2, 0.2, lambda: at(1)) == at(1)


def test_the_wait_is_as_many_rounds_as_stand_before() -> None:
    """Typical time times rounds of as many as run at once."""
    assert estimated_wait_s(1, 2.0, 4) == 2.0
    assert estimated_wait_s(5, 2.0, 4) == 4.0
    assert estimated_wait_s(3, 2.0, 0) == 6.0
