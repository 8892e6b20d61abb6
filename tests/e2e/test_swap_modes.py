"""Whole daemons: one that writes nothing of KV, and one whose page files somebody removes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_client import KvdClientError
from tests.support.daemon import Daemon, eventually, short_folder
from tests.support.prose import prose
from tests.support.zygote import Zygote


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a short path."""
    with short_folder() as path:
        yield path


def files_under(folder: Path) -> dict[str, int]:
    """Names and lengths of all regular files, the socket and the lock apart."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_page_files_that_vanish_come_back_and_swap_off_leaves_all_as_it_is(
    tiny_model_dir: Path, folder: Path, zygote: Zygote | None
) -> None:
    """P8 P26: resident pages are written again by themselves; then a daemon without swap on the same folder."""
    with Daemon(folder, tiny_model_dir, zygote=zygote) as daemon:
        text = prose(600, "a")
        text += daemon.client.generate("a", text, max_tokens=4).text
        health = daemon.client.call("health")
        assert (health["swap"], health["disk"], health["disk_reason"]) == ("on", "ok", None)
        assert daemon.statistics()["swap_watched"]
        pages = daemon.page_files()
        assert len(pages) >= 2
        for path in pages:
            path.unlink()
        eventually(lambda: daemon.statistics()["page_files_rewritten"] == len(pages), "the pages are written again")
        assert {path.name for path in daemon.page_files()} == {path.name for path in pages}
        assert daemon.statistics()["page_files_lost"] == len(pages)
        daemon.terminate()

    before = files_under(folder / "data")
    with Daemon(folder, tiny_model_dir, ("--swap", "off", "--write-limit", "5MB/min"), zygote=zygote) as daemon:
        client = daemon.client
        assert client.call("hello")["swap"] == client.call("health")["swap"] == "off"
        with pytest.raises(KvdClientError, match="a"):
            client.agent_info("a")
        answer = client.generate("b", prose(600, "b"), max_tokens=4)
        assert (answer.durable, answer.durable_reason) == (False, "swap is off")
        more = client.generate("b", prose(600, "b") + answer.text + " more", max_tokens=1)
        assert more.cached_tokens > 500
        assert daemon.statistics()["bytes_written"] == 0
        daemon.terminate()
    assert files_under(folder / "data") == before

    with Daemon(folder, tiny_model_dir, zygote=zygote) as daemon:
        again = daemon.client.generate("a", text, max_tokens=1)
        assert again.cached_tokens == again.prompt_tokens - 1
