"""P4 P8: bits flip in the files of a stopped daemon; it starts, says what is lost, and serves no wrong byte."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from kvd.store.layout import log_name
from tests.support.daemon import Daemon, short_folder
from tests.support.prose import prose
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

AGENTS = ("a", "b", "c")
ROUNDS = 2
NEW = 4


def text_of(agent: str) -> str:
    """An agent's text: 600 tokens, two pages and a tail."""
    return prose(500, agent) + prose(100, f"{agent} more")


def flip_a_bit(path: Path, rng: random.Random) -> None:
    """One bit anywhere in a file."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def test_flips_in_every_file_are_survived(tiny_model_dir: Path, tally: Counter[str], zygote: Zygote | None) -> None:
    """Every file of all agents but one, the catalog and the record: that agent is whole, of no other a token is served.

    Each page of the others has a flipped bit, so a token that is reused would be a wrong one.
    """
    rng = random.Random(5)
    with short_folder() as folder, Daemon(folder, tiny_model_dir, zygote=zygote) as daemon:
        files: dict[str, set[Path]] = {}
        for agent in AGENTS:
            daemon.client.inject(agent, prose(500, agent))
            daemon.client.inject(agent, prose(100, f"{agent} more"))
            daemon.client.evict(agent)
            files[agent] = {daemon.page_file(agent, number) for number in range(2)}
            files[agent] |= set(daemon.files(f"*/agents/{log_name('default', agent)}"))
            assert len(files[agent]) == 3
        daemon.kill()
        shutil.copytree(daemon.data_dir, folder / "good", ignore=shutil.ignore_patterns("*.sock"))
        for spared in AGENTS[:ROUNDS]:
            shutil.rmtree(daemon.data_dir)
            shutil.copytree(folder / "good", daemon.data_dir)
            daemon.data_dir.chmod(0o700)
            targets = set(daemon.files("*/**/*") + daemon.files("engine.json")) - files[spared]
            for path in sorted(path for path in targets if path.is_file() and path.stat().st_size):
                flip_a_bit(path, rng)
                tally["bit flips, tried"] += 1
                tally["bit flips, under daemons"] += 1
            before = len(daemon.log_lines())
            daemon.start()
            lines = daemon.log_lines()[before:]
            assert sum(line["event"] == "log_trouble" for line in lines) == len(AGENTS) - 1
            for agent in AGENTS:
                result = daemon.client.generate(agent, text_of(agent), max_tokens=NEW)
                assert result.durable
                assert result.cached_tokens == (599 if agent == spared else 0), (agent, result.match_reason)
                again = daemon.client.generate(agent, text_of(agent) + result.text, max_tokens=1)
                assert again.cached_tokens == again.prompt_tokens - 1
            assert daemon.client.health().ready
            daemon.kill()
