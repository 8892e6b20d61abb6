"""What the commands print for people, from facts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvd_client.cli_show import agent_line, agent_table, fact_lines, format_name, limit_lines, size
from kvd_client.residency import (
    BEHIND_MARK,
    LEGEND,
    PAGE_MARKS,
    agent_map_lines,
    branch_marks,
    residency_lines,
)


def agent(name: str, namespace: str = "default", **changes: object) -> dict[str, Any]:
    """Facts of an agent of usual size."""
    facts = {"agent": name, "namespace": namespace, "tokens": 131_072, "resident_bytes": 1_226_833_920}
    rest = {"swapped_pages": 512, "pinned": True, "durable": True, "kv_format": "k8v4-7fe54501f302"}
    return {**facts, **rest, **changes}


def branch(states: str, *, current: bool = True, shared_by: int = 1) -> dict[str, Any]:
    """A branch of one cache group whose pages have these states, the last one the open page's."""
    *pages, tail = states.split()
    maps = [{"page": at, "state": state, "resident": True, "shared_by": shared_by} for at, state in enumerate(pages)]
    segment = {"group": 0, "pages": maps, "tail": {"tokens": 3, "state": tail}}
    return {"branch": 1, "current": current, "tokens": 700, "segments": [segment]}


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(0, "0 B"), (9_360, "9360 B"), (10_000, "10.0 kB"), (999_960, "1.0 MB"), (67_092_480, "67.1 MB")],
)
def test_sizes_have_units(size_bytes: int, shown: str) -> None:
    """Small sizes are exact, others have one digit after the point."""
    assert size(size_bytes) == shown


def test_formats_lose_their_digests() -> None:
    """The digest of a format's constants is for programs; equal names are said once."""
    assert format_name("q4c-7fe54501f302, q4c-0123456789ab, q4") == "q4c, q4"


def test_facts_are_aligned_lines_with_units() -> None:
    """Nested maps are flattened, figures rounded, runs of integers joined, facts without a value left out."""
    facts = {
        "peak_resident_bytes": 67_092_480,
        "pages": {"clean": 3, "evicted": 0},
        "swap_in_s": 1.783700008672895e-05,
        "fp16_ratio": 0.40625,
        "durable_reason": None,
        "pinned": False,
        "layers": [0, 1, 2, 5],
        "groups": [{"kind": "full", "kv_heads": 3, "window": None}],
        "notices": [],
    }
    assert fact_lines(facts) == [
        "peak resident bytes  67.1 MB",
        "pages, clean         3",
        "pages, evicted       0",
        "swap in              0.000 s",
        "fp16 ratio           0.4062",
        "pinned               no",
        "layers               0-2, 5",
        "groups 1             kind full, kv heads 3",
        "notices              none",
    ]


def test_long_facts_are_broken_on_a_terminal_only() -> None:
    """Where the width is known no line is longer; elsewhere a fact is one line."""
    facts = {"methods": [f"method.{number}" for number in range(30)]}
    assert len(fact_lines(facts)) == 1
    assert max(map(len, fact_lines(facts, columns=80))) <= 80


def test_the_table_fits_eighty_columns() -> None:
    """Agents with names of usual length, with and without the column of namespaces."""
    rows = [agent("release-reviewer"), agent("b", "team-a", resident_bytes=0, swapped_pages=0)]
    for namespaces in (False, True):
        lines = agent_table(rows, namespaces=namespaces)
        assert max(map(len, lines)) <= 80
        assert ("team-a" in lines[2]) == namespaces
    assert lines[1].endswith("k8v4")


def test_the_table_says_when_agents_end() -> None:
    """In a column of its own, which is there when one of them does; `show` tells the time."""
    ends = {"-": None, "in 30 d": 30.5 * 86_400, "in 25 h": 25.5 * 3600, "in 7 min": 450.0, "now": 0.0}
    rows = [agent("release-reviewer", expires_s=0.0, expires_in_s=left_s) for left_s in ends.values()]
    lines = agent_table(rows, namespaces=False)
    assert max(map(len, lines)) <= 80
    assert [line.split("  ")[-1].strip() for line in lines] == ["ends", *ends]
    assert agent_table(rows[:1], namespaces=False)[0].endswith("format")
    at = time.mktime((2031, 5, 6, 7, 8, 0, 0, 0, -1))
    assert any("2031-05-06 07:08:00" in line for line in fact_lines(agent("a", expires_s=at)))


def test_an_action_tells_what_is_not_safe() -> None:
    """One line, with the reason why a crash would cost something."""
    line = agent_line("a evicted", agent("a", swapped_pages=1, behind_window_pages=2))
    assert line == "a evicted: 131072 tokens, 1.2 GB in RAM, 1 page only on disk, 2 pages behind the window"
    line = agent_line("a pinned", agent("a", durable=False, durable_reason="disk full"))
    assert line == "a pinned: 131072 tokens, 1.2 GB in RAM, 512 pages only on disk; NOT durable (disk full)"


def test_limits_say_what_they_bound_and_how_long_they_last() -> None:
    """What is changed until a restart, and what is not met yet, is said in words; what is not known is left out."""
    limits = {
        "budget_bytes": 4_000_000_000,
        "start_budget_bytes": 10_200_000_000,
        "largest_budget_bytes": 12_000_000_000,
        "usable_bytes": 3_700_000_000,
        "resident_bytes": 5_000_000_000,
        "high_mark_bytes": 3_600_000_000,
        "low_mark_bytes": 3_500_000_000,
        "pin_limit_bytes": 1_800_000_000,
        "footprint_bytes": 6_000_000_000,
        "footprint_limit_bytes": None,
        "namespace_quotas": {"work": 2_000_000_000},
        "namespace_disk_quotas": {"work": 9_000_000_000},
        "until_restart": ("budget",),
        "converging": ("budget",),
    }
    assert limit_lines(limits) == [
        "budget     4.0 GB, at most 12.0 GB here; requests may take 3.7 GB of it",
        "resident   5.0 GB",
        "marks      idle pages beyond 3.6 GB go, down to 3.5 GB",
        "pins       may hold 1.8 GB",
        "footprint  6.0 GB",
        "quota      work: 2.0 GB",
        "on disk    work: 9.0 GB",
        "The next start has 10.2 GB again; `kvd serve --budget` sets it for good.",
        "More than the budget is still held: it goes as soon as it is written, or its requests end.",
    ]
    assert limit_lines({"budget_bytes": 5})[0] == "budget     5 B; requests may take 0 B of it"


def test_a_page_is_a_mark() -> None:
    """Every state in which a mapped page can be has a mark, and every mark is explained."""
    from kvd.vm.page import PageState

    assert {state.value for state in PageState} - {"released"} == set(PAGE_MARKS)
    assert all(f"{mark} " in LEGEND for mark in PAGE_MARKS.values())
    assert len(LEGEND) <= 80
    assert branch_marks(branch("clean evicted loading stashed")) == "█░▒_"
    behind = branch("evicted sealed_dirty evicted filling")
    for page in behind["segments"][0]["pages"][:2]:
        page["behind_window"] = True
    assert branch_marks(behind) == "·▓░▄", "what no step sees any more is told from what will be loaded again"
    assert f"{BEHIND_MARK} " in LEGEND
    assert branch_marks(branch("of_the_future filling")) == "?▄"


def test_one_line_a_branch() -> None:
    """Branches of an agent are numbered, what is special is said, and namespaces only when there are several."""
    two = {
        "agent": "planner",
        "namespace": "default",
        "pinned": True,
        "branches": [branch("clean filling", current=False), branch("clean sealed_dirty filling", shared_by=2)],
    }
    lines = residency_lines({"page_tokens": 256, "agents": [two]})
    assert lines == [
        "one mark a page of 256 tokens:",
        LEGEND,
        "",
        "planner, branch 1  700 tokens  █▄  pinned, left behind",
        "planner, branch 2  700 tokens  █▓▄  pinned, shares pages",
    ]
    other = {"agent": "b", "namespace": "x", "branches": [branch("filling")]}
    assert any(line.startswith("x/b ") for line in residency_lines({"agents": [two, other]}))
    assert residency_lines({"agents": []}) == ["no agents yet"]


def test_the_map_of_one_agent() -> None:
    """Group by group, in rows with page numbers; shared and pinned pages are marked below, the current branch first."""
    old, now = branch("clean filling", current=False), branch("clean " * 70 + "evicted packed")
    pages = now["segments"][0]["pages"]
    for page in pages[:3]:
        page |= {"shared_by": 2, "pinned": True}
    pages[-1]["behind_window"] = True
    now["segments"].append(now["segments"][0] | {"group": 1, "window_tokens": 512, "pages": [], "tail": None})
    agent = {"agent": "planner", "namespace": "default", "branches": [old, now]}
    lines = agent_map_lines({"page_tokens": 256, "agents": [agent]}, columns=80)
    assert max(map(len, lines)) <= 80
    assert lines[4:11] == [
        "planner, branch 1 of 2: 700 tokens",
        "  group 0, layers that see all tokens: 72 pages, 71 in RAM, 1 on disk, 3 shared,",
        "    3 pinned, 1 behind the window",
        f"       0  {'█' * 64}",
        "          sss",
        "          ppp",
        f"      64  {'█' * 6}·▄",
    ]
    assert "  group 1, layers that see a window of 512 tokens: 0 pages" in lines
    assert "planner, branch 2 of 2, left behind: 700 tokens" in lines


def test_long_rows_of_marks_are_broken() -> None:
    """An agent of many pages stays inside the terminal, and no mark is lost."""
    long = {"agent": "a", "namespace": "d", "pinned": True, "branches": [branch("clean " * 500 + "filling")]}
    lines = residency_lines({"agents": [long]}, columns=80)
    assert max(map(len, lines)) <= 80
    assert sum(line.count("█") for line in lines[3:]) == 500
