"""One connection without its socket: which ids are in flight each way, what the bytes mean, which bytes to send.

Both ends use this class. Bytes go in with `feed`, facts come out of `next_event` until it returns None; every `send_*`
returns the bytes to write and has already counted the message as sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from kvd_client.wire.codes import ErrorObject
from kvd_client.wire.errors import EncodeError, MessageTooLarge, ProtocolError, TextNotEncodable
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
from kvd_client.wire.framing import CLIENT_LIMITS, Framer, WireLimits
from kvd_client.wire.quick import QUICK_BYTES, Quick, is_within
from kvd_client.wire.sendable import check_sendable, is_flat

_REQUEST, _RESPONSE, _NOTIFICATION = 0, 1, 2
_MAX_ID = (1 << 63) - 1
_SMALL_BYTES = 1 << 13
_RESPONSE_LEAD = b"\x94\x01"
"""How a response begins."""


class Connection:
    """The protocol state of one connection. Owner: whoever owns the socket; not thread safe.

    Args:
        limits: bounds of what is accepted and sent.
    """

    def __init__(self, limits: WireLimits = CLIENT_LIMITS) -> None:
        self._limits = limits
        self._framer = Framer(limits)
        self._quick: Quick | None = None
        self._spent: Quick | None = None
        self._may_be_quick = is_within(limits)
        self._direct: bytes | None = None  # what `_quick` reads, where that is not the framer's
        self._incoming: set[int] = set()
        self._outgoing: set[int] = set()
        self._last_id = 0
        self._broken: ProtocolError | None = None
        self._packer: msgpack.Packer | None = None  # none while it packs, which is not re-entrant; see `_encode`

    @property
    def buffered_bytes(self) -> int:
        """Bytes of a message that has not arrived completely."""
        if self._quick is None:
            return self._framer.buffered_bytes
        there_bytes = self._framer.buffered_bytes if self._direct is None else len(self._direct)
        return there_bytes - self._quick.taken_bytes

    @property
    def outgoing(self) -> frozenset[int]:
        """Ids of our requests without a response."""
        return frozenset(self._outgoing)

    # ---- receiving ----

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes; call `next_event` until it returns None before feeding more."""
        if self._broken is not None:
            return
        if self._quick is not None:  # not all was asked for
            self._leave(self._quick)
        if not self._may_be_quick or len(data) > QUICK_BYTES or self._framer.buffered_bytes:
            self._framer.feed(data)
        elif data:  # nearly always: whole messages, of which nothing stays
            self._direct = bytes(data)
            self._quick, self._spent = self._spent or Quick(), None
            self._quick.fill(self._direct)

    def feed_eof(self) -> None:
        """The peer closed its side.

        Raises:
            ProtocolError: it did so inside a message.
        """
        if self._broken is None and self.buffered_bytes:
            self._fail(ProtocolError(f"the connection ended inside a message, after {self.buffered_bytes} bytes of it"))

    def drop_unfinished(self) -> None:
        """Let go of what has arrived and was not asked for: the connection is over."""
        self._framer = Framer(self._limits)
        self._quick = self._spent = self._direct = None

    def next_event(self) -> Event | None:
        """The next fact, or None when more bytes are needed.

        Raises:
            ProtocolError: the peer broke the protocol; events before the fault were returned first.
        """
        if self._broken is not None:
            raise self._broken
        quick = self._quick = self._quick or self._new_quick()
        try:
            while True:
                if quick is None:
                    frame = self._framer.next_frame()
                    if frame is None:
                        return None
                    event = self._interpret(*_decode(frame))
                elif (message := quick.next_message()) is not None:
                    event = self._interpret(message, True)
                else:
                    # what was beyond its bytes has its own turn, unless one message alone is larger than that
                    goes_on = quick.is_cut and quick.taken_bytes > 0
                    self._leave(quick)
                    quick = None
                    if not self._framer.buffered_bytes:
                        return None
                    if goes_on:
                        quick = self._quick = self._new_quick()
                    continue
                if event is not None:
                    return event
        except ProtocolError as error:
            self._fail(error)
        return None

    def text_events(self) -> list[StreamReceived]:
        """The text events that come next, for whoever has many to read; then go on with `next_event`."""
        events: list[StreamReceived] = []
        direct, quick = self._direct, self._quick
        if direct is not None and quick is not None and not quick.taken_bytes and direct[:2] == _RESPONSE_LEAD:
            return events  # looking would cost more than the answer
        while self._broken is None:
            quick = self._quick = self._quick or self._new_quick()
            if quick is None:
                break
            events += quick.text_events(self._outgoing)
            if not ((quick.has_run_out or quick.is_spent) and quick.is_cut and quick.taken_bytes):
                break
            self._leave(quick)
        return events

    def _new_quick(self) -> Quick | None:
        """A quick reader of what the framer has; None where the scanner has begun a message already."""
        data = self._framer.unread if self._may_be_quick else None
        if data is None:
            return None
        quick, self._spent = self._spent or Quick(), None
        quick.fill(data)
        return quick

    def _leave(self, quick: Quick) -> None:
        """A quick reader has read what it could; it is kept for the next bytes if nothing is left in it."""
        if self._direct is None:
            self._framer.skip(quick.taken_bytes)
        elif not quick.is_spent:
            self._framer.feed(self._direct[quick.taken_bytes :])
        self._direct = self._quick = None
        self._spent = quick if quick.is_spent else None

    def _fail(self, error: ProtocolError) -> None:
        self._broken = error  # whose traceback refers to us: what is not dropped stays until a full collection
        self.drop_unfinished()
        raise error

    def _interpret(self, message: list[object], is_text: bool) -> Event | None:
        """Turn one whole message into an event; None for messages that say nothing new."""
        kind, length = message[0], len(message)
        if type(kind) is int:
            if kind == _RESPONSE and length == 4 and is_text:
                return self._response(message)
            if kind == _REQUEST and length == 4:
                return self._request(message, is_text)
            if kind == _NOTIFICATION and length == 3 and is_text:
                return self._notification(message)
            if (kind, length) in ((_RESPONSE, 4), (_NOTIFICATION, 3)):
                raise ProtocolError("a string is not UTF-8")
        raise ProtocolError(f"no message has type {kind!r:.40} and {length} elements")

    def _request(self, message: list[object], is_text: bool) -> Event:
        request_id, method, params = message[1], message[2], message[3]
        if type(request_id) is not int or not 0 <= request_id <= _MAX_ID:
            raise _no_id(request_id)
        if not isinstance(method, str) or not isinstance(params, list):
            raise ProtocolError("a request is [0, id, method, [params]]", request_id=request_id)
        if request_id in self._incoming:
            raise ProtocolError(f"request id {request_id} is in flight already", request_id=request_id)
        self._incoming.add(request_id)
        if not is_text:
            text = "a string of the request is not UTF-8 (lone surrogates cannot be carried either)"
            return RequestRefused(request_id, ErrorObject.of("invalid_text", text))
        if not params:
            return RequestReceived(request_id, method, {})
        if len(params) != 1 or not isinstance(params[0], dict):
            text = "parameters are one map with names as keys: [0, id, method, [{...}]]"
            return RequestRefused(request_id, ErrorObject.of("invalid_params", text))
        return RequestReceived(request_id, method, params[0])

    def _response(self, message: list[object]) -> Event:
        request_id = message[1]
        if type(request_id) is not int or not 0 <= request_id <= _MAX_ID:
            raise _no_id(request_id)
        if request_id not in self._outgoing:
            raise ProtocolError(f"a response to id {request_id}, which is not in flight", request_id=request_id)
        self._outgoing.remove(request_id)
        error = None if message[2] is None else ErrorObject.from_wire(message[2])
        return ResponseReceived(request_id, error, message[3])

    def _notification(self, message: list[object]) -> Event | None:
        method, params = message[1], message[2]
        if not isinstance(method, str) or not isinstance(params, list):
            raise ProtocolError("a notification is [2, method, [params]]")
        if method == "stream":
            if len(params) != 2 or not isinstance(params[1], dict):
                raise ProtocolError('a stream event is [2, "stream", [id, event]]')
            request_id = _id(params[0])
            if request_id not in self._outgoing:
                raise ProtocolError(f"a stream event of id {request_id}, which is not in flight", request_id=request_id)
            return StreamReceived(request_id, params[1])
        if method == "cancel":
            if len(params) != 1:
                raise ProtocolError('a cancellation is [2, "cancel", [id]]')
            request_id = _id(params[0])
            return CancelReceived(request_id) if request_id in self._incoming else None
        if method == "error" and len(params) == 1:
            return ErrorNotified(ErrorObject.from_wire(params[0]))
        return NotificationReceived(method, tuple(params))

    # ---- sending ----

    def send_request(self, method: str, params: Mapping[str, object]) -> tuple[int, bytes]:
        """Bytes of a request of ours and the id it was given.

        Raises:
            EncodeError: `params` cannot be sent; no id is in flight.
        """
        request_id = self._last_id + 1
        data = self._encode([_REQUEST, request_id, method, [dict(params)]])
        self._last_id = request_id
        self._outgoing.add(request_id)
        return request_id, data

    def send_response(self, request_id: int, result: object) -> bytes:
        """Bytes of the result of a request of the peer, whose id is free again.

        Raises:
            EncodeError: `result` cannot be sent; the request is still in flight.
            ValueError: no such request is in flight.
        """
        if request_id not in self._incoming:
            raise _not_in_flight(request_id)
        data = self._encode([_RESPONSE, request_id, None, result])
        self._incoming.remove(request_id)
        return data

    def send_error(self, request_id: int, error: ErrorObject) -> bytes:
        """Bytes of an error in answer to a request of the peer. Raises as `send_response`."""
        if request_id not in self._incoming:
            raise _not_in_flight(request_id)
        data = self._encode([_RESPONSE, request_id, error.to_wire(), None])
        self._incoming.remove(request_id)
        return data

    def send_stream(self, request_id: int, event: Mapping[str, object]) -> bytes:
        """Bytes of a stream event of a request of the peer. Raises as `send_response`."""
        if request_id not in self._incoming:
            raise _not_in_flight(request_id)
        text = event.get("text")
        if type(text) is str and len(text) < _SMALL_BYTES // 8 and len(event) == 2:
            packer, self._packer = self._packer or _new_packer(), None
            try:  # nearly all events
                data: bytes = packer.pack(
                    [_NOTIFICATION, "stream", [request_id, event if type(event) is dict else dict(event)]]
                )
            except (TypeError, ValueError, OverflowError):
                pass  # the usual way says what is wrong with it
            else:
                self._packer = packer
                return data
        return self._encode([_NOTIFICATION, "stream", [request_id, dict(event)]])

    def send_cancel(self, request_id: int) -> bytes:
        """Bytes that cancel a request of ours; empty when it has its response already."""
        return self._encode([_NOTIFICATION, "cancel", [request_id]]) if request_id in self._outgoing else b""

    def send_fatal(self, error: ErrorObject) -> bytes:
        """Bytes that tell the peer why the connection is closed next."""
        return self._encode([_NOTIFICATION, "error", [error.to_wire()]])

    def send_notification(self, method: str, params: list[object]) -> bytes:
        """Bytes of a notification of ours."""
        return self._encode([_NOTIFICATION, method, params])

    def _encode(self, message: list[object]) -> bytes:
        # Packing makes objects where it meets maps of other classes, or fails: the garbage collector may then close a
        # forgotten stream, whose cancellation is sent from inside and must not be written into this message.
        packer, self._packer = self._packer or _new_packer(), None
        try:
            data: bytes = packer.pack(message)
        except UnicodeEncodeError as error:
            raise TextNotEncodable(
                f"a string has a lone surrogate (U+{ord(error.object[error.start]):04X}), which UTF-8 cannot carry"
            ) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise EncodeError(f"a message cannot be encoded: {error}") from error
        if len(data) <= _SMALL_BYTES:  # it keeps the largest buffer that it ever had
            self._packer = packer
        if not is_flat(message, self._limits):
            check_sendable(message, self._limits)
        if len(data) > self._limits.max_send_bytes:
            raise MessageTooLarge(len(data), self._limits.max_send_bytes)
        return data


def _new_packer() -> msgpack.Packer:
    """A packer with a small buffer that grows: one as it comes takes a quarter of a megabyte from the system."""
    return msgpack.Packer(use_bin_type=True, buf_size=_SMALL_BYTES)


def _id(value: object) -> int:
    """A message id, checked (`True` is no id although Python calls it an integer)."""
    if type(value) is not int or not 0 <= value <= _MAX_ID:
        raise _no_id(value)
    return value


def _not_in_flight(request_id: int) -> ValueError:
    return ValueError(f"request {request_id} is not in flight")


def _no_id(value: object) -> ProtocolError:
    return ProtocolError(f"an id is an integer from 0 to 2**63 - 1, not {value!r:.40}")


def _decode(frame: bytes) -> tuple[list[object], bool]:
    """Decode a scanned frame; the flag is False when some string is not UTF-8 (its bytes then stand as surrogates)."""
    try:
        return _unpack(frame, "strict"), True
    except UnicodeDecodeError:
        return _unpack(frame, "surrogateescape"), False


def _unpack(frame: bytes, unicode_errors: str) -> list[object]:
    size = len(frame)
    unpacker = msgpack.Unpacker(
        raw=False,
        strict_map_key=True,
        unicode_errors=unicode_errors,
        max_buffer_size=size,
        max_str_len=size,
        max_bin_len=size,
        max_array_len=size,
        max_map_len=size,
        max_ext_len=0,
    )
    unpacker.feed(frame)
    try:
        message = unpacker.unpack()
    except UnicodeDecodeError:
        raise
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"a message cannot be decoded: {error}") from error
    if not isinstance(message, list):
        raise ProtocolError("a message is an array")
    return message
