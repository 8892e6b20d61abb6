"""`AgentRecord` as msgpack and back, bounded, with the tail KV in one piece at the very end.

The KV is last so that its place in the log is known without parsing (`kv_bytes` from the record's end backwards), and
replay of many agents keeps no KV in memory. Everything is checked on the way in: a record that passes here has the
types the dataclasses claim. May import kvd.vm.text, kvd.ids, kvd.store.records and kvd.store.errors only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, TypeVar, get_args

import msgpack

from kvd.ids import PageId, PageKey
from kvd.store.errors import RecordInvalid
from kvd.store.records import AgentRecord, PageEntry, PositionRun, RecordKind, SegmentDelta
from kvd.vm.text import Span, SpanKind

RECORD_VERSION: Final = 1
MAX_RECORD_BYTES: Final = 1 << 30
MAX_META_BYTES: Final = 1 << 16
MAX_NAME_CHARACTERS: Final = 1024

_FIELDS: Final = 19
_KINDS: Final = frozenset(get_args(RecordKind))
_SPAN_KINDS: Final[tuple[SpanKind, ...]] = get_args(SpanKind)

T = TypeVar("T")


def encode_record(record: AgentRecord) -> bytes:
    """The record in one piece. See `encode_parts`."""
    return b"".join(encode_parts(record))


def encode_parts(record: AgentRecord) -> tuple[bytes, ...]:
    """The record as msgpack, in parts that follow one another; the last ones are the tail KV of each segment, uncopied.

    Raises:
        RecordInvalid: it exceeds a bound or holds what msgpack cannot carry.
    """
    kv = [segment.tail_kv for segment in record.segments if segment.tail_kv]
    kv_bytes = sum(map(len, kv))
    try:
        meta = msgpack.packb(record.meta, use_bin_type=True)
        fields = b"".join(
            msgpack.packb(field, use_bin_type=True)
            for field in (
                RECORD_VERSION,
                record.seq,
                record.agent,
                record.namespace,
                record.kind,
                record.branch,
                record.parent,
                record.base_tokens,
                record.base_text_bytes,
                struct.pack(f"<{len(record.token_ids)}I", *record.token_ids),
                struct.pack(f"<{len(record.token_bytes)}I", *record.token_bytes),
                [[_SPAN_KINDS.index(span.kind), span.text_bytes] for span in record.spans],
                record.text,
                record.computed_tokens,
                [_pack_segment(segment) for segment in record.segments],
                float(record.time_s),
                record.numerics,
                meta,
            )
        )
        head = msgpack.Packer().pack_array_header(_FIELDS) + fields + _pack_bin_head(kv_bytes)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise RecordInvalid(f"it cannot be encoded ({error})", seq=record.seq) from error
    record_bytes = len(head) + kv_bytes
    if len(meta) > MAX_META_BYTES or record_bytes > MAX_RECORD_BYTES:
        raise RecordInvalid(f"it is {record_bytes} bytes with {len(meta)} bytes of meta", seq=record.seq)
    return head, *kv


def _pack_segment(segment: SegmentDelta) -> list[object]:
    pages = [[page.page_id, page.key, _pack_runs(page.runs)] for page in segment.new_pages]
    return [
        segment.group,
        segment.segment,
        segment.format_id,
        segment.kept_pages,
        pages,
        segment.tail_start,
        segment.tail_end,
        _pack_runs(segment.tail_runs),
        len(segment.tail_kv),
    ]


def _pack_runs(runs: tuple[PositionRun, ...]) -> list[list[int]]:
    return [[run.start, run.tokens] for run in runs]


def _pack_bin_head(length: int) -> bytes:
    """What msgpack puts before `length` bytes."""
    if length < 1 << 8:
        return struct.pack(">BB", 0xC4, length)
    return struct.pack(">BH", 0xC5, length) if length < 1 << 16 else struct.pack(">BI", 0xC6, length)


def decode_record(payload: bytes | memoryview) -> AgentRecord:
    """Read what `encode_record` made.

    Raises:
        RecordInvalid: anything else.
    """
    try:
        fields = msgpack.unpackb(payload, raw=False, strict_map_key=True)
        if not isinstance(fields, list) or len(fields) != _FIELDS or fields[0] != RECORD_VERSION:
            raise RecordInvalid("it is not a record of a version this kvd knows")
        return _record(fields)
    except RecordInvalid:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        struct.error,
        RecursionError,
        msgpack.UnpackException,
    ) as error:
        raise RecordInvalid(f"it cannot be decoded ({error})") from error


def _record(fields: list[Any]) -> AgentRecord:
    """Build a record from unpacked fields, checking each."""
    seq = _count(fields[1])
    kind = _is(str, fields[4])
    if kind not in _KINDS:
        raise RecordInvalid(f"its kind is {kind!r}", seq=seq)
    meta = msgpack.unpackb(_is(bytes, fields[17]), raw=False, strict_map_key=True)
    kv = memoryview(_is(bytes, fields[18]))
    segments: list[SegmentDelta] = []
    at = 0
    for packed in _is(list, fields[14]):
        segment, at = _segment(packed, kv, at)
        segments.append(segment)
    if at != len(kv):
        raise RecordInvalid(f"its segments name {at} bytes of KV, it holds {len(kv)}", seq=seq)
    return AgentRecord(
        seq=seq,
        agent=_name(fields[2]),
        namespace=_name(fields[3]),
        kind=kind,  # type: ignore[arg-type]  # checked against the literal's values above
        branch=_count(fields[5]),
        parent=None if fields[6] is None else _count(fields[6]),
        base_tokens=_count(fields[7]),
        base_text_bytes=_count(fields[8]),
        token_ids=_words(fields[9]),
        token_bytes=_words(fields[10]),
        spans=_each(fields[11], lambda span: Span(_SPAN_KINDS[_count(span[0])], _count(span[1]))),
        text=_is(bytes, fields[12]),
        computed_tokens=_count(fields[13]),
        segments=tuple(segments),
        time_s=_is(float, fields[15]),
        numerics=_is(str, fields[16]),
        meta={_is(str, key): value for key, value in _is(dict, meta).items()},
    )


def _segment(packed: Any, kv: memoryview, at: int) -> tuple[SegmentDelta, int]:  # noqa: ANN401
    """One segment and where the next one's KV starts."""
    group, index, format_id, kept, pages, tail_start, tail_end, tail_runs, kv_bytes = _is(list, packed)
    end = at + _count(kv_bytes)
    if end > len(kv):
        raise ValueError("KV beyond the record's end")
    entries = _each(
        pages,
        lambda page: PageEntry(
            PageId(_is(str, page[0])),
            PageKey(_is(str, page[1])),
            _runs(page[2]),
        ),
    )
    segment = SegmentDelta(
        group=_count(group),
        format_id=_is(str, format_id),
        kept_pages=_count(kept),
        new_pages=entries,
        tail_start=_count(tail_start),
        tail_end=_count(tail_end),
        tail_kv=bytes(kv[at:end]),
        segment=_count(index),
        tail_runs=_runs(tail_runs),
    )
    return segment, end


def _runs(value: Any) -> tuple[PositionRun, ...]:  # noqa: ANN401
    return _each(value, lambda run: PositionRun(_count(run[0]), _count(run[1])))


def _is(kind: type[T], value: Any) -> T:  # noqa: ANN401
    """The value, if it is exactly of that type (a bool is not an int here)."""
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _count(value: Any) -> int:  # noqa: ANN401
    number = _is(int, value)
    if not 0 <= number < 1 << 53:
        raise ValueError(f"{number} is out of range")
    return number


def _name(value: Any) -> str:  # noqa: ANN401
    name = _is(str, value)
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError(f"a name of {len(name)} characters")
    return name


def _words(value: Any) -> tuple[int, ...]:  # noqa: ANN401
    data = _is(bytes, value)
    return struct.unpack(f"<{len(data) // 4}I", data)


def _each(value: Any, make: Callable[[Any], T]) -> tuple[T, ...]:  # noqa: ANN401
    return tuple(make(item) for item in _is(list, value))


__all__ = ["MAX_META_BYTES", "MAX_RECORD_BYTES", "RECORD_VERSION", "decode_record", "encode_parts", "encode_record"]
