"""Whose address space a request continues: from headers and fields, in a fixed order, never from a likeness of content.

Theory of operation. `SOURCES` lists what may name an agent; the first one that a request has wins. `X-Kvd-Agent` is an
agent's own name. All others name a *group* (a session, a user, a cache key) that may hold several conversations at a
time: a client's sub-agents share its key. So the agent of such a request is the group and the conversation's root, all
up to the first user message: conversations of one group never evict each other or wait for each other, and a
conversation keeps its agent after a restart of gateway or daemon, without any state here.

The agent's name shows source and value to whoever reads it and ends with a digest of a JSON list of source, fields,
values and root. The digest tells agents apart, not the text before it: no value can be spelt so that it reads like
another value with a root, or like two.

A request that names nothing is anonymous (`kvd.gateway.conversations`). Names that the gateway makes begin with
`PREFIX`; clients cannot name those. Pure. May import kvd.gateway.errors.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.gateway.errors import ApiError

PREFIX = "gw:"
ANONYMOUS_PREFIX = PREFIX + "anonymous:"
MAX_NAME_CHARACTERS = 128
MAX_VALUE_CHARACTERS = 72
"""Longer values are shown as a digest: an agent's name has 128 characters, with prefix and digest."""
DIGEST_BYTES = 12

AGENT_HEADER = "x-kvd-agent"
CLAUDE_HEADERS = ("x-claude-code-session-id", "x-claude-code-agent-id")
SESSION_HEADERS = ("session-id", "session_id", "x-session-id", "x-session-affinity", "x-opencode-session")
METADATA_FIELDS = ("agent_id", "session_id", "conversation_id", "thread_id", "user_id")

SOURCES: tuple[tuple[str, str], ...] = (
    ("agent", "header X-Kvd-Agent: the agent's name itself"),
    ("claude-code", "headers X-Claude-Code-Session-Id and X-Claude-Code-Agent-Id, together or alone"),
    ("session", "the first of the headers " + ", ".join(SESSION_HEADERS)),
    ("cache-key", "field prompt_cache_key"),
    ("metadata", "the first of " + ", ".join(f"metadata.{name}" for name in METADATA_FIELDS)),
    ("user", "field safety_identifier or user"),
    ("anonymous", "nothing: an address space of its own"),
)
"""What names an agent, the strongest first, and what it is read from."""

_CLAUDE_USER = re.compile(r"_session_([0-9A-Za-z-]+)\Z")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a request belongs to.

    Attributes:
        source: name of the entry of `SOURCES` that decided.
        agent: the agent's name; None when it is anonymous.
    """

    source: str
    agent: str | None


def identify(
    headers: Mapping[str, str], body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]] | None
) -> Identity:
    """Whose request it is.

    Args:
        headers: by lower-case name.
        body: the request as it came.
        messages: the conversation, canonical; None for text without roles, where a group has one agent.

    Raises:
        ApiError: `X-Kvd-Agent` cannot be a name.
    """
    if (name := headers.get(AGENT_HEADER)) is not None:
        return Identity("agent", _own_name(name))
    root = None if messages is None else root_of(messages)
    for source, named in _groups(headers, body):
        if named:
            shown = "/".join(value for _, value in named)
            digest = hashlib.blake2b(json.dumps([source, named, root]).encode(), digest_size=DIGEST_BYTES).hexdigest()
            return Identity(source, f"{PREFIX}{source}:{_short(shown)}:{digest}")
    return Identity("anonymous", None)


Named = list[tuple[str, str]]
"""What names a group: (header or field, value), none where it is absent."""


def _groups(headers: Mapping[str, str], body: Mapping[str, Any]) -> list[tuple[str, Named]]:
    """What names a group, by source, in order."""
    return [
        ("claude-code", [pair for name in CLAUDE_HEADERS for pair in _first(headers, (name,))]),
        ("session", _first(headers, SESSION_HEADERS)),
        ("cache-key", _first(body, ("prompt_cache_key",))),
        ("metadata", _of_metadata(body.get("metadata"))),
        ("user", _first(body, ("safety_identifier", "user"))),
    ]


def _first(values: Mapping[str, Any], names: Sequence[str]) -> Named:
    """The first of some names that has a value."""
    return [(name, text) for name in names if (text := _text(values.get(name)))][:1]


def _of_metadata(metadata: object) -> Named:
    found = _first(metadata, METADATA_FIELDS) if isinstance(metadata, dict) else []
    session = _session_in(found[0][1]) if found and found[0][0] == "user_id" else ""
    return [("session_id", session)] if session else found


def _session_in(user_id: str) -> str:
    """The session in Claude Code's `user_id`, which is the part that tells agents apart; empty where there is none."""
    if found := _CLAUDE_USER.search(user_id):  # user_…_account_…_session_ID
        return found[1]
    if user_id.startswith("{"):
        try:
            inner = json.loads(user_id)
        except (ValueError, RecursionError):
            return ""
        return _text(inner.get("session_id")) if isinstance(inner, dict) else ""
    return ""


def root_of(messages: Sequence[Mapping[str, Any]]) -> list[object]:
    """Everything up to the first user message: equal for all turns of a conversation."""
    end = next((index for index, message in enumerate(messages) if message.get("role") == "user"), len(messages) - 1)
    return [[message.get("role"), message.get("content")] for message in messages[: end + 1]]


def _own_name(sent: str) -> str:
    try:
        name = sent.encode("latin-1").decode()  # headers are bytes; whoever writes beyond ASCII writes UTF-8
    except UnicodeError:
        name = sent
    printable = (name.isascii() and name.isprintable()) or all(unicodedata.category(each)[0] != "C" for each in name)
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not printable or name.startswith(PREFIX):
        raise ApiError(
            "invalid",
            f"X-Kvd-Agent must be 1 to {MAX_NAME_CHARACTERS} printable characters and not begin with {PREFIX}, "
            f"not {name[:40]!r}",
            param="X-Kvd-Agent",
        )
    return name


def _short(value: str) -> str:
    """A value as a part of a name: itself if it is short and plain, else a digest of it."""
    if len(value) <= MAX_VALUE_CHARACTERS and value.isascii() and value.isprintable():
        return value
    return "#" + hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


__all__ = ["ANONYMOUS_PREFIX", "PREFIX", "SOURCES", "Identity", "identify"]
