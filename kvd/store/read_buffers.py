"""Memory that page files are read into, used again once nobody holds a view of it.

Theory of operation. A page that was read is handed on as a view and copied into its frame by the engine; a moment later
nobody needs the buffer. Fresh memory would cost a fault for each of its 4 KB, which is more than the reading. What is
lent is a view, made before anybody else can ask: a buffer whose length cannot be changed has a view somewhere, by the
rule of every `bytearray`. Its reference count would not tell: interpreters count borrowed names differently.

May import nothing from kvd.
"""

from __future__ import annotations

import threading


class ReadBuffers:
    """Buffers of a few lengths. Safe from any thread.

    Args:
        most_bytes: how much is remembered in all; what is asked for beyond that is fresh.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers that are remembered, in use or not."""
        with self._lock:
            return sum(map(len, self._buffers))

    def take(self, n_bytes: int) -> memoryview:
        """A writable view uint8 [n_bytes] of any content; the memory is the caller's while a view of it is left."""
        with self._lock:
            for buffer in self._buffers:
                if len(buffer) == n_bytes and not _is_viewed(buffer):
                    return memoryview(buffer)
            made = bytearray(n_bytes)
            self._buffers.append(made)
            while sum(map(len, self._buffers)) > self._most_bytes:
                del self._buffers[0]  # whoever uses it keeps it alive
            return memoryview(made)

    def trim(self) -> int:
        """Remember nothing: what nobody uses goes back to the system now, the rest with its last view.

        Returns:
            Bytes that go back now.
        """
        with self._lock:
            buffers, self._buffers = self._buffers, []
            return sum(len(buffer) for buffer in buffers if not _is_viewed(buffer))


def _is_viewed(buffer: bytearray) -> bool:
    """Whether a view of it exists. One byte less and one more: the memory stays where it is."""
    if not buffer:
        return False
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return True
    return False


__all__ = ["ReadBuffers"]
