"""How much memory a process really takes from the machine, comparable over platforms.

Counted is what only this process needs: its anonymous memory, resident or swapped. Not counted are clean pages of
files (libraries, mapped weights), which the system may drop at any time.

- macOS: `phys_footprint` of `proc_pid_rusage`, the figure that Activity Monitor shows and memory pressure acts on.
- Linux: `RssAnon + RssShmem + VmSwap` of /proc/PID/status; where that lacks them (kernel before 4.5), resident less
  shared pages of /proc/PID/statm.
- Elsewhere: the peak resident size of `getrusage`, of this process only.

Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Footprint", "measure_footprint", "process_footprint_bytes"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one process.

    Attributes:
        footprint_bytes: see the module's text.
        source: where the figure comes from (`phys_footprint`, `status`, `statm`, `getrusage`); figures of different
            sources must not be compared.
    """

    footprint_bytes: int
    source: str


def measure_footprint(pid: int | None = None, *, proc: Path = Path("/proc")) -> Footprint:
    """The footprint of a process now.

    Args:
        pid: whose; this process by default.
        proc: where the process file system is mounted.

    Raises:
        ProcessLookupError: no such process, or the platform tells only about this one.
    """
    if sys.platform == "darwin":
        return Footprint(_phys_footprint_bytes(os.getpid() if pid is None else pid), "phys_footprint")
    folder = proc / ("self" if pid is None else str(pid))
    return _from_status(folder / "status") or _from_statm(folder / "statm") or _from_getrusage(pid)


def process_footprint_bytes(pid: int | None = None) -> int:
    """`measure_footprint` without its source, for statistics."""
    return measure_footprint(pid).footprint_bytes


def _from_status(path: Path) -> Footprint | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    if "RssAnon" not in fields:
        return None
    kibibytes = sum(int(fields[name][0]) for name in ("RssAnon", "RssShmem", "VmSwap") if name in fields)
    return Footprint(kibibytes * 1024, "status")


def _from_statm(path: Path) -> Footprint | None:
    try:
        resident_pages, shared_pages = map(int, path.read_text().split()[1:3])
    except (OSError, ValueError):
        return None
    return Footprint((resident_pages - shared_pages) * resource.getpagesize(), "statm")


def _from_getrusage(pid: int | None) -> Footprint:
    if pid not in (None, os.getpid()):
        raise ProcessLookupError(f"no process {pid}, or this platform tells only about the asking process")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Footprint(peak * (1 if sys.platform == "darwin" else 1024), "getrusage")


class _RusageInfoV0(ctypes.Structure):
    """`struct rusage_info_v0` of <sys/resource.h>."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_interrupt_wkups", ctypes.c_uint64),
        ("ri_pageins", ctypes.c_uint64),
        ("ri_wired_size", ctypes.c_uint64),
        ("ri_resident_size", ctypes.c_uint64),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("ri_proc_start_abstime", ctypes.c_uint64),
        ("ri_proc_exit_abstime", ctypes.c_uint64),
    )


def _phys_footprint_bytes(pid: int) -> int:
    info = _RusageInfoV0()
    library = ctypes.CDLL("/usr/lib/libSystem.B.dylib", use_errno=True)
    if library.proc_pid_rusage(pid, 0, ctypes.byref(info)) != 0:
        raise ProcessLookupError(ctypes.get_errno(), f"proc_pid_rusage tells nothing about process {pid}")
    return int(info.ri_phys_footprint)
