"""Who is at a socket's path, and the removal of one that nobody answers. Imports the standard library only."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Final, Literal

_PROBE_S: Final = 2.0

SocketState = Literal["absent", "other", "stale", "answered"]
"""Nothing there; no socket; a socket at which nobody listens; one at which somebody does."""


def socket_state(path: Path) -> SocketState:
    """What is at `path`. A full queue, or one that may not be entered, counts as answered."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return "other"
    except OSError:
        return "absent"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return "absent"
            return "stale" if error.errno == errno.ECONNREFUSED else "answered"
    return "answered"


def remove_stale(path: Path) -> bool:
    """Remove a socket at which nobody listens; whether there was one.

    The folder is locked as a daemon locks it that binds there, so that no new socket is taken for the old one.

    Raises:
        OSError: it cannot be removed.
    """
    if socket_state(path) != "stale":
        return False
    handle = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if socket_state(path) != "stale":
            return False
        path.unlink()
    finally:
        os.close(handle)
    return True


__all__ = ["SocketState", "remove_stale", "socket_state"]
