"""What a daemon takes while it is soaked: samples over its life, and whether they grow without end (P23).

What pages take is bounded by the budget and comes and goes, and so do the buffers that they are read into; both are
taken off. The rest may grow while the daemon warms
up: the first third of a life does not count. After that a trend is allowed that adds up to `ALLOWED_BYTES` and
`ALLOWED_SHARE` of the footprint over what is left of the life, so that a longer soak finds a smaller leak. The trend is
the median of the slopes between pairs of samples (Theil and Sen), which a few outliers do not move.

May import the standard library only.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

WARM_UP_SHARE: Final = 1 / 3
"""Of a daemon's life; what it takes then is not judged."""

SHORTEST_S: Final = 45.0
"""Of a life after the warm-up; a shorter one says nothing about growth."""

ALLOWED_BYTES: Final = 32 << 20
ALLOWED_SHARE: Final = 0.03
MOST_POINTS: Final = 120
"""Samples that a trend is made of; more are thinned out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon at one moment.

    Attributes:
        at_s: on the soak's clock.
        footprint_bytes: what the process takes.
        page_bytes: of that, memory mapped for pages: frames, packed tails, and buffers that pages are read into.
        open_files, threads: of the process.
    """

    at_s: float
    footprint_bytes: int
    page_bytes: int
    open_files: int
    threads: int

    @classmethod
    def of(cls, figures: Mapping[str, Any], at_s: float) -> Sample:
        """From the daemon's statistics."""
        return cls(
            at_s=at_s,
            footprint_bytes=int(figures["footprint_bytes"]),
            page_bytes=sum(int(figures[name]) for name in ("frame_bytes", "packed_bytes", "read_buffer_bytes")),
            open_files=int(figures["open_files"]),
            threads=int(figures["threads"]),
        )

    @property
    def own_bytes(self) -> int:
        """What it takes beside pages."""
        return max(0, self.footprint_bytes - self.page_bytes)


@dataclass(frozen=True, slots=True)
class Growth:
    """How what a daemon takes beside pages grew after its warm-up.

    Attributes:
        seconds: that it was watched.
        bytes_per_minute: the trend.
        bytes_grown: the trend over those seconds.
        allowed_bytes: that it may have grown by.
    """

    seconds: float
    bytes_per_minute: float
    bytes_grown: int
    allowed_bytes: int

    @property
    def trouble(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.bytes_grown <= self.allowed_bytes:
            return ""
        return (
            f"the daemon's memory beside pages grew by {self.bytes_grown / 1e6:.1f} MB in {self.seconds:.0f} s "
            f"({self.bytes_per_minute / 1e6:.2f} MB a minute), more than {self.allowed_bytes / 1e6:.1f} MB"
        )


def growth_of(samples: Sequence[Sample]) -> Growth | None:
    """The growth over one daemon's life; None when it was too short to say."""
    if len(samples) < 2:
        return None
    first_s, last_s = samples[0].at_s, samples[-1].at_s
    warm_s = first_s + (last_s - first_s) * WARM_UP_SHARE
    judged = [sample for sample in samples if sample.at_s >= warm_s]
    if len(judged) < 12 or last_s - judged[0].at_s < SHORTEST_S:
        return None
    points = judged[:: max(1, len(judged) // MOST_POINTS)]
    slope = statistics.median(
        (after.own_bytes - before.own_bytes) / (after.at_s - before.at_s)
        for before, after in combinations(points, 2)
        if after.at_s > before.at_s
    )
    seconds = last_s - judged[0].at_s
    allowed = ALLOWED_BYTES + ALLOWED_SHARE * statistics.median(sample.footprint_bytes for sample in judged)
    return Growth(seconds, slope * 60, int(slope * seconds), int(allowed))


def longest_life(lives: Sequence[Sequence[Sample]]) -> Sequence[Sample]:
    """The samples of the daemon that lived longest."""
    return max(lives, key=lambda life: life[-1].at_s - life[0].at_s if life else 0.0, default=())


def trouble_at_rest(before: Sample, after: Sample, *, allowed_threads: int, allowed_files: int = 4) -> list[str]:
    """What a daemon at rest still has open that one before the soak had not.

    Args:
        before: at rest, before any client came.
        after: at rest, when all clients have gone.
        allowed_threads: threads of pools that are kept once they were needed.
        allowed_files: descriptors that are opened once, when they are first needed.
    """
    troubles = []
    if after.open_files > before.open_files + allowed_files:
        troubles.append(f"descriptors leak: {before.open_files} open at first, {after.open_files} at rest")
    if after.threads > before.threads + allowed_threads:
        troubles.append(f"threads leak: {before.threads} at first, {after.threads} at rest")
    return troubles


__all__ = ["Growth", "Sample", "growth_of", "longest_life", "trouble_at_rest"]
