"""Who may be in RAM at once: running requests reserve the bytes they may come to need before they hold any.

Theory of operation. A request asks for the whole working set it can grow to. It is let in when that fits beside what
others hold, or when nobody holds anything: what could never fit was refused before. Requests are let in in the order
they asked, so the one that waits longest cannot be starved by small ones, and since it holds nothing while it waits,
those it waits for can always end. Pages that several share are counted for each: never too little.

Owner: the engine thread. May import siblings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.scheduler.waiting import Stop, Waiting, raise_if_stopped


@dataclass(eq=False, slots=True)
class Reservation:
    """What one request may come to need; `reserved_bytes` counts from when it is let in."""

    reserved_bytes: int


class Reservations:
    """Owner: the engine thread.

    Args:
        usable_bytes: what all together may hold.
    """

    def __init__(self, usable_bytes: Callable[[], int]) -> None:
        self._usable_bytes = usable_bytes
        self._waiting: list[Reservation] = []
        self._held: list[Reservation] = []

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all requests that were let in."""
        return sum(each.reserved_bytes for each in self._held)

    @property
    def waiting(self) -> int:
        """Requests that wait to be let in."""
        return len(self._waiting)

    @property
    def others_hold(self) -> bool:
        """Whether a request that asks now comes beside others."""
        return bool(self._held or self._waiting)

    def ask(self, reserved_bytes: int) -> Reservation:
        """Take a place in the line; `release` gives it, or what it turned into, back."""
        asked = Reservation(reserved_bytes)
        self._waiting.append(asked)
        self._let_in()
        return asked

    def is_in(self, reservation: Reservation) -> bool:
        """Whether it was let in."""
        return reservation in self._held

    def until_in(self, reservation: Reservation, stop: Stop) -> Waiting:
        """Wait to be let in.

        Raises:
            Cancelled: `stop` said so; the caller releases.
        """
        if not self.is_in(reservation):
            yield lambda: self.is_in(reservation) or stop() is not None
            raise_if_stopped(stop)

    def release(self, reservation: Reservation) -> None:
        """The request ended, whether it was let in or not; a second time does nothing."""
        for line in (self._waiting, self._held):
            if reservation in line:
                line.remove(reservation)
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if self._held and self.reserved_bytes + first.reserved_bytes > self._usable_bytes():
                return
            self._held.append(self._waiting.pop(0))
