"""HTTP connections that are read by httptools; its absence makes importing this module fail.

May import uvicorn and kvd.gateway.connections.
"""

from __future__ import annotations

from enum import Enum

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvd.gateway.connections import MAX_HEAD_BYTES, Patience


class _Place(Enum):
    """Where in a message the client is."""

    BETWEEN = "between"
    HEAD = "head"
    BODY = "body"


class Swift(Patience, HttpToolsProtocol):
    """Reads with httptools, which tells of each part of a message but bounds no head: that is done here."""

    _place = _Place.BETWEEN
    _head_bytes = 0
    _has_moved = False

    def data_received(self, data: bytes) -> None:
        """Read, and look whether the head is there and how long it is."""
        self._has_moved = False
        super().data_received(data)
        if self._place is not _Place.HEAD or self._has_moved:  # what a head follows in one read is no part of it
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes <= MAX_HEAD_BYTES or self.transport.is_closing():
            return
        if self._is_answering():  # a refusal would stand in the middle of that answer
            self.flow.pause_reading()
        else:
            self.send_400_response("Invalid HTTP request received.")

    def lacks_head(self) -> bool:
        """Line breaks before a request are no part of it: they put off nothing.

        Whoever sends while it is being answered is waited for when that is done: no answer is cut off for what comes
        after its request, be it the line break that some clients put behind a body.
        """
        if self._is_answering():
            return False
        return self._place is _Place.HEAD or (self._place is _Place.BETWEEN and not self._has_moved)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # ---- the parser calls these ----

    def on_message_begin(self) -> None:
        """A head begins."""
        self._place = _Place.HEAD
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, but not what follows a body: the request is being answered by its head."""
        if self._place is _Place.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._place, self._has_moved = _Place.BODY, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is, too."""
        self._place, self._has_moved = _Place.BETWEEN, True
        super().on_message_complete()


__all__ = ["Swift"]
