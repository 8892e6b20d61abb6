"""The waiting messages of a slow reader."""

from __future__ import annotations

from collections.abc import Mapping

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.front.outbox import Outbox

steps = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from(["text", "reasoning", "prefill", "tool_call", "pop"]), st.text(max_size=5)
    ),
    max_size=60,
)


def encode(request_id: int, event: Mapping[str, object]) -> bytes:
    """As the wire does it."""
    data: bytes = msgpack.packb([request_id, dict(event)])
    return data


@given(steps)
@settings(deadline=None)
def test_nothing_is_lost_or_reordered(steps: list[tuple[int, str, str]]) -> None:
    """Per call, text comes out whole and in order among the other events; the count of bytes returns to zero."""
    outbox = Outbox(encode)
    sent: dict[int, list[tuple[str, str]]] = {}
    got: dict[int, list[tuple[str, str]]] = {}

    def take() -> None:
        request_id, event = msgpack.unpackb(outbox.pop())
        got.setdefault(request_id, []).append((event["type"], event.get("text", "")))

    for request_id, kind, text in steps:
        if kind == "pop":
            if outbox:
                take()
        else:
            event: dict[str, object] = {"type": kind} if kind == "prefill" else {"type": kind, "text": text}
            sent.setdefault(request_id, []).append((kind, "" if kind == "prefill" else text))
            outbox.add_event(request_id, event)
    while outbox:
        take()
    assert outbox.waiting_bytes == 0
    for request_id, events in sent.items():
        assert merged(got[request_id]) == merged(events)


def merged(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one mergeable kind as one."""
    result: list[tuple[str, str]] = []
    for kind, text in events:
        if result and result[-1][0] == kind != "tool_call":
            result[-1] = (kind, result[-1][1] + text)
        else:
            result.append((kind, text))
    return result


def test_merging_keeps_one_message() -> None:
    """A thousand pieces of text are one message; its cost grows with the text."""
    outbox = Outbox(encode)
    for number in range(1000):
        outbox.add_event(1, {"type": "text", "text": str(number)})
    assert len(outbox) == 1
    assert outbox.waiting_bytes > 1000
    assert msgpack.unpackb(outbox.pop())[1]["text"] == "".join(map(str, range(1000)))


def test_progress_is_replaced_and_extra_fields_are_kept() -> None:
    """Only the newest progress report waits; text with other fields is not merged."""
    outbox = Outbox(encode)
    for done in range(10):
        outbox.add_event(1, {"type": "prefill", "done_tokens": done})
    assert len(outbox) == 1
    assert msgpack.unpackb(outbox.pop())[1]["done_tokens"] == 9
    outbox.add_event(1, {"type": "text", "text": "a", "token": 1})
    outbox.add_event(1, {"type": "text", "text": "b", "token": 2})
    assert len(outbox) == 2


def test_tiny_messages_are_not_free() -> None:
    """Each waiting message counts more than its bytes, so that many tiny ones reach the bound too."""
    outbox = Outbox(encode)
    outbox.add(b"x")
    assert outbox.waiting_bytes > 100
    outbox.clear()
    assert not outbox
    assert outbox.waiting_bytes == 0


@given(st.lists(st.sampled_from(["tokens", "text", "usage", "pop"]), max_size=60))
@settings(deadline=None)
def test_ids_are_joined_and_never_behind_their_text(kinds: list[str]) -> None:
    """A slow reader of a resumable stream gets few messages, each text after the ids of its tokens, nothing twice."""
    outbox = Outbox(encode)
    ids: list[int] = []
    words = ""
    made, most_waiting, pops = 0, 0, 0

    def take() -> None:
        nonlocal words
        _, event = msgpack.unpackb(outbox.pop())
        ids.extend(event.get("ids", []))
        words += event.get("text", "")
        assert len(words) <= len(ids)

    for kind in kinds:
        if kind == "pop":
            if outbox:
                take()
                pops += 1
        elif kind == "text":
            outbox.add_event(1, {"type": "tokens", "ids": [made]})
            outbox.add_event(1, {"type": "text", "text": "x"})
            made += 1
        elif kind == "tokens":
            outbox.add_event(1, {"type": "tokens", "ids": [made]})
            made += 1
        else:
            outbox.add_event(1, {"type": "usage"})
        most_waiting = max(most_waiting, len(outbox))
    outbox.seal(1)
    while outbox:
        take()
    assert ids == list(range(made))
    assert len(words) == kinds.count("text")
    assert outbox.waiting_bytes == 0
    assert most_waiting <= 2 + 2 * (kinds.count("usage") + pops)


@pytest.mark.parametrize("pieces", [1, 2, 255, 256, 257, 511, 512, 513])
def test_any_number_of_pieces_is_one_whole_message(pieces: int) -> None:
    """P34: a slow reader loses nothing, however many texts are joined while it does not read."""
    outbox = Outbox(encode)
    for number in range(pieces):
        outbox.add_event(1, {"type": "text", "text": f" {number}"})
    assert len(outbox) == 1
    _, event = msgpack.unpackb(outbox.pop())
    assert event["text"] == "".join(f" {number}" for number in range(pieces))
    assert outbox.waiting_bytes == 0
