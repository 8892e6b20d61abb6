"""The prisoner's dilemma in five phases: a warden, two prisoners, and an analyst who appears at the end.

The three permanent agents keep their context from phase to phase. After each phase its transcript is injected into all
of them in one call. Every turn is a client process of its own, which ends with the turn; the daemon is killed once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, MakeDaemon
from tests.support.prose import prose

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(400)]

PERMANENT = ("warden", "marco", "danny")
Messages = list[dict[str, str]]
Speak = Callable[[str, Messages, int], Mapping[str, Any]]
"""(agent, its whole conversation, new tokens) to the fields of a result."""


@dataclass(frozen=True)
class Phase:
    """Who speaks, in order; the transcript goes to the permanent agents."""

    name: str
    speakers: tuple[str, ...]


PHASES = (
    Phase("Interrogation A", ("warden", "marco") * 3),
    Phase("Interrogation B", ("warden", "danny") * 3),
    Phase("The yard", ("marco", "danny") * 2),
    Phase("Final reckoning", ("warden", "marco", "danny") * 2),
    Phase("Verdict", ("analyst", "warden", "analyst")),
)
"""25 turns."""


@dataclass
class Play:
    """One performance on a daemon.

    Attributes:
        contexts: each agent's system message.
        histories: each agent's conversation as its client has it.
        said: (phase, agent, text) of every turn.
    """

    daemon: Daemon
    contexts: Mapping[str, str]
    speak: Speak
    new_tokens: int
    histories: dict[str, Messages] = field(default_factory=dict)
    said: list[tuple[str, str, str]] = field(default_factory=list)

    def perform(self, phases: tuple[Phase, ...], *, before: Callable[[Phase], None] = lambda phase: None) -> None:
        """All phases; `before` each of them something may happen to the daemon."""
        for agent in PERMANENT:
            self.histories[agent] = [{"role": "system", "content": self.contexts[agent]}]
            primed = self.daemon.client.inject(agent, messages=self.histories[agent])
            assert (primed.tokens, primed.durable) == (primed.appended_tokens, True)
        for phase in phases:
            before(phase)
            transcript = [f"{phase.name}."]
            for speaker in phase.speakers:
                transcript.append(f"{speaker}: {self.turn(phase, speaker, transcript[-1])}")
            self.hand_on("\n".join(transcript))

    def turn(self, phase: Phase, agent: str, heard: str) -> str:
        """One turn: only what is new is computed."""
        is_new = agent not in self.histories
        history = self.histories.setdefault(agent, [{"role": "system", "content": self.contexts[agent]}])
        history.append({"role": "user", "content": heard})
        known = 0 if is_new else self.daemon.client.agent_info(agent).computed_tokens
        computed = self.daemon.statistics()["tokens_computed"]
        result = self.speak(agent, history, self.new_tokens)
        assert (result["match"], result["cached_tokens"]) == ("new" if is_new else "extend", known), (phase, agent)
        assert result["durable"]
        steps = self.daemon.statistics()["tokens_computed"] - computed
        # a turn that the model ends runs one step more than it has tokens to go on from
        expected = result["prompt_tokens"] - result["cached_tokens"] + result["completion_tokens"]
        assert steps in (expected - 1, expected)
        text: str = result["text"]
        history.append({"role": "assistant", "content": text})
        self.said.append((phase.name, agent, text))
        return text

    def hand_on(self, transcript: str) -> None:
        """The phase's transcript goes to all permanent agents at once."""
        message = {"role": "user", "content": transcript}
        before = {agent: self.daemon.client.agent_info(agent) for agent in PERMANENT}
        computed = self.daemon.statistics()["tokens_computed"]
        added = self.daemon.client.inject_into(PERMANENT, messages=[message])
        assert [(part.agent, part.error, part.durable) for part in added] == [(a, None, True) for a in PERMANENT]
        pending = sum(info.tokens - info.computed_tokens for info in before.values())
        steps = self.daemon.statistics()["tokens_computed"] - computed
        assert steps == pending + sum(part.appended_tokens for part in added)
        for part in added:
            assert part.tokens == before[part.agent].tokens + part.appended_tokens
            self.histories[part.agent].append(message)

    def check_apart(self) -> None:
        """Each agent holds exactly the text of its own conversation, and no page is in two of them."""
        pages: list[set[str]] = []
        for agent, history in self.histories.items():
            text = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in history)
            if history[-1]["role"] == "assistant":
                text = text.removesuffix("<|im_end|>\n")
            info = self.daemon.client.agent_info(agent)
            assert (info.text_bytes, info.durable) == (len(text.encode()), True), agent
            branches = self.daemon.client.residency(agent)["agents"][0]["branches"]
            assert [branch["current"] for branch in branches] == [True], "nobody ever diverged"
            pages.append({page["page"] for segment in branches[0]["segments"] for page in segment["pages"]})
        assert all(left.isdisjoint(right) for left, right in itertools.combinations(pages, 2))


def by_process(daemon: Daemon, folder: Path) -> Speak:
    """Each turn in a client process that knows nothing but the file it is given."""

    def speak(agent: str, history: Messages, new_tokens: int) -> Mapping[str, Any]:
        file = folder / f"{agent}.json"
        file.write_text(json.dumps(history[:-1]))
        last = ("--message", history[-1]["content"], "--max-tokens", str(new_tokens), "--json")
        done = daemon.cli("chat", agent, "--messages-file", str(file), *last)
        assert done.code == 0, done.stderr
        result: Mapping[str, Any] = done.json
        return result

    return speak


def by_client(daemon: Daemon) -> Speak:
    """All turns over one connection."""

    def speak(agent: str, history: Messages, new_tokens: int) -> Mapping[str, Any]:
        result = daemon.client.chat(agent, history, max_tokens=new_tokens)
        return {name: getattr(result, name) for name in result.__slots__}

    return speak


def test_five_phases_and_four_agents(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """P2, P14, P16, P19: each of 25 turns computes its own text only, whatever died; texts are those of calm days."""
    contexts = {
        agent: f"You are {agent}.{prose(150 + 97 * i, agent)}" for i, agent in enumerate((*PERMANENT, "analyst"))
    }
    calm_daemon = make_daemon().start()
    calm = Play(calm_daemon, contexts, by_client(calm_daemon), new_tokens=9)
    calm.perform(PHASES)
    calm_daemon.kill()
    daemon = make_daemon().start()
    play = Play(daemon, contexts, by_process(daemon, tmp_path), new_tokens=9)

    def before(phase: Phase) -> None:
        if phase.name == "Final reckoning":
            daemon.restart()

    play.perform(PHASES, before=before)
    assert len(play.said) == 25
    assert play.said == calm.said
    play.check_apart()
    assert daemon.client.agent_info("warden").tokens > 1000


@pytest.mark.long
@pytest.mark.real_model
def test_phases_with_a_real_model(make_daemon: MakeDaemon, smollm2_dir: Path, tmp_path: Path) -> None:
    """P2, P16, P33: SmolLM2 plays a shorter form; asked for its secret at the end, nobody tells another's."""
    secrets = {"warden": "48213", "marco": "90577", "danny": "31946", "analyst": "75068"}
    contexts = {
        agent: f"You are {agent}. Your secret number is {secret}. Remember it: the number {secret} is yours."
        for agent, secret in secrets.items()
    }
    daemon = make_daemon(model=smollm2_dir).start()
    play = Play(daemon, contexts, by_process(daemon, tmp_path), new_tokens=8)
    phases = tuple(Phase(phase.name, phase.speakers[-2:]) for phase in PHASES)

    def before(phase: Phase) -> None:
        if phase.name == "The yard":
            daemon.restart()

    play.perform(phases, before=before)
    play.check_apart()
    for agent in PERMANENT:
        asked = [*play.histories[agent], {"role": "user", "content": "What is your secret number?"}]
        known = daemon.client.agent_info(agent).computed_tokens
        answer = daemon.client.chat(agent, asked, max_tokens=24)
        assert (answer.match, answer.cached_tokens) == ("extend", known)
        told = {other for other, secret in secrets.items() if secret in answer.text}
        assert told <= {agent}, (agent, answer.text)
