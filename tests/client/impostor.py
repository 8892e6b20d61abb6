"""A server that is no daemon."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path


class Impostor:
    """A server that answers the first request with fixed bytes."""

    def __init__(self, path: Path, answer: Callable[[int], bytes]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(self._answer(1))
            connection.recv(1 << 16)

    def close(self) -> None:
        """End the thread."""
        self._thread.join(20)
        self._socket.close()
