"""The quick way to read usual messages hears what the scanner hears, and nothing that it would refuse."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_client.wire import Connection, Event, ProtocolError, StreamReceived, WireLimits
from kvd_client.wire.quick import QUICK_BYTES, Quick, is_within
from tests.client.test_wire import maps, values

messages = st.one_of(
    st.tuples(st.just(2), st.just("stream"), st.tuples(st.integers(0, 4), maps)),
    st.tuples(st.just(1), st.integers(0, 4), st.none(), values),
    st.tuples(st.just(0), st.integers(0, 2**64 - 1), st.text(), st.lists(values, max_size=2)),
    st.tuples(st.integers(-1, 3), values, values),
    st.lists(values, max_size=5),
    values,
)
noise = st.binary(max_size=12)


def _heard(pieces: list[bytes], *, quick: bool, in_bulk: bool = False) -> tuple[list[Event], str | None, int]:
    """Events, the fault that ended it, and the bytes that wait; `in_bulk`: text events are asked for together."""
    wire = Connection()
    wire._may_be_quick = quick
    for request in range(4):
        assert wire.send_request("x", {})[0] == request + 1
    events: list[Event] = []
    try:
        for piece in pieces:
            wire.feed(piece)
            if in_bulk:
                events += wire.text_events()
            while (event := wire.next_event()) is not None:
                events.append(event)
    except ProtocolError as error:
        return events, error.message, 0
    return events, None, wire.buffered_bytes


@settings(max_examples=150, deadline=None)
@given(st.lists(messages, max_size=6), st.lists(noise, max_size=2), st.data())
def test_both_ways_hear_the_same(sent: list[object], junk: list[bytes], data: st.DataObject) -> None:
    """Any messages, some of them wrong, bytes that are none between them, cut anywhere."""
    parts = [msgpack.packb(message) for message in sent]
    for each in junk:
        parts.insert(data.draw(st.integers(0, len(parts))), each)
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    slow = _heard(pieces, quick=False)
    assert _heard(pieces, quick=True) == slow
    assert _heard(pieces, quick=True, in_bulk=True) == slow


def test_more_than_is_read_at_once_is_read_the_quick_way_too() -> None:
    """Bytes beyond the quick way's own bound are its next helping, in bulk and one by one."""
    each = msgpack.packb([2, "stream", [1, {"type": "text", "text": "x" * 100}]])
    piece = each * (3 * QUICK_BYTES // len(each)) + each[:7]
    for in_bulk in (True, False):
        wire = Connection()
        wire._framer.next_frame = lambda: None  # type: ignore[method-assign]  # the scanner reads nothing of it
        wire.send_request("x", {})
        wire.feed(piece)
        events: list[Event] = list(wire.text_events()) if in_bulk else []
        while (event := wire.next_event()) is not None:
            events.append(event)
        assert len(events) == len(piece) // len(each)
        assert wire.buffered_bytes == 7


@pytest.mark.parametrize(
    "message",
    [
        msgpack.packb([2, "stream", [1, {"t": msgpack.ExtType(5, b"")}]]),
        msgpack.packb([2, "stream", [1, {"t": msgpack.Timestamp(1, 0)}]]),
        b"\x93\x02\xa6stream\x92\x01\x81\xc4\x01k\xa1v",  # a key that is bytes
        b"\x93\x02\xa6stream\x92\x01\x81\xa1k\xa2\xff\xff",  # no UTF-8
        msgpack.packb([2, "stream", [1, {"deep": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}]]),
        msgpack.packb([2, "x", list(range(5000))]),
        msgpack.packb([2, "x"]),
        msgpack.packb({"no": "list"}),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x93\x02\xa6stream\x92\x01\x81\xa4type\xa4tex",  # cut off
    ],
)
def test_what_is_unusual_is_left_to_the_scanner(message: bytes) -> None:
    """Extension types, keys that are no text, bytes that are no text, depth, length, and what is not all there."""
    usual = msgpack.packb([2, "stream", [1, {"type": "text", "text": "x"}]])
    quick = Quick(usual + message)
    assert quick.next_message() is not None
    assert quick.next_message() is None
    assert quick.taken_bytes == len(usual)


def test_a_message_that_is_long_or_bounded_more_tightly_takes_the_other_way() -> None:
    """Only what fits the quick way's own bounds, under limits that are wider than those."""
    long = msgpack.packb([2, "stream", [1, {"type": "text", "text": "x" * QUICK_BYTES}]])
    wire = Connection()
    wire.send_request("x", {})
    wire.feed(long)
    event = wire.next_event()
    assert isinstance(event, StreamReceived)
    assert len(str(event.event["text"])) == QUICK_BYTES
    assert is_within(WireLimits())
    assert not is_within(WireLimits(max_depth=8))
    assert not is_within(WireLimits(max_values=200))
    assert not is_within(WireLimits(max_message_bytes=4096))
