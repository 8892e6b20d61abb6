"""How long the pager takes to look pages up, to touch them and to choose victims, with many pages in the table.

Times are of the calling thread's wall clock, the least of several passes over all spaces, per page. May import kvd.ids,
kvd.vm and the standard library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvd.ids import GroupId, PageId, PageKey, SpaceId
from kvd.vm import events as ev
from kvd.vm.eviction import POLICIES
from kvd.vm.pager import Pager

BAR_US: Final = 2.0
"""What looking a page up, and touching it, may take."""

SPACE_PAGES: Final = 250
"""Pages of one space: 64,000 tokens."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Microseconds.

    Attributes:
        policy: name of the eviction policy.
        pages: pages in the table.
        lookup_us: of `Pager.block_table`, a page.
        touch_us: of a request's start and end on a space that is in RAM, a page of the space.
        victim_us: from the question for victims to the first one.
        swap_us: of a demand in a full pool, a page that goes and one that comes, loads answered at once.
    """

    policy: str
    pages: int
    lookup_us: float
    touch_us: float
    victim_us: float
    swap_us: float


class Desk:
    """A pager with spaces of `SPACE_PAGES` clean pages, the last of which finds no room.

    Args:
        policy: name of an eviction policy.
        pages: pages in the table, a multiple of `SPACE_PAGES`.
    """

    def __init__(self, policy: str, pages: int) -> None:
        page_bytes, numbers = 1_000, count(1)
        self.spaces = [SpaceId(number) for number in range(1, pages // SPACE_PAGES + 1)]
        self.policy = POLICIES[policy]()
        reserve_pages = 1 + 3  # a copy, and what is in flight: two writes and a load
        self.pager = Pager(
            page_bytes * (pages - SPACE_PAGES + reserve_pages),
            group_count=1,
            new_page_id=lambda: PageId(str(next(numbers))),
            policy=self.policy,
            # full to the last page: at the worst there is
            high_free_percent=0,
            low_free_percent=0,
        )
        for space in self.spaces:
            refs = tuple(ev.PageRef(PageId(f"{space}.{n}"), PageKey(f"{space}.{n}")) for n in range(SPACE_PAGES))
            self.send(ev.SpaceRestored(space, (page_bytes,), (ev.SegmentImage(GroupId(0), refs, 0),)))
        for space in self.spaces[:-1]:
            self.turn(space)

    def send(self, event: ev.Event) -> None:
        """An event; loads are answered at once."""
        waiting: list[ev.Event] = [event]
        while waiting:
            for instruction in self.pager.handle(waiting.pop()):
                if isinstance(instruction, ev.LoadPage):
                    waiting.append(ev.LoadDone(instruction.page))

    def turn(self, space: SpaceId) -> None:
        """A request that starts and ends."""
        self.send(ev.Activated(space))
        self.send(ev.Deactivated(space))

    def turns(self, spaces: Sequence[SpaceId]) -> None:
        """One after the other."""
        for space in spaces:
            self.turn(space)


def measure(policy: str, pages: int, repeats: int) -> Speed:
    """Measure one policy.

    Args:
        policy: name of an eviction policy.
        pages: pages in the table; rounded up to whole spaces, at least two.
        repeats: passes; the best counts.
    """
    pages = SPACE_PAGES * max(2, -(-pages // SPACE_PAGES))
    desk = Desk(policy, pages)
    resident = desk.spaces[:-1]
    lookup_s = _best(repeats, lambda: _look_up(desk.pager, resident))
    touch_s = _best(repeats, lambda: desk.turns(resident))
    victim_s = _best(repeats, lambda: next(desk.policy.order(desk.pager.spaces)))
    swap_s = min(_swap_s(desk) for _ in range(repeats))
    touched = len(resident) * SPACE_PAGES
    return Speed(
        policy=policy,
        pages=pages,
        lookup_us=1e6 * lookup_s / touched,
        touch_us=1e6 * touch_s / touched,
        victim_us=1e6 * victim_s,
        swap_us=1e6 * swap_s / SPACE_PAGES,
    )


def _look_up(pager: Pager, spaces: Sequence[SpaceId]) -> None:
    for space in spaces:
        pager.block_table(space, GroupId(0))


def _swap_s(desk: Desk) -> float:
    """Seconds of a turn of the space that is wholly on disk: as many pages go as come."""
    absent = next(space for space in desk.spaces if desk.pager.residency(space).resident_pages == 0)
    began = time.perf_counter()
    desk.turn(absent)
    return time.perf_counter() - began


def _best(repeats: int, work: Callable[[], object]) -> float:
    """Least seconds that it took."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
