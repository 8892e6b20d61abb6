"""A log's way out that never makes who logs wait: standard error, whoever reads it or does not.

Theory of operation. A pipe that nobody reads is full after a few hundred lines, and writing to it waits from then on:
whoever logs next, be it the event loop, stands still, and so does everybody who waits for it; not even SIGTERM would
be heard. So bytes are written only where the system says that they are taken at once, in pieces that a pipe takes
whole. What is not taken waits here for a thread that exists only meanwhile, up to a bound; lines beyond it are
dropped and counted. Nearly always nothing waits, and a line costs one call of the system more than it would.

The descriptor is shared with others (a shell, a parent), so it is not made non-blocking: it would be so for them, too.

Imports the standard library only.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

__all__ = ["UnblockedStream", "descriptor_of"]

MOST_WAITING_BYTES: Final = 1 << 20
PIECE_BYTES: Final = select.PIPE_BUF
"""A pipe or terminal that is ready takes so much."""
_LOOK_MS: Final = 500


def descriptor_of(stream: TextIO) -> int | None:
    """The file descriptor behind a stream; None where it has none, as in tests."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


class UnblockedStream:
    """The part of a text stream that a log handler uses. From any thread; owner: `LogSetup`.

    Args:
        fd: open for writing; stays open.
        lost: told, on a thread of its own, how many lines were dropped, once there is room again.
        most_bytes: that may wait.
    """

    def __init__(self, fd: int, lost: Callable[[int], None], *, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self._fd = fd
        self._lost = lost
        self._most_bytes = most_bytes
        self._lock = threading.RLock()  # a finaliser may log in the middle of a line of the same thread
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped_lines = 0
        self._writer: threading.Thread | None = None
        self._is_closed = False
        self._is_in_line = False  # what was written last ended in the middle of a line

    def write(self, text: str) -> int:
        """Write whole lines, or have them wait; returns the characters.

        Raises:
            OSError: nobody can read them any more, or the disk behind is full.
        """
        data = text.encode("utf-8", "backslashreplace")
        with self._lock:
            if not self._waiting:
                rest = self._write_now(b"\n" + data if self._is_in_line else data)
                if rest:  # of a line that was begun: it is kept whatever the bound
                    self._keep(rest)
            elif self._waiting_bytes + len(data) <= self._most_bytes:
                self._keep(data)
            else:
                self._dropped_lines += 1
        return len(text)

    def flush(self) -> None:
        """Nothing is held that could be written."""

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait so long at most for whoever reads what waits; the rest is dropped. The descriptor stays open."""
        writer = self._writer
        if writer is not None:
            writer.join(timeout_s)
        with self._lock:
            self._is_closed = True

    def _keep(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._writer is None and not self._is_closed:
            self._writer = threading.Thread(target=self._write_waiting, name="kvd-log-writer", daemon=True)
            self._writer.start()

    def _write_now(self, data: bytes) -> bytes:
        """Write what is taken at once; returns the rest."""
        while data and self._takes(0):
            try:
                data = data[os.write(self._fd, data[:PIECE_BYTES]) :]
            except BlockingIOError:  # somebody else made it non-blocking
                break
            self._is_in_line = bool(data)
        return data

    def _takes(self, timeout_ms: int) -> bool:
        """Whether writing would not wait: there is room, or an error to hear of."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(timeout_ms))

    def _write_waiting(self) -> None:
        while not self._is_closed:
            if not self._takes(_LOOK_MS):
                continue
            with self._lock:
                self._write_first()
                if self._waiting:
                    continue
                dropped, self._dropped_lines = self._dropped_lines, 0
                self._writer = None
            if dropped:
                self._lost(dropped)
            return

    def _write_first(self) -> None:
        try:
            rest = self._write_now(self._waiting[0])
        except OSError:  # nobody will ever read it
            self._dropped_lines += len(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
            return
        self._waiting_bytes -= len(self._waiting[0]) - len(rest)
        if rest:
            self._waiting[0] = rest
        else:
            self._waiting.popleft()
