"""Two daemons start at once on one folder, again and again: one serves, the other says who was first and ends."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

from tests.support.daemon import Daemon, eventually
from tests.support.zygote import Zygote


def run(folder: Path, model: Path, zygote: Zygote | None, *, races: int, seed: int) -> Counter[str]:
    """Race; returns counts."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    pair = [Daemon(folder / name, model, socket=folder / f"{name}.sock", zygote=zygote) for name in ("one", "two")]
    for daemon in pair:
        daemon.folder.mkdir(parents=True)
        daemon.data_dir = folder / "data"
    text, turns = "", 0
    for _ in range(races):
        for daemon in pair:
            daemon.spawn()
            time.sleep(chance.uniform(0.0, 0.02))
        eventually(lambda: any(daemon.process.poll() is not None for daemon in pair), "one of them gives up")
        loser = next(daemon for daemon in pair if daemon.process.poll() is not None)
        winner = next(daemon for daemon in pair if daemon is not loser)
        counts["races"] += 1
        if loser.wait() != 1 or "Traceback" in loser.last_words():
            counts["both served, or one crashed"] += 1
        winner.wait_ready()
        known = winner.client.agent_info("a").computed_tokens if turns else 0
        result = winner.client.generate("a", text + f" turn {turns}", max_tokens=2)
        if result.cached_tokens != min(known, result.prompt_tokens - 1) or not result.durable:
            counts["turns lost or not whole"] += 1
        text, turns = text + f" turn {turns}" + result.text, turns + 1
        winner.kill()
    counts["both served, or one crashed"] += 0
    return counts
