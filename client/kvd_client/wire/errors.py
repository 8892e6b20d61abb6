"""Errors of the wire.

WireError
├── ProtocolError      peer: its bytes are not the protocol; the connection is of no further use
└── EncodeError        ours: a message cannot be sent; the connection is as it was before
    ├── MessageTooLarge
    └── TextNotEncodable
"""

from __future__ import annotations


class WireError(Exception):
    """Base of the wire's errors."""


class ProtocolError(WireError):
    """The peer broke the protocol. Every later call of `next_event` raises the same error.

    Args:
        message: which rule was broken, with the figures.
        request_id: id of the request or response at fault, None where it is not known.
    """

    def __init__(self, message: str, *, request_id: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id


class EncodeError(WireError):
    """A message holds something that msgpack cannot carry or the peer does not take; nothing was sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class MessageTooLarge(EncodeError):
    """A message is larger than the peer accepts; nothing was sent.

    Args:
        message_bytes: bytes of the encoded message.
        limit_bytes: the most the peer accepts.
    """

    def __init__(self, message_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"the message has {message_bytes} bytes, the peer accepts {limit_bytes}")
        self.message_bytes = message_bytes
        self.limit_bytes = limit_bytes


class TextNotEncodable(EncodeError):
    """A string holds a lone surrogate, which UTF-8 and so msgpack cannot carry; nothing was sent."""
