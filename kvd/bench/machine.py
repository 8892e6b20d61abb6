"""What this machine can do at most: the floors that figures are compared with. May import mlx and numpy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_READ_BYTES = 1 << 28
_REPEATS = 5
_SIDE = 1024


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Best of a few tries, on the threads that BLAS has.

    Attributes:
        read_bytes_s: bytes that one thread reads from memory in a second.
        products_s: float32 multiply-adds of large matrix products in a second, times two.
    """

    read_bytes_s: float
    products_s: float


def measure_rates() -> MachineRates:
    """Read a quarter gigabyte, multiply matrices of 1,024 by 1,024."""
    memory = np.ones(_READ_BYTES // 4, np.float32)
    read_s = min(_timed(lambda: float(memory.max())) for _ in range(_REPEATS))
    import mlx.core as mx

    a = mx.random.normal((_SIDE, _SIDE))
    mx.eval(a)
    product_s = min(_timed(lambda: mx.eval(a @ a)) for _ in range(_REPEATS))
    return MachineRates(_READ_BYTES / read_s, 2 * _SIDE**3 / product_s)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
