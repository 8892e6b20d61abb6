"""Whose address space a request continues: from headers and fields, in a fixed order, never from a likeness of content.

Theory of operation. `SOURCES` lists what may name an agent; the first one that a request has wins. `X-Kvd-Agent` is an
agent's own name. All others name a *group* (a session, a user, a cache key) that may hold several conversations at a
time: a client's sub-agents share its key. So the agent of such a request is the group and the conversation's root, a
digest of everything up to the first user message: conversations of one group never evict each other or wait for each
other, and a conversation keeps its agent after a restart of gateway or daemon, without any state here.

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
"""Longer values are shortened to a digest: an agent's name has 128 characters, with prefix and root."""

AGENT_HEADER = "x-kvd-agent"
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
    for source, value in _groups(headers, body):
        if value:
            root = "" if messages is None else ":" + root_digest(messages)
            return Identity(source, f"{PREFIX}{source}:{_short(value)}{root}")
    return Identity("anonymous", None)


def _groups(headers: Mapping[str, str], body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What names a group, in order; empty where it is absent."""
    claude = "/".join(
        value for part in ("session", "agent") if (value := headers.get(f"x-claude-code-{part}-id", "").strip())
    )
    session = next((value for name in SESSION_HEADERS if (value := headers.get(name, "").strip())), "")
    user = _text(body.get("safety_identifier")) or _text(body.get("user"))
    return [
        ("claude-code", claude),
        ("session", session),
        ("cache-key", _text(body.get("prompt_cache_key"))),
        ("metadata", _of_metadata(body.get("metadata"))),
        ("user", user),
    ]


def _of_metadata(metadata: object) -> str:
    if not isinstance(metadata, dict):
        return ""
    value = next((text for name in METADATA_FIELDS if (text := _text(metadata.get(name)))), "")
    if found := _CLAUDE_USER.search(
        value
    ):  # user_…_account_…_session_ID: the session is the part that tells agents apart
        return found[1]
    if value.startswith("{"):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return _text(inner.get("session_id")) or value if isinstance(inner, dict) else value
    return value


def root_digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """16 hex digits of everything up to the first user message: equal for all turns of a conversation."""
    end = next((index for index, message in enumerate(messages) if message.get("role") == "user"), len(messages) - 1)
    root = [[message.get("role"), message.get("content")] for message in messages[: end + 1]]
    data = json.dumps(root, ensure_ascii=True, sort_keys=True).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _own_name(sent: str) -> str:
    try:
        name = sent.encode("latin-1").decode()  # headers are bytes; whoever writes beyond ASCII writes UTF-8
    except UnicodeError:
        name = sent
    printable = all(unicodedata.category(character)[0] != "C" for character in name)
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


__all__ = ["ANONYMOUS_PREFIX", "PREFIX", "SOURCES", "Identity", "identify", "root_digest"]
