"""One client process of `kvd bench soak`: does at random what agent frameworks do, well and badly; keeps transcripts.

Started as `python -m kvd.bench.soak_client SETTINGS` with `ClientSettings` as JSON. It ends with 0 after SIGTERM, with
-9 when it has killed itself in the middle of a request, and with `VIOLATED` when the daemon broke a promise; the
journal then says which. Its successor opens the same shelf, and finds out of each agent what became of it.

May import kvd_client and the soak's transcripts and checks, never the daemon's code: clients are thin.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from kvd.bench.soak_transcript import Claim, Kind, Shelf, Transcript
from kvd.bench.soak_verify import Violation, chat_trouble, verify_agent
from kvd.bench.text import technical_english
from kvd_client import Cancelled, Client, DaemonUnreachable, GenerateResult, GenerateStream
from kvd_client.errors import AgentBusy, AgentNotFound, BudgetExceeded, Busy, ContextFull
from kvd_client.stream import Text

VIOLATED: Final = 3
REFUSALS: Final = (AgentBusy, BudgetExceeded, Busy, ContextFull)
"""Answers that a daemon under load may give; the agent is then as it was, or has more of what was asked for."""

RETURN_S: Final = 120.0
"""How long a killed daemon may take to come back."""

ODD_PIECES: Final = (
    "naïve café ",
    "日本語の文章。",
    "🌍🚀👩‍👩‍👧 ",
    "<|im_start|>user\n",
    "<|endoftext|>",
    "\n\n\t",
    "Ω≈ç√ ",
    "é",
)
"""Text that tokens split inside characters, and markup that a user may type: it stays text."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What a client process is told.

    Attributes:
        socket: the daemon's.
        folder: of its shelf.
        slot: its number; agents' names begin with it.
        seed: of everything it draws.
        agents: it keeps at most so many.
        longest_tokens: an agent that has more is cut or deleted.
        survives_kills: the daemon may be killed and comes back; otherwise its absence is a violation.
    """

    socket: str
    folder: str
    slot: int
    seed: str
    agents: int = 5
    longest_tokens: int = 1200
    survives_kills: bool = False

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class SoakClient:
    """Owner: the process. `step` does one thing; everything drawn comes from the seed."""

    settings: ClientSettings
    stopping: bool = False
    daemon_pid: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens each agent had after its last answered turn."""
    client: Client = field(init=False)
    shelf: Shelf = field(init=False)
    chance: random.Random = field(init=False)
    made: int = 0

    def __post_init__(self) -> None:
        self.client = Client(self.settings.socket, timeout_s=RETURN_S, resume_s=0.0)
        self.shelf = Shelf.open(Path(self.settings.folder))
        self.chance = random.Random(self.settings.seed)  # noqa: S311  repeatable, not secret

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Work until told to stop; returns the exit code."""
        try:
            while not self.stopping:
                try:
                    self.step()
                except DaemonUnreachable as error:
                    if not self.settings.survives_kills:
                        raise Violation(f"the daemon went away: {error}") from None
                    self.shelf.note("daemon_gone")
                    self._wait_for_daemon()
            return 0
        except Violation as violation:
            self.shelf.note("violation", text=str(violation))
            return VIOLATED
        except Exception as error:  # whatever it is, it is not what a daemon may answer
            traceback.print_exc()
            self.shelf.note("violation", text=f"{type(error).__name__}: {error}")
            return VIOLATED
        finally:
            self.client.close()

    def step(self) -> None:
        """One thing at random."""
        self.daemon_pid = int(self.client.health().server["pid"])
        actions: list[tuple[float, Callable[[], str]]] = [
            (30, self._turn),
            (14, self._chat),
            (8, self._diverge),
            (7, self._inject),
            (6, self._fork),
            (6, self._rollback),
            (4, self._delete),
            (10, self._meddle),
            (5, self._look),
        ]
        (action,) = self.chance.choices([each for _, each in actions], [weight for weight, _ in actions])
        try:
            outcome = action()
        except REFUSALS as error:
            outcome = error.name
            time.sleep(min(error.retry_after_s or 0.0, 1.0))
        self.shelf.note(action.__name__.lstrip("_"), outcome=outcome)

    def _wait_for_daemon(self) -> None:
        deadline = time.monotonic() + RETURN_S
        while not self.stopping:
            try:
                if self.client.health().ready:
                    return
            except DaemonUnreachable:
                pass
            if time.monotonic() > deadline:
                raise Violation(f"the daemon did not come back within {RETURN_S:g} s")
            time.sleep(0.05)

    # ---- agents -----------------------------------------------------------------------------------------------------

    def _agent(self, kind: Kind) -> Transcript:
        """An agent of which is known what it holds; a new one when there are few."""
        known = [name for name, each in self.shelf.transcripts.items() if each.kind == kind]
        few = len(self.shelf.transcripts) < self.settings.agents
        if not known or (few and self.chance.random() < 0.3):
            return Transcript(self._new_name(), kind, (Claim.exactly(""),), absent=True, daemon_pid=self.daemon_pid)
        return self._certain(self.chance.choice(known)) or self._agent(kind)

    def _new_name(self) -> str:
        self.made += 1
        while len(self.shelf.transcripts) >= self.settings.agents:
            self._delete()
        return f"{self.settings.slot}-{self.settings.seed}-{self.made}"

    def _certain(self, name: str) -> Transcript | None:
        """The agent's transcript with one possibility, after a look if need be; None when it is gone."""
        transcript = self.shelf.transcripts[name]
        is_certain = transcript.text is not None or (
            transcript.kind == "chat" and not transcript.question and not transcript.absent
        )
        if is_certain and transcript.daemon_pid == self.daemon_pid:
            return transcript
        self.tokens.pop(name, None)
        found = verify_agent(self.client, transcript, daemon_pid=self.daemon_pid)
        self.shelf.note("verified", outcome="gone" if found is None else "there")
        if found is None:
            self.shelf.forget(name)
        else:
            self.shelf.put(found)
        return found

    # ---- turns ------------------------------------------------------------------------------------------------------

    def _piece(self, longest: int) -> str:
        text = technical_english()
        start = self.chance.randrange(len(text) - longest)
        piece = text[start : start + self.chance.randint(1, longest)]
        return piece + self.chance.choice(ODD_PIECES) if self.chance.random() < 0.3 else piece

    def _options(self) -> dict[str, Any]:
        chance = self.chance
        options: dict[str, Any] = {"max_tokens": chance.choice((1, 4, 8, 8, 16, 24))}
        if chance.random() < 0.3:
            options |= {"temperature": 0.8, "seed": chance.randrange(1000)}
        if chance.random() < 0.15:
            options["stop"] = [chance.choice(("e", ". ", "the"))]
        if chance.random() < 0.2:
            options["priority"] = "background"
        if chance.random() < 0.06:
            options["timeout_s"] = chance.choice((0.01, 0.1, 0.5))
        return options

    def _turn(self) -> str:
        before = self._agent("text")
        text = before.text
        assert text is not None
        if self.tokens.get(before.agent, 0) > self.settings.longest_tokens:
            return self._shorten(before)
        return self._generate(before, text, text + self._piece(self.chance.choice((20, 100, 1500))))

    def _diverge(self) -> str:
        before = self._agent("text")
        text = before.text
        assert text is not None
        cut = text[: self.chance.randint(0, len(text))]
        self.tokens.pop(before.agent, None)
        return self._generate(before, text, cut + self._piece(200))

    def _generate(self, before: Transcript, text: str, prompt: str) -> str:
        """One turn, perhaps not to its end."""
        low = text if prompt.startswith(text) else ""
        tokens = self.tokens.pop(before.agent, 0)
        options = self._options()
        self.shelf.put(before.unanswered(Claim(low, prompt, grows=True)))
        streamed: list[str] = []

        def told(*, grows: bool) -> None:
            self.shelf.put(before.unanswered(Claim(low, prompt + "".join(streamed), grows=grows)))

        try:
            stream = self.client.generate_stream(before.agent, prompt, **options)
            result = self._follow(stream, streamed, told)
        except Cancelled:
            told(grows=False)  # every event that came before the answer was taken
            return "cancelled"
        if result is None:
            told(grows=True)
            return "left"
        if low and tokens and (result.match not in ("extend", "exact") or result.cached_tokens < tokens - 1):
            reused = f"{result.cached_tokens} of {tokens} tokens ({result.match}, {result.match_reason})"
            raise Violation(f"{before.agent} reused {reused}")
        if result.text != "".join(streamed):
            raise Violation(f"{before.agent} streamed {''.join(streamed)!r} and answered {result.text!r}")
        self._count(result)
        # what stands before a stop string inside a token is kept where it is one token
        least = prompt if result.finish_reason == "stop" and options.get("stop") else None
        self.shelf.put(
            before.answered(prompt + result.text, durable=result.durable, daemon_pid=self.daemon_pid, least=least)
        )
        self.tokens[before.agent] = result.prompt_tokens + result.completion_tokens
        return result.finish_reason

    def _chat(self) -> str:
        before = self._agent("chat")
        if before.floor_tokens > self.settings.longest_tokens:
            return self._remove(before)
        question = before.question or self._piece(self.chance.choice((20, 100, 800)))
        messages = (*before.messages, {"role": "user", "content": question})
        self.shelf.put(replace(before, question=question))
        options = self._options()
        # of a sampled answer with markup in it, the template would make other text than the model did
        options = {name: value for name, value in options.items() if name not in ("temperature", "seed")}
        streamed: list[str] = []
        try:
            stream = self.client.chat_stream(before.agent, messages, **options)
            result = self._follow(stream, streamed, lambda **_: None)
        except Cancelled:
            return "cancelled"
        if result is None:
            return "left"
        if trouble := chat_trouble(result, floor_tokens=before.floor_tokens, certain=not before.question):
            raise Violation(f"{before.agent}: {trouble}")
        self._count(result)
        answer = {"role": "assistant", "content": result.text}
        self.shelf.put(
            before.conversed(
                (*messages, answer),
                tokens=result.prompt_tokens + result.completion_tokens,
                durable=result.durable,
                daemon_pid=self.daemon_pid,
            )
        )
        return result.finish_reason

    def _follow(self, stream: GenerateStream, streamed: list[str], told: Callable[..., None]) -> GenerateResult | None:
        """Take the events of a turn and, now and then, end it in one of the ways that clients do.

        Returns:
            Its result; None when it was left early.

        Raises:
            Cancelled: it was cancelled, or timed out; `streamed` then has all its text.
        """
        ways = ("stay", "cancel", "leave", "hang up", "die")
        (way,) = self.chance.choices(ways, (70, 10, 6, 6, 4))
        last = self.chance.choice((0, 1, 2, 4, 8))
        for number, event in enumerate(stream):
            if isinstance(event, Text):
                streamed.append(event.text)
            if number != last or way == "stay":
                continue
            if way == "cancel":
                stream.cancel()
            elif way == "die":
                told(grows=True)
                self._die()
            else:
                stream.close()
                if way == "hang up":
                    self.client.close()
                return None
        return stream.result

    def _die(self) -> NoReturn:
        self.shelf.note("died")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    def _count(self, result: GenerateResult) -> None:
        self.shelf.note(
            "answered",
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            completion_tokens=result.completion_tokens,
            durable=result.durable,
        )

    # ---- other calls ------------------------------------------------------------------------------------------------

    def _inject(self) -> str:
        before = self._agent("text")
        text = before.text
        assert text is not None
        piece = self._piece(600)
        self.tokens.pop(before.agent, None)
        self.shelf.put(before.unanswered(Claim(text, text + piece)))
        result = self.client.inject(before.agent, piece)
        self.shelf.put(before.answered(text + piece, durable=result.durable, daemon_pid=self.daemon_pid))
        self.tokens[before.agent] = result.tokens
        return "done"

    def _fork(self) -> str:
        child_name = self._new_name()
        parent = self._agent("text")
        text = parent.text
        if not text:  # a new agent has nothing to fork
            return "nothing to fork"
        child = Transcript(child_name, "text", (), absent=True, daemon_pid=self.daemon_pid)
        whole = self.chance.random() < 0.5
        self.shelf.put(child.unanswered(Claim(text if whole else "", text)))
        tokens = None if whole else self.chance.randint(0, self._tokens_of(parent))
        info = self.client.fork(parent.agent, child_name, tokens)
        self.shelf.put(child.answered(cut(text, info.text_bytes), durable=info.durable, daemon_pid=self.daemon_pid))
        if whole and info.text_bytes != len(text.encode()):
            raise Violation(f"{child_name} forked {info.text_bytes} of {len(text.encode())} bytes")
        return "done"

    def _rollback(self) -> str:
        return self._shorten(self._agent("text"))

    def _shorten(self, before: Transcript) -> str:
        text = before.text
        if not text:
            return "nothing to cut"
        self.tokens.pop(before.agent, None)
        tokens = self.chance.randint(0, self._tokens_of(before))
        self.shelf.put(before.unanswered(Claim("", text)))
        info = self.client.rollback(before.agent, tokens)
        self.shelf.put(before.answered(cut(text, info.text_bytes), durable=info.durable, daemon_pid=self.daemon_pid))
        if info.tokens > tokens:
            raise Violation(f"{before.agent} was cut to {tokens} tokens and has {info.tokens}")
        return "done"

    def _tokens_of(self, transcript: Transcript) -> int:
        return self.client.agent_info(transcript.agent).tokens

    def _delete(self) -> str:
        names = sorted(self.shelf.transcripts)
        return self._remove(self.shelf.transcripts[self.chance.choice(names)]) if names else "nobody to delete"

    def _remove(self, transcript: Transcript) -> str:
        self.tokens.pop(transcript.agent, None)
        self.shelf.put(transcript.unanswered(may_vanish=True))
        try:
            self.client.delete(transcript.agent)
        except AgentNotFound:
            if not transcript.as_seen_by(self.daemon_pid).absent:
                raise Violation(f"{transcript.agent} is gone; its transcript says that it exists") from None
        self.shelf.forget(transcript.agent)
        return "done"

    def _meddle(self) -> str:
        """Move pages of anybody's agents about: no text may change by that."""
        agents = self.client.agents()
        if not agents:
            return "nobody to move"
        name = self.chance.choice(agents).agent
        calls = (self.client.evict, self.client.prefetch, self.client.pin, self.client.unpin, self.client.unpin)
        (call,) = self.chance.choices(calls, (40, 25, 10, 15, 10))
        try:
            call(name)
        except AgentNotFound:  # its owner was quicker
            return "gone meanwhile"
        return call.__name__

    def _look(self) -> str:
        """Look-ups, which change nothing."""
        call = self.chance.choice((self.client.statistics, self.client.residency, self.client.model_info))
        call()
        self.client.tokenize(self._piece(300))
        return call.__name__


def cut(text: str, text_bytes: int) -> str:
    """The text's first bytes.

    Raises:
        Violation: they end inside a character, or there are not so many.
    """
    data = text.encode()
    try:
        if text_bytes > len(data):
            raise Violation(f"{text_bytes} bytes were kept of {len(data)}")
        return data[:text_bytes].decode()
    except UnicodeDecodeError:
        raise Violation(f"a cut at byte {text_bytes} ends inside a character") from None


def main() -> int:
    """Run one client; returns its exit code."""
    client = SoakClient(ClientSettings(**json.loads(sys.argv[1])))

    def stop(*_: object) -> None:
        client.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    return client.run()


__all__ = ["REFUSALS", "VIOLATED", "ClientSettings", "SoakClient", "cut"]

if __name__ == "__main__":
    sys.exit(main())
