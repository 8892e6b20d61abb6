"""Garbage in either direction: whatever the bytes, an end of the wire yields events or one `ProtocolError`.

And the client against a server that sends garbage: a typed error, never a crash or a hang.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_client import AsyncClient, Client, KvdClientError
from kvd_client.wire import Connection, ErrorObject, Event, ProtocolError, WireLimits
from tests.client.impostor import Impostor

SMALL = WireLimits(max_message_bytes=4096, max_depth=8, max_values=200, max_send_bytes=2048)
ATTACKS = 60

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(scalars, inner, max_size=3), max_leaves=12
)
frames = st.one_of(
    st.tuples(st.sampled_from([0, 1, 2]), values, values, values),
    st.tuples(st.sampled_from([0, 1, 2]), values, values),
    st.lists(values, max_size=5),
)


def events_of(wire: Connection, data: bytes, cuts: list[int]) -> tuple[list[Event], str]:
    """What an end understands of bytes that come in pieces, and what it complains of."""
    found: list[Event] = []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    try:
        for begin, end in itertools.pairwise(edges):
            wire.feed(data[begin:end])
            while (event := wire.next_event()) is not None:
                found.append(event)
            assert wire.buffered_bytes <= SMALL.max_message_bytes
    except ProtocolError as error:
        return found, error.message
    return found, ""


@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=4))
@settings(max_examples=200)
def test_any_bytes_are_events_or_one_fault(data: bytes, cuts: list[int]) -> None:
    """Nothing but `ProtocolError` is raised, the same for every split, and again when asked again."""
    whole, split = Connection(SMALL), Connection(SMALL)
    assert events_of(whole, data, []) == events_of(split, data, cuts)
    if events_of(whole, b"", [])[1]:
        with pytest.raises(ProtocolError):
            whole.next_event()


@given(st.lists(frames, max_size=4), st.booleans())
@settings(max_examples=200)
def test_well_formed_nonsense_is_events_or_one_fault(messages: list[Any], has_calls: bool) -> None:
    """Valid msgpack of any shape: requests, answers and notifications of anything, with and without calls in flight."""
    wire = Connection(SMALL)
    if has_calls:
        wire.send_request("health", {})
    data = b"".join(msgpack.packb(message, strict_types=False) for message in messages if _hashable(message))
    found, _ = events_of(wire, data, [])
    assert len(found) <= len(messages)


def _hashable(message: object) -> bool:
    try:
        msgpack.packb(message)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def attack(rng: random.Random) -> bytes:
    """What a server that means harm, or is none, may send to the first call (id 1)."""
    stream = Connection().send_fatal(ErrorObject.of("busy", "x"))
    shapes: list[Any] = [
        [1, 1, None, None],
        [1, 1, {"name": 7}, None],
        [1, 1, {"code": 100, "name": "invalid_params", "message": 7, "data": []}, None],
        [1, 1, {"code": "x", "name": "nope", "message": "y", "data": {}, "retry_after_s": "soon"}, None],
        [1, 1, [], {}],
        [1, 1, None, {"status": {}, "ready": "yes"}],
        [1, 2, None, {}],
        [1, -1, None, {}],
        [1, None, None, {}],
        [1, 1, {"name": "busy"}, {"ready": True}],
        [2, "stream", [1, None]],
        [2, "stream", [1, {"type": None}]],
        [2, "stream", [9, {"type": "text", "text": "z"}]],
        [2, "stream", []],
        [2, "error", []],
        [2, "error", [None]],
        [2, "error", [{"name": []}]],
        [0, 1, "health", []],
        [1, 1, None, {"ready": float("nan")}],
        {"jsonrpc": "2.0"},
    ]
    packed: bytes = msgpack.packb(rng.choice(shapes))
    spot = rng.randrange(len(packed))
    return rng.choice(
        [
            packed,
            packed + packed,
            packed[:spot],
            packed[:spot] + rng.randbytes(3) + packed[spot + 1 :],
            rng.randbytes(rng.randrange(1, 200)),
            stream[: rng.randrange(len(stream))],
            b"\x94\x01\x01\xc0" + rng.choice([b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 5000]),
            b"\x94\x01\x01\xc0\xd4\x05x",
            b"",
        ]
    )


@pytest.mark.parametrize("call", ["blocking", "async"])
def test_a_hostile_server_gets_no_further_than_an_error(short_tmp: Path, call: str) -> None:
    """Each attack ends in a result or in a typed error of ours, for either client, however slow both are."""
    rng, outcomes = random.Random(31), Counter[str]()
    ask = {"blocking": ask_blocking, "async": ask_async}[call]
    for number in range(ATTACKS):
        data = attack(rng)
        impostor = Impostor(short_tmp / f"s{number}", lambda _, data=data: data, hangs_up=True)  # type: ignore[misc]
        try:
            outcomes[ask(short_tmp / f"s{number}")] += 1
        finally:
            impostor.close()
    assert sum(outcomes.values()) == ATTACKS
    known = {"result", "ProtocolViolation", "ConnectionLost", "RemoteError", "DaemonBug", "Busy"}
    assert outcomes.keys() <= known
    assert outcomes["ProtocolViolation"] > ATTACKS // 4
    assert outcomes["ConnectionLost"] < ATTACKS // 2


@pytest.mark.parametrize("call", ["blocking", "async"])
@pytest.mark.parametrize("data", [b"", b"\x94\x01\x01"], ids=["silence", "half"])
def test_a_server_that_says_no_more_is_left(short_tmp: Path, call: str, data: bytes) -> None:
    """P34: what waits for the rest of an answer gives up when its time is over."""
    impostor = Impostor(short_tmp / "s", lambda _: data)
    try:
        outcome = {"blocking": ask_blocking, "async": ask_async}[call](short_tmp / "s", 0.05)
    finally:
        impostor.close()
    assert outcome == "CallTimeout"


def ask_blocking(path: Path, timeout_s: float = 60.0) -> str:
    """What became of a call."""
    try:
        with Client(path, timeout_s=timeout_s) as client:
            client.health()
    except KvdClientError as error:
        return type(error).__name__
    return "result"


def ask_async(path: Path, timeout_s: float = 60.0) -> str:
    """What became of a call."""

    async def run() -> None:
        async with AsyncClient(path, timeout_s=timeout_s) as client:
            await client.health()

    try:
        asyncio.run(run())
    except KvdClientError as error:
        return type(error).__name__
    return "result"
