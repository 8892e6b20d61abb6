"""What `kvd-client top` shows, with fixed data: widths, columns, order, rates, keys; no terminal, no daemon."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from kvd_client import MonitorPicture
from kvd_client.top_rates import Rates, hit_rate
from kvd_client.top_screen import parse_keys
from kvd_client.top_view import SORTS, Choice, Facts, bar, fit, frame, ordered, width

STATES = ["filling", "sealed_dirty", "writing", "clean", "evicted", "loading", "packed", "stashed", "lost"]
CLEAN, EVICTED, PACKED, LOST = 3, 4, 6, 8
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def entry(name: str, *runs: int, namespace: str = "default", **facts: Any) -> dict[str, Any]:
    """One agent."""
    segments = [{"group": 0, "page_bytes": 100, "first_page": 0, "runs": list(runs)}]
    known = {"state": "idle", "tokens": 512, "resident_bytes": 4096, "turns": 2, "generated_tokens": 0}
    branch = {"branch": 1, "tokens": 512, "segments": segments}
    return {"agent": name, "namespace": namespace, **known, "branches": [branch], **facts}


def answer(*agents: dict[str, Any], **figures: Any) -> dict[str, Any]:
    """What the daemon says."""
    known = {
        "time_s": 100.0,
        "uptime_s": 3725,
        "agents": len(agents),
        "agents_asleep": 0,
        "budget_bytes": 10_200_000_000,
        "resident_bytes": 5_100_000_000,
        "frames": 400,
        "disk_used_bytes": 20_000_000_000,
        "quota_bytes": 100_000_000_000,
        "running": 1,
        "queued": 2,
        "disk": "ok",
        "prompt_tokens": 1000,
        "cached_tokens": 900,
    }
    return {"version": 1, "full": True, "states": STATES, "page_tokens": 256, "agents": list(agents)} | {
        "figures": known | figures
    }


def facts_of(*answers: dict[str, Any], **more: Any) -> Facts:
    """Looks, one after the other."""
    picture, rates = MonitorPicture(), Rates()
    for each in answers:
        picture.take(each)
        rates.take(picture)
    return Facts(picture, rates, {"model": "smollm2-135m", "kv_format": "k8v4"}, **more)


ALICE = entry(
    "alice",
    *(CLEAN, 3, PACKED, 1),
    state="running",
    pinned=True,
    prompt_tokens=100,
    cached_tokens=75,
    last_turn={"match": "extend", "outcome": "ok", "time_s": 50.0},
    generated_tokens=10,
)
BOB = entry("bob", EVICTED, 5, tokens=9000, resident_bytes=0, last_turn={"match": "diverge", "time_s": 90.0})


@pytest.mark.parametrize("columns", [20, 60, 80, 200])
@pytest.mark.parametrize("rows", [5, 12, 40])
@pytest.mark.parametrize("colour", [True, False])
def test_a_frame_fits_its_terminal(columns: int, rows: int, colour: bool) -> None:
    """No line is wider, there are as many as there are rows, whatever is shown; colours take no cells."""
    crowd = [entry(f"agent {number} 日本語", CLEAN, 500, EVICTED, 300) for number in range(120)]
    troubles = {"disk": "refuses", "disk_reason": "No space left\x1b[2J", "thrashing": True, "memory_pressure": "hard"}
    for facts in (facts_of(answer(*crowd, **troubles)), facts_of(answer()), facts_of(answer(ALICE, BOB), away="gone")):
        for choice in (Choice(), Choice(shows_help=True), Choice(message="m" * 300)):
            lines = frame(facts, choice, columns=columns, rows=rows, colour=colour)
            assert len(lines) == rows
            plain = [ESCAPES.sub("", line) for line in lines]
            assert all(width(line) <= columns for line in plain)
            assert not any("\x1b" in line for line in plain)
            assert colour or plain == lines


def test_what_each_line_says() -> None:
    """The daemon in the head, one line an agent."""
    now = answer(
        ALICE | {"generated_tokens": 60},
        BOB,
        time_s=102.0,
        bytes_read=24_000_000,
        decode_rows=80,
        faults=10,
        prompt_tokens=1100,
        cached_tokens=950,
    )
    lines = frame(facts_of(answer(ALICE, BOB), now), Choice(), columns=120, rows=20, colour=False)
    text = "\n".join(lines)
    assert "kvd smollm2-135m k8v4  up 1 h 02 m  2 agents" in text
    assert "5.1 GB of 10.2 GB (50 %)  400 frames" in text
    assert "20.0 GB of 100.0 GB (20 %)  disk ok" in text
    assert "in 12.0 MB/s  out 0 B/s  faults 5/s" in text
    assert "1 running  2 queued  40.0 tokens/s  hits 86 % (now 50 %)" in text
    heading = next(line for line in lines if line.startswith("agent"))
    titles = ["agent", "state", "tokens", "tok/s", "hit", "last", "RAM", "pin", "turns", "pages"]
    assert heading.split() == [*titles, "(by", "activity)"]
    alice, bob = (next(line for line in lines if line.startswith(name)) for name in ("alice", "bob"))
    assert alice.split() == ["alice", "running", "512", "25.0", "75", "%", "extend", "4096", "B", "pin", "2", "███▄"]
    assert bob.split() == ["bob", "idle", "9000", "-", "-", "diverge", "0", "B", "2", "░░░░░"]
    assert lines[-1].startswith("q quit")


def test_columns_leave_a_narrow_terminal_from_the_least_important_on() -> None:
    """Name, pages and state stay."""
    facts = facts_of(answer(ALICE, BOB))
    headings = {
        columns: next(
            line for line in frame(facts, Choice(), columns=columns, rows=20, colour=False) if line.startswith("agent")
        ).split()
        for columns in (36, 60, 80, 200)
    }
    assert headings[36][:3] == ["agent", "state", "pages"]
    assert headings[60][:7] == ["agent", "state", "tokens", "tok/s", "hit", "pin", "pages"]
    assert headings[80][:8] == ["agent", "state", "tokens", "tok/s", "hit", "last", "RAM", "pin"]
    columns = [{word for word in heading if word.isalpha() or word == "tok/s"} for heading in headings.values()]
    assert all(fewer <= more for fewer, more in pairwise(columns)), "a wider terminal shows no less"


def test_the_selected_agent_is_always_in_sight() -> None:
    """With 120 agents and 20 rows, wherever it stands."""
    facts = facts_of(answer(*(entry(f"agent-{number:03}", CLEAN, 1) for number in range(120))))
    keys = ordered(facts, Choice(sort="name"))
    choice = Choice(sort="name")
    for by in (0, 1, 50, 500, -1, -500):
        choice = choice.moved(keys, by)
        lines = frame(facts, choice, columns=80, rows=20, colour=True)
        (marked,) = [line for line in lines if line.startswith("\x1b[7m")]
        assert choice.selected is not None
        assert choice.selected[1] in marked
    assert choice.selected == keys[0]
    assert Choice().moved([], 1).selected is None


def test_orders() -> None:
    """Each of them, both ways; the key goes round."""
    facts = facts_of(answer(ALICE, BOB), answer(ALICE | {"generated_tokens": 20}, BOB, time_s=101.0))
    first = {sort: ordered(facts, Choice(sort=sort))[0][1] for sort in SORTS}
    assert first == {
        "activity": "alice",
        "name": "alice",
        "tokens": "bob",
        "RAM": "alice",
        "hits": "alice",
        "tokens/s": "alice",
        "last used": "bob",
    }
    for sort in SORTS:
        assert ordered(facts, Choice(sort=sort, is_reversed=True)) == ordered(facts, Choice(sort=sort))[::-1]
    choice = Choice()
    for _ in SORTS:
        choice = choice.next_sort()
    assert choice == Choice()


def test_a_bar_has_a_mark_a_page_or_one_for_several() -> None:
    """In order; a cell of many pages shows most of them, but a lost one always; a page behind the window is a dot."""
    picture = MonitorPicture()
    picture.take(answer())
    assert bar(picture, entry("a", CLEAN, 2, EVICTED, 1, PACKED, 1), 10) == "██░▄"
    assert bar(picture, entry("a", CLEAN, 300, EVICTED, 100), 8) == "██████░░"
    assert bar(picture, entry("a", CLEAN, 399, LOST, 1), 4) == "███!"
    assert bar(picture, entry("a", EVICTED + 32, 2, CLEAN, 1), 10) == "··█"
    assert bar(picture, entry("a", 15, 1), 10) == "?"
    assert bar(picture, {"branches": []}, 10) == ""


def test_rates_are_of_the_last_seconds_and_start_anew_with_the_daemon() -> None:
    """Nothing is known from one look; counters that went back are another run's."""
    rates, picture = Rates(), MonitorPicture()
    for second in range(10):
        picture.take(answer(ALICE | {"generated_tokens": 5 * second}, time_s=100.0 + second, faults=7 * second))
        rates.take(picture)
        assert rates.is_known == (second > 0)
    assert rates.per_second("faults") == 7.0
    assert rates.tokens_per_second(("default", "alice")) == 5.0
    assert rates.tokens_per_second(("default", "nobody")) == 0.0
    assert rates.hit_rate() is None, "no turn ended lately"
    picture.take(answer(ALICE, time_s=200.0, faults=0))
    rates.take(picture)
    assert not rates.is_known
    assert rates.per_second("faults") == 0.0
    assert (hit_rate(ALICE), hit_rate(BOB)) == (0.75, None)


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[Bjk", ["up", "down", "j", "k"]),
        (b"\x1bOA\x1b[5~\x1b[6~\x1b[H\x1b[F", ["up", "page up", "page down", "home", "end"]),
        (b"\x1b[1;5C\x1b[Zs", ["s"]),
        (b"\x1b", []),
        (b"\x1bx", []),
        (b"\x1b[1", []),
        ("é".encode(), ["Ã", "©"]),
    ],
)
def test_keys(data: bytes, keys: list[str]) -> None:
    """Arrows as terminals send them in both modes; what is not known is left out, never taken for another key."""
    assert parse_keys(data) == keys


def test_text_in_cells() -> None:
    """Wide characters take two, combining ones none; what is too long ends with an ellipsis."""
    assert fit("abc", 5) == "abc  "
    assert fit("abcdef", 4) == "abc…"
    assert fit("日本語", 5) == "日本…"
    assert fit("日本語", 4) == "日… "
    assert width("e\u0301") == 1
    assert fit("x", 0) == ""
