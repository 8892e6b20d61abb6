"""The quick way to read usual messages hears what the scanner hears, and nothing that it would refuse."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvd_client.wire import (
    Connection,
    EncodeError,
    Event,
    ProtocolError,
    ResponseReceived,
    StreamReceived,
    WireLimits,
    sendable,
)
from kvd_client.wire.framing import Framer
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


def reader(data: bytes) -> Quick:
    """A quick reader with something to read."""
    quick = Quick()
    quick.fill(data)
    return quick


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([-(2**63), 2**63, 2**64 - 1]),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
)
"""NaN, integers that need 64 bits, text and bytes among them."""

short_lists = st.lists(plain, max_size=9)
nearly_plain = st.one_of(
    plain,
    short_lists,
    st.lists(st.lists(plain, min_size=1, max_size=2), min_size=1, max_size=2),
    st.dictionaries(st.text(), plain),
)
flat_maps = st.one_of(
    st.dictionaries(st.text(max_size=3), st.one_of(plain, short_lists), max_size=12),
    st.dictionaries(st.text(max_size=3), short_lists, min_size=6, max_size=10),
    st.dictionaries(st.text(max_size=3), nearly_plain, max_size=4),
    st.dictionaries(st.one_of(st.text(max_size=3), st.binary(max_size=3)), st.one_of(plain, short_lists), max_size=4),
)
"""Plain maps with lists: some with more or longer ones than are few and short, some with something else in them."""

flat_messages = st.one_of(
    st.tuples(st.just(1), st.integers(0, 4), st.none(), flat_maps),
    st.tuples(st.just(0), st.integers(0, 9), st.text(max_size=3), st.lists(flat_maps, min_size=1, max_size=1)),
    st.tuples(st.just(2), st.just("stream"), st.tuples(st.integers(0, 4), flat_maps).map(list)),
    st.tuples(st.just(2), st.just("stream"), flat_maps),
    st.tuples(st.just(1), nearly_plain, nearly_plain, flat_maps),
)


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


@settings(max_examples=150, deadline=None)
@given(st.lists(flat_messages, min_size=1, max_size=4), st.integers(0, 2**16))
def test_both_ways_hear_the_same_of_maps_with_short_lists(sent: list[object], cut: int) -> None:
    """The same events, and of those that are refused the same reason; as `repr`, since NaN is not what it is."""
    stream = b"".join(msgpack.packb(message) for message in sent)
    cut %= len(stream)
    pieces = [stream[:cut], stream[cut:]]
    slow = repr(_heard(pieces, quick=False))
    assert repr(_heard(pieces, quick=True)) == slow
    assert repr(_heard(pieces, quick=True, in_bulk=True)) == slow


@settings(max_examples=150, deadline=None)
@given(flat_messages, st.integers(2, 6), st.one_of(st.integers(8, 150), st.just(1000)))
@example((0, 1, "m", [{"deep": [[1]]}]), 4, 1000)
@example((0, 1, "m", [{"key": [{b"k": 1}]}]), 6, 1000)
def test_what_is_sent_is_judged_the_same_both_ways(message: tuple[object, ...], depth: int, number: int) -> None:
    """Under any bounds: a few plain values and a flat map are let pass only where the walk, and a peer, would."""
    limits = WireLimits(max_depth=depth, max_values=number, max_send_depth=depth, max_send_values=number)
    refused = ""
    try:
        sendable.check_sendable(list(message), limits)
    except EncodeError as error:
        refused = str(error)
    if sendable.is_flat(list(message), limits):
        assert refused == ""
    framer = Framer(limits)
    framer.feed(msgpack.packb(message))
    try:
        assert framer.next_frame() is not None
        assert refused == ""
    except ProtocolError:
        assert refused


def _most(keys: int) -> dict[str, object]:
    """A flat map with as many values in lists as one can have."""
    return {str(key): list(range(8)) if key < 8 else key for key in range(keys)}


def test_bounds_that_a_flat_map_just_keeps() -> None:
    """The most values and the greatest depth that one may have pass both ways; where one less is allowed, neither."""
    message = [0, 1, "m", [_most(20)]]
    values, depth = 1 + 4 + 1 + 40 + 64, 4
    for bounds, fits in (((values, depth), True), ((values - 1, depth), False), ((values, depth - 1), False)):
        number, deep = bounds
        limits = WireLimits(max_depth=deep, max_values=number, max_send_depth=deep, max_send_values=number)
        framer = Framer(limits)
        framer.feed(msgpack.packb(message))
        if fits:
            sendable.check_sendable(message, limits)
            assert framer.next_frame() is not None
            assert sendable.is_flat(message, limits)
        else:
            with pytest.raises(EncodeError):
                sendable.check_sendable(message, limits)
            with pytest.raises(ProtocolError):
                framer.next_frame()


@pytest.mark.parametrize(
    ("body", "is_flat"),
    [
        ({}, True),
        ({"status": "serving", "ready": True, "disk_quotas_full": [], "free": 1.5, "key": b"x"}, True),
        (_most(20), True),
        ({str(key): [key] for key in range(9)}, False),
        ({"long": list(range(9))}, False),
        ({"deep": [[]]}, False),
        ({"map": {}}, False),
        ({"list": [{}]}, False),
        ({b"key": 1}, False),
        ({"tuple": (1,)}, False),
    ],
)
def test_which_maps_are_flat(body: dict[object, object], is_flat: bool) -> None:
    """Health is; what is not takes the walk, which lets all of these pass but keys that are no text."""
    assert sendable.is_flat_map(body) is is_flat
    quick = reader(msgpack.packb([1, 1, None, body]))
    assert (quick.next_message() is None) is (b"key" in body)


def test_what_a_later_value_replaced_is_gone() -> None:
    """The quick way sees the last of values with one key, and hands out nothing else, whatever the first was."""
    deep = b"\x94\x01\x01\xc0\x82\xa1k" + b"\x91" * 100 + b"\x01\xa1k\x07"
    assert reader(deep).next_message() == [1, 1, None, {"k": 7}]


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
    quick = reader(usual + message)
    assert quick.next_message() is not None
    assert quick.next_message() is None
    assert quick.taken_bytes == len(usual)


def test_texts_behind_an_answer_are_read_in_one_go() -> None:
    """A gateway has many calls on its connection: one's answer does not send the others' texts the slow way."""
    wire = Connection()
    for _ in range(2):
        wire.send_request("generate", {})
    answer = msgpack.packb([1, 1, None, {}])
    texts = [msgpack.packb([2, "stream", [2, {"type": "text", "text": str(number)}]]) for number in range(3)]
    wire.feed(answer + b"".join(texts))
    assert wire.text_events() == [], "the answer comes first"
    assert isinstance(wire.next_event(), ResponseReceived)
    assert [said.event["text"] for said in wire.text_events()] == ["0", "1", "2"]
    assert wire.next_event() is None
    assert wire.buffered_bytes == 0


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
    assert not is_within(WireLimits(max_values=QUICK_BYTES - 1)), "keys that come twice count twice"
    assert not is_within(WireLimits(max_message_bytes=4096))
