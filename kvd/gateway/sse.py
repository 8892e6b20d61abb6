"""Server-sent events as bytes (HTML Living Standard, section 9.2). Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"
"""OpenAI's last event of a stream of chunks."""
COMMENT_PING = b": ping\n\n"
"""Keeps a connection alive; every reader of events skips comments."""


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event; JSON has no line breaks of its own, so one line of data is enough."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {text}\n\n".encode()


__all__ = ["COMMENT_PING", "DONE", "event"]
