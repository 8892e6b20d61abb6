"""Several segments a cache group: the log is ready for groups of mixed precision."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvd.store.agent_image import apply
from kvd.store.errors import RecordInvalid
from kvd.store.record_codec import decode_record, encode_record
from kvd.store.records import AgentRecord, PositionRun
from kvd.store.snapshot import snapshot_records
from tests.store.test_agent_image import MemoryLog, run_history
from tests.support.store_data import LAYOUTS, ModelAgent, content


def split_record() -> AgentRecord:
    """A first record whose group 0 holds 30 tokens in two segments: every third one in segment 1."""
    record = ModelAgent("ada").turn(30)[1]
    low, other = record.segments
    runs = tuple(PositionRun(start, 2) for start in range(0, 30, 3))
    high_runs = tuple(PositionRun(start + 2, 1) for start in range(0, 30, 3))
    kv = random.Random(1).randbytes(30 * LAYOUTS[0].token_bytes)
    border = 20 * LAYOUTS[0].token_bytes
    return replace(
        record,
        segments=(
            other,
            replace(
                low,
                segment=1,
                tail_end=10,
                tail_kv=kv[border:],
                tail_runs=high_runs,
            ),
            replace(low, tail_end=20, tail_kv=kv[:border], tail_runs=runs),
        ),
    )


def test_a_group_may_have_several_segments_with_positions() -> None:
    """Mixed precision: the log keys everything by (group, segment), and an open page says where its tokens are."""
    log, record = MemoryLog(), split_record()
    log.add(decode_record(encode_record(record)))
    branch = log.replay().branch
    assert [(each.group, each.segment) for each in branch.segments] == [(0, 0), (0, 1), (1, 0)]
    assert not branch.uniform
    assert (branch.segment(0).tail_tokens, branch.segment(0, 1).tail_tokens) == (20, 10)
    assert branch.segment(0, 1).tail_runs == record.segments[1].tail_runs
    for delta in record.segments:
        assert log.read_tail(0, delta.group, delta.segment) == delta.tail_kv
    compacted = MemoryLog()
    for each in snapshot_records(log.replay(), log.read_tail):
        compacted.add(each)
    assert content(compacted.replay(), compacted.read_tail) == content(log.replay(), log.read_tail)
    assert compacted.replay().branch.segment(0, 1).tail_runs == branch.segment(0, 1).tail_runs
    with pytest.raises(KeyError):
        branch.segment(1, 1)
    assert ModelAgent("ada").turn(30)[1].segments[0].segment == 0
    for wrong in (
        replace(record, computed_tokens=29),
        replace(record, segments=(*record.segments, record.segments[0])),
        replace(record, segments=(record.segments[0], replace(record.segments[1], tail_runs=(PositionRun(0, 9),)))),
    ):
        with pytest.raises(RecordInvalid):
            apply(None, wrong, payload_end=10**6)


def test_a_branch_of_one_segment_a_group_is_uniform() -> None:
    """What the engine of one precision can serve."""
    _, log = run_history([("turn", 300, 0, False, "content")])
    assert log.replay().branch.uniform
