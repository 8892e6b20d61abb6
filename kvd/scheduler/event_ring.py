"""The last events of the daemon, numbered, for any number of readers that each go at their own pace.

Theory of operation. Whoever has something to tell appends it and goes on: nothing waits for a reader, and nothing is
sent from here. The ring forgets the oldest event when it is full. A reader says up to which number it has read; what
it has missed is a `Gap`, never silence. Numbers begin at the wall clock's microseconds, so those of one run are larger
than those of the runs before it, and a reader of another run is recognised by its number.

Any thread may publish; readers are woken through callbacks, which must only knock at their own door.

May import the standard library only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

RING_EVENTS: Final = 4096
"""Events that are remembered: some minutes of a busy daemon, a few megabytes at most."""

GapReason = Literal["slow", "old", "restart"]


@dataclass(frozen=True, slots=True)
class Gap:
    """Events that a reader does not get.

    Attributes:
        lost: how many; None when nobody knows.
        reason: it was `slow`; what it asked for is too `old`, or of before a `restart`.
        seq: number of the last one lost.
    """

    lost: int | None
    reason: GapReason
    seq: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What follows a number.

    Attributes:
        events: in order.
        seq: what was read up to.
        gap: what is missing before them, if anything.
    """

    events: tuple[Mapping[str, object], ...]
    seq: int
    gap: Gap | None


class EventRing:
    """Thread safe.

    Args:
        wall_clock: seconds since the epoch.
        most_events: how many are remembered.
    """

    def __init__(self, wall_clock: Callable[[], float] = time.time, most_events: int = RING_EVENTS) -> None:
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._events: deque[Mapping[str, object]] = deque(maxlen=most_events)
        self._base = self._seq = int(wall_clock() * 1e6)
        self._waiting: list[Callable[[], None]] = []

    @property
    def seq(self) -> int:
        """Number of the newest event; before there is one, the number before its."""
        return self._seq

    @property
    def first_seq(self) -> int:
        """Number of the oldest event that is remembered; before there is one, that of the next."""
        with self._lock:
            return self._seq - len(self._events) + 1

    def now_s(self) -> float:
        """The wall clock."""
        return round(self._wall_clock(), 6)

    def publish(self, kind: str, facts: Mapping[str, object]) -> None:
        """Append an event; from any thread, never blocks for long.

        Args:
            kind: its `type`.
            facts: what there is to say, of values that a message can have; not changed afterwards.
        """
        event = {"type": kind, "seq": 0, "time_s": self.now_s(), **facts}
        with self._lock:
            self._seq += 1
            event["seq"] = self._seq
            self._events.append(event)
            waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def read(self, after: int, most_events: int, *, is_first: bool = False) -> Batch:
        """What follows the event numbered `after`.

        Args:
            after: the last number that was read, 0 for none.
            most_events: how many to return at most.
            is_first: `after` is what the reader says, not what this method told it.
        """
        with self._lock:
            first = self._seq - len(self._events) + 1
            gap = None
            if after and not self._base <= after <= self._seq:
                gap = Gap(None, "restart", first - 1)
            elif after and after < first - 1:
                gap = Gap(first - 1 - after, "old" if is_first else "slow", first - 1)
            start = first - 1 if gap is not None or not after else after
            events = tuple(islice(self._events, start - first + 1, start - first + 1 + most_events))
        return Batch(events, start + len(events), gap)

    def wake_after(self, seq: int, wake: Callable[[], None]) -> bool:
        """Call `wake` once, on the publisher's thread, when there is an event after `seq`; False: there is one."""
        with self._lock:
            if self._seq != seq:
                return False
            self._waiting.append(wake)
            return True

    def forget(self, wake: Callable[[], None]) -> None:
        """The reader is gone."""
        with self._lock:
            self._waiting = [each for each in self._waiting if each != wake]


__all__ = ["RING_EVENTS", "Batch", "EventRing", "Gap"]
