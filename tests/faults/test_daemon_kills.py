"""`kill -9` at random moments of turns and commits, again and again on one data folder. Real processes, real files.

Theory of operation. Each agent has a script of turns. An unbroken daemon plays them first. Then another daemon plays
them while it is killed over and over: in the middle of a turn, around its commit, and during recovery. After each
restart every agent repeats the turn it had no durable reply for. Its prompt is the same, so the text must be, too; and
what was durable must be reused to the last token, whether or not the interrupted turn had reached the disk.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvd_client import ConnectionLost, DaemonUnreachable, GenerateResult, GenerateStream
from tests.support.daemon import Daemon, short_folder
from tests.support.prose import prose
from tests.support.zygote import Zygote

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(240)]

KILLS = 9
AGENTS = 3
NEW = 16
"""New tokens a turn."""
TRIGGERS = ("matched", "prefill", "first_token", "text", "usage", "usage", "durable")
"""The event after which the kill comes; `usage` is the last one before the commit, so it counts twice."""
SEED = 20
OPTIONS = ("--check", "--sharing", "agent")


def added(agent: int, turn: int) -> str:
    """What the client adds in a turn: often more than what fits the open page."""
    return prose(random.Random(f"{agent}-{turn}").choice((3, 40, 120, 256, 300)), f"{agent}-{turn}")


@dataclass
class Script:
    """One agent's way through its turns.

    Attributes:
        agent: its number.
        text: the whole text after the last durable turn.
        computed: its tokens with KV then; None: the daemon was killed before it could be asked.
        turn: the turn that comes next.
        interrupted: that turn was sent before, and no reply came.
    """

    agent: int
    text: str = ""
    computed: int | None = 0
    turn: int = 0
    interrupted: bool = False
    texts: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name in the daemon."""
        return f"agent-{self.agent}"

    @property
    def prompt(self) -> str:
        """The text of the next turn."""
        return self.text + added(self.agent, self.turn)

    def accept(self, result: GenerateResult, computed: int | None) -> None:
        """A durable reply came."""
        assert result.durable
        self.text = self.prompt + result.text
        self.computed = computed
        self.texts.append(result.text)
        self.turn += 1
        self.interrupted = False


def play(daemon: Daemon, script: Script) -> GenerateResult:
    """One whole turn."""
    result = daemon.client.generate(script.name, script.prompt, max_tokens=NEW)
    script.accept(result, daemon.client.agent_info(script.name).computed_tokens)
    return result


def kill_in_turn(daemon: Daemon, script: Script, chance: random.Random) -> str:
    """Start a turn and kill the daemon a few milliseconds after one of its events; returns the event."""
    trigger = chance.choice(TRIGGERS)
    delay_s = chance.choice((0.0, chance.uniform(0.0, 0.008), chance.uniform(0.0, 0.05)))
    script.interrupted = True
    with daemon.new_client() as client:
        try:
            stream = client.generate_stream(script.name, script.prompt, max_tokens=NEW)
            result = _kill_after(daemon, stream, trigger, delay_s)
            script.accept(result, None)  # the reply overtook the kill: it counts
        except (ConnectionLost, DaemonUnreachable):
            pass
    daemon.kill()
    return trigger


def _kill_after(daemon: Daemon, stream: GenerateStream, trigger: str, delay_s: float) -> GenerateResult:
    timer = threading.Timer(delay_s, daemon.process.kill)
    try:
        for event in stream:
            if event.type == trigger and not timer.is_alive() and timer.ident is None:
                timer.start()
        return stream.result
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()


@dataclass(frozen=True)
class Unbroken:
    """What an undisturbed daemon did.

    Attributes:
        texts: each agent's generated texts.
        options: of a daemon that computes as it did: backends are chosen by their speed, which load may turn round.
    """

    texts: dict[int, list[str]]
    options: tuple[str, ...]


@pytest.fixture(scope="module")
def unbroken(tiny_model_dir: Path, zygote: Zygote | None) -> Unbroken:
    """Each agent's turns when nothing is ever killed."""
    with short_folder() as folder, Daemon(folder, tiny_model_dir, OPTIONS, zygote=zygote) as daemon:
        scripts = [Script(agent) for agent in range(AGENTS)]
        for script in scripts:
            for _ in range(KILLS + 2):
                if len(script.prompt) < 16_000:  # stay inside the model's context
                    play(daemon, script)
        facts = daemon.client.call("model.info")
        assert isinstance(facts, dict)
        texts = {script.agent: script.texts for script in scripts}
        return Unbroken(texts, (*OPTIONS, "--attention", str(facts["attention"])))


def test_durable_turns_survive_kills_at_any_moment(
    tiny_model_dir: Path, unbroken: Unbroken, zygote: Zygote | None, tally: Counter[str]
) -> None:
    """P2, P3: after each of many kills every durable token is reused, every text equals the unbroken run's."""
    chance = random.Random(SEED)
    scripts = [Script(agent) for agent in range(AGENTS)]
    triggers = []
    with short_folder() as folder:
        daemon = Daemon(folder, tiny_model_dir, unbroken.options, zygote=zygote)
        try:
            for kill in range(KILLS):
                if kill % 5 == 4:
                    daemon.spawn()
                    time.sleep(chance.uniform(0.1, 1.5))
                    daemon.kill()  # in start or recovery, which must be repeatable
                    tally["kill -9, in starts"] += 1
                daemon.start()
                for script in chance.sample(scripts, AGENTS):
                    resume(daemon, script, unbroken)
                victim = chance.choice(
                    [script for script in scripts if script.turn < len(unbroken.texts[script.agent])]
                )
                triggers.append(kill_in_turn(daemon, victim, chance))
            daemon.start()
            for script in scripts:
                resume(daemon, script, unbroken)
                assert script.texts == unbroken.texts[script.agent][: script.turn]
            figures = daemon.statistics()
            assert figures["load_failures"] == figures["write_failures"] == figures["pages"]["lost"] == 0
            assert daemon.files("*/quarantine/*") == []
            assert figures["swap_bytes"] == sum(path.stat().st_size for path in daemon.page_files())
        finally:
            daemon.kill()
    tally["kill -9, in turns"] += KILLS
    assert len(set(triggers)) >= 4
    assert sum(script.turn for script in scripts) > KILLS


def resume(daemon: Daemon, script: Script, unbroken: Unbroken) -> None:
    """Play the agent's next turn and hold the daemon to its promises."""
    if script.turn >= len(unbroken.texts[script.agent]):
        return
    known = {info.agent: info.computed_tokens for info in daemon.client.agents()}.get(script.name, 0)
    interrupted, durable = script.interrupted, script.computed
    result = play(daemon, script)
    assert result.cached_tokens == min(known, result.prompt_tokens - 1), (script.name, script.turn, result.match_reason)
    if durable is not None:
        # an interrupted turn may have been committed before its reply got lost
        assert known >= durable if interrupted else known == durable, (script.name, script.turn)
    assert result.text == unbroken.texts[script.agent][script.turn - 1], (script.name, script.turn)
