"""What names an agent, in which order, and that content alone never does."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.gateway.errors import ApiError
from kvd.gateway.identity import MAX_NAME_CHARACTERS, PREFIX, SOURCES, identify

HI = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
ALL_HEADERS = {
    "x-kvd-agent": "me",
    "x-claude-code-session-id": "s1",
    "x-claude-code-agent-id": "a1",
    "session-id": "s2",
}
ALL_FIELDS: dict[str, Any] = {"prompt_cache_key": "k", "metadata": {"user_id": "m"}, "user": "u"}


def test_the_order_is_the_documented_one() -> None:
    """Of everything that is there the strongest wins; taking it away leaves the next."""
    headers, body = dict(ALL_HEADERS), dict(ALL_FIELDS)
    found = []
    for gone in ("x-kvd-agent", "x-claude-code", "session-id", "prompt_cache_key", "metadata", "user", ""):
        found.append(identify(headers, body, HI).source)
        headers = {name: value for name, value in headers.items() if not gone or not name.startswith(gone)}
        body.pop(gone, None)
    assert found == [source for source, _ in SOURCES]


@pytest.mark.parametrize(
    ("headers", "body", "agent"),
    [
        ({"x-kvd-agent": "a b"}, {}, "a b"),
        ({"x-kvd-agent": "zoë".encode().decode("latin-1")}, {}, "zoë"),
        ({"x-kvd-agent": "zoë"}, {}, "zoë"),
        ({"x-claude-code-session-id": "s"}, {}, "gw:claude-code:s"),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, {}, "gw:claude-code:s/a"),
        ({"x-claude-code-agent-id": "a"}, {}, "gw:claude-code:a"),
        ({"x-session-id": "s"}, {}, "gw:session:s"),
        ({}, {"prompt_cache_key": "k"}, "gw:cache-key:k"),
        ({}, {"metadata": {"session_id": "s", "user_id": "u"}}, "gw:metadata:s"),
        ({}, {"metadata": {"user_id": "user_1_account_2_session_3-4"}}, "gw:metadata:3-4"),
        ({}, {"metadata": {"user_id": '{"session_id": "s"}'}}, "gw:metadata:s"),
        ({}, {"user": "u"}, "gw:user:u"),
        ({}, {"user": "u", "safety_identifier": "i"}, "gw:user:i"),
        ({}, {"user": "  ", "prompt_cache_key": 3, "metadata": "x"}, None),
    ],
)
def test_names(headers: dict[str, str], body: dict[str, Any], agent: str | None) -> None:
    """`X-Kvd-Agent` is a name; everything else is a group, shown in its agents' names before a digest."""
    found = identify(headers, body, HI).agent
    if agent is None or not agent.startswith(PREFIX):
        assert found == agent
    else:
        assert found is not None
        shown, _, digest = found.rpartition(":")
        assert (shown, len(digest)) == (agent, 24)


def test_no_two_requests_spell_the_same_agent() -> None:
    """P10, P19: whatever stands in a value, it is not taken for another value and a root, another source, or two."""
    user = identify({}, {"user": "ann"}, HI).agent
    assert user is not None
    root = user.rpartition(":")[2]
    session, agent = "x-claude-code-session-id", "x-claude-code-agent-id"
    found = [
        user,
        identify({}, {"user": "ann"}, None).agent,
        identify({}, {"user": f"ann:{root}"}, None).agent,
        identify({}, {"safety_identifier": "ann"}, HI).agent,
        identify({}, {"metadata": {"user_id": "ann"}}, HI).agent,
        identify({}, {"metadata": {"agent_id": "ann"}}, HI).agent,
        identify({}, {"user": "ann"}, []).agent,
        identify({}, {"user": "ann"}, HI[:1]).agent,
        identify({session: "a/b"}, {}, HI).agent,
        identify({agent: "a/b"}, {}, HI).agent,
        identify({session: "a", agent: "b"}, {}, HI).agent,
        identify({session: "a/b", agent: "c"}, {}, HI).agent,
        identify({session: "a", agent: "b/c"}, {}, HI).agent,
    ]
    assert len(set(found)) == len(found)
    assert all(name is not None and len(name) <= MAX_NAME_CHARACTERS for name in found)


def test_conversations_of_one_group_are_different_agents() -> None:
    """P18: parallel sub-agents that share a key have agents of their own; the turns of one conversation share one."""
    other = [HI[0], {"role": "user", "content": "Something else"}]
    longer = [*HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
    body = {"prompt_cache_key": "k"}
    assert identify({}, body, HI).agent != identify({}, body, other).agent
    assert identify({}, body, HI).agent == identify({}, body, longer).agent


def test_groups_of_equal_conversations_are_different_agents() -> None:
    """P10, P19: however alike the content, another user is another agent."""
    assert identify({}, {"user": "a"}, HI).agent != identify({}, {"user": "b"}, HI).agent


def test_text_without_roles_has_one_agent_a_group() -> None:
    """A completion's text has no first message that could tell conversations apart."""
    assert identify({}, {"user": "u"}, None) == identify({}, {"user": "u", "prompt": "x"}, None)


def test_long_and_odd_values_become_digests() -> None:
    """Names of agents are short and printable whatever a client sends; equal values stay equal, others differ."""
    values = ["x" * 500, "x" * 501, "ä\n", "\ud800"]
    names = [identify({}, {"user": value}, HI).agent for value in values]
    assert len(set(names)) == len(values)
    assert all(name is not None and len(name) <= 128 and name.isascii() and name.isprintable() for name in names)
    assert identify({}, {"user": values[0]}, HI).agent == names[0]


@pytest.mark.parametrize("name", ["", "x" * 129, "a\tb", PREFIX + "user:bob"])
def test_names_that_cannot_be_are_refused(name: str) -> None:
    """Nobody can claim a name that the gateway makes for others."""
    with pytest.raises(ApiError, match="X-Kvd-Agent must be 1 to 128 printable characters"):
        identify({"x-kvd-agent": name}, {}, HI)
