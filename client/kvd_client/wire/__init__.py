"""The protocol without I/O: bytes in, frozen events out, bytes returned for sending; the same code for both roles.

- `codes`: the table of error names and integer codes, and the error object as it travels.
- `connection`: the state of one connection, ids in flight in both directions.
- `errors`: what can be wrong with bytes of the peer, or with a message of ours.
- `events`: what `Connection.next_event` returns.
- `framing`: cuts a byte stream into whole, checked msgpack messages inside fixed bounds; `quick`: reads the usual ones
  of them faster. `sendable`: the same bounds on what is sent, so that no message of ours ends the connection.

May import msgpack and the standard library only; never kvd, never a socket.
"""

from kvd_client.wire.codes import CODES, NAMES, ErrorObject
from kvd_client.wire.connection import Connection
from kvd_client.wire.errors import EncodeError, MessageTooLarge, ProtocolError, TextNotEncodable, WireError
from kvd_client.wire.events import (
    CancelReceived,
    ErrorNotified,
    Event,
    NotificationReceived,
    RequestReceived,
    RequestRefused,
    ResponseReceived,
    StreamReceived,
)
from kvd_client.wire.framing import CLIENT_LIMITS, SERVER_LIMITS, WireLimits

__all__ = [
    "CLIENT_LIMITS",
    "CODES",
    "NAMES",
    "SERVER_LIMITS",
    "CancelReceived",
    "Connection",
    "EncodeError",
    "ErrorNotified",
    "ErrorObject",
    "Event",
    "MessageTooLarge",
    "NotificationReceived",
    "ProtocolError",
    "RequestReceived",
    "RequestRefused",
    "ResponseReceived",
    "StreamReceived",
    "TextNotEncodable",
    "WireError",
    "WireLimits",
]
