"""How many descriptors and threads this process has: what leaks beside memory. Imports the standard library only.

Descriptors are listed in `/dev/fd`, which Linux and macOS have. Threads are the operating system's, native ones of BLAS
and mlx included: `/proc/self/task` on Linux, `proc_pidinfo` on macOS; elsewhere only Python's own are known.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

__all__ = ["count_open_files", "count_threads"]

_PROC_PIDTASKINFO = 4
"""`PROC_PIDTASKINFO` of <sys/proc_info.h>."""


class _TaskInfo(ctypes.Structure):
    """`struct proc_taskinfo` of <sys/proc_info.h>; its times and counters are of no interest here."""

    _fields_ = (
        ("sizes_and_times", ctypes.c_uint64 * 6),
        ("counters", ctypes.c_int32 * 9),
        ("pti_threadnum", ctypes.c_int32),
        ("rest", ctypes.c_int32 * 2),
    )


def count_open_files(folder: str = "/dev/fd") -> int:
    """Open descriptors of this process, that of the listing itself not counted; 0 where the system does not tell.

    Args:
        folder: has an entry for each.
    """
    try:
        return max(0, len(os.listdir(folder)) - 1)
    except OSError:
        return 0


def count_threads() -> int:
    """Threads of this process."""
    if sys.platform == "darwin":
        return _mac_threads() or threading.active_count()
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _mac_threads() -> int:
    info = _TaskInfo()
    library = ctypes.CDLL("/usr/lib/libSystem.B.dylib", use_errno=True)
    room = ctypes.sizeof(info)
    filled = library.proc_pidinfo(os.getpid(), _PROC_PIDTASKINFO, ctypes.c_uint64(0), ctypes.byref(info), room)
    return int(info.pti_threadnum) if filled == room else 0
