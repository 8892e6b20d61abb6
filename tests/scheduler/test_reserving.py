"""Who may be in RAM at once: within the budget, in the order asked, and never nobody."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvd.ids import Namespace
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


WORK, PLAY = Namespace("work"), Namespace("play")


@given(
    st.lists(
        st.one_of(st.tuples(st.sampled_from([WORK, PLAY]), st.integers(1, USABLE)), st.integers(0, 9)), max_size=60
    ),
    st.integers(1, USABLE),
)
def test_a_namespace_holds_no_more_than_its_quota_unless_it_is_one_request(
    actions: list[tuple[Namespace, int] | int], quota: int
) -> None:
    """P21: of a namespace with a quota those are let in that fit it, in order; nobody of it, or of others, is stuck."""
    line = Reservations(lambda: USABLE, quotas=lambda: {WORK: quota})
    asked: list[Reservation] = []
    for action in actions:
        if isinstance(action, tuple):
            asked.append(line.ask(action[1], namespace=action[0]))
        elif asked:
            line.release(asked.pop(action % len(asked)))
        held = [each for each in asked if line.is_in(each)]
        work = [each.reserved_bytes for each in held if each.namespace == WORK]
        assert sum(work) <= quota or len(work) == 1
        assert line.reserved_bytes <= USABLE
        assert held or not asked
        waiting = [each for each in asked if not line.is_in(each)]
        if waiting and line.reserved_bytes + waiting[0].reserved_bytes <= USABLE:
            assert waiting[0].namespace == WORK, "only its own namespace may hold it up"
            assert work
            assert sum(work) + waiting[0].reserved_bytes > quota
        order = [line.is_in(each) for each in asked if each.namespace == WORK]
        assert order == sorted(order, reverse=True), "somebody was overtaken by one of its own namespace"


def test_a_larger_quota_lets_in_who_waited_for_it() -> None:
    """At the next look, without anybody's leaving."""
    quotas = {WORK: 50}
    line = Reservations(lambda: USABLE, quotas=lambda: quotas)
    first, second, third = (line.ask(30, namespace=WORK) for _ in range(3))
    assert [line.is_in(each) for each in (first, second, third)] == [True, False, False]
    quotas[WORK] = 60
    line.review()
    assert [line.is_in(each) for each in (first, second, third)] == [True, True, False]
    del quotas[WORK]
    line.review()
    assert line.is_in(third)


def test_background_requests_make_way_for_interactive_ones_of_their_namespace() -> None:
    """The last let in first, as many as it takes; those of others, and those that would not help, stay."""
    line = Reservations(lambda: USABLE, quotas=lambda: {WORK: 40})
    old, young = (line.ask(20, is_background=True, tail_bytes=1, namespace=WORK) for _ in range(2))
    other = line.ask(20, is_background=True, tail_bytes=1, namespace=PLAY)
    waits = line.ask(20, namespace=WORK)
    assert not line.is_in(waits)
    assert [each.is_wanted for each in (old, young, other)] == [False, True, False]
    line.leave(young, lambda: None)
    assert line.is_in(waits)
    line.ask_again(young)
    assert not line.is_in(young)
    assert [each.is_wanted for each in (old, other)] == [False, False]
    line.release(waits)
    assert line.is_in(young)


def test_nobody_makes_way_for_a_request_that_would_not_come_in_all_the_same() -> None:
    """An interactive request of the namespace holds the rest, or the whole budget is full."""
    line = Reservations(lambda: USABLE, quotas=lambda: {WORK: 40})
    line.ask(30, namespace=WORK)
    background = line.ask(10, is_background=True, tail_bytes=1, namespace=WORK)
    line.ask(30, namespace=WORK)
    assert not background.is_wanted
    full = Reservations(lambda: USABLE, quotas=lambda: {WORK: 40})
    background = full.ask(30, is_background=True, tail_bytes=1, namespace=WORK)
    full.ask(70, namespace=PLAY)
    full.ask(40, namespace=WORK)
    assert not background.is_wanted


class Line:
    """Reservations and what became of each, with the requests that leave their place when they are asked.

    Args:
        usable: bytes.
    """

    def __init__(self, usable: int = USABLE) -> None:
        self.usable = usable
        self.line = Reservations(lambda: self.usable)
        self.given_up: list[Reservation] = []

    def ask(self, size: int, *, background: bool = False, tail: int | None = 1) -> Reservation:
        """A request comes."""
        return self.line.ask(size, is_background=background, tail_bytes=tail)

    def leave(self, each: Reservation) -> None:
        """A request makes way."""
        self.line.leave(each, lambda: self.given_up.append(each))


def test_interactive_requests_want_the_places_of_background_ones() -> None:
    """As many as it takes, the last let in first, and none when it would not help."""
    all_of_it = Line()
    old, young, fixed = (
        all_of_it.ask(30, background=True),
        all_of_it.ask(30, background=True),
        all_of_it.ask(30),
    )
    all_of_it.ask(30, background=True)
    assert (old.is_wanted, young.is_wanted) == (False, False), "background requests wait for background ones"
    first = all_of_it.ask(35)
    assert (old.is_wanted, young.is_wanted, fixed.is_wanted) == (False, True, False)
    all_of_it.line.release(first)
    assert not young.is_wanted
    large = all_of_it.ask(65)
    assert old.is_wanted
    assert young.is_wanted
    all_of_it.line.release(large)
    all_of_it.ask(75)
    assert (old.is_wanted, young.is_wanted) == (False, False), "the interactive one leaves no room for it anyway"


def test_who_made_way_keeps_its_open_page_until_somebody_needs_it() -> None:
    """Kept bytes count; they are given up only when nobody runs and they alone stand in the way."""
    line = Line()
    slow = line.ask(60, background=True, tail=10)
    first = line.ask(80)
    assert slow.is_wanted
    line.leave(slow)
    assert line.line.is_in(first)
    assert line.line.reserved_bytes == 90
    line.line.ask_again(slow)
    behind = line.ask(5, background=True)
    assert line.line.place(slow) == 1, "before other background requests"
    assert not line.line.is_in(behind)
    all_of_it = line.ask(95)
    line.line.release(first)
    assert line.line.is_in(all_of_it)
    assert line.given_up == [slow]
    assert line.line.reserved_bytes == 95
    line.line.release(all_of_it)
    assert line.line.is_in(slow)
    assert line.line.is_in(behind)


def test_what_is_being_committed_is_waited_for() -> None:
    """P34: a request that ends while it is out stands in line no more, and keeps what it kept until it is released."""
    line = Line()
    slow, other = line.ask(40, background=True, tail=10), line.ask(40, background=True, tail=10)
    first = line.ask(80)
    for each in (other, slow):
        line.leave(each)
        line.line.ask_again(each)
    assert line.line.is_in(first)
    line.line.keep(slow)
    assert line.line.place(slow) is None
    line.line.release(first)
    assert line.line.is_in(other)
    line.line.release(other)
    all_of_it = line.ask(95)
    assert not line.line.is_in(all_of_it)
    assert not line.given_up
    line.line.release(slow)
    assert line.line.is_in(all_of_it)


def test_a_priority_may_change_in_line_and_in_place() -> None:
    """What counts as interactive from now on is let in before others, and nobody wants its place."""
    line = Line()
    slow, behind = line.ask(60, background=True), line.ask(60, background=True)
    line.ask(50)
    assert slow.is_wanted
    line.line.prioritise(slow, is_background=False)
    assert not slow.is_wanted
    line.line.prioritise(slow, is_background=True)
    assert slow.is_wanted
    line.line.prioritise(behind, is_background=False)
    assert line.line.place(behind) == 1


def test_a_smaller_budget_wants_places_of_anybody_but_one() -> None:
    """P21: background ones first, then the last let in; the oldest stays, so somebody gets on."""
    line = Line()
    old, background, young = line.ask(40), line.ask(30, background=True), line.ask(30)
    line.usable = 80
    assert not background.is_wanted
    line.line.review()
    assert (old.is_wanted, background.is_wanted, young.is_wanted) == (False, True, False)
    line.usable = 20
    line.line.review()
    assert (old.is_wanted, background.is_wanted, young.is_wanted) == (False, True, True)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, USABLE), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("again"), st.integers(0, 9)),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("budget"), st.integers(60, USABLE)),
    ),
    max_size=60,
)


@given(STEPS)
def test_whoever_comes_and_goes_everybody_gets_in(actions: list[tuple[object, ...]]) -> None:
    """P21: what is held fits, somebody is in while anybody waits, preemptions are bounded, and all are served."""
    line = Line()
    present: list[Reservation] = []
    out: list[Reservation] = []
    for action in actions:
        before = line.line.reserved_bytes
        match action:
            case ("ask", int() as size, bool() as background):
                present.append(line.ask(size, background=background))
            case ("leave", int() as which) if wanted := [each for each in present if each.is_wanted]:
                out.append(wanted[which % len(wanted)])
                line.leave(out[-1])
            case ("again", int() as which) if out:
                line.line.ask_again(out.pop(which % len(out)))
            case ("release", int() as which) if present:
                gone = present.pop(which % len(present))
                if gone in out:
                    out.remove(gone)
                line.line.release(gone)
            case ("budget", int() as usable):
                line.usable = usable
                line.line.review()
        held = [each for each in present if line.line.is_in(each)]
        waiting = [each for each in present if not line.line.is_in(each) and each not in out]
        assert held or not waiting
        assert line.line.reserved_bytes <= max(line.usable, before) or len(held) == 1
        assert line.line.waiting == len(waiting)
        assert sorted(filter(None, map(line.line.place, waiting))) == list(range(1, len(waiting) + 1))
        assert not all(each.is_wanted for each in held) or waiting or not held
    while present:
        for each in out:
            line.line.ask_again(each)
        out.clear()
        ends = [each for each in present if line.line.is_in(each)]
        assert ends, "nobody is in"
        present.remove(ends[0])
        line.line.release(ends[0])
    assert line.line.reserved_bytes == 0


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


def test_who_needs_more_than_was_thought_is_next_with_that() -> None:
    """Let in, and then told that it needs more: it holds nothing until that fits, and nobody overtakes it (P21)."""
    all_of_it = Line()
    line = all_of_it.line
    first, asked, later = all_of_it.ask(60), all_of_it.ask(40), all_of_it.ask(10)
    line.ask_more(asked, 10)
    assert not line.is_in(asked)
    assert (line.place(asked), line.place(later), line.reserved_bytes) == (1, 2, 60)
    line.release(first)
    assert line.is_in(asked)
    assert line.is_in(later)
    line.ask_more(asked, 10)
    assert line.is_in(asked)
    assert line.reserved_bytes == 70
