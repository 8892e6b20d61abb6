"""A monotonic clock that goes on while the machine sleeps.

Theory of operation. `time.monotonic` stands still while a machine is suspended, on Linux and on macOS: right for waits,
wrong for ages. A laptop that was closed for the night is a night older. Linux counts that as CLOCK_BOOTTIME; the
CLOCK_MONOTONIC of macOS counts it by itself (it is not what `time.monotonic` reads there). Neither is moved when
somebody sets the wall clock.

May import nothing of kvd.
"""

from __future__ import annotations

import time
from typing import Final

_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lasting_s() -> float:
    """Seconds since some moment before, those in which the machine slept included."""
    return time.clock_gettime(_CLOCK)


__all__ = ["lasting_s"]
