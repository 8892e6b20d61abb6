"""What a `kill -9` leaves: everything a reply called durable, to the exact token. Real processes, real files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvd_client import AgentInfo, Client, GenerateResult, errors
from tests.support.daemon import Daemon, MakeDaemon, short_folder
from tests.support.prose import prose
from tests.support.tiny_model import make_tiny_model
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

BORDERS = (255, 256, 257, 511, 512, 513)
NEXT = 24
"""New tokens of each turn after the restart."""


@dataclass
class Killed:
    """A daemon that was killed after durable turns and runs again, and what had been said before.

    Attributes:
        daemon: running again.
        texts: each agent's whole text when the daemon was killed.
        infos: each agent's facts then.
        unbroken: what a twin, served without a restart, answered next.
        statistics: figures of the restarted daemon before its first request.
    """

    daemon: Daemon
    texts: dict[str, str] = field(default_factory=dict)
    infos: dict[str, AgentInfo] = field(default_factory=dict)
    unbroken: dict[str, GenerateResult] = field(default_factory=dict)
    statistics: dict[str, int] = field(default_factory=dict)


def _turn(client: Client, agent: str, text: str, *, max_tokens: int = NEXT, stream: bool = True) -> str:
    """One durable turn; returns the agent's whole text after it."""
    result = client.generate(agent, text, max_tokens=max_tokens, stream=stream)
    assert result.durable
    return text + result.text


def _prepare(killed: Killed) -> None:
    """Durable turns of many agents; each `twin-` agent does the same and one turn more, before the kill."""
    client, texts = killed.daemon.client, killed.texts
    for tokens in BORDERS:
        for agent in (f"border-{tokens}", f"twin-border-{tokens}"):
            # one token is pending afterwards: computed is exactly `tokens`
            client.inject(agent, prose(tokens - 2, "border"))
            texts[agent] = _turn(client, agent, prose(tokens, "border"), max_tokens=1)
        for agent in (f"inject-{tokens}", f"twin-inject-{tokens}"):
            client.inject(agent, prose(tokens, "inject"))
            texts[agent] = prose(tokens, "inject")
    for agent, stream in (("streamed", True), ("quiet", False), ("twin-streamed", True), ("twin-quiet", False)):
        text = _turn(client, agent, prose(300, "paths"), stream=stream)
        texts[agent] = _turn(client, agent, text + prose(20, "paths-2"), stream=stream)
    for agent in ("long", "twin-long"):
        text = _turn(client, agent, prose(1500, "long"))
        for turn in range(3):
            text = _turn(client, agent, text + prose(100, turn))
        texts[agent] = text
    client.inject("parent", prose(600, "family"))
    client.fork("parent", "child", tokens=550)
    client.rollback("parent", 300)
    client.inject("branchy", prose(300, "root") + prose(40, "left"))
    client.generate("branchy", prose(300, "root") + prose(50, "right"), max_tokens=1)
    client.inject("pinned", prose(300, "pinned"))
    client.pin("pinned")
    client.inject("deleted", prose(300, "deleted"))
    client.delete("deleted")
    killed.infos = {info.agent: info for info in client.agents()}
    for twin in [agent for agent in texts if agent.startswith("twin-")]:
        killed.unbroken[twin.removeprefix("twin-")] = client.generate(twin, texts[twin], max_tokens=NEXT)


@pytest.fixture(scope="module")
def killed(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Killed]:
    """One kill for all tests of this module."""
    with (
        short_folder() as folder,
        Daemon(folder, tiny_model_dir, ("--check", "--sharing", "agent"), zygote=zygote) as daemon,
    ):
        scene = Killed(daemon)
        _prepare(scene)
        daemon.restart()
        scene.statistics = daemon.statistics()
        yield scene


@pytest.mark.parametrize("tokens", BORDERS)
@pytest.mark.parametrize("how", ["border", "inject"])
def test_resumes_at_the_exact_token(killed: Killed, how: str, tokens: int) -> None:
    """P2, P14: around page borders every computed token is reused, and the text goes on as without the kill."""
    agent = f"{how}-{tokens}"
    result = killed.daemon.client.generate(agent, killed.texts[agent], max_tokens=NEXT)
    assert killed.infos[agent].computed_tokens == tokens
    assert result.match == "exact"
    # without a pending token the last one is run again for its logits
    counts = (result.prompt_tokens, result.cached_tokens)
    assert counts == ((tokens + 1, tokens) if how == "border" else (tokens, tokens - 1))
    assert result.text == killed.unbroken[agent].text
    assert result.cached_tokens == killed.unbroken[agent].cached_tokens


@pytest.mark.parametrize("agent", ["streamed", "quiet"])
def test_streamed_and_unstreamed_turns_persist_alike(killed: Killed, agent: str) -> None:
    """P11: both paths commit the same: same tokens reused, same text afterwards."""
    assert killed.texts["streamed"] == killed.texts["quiet"]
    result = killed.daemon.client.generate(agent, killed.texts[agent], max_tokens=NEXT)
    assert result.cached_tokens == killed.infos[agent].computed_tokens == killed.infos["streamed"].computed_tokens
    assert result.text == killed.unbroken["quiet"].text == killed.unbroken["streamed"].text


def test_nothing_is_computed_but_the_pending_token(killed: Killed) -> None:
    """P1, P2: reuse is counted, not claimed: one step for the pending token, then the decode steps."""
    daemon, before = killed.daemon, killed.daemon.statistics()
    result = daemon.client.generate("long", killed.texts["long"], max_tokens=NEXT)
    after = daemon.statistics()
    assert result.cached_tokens == killed.infos["long"].computed_tokens > 1800
    assert after["tokens_computed"] - before["tokens_computed"] == 1 + NEXT - 1
    assert after["tokens_reused"] - before["tokens_reused"] == result.cached_tokens
    assert result.server["swapped_in_pages"] == result.cached_tokens // 256
    assert result.text == killed.unbroken["long"].text


def test_a_restart_computes_and_writes_nothing(killed: Killed) -> None:
    """P6: figures of the disk are there before the first request, and recovery costs no token and no page write."""
    assert killed.statistics["tokens_computed"] == 0
    assert killed.statistics["swap_bytes"] > 0
    assert killed.statistics["log_bytes"] > 0
    assert killed.statistics["agents"] == len(killed.infos)
    assert killed.statistics["resident_bytes"] <= killed.statistics["budget_bytes"]


def test_forks_cuts_pins_and_branches_survive(killed: Killed) -> None:
    """Every operation is durable when it returns: the agents are as they were, sharing included."""
    client = killed.daemon.client
    now = {info.agent: info for info in client.agents()}
    for agent in ("parent", "child", "branchy", "pinned"):
        for name in ("tokens", "computed_tokens", "text_bytes", "branches", "pinned", "durable"):
            assert getattr(now[agent], name) == getattr(killed.infos[agent], name), (agent, name)
    assert (now["parent"].tokens, now["child"].tokens, now["pinned"].pinned) == (300, 550, True)
    maps = {agent: client.residency(agent)["agents"][0]["branches"][0] for agent in ("parent", "child")}
    first = {agent: branch["segments"][0]["pages"][0] for agent, branch in maps.items()}
    assert first["parent"]["page"] == first["child"]["page"]
    assert first["parent"]["shared_by"] == 2
    assert client.generate("child", prose(550, "family") + " and", max_tokens=1).cached_tokens == 550
    for tail, tokens in (("left", 40), ("right", 50)):
        back = client.generate("branchy", prose(300, "root") + prose(tokens, tail), max_tokens=1)
        assert back.cached_tokens == 300 + tokens - 1


def test_a_deleted_agent_does_not_come_back(killed: Killed) -> None:
    """P5: deletion is durable, too."""
    with pytest.raises(errors.AgentNotFound):
        killed.daemon.client.agent_info("deleted")


def test_another_model_of_the_same_shape_misses(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """P7, P9: other weights on the same data folder see no agent and read no page; the first model's state stays."""
    daemon = make_daemon()
    text = prose(600, "models")
    with daemon:
        first_model = daemon.client.model_info()
        whole = _turn(daemon.client, "a", text)
    mine, daemon.model = daemon.model, make_tiny_model(tmp_path / "tiny-model", seed=1)
    with daemon:
        other_model = daemon.client.model_info()
        assert other_model["fingerprint"] != first_model["fingerprint"]
        assert other_model["groups"] == first_model["groups"]
        assert daemon.client.agents() == []
        missed = daemon.client.generate("a", whole, max_tokens=2)
        assert (missed.match, missed.cached_tokens) == ("new", 0)
        assert daemon.statistics()["pages_loaded"] == 0
    daemon.model = mine
    with daemon:
        back = daemon.client.generate("a", whole, max_tokens=2)
        assert back.match == "exact"
        assert back.cached_tokens == back.prompt_tokens - 1
