"""What goes on per second, from the counters of successive looks. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvd_client.monitor import AgentKey, MonitorPicture

WINDOW_S: Final = 3.0
"""Rates are means over so long, so that they can be read."""

COUNTERS: Final = (
    "bytes_read",
    "bytes_written",
    "faults",
    "evictions",
    "decode_rows",
    "prompt_tokens",
    "cached_tokens",
)


@dataclass(frozen=True, slots=True)
class _Sample:
    time_s: float
    counters: Mapping[str, int]
    generated: Mapping[AgentKey, int]


class Rates:
    """Owner: whoever looks; `take` is the only method that changes it."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()

    def take(self, picture: MonitorPicture) -> None:
        """Another look; one whose counters are less than before is of another run of the daemon."""
        figures = picture.figures
        sample = _Sample(
            time_s=float(figures.get("time_s", 0.0)),
            counters={name: int(figures.get(name, 0)) for name in COUNTERS},
            generated={key: int(each.get("generated_tokens", 0)) for key, each in picture.agents.items()},
        )
        last = self._samples[-1] if self._samples else None
        if last is not None and (
            sample.time_s <= last.time_s or any(sample.counters[name] < last.counters[name] for name in COUNTERS)
        ):
            self._samples.clear()
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].time_s <= sample.time_s - WINDOW_S:
            self._samples.popleft()

    @property
    def is_known(self) -> bool:
        """Whether there were two looks to compare."""
        return len(self._samples) > 1

    def per_second(self, counter: str) -> float:
        """Growth of one of `COUNTERS`; 0 while nothing is known."""
        return self._growth(counter) / self._seconds if self.is_known else 0.0

    def hit_rate(self) -> float | None:
        """Of the prompt tokens of turns that ended lately, the part that was there; None when none did."""
        prompts = self._growth("prompt_tokens") if self.is_known else 0
        return self._growth("cached_tokens") / prompts if prompts > 0 else None

    def tokens_per_second(self, key: AgentKey) -> float:
        """Tokens that an agent generated; 0 while nothing is known."""
        if not self.is_known:
            return 0.0
        first, last = (sample.generated.get(key) for sample in (self._samples[0], self._samples[-1]))
        return 0.0 if first is None or last is None else max(0, last - first) / self._seconds

    @property
    def _seconds(self) -> float:
        return max(1e-3, self._samples[-1].time_s - self._samples[0].time_s)

    def _growth(self, counter: str) -> int:
        return self._samples[-1].counters[counter] - self._samples[0].counters[counter]


def hit_rate(entry: Mapping[str, Any]) -> float | None:
    """Of the prompt tokens of all turns since the start, the part that was there; None before there were any."""
    prompts = int(entry.get("prompt_tokens") or 0)
    return int(entry.get("cached_tokens") or 0) / prompts if prompts else None


__all__ = ["WINDOW_S", "Rates", "hit_rate"]
