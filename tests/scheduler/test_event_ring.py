"""The ring of events: numbered, bounded, and never silent about what a reader has missed."""

from __future__ import annotations

import threading

import pytest

from kvd.scheduler.event_ring import EventRing, Gap

START_S = 1_700_000_000.0
BASE = int(START_S * 1e6)


def make_ring(most_events: int = 4, start_s: float = START_S) -> EventRing:
    """A ring on a clock that stands still."""
    return EventRing(lambda: start_s, most_events)


def filled(events: int) -> EventRing:
    """A ring of four that has been told so many events."""
    ring = make_ring()
    for number in range(events):
        ring.publish("fault", {"number": number})
    return ring


def numbers(ring: EventRing, after: int, **options: bool) -> tuple[list[object], Gap | None]:
    """What a reader gets."""
    batch = ring.read(after, 100, **options)
    return [event["number"] for event in batch.events], batch.gap


def test_events_are_numbered_by_one_and_carry_the_clock() -> None:
    """`seq` grows by one from the clock's microseconds on; facts are as they were told."""
    ring = filled(2)
    batch = ring.read(BASE, 10)
    assert [event["seq"] for event in batch.events] == [BASE + 1, BASE + 2]
    assert batch.events[0] == {"type": "fault", "seq": BASE + 1, "time_s": START_S, "number": 0}
    assert (batch.seq, batch.gap, ring.seq, ring.first_seq) == (BASE + 2, None, BASE + 2, BASE + 1)


def test_a_reader_goes_on_where_it_was() -> None:
    """Batches follow each other without a hole; at the end there is nothing."""
    ring = filled(4)
    first = ring.read(BASE, 3)
    assert [event["number"] for event in first.events] == [0, 1, 2]
    assert numbers(ring, first.seq) == ([3], None)
    assert numbers(ring, ring.seq) == ([], None)


@pytest.mark.parametrize(("is_first", "reason"), [(False, "slow"), (True, "old")])
def test_what_was_forgotten_is_a_gap_with_its_count(is_first: bool, reason: str) -> None:
    """Two of six are gone from a ring of four: exactly two are told to be lost, the rest comes."""
    ring = filled(6)
    assert numbers(ring, BASE, is_first=is_first) == ([2, 3, 4, 5], Gap(2, reason, BASE + 2))  # type: ignore[arg-type]
    assert numbers(ring, BASE + 2) == ([2, 3, 4, 5], None)


@pytest.mark.parametrize("seq", [1, BASE - 1, BASE + 7])
def test_a_number_of_another_run_is_a_restart(seq: int) -> None:
    """Nobody knows how many were lost; everything that is remembered comes."""
    assert numbers(filled(6), seq) == ([2, 3, 4, 5], Gap(None, "restart", BASE + 2))


def test_zero_is_all_that_is_known() -> None:
    """Without a gap: nobody has missed what they never asked for."""
    assert numbers(filled(6), 0) == ([2, 3, 4, 5], None)
    assert numbers(filled(0), 0) == ([], None)


def test_later_runs_have_larger_numbers() -> None:
    """So a number says by itself which of two events is newer."""
    before = filled(6)
    after = make_ring(start_s=START_S + 1)
    assert after.seq > before.seq


def test_a_reader_is_woken_once_by_the_next_event() -> None:
    """Not for what it has not read yet, not twice, and not after it left."""
    ring, woken = filled(1), []
    assert not ring.wake_after(BASE, lambda: woken.append("early"))
    assert ring.wake_after(ring.seq, lambda: woken.append("a"))

    def leaves() -> None:
        woken.append("never")

    assert ring.wake_after(ring.seq, leaves)
    ring.forget(leaves)
    ring.publish("fault", {"number": 1})
    ring.publish("fault", {"number": 2})
    assert woken == ["a"]


def test_several_threads_may_publish() -> None:
    """Every event has a number of its own."""
    ring = make_ring(most_events=1000)
    threads = [
        threading.Thread(target=lambda: [ring.publish("fault", {"number": 0}) for _ in range(100)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [event["seq"] for event in ring.read(0, 1000).events]
    assert found == list(range(BASE + 1, BASE + 401))
