"""Anonymous conversations: which agent is forked, which is superseded, which is over."""

from __future__ import annotations

import time

import pytest

from kvd.gateway.conversations import Conversations, Point, chain_of
from tests.gateway.daemons import ScriptedDaemon, text
from tests.gateway.serving import Served, gateway
from tests.support.daemon import eventually

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
NEXT = {"role": "user", "content": "And?"}


def test_a_chain_tells_meaning_not_spelling() -> None:
    """P17: reasoning, ids and the spelling of JSON are not what a conversation is; content, calls and tools are."""

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


def points(*messages: dict[str, str]) -> list[Point]:
    """Points of a conversation, ten tokens a message: after its prompt, and after its answer."""
    chain = chain_of(messages)
    return [Point(digest, 10 * (number + 1)) for number, digest in enumerate(chain)][-2:]


def test_the_longest_beginning_wins() -> None:
    """Of agents that hold beginnings the one that holds most; among equals the latest; never another namespace's."""
    held = table()
    held.note("n", "short", points(USER), 0)
    held.note("n", "long", points(USER, ANSWER), 0)
    asked = chain_of([USER, ANSWER, NEXT])
    found = held.best("n", asked, 1)
    assert found is not None
    assert (found.agent, found.tokens, list(found.points)) == ("long", 20, points(USER, ANSWER))
    assert held.best("m", asked, 1) is None
    assert held.best("n", chain_of([NEXT]), 1) is None
    held.note("n", "later", points(USER, ANSWER), 2)
    found = held.best("n", asked, 3)
    assert found is not None
    assert found.agent == "later"
    held.forget("n", "later")
    assert held.best("n", asked, 3) is None  # its digests went with it; later turns note theirs again


def test_an_agent_is_entered_where_the_request_knows_its_text() -> None:
    """P19: a request with the same prompt starts behind the prompt, not behind an answer that it never saw."""
    held = table()
    held.note("n", "a", points(USER, ANSWER), 0)
    found = held.best("n", chain_of([USER]), 1)
    assert found is not None
    assert (found.agent, found.tokens) == ("a", 10)
    other = held.best("n", chain_of([USER, NEXT]), 1)
    assert other is not None
    assert other.tokens == 10


def test_superseded_is_who_has_nothing_more() -> None:
    """An agent that another one holds all of, and none whose text is not known."""
    held = table()
    held.note("n", "a", points(USER, ANSWER), 0)
    held.note("n", "unknown", (), 0)
    assert held.is_superseded("n", "a", [*points(USER, ANSWER), *points(USER, ANSWER, NEXT)])
    assert not held.is_superseded("n", "a", points(USER))
    assert not held.is_superseded("n", "unknown", points(USER, ANSWER))


def test_agents_end() -> None:
    """By time without use, and the oldest when there are too many; each is named once."""
    held = table(most=2)
    for at_s, name in enumerate(("a", "b", "c")):
        held.note("n", name, points({"role": "user", "content": name}), at_s)
    assert held.expire(3) == [("n", "a")]
    assert held.best("n", chain_of([{"role": "user", "content": "b"}]), 90) is not None
    assert held.expire(102) == [("n", "c")]
    assert held.expire(189) == []
    assert held.expire(190) == [("n", "b")]
    assert len(held) == 0


def test_agents_of_an_earlier_run_only_have_an_end() -> None:
    """Their age is what the daemon says; what is known already is not made older."""
    held = table()
    held.adopt("n", "old", -60)
    held.note("n", "known", points(USER), 0)
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
    assert [(fork["agent"], fork["new_agent"], fork["tokens"]) for fork in forks] == [(first, second, 14)]
    served.run(served.gateway.settled())
    assert [gone["agent"] for gone in scripted.of("agent.delete")] == [first]


def test_two_clients_with_equal_conversations_stay_apart(served: Served, scripted: ScriptedDaemon) -> None:
    """Both continue the same text: each gets its own fork, and none of them the answer that another one got."""
    scripted.script(text("Hello"))
    start = {"role": "user", "content": "of two clients"}
    agents = [turn(served, start), turn(served, start), turn(served, start, ANSWER, NEXT), turn(served, start, ANSWER)]
    assert len(set(agents)) == 4
    forks = [(fork["agent"], fork["tokens"]) for fork in scripted.of("agent.fork")]
    assert forks[0] == (agents[0], 10)  # the same prompt: behind it, before the answer


def test_nothing_is_told_of_a_strangers_text(served: Served, scripted: ScriptedDaemon) -> None:
    """P19: where an anonymous prompt parts from what it was forked from is not shown."""
    scripted.script(text("x"), match="diverge", divergence={"character": 3, "expected": "secret", "found": "b"})
    body = {"model": "tiny", "messages": [USER]}
    assert "x-kvd-divergence" in served.post("/v1/chat/completions", body, x_kvd_agent="me").headers
    assert "x-kvd-divergence" not in served.post("/v1/chat/completions", body).headers


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


def test_what_an_earlier_run_left_is_adopted(scripted: ScriptedDaemon) -> None:
    """Old anonymous agents of this gateway's namespaces are deleted; younger ones later; all others are not its own."""
    now_s = time.time()
    names = [("default", "gw:anonymous:old", 0.0), ("default", "gw:anonymous:young", now_s), ("default", "mine", 0.0)]
    names += [("other", "gw:anonymous:theirs", 0.0), ("default", "gw:user:ann:1", 0.0)]
    scripted.listed = [
        {"namespace": namespace, "agent": agent, "created_s": created_s} for namespace, agent, created_s in names
    ]
    try:
        with gateway(scripted.path) as served:  # type: ignore[attr-defined]
            eventually(lambda: scripted.of("agent.delete"), "the old one is deleted")
            served.run(served.gateway.reap())
            assert len(served.gateway.conversations) == 1
    finally:
        scripted.listed = []
    assert [gone["agent"] for gone in scripted.of("agent.delete")] == ["gw:anonymous:old"]


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
