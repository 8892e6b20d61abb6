"""The clock of ages asks the system for the clock that counts sleep."""

from __future__ import annotations

import time

import pytest

from kvd.ops.lasting_clock import lasting_s


def test_it_is_the_clock_that_goes_on_in_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """P25: CLOCK_BOOTTIME where there is one (Linux), else CLOCK_MONOTONIC, which counts sleep on macOS."""
    asked: list[int] = []

    def read(clock: int) -> float:
        asked.append(clock)
        return 42.0

    monkeypatch.setattr(time, "clock_gettime", read)
    assert lasting_s() == 42.0
    assert asked == [getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)]


def test_it_never_goes_back() -> None:
    """It is monotonic."""
    readings = [lasting_s() for _ in range(100)]
    assert readings == sorted(readings)
