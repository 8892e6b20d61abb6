"""What the client's types take and what importing it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvd_client
from kvd_client.results import Statistics, build
from kvd_client.stream import OtherEvent, ToolCall, parse_event


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"type": 7},
        {"type": "text"},
        {"type": "text", "text": 7},
        {"type": "queued", "position": True},
        {"type": "usage", "prompt_tokens": "3"},
    ],
)
def test_odd_events_are_passed_through(event: dict[str, object]) -> None:
    """An event that does not fit its class comes as it was sent."""
    parsed = parse_event(event)
    assert isinstance(parsed, OtherEvent)
    assert parsed.data == event


def test_tool_calls_keep_their_fields() -> None:
    """A tool call's own fields are passed on unchanged."""
    event = {"type": "tool_call", "id": "1", "name": "f", "arguments": "{}"}
    assert parse_event(event) == ToolCall({"id": "1", "name": "f", "arguments": "{}"})


def test_results_of_other_versions() -> None:
    """Missing fields have defaults, extra ones are kept."""
    assert build(Statistics, None) == Statistics()
    assert build(Statistics, {"swap_bytes": 3, "new": 1}) == Statistics(swap_bytes=3, server={"new": 1})


def test_importing_is_light() -> None:
    """`import kvd_client` loads neither click nor asyncio nor anything of the daemon; AsyncClient comes when asked."""
    code = (
        "import sys, kvd_client\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'kvd', 'click', 'asyncio', 'platformdirs', 'structlog'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))\n"
        "kvd_client.AsyncClient\n"
        "import kvd_client.cli\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['asyncio', 'click']"]


def test_the_public_names() -> None:
    """`__all__` is sorted and every name of it is there."""
    assert kvd_client.__all__ == sorted(kvd_client.__all__)
    assert all(getattr(kvd_client, name) for name in kvd_client.__all__)
    with pytest.raises(AttributeError):
        _ = kvd_client.Nothing
