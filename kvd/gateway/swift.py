"""HTTP connections that are read by httptools; its absence makes importing this module fail.

A request that offers to go on in another protocol (Java's client offers HTTP/2 with its first one) may be answered as
what it is, but httptools takes what follows such a head for that other protocol: the body would be missing, or be read
as a request of its own. So the head is said again without the offer, to h11, which has the connection from then on.
A connection whose first request is of HTTP/1.0 is h11's, too: uvicorn would answer it in chunks here.

May import uvicorn and kvd.gateway.connections.
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvd.gateway.connections import MAX_HEAD_BYTES, Patience, Patient

MAX_LINE_BYTES = 8192
"""A first line of which more has come is read as it comes, whatever its version."""


class _Place(Enum):
    """Where in a message the client is."""

    BETWEEN = "between"
    HEAD = "head"
    BODY = "body"


class Swift(Patience, HttpToolsProtocol):
    """Reads with httptools, which tells of each part of a message but bounds no head: that is done here."""

    cycle: Any  # None before the first request, whatever uvicorn's annotation says
    _place = _Place.BETWEEN
    _head_bytes = 0
    _has_moved = False
    _is_handed_over = False
    _reading = b""
    _first: bytes | None = b""
    """What came before the end of the connection's first line, which says the version; None when it is known."""

    def data_received(self, data: bytes) -> None:
        """Read, and look whether the head is there and how long it is."""
        if self._first is not None:
            self._first += data
            line, end, _ = self._first.lstrip(b"\r\n").partition(b"\n")
            may_go_on = not line or line[:1].isalpha()
            if not end and may_go_on and len(self._first) < MAX_LINE_BYTES:
                self._wait_for_head()
                return
            data, self._first = self._first, None
            if line.rstrip().endswith(b" HTTP/1.0"):
                self._hand_over(data.lstrip(b"\r\n"))
                return
        self._has_moved = False
        self._reading = data
        super().data_received(data)
        self._reading = b""
        if self._is_handed_over:
            return
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
        if self._is_answering() or self._is_handed_over:
            return False
        return self._place is _Place.HEAD or (self._place is _Place.BETWEEN and not self._has_moved)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not bool(self.cycle.response_complete)

    # ---- offers of another protocol ----

    def _should_upgrade(self) -> bool:
        """Of a head with an offer: it makes no request here."""
        return True

    def handle_websocket_upgrade(self) -> None:
        """Go on with h11: uvicorn calls this, whatever was offered, while it handles httptools' `HttpParserUpgrade`."""
        if self._is_answering():  # the offer was sent before the answer was there: there is no place for its own
            self.transport.close()
            return
        error = sys.exception()
        assert error is not None
        rest = self._reading[error.args[0] :]
        kept = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"http2-settings")]
        lines = [
            b"%b: %b\r\n" % (name, _without_offer(value) if name == b"connection" else value) for name, value in kept
        ]
        version = self.scope["http_version"].encode()
        head = b"%b %b HTTP/%b\r\n" % (self.scope["method"].encode(), self.url, version)
        self._hand_over(head + b"".join(lines) + b"\r\n" + rest)

    def _hand_over(self, data: bytes) -> None:
        """Let h11 have the connection, beginning with this."""
        self._is_handed_over = True
        self._stop_waiting()
        self.connections.discard(self)
        heir = Patient(self.config, self.server_state, self.app_state, self.loop)
        heir.connection_made(self.transport)
        self.transport.set_protocol(heir)
        heir.data_received(data)

    # ---- the parser calls these ----

    def on_message_begin(self) -> None:
        """A head begins."""
        self._place = _Place.HEAD
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, but not what follows a body: the request is being answered by its head."""
        if self._place is not _Place.HEAD:
            return
        if name.lower() == b"host" and any(known == b"host" for known, _ in self.headers):
            raise ValueError("two hosts")  # httptools makes a refusal of it
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._place, self._has_moved = _Place.BODY, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is, too."""
        self._place, self._has_moved = _Place.BETWEEN, True
        super().on_message_complete()


def _without_offer(connection: bytes) -> bytes:
    """A `Connection` header's value without what belongs to an offer."""
    tokens = (token.strip() for token in connection.split(b","))
    return b", ".join(token for token in tokens if token.lower() not in (b"upgrade", b"http2-settings"))


__all__ = ["Swift"]
