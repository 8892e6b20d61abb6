"""What a process has open: descriptors, Python threads, children. Taken before a test and compared after it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

DRAIN_S = 5.0
"""Longest wait for what is on its way out when a test ends."""


@dataclass(frozen=True)
class Inventory:
    """What this process had open at one moment.

    Attributes:
        fds: descriptors and what they refer to.
        threads: Python threads.
        children: processes that run or wait to be reaped.
    """

    fds: dict[int, str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]

    @classmethod
    def take(cls) -> Inventory:
        """Look now."""
        return cls(open_fds(), frozenset(threading.enumerate()), child_pids())

    def left_behind(self, *, drain_s: float = DRAIN_S) -> str:
        """What was opened since and stays open for `drain_s`; an empty text if nothing was."""
        found = self._opened_since()
        deadline = time.monotonic() + drain_s
        if found:
            gc.collect()  # an object in a reference cycle still counts as closed in time
            found = self._opened_since()
        while found and time.monotonic() < deadline:
            time.sleep(0.01)  # a clean test never gets here
            found = self._opened_since()
        return found

    def _opened_since(self) -> str:
        now = Inventory.take()
        threads = sorted(thread.name for thread in now.threads - self.threads if thread.is_alive())
        # Devices such as /dev/urandom are opened once by libraries, for ever.
        fds = [
            f"{fd} ({target})"
            for fd, target in now.fds.items()
            if self.fds.get(fd) != target and not target.startswith("/dev/")
        ]
        kinds = {"threads": threads, "child processes": sorted(now.children - self.children), "descriptors": fds}
        return "; ".join(f"{kind} {', '.join(map(str, items))}" for kind, items in kinds.items() if items)


def open_fds() -> dict[int, str]:
    """Open descriptors of this process and what they are (Linux and macOS)."""
    found = {}
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            found[int(name)] = f"mode {status.st_mode:o} device {status.st_dev} inode {status.st_ino}"
    return found


def child_pids() -> frozenset[int]:
    """Children of this process."""
    if sys.platform.startswith("linux"):
        pids: set[int] = set()
        for task in Path("/proc/self/task").iterdir():
            try:
                pids.update(map(int, (task / "children").read_text().split()))
            except OSError:  # a thread that has just ended
                continue
        return frozenset(pids)
    listing = subprocess.run(["/bin/ps", "-axo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
    ours = (row for row in rows if row[1] == str(os.getpid()))
    return frozenset(int(row[0]) for row in ours if not row[2].endswith("/ps"))
