"""`kvd bench eviction`: traces are played as they were, the optimum bounds every policy, wrong input is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.bench.cli import bench
from kvd.bench.eviction import compare
from kvd.bench.eviction_replay import Optimum, Replay, Turn, plan_turns
from kvd.bench.eviction_speed import SPACE_PAGES, Desk, measure
from kvd.bench.eviction_workloads import PAGE_BYTES, WORKLOADS, Script, generate
from kvd.errors import InvalidParams
from kvd.vm.eviction import POLICIES, LruPolicy
from kvd.vm.trace import TraceHeader, TraceLine, format_header, format_line

PAGE = 4
HEADER = TraceHeader(PAGE, (None,), name="t")


def trace(*operations: tuple[object, ...]) -> list[TraceLine]:
    """Lines of (word, space, facts)."""
    return [
        TraceLine(float(n), word, space, **(facts[0] if facts else {}))  # type: ignore[arg-type]
        for n, (word, space, *facts) in enumerate(operations)
    ]


def turn(space: int, before: int, after: int) -> tuple[tuple[object, ...], ...]:
    """A turn from one length to another."""
    return ("start", space, {"tokens": before}), ("end", space, {"tokens": after})


def make(space: int) -> tuple[object, ...]:
    """A new space with pages of 100 bytes."""
    return ("create", space, {"page_bytes": (100,), "agent": str(space)})


def cyclic(rounds: int, agents: int, pages: int) -> list[TraceLine]:
    """Agents of so many pages that take turns which add nothing."""
    tokens = pages * PAGE
    first = [step for n in range(agents) for step in (make(n), *turn(n, 0, tokens))]
    return trace(*first, *(step for _ in range(rounds) for n in range(agents) for step in turn(n, tokens, tokens)))


def test_in_a_cycle_lru_hits_nothing_and_the_optimum_what_belady_says() -> None:
    """Three agents of four pages, room for eight: least recently used 0, the optimum half of what is needed."""
    lines = cyclic(30, 3, 4)
    budget_bytes = (8 + 1 + 1) * 100  # beside frames: one copy, and an eighth for what is in flight
    scout = Replay(HEADER, lines, LruPolicy(), budget_bytes)
    lru = scout.run()
    best = Replay(HEADER, lines, Optimum(scout.uses), budget_bytes).run()
    assert (lru.turns, lru.demanded_pages, lru.refused_turns) == (93, 360, 0)
    assert lru.hit_pages == 0
    assert lru.in_bytes == 36_000 == lru.faults * 100
    assert lru.out_bytes == 1200, "each page is written once"
    assert best.hit_rate == pytest.approx(0.5, abs=0.02)
    assert best.in_bytes == best.faults * 100


@pytest.mark.parametrize("name", ["sub-agents", "long-session"])
def test_no_policy_beats_the_optimum(name: str) -> None:
    """On the same accesses, with shared prefixes and deleted agents; without prefetch none is loaded ahead."""
    header, lines = generate(name, 3)
    rows = list(compare((header, lines[: len(lines) // 3]), (0.35,), list(POLICIES), predict=False))
    *others, best = rows
    assert best.policy == "optimum"
    assert [row.policy for row in others] == list(POLICIES)
    for row in others:
        assert row.tally.in_bytes >= best.tally.in_bytes > 0
        assert row.hit_rate <= best.hit_rate
        assert row.tally.demanded_pages == best.tally.demanded_pages, "all met the same accesses"
        assert row.tally.out_bytes == best.tally.out_bytes
        assert row.tally.ahead_bytes == 0


def test_prefetch_loads_ahead_as_the_daemon_does() -> None:
    """In a cycle the predictor is right, so pages are there; what comes in is counted all the same."""
    lines = cyclic(10, 3, 4)
    tally = Replay(HEADER, lines, LruPolicy(), 1000, predict=True).run()
    assert tally.hit_rate > 0.5
    assert tally.ahead_bytes > 0
    assert tally.in_bytes == tally.ahead_bytes + tally.faults * 100


def test_a_replay_does_what_the_trace_says() -> None:
    """Restore with a shared prefix, fork, cut within and without a turn, wishes, close: lengths come out right."""
    lines = trace(
        ("restore", 1, {"tokens": 10, "page_bytes": (100,)}),
        ("restore", 2, {"tokens": 9, "page_bytes": (100,), "parent": 1, "shared_pages": 2}),
        ("prefetch", 1),
        ("start", 1, {"tokens": 10}),
        ("cut", 1, {"tokens": 7}),
        ("end", 1, {"tokens": 14}),
        ("fork", 3, {"parent": 1, "tokens": 6}),
        ("cut", 3, {"tokens": 5}),
        ("evict", 1),
        ("pin", 2),
        ("unpin", 2),
        ("close", 1),
        *turn(2, 9, 12),
        ("start", 3, {"tokens": 5}),
    )
    replay = Replay(HEADER, lines, LruPolicy(), 100_000)
    tally = replay.run()
    assert (tally.turns, tally.refused_turns) == (3, 0)
    assert replay.lengths == {2: 12, 3: 5}
    assert tally.demanded_pages == 2 + 3 + 2
    assert tally.in_bytes == 400, "two shared pages and the tails of both"


def test_turns_that_ran_together_end_early_when_a_smaller_budget_cannot_hold_both() -> None:
    """What runs is never refused because others run; what cannot run even alone is counted."""
    lines = trace(
        make(1),
        make(2),
        ("start", 1),
        ("start", 2),
        ("end", 1, {"tokens": 4 * PAGE}),
        ("end", 2, {"tokens": 4 * PAGE}),
        make(3),
        *turn(3, 0, 40 * PAGE),
    )
    tally = Replay(HEADER, lines, LruPolicy(), 800).run()
    assert (tally.turns, tally.refused_turns) == (3, 1)
    assert tally.peak_bytes <= 800


def test_cuts_within_a_turn_are_part_of_it() -> None:
    """A turn that cuts back and goes on appends what lies between the lowest cut and its end."""
    lines = trace(("start", 1, {"tokens": 10}), ("cut", 1, {"tokens": 7}), ("end", 1, {"tokens": 20}), ("start", 1))
    assert plan_turns(lines) == {0: Turn(7, 13), 3: Turn(0, 0)}


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_workloads_repeat_with_their_seed(name: str) -> None:
    """The same seed gives the same trace, another one another; pages are those of one size."""
    assert generate(name, 5) == generate(name, 5)
    assert generate(name, 5) != generate(name, 6)
    sizes = {line.page_bytes for line in generate(name, 5)[1] if line.word == "create"}
    assert sizes == {(PAGE_BYTES,)}


def test_the_pager_whose_speed_is_measured_is_full_and_pages_move() -> None:
    """All spaces but one are in RAM; a demand of the other one takes as many pages as it brings."""
    desk = Desk("reuse", 4 * SPACE_PAGES)
    resident = [desk.pager.residency(space).resident_pages for space in desk.spaces]
    assert resident == [SPACE_PAGES] * 3 + [0]
    desk.turn(desk.spaces[-1])
    assert desk.pager.residency(desk.spaces[-1]).resident_pages == SPACE_PAGES
    assert desk.pager.statistics().evictions == SPACE_PAGES
    speed = measure("lru", 2 * SPACE_PAGES, repeats=1)
    assert (speed.policy, speed.pages) == ("lru", 2 * SPACE_PAGES)
    assert min(speed.lookup_us, speed.touch_us, speed.victim_us, speed.swap_us) > 0


def test_the_command_replays_a_file_and_prints_a_table_or_json(tmp_path: Path) -> None:
    """A row for each policy and the optimum; the file's name is the trace's."""
    path = tmp_path / "day.jsonl"
    header = TraceHeader(PAGE, (None,), name="day")
    path.write_text("\n".join([format_header(header), *map(format_line, cyclic(4, 3, 4))]) + "\n")
    arguments = ["eviction", "--trace", str(path), "--budgets", "0.8"]
    done = CliRunner().invoke(bench, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)["rows"]
    assert [(row["trace"], row["policy"], row["budget_bytes"]) for row in rows] == [
        ("day", name, 960) for name in (*POLICIES, "optimum")
    ]
    table = CliRunner().invoke(bench, [*arguments, "--policy", "reuse"])
    assert [line.split()[:1] for line in table.output.splitlines()[1:]] == [["day"], ["day"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budgets", "0.5,2"], "--budgets takes numbers above 0 and up to 1"),
        (["--budgets", "half"], "--budgets takes numbers above 0 and up to 1"),
        (["--policy", "fifo"], "'lru', 'reuse'"),
        (["--trace", __file__], "line 1: a JSON object is expected"),
        (["--trace", "/nowhere/t"], "/nowhere/t cannot be read"),
    ],
)
def test_wrong_input_is_named(arguments: list[str], words: str) -> None:
    """Allowed values, the file, the line."""
    done = CliRunner().invoke(bench, ["eviction", *arguments])
    assert done.exit_code in (1, 2)
    assert words in done.output


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ([("start", 1)], "operation 1 of the trace: space 1 is not there"),
        ([make(1), make(1)], "makes space 1 twice"),
        ([("fork", 2, {"parent": 1})], "operation 1 of the trace: space 1 is not there"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(operations: list[tuple[object, ...]], words: str) -> None:
    """With the number of the operation."""
    with pytest.raises(InvalidParams, match=words):
        Replay(HEADER, trace(*operations), LruPolicy(), 10_000).run()


def test_a_script_writes_what_a_daemon_would() -> None:
    """Turns carry the pages needed and filled."""
    import random

    script = Script(random.Random(1))
    agent = script.agent(600)
    script.fork(agent)
    words = [(line.word, line.tokens, line.pages) for line in script.lines]
    assert words == [("create", 0, 0), ("start", 0, 0), ("end", 600, 2), ("fork", 600, 0)]
