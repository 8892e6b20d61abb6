"""Who may be in RAM at once: within the budget, in the order asked, and never nobody."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvd.scheduler.reserving import Reservation, Reservations

USABLE = 100


@given(st.lists(st.one_of(st.integers(1, USABLE), st.tuples(st.integers(0, 9))), max_size=60))
def test_what_was_let_in_fits_and_the_first_in_line_is_never_overtaken(actions: list[int | tuple[int]]) -> None:
    """P21: what is held never exceeds what is usable; whoever asks is let in in order, and somebody always is."""
    line = Reservations(lambda: USABLE)
    asked: list[Reservation] = []
    for action in actions:
        if isinstance(action, int):
            asked.append(line.ask(action))
        elif asked:
            line.release(asked.pop(action[0] % len(asked)))
        let_in = [line.is_in(each) for each in asked]
        assert let_in == sorted(let_in, reverse=True), "somebody was overtaken"
        assert line.reserved_bytes == sum(e.reserved_bytes for e, is_in in zip(asked, let_in, strict=True) if is_in)
        assert line.reserved_bytes <= USABLE
        assert any(let_in) or not asked
        waiting = [each for each, is_in in zip(asked, let_in, strict=True) if not is_in]
        assert not waiting or line.reserved_bytes + waiting[0].reserved_bytes > USABLE
        assert line.waiting == len(waiting)


def test_what_is_larger_than_all_is_let_in_alone() -> None:
    """What never fits is refused elsewhere; what was not refused (a copy's room on top) must not wait for ever."""
    line = Reservations(lambda: USABLE)
    first = line.ask(60)
    large = line.ask(USABLE + 1)
    assert not line.is_in(large)
    line.release(first)
    assert line.is_in(large)
    line.release(large)
    line.release(large)
    assert line.reserved_bytes == 0
