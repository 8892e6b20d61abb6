"""Where temporary folders of tests are: in memory where there is room, so that thousands of fsyncs cost no waiting.

What a `kill -9` leaves is the same there as on a drive: the kernel keeps what was written for both. What a power cut
leaves is tested on simulated disks alone (`lossy_disk`). `TMPDIR` in the environment is somebody's wish and is kept.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

ROOM_BYTES: Final = 4 << 30
"""A memory disk with less room is left alone; containers often have one of 64 MB, and from which nothing can be run."""


def use_memory() -> None:
    """Let this process and its children make temporary folders on the memory disk, if there is one."""
    disk = Path("/dev/shm")
    if "TMPDIR" in os.environ or not (disk.is_dir() and os.access(disk, os.W_OK)):
        return
    figures = os.statvfs(disk)
    if figures.f_bavail * figures.f_frsize >= ROOM_BYTES and not figures.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = str(disk)


def short_base() -> str | None:
    """Where a folder has a path that fits a socket's address (macOS allows 103 bytes; its default is longer)."""
    for base in (tempfile.gettempdir(), "/tmp"):
        if len(base) < 20 and os.access(base, os.W_OK):
            return base
    return None


__all__ = ["short_base", "use_memory"]
