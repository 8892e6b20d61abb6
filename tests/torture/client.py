"""A client process: plays its agents' turns for as long as it is let, over as many daemons as it takes.

It is told the socket, its number, a seed, and the transcript to write. A line of the transcript is an acknowledged
turn; a line with `fault` is a broken promise. It ends when the file `stop` is beside the transcript.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvd_client import Client, DaemonUnreachable, KvdClientError
from kvd_client.errors import AgentNotFound, NotReady
from tests.support.prose import prose

NEW_TOKENS = 8
LONGEST_TOKENS = 3000
"""After that an agent rests, and a new one takes its place."""

AGENTS = 2
"""Agents that a client plays in turns."""


@dataclass
class Player:
    """One agent.

    Attributes:
        name: its name.
        text: its whole text after the last acknowledged turn.
        computed: its tokens with KV then; None: nobody could be asked.
        turn: number of the next turn.
        interrupted: that turn was sent before and not acknowledged.
    """

    name: str
    text: str = ""
    computed: int | None = 0
    turn: int = 0
    interrupted: bool = False

    @property
    def prompt(self) -> str:
        """The next turn's; the same however often it is sent."""
        chance = random.Random(f"{self.name}-{self.turn}")
        return self.text + prose(chance.choice((3, 40, 120, 256, 300)), f"{self.name}-{self.turn}")


def play(client: Client, player: Player) -> dict[str, object]:
    """One turn; returns the transcript's line."""
    try:
        known = client.agent_info(player.name).computed_tokens
    except AgentNotFound:
        known = 0
    before, was_interrupted = player.computed, player.interrupted
    player.interrupted = True
    prompt = player.prompt
    result = client.generate(player.name, prompt, max_tokens=NEW_TOKENS)
    faults = []
    if before is not None and (known < before if was_interrupted else known != before):
        faults.append(f"{before} tokens were durable, {known} are there")
    if result.cached_tokens != min(known, result.prompt_tokens - 1):
        faults.append(f"{known} tokens are there, {result.cached_tokens} were reused: {result.match_reason}")
    if not result.durable:
        faults.append(f"not durable: {result.durable_reason}")
    player.text, player.computed = prompt + result.text, None
    player.turn += 1
    player.interrupted = False
    line: dict[str, object] = {"agent": player.name, "turn": player.turn - 1, "prompt": prompt, "text": result.text}
    return line | ({"fault": "; ".join(faults)} if faults else {})


def main() -> None:
    """Play until told to stop."""
    socket, number, seed, path = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    chance = random.Random(f"{seed}-{number}")
    made = 0
    players: list[Player] = []
    stop = path.parent / "stop"
    with path.open("a") as transcript:
        while not stop.exists():
            try:
                with Client(socket, timeout_s=60.0) as client:
                    while not stop.exists():
                        while len(players) < AGENTS:
                            players.append(Player(f"{number}.{made}"))
                            made += 1
                        player = chance.choice(players)
                        transcript.write(json.dumps(play(client, player)) + "\n")
                        transcript.flush()
                        player.computed = (info := client.agent_info(player.name)).computed_tokens
                        if info.tokens > LONGEST_TOKENS:
                            players.remove(player)
            except (DaemonUnreachable, NotReady):
                time.sleep(0.01)
            except KvdClientError as error:  # no answer that a kill explains
                transcript.write(json.dumps({"agent": number, "fault": repr(error)}) + "\n")
                transcript.flush()


if __name__ == "__main__":
    main()
