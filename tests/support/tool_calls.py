"""A transcript of tool calls that a small base model continues: its arguments must come out exactly (P32)."""

from __future__ import annotations

import json
from typing import Any

CALLS = (
    {"tool": "open_file", "path": "/srv/data/report-7731.csv", "line": 418},
    {"tool": "open_file", "path": "/srv/logs/build-9025.txt", "line": 6173},
    {"tool": "open_file", "path": "/home/ada/notes/kv-cache_v2.md", "line": 50982},
)


def transcript() -> tuple[str, str]:
    """What was asked and called so far, and the last request."""
    turns = [f"User: open {call['path']} at line {call['line']}\nCall: {json.dumps(call)}\n" for call in CALLS[:-1]]
    last = CALLS[-1]
    return "".join(turns), f"User: open {last['path']} at line {last['line']}\nCall:"


def parsed(answer: str) -> Any:
    """The call that the answer is, up to the end of its line."""
    return json.loads(answer.split("\n")[0])


__all__ = ["CALLS", "parsed", "transcript"]
