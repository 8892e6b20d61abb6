"""Tells requests that wait where they stand: at once, and again when it changes, but not more often than they can use.

Pure: it is told the time. A change that comes too soon after the last telling is not lost: the place as it is then is
told when the time has come. May import kvd.ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvd.ids import RequestId

TELL_S = 1.0
"""How far apart the tellings of one request are at least."""

MIN_RETRY_S = 1.0
"""The shortest time after which a refused request is told to come back."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands: 1 is next. It waits for a slot to run in, or for its pages' room in memory."""

    position: int
    waits_for: Literal["slot", "memory"]


class Places:
    """Owner: the engine thread."""

    def __init__(self) -> None:
        self._told: dict[RequestId, tuple[Place, float]] = {}
        self._seen: Hashable = None
        self._due_s = math.inf

    def note(self, request: RequestId, place: Place, now_s: float) -> None:
        """The request was told."""
        self._told[request] = (place, now_s)

    def due(
        self, version: Hashable, now_s: float, places: Callable[[], Mapping[RequestId, Place]]
    ) -> Mapping[RequestId, Place]:
        """Requests to tell now; they count as told.

        Args:
            version: differs from the last call's when a place may have changed; otherwise this costs nothing.
            now_s: seconds, monotonic.
            places: of all that wait, now.
        """
        if version == self._seen and now_s < self._due_s:
            return {}
        self._seen, self._due_s = version, math.inf
        present = places()
        self._told = {request: told for request, told in self._told.items() if request in present}
        tell: dict[RequestId, Place] = {}
        for request, place in present.items():
            before, told_s = self._told.get(request, (None, -math.inf))
            if place == before:
                continue
            if now_s - told_s >= TELL_S:
                tell[request] = place
                self.note(request, place, now_s)
            else:
                self._due_s = min(self._due_s, told_s + TELL_S)
        return tell


def estimated_wait_s(position: int, typical_s: float, at_once: int) -> float:
    """How long until the request at a place is served, when requests take what they typically do.

    Args:
        position: its place, 1 is next.
        typical_s: what a request takes.
        at_once: how many are served together.
    """
    return round(typical_s * math.ceil(position / max(1, at_once)), 3)
