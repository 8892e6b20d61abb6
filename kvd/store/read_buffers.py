"""Memory that page files are read into, used again once nobody holds a view of it.

Theory of operation. A page that was read is handed on as a view and copied into its frame by the engine; a moment later
nobody needs the buffer. Fresh memory would cost a fault for each of its 4 KB, which is more than the reading. Whether a
buffer is still in use its reference count tells: every view of it counts.

May import nothing from kvd.
"""

from __future__ import annotations

import sys
import threading
from typing import Final

_OWN_REFERENCES: Final = 3
"""To a buffer that nobody uses, seen from `take`: the list's, the loop's, the question's."""


class ReadBuffers:
    """Buffers of a few lengths. Safe from any thread.

    Args:
        most_bytes: how much is remembered in all; what is asked for beyond that is fresh.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []

    def take(self, n_bytes: int) -> bytearray:
        """A buffer of that length with any content; it is the caller's while he holds it or a view of it."""
        with self._lock:
            for buffer in self._buffers:
                if len(buffer) == n_bytes and sys.getrefcount(buffer) <= _OWN_REFERENCES:
                    return buffer
            made = bytearray(n_bytes)
            self._buffers.append(made)
            while sum(map(len, self._buffers)) > self._most_bytes:
                del self._buffers[0]  # whoever uses it keeps it alive
            return made


__all__ = ["ReadBuffers"]
