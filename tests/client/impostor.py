"""A server that is no daemon."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path


class Impostor:
    """A server that answers the first request with fixed bytes.

    Args:
        path: where it listens.
        answer: to the request of this id.
        hangs_up: it says nothing more then; else it waits for the other end.
    """

    def __init__(self, path: Path, answer: Callable[[int], bytes], *, hangs_up: bool = False) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._answer, self._hangs_up = answer, hangs_up
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(self._answer(1))
            if self._hangs_up:
                connection.shutdown(socket.SHUT_WR)
            connection.recv(1 << 16)

    def close(self) -> None:
        """End the thread."""
        self._thread.join(20)
        self._socket.close()
