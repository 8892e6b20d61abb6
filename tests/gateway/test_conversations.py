"""Anonymous conversations: which agent is forked, which is superseded, which is over."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvd.errors import AgentNotFound, Busy
from kvd.gateway import GatewayConfigError, GatewaySettings
from kvd.gateway.conversations import Conversations, Point, Uses, chain_of
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
    assert base[0] != chain_of([USER | {"name": "ann"}])[0]  # templates may print it
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
    assert held.due(3) == [("n", "a")]
    assert held.due(3) == [("n", "a")]  # until the daemon has it no more
    held.forget("n", "a")
    assert held.best("n", chain_of([{"role": "user", "content": "b"}]), 90) is not None
    assert held.due(102) == [("n", "c")]
    held.forget("n", "c")
    assert held.due(189) == []
    assert held.due(190) == [("n", "b")]
    held.forget("n", "b")
    assert len(held) == 0


def test_a_retired_agent_is_due_and_forked_by_nobody() -> None:
    """Superseded, but not deleted yet."""
    held = table()
    held.note("n", "a", points(USER, ANSWER), 0)
    held.retire("n", "a")
    held.retire("n", "unheard of")
    assert held.best("n", chain_of([USER, ANSWER]), 1) is None
    assert held.due(1) == [("n", "a")]


def test_agents_of_groups_end_by_time_without_use() -> None:
    """P25: each use begins it anew, and what an earlier run used is as if it were used at the start."""
    uses = Uses(ttl_s=100)
    uses.use("n", "a", 0)
    uses.use("n", "b", 0)
    uses.adopt("n", "old", 10)
    uses.adopt("n", "a", 99)  # its use is known
    uses.use("n", "b", 50)
    assert uses.due(100) == [("n", "a")]
    uses.forget("n", "a")
    assert set(uses.due(150)) == {("n", "b"), ("n", "old")}
    few = Uses(ttl_s=100, most=2)
    for at_s, name in enumerate("abca"):
        few.use("n", name, at_s)
    assert few.due(4) == [("n", "b")]


def test_agents_of_an_earlier_run_only_have_an_end() -> None:
    """Their age is what the daemon says; what is known already is not made older."""
    held = table()
    held.adopt("n", "old", -60)
    held.note("n", "known", points(USER), 0)
    held.adopt("n", "known", -60)
    assert held.due(40) == [("n", "old")]


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


def test_an_agent_that_is_busy_is_deleted_later(served: Served, scripted: ScriptedDaemon) -> None:
    """P25: superseded while a turn of it runs; the daemon refuses, and is asked again until it has it no more."""
    start = {"role": "user", "content": "of a busy one"}
    first = turn(served, start)
    scripted.refused[first] = Busy("a turn of it runs", retry_after_s=1.0)
    turn(served, start, ANSWER, NEXT)
    served.run(served.gateway.settled())
    known = len(served.gateway.conversations)
    served.run(served.gateway.reap())
    assert [gone["agent"] for gone in scripted.of("agent.delete")] == [first, first]
    assert len(served.gateway.conversations) == known
    scripted.refused[first] = AgentNotFound("no such agent", agent=first)
    served.run(served.gateway.reap())
    assert len(served.gateway.conversations) == known - 1
    del scripted.refused[first]


def test_a_fork_that_is_refused_for_now_forgets_nobody(served: Served, scripted: ScriptedDaemon) -> None:
    """P25: only an agent that is not there any more has no end to wait for."""
    start = {"role": "user", "content": "of a full queue"}
    first = turn(served, start)
    scripted.unforked[first] = Busy("the queue is full", retry_after_s=1.0)
    known = len(served.gateway.conversations)
    turn(served, start, ANSWER, NEXT)
    assert len(served.gateway.conversations) == known + 1


def test_an_agent_is_known_before_it_is_made(served: Served, scripted: ScriptedDaemon) -> None:
    """P25: a client that leaves between fork and turn leaves no agent without an end."""
    start = {"role": "user", "content": "of one who leaves"}
    turn(served, start)
    known = len(served.gateway.conversations)
    seen: list[int] = []
    scripted.on_fork = lambda: seen.append(len(served.gateway.conversations))
    turn(served, start, ANSWER, NEXT)
    scripted.on_fork = lambda: None
    assert seen == [known + 1]


def test_agents_of_groups_are_deleted_when_nobody_uses_them(scripted: ScriptedDaemon) -> None:
    """P25: a user's agent, and one of an earlier run; named agents are their owners' own."""
    now_s = [0.0]
    scripted.listed = [{"namespace": "default", "agent": name} for name in ("gw:user:old:1", "mine")]
    try:
        with gateway(scripted.path, group_ttl_s=1000.0) as served:  # type: ignore[attr-defined]
            eventually(lambda: scripted.of("agent.list"), "those of an earlier run are looked for")
            served.run(served.gateway.adopt())
            served.gateway.clock = lambda: now_s[0] + 1e9
            body = {"model": "tiny", "messages": [USER]}
            used = served.post("/v1/chat/completions", {**body, "user": "ann"}).headers["x-kvd-agent"]
            served.post("/v1/chat/completions", body, x_kvd_agent="me")
            served.run(served.gateway.reap())
    finally:
        scripted.listed = []
    assert {gone["agent"] for gone in scripted.of("agent.delete")} == {"gw:user:old:1", used}


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
    """Old anonymous agents of this gateway's namespaces are deleted; younger ones later; all others are not its own.

    P19: how old is what the daemon says. `used_s` is of a wall clock that may be another by now than the gateway's.
    """
    names = [("default", "gw:anonymous:old", 1e9), ("default", "gw:anonymous:young", 60.0), ("default", "mine", 1e9)]
    names += [("other", "gw:anonymous:theirs", 1e9), ("default", "gw:user:ann:1", 1e9)]
    scripted.listed = [
        {"namespace": namespace, "agent": agent, "idle_s": idle_s, "used_s": time.time() - 1e9 if idle_s < 1e9 else 4e9}
        for namespace, agent, idle_s in names
    ]
    try:
        with gateway(scripted.path) as served:  # type: ignore[attr-defined]
            eventually(
                lambda: scripted.of("agent.delete") and len(served.gateway.conversations) == 1, "the old one is deleted"
            )
            served.run(served.gateway.reap())
    finally:
        scripted.listed = []
    assert {gone["agent"] for gone in scripted.of("agent.delete")} == {"gw:anonymous:old", "gw:user:ann:1"}


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


def test_the_daemon_is_told_when_agents_end(scripted: ScriptedDaemon) -> None:
    """P25: agents of nobody and of groups end where no gateway is left; a name of one's own is kept."""
    with gateway(scripted.path, anonymous_ttl_s=60.0, group_ttl_s=600.0) as served:  # type: ignore[attr-defined]
        turn(served, USER)
        turn(served, USER, ANSWER, NEXT)
        body = {"model": "tiny", "messages": [USER]}
        served.post("/v1/chat/completions", {**body, "user": "ann"})
        served.post("/v1/chat/completions", body, x_kvd_agent="me")
    assert [asked.get("ttl_s") for asked in scripted.of("chat")] == [60.0, 60.0, 600.0, None]
    assert [asked["ttl_s"] for asked in scripted.of("agent.fork")] == [60.0]


@pytest.mark.parametrize("name", ["anonymous_ttl_s", "group_ttl_s"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e12, float("inf")])
def test_ends_that_the_daemon_would_refuse_are_refused_at_the_start(name: str, seconds: float, tmp_path: Path) -> None:
    """With the bounds."""
    with pytest.raises(GatewayConfigError, match="above 0 seconds and at most 316224000"):
        GatewaySettings(socket=tmp_path, **{name: seconds})  # type: ignore[arg-type]
