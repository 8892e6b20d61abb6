"""Cuts a byte stream into whole msgpack messages inside fixed bounds, before a single object is made.

Theory of operation. A decoder that builds objects as bytes arrive can be made to allocate far more than it was sent:
an array header of five bytes announces sixteen million elements, sixteen megabytes of empty maps become a gigabyte of
Python objects. So a scanner walks the *structure* first: it looks at header bytes, jumps over string payloads and
keeps one counter a nesting level. It knows the length a message announces long before the bytes are there, and refuses
at the header what would exceed a bound. It stops where the bytes end and goes on from there, so cost is linear however
the stream is split. Only a complete message inside all bounds reaches `msgpack.Unpacker`, whose own limits are
then set to the message's length. Messages are dozens of values; the walk costs little beside one token.

Rejected: `msgpack.Unpacker` alone. It has no bound on nesting or on the number of values, and a list's memory is
allocated from the announced length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvd_client.wire.errors import ProtocolError

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Bounds of one direction.

    Attributes:
        max_message_bytes: a message of the peer, headers included.
        max_depth: nested containers in a message, the outer array included.
        max_values: values in a message, containers and map keys included.
        max_send_bytes, max_send_depth, max_send_values: the same of a message of ours, as the peer is
            known to accept it.
    """

    max_message_bytes: int = 64 * MIB
    max_depth: int = 64
    max_values: int = 1 << 20
    max_send_bytes: int = 16 * MIB
    max_send_depth: int = 64
    max_send_values: int = 1 << 18


CLIENT_LIMITS: Final = WireLimits()
SERVER_LIMITS: Final = WireLimits(
    max_message_bytes=16 * MIB, max_values=1 << 18, max_send_bytes=64 * MIB, max_send_values=1 << 20
)

# One entry a leading byte: (kind, a, b). SCALAR: a = total bytes. BLOB: a = bytes of the length field, b = length when
# a is 0. ARRAY and MAP: the same with elements. REFUSED: extension types and the one unassigned byte.
_SCALAR, _BLOB, _ARRAY, _MAP, _REFUSED = range(5)


def _build_table() -> tuple[tuple[int, int, int], ...]:
    """The msgpack specification's format table."""
    table: list[tuple[int, int, int]] = [(_REFUSED, 0, 0)] * 256
    for byte in (*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3):
        table[byte] = (_SCALAR, 1, 0)
    for byte in range(0x80, 0x90):
        table[byte] = (_MAP, 0, byte & 0x0F)
    for byte in range(0x90, 0xA0):
        table[byte] = (_ARRAY, 0, byte & 0x0F)
    for byte in range(0xA0, 0xC0):
        table[byte] = (_BLOB, 0, byte & 0x1F)
    for byte, width in (
        (0xCA, 4),
        (0xCB, 8),
        *((0xCC + i, 1 << i) for i in range(4)),
        *((0xD0 + i, 1 << i) for i in range(4)),
    ):
        table[byte] = (_SCALAR, 1 + width, 0)
    for byte, width in ((0xC4, 1), (0xC5, 2), (0xC6, 4), (0xD9, 1), (0xDA, 2), (0xDB, 4)):
        table[byte] = (_BLOB, width, 0)
    table[0xDC], table[0xDD] = (_ARRAY, 2, 0), (_ARRAY, 4, 0)
    table[0xDE], table[0xDF] = (_MAP, 2, 0), (_MAP, 4, 0)
    return tuple(table)


_TABLE: Final = _build_table()
_IS_STR: Final = tuple(0xA0 <= byte <= 0xBF or 0xD9 <= byte <= 0xDB for byte in range(256))


class Framer:
    """The unparsed bytes of one direction. Owner: one `Connection`; `feed` and `next_frame` are the only mutators.

    Buffering is bounded as long as `next_frame` is called until it returns None after each `feed`: what stays is part
    of one message, at most `max_message_bytes`.
    """

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._start_message()

    def _start_message(self) -> None:
        self._cursor = 0  # where the next value's header is; may lie beyond the bytes that have arrived
        self._values = 0  # whose headers were read
        self._announced = 1  # those and the ones that containers have announced
        self._pending: list[int] = []  # values still missing, per open container, outermost first
        self._is_map: list[bool] = []

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the message that is arriving."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes in the order in which they arrived."""
        self._buffer += data

    @property
    def unread(self) -> bytearray | None:
        """What is buffered, if it begins with a message that was not looked at yet; not to be changed."""
        return self._buffer if self._values == 0 and self._buffer else None

    def skip(self, count_bytes: int) -> None:
        """Drop whole messages from the front that somebody else has read; only where `unread` is not None."""
        del self._buffer[:count_bytes]

    def next_frame(self) -> bytes | None:
        """The next whole message, or None when more bytes are needed.

        Raises:
            ProtocolError: the bytes are no message or announce one outside the bounds.
        """
        if not self._scan():
            return None
        frame = bytes(self._buffer[: self._cursor])
        del self._buffer[: self._cursor]
        self._start_message()
        return frame

    def _scan(self) -> bool:
        """Walk values until the message is complete (True) or the bytes end (False)."""
        buffer, pending, is_map = self._buffer, self._pending, self._is_map
        available = len(buffer)
        while pending or self._values == 0:
            if self._cursor >= available:
                return False
            lead = buffer[self._cursor]
            kind, width, count = _TABLE[lead]
            if self._values == 0 and kind != _ARRAY:
                raise ProtocolError(f"a message is an array, this one starts with byte 0x{lead:02x}")
            if kind == _REFUSED:
                raise ProtocolError(f"byte 0x{lead:02x}: extension types are not part of the protocol")
            if is_map and is_map[-1] and pending[-1] % 2 == 0 and not _IS_STR[lead]:
                raise ProtocolError("the keys of a map must be strings")
            if kind == _SCALAR:
                self._cursor += width
                children = 0
            else:
                if self._cursor + 1 + width > available:
                    return False
                if width:
                    count = int.from_bytes(buffer[self._cursor + 1 : self._cursor + 1 + width])
                self._cursor += 1 + width + (count if kind == _BLOB else 0)
                children = 0 if kind == _BLOB else count * 2 if kind == _MAP else count
            self._account(children, kind == _MAP)
        return self._cursor <= available

    def _account(self, children: int, children_are_pairs: bool) -> None:
        """Count one value whose header was read, check the bounds, and close containers that it completes."""
        limits, pending, is_map = self._limits, self._pending, self._is_map
        if not pending and children not in (3, 4):
            raise ProtocolError(f"a message has 3 or 4 elements, this one {children}")
        if pending:
            pending[-1] -= 1
        self._values += 1
        if children:
            pending.append(children)
            is_map.append(children_are_pairs)
            if len(pending) > limits.max_depth:
                raise ProtocolError(f"containers are nested more than {limits.max_depth} deep")
        self._announced += children
        if self._announced > limits.max_values:
            raise ProtocolError(f"a message has more than {limits.max_values} values")
        # Every value still to come takes at least a byte, so this is a lower bound of the message's length.
        if self._cursor + self._announced - self._values > limits.max_message_bytes:
            raise ProtocolError(f"a message is larger than {limits.max_message_bytes} bytes")
        while pending and pending[-1] == 0:
            pending.pop()
            is_map.pop()
