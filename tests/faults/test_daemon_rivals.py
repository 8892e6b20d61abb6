"""Daemons that race for one folder or socket, and folders that somebody removes: real processes, real files."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, eventually, short_folder
from tests.support.prose import prose
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder."""
    with short_folder() as path:
        yield path


# ---- two at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", ["data", "socket"])
def test_of_two_daemons_that_start_at_once_one_serves(
    tiny_model_dir: Path, folder: Path, tally: Counter[str], shared: str, zygote: Zygote | None
) -> None:
    """The other ends with 1 and says who was first; the first is unharmed, and a kill of it lets the other in."""
    pair = [
        Daemon(folder / name, tiny_model_dir, socket=folder / f"{name}.sock", zygote=zygote) for name in ("one", "two")
    ]
    for daemon in pair:
        daemon.folder.mkdir(mode=0o700)
        if shared == "data":
            daemon.data_dir = folder / "data"
        else:
            daemon.socket = folder / "shared.sock"
    try:
        for daemon in pair:
            daemon.spawn()
        eventually(lambda: any(daemon.process.poll() is not None for daemon in pair), "one of them gives up")
        loser = next(daemon for daemon in pair if daemon.process.poll() is not None)
        winner = next(daemon for daemon in pair if daemon is not loser)
        winner.wait_ready()
        assert loser.wait() == 1
        words = loser.last_words()
        assert str(winner.pid if shared == "data" else winner.socket) in words
        assert "Traceback" not in words
        first = winner.client.generate("a", prose(300, "a"), max_tokens=4)
        assert first.durable
        winner.kill()
        if shared == "data":
            loser.start()
            again = loser.client.generate("a", prose(300, "a") + first.text, max_tokens=1)
            assert again.cached_tokens == again.prompt_tokens - 1
    finally:
        for daemon in pair:
            daemon.kill()
    tally["two daemons, races"] += 1
    tally["two daemons, both served"] += 0


# ---- folders that vanish --------------------------------------------------------------------------------------------


def test_folders_removed_under_a_running_daemon_are_made_again(
    tiny_model_dir: Path, folder: Path, tally: Counter[str], zygote: Zygote | None
) -> None:
    """The logs, then everything, socket and lock included: open connections go on, turns are durable for real."""
    with Daemon(folder, tiny_model_dir, zygote=zygote) as daemon:
        client, text = daemon.client, prose(600, "a")
        text += client.generate("a", text, max_tokens=4).text
        for gone in (daemon.files("*/agents")[0], daemon.data_dir):
            shutil.rmtree(gone)
            result = client.generate("a", text + prose(9, str(gone)), max_tokens=4)
            assert result.durable, (gone, result.durable_reason)
            assert result.cached_tokens >= 600
            text += prose(9, str(gone)) + result.text
            tally["folders removed, while running"] += 1
        assert client.health().ready
        tokens = client.agent_info("a").tokens
        daemon.restart()
        assert daemon.client.agent_info("a").tokens == tokens
        again = daemon.client.generate("a", text, max_tokens=1)
        assert again.cached_tokens == again.prompt_tokens - 1
        assert "lost" not in again.match_reason


def test_folders_removed_while_stopped_are_told_and_the_rest_is_served(
    tiny_model_dir: Path, folder: Path, tally: Counter[str], zygote: Zygote | None
) -> None:
    """P8: without pages the KV is computed again, without logs the catalog knows what is gone: both are said."""
    with Daemon(folder, tiny_model_dir, zygote=zygote) as daemon:
        text = prose(600, "a")
        unbroken = daemon.client.generate("a", text, max_tokens=4)
        daemon.kill()
        for path in daemon.files("*/swap"):
            shutil.rmtree(path)
        daemon.start()
        missing = [line for line in daemon.log_lines() if line["event"] == "pages_missing"]
        assert missing[-1]["pages"] == 2
        again = daemon.client.generate("a", text, max_tokens=4)
        assert "page lost at token 0" in again.match_reason
        assert (again.text, again.durable) == (unbroken.text, True)

        daemon.kill()
        for path in daemon.files("*/agents"):
            shutil.rmtree(path)
        daemon.start()
        troubles = [line for line in daemon.log_lines() if line["event"] == "log_trouble"]
        assert [(line["kind"], line["reason"]) for line in troubles] == [("stale", "the catalog knows it, it is gone")]
        assert daemon.client.agents() == []
        assert daemon.client.generate("a", text, max_tokens=4).text == unbroken.text

        daemon.kill()
        shutil.rmtree(daemon.data_dir)
        daemon.start()
        assert daemon.client.agents() == []
        fresh = daemon.client.generate("a", text, max_tokens=4)
        assert (fresh.text, fresh.durable, fresh.match) == (unbroken.text, True, "new")
    tally["folders removed, while stopped"] += 3
