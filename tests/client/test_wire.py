"""The wire without I/O: framing over any split, bounds, ids, and the errors of malformed input."""

from __future__ import annotations

import tracemalloc
from collections.abc import ItemsView

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_client.wire import (
    CODES,
    NAMES,
    SERVER_LIMITS,
    CancelReceived,
    Connection,
    EncodeError,
    ErrorNotified,
    ErrorObject,
    Event,
    MessageTooLarge,
    NotificationReceived,
    ProtocolError,
    RequestReceived,
    RequestRefused,
    ResponseReceived,
    StreamReceived,
    TextNotEncodable,
    WireLimits,
)

SMALL = WireLimits(max_message_bytes=4096, max_depth=8, max_values=200, max_send_bytes=2048)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=40,
)
maps = st.dictionaries(st.text(), values, max_size=5)


def drain(wire: Connection) -> list[Event]:
    """All events there are now."""
    events = []
    while (event := wire.next_event()) is not None:
        events.append(event)
    return events


def pack(*messages: object) -> bytes:
    """Messages as bytes, in order."""
    return b"".join(msgpack.packb(message) for message in messages)


def heard(data: bytes, limits: WireLimits = SMALL) -> list[Event]:
    """What a fresh connection hears."""
    wire = Connection(limits)
    wire.feed(data)
    return drain(wire)


def test_codes_are_one_to_one_and_complete() -> None:
    """Each error name has one code, each code one name, and an error object survives the way there and back."""
    assert len(NAMES) == len(CODES)
    for name, code in CODES.items():
        error = ErrorObject.of(name, "why", data={"limit_bytes": 3}, retry_after_s=1.5)
        assert error.code == code
        assert NAMES[code] == name
        assert ErrorObject.from_wire(msgpack.unpackb(msgpack.packb(error.to_wire()))) == error


@given(values)
@settings(max_examples=60, deadline=None)
def test_any_error_object_is_read_without_an_exception(value: object) -> None:
    """A peer's error of any shape becomes an ErrorObject."""
    error = ErrorObject.from_wire(value)
    assert isinstance(error.name, str)
    assert isinstance(error.code, int)


@given(st.lists(st.tuples(st.text(max_size=20), maps), min_size=1, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_messages_survive_any_split(requests: list[tuple[str, dict[str, object]]], data: st.DataObject) -> None:
    """However the stream is cut, the same requests come out in the same order."""
    client, server = Connection(), Connection()
    stream = b"".join(client.send_request(method, params)[1] for method, params in requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    events: list[Event] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        server.feed(stream[start:end])
        events += drain(server)
    expected = [RequestReceived(i + 1, method, params) for i, (method, params) in enumerate(requests)]
    assert events == expected
    assert server.buffered_bytes == 0


@given(maps, values)
@settings(max_examples=40, deadline=None)
def test_a_whole_call_both_ways(event: dict[str, object], result: object) -> None:
    """Request, stream event, result: both ends agree, and the id is free afterwards."""
    client, server = Connection(), Connection()
    request_id, sent = client.send_request("m", {"a": 1})
    server.feed(sent)
    assert drain(server) == [RequestReceived(request_id, "m", {"a": 1})]
    client.feed(server.send_stream(request_id, event))
    client.feed(server.send_response(request_id, result))
    assert drain(client) == [StreamReceived(request_id, event), ResponseReceived(request_id, None, result)]
    assert client.outgoing == frozenset()
    assert client.send_cancel(request_id) == b""
    with pytest.raises(ValueError, match="not in flight"):
        server.send_response(request_id, result)


@given(st.binary(max_size=300))
@settings(max_examples=400, deadline=None)
def test_garbage_is_events_or_a_protocol_error(data: bytes) -> None:
    """Random bytes never raise anything but ProtocolError, and the error stays."""
    wire = Connection(SMALL)
    wire.feed(data)
    fault: ProtocolError | None = None
    try:
        drain(wire)
    except ProtocolError as error:
        fault = error
    if fault is not None:
        wire.feed(b"\x00")
        with pytest.raises(ProtocolError) as again:
            wire.next_event()
        assert again.value is fault
    assert wire.buffered_bytes <= SMALL.max_message_bytes


@given(st.lists(values, min_size=3, max_size=4), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_flipped_byte_is_never_a_crash(message: list[object], where: int, byte: int) -> None:
    """A message with one byte changed is understood, waits for more, or is a ProtocolError."""
    data = bytearray(pack([0, 1, "m", [{"k": message}]]))
    data[where % len(data)] = byte
    wire = Connection(SMALL)
    wire.feed(bytes(data))
    try:
        drain(wire)
        wire.feed_eof()
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "array"),
        (b"\xc1", "array"),
        (b"\x90", "3 or 4"),
        (b"\xdd\xff\xff\xff\xff", "3 or 4"),
        (pack([5, 1, "m", []]), "type 5"),
        (pack([True, 1, "m", []]), "type True"),
        (pack([0, 1, "m"]), "3 elements"),
        (pack([0, -1, "m", []]), "id"),
        (pack([0, 2**63, "m", []]), "id"),
        (pack([0, True, "m", []]), "id"),
        (pack([0, "1", "m", []]), "id"),
        (pack([0, 1, 7, []]), "a request is"),
        (pack([0, 1, "m", {}]), "a request is"),
        (pack([0, 1, "m", []], [0, 1, "m", []]), "in flight already"),
        (pack([1, 1, None, 3]), "not in flight"),
        (pack([2, "stream", [1, {}]]), "not in flight"),
        (pack([2, "stream", [1]]), "stream event"),
        (pack([2, "cancel", []]), "cancellation"),
        (pack([2, "cancel", [-3]]), "id"),
        (pack([2, 3, []]), "notification"),
        (pack([0, 1, "m", [msgpack.Timestamp(1)]]), "extension"),
        (pack([0, 1, "m", [msgpack.ExtType(9, b"x" * 300)]]), "extension"),
        (b"\x94\x00\x01\xa1m\x91\x81\x05\x06", "keys"),
        (b"\x94\x00\x01\xa1m\x91\x81\xc4\x01a\x06", "keys"),
        (b"\x94\x00\x01\xa1m\xdb\xff\xff\xff\xff", "larger than"),
        (b"\x94\x00\x01\xa1m\xc6\x00\x00\x20\x00", "larger than"),
        (b"\x94\x00\x01\xa1m\xdd\x00\xff\xff\xff", "values"),
        (b"\x94\x00\x01\xa1m\xdf\xff\xff\xff\xff", "values"),
        (b"\x94\x00\x01\xa1m" + b"\x91" * 9, "nested"),
        (b"\x94\x00\x01\xa1m\x91\x93" + (b"\xdc\x00\x50" + b"\x90" * 80) * 3, "values"),
        (b"\x93\x02\xa1\xff\x90", "UTF-8"),
    ],
)
def test_broken_input_is_named(data: bytes, words: str) -> None:
    """Each kind of malformed input gives a ProtocolError that says what is wrong."""
    with pytest.raises(ProtocolError, match=words):
        heard(data)


def test_events_before_a_fault_are_delivered_first() -> None:
    """Good messages in front of garbage count."""
    wire = Connection(SMALL)
    wire.feed(pack([0, 1, "m", [{}]]) + b"\xc1")
    assert wire.next_event() == RequestReceived(1, "m", {})
    with pytest.raises(ProtocolError):
        wire.next_event()


def test_announced_lengths_cost_nothing() -> None:
    """Headers that announce gigabytes are refused before anything is allocated for them."""
    bombs = [
        b"\x94\x00\x01\xa1m\xdb\x7f\xff\xff\xff",
        b"\x94\x00\x01\xa1m" + b"\xdd\x00\x03\xff\xff" * 50,
        b"\x94\x00\x01\xa1m" + b"\xdf\x00\x01\xff\xff\xa1k" * 50,
    ]
    tracemalloc.start()
    try:
        for bomb in bombs:
            with pytest.raises(ProtocolError):
                heard(bomb, WireLimits())
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_every_limit_is_inclusive() -> None:
    """A message of exactly the allowed length passes, one byte more does not."""
    overhead = len(pack([0, 1, "m", [{"t": "x" * 300}]])) - 300
    fits = SMALL.max_message_bytes - overhead
    assert len(heard(pack([0, 1, "m", [{"t": "x" * fits}]]))) == 1
    with pytest.raises(ProtocolError, match="larger than 4096"):
        heard(pack([0, 1, "m", [{"t": "x" * (fits + 1)}]]))


def test_an_end_inside_a_message_is_a_fault() -> None:
    """A half frame at the end of the stream is an error, an end between messages is not."""
    wire = Connection(SMALL)
    wire.feed(pack([0, 1, "m", []])[:-1])
    assert wire.next_event() is None
    with pytest.raises(ProtocolError, match="inside a message"):
        wire.feed_eof()
    clean = Connection(SMALL)
    clean.feed(pack([0, 1, "m", []]))
    assert len(drain(clean)) == 1
    clean.feed_eof()


def test_text_that_is_not_utf8_refuses_the_request_only() -> None:
    """Invalid UTF-8 in a request is `invalid_text` for its id; the connection goes on."""
    wire = Connection(SMALL)
    wire.feed(b"\x94\x00\x07\xa1m\x91\x81\xa1t\xa3\xed\xa0\x80" + pack([0, 8, "m", [{}]]))
    refused, fine = drain(wire)
    assert isinstance(refused, RequestRefused)
    assert (refused.request_id, refused.error.name) == (7, "invalid_text")
    assert fine == RequestReceived(8, "m", {})
    assert wire.send_error(7, refused.error)


@pytest.mark.parametrize("params", [[1], ["a", "b"], [{}, {}], [[]]])
def test_positional_parameters_are_refused_by_id(params: list[object]) -> None:
    """Parameters that are not one map are `invalid_params`; none at all is an empty map."""
    (event,) = heard(pack([0, 1, "m", params]))
    assert isinstance(event, RequestRefused)
    assert event.error.name == "invalid_params"
    assert heard(pack([0, 1, "m", []])) == [RequestReceived(1, "m", {})]


@pytest.mark.parametrize("last", [1, object(), 1 << 70, "\ud800"])
def test_a_message_that_is_made_while_another_is_packed_leaves_both_whole(last: object) -> None:
    """The garbage collector may close a forgotten stream at any time; what that sends is a message of its own."""
    wire, peer = Connection(), Connection()
    request_id, data = wire.send_request("generate", {})
    peer.feed(data)
    assert isinstance(peer.next_event(), RequestReceived)
    sent: list[bytes] = []

    class Interrupted(dict[str, object]):
        def items(self) -> ItemsView[str, object]:
            sent.append(wire.send_cancel(request_id))
            return super().items()

    params = {"before": "x" * 100, "map": Interrupted(a=1, b=[2]), "last": last}
    try:
        sent.append(wire.send_request("other", params)[1])
    except EncodeError:
        assert last != 1
    sent.append(wire.send_request("next", {})[1])
    peer.feed(b"".join(sent))
    kinds = [type(event) for event in drain(peer)]
    assert kinds == [CancelReceived, *[RequestReceived] * (2 if last == 1 else 1)]


def test_what_cannot_be_sent_changes_nothing() -> None:
    """Lone surrogates, foreign objects and oversized messages raise typed errors; no id is used up."""
    wire = Connection(SMALL)
    with pytest.raises(TextNotEncodable, match=r"U\+D800"):
        wire.send_request("m", {"text": "\ud800"})
    with pytest.raises(EncodeError):
        wire.send_request("m", {"x": object()})
    with pytest.raises(EncodeError):
        wire.send_request("m", {"x": 2**64})
    with pytest.raises(MessageTooLarge) as error:
        wire.send_request("m", {"text": "x" * 3000})
    assert error.value.limit_bytes == 2048
    assert wire.outgoing == frozenset()
    assert wire.send_request("m", {})[0] == 1


def nested(depth: int) -> object:
    """A value inside so many lists."""
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("params", "fits"),
    [
        ({"deep": nested(61)}, True),  # with the message, its parameters and their map 64
        ({"deep": nested(62)}, False),
        ({"deep": {"inner": ({"x": nested(60)}, [])}}, False),
        ({"many": [0] * (2**18 - 9)}, True),
        ({"many": [0] * (2**18 - 6)}, False),
        ({"many": {str(number): 0 for number in range(2**17)}}, False),
        ({"bias": {5: 1.0}}, False),
        ({"bias": [{b"5": 1.0}]}, False),
    ],
)
def test_what_the_peer_would_end_the_connection_for_is_not_sent(params: dict[str, object], fits: bool) -> None:
    """P33: a connection carries everybody's calls, so one message too deep or too rich is its own caller's error."""
    client, server = Connection(), Connection(SERVER_LIMITS)
    if not fits:
        with pytest.raises(EncodeError):
            client.send_request("m", params)
        assert client.outgoing == frozenset()
    server.feed(client.send_request("m", params if fits else {})[1])
    (event,) = drain(server)
    assert isinstance(event, RequestReceived)


@given(maps)
@settings(max_examples=60, deadline=None)
def test_what_is_sent_is_what_a_peer_accepts(params: dict[str, object]) -> None:
    """The sender counts as the scanner does: under bounds as tight as these, both say the same of any message."""
    tight = WireLimits(max_depth=5, max_values=24, max_send_depth=5, max_send_values=24)
    data = pack([0, 1, "m", [params]])
    try:
        heard(data, tight)
    except ProtocolError:
        with pytest.raises(EncodeError):
            Connection(tight).send_request("m", params)
    else:
        assert Connection(tight).send_request("m", params)[1] == data


def test_notifications() -> None:
    """Cancel counts only for a request in flight; errors and unknown notifications come through."""
    error = ErrorObject.of("slow_reader", "read faster")
    wire = Connection(SMALL)
    wire.feed(pack([0, 1, "m", []], [2, "cancel", [1]], [2, "cancel", [2]], [2, "later", [1, "x"]]))
    wire.feed(Connection().send_fatal(error))
    assert drain(wire) == [
        RequestReceived(1, "m", {}),
        CancelReceived(1),
        NotificationReceived("later", (1, "x")),
        ErrorNotified(error),
    ]


def test_long_streams_are_cheap_byte_by_byte() -> None:
    """A large message that arrives in tiny pieces is scanned once, not once a piece."""
    data = pack([0, 1, "m", [{"t": "x" * 200_000, "l": list(range(100)) * 20}]])
    wire = Connection()
    for start in range(0, len(data), 7):
        wire.feed(data[start : start + 7])
        if start + 7 < len(data):
            assert wire.next_event() is None
    assert isinstance(wire.next_event(), RequestReceived)
