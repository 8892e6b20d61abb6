"""What moved between RAM and disk since somebody last asked, summed up by whose pages, what and why.

The pager's own counters say how much moved since the start; these say whose pages went or came, for whoever tells
people (`kvd.scheduler.journal`). A sum per space, what and why is all that is kept, so that a thousand pages cost no
more memory than one, and nothing is kept of pages that no space maps.

May import kvd.ids and kvd.vm.page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvd.ids import SpaceId
from kvd.vm.page import Page

Move = Literal["eviction", "fault", "prefetch", "swap_out"]
"""Frames dropped; pages read since they were demanded; read ahead; written."""

EvictionReason = Literal["room", "background", "asked", "window", "quota"]
"""Others needed the frame; too much was resident; the user asked; no step sees the page; its file is given up."""


@dataclass(slots=True)
class Moved:
    """Pages of one space that moved for one reason.

    Attributes:
        space: whose; of a shared page the one that mapped it first.
        move: what happened.
        reason: why: an `EvictionReason`, a `PrefetchReason`, or empty.
        pages: how many.
        moved_bytes: what they took in RAM, or take there now.
    """

    space: SpaceId
    move: Move
    reason: str
    pages: int = 0
    moved_bytes: int = 0


class Moves:
    """Owned by the pager's transfers; `take` empties it."""

    def __init__(self) -> None:
        self._moved: dict[tuple[SpaceId, Move, str], Moved] = {}

    def __bool__(self) -> bool:
        return bool(self._moved)

    def note(self, move: Move, page: Page, moved_bytes: int, reason: str = "") -> None:
        """A page moved; called while its spaces still map it."""
        space = next(iter(page.users), None)
        if space is None:
            return
        key = (space, move, reason)
        moved = self._moved.get(key)
        if moved is None:
            moved = self._moved[key] = Moved(space, move, reason)
        moved.pages += 1
        moved.moved_bytes += moved_bytes

    def take(self) -> list[Moved]:
        """What moved since this was last asked, in the order it began."""
        moved, self._moved = self._moved, {}
        return list(moved.values())
