"""What runs next: decode keeps its share of the time, prefills take turns, short prompts come soon (P35)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.ids import RequestId
from kvd.scheduler.iterations import IterationPlanner

CHUNK_S = 0.4
DECODE_S = 0.03


def ids(*numbers: int) -> list[RequestId]:
    """Request ids."""
    return [RequestId(number) for number in numbers]


def run(planner: IterationPlanner, decodes: list[RequestId], prefills: list[RequestId]) -> tuple[int, ...]:
    """One iteration, which takes what it takes; who ran."""
    iteration = planner.plan(decodes, prefills)
    planner.ran(iteration, CHUNK_S if iteration.is_chunk else DECODE_S, decoding=bool(decodes))
    return iteration.requests


@given(share=st.sampled_from([0.0, 0.25, 0.5, 0.8]), prefills=st.integers(1, 3))
def test_decode_keeps_its_share_of_the_time(share: float, prefills: int) -> None:
    """While others prefill, decode steps get at least their share of the measured time, and chunks get the rest."""
    planner = IterationPlanner(decode_share=share)
    decode_s = chunk_s = 0.0
    for _ in range(400):
        if len(run(planner, ids(1, 2), ids(*range(3, 3 + prefills)))) == 2:
            decode_s += DECODE_S
        else:
            chunk_s += CHUNK_S
    assert decode_s / (decode_s + chunk_s) >= share - CHUNK_S / (decode_s + chunk_s)
    # not much more than that: one decode step between chunks is the least
    least = max(share, DECODE_S / (CHUNK_S + DECODE_S))
    assert decode_s / (decode_s + chunk_s) <= least + 0.05


def test_all_decode_steps_run_together() -> None:
    """Every agent that decodes is a row of the same iteration."""
    assert run(IterationPlanner(decode_share=0.5), ids(4, 2, 9), []) == (4, 2, 9)


def test_nothing_is_owed_to_nobody() -> None:
    """Chunks that run while nobody decodes leave no debt: beside a new decoder the next one waits for one step only."""
    planner = IterationPlanner(decode_share=0.8)
    for _ in range(5):
        assert run(planner, [], ids(1)) == (1,)
    assert run(planner, ids(2), ids(1)) == (2,)
    assert run(planner, ids(2), ids(1)) == (1,)


def test_prefills_take_turns() -> None:
    """Of several long prompts each gets a chunk in turn."""
    planner = IterationPlanner(decode_share=0.5)
    ran = [run(planner, [], ids(1, 2, 3))[0] for _ in range(14)][5:]
    assert set(ran[:3]) == {1, 2, 3}
    assert ran == 3 * ran[:3]


def test_a_short_prompt_need_not_wait_for_a_round_of_long_ones() -> None:
    """A prompt that comes while three long ones take turns gets the next chunk: its first token is two chunks away."""
    planner = IterationPlanner(decode_share=0.5)
    for _ in range(8):
        run(planner, [], ids(1, 2, 3))
    assert run(planner, [], ids(1, 2, 3, 4)) == (4,)


def test_a_stream_of_short_prompts_does_not_stop_a_long_one() -> None:
    """Every second chunk is the long prompt's, however many short ones come."""
    planner = IterationPlanner(decode_share=0.5)
    run(planner, [], ids(1))
    ran = [run(planner, [], ids(1, number))[0] for number in range(10, 30)]
    assert ran.count(1) == pytest.approx(10, abs=1)


def test_an_ended_request_is_forgotten() -> None:
    """A request id that comes again is new: nothing of the old one is kept."""
    planner = IterationPlanner(decode_share=0.5)
    for _ in range(4):
        run(planner, [], ids(1, 2))
    planner.forget(RequestId(1))
    assert run(planner, [], ids(2, 1)) == (1,)
