"""Values as the bytes of a response: server-sent events (HTML Living Standard, section 9.2) and JSON.

A lone surrogate, which UTF-8 cannot carry, is spelt as JSON spells it: a request with one is refused where it is read,
and whatever brings one here nevertheless must not break a response off. May import starlette.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

DONE = b"data: [DONE]\n\n"
"""OpenAI's last event of a stream of chunks."""
COMMENT_PING = b": ping\n\n"
"""Keeps a connection alive; every reader of events skips comments."""


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Made once: `json.dumps` makes one for each value that is said in another way than its own."""


def json_bytes(data: object) -> bytes:
    """Compact JSON in UTF-8."""
    return _ENCODER.encode(data).encode("utf-8", "backslashreplace")


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event; JSON has no line breaks of its own, so one line of data is enough."""
    head = f"event: {name}\n" if name is not None else ""
    return head.encode() + b"data: " + json_bytes(data) + b"\n\n"


class JsonReply(JSONResponse):
    """A response of JSON."""

    def render(self, content: object) -> bytes:
        """Its body."""
        return json_bytes(content)


__all__ = ["COMMENT_PING", "DONE", "JsonReply", "event", "json_bytes"]
