"""How many cores this process may really use. Imports the standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_cores"]


def available_cores(root: Path = Path("/")) -> int:
    """Cores this process may really use: CPU affinity, and the CPU quota of its control groups (v1 and v2).

    A quota of a part of a core is rounded down, at least to 1: BLAS threads that spin for a core they do not have are
    far slower than one thread fewer.

    Args:
        root: where `proc` and `sys` are looked for.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for quota in _quotas(root):
        cores = min(cores, max(1, int(quota)))
    return max(1, cores)


def _quotas(root: Path) -> Iterator[float]:
    """CPU quotas in cores of our control groups and all groups above them."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            bases = [mount, mount / "unified"]
        elif "cpu" in controllers.split(","):
            bases = [mount / controllers, mount / "cpu"]
        else:
            continue
        # Inside a container the path may not exist under the mount; then the mount itself is our group.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                yield from _quota_of(base.joinpath(*parts[:depth]))


def _quota_of(group: Path) -> Iterator[float]:
    unified = _read(group / "cpu.max").split()
    legacy = [_read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()]
    for pair in (unified, legacy):
        if len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit() and int(pair[1]) > 0:
            yield int(pair[0]) / int(pair[1])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
