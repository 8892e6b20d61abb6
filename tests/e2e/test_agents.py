"""Agents as a user manages them with `kvd_client.Client`: forks, cuts, pins, residency, figures. One shared daemon."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from kvd_client import AgentInfo, errors
from tests.support.daemon import Daemon, eventually
from tests.support.prose import prose

pytestmark = pytest.mark.daemon

PAGE = 256
PAGE_STATES = {
    *("filling", "sealed_dirty", "writing", "clean", "evicted"),
    *("loading", "packed", "stashed", "loading_tail", "lost"),
}


def current_pages(daemon: Daemon, agent: str) -> list[dict[str, Any]]:
    """The sealed pages of an agent's current branch."""
    branches = daemon.client.residency(agent)["agents"][0]["branches"]
    pages: list[dict[str, Any]] = next(branch for branch in branches if branch["current"])["segments"][0]["pages"]
    return pages


def test_a_fork_shares_pages_and_goes_its_own_way(daemon: Daemon) -> None:
    """Copy-on-write: sealed pages are mapped twice, the open one's tokens copied, and neither disturbs the other."""
    client, text = daemon.client, prose(600, "fork")
    client.inject("fork", text)
    frames = daemon.statistics()["frames"]
    child = client.fork("fork", "fork-child")
    assert (child.agent, child.tokens, child.computed_tokens, child.durable) == ("fork-child", 600, 600, True)
    assert daemon.statistics()["frames"] <= frames, "no page is copied, only the tokens of the open one"
    parent_pages, child_pages = current_pages(daemon, "fork"), current_pages(daemon, "fork-child")
    assert [page["page"] for page in parent_pages] == [page["page"] for page in child_pages]
    assert [page["shared_by"] for page in child_pages] == [2, 2]

    parent_turn = client.generate("fork", text + prose(20, "parent"), max_tokens=6)
    child_turn = client.generate("fork-child", text + prose(20, "parent"), max_tokens=6)
    assert parent_turn.cached_tokens == child_turn.cached_tokens == 600
    assert parent_turn.text == child_turn.text
    client.delete("fork")
    survivor = client.generate("fork-child", text + prose(20, "parent") + child_turn.text, max_tokens=1)
    assert survivor.cached_tokens == survivor.prompt_tokens - 1


def test_a_fork_at_a_token_shares_only_what_is_before_it(daemon: Daemon) -> None:
    """A fork inside a page copies the part before the cut; its text is cut at the same place."""
    client, text = daemon.client, prose(700, "fork-at")
    client.inject("fork-at", text)
    child = client.fork("fork-at", "fork-at-child", tokens=300)
    assert (child.tokens, child.computed_tokens, child.text_bytes) == (300, 300, len(prose(300, "fork-at")))
    other = client.generate("fork-at-child", prose(300, "fork-at") + prose(5, "other"), max_tokens=1)
    assert (other.match, other.cached_tokens) == ("extend", 300)
    assert client.agent_info("fork-at").tokens == 700
    with pytest.raises(errors.AgentExists, match="fork-at-child"):
        client.fork("fork-at", "fork-at-child")
    with pytest.raises(errors.InvalidParams, match="from 0 to 700"):
        client.fork("fork-at", "fork-at-third", tokens=701)


@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 257, 512, 599])
def test_a_rollback_cuts_at_the_exact_token(daemon: Daemon, tokens: int) -> None:
    """P14: what is left is reused to the last token, at page borders too; one past the end is refused."""
    client, agent, text = daemon.client, f"rollback-{tokens}", prose(600, "rollback")
    client.inject(agent, text)
    cut = client.rollback(agent, tokens)
    assert (cut.tokens, cut.computed_tokens, cut.text_bytes) == (tokens, tokens, len(prose(tokens, "rollback")))
    again = client.generate(agent, prose(tokens, "rollback") + " and then", max_tokens=3)
    assert (again.cached_tokens, again.prompt_tokens) == (tokens, tokens + 2)
    with pytest.raises(errors.InvalidParams, match="from 0 to"):
        client.rollback(agent, 5000)


def test_evict_prefetch_pin_and_unpin_move_pages(daemon: Daemon) -> None:
    """Residency follows the user's word: evicted pages are on disk only, a hint or a pin brings them back."""
    client, text = daemon.client, prose(600, "move")

    def swapped() -> int:
        return client.agent_info("move").swapped_pages

    client.inject("move", text)
    evicted = client.evict("move")
    assert (evicted.swapped_pages, evicted.resident_bytes) == (3, 0)
    assert evicted.server["evicted_bytes"] == 3 * daemon.client.model_info()["page_bytes"]
    assert client.agent_info("move").tokens == 600
    client.prefetch("move")
    eventually(lambda: swapped() == 0, "the hinted pages are resident")

    client.evict("move")
    pinned = client.pin("move")
    assert pinned.pinned
    eventually(lambda: swapped() == 0, "the pinned pages are resident")
    assert daemon.statistics()["pinned_bytes"] >= 2 * daemon.client.model_info()["page_bytes"]
    with pytest.raises(errors.AgentBusy, match="unpin"):
        client.evict("move")
    assert client.agent_info("move").swapped_pages == 0
    unpinned = client.unpin("move")
    assert not unpinned.pinned
    assert client.evict("move").swapped_pages == 3
    turn = client.generate("move", text + " and", max_tokens=1)
    assert (turn.cached_tokens, turn.server["swapped_in_pages"]) == (600, 2)


def test_an_evicted_agent_continues_as_one_that_stayed(daemon: Daemon) -> None:
    """P30: what comes back from disk is what went there: the text equals that of a twin that never left RAM."""
    client, text = daemon.client, prose(900, "evicted")
    for agent in ("evicted", "stayed"):
        client.inject(agent, text)
    client.evict("evicted")
    turns = [client.generate(agent, text + prose(3, "q"), max_tokens=40) for agent in ("evicted", "stayed")]
    assert turns[0].text == turns[1].text
    assert turns[0].cached_tokens == turns[1].cached_tokens == 900


def test_a_deleted_agent_leaves_no_file(daemon: Daemon) -> None:
    """P5: its log and its pages go from the disk, the figures follow, and the name starts afresh."""
    client, text = daemon.client, prose(800, "deleted")
    logs, pages = set(daemon.files("*/agents/*.log")), set(daemon.page_files())
    client.inject("deleted", text)
    client.evict("deleted")
    mine = set(daemon.page_files()) - pages
    assert len(mine) == 3
    assert len(set(daemon.files("*/agents/*.log")) - logs) == 1
    client.delete("deleted")
    eventually(lambda: not any(path.exists() for path in mine), "the page files are gone")
    assert set(daemon.files("*/agents/*.log")) == logs
    assert client.generate("deleted", text, max_tokens=1).match == "new"


def test_agents_are_listed_by_namespace(daemon: Daemon) -> None:
    """A name is unique inside its namespace only; a list without one has all."""
    client = daemon.client
    for namespace in ("list-1", "list-2"):
        client.inject("twin", f" in {namespace}", namespace=namespace)
    assert [(a.agent, a.namespace) for a in client.agents("list-1")] == [("twin", "list-1")]
    assert {"list-1", "list-2"} <= {agent.namespace for agent in client.agents()}
    info = client.agent_info("twin", namespace="list-2")
    assert isinstance(info, AgentInfo)
    assert (info.text_bytes, info.branches, info.durable, info.pinned) == (10, 1, True, False)
    assert info.kv_format == ", ".join(client.model_info()["kv_format_ids"])


def test_residency_has_each_page_once_with_its_state(daemon: Daemon) -> None:
    """The page map adds up: states are known ones, sealed pages and tail cover the agent's tokens."""
    client = daemon.client
    client.inject("map", prose(530, "map"))
    everything = client.residency()
    assert everything["page_tokens"] == PAGE
    assert {agent["agent"] for agent in everything["agents"]} >= {"map"}
    (agent,) = client.residency("map")["agents"]
    (branch,) = agent["branches"]
    (segment,) = branch["segments"]
    assert (branch["tokens"], branch["current"], len(segment["pages"])) == (530, True, 2)
    page_bytes = client.model_info()["page_bytes"]
    expected = {"filling": page_bytes, "packed": page_bytes * 18 // PAGE}  # packed once nobody uses it for a while
    tail = segment["tail"]
    assert tail == {
        "tokens": 18,
        "state": tail["state"],
        "ram_bytes": expected[tail["state"]],
        "pinned": False,
    }
    assert all(page["resident"] and page["state"] == "clean" for page in segment["pages"])
    statistics = daemon.statistics()
    assert set(statistics["pages"]) == PAGE_STATES
    assert statistics["pages"]["lost"] == statistics["pages"]["writing"] == 0
    assert everything["resident_bytes"] <= everything["budget_bytes"] == statistics["budget_bytes"]
    eventually(  # while tails are packed they differ
        lambda: daemon.statistics()["resident_bytes"] == client.residency()["resident_bytes"], "one figure everywhere"
    )


def test_statistics_are_numbers_that_agree(daemon: Daemon) -> None:
    """DESIGN section 10: the figures programs rely on are there, and byte figures match the disk."""
    client = daemon.client
    client.inject("figures", prose(300, "figures"))
    statistics = daemon.statistics()
    for name in ("budget_bytes", "resident_bytes", "peak_resident_bytes", "swap_bytes", "tokens_computed"):
        assert isinstance(statistics[name], int)
    assert statistics["swap_bytes"] == sum(path.stat().st_size for path in daemon.page_files())
    assert statistics["log_bytes"] == sum(path.stat().st_size for path in daemon.files("*/agents/*.log"))
    assert statistics["disk_used_bytes"] <= statistics["quota_bytes"]
    assert statistics["agents"] == len(client.agents())
    assert statistics["dirty_bytes"] == statistics["in_flight_bytes"] == 0
    assert statistics["footprint_bytes"] > statistics["resident_bytes"]
    typed = client.statistics()
    assert (typed.budget_bytes, typed.swap_bytes) == (statistics["budget_bytes"], statistics["swap_bytes"])


def test_the_bytes_per_token_that_are_told_are_those_on_disk(daemon: Daemon) -> None:
    """P29: `token_bytes` equals the payload of a page file per token, and the file names the format that is told."""
    daemon.client.inject("bytes", prose(300, "bytes"))
    model = daemon.client.model_info()
    data = daemon.page_file("bytes", 0).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    header.pop("xxh3_128")
    payload_bytes = max(tensor["data_offsets"][1] for tensor in header.values())
    assert payload_bytes / PAGE == model["token_bytes"]
    assert len(data) == 8 + length + payload_bytes + 16
    assert payload_bytes == model["page_bytes"]
    assert metadata["format_id"] in model["kv_format_ids"]
    assert metadata["format_id"].startswith(model["kv_format"])
    assert model["fp16_ratio"] == round(model["token_bytes"] / model["fp16_token_bytes"], 4)
    assert model["token_bytes"] < model["fp16_token_bytes"] / 2


def test_a_turn_writes_its_new_tokens_only(daemon: Daemon) -> None:
    """P15, P26: bytes written per turn follow the new tokens, not the length of the agent.

    A token is written at most twice (in its turn's record, and in its page when that is sealed), and once more when a
    log longer than a page is compacted; besides, a record has a fixed cost.
    """
    client, token_bytes = daemon.client, daemon.client.model_info()["token_bytes"]
    fixed_bytes = 4096
    per_turn: dict[int, list[int]] = {}
    for context in (300, 2600):
        agent = f"wear-{context}"
        client.inject(agent, prose(context, "wear"))
        per_turn[context] = []
        for turn in range(8):
            before = daemon.statistics()["bytes_written"]
            client.inject(agent, prose(20, turn))
            per_turn[context].append(daemon.statistics()["bytes_written"] - before)
        assert sum(per_turn[context]) <= 8 * fixed_bytes + 3 * 160 * token_bytes
    # 2300 more tokens of context do not cost a single further page over eight turns
    assert abs(sum(per_turn[2600]) - sum(per_turn[300])) < PAGE * token_bytes


def test_hello_tells_who_serves(daemon: Daemon) -> None:
    """Versions, process, recorded choices and methods, in one call that needs no agent."""
    hello = daemon.client.hello()
    assert (hello["server"], hello["protocol"], hello["pid"], hello["status"]) == ("kvd", 1, daemon.pid, "ready")
    assert hello["threads"] == 1
    assert hello["attention"] in ("mlx", "reference", "cpu", "metal", "cuda")
    assert hello["data_dir"] == str(daemon.data_dir)
    assert hello["model"] == daemon.model.name
    assert {"generate", "chat", "inject", "agent.fork", "residency", "statistics", "drain"} <= set(hello["methods"])
    assert hello["methods"] == sorted(hello["methods"])
    with pytest.raises(errors.Unsupported, match="protocol 2"):
        daemon.client.call("hello", {"protocol": 2})
