"""Anonymous conversations: which agent is forked, which is superseded, which is over."""

from __future__ import annotations

import pytest

from kvd.gateway.conversations import Conversations, chain_of
from tests.gateway.daemons import ScriptedDaemon, text
from tests.gateway.serving import Served, gateway

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
NEXT = {"role": "user", "content": "And?"}


def test_a_chain_tells_meaning_not_spelling() -> None:
    """Reasoning, ids and the spelling of JSON are not what a conversation is; content, calls and tools are."""

    def called(arguments: str) -> dict[str, object]:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }

    base = chain_of([USER, called('{"a": 1, "b": 2}')])
    assert base == chain_of([USER, called('{"b":2,"a":1}') | {"content": "", "reasoning_content": "Hm."}])
    assert base != chain_of([USER, called('{"a": 1}')])
    assert base[0] != chain_of([USER], [{"name": "f"}])[0]
    assert chain_of([USER, NEXT])[0] == chain_of([USER])[0]


def table(most: int = 10) -> Conversations:
    """A table whose agents live 100 seconds."""
    return Conversations(ttl_s=100, most=most)


def test_the_longest_beginning_wins() -> None:
    """Of agents that hold beginnings, the one that holds most; among equals the latest; never another namespace's."""
    held = table()
    held.note("n", "short", chain_of([USER]), 0)
    held.note("n", "long", chain_of([USER, ANSWER]), 0)
    asked = chain_of([USER, ANSWER, NEXT])
    assert held.best("n", asked, 1) == "long"
    assert held.best("m", asked, 1) is None
    assert held.best("n", chain_of([NEXT]), 1) is None
    held.note("n", "later", chain_of([USER, ANSWER]), 2)
    assert held.best("n", asked, 3) == "later"
    held.forget("n", "later")
    assert held.best("n", asked, 3) is None  # its digests went with it; the others are found by later turns again


def test_agents_end() -> None:
    """By time without use, and the oldest when there are too many; each is named once."""
    held = table(most=2)
    for at_s, name in enumerate(("a", "b", "c")):
        held.note("n", name, chain_of([{"role": "user", "content": name}]), at_s)
    assert held.expire(3) == [("n", "a")]
    assert held.best("n", chain_of([{"role": "user", "content": "b"}]), 90) == "b"
    assert held.expire(102) == [("n", "c")]
    assert held.expire(189) == []
    assert held.expire(190) == [("n", "b")]
    assert len(held) == 0


def test_agents_of_an_earlier_run_only_have_an_end() -> None:
    """Their age is what the daemon says; what is known already is not made older."""
    held = table()
    held.adopt("n", "old", -60)
    held.note("n", "known", chain_of([USER]), 0)
    held.adopt("n", "known", -60)
    assert held.expire(40) == [("n", "old")]


# ---- in front of a daemon -------------------------------------------------------------------------------------------


def turn(served: Served, *messages: dict[str, str]) -> str:
    """A turn of nobody; returns whose agent it was."""
    reply = served.post("/v1/chat/completions", {"model": "tiny", "messages": list(messages)})
    assert reply.headers["x-kvd-identity"] == "anonymous"
    return str(reply.headers["x-kvd-agent"])


def test_each_turn_has_an_agent_of_its_own_forked_from_the_last(served: Served, scripted: ScriptedDaemon) -> None:
    """P10, P19: the next turn forks what holds its conversation, and never continues it; the old agent then goes."""
    scripted.script(text("Hello"))
    start = {"role": "user", "content": "of this test alone"}
    first = turn(served, start)
    second = turn(served, start, ANSWER, NEXT)
    assert first != second
    forks = scripted.of("agent.fork")
    assert [(fork["agent"], fork["new_agent"]) for fork in forks] == [(first, second)]
    served.run(served.gateway.settled())
    assert [gone["agent"] for gone in scripted.of("agent.delete")] == [first]


def test_two_clients_with_equal_conversations_stay_apart(served: Served, scripted: ScriptedDaemon) -> None:
    """Both continue the same text: each gets its own fork."""
    scripted.script(text("Hello"))
    start = {"role": "user", "content": "of two clients"}
    agents = {turn(served, start), turn(served, start), turn(served, start, ANSWER, NEXT), turn(served, start, ANSWER)}
    assert len(agents) == 4


def test_an_agent_that_is_gone_is_no_error(served: Served, scripted: ScriptedDaemon) -> None:
    """The turn starts from what the namespace shares."""
    start = {"role": "user", "content": "soon gone"}
    scripted.gone.add(turn(served, start))
    assert turn(served, start, ANSWER, NEXT)
    assert len(scripted.of("chat")) == 2


def test_nothing_is_forked_where_nothing_is_shared(scripted: ScriptedDaemon) -> None:
    """With `--sharing agent` two anonymous turns have nothing to do with each other."""
    scripted.sharing = "agent"
    try:
        with gateway(scripted.path) as served:  # type: ignore[attr-defined]
            turn(served, USER)
            turn(served, USER, ANSWER, NEXT)
    finally:
        scripted.sharing = "namespace"
    assert scripted.of("agent.fork") == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_turns_agent_is_known_by_name_only(served: Served, scripted: ScriptedDaemon, stream: bool) -> None:
    """What it holds is not known, so nobody forks it; it still has an end."""
    from kvd.errors import InternalError

    start = {"role": "user", "content": f"fails {stream}"}
    scripted.late_error = InternalError("oops")
    served.post("/v1/chat/completions", {"model": "tiny", "messages": [start], "stream": stream})
    scripted.script(text("Hello"))
    known = len(served.gateway.conversations)
    turn(served, start)
    assert scripted.of("agent.fork") == []
    assert len(served.gateway.conversations) == known + 1
