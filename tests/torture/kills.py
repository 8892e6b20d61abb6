"""`kill -9` at random moments, under several client processes; then nothing acknowledged may be missing or different.

The clients check each reply against what was durable before (`tests.torture.client`). At the end the killed folder is
served once more, and every agent resumes at its exact token. Then an undisturbed daemon plays every acknowledged turn,
and its texts must be the same. Requests run one at a time (`--max-batch 1`), as a batch may differ in its last bits.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.daemon import Daemon
from tests.support.zygote import Zygote

OPTIONS = ("--check", "--sharing", "agent", "--max-batch", "1", "--budget", "3MB")
CLIENTS = 3
PATIENCE_S = 30.0


def run(folder: Path, model: Path, zygote: Zygote | None, *, kills: int, seed: int) -> Counter[str]:
    """Kill a daemon `kills` times; returns counts, those of faults under `lost` and `wrong`."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    daemon = Daemon(folder / "killed", model, OPTIONS, zygote=zygote)
    daemon.folder.mkdir(parents=True)
    transcripts = [folder / f"client-{number}.jsonl" for number in range(CLIENTS)]
    clients = [start_client(daemon.socket, number, seed, path) for number, path in enumerate(transcripts)]
    try:
        for number in range(kills):
            daemon.spawn()
            if chance.random() < 0.15:
                time.sleep(chance.uniform(0.0, 1.0))  # in a start or in recovery
                counts["kills in starts"] += 1
            else:
                daemon.wait_ready()
                wait_for_turns(transcripts, chance.choice((0, 1, 3)))  # on a busy machine seconds say nothing
                time.sleep(chance.choice((chance.uniform(0.0, 0.1), chance.uniform(0.0, 2.0))))
                counts["kills under load"] += 1
            daemon.kill()
            if number % 10 == 9:
                print(f"  {number + 1} kills, {sum(map(lines, transcripts))} turns acknowledged", flush=True)
        (folder / "stop").touch()
        daemon.start()
    finally:
        (folder / "stop").touch()
        counts["clients lost to a fault of their own"] = sum(client.wait(120) != 0 for client in clients)
    turns = [json.loads(line) for path in transcripts for line in path.read_text().splitlines()]
    for turn in turns:
        if "fault" in turn:
            counts["turns lost or not whole"] += 1
            print(f"  FAULT {turn['agent']}: {turn['fault']}", flush=True)
    acknowledged = [turn for turn in turns if "prompt" in turn]
    counts["turns acknowledged"] = len(acknowledged)
    last = {turn["agent"]: turn for turn in acknowledged}
    counts["agents"] = len(last)
    counts["turns lost or not whole"] += sum(not resumes(daemon, turn) for turn in last.values())
    counts["files in quarantine"] = len(daemon.files("*/quarantine/*"))
    facts = daemon.client.call("model.info")
    assert isinstance(facts, dict)
    daemon.kill()
    # backends are chosen by their speed, which load may turn round; and they round differently
    options = (*OPTIONS, "--attention", str(facts["attention"]))
    counts["wrong answers"] = differences(folder, model, zygote, acknowledged, options)
    return counts


def start_client(socket: Path, number: int, seed: int, path: Path) -> subprocess.Popen[bytes]:
    """A client process."""
    root = Path(__file__).parents[2]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join((str(root), str(root / "client")))}
    command = [sys.executable, "-m", "tests.torture.client", str(socket), str(number), str(seed), str(path)]
    return subprocess.Popen(command, env=environment, cwd=root)


def wait_for_turns(transcripts: list[Path], more: int) -> None:
    """Wait until the clients got some more turns acknowledged; not for ever, since that is what is being tried."""
    wanted, deadline_s = sum(map(lines, transcripts)) + more, time.monotonic() + PATIENCE_S
    while sum(map(lines, transcripts)) < wanted and time.monotonic() < deadline_s:
        time.sleep(0.02)


def lines(path: Path) -> int:
    """Lines of a file that may not exist yet."""
    return len(path.read_text().splitlines()) if path.exists() else 0


def resumes(daemon: Daemon, turn: dict[str, Any]) -> bool:
    """Whether an agent goes on after its last acknowledged turn, at the exact token."""
    info = daemon.client.agent_info(turn["agent"])
    text = turn["prompt"] + turn["text"]
    result = daemon.client.generate(turn["agent"], text + " end", max_tokens=1)
    good = result.cached_tokens == min(info.computed_tokens, result.prompt_tokens - 1) and result.durable
    if not good:
        print(f"  FAULT {turn['agent']}: {info.computed_tokens} known, {result.cached_tokens} reused", flush=True)
    return good


def differences(
    folder: Path, model: Path, zygote: Zygote | None, turns: list[dict[str, Any]], options: tuple[str, ...]
) -> int:
    """How many acknowledged turns an undisturbed daemon answers otherwise."""
    wrong = 0
    place = folder / "undisturbed"
    place.mkdir()
    with Daemon(place, model, options, zygote=zygote) as daemon:
        for turn in turns:
            text = daemon.client.generate(turn["agent"], turn["prompt"], max_tokens=8).text
            if text != turn["text"]:
                wrong += 1
                print(f"  FAULT {turn['agent']} turn {turn['turn']}: {turn['text']!r} instead of {text!r}", flush=True)
    return wrong
