"""docs/protocol.md is complete: a client in another language is written from it."""

from __future__ import annotations

import re
from pathlib import Path

from kvd.front import FrontLimits
from kvd.vm.codes import STATES
from kvd_client.events import EVENT_KINDS
from kvd_client.stream import (
    Durable,
    FirstToken,
    Logprobs,
    Matched,
    Preempted,
    Prefill,
    Queued,
    Reasoning,
    Resumed,
    Text,
    ToolCall,
    Usage,
)
from kvd_client.wire import CLIENT_LIMITS, CODES, SERVER_LIMITS

DOC = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
METHODS = (
    "hello generate chat inject tokenize agent.list agent.info agent.fork agent.rollback agent.pin agent.unpin "
    "agent.verify agent.prefetch agent.evict agent.delete agent.export agent.import residency monitor statistics "
    "events.subscribe "
    "model.info configure health drain shutdown"
)


def test_the_error_table_is_the_code_table() -> None:
    """Every name and code is in the table, and nothing else is."""
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", DOC, re.MULTILINE)
    assert {name: int(code) for code, name in rows} == dict(CODES)


def test_every_method_and_event_is_described() -> None:
    """Each method has a heading, each event type a row."""
    headings = ", ".join(re.findall(r"^### (.+)$", DOC, re.MULTILINE)).split(", ")
    assert set(METHODS.split()) <= set(headings)
    for kind in (
        Queued,
        Preempted,
        Resumed,
        Matched,
        Prefill,
        FirstToken,
        Text,
        Logprobs,
        Reasoning,
        ToolCall,
        Usage,
        Durable,
    ):
        assert f"| `{kind.type}` |" in DOC


def test_every_kind_of_event_and_figure_of_the_monitor_is_described() -> None:
    """Each kind that can be subscribed to has its place in a row, and each state of a page is explained."""
    rows = " ".join(line.split("|")[1] for line in DOC.splitlines() if line.startswith("| `"))
    assert [kind for kind in (*EVENT_KINDS, "subscribed", "gap") if f"`{kind}`" not in rows] == []
    assert [state for state in STATES if f"`{state}`" not in DOC] == []


def test_the_limits_are_those_of_the_code() -> None:
    """The figures of the table are the defaults."""
    limits = FrontLimits()
    mib = 1 << 20
    rows = {cells[1].strip(): cells for line in DOC.splitlines() if len(cells := line.split("|")) == 5}
    assert rows["bytes of a message"][2:4] == [
        f" {SERVER_LIMITS.max_message_bytes // mib} MiB ",
        f" {CLIENT_LIMITS.max_message_bytes // mib} MiB ",
    ]
    assert f" {SERVER_LIMITS.max_depth} " in rows["containers nested in a message"]
    assert f" {SERVER_LIMITS.max_values:,} " in rows["values in a message (map keys and containers count)"]
    assert f" {CLIENT_LIMITS.max_values:,} " in rows["values in a message (map keys and containers count)"]
    assert f"{limits.max_connections}," in rows["connections at a time"][2]
    assert f"{limits.max_calls:,}," in rows["calls in flight on a connection"][2]
    assert f"{limits.max_unread_bytes // mib} MiB" in rows["bytes that wait for a client which does not read"][2]
