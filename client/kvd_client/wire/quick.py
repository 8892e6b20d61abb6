"""The usual message, decoded by the C decoder alone; whatever is unusual is left to the scanner.

Theory of operation. The scanner (`framing`) looks at every value's header before an object is made, in Python: that
costs more than everything else about a message. Nearly all messages are small and plain: maps and lists of strings and
numbers. `Quick` decodes them with `msgpack.Unpacker` under limits so tight that nothing large can be announced (a list
of `_MAX_CHILDREN` at most, the decoder's own stack of 1,024 levels, so a few dozen megabytes at the very worst and for
a moment), and then walks the *objects* for what the protocol asks of the structure: kinds of values, text as keys,
depth, number. A message that does not pass, for whatever reason, is not judged here: the scanner reads the same bytes
again and says exactly what is wrong with them, or that nothing is. The one thing that is not seen here is a value
which a later one of the same key replaced: it is gone, whatever it was.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

import msgpack

from kvd_client.wire.events import StreamReceived
from kvd_client.wire.framing import WireLimits
from kvd_client.wire.sendable import FLAT_VALUES, is_flat_map

QUICK_BYTES: Final = 1 << 16
"""Most buffered bytes that are read this way: what a socket gives at once, several times over."""

_FIRST_BYTES: Final = 1 << 10
_MAX_CHILDREN: Final = 4096
_MAX_DEPTH: Final = 16
_MAX_VALUES: Final = 8192
_TEXT: Final = frozenset({str})
_SCALARS: Final = frozenset({str, int, float, bool, type(None), bytes})


def is_within(limits: WireLimits) -> bool:
    """Whether nothing that is read this way can exceed these bounds: a value takes at least a byte."""
    enough = limits.max_message_bytes >= QUICK_BYTES and limits.max_values >= QUICK_BYTES
    return enough and limits.max_depth >= _MAX_DEPTH


class Quick:
    """A reader of the bytes it is filled with. Owner: one `Connection`.

    Attributes:
        has_run_out: nothing more can be decoded: the bytes end, or what comes next is unusual.
        is_cut: there were more than `QUICK_BYTES`, which is all it reads.
        is_spent: all bytes were messages that were returned.
        taken_bytes: of the messages that were returned.
    """

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(
            raw=False,
            strict_map_key=True,
            unicode_errors="strict",
            read_size=_FIRST_BYTES,  # of its buffer, which grows to what is fed
            max_buffer_size=QUICK_BYTES,
            max_str_len=QUICK_BYTES,
            max_bin_len=QUICK_BYTES,
            max_array_len=_MAX_CHILDREN,
            max_map_len=_MAX_CHILDREN,
            max_ext_len=0,
        )
        self._unpack, self._tell = self._unpacker.unpack, self._unpacker.tell
        self._left: list[Any] = []  # the one message that `text_events` decoded and left to `next_message`
        self._length_bytes = 0
        self._before_bytes = 0
        self.taken_bytes = 0
        self.has_run_out = self.is_cut = False
        self.is_spent = True

    def fill(self, data: bytes | bytearray) -> None:
        """Read these bytes next, whole messages, the last one perhaps cut off; only where `is_spent`."""
        self.is_cut = len(data) > QUICK_BYTES
        if self.is_cut:
            data = data[:QUICK_BYTES]
        self._before_bytes = self._tell()
        self._unpacker.feed(data)
        self._length_bytes = len(data)
        self.taken_bytes = 0
        self.is_spent = self.has_run_out = False

    def text_events(self, in_flight: Set[int]) -> list[StreamReceived]:
        """The stream events of text that come next, for these requests: read in one go, since there may be many.

        What comes after them is for `next_message`.
        """
        events: list[StreamReceived] = []
        unpack, tell, keep = self._unpack, self._tell, events.append
        while not (self._left or self.has_run_out or self.is_spent):
            try:
                message = unpack()
            except (ValueError, msgpack.UnpackException, RecursionError):  # not all there, or unusual
                self.has_run_out = True
                break
            if (
                type(message) is list
                and len(message) == 3
                and message[0] == 2
                and type(message[0]) is int
                and message[1] == "stream"
                and type(params := message[2]) is list
                and len(params) == 2
                and type(request_id := params[0]) is int
                and request_id in in_flight
                and type(event := params[1]) is dict
                and len(event) == 2
                and type(event.get("type")) is str
                and type(event.get("text")) is str
            ):
                keep(StreamReceived(request_id, event))
                self.taken_bytes = tell() - self._before_bytes
                self.is_spent = self.taken_bytes == self._length_bytes
            else:
                self._left.append(message)
        return events

    def next_message(self) -> list[Any] | None:
        """The next message if it is whole and usual; None: read on with the scanner, behind `taken_bytes`."""
        if self.has_run_out or self.is_spent:
            return None
        try:
            message = self._left.pop() if self._left else self._unpack()
        except (ValueError, msgpack.UnpackException, RecursionError):
            self.has_run_out = True
            return None
        if type(message) is not list:
            return None
        length = len(message)
        if not ((length == 3 and _is_event(message)) or (3 <= length <= 4 and _is_usual(message))):
            return None
        self.taken_bytes = self._tell() - self._before_bytes
        self.is_spent = self.taken_bytes == self._length_bytes
        return message


def _is_event(message: list[Any]) -> bool:
    """Whether a message of three is a stream event without anything nested in it."""
    if message[0] != 2 or type(params := message[2]) is not list or len(params) != 2:
        return False
    event = params[1]
    if type(event) is not dict or len(event) > _MAX_DEPTH or type(params[0]) is not int:
        return False
    if len(event) == 2 and type(event.get("text")) is str and type(event.get("type")) is str:  # nearly all of them
        return True
    return _TEXT.issuperset(map(type, event)) and _SCALARS.issuperset(map(type, event.values()))


def _is_usual(message: list[Any]) -> bool:
    """Whether the scanner would let it pass: iterative, so that depth is bounded by what is counted."""
    body = message[-1]
    if type(body) is list and len(body) == 1:
        body = body[0]
    # a map of plain values and short lists, as nearly all are; it is less deep than `_MAX_DEPTH`
    if type(body) is dict and is_flat_map(body) and _SCALARS.issuperset(map(type, message[:-1])):
        return len(message) + 2 * len(body) + FLAT_VALUES <= _MAX_VALUES
    level: list[Any] = [message]
    count = 0
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            if type(container) is dict:
                if not _TEXT.issuperset(map(type, container)):
                    return False
                values = container.values()
                count += 2 * len(container)
            else:
                values = container
                count += len(container)
            if _SCALARS.issuperset(map(type, values)):
                continue
            for value in values:
                kind = type(value)
                if kind not in _SCALARS:
                    if kind is not list and kind is not dict:
                        return False
                    below.append(value)
        if count > _MAX_VALUES:
            return False
        if not below:
            return True
        level = below
    return False


__all__ = ["QUICK_BYTES", "Quick", "is_within"]
