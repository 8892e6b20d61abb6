"""Thrashing: noticed by refaults, answered by slower admission, over when they stop; nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.scheduler.reserving import MAX_HELD_TICKS, MAX_OVERTAKEN, Reservation, Reservations
from kvd.scheduler.thrashing import HIGH_RATE, LEAST_REFAULTS, LOW_RATE, WINDOW_TICKS, Thrashing

USABLE = 100


def thrash(thrashing: Thrashing, *, turns: int = 1, together: int = 4) -> None:
    """Turns whose pages were all pushed out just before."""
    for _ in range(turns):
        thrashing.turn_ended(needed=LEAST_REFAULTS, refaults=LEAST_REFAULTS, together=together)


def test_few_refaults_or_a_small_part_of_the_pages_are_no_thrashing() -> None:
    """A first fill, an agent that came back after all others, faults among many pages that were there."""
    thrashing = Thrashing(most=8)
    thrashing.turn_ended(needed=LEAST_REFAULTS - 1, refaults=LEAST_REFAULTS - 1, together=2)
    assert thrashing.refault_rate == 1.0
    thrashing.turn_ended(needed=1000, refaults=int(1000 * (HIGH_RATE - 0.1)), together=2)
    assert not thrashing.is_thrashing
    assert thrashing.limit == 8


def test_admission_falls_step_by_step_from_what_runs_and_never_below_one() -> None:
    """One less with each turn that ends; the first step counts from the turns that held pages, not from the most."""
    thrashing = Thrashing(most=8)
    limits = []
    for _ in range(5):
        thrash(thrashing)
        limits.append(thrashing.limit)
    assert limits == [3, 2, 1, 1, 1]
    assert thrashing.is_thrashing
    assert thrashing.episodes == 1


def test_between_the_two_rates_it_stays_as_it_was() -> None:
    """What ends thrashing is a lower rate than what begins it."""
    between = (HIGH_RATE + LOW_RATE) / 2
    for began in (False, True):
        thrashing = Thrashing(most=8)
        thrash(thrashing, turns=int(began))
        for _ in range(20):
            thrashing.turn_ended(needed=1000, refaults=int(1000 * between), together=4)
        assert thrashing.is_thrashing is began


def test_it_recovers_when_pages_stay_or_nothing_happens() -> None:
    """Turns that find their pages end it, and so do some seconds without faults; the limit rises one by one."""
    quick, slow = Thrashing(most=4), Thrashing(most=4)
    for each in (quick, slow):
        thrash(each, turns=5)
    limits = []
    while quick.limit < 4:
        quick.turn_ended(needed=100, refaults=0, together=1)
        limits.append(quick.limit)
    assert sorted(limits) == limits
    assert set(limits) == {1, 2, 3, 4}
    for _ in range(WINDOW_TICKS):
        slow.tick()
    assert slow.is_thrashing
    slow.tick()
    assert not slow.is_thrashing
    assert slow.refault_rate == 0.0
    for _ in range(4):
        slow.tick()
    assert slow.limit == 4


def test_a_limit_below_one_is_refused() -> None:
    """Somebody must be able to run."""
    with pytest.raises(ValueError, match="at least 1"):
        Thrashing(most=0)


def test_while_the_pool_thrashes_agents_that_ran_last_go_on_before_others() -> None:
    """A newcomer whose pages would push theirs out is overtaken, a bounded number of times, and then by nobody."""
    thrashing = Thrashing(most=8)
    line = Reservations(lambda: USABLE, thrashing)
    running = {name: line.ask(40, whose=name) for name in ("a", "b")}
    thrash(thrashing, together=3)
    newcomer = line.ask(40, whose="c")
    for turn in range(MAX_OVERTAKEN):
        line.release(running["a"])
        assert not line.is_in(newcomer), turn
        running["a"] = line.ask(40, whose="a")
        assert line.is_in(running["a"])
    line.release(running["a"])
    assert line.is_in(newcomer)


def test_a_newcomer_waits_seconds_at_most_and_not_at_all_when_nobody_holds_anything() -> None:
    """Held back for `MAX_HELD_TICKS` while there is room; an idle machine waits for nobody."""
    thrashing = Thrashing(most=8)
    line = Reservations(lambda: USABLE, thrashing)
    a, b = line.ask(40, whose="a"), line.ask(40, whose="b")
    thrash(thrashing, together=3)
    line.release(b)
    newcomer = line.ask(40, whose="c")
    for _ in range(MAX_HELD_TICKS):
        assert not line.is_in(newcomer)
        line.tick()
    assert line.is_in(newcomer)
    other = line.ask(40, whose="d")
    line.release(a)
    line.release(newcomer)
    assert line.is_in(other)


def test_an_interactive_newcomer_is_not_held_back_for_agents_in_the_background() -> None:
    """It may take their places, so it does not wait for them to come back; one in the background does."""
    thrashing = Thrashing(most=8)
    line = Reservations(lambda: USABLE, thrashing)
    running = {name: line.ask(40, whose=name, is_background=True, tail_bytes=1) for name in ("a", "b")}
    thrash(thrashing, together=3)
    line.release(running["b"])
    later = line.ask(40, whose="c", is_background=True)
    assert not line.is_in(later)
    newcomer = line.ask(40, whose="d")
    assert line.is_in(newcomer)
    assert line.place(line.ask(40, whose="b", is_background=True)) == 1, "who is held back stands behind"
    assert line.place(later) == 2


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.integers(1, USABLE), st.integers(0, 5)),
            st.tuples(st.just("end"), st.integers(0, 30), st.integers(0, 40)),
            st.just(("tick", 0, 0)),
        ),
        max_size=80,
    ),
    st.integers(1, 4),
)
def test_every_request_ends_whatever_the_pool_does(actions: list[tuple[str, int, int]], most: int) -> None:
    """Bytes and limit hold, somebody is always in, nobody is overtaken too often, and the line empties."""
    thrashing = Thrashing(most=most)
    line = Reservations(lambda: USABLE, thrashing)
    asked: list[Reservation] = []

    def check() -> None:
        held = [each for each in asked if line.is_in(each)]
        assert held or not asked
        assert line.reserved_bytes == sum(each.reserved_bytes for each in held)
        assert line.reserved_bytes <= USABLE
        assert 1 <= thrashing.limit <= most
        assert len(held) <= most
        assert all(each.passed <= MAX_OVERTAKEN + most for each in asked)

    def end(number: int, refaults: int) -> None:
        held = [each for each in asked if line.is_in(each)]
        ended = held[number % len(held)]
        asked.remove(ended)
        line.release(ended)
        thrashing.turn_ended(needed=max(1, refaults), refaults=refaults, together=len(held))

    for what, first, second in actions:
        if what == "ask":
            asked.append(line.ask(first, whose=f"agent {second}"))
        elif what == "tick":
            thrashing.tick()
            line.tick()
        elif asked:
            end(first, second)
        check()
    while asked:
        end(0, 20)
        check()
    assert line.waiting == 0
