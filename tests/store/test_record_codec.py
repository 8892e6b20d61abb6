"""Records as msgpack: round trip, bounds, and no garbage that becomes a record."""

from __future__ import annotations

import random
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.ids import PageId, PageKey
from kvd.store.errors import RecordInvalid
from kvd.store.record_codec import MAX_META_BYTES, decode_record, encode_parts, encode_record
from kvd.store.records import AgentRecord, PageEntry, PositionRun, SegmentDelta
from kvd.vm.text import Span
from tests.support.store_data import ModelAgent

counts = st.integers(0, 2**32 - 1)
names = st.text(min_size=1, max_size=30)
runs = st.lists(st.builds(PositionRun, start=counts, tokens=counts), max_size=3).map(tuple)
entries = st.builds(PageEntry, page_id=names.map(PageId), key=names.map(PageKey), runs=runs)
segments = st.builds(
    SegmentDelta,
    group=counts,
    format_id=st.text(max_size=20),
    kept_pages=counts,
    new_pages=st.lists(entries, max_size=3).map(tuple),
    tail_start=counts,
    tail_end=counts,
    tail_kv=st.binary(max_size=200) | st.binary(min_size=250, max_size=260) | st.just(bytes(70_000)),
    segment=counts,
    tail_runs=runs,
)
meta_values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.text(max_size=9), st.binary(max_size=9)
)
records = st.builds(
    AgentRecord,
    seq=counts,
    agent=names,
    namespace=names,
    kind=st.sampled_from(["create", "turn", "rollback", "snapshot"]),
    branch=counts,
    parent=st.none() | counts,
    base_tokens=counts,
    base_text_bytes=counts,
    token_ids=st.lists(counts, max_size=9).map(tuple),
    token_bytes=st.lists(counts, max_size=9).map(tuple),
    spans=st.lists(
        st.builds(Span, kind=st.sampled_from(["control", "content", "generated"]), text_bytes=counts), max_size=4
    ).map(tuple),
    text=st.binary(max_size=50),
    computed_tokens=counts,
    segments=st.lists(segments, max_size=3).map(tuple),
    time_s=st.floats(allow_nan=False),
    numerics=st.text(max_size=20),
    meta=st.dictionaries(st.text(max_size=9), meta_values, max_size=4),
)


@given(records)
@settings(max_examples=60, deadline=None)
def test_any_record_comes_back_equal(record: AgentRecord) -> None:
    """Every field, of any value in range."""
    assert decode_record(encode_record(record)) == record


@given(records)
@settings(max_examples=30, deadline=None)
def test_the_tail_kv_is_the_end_of_the_record(record: AgentRecord) -> None:
    """Its place is known without parsing."""
    kv = b"".join(segment.tail_kv for segment in record.segments)
    assert encode_record(record).endswith(kv)


def test_tail_kv_is_not_copied_to_be_written() -> None:
    """P21: at 8 billion parameters a record's KV is megabytes a turn."""
    record = ModelAgent("ada").turn(200)[1]
    head, *kv = encode_parts(record)
    assert len(head) < 3000
    assert [id(part) for part in kv] == [id(segment.tail_kv) for segment in record.segments]


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_garbage_is_refused(data: bytes) -> None:
    """Only the typed error, whatever the bytes."""
    with pytest.raises(RecordInvalid):
        decode_record(data)


def test_damaged_records_are_refused_or_still_records() -> None:
    """Cut and flipped records give the typed error or a well-typed record (the frame's checksum catches those)."""
    data = encode_record(ModelAgent("ada").turn(300)[1])
    rng = random.Random(5)
    refused = 0
    for _ in range(300):
        bad = bytearray(data)
        bad[rng.randrange(200)] ^= 1 << rng.randrange(8)
        try:
            assert isinstance(decode_record(bytes(bad)), AgentRecord)
        except RecordInvalid:
            refused += 1
    assert refused > 10
    for cut in range(0, len(data), 97):
        with pytest.raises(RecordInvalid):
            decode_record(data[:cut])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, 2),
        (1, -1),
        (1, True),
        (1, "1"),
        (2, ""),
        (2, "x" * 2000),
        (4, "copy"),
        (7, 1 << 60),
        (9, b"123"),
        (11, [[9, 1]]),
        (11, [["content", 1]]),
        (14, [[0, 0, "q4", 0, [], 0, 0, [], 5]]),
        (14, [[0, -1, "q4", 0, [], 0, 0, [], 0]]),
        (14, [[0, 0, "q4", 0, [], 0, 0, [[1]], 0]]),
        (14, [[0, 0, "q4", 0, []]]),
        (14, {}),
        (15, 1),
        (17, msgpack.packb({1: 2})),
        (17, msgpack.packb([1])),
        (18, b"more"),
    ],
)
def test_fields_of_the_wrong_kind_are_refused(field: int, value: object) -> None:
    """Nothing reaches replay that is not what the dataclasses claim."""
    fields = msgpack.unpackb(encode_record(ModelAgent("ada").turn(0)[1]))
    fields[field] = value
    with pytest.raises(RecordInvalid):
        decode_record(msgpack.packb(fields))


def test_what_cannot_be_carried_is_refused_before_it_is_written() -> None:
    """Bounds of meta and ids, lone surrogates, foreign objects."""
    record = ModelAgent("ada").turn(1)[1]
    for bad in (
        replace(record, meta={"big": "x" * (MAX_META_BYTES + 1)}),
        replace(record, meta={"object": object()}),
        replace(record, token_ids=(-1,)),
        replace(record, token_ids=(1 << 32,)),
        replace(record, agent="\ud800"),
    ):
        with pytest.raises(RecordInvalid) as caught:
            encode_record(bad)
        assert caught.value.seq == record.seq
