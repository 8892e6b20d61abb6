"""A disk that lies, forgets and refuses, under real daemons: nothing bad is served, `durable` is never a lie."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvd_client import GenerateResult
from tests.support.daemon import Daemon, eventually, short_folder
from tests.support.prose import prose
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

CHUNK = 512
NEW = 24
QUESTION = prose(7, "question")
UNSHARED = ("--check", "--sharing", "agent")
"""Agents of equal text are each other's controls here: what one loses must be its own."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder for one daemon."""
    with short_folder() as path:
        yield path


def build(daemon: Daemon, agent: str) -> str:
    """An agent of 1100 tokens, computed in steps that repeat when it is computed again from 0, 512 or 1024 on."""
    for chunk in range(2):
        daemon.client.inject(agent, prose(CHUNK, f"chunk-{chunk}"))
    daemon.client.inject(agent, prose(76, "tail"))
    return prose(CHUNK, "chunk-0") + prose(CHUNK, "chunk-1") + prose(76, "tail")


def ask(daemon: Daemon, agent: str, text: str) -> GenerateResult:
    """The agent's next turn."""
    return daemon.client.generate(agent, text + QUESTION, max_tokens=NEW)


def flip(path: Path, offset: int) -> None:
    """Flip one bit; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


# ---- files that rot -------------------------------------------------------------------------------------------------


@dataclass
class Rotten:
    """A restarted daemon whose agents each lost a page in another way.

    Attributes:
        daemon: running.
        text: every agent's text.
        unbroken: what an intact agent answered before.
        paths: the file that was damaged, for each agent.
    """

    daemon: Daemon
    text: str = ""
    unbroken: str = ""
    paths: dict[str, Path] = field(default_factory=dict)


Damage = Callable[[Path], object]
DAMAGE: dict[str, tuple[int, Damage]] = {
    # agent: (page, what is done to its file)
    "payload": (2, lambda path: flip(path, path.stat().st_size // 2)),
    "header": (0, lambda path: flip(path, path.read_bytes().index(b"layers.1") + 7)),
    "length": (0, lambda path: flip(path, 0)),
    "checksum": (2, lambda path: flip(path, -1)),
    "truncated": (2, lambda path: path.write_bytes(path.read_bytes()[:-100])),
    "longer": (2, lambda path: path.write_bytes(path.read_bytes() + b"\0")),
    "empty": (0, lambda path: path.write_bytes(b"")),
    "gone": (2, lambda path: path.unlink()),
}


@pytest.fixture(scope="module")
def rotten(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Rotten]:
    """Agents with equal text; after a `kill -9` one page file of each is damaged."""
    with short_folder() as path, Daemon(path, tiny_model_dir, UNSHARED, zygote=zygote) as daemon:
        scene = Rotten(daemon)
        for agent in (*DAMAGE, "intact", "twin", "swapped-1", "swapped-2"):
            scene.text = build(daemon, agent)
        scene.unbroken = ask(daemon, "twin", scene.text).text
        scene.paths = {agent: daemon.page_file(agent, page) for agent, (page, _) in DAMAGE.items()}
        scene.paths |= {agent: daemon.page_file(agent, 2) for agent in ("swapped-1", "swapped-2")}
        daemon.kill()
        for agent, (_, damage) in DAMAGE.items():
            damage(scene.paths[agent])
        first, second = scene.paths["swapped-1"], scene.paths["swapped-2"]
        first_bytes = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(first_bytes)
        daemon.start()
        yield scene


@pytest.mark.parametrize("agent", [*DAMAGE, "swapped-1", "swapped-2"])
def test_a_bad_page_is_never_served(rotten: Rotten, tally: Counter[str], agent: str) -> None:
    """P4: what is before it is reused, it and the rest are computed again, the client is told, the text is right."""
    page = DAMAGE[agent][0] if agent in DAMAGE else 2
    result = ask(rotten.daemon, agent, rotten.text)
    assert result.cached_tokens == page * 256
    assert f"page lost at token {page * 256}" in result.match_reason
    assert result.text == rotten.unbroken
    assert result.durable
    again = rotten.daemon.client.generate(agent, rotten.text + QUESTION + result.text, max_tokens=1)
    assert again.cached_tokens == again.prompt_tokens - 1
    assert "lost" not in again.match_reason
    if agent not in ("gone", "empty"):
        assert len(rotten.daemon.files(f"*/quarantine/{rotten.paths[agent].stem}*")) == 1
    assert not rotten.paths[agent].exists() or rotten.paths[agent].stat().st_size == 0
    tally["damaged files, under daemons"] += 1


def test_other_agents_keep_everything(rotten: Rotten) -> None:
    """P4: damage in one agent's file costs no other agent a token."""
    result = ask(rotten.daemon, "intact", rotten.text)
    assert result.cached_tokens == 1100
    assert result.text == rotten.unbroken


# ---- logs and catalog -----------------------------------------------------------------------------------------------


def test_the_catalog_is_derived_from_the_logs(tiny_model_dir: Path, folder: Path, zygote: Zygote | None) -> None:
    """P5: an older copy of the catalog, rubbish in its place, or none: every durable token resumes all the same."""
    with Daemon(folder, tiny_model_dir, UNSHARED, zygote=zygote) as daemon:
        text = build(daemon, "a")
        (catalog,) = daemon.files("*/catalog.sqlite3")
        with sqlite3.connect(catalog) as source, sqlite3.connect(folder / "old.sqlite3") as copy:
            source.backup(copy)
        for connection in (source, copy):
            connection.close()
        text += QUESTION + ask(daemon, "a", text).text
        build(daemon, "b")
        for damage in ("old", "rubbish", "none"):
            daemon.kill()
            for path in daemon.files("*/catalog.sqlite3*"):
                path.unlink()
            if damage == "old":
                shutil.copyfile(folder / "old.sqlite3", catalog)
            elif damage == "rubbish":
                catalog.write_bytes(b"SQLite format 3\0" + b"no database" * 1000)
            daemon.start()
            assert {info.agent for info in daemon.client.agents()} == {"a", "b"}, damage
            result = ask(daemon, "a", text)
            assert result.cached_tokens == result.prompt_tokens - 8, damage
            assert result.durable
            text += QUESTION + result.text
            assert daemon.client.agent_info("b").computed_tokens == 1100
            assert daemon.statistics()["swap_bytes"] == sum(path.stat().st_size for path in daemon.page_files())


def test_a_torn_or_rotten_log_ends_at_its_last_good_record(
    tiny_model_dir: Path, folder: Path, zygote: Zygote | None
) -> None:
    """P3, P4: a record that is not whole is not believed; the turns before it resume, the log says what went."""
    with Daemon(folder, tiny_model_dir, UNSHARED, zygote=zygote) as daemon:
        texts, logs = {}, {}
        for agent in ("torn", "rotten"):
            before = set(daemon.files("*/agents/*.log"))
            texts[agent] = build(daemon, agent)
            (logs[agent],) = set(daemon.files("*/agents/*.log")) - before
        lengths = {agent: path.stat().st_size for agent, path in logs.items()}
        unbroken = {agent: ask(daemon, agent, text).text for agent, text in texts.items()}
        daemon.kill()
        with logs["torn"].open("r+b") as file:
            file.truncate(lengths["torn"] + 40)
        flip(logs["rotten"], lengths["rotten"] + 60)
        daemon.start()
        for agent, text in texts.items():
            assert daemon.client.agent_info(agent).computed_tokens == 1100
            result = ask(daemon, agent, text)
            assert (result.cached_tokens, result.text, result.durable) == (1100, unbroken[agent], True)
        troubles = [line for line in daemon.log_lines() if line["event"] == "log_trouble"]
        assert len(troubles) == 2
        assert all(line["lost_bytes"] > 0 for line in troubles)


def test_turns_after_a_log_was_found_damaged_survive_a_kill(
    tiny_model_dir: Path, folder: Path, zygote: Zygote | None
) -> None:
    """P4, P2: a bit of a swapped out tail flips; the turn that finds out and the ones after it are durable for real."""
    with Daemon(folder, tiny_model_dir, UNSHARED, zygote=zygote) as daemon:
        text = build(daemon, "a")
        daemon.client.evict("a")
        (log,) = daemon.files("*/agents/*.log")
        flip(log, -200)
        for turn in range(3):
            result = ask(daemon, "a", text)
            assert result.durable
            assert ("page lost" in result.match_reason) == (turn == 0)
            text += QUESTION + result.text
        tokens = daemon.client.agent_info("a").tokens
        daemon.kill()
        daemon.start()
        assert daemon.client.agent_info("a").tokens == tokens
        again = daemon.client.generate("a", text, max_tokens=1)
        assert again.cached_tokens == again.prompt_tokens - 1
        assert len(daemon.files("*/quarantine/*.log")) == 1
        assert not [line for line in daemon.log_lines() if line["event"] == "log_trouble"]


# ---- files that vanish under a running daemon -----------------------------------------------------------------------


def test_a_swap_folder_that_vanishes_costs_no_answer(tiny_model_dir: Path, folder: Path, zygote: Zygote | None) -> None:
    """Removed under a running daemon: what is in RAM serves and is written anew, the rest is computed again."""
    with Daemon(folder, tiny_model_dir, UNSHARED, zygote=zygote) as daemon:
        text = build(daemon, "a")
        build(daemon, "twin")
        build(daemon, "evicted")
        unbroken = ask(daemon, "twin", text)
        daemon.client.evict("evicted")
        for path in daemon.files("*/swap"):
            shutil.rmtree(path)
        resident = ask(daemon, "a", text)
        assert (resident.text, resident.cached_tokens) == (unbroken.text, 1100)
        more = daemon.client.inject("a", prose(600, "more"))
        assert more.durable
        assert len(daemon.page_files()) >= 2
        lost = ask(daemon, "evicted", text)
        assert lost.cached_tokens == 0
        assert "page lost at token 0" in lost.match_reason
        assert (lost.text, lost.durable) == (unbroken.text, True)
        daemon.restart()
        again = daemon.client.generate("evicted", text + QUESTION + lost.text, max_tokens=1)
        assert again.cached_tokens == again.prompt_tokens - 1


def test_a_data_folder_that_vanishes_is_made_anew(tiny_model_dir: Path, folder: Path, zygote: Zygote | None) -> None:
    """The user removes everything but the socket: the next turn writes a log that stands alone and says what it is."""
    with Daemon(folder, tiny_model_dir, UNSHARED, zygote=zygote) as daemon:
        text = build(daemon, "a")
        for path in daemon.files("*"):
            if path.is_dir():
                shutil.rmtree(path)
        result = ask(daemon, "a", text)
        assert result.cached_tokens == 1100
        assert result.durable or result.durable_reason
        daemon.restart()
        again = daemon.client.generate("a", text + QUESTION + result.text, max_tokens=1)
        assert again.durable
        if result.durable:
            assert again.cached_tokens == again.prompt_tokens - 1


# ---- a disk that is full --------------------------------------------------------------------------------------------


def test_a_full_disk_makes_turns_not_durable_until_there_is_room(
    tiny_model_dir: Path, folder: Path, zygote: Zygote | None
) -> None:
    """P25, P2: over the quota a reply says `durable: false` and why; with room again the turn is saved by itself."""
    with Daemon(folder, tiny_model_dir, (*UNSHARED, "--quota", "1MB"), zygote=zygote) as daemon:
        client, text = daemon.client, prose(1100, "kept")
        client.inject("big", prose(1300, "big"))
        assert client.agent_info("big").durable
        client.pin("big")  # nothing is taken from it to make room
        refused = client.generate("kept", text, max_tokens=NEW)
        assert not refused.durable
        assert "quota" in refused.durable_reason
        assert refused.completion_tokens > 0
        info = client.agent_info("kept")
        assert (info.durable, info.tokens > 1100) == (False, True)
        figures = daemon.statistics()
        assert figures["turns_not_durable"] >= 1
        used = sum(path.stat().st_size for path in daemon.data_dir.rglob("*") if path.is_file())
        assert used <= figures["quota_bytes"] == 1_000_000
        # the turn lives in RAM meanwhile, and goes on
        second = client.generate("kept", text + refused.text, max_tokens=1)
        assert second.cached_tokens == second.prompt_tokens - 1

        client.unpin("big")
        client.delete("big")
        eventually(lambda: client.agent_info("kept").durable, "the turn is saved by itself")
        durable = client.agent_info("kept")
        daemon.restart()
        again = daemon.client.generate("kept", text + refused.text + second.text, max_tokens=1)
        assert daemon.client.agent_info("kept").computed_tokens >= durable.computed_tokens
        assert again.cached_tokens == again.prompt_tokens - 1
        assert again.durable
