"""What a soak client has been told of each of its agents, kept so that it outlives the client and the daemon.

Theory of operation. An answered request leaves one possibility: the agent holds exactly this text. A request without
an answer (the client died, the call was cancelled, the daemon was killed) leaves several; each is a `Claim`. An answer
that said `durable: false` keeps the earlier claims as well, for the case that the daemon dies before it can save the
turn. A transcript is written before a request is sent and again after its answer, to a temporary name that is then
renamed, so that SIGKILL leaves the one or the other.

May import the standard library only: clients are thin.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Kind = Literal["text", "chat"]


@dataclass(frozen=True, slots=True)
class Claim:
    """One possibility of what an agent's text is: `low` and more of `high`, and perhaps generated text after that.

    Attributes:
        low: the text begins with it.
        high: the text is a prefix of it, or begins with it if `grows`.
        grows: generated text that nobody was told of may follow.
    """

    low: str
    high: str
    grows: bool = False

    @classmethod
    def exactly(cls, text: str) -> Claim:
        """The text is this."""
        return cls(text, text)

    def candidate(self, text_bytes: int) -> tuple[bytes, bool] | None:
        """What a text of so many bytes must begin with under this claim, and whether that is all of it.

        None: the claim cannot be true of a text of that length.
        """
        low, high = self.low.encode(), self.high.encode()
        if text_bytes < len(low) or (text_bytes > len(high) and not self.grows):
            return None
        whole = text_bytes <= len(high)
        data = high[:text_bytes]
        try:
            data.decode()
        except UnicodeDecodeError:  # a text never ends inside a character
            return None
        return data, whole


@dataclass(frozen=True, slots=True)
class Transcript:
    """What one agent may hold.

    Attributes:
        agent: its name.
        kind: `text` agents are continued with `generate`, `chat` agents with `chat`.
        claims: the possibilities; of a `chat` agent none, its text is made by the daemon.
        fallbacks: further possibilities when the daemon that gave the last answer has died since.
        absent: the agent may not exist: its first request or its deletion was not answered.
        absent_if_dead: it may not exist when that daemon has died since.
        daemon_pid: which daemon gave the last answer.
        messages: of a `chat` agent, the conversation as far as it was answered.
        question: of a `chat` agent, the message that was sent last and may or may not be there.
        floor_tokens: of a `chat` agent, tokens that it holds at least.
        fallback_floor_tokens: the same when that daemon has died since.
    """

    agent: str
    kind: Kind = "text"
    claims: tuple[Claim, ...] = ()
    fallbacks: tuple[Claim, ...] = ()
    absent: bool = False
    absent_if_dead: bool = False
    daemon_pid: int = 0
    messages: tuple[dict[str, str], ...] = ()
    question: str = ""
    floor_tokens: int = 0
    fallback_floor_tokens: int = 0

    @property
    def text(self) -> str | None:
        """The agent's text if there is only one possibility; empty, too, when there is no such agent yet."""
        if self.claims == (Claim.exactly(""),):
            return ""
        if len(self.claims) != 1 or self.claims[0].low != self.claims[0].high or self.claims[0].grows or self.absent:
            return None
        return self.claims[0].high

    def as_seen_by(self, daemon_pid: int) -> Transcript:
        """The possibilities under the daemon that runs now; a daemon that died may have taken what was not durable."""
        if daemon_pid == self.daemon_pid:
            return self
        return replace(
            self,
            claims=tuple(dict.fromkeys((*self.claims, *self.fallbacks))),
            fallbacks=(),
            absent=self.absent or self.absent_if_dead,
            absent_if_dead=False,
            floor_tokens=min(self.floor_tokens, self.fallback_floor_tokens),
            daemon_pid=daemon_pid,
        )

    def unanswered(self, *claims: Claim, may_vanish: bool = False) -> Transcript:
        """A request is about to be sent; these are the claims that it may come to, besides what is now."""
        return replace(
            self,
            claims=tuple(dict.fromkeys((*self.claims, *claims))),
            absent=self.absent or may_vanish,
        )

    def answered(self, text: str, *, durable: bool, daemon_pid: int, least: str | None = None) -> Transcript:
        """The daemon said what the agent holds now.

        Call it on the transcript as it was before the request: what was not durable then may still come back.

        Args:
            text: all of it, or what it is the beginning of.
            durable: as the daemon said.
            daemon_pid: which daemon it was.
            least: what is there of it for sure; all if left out. A stop string may end a turn inside a token, whose
                text before the stop string is given out and perhaps not kept.
        """
        claim = Claim(text if least is None else least, text)
        return replace(
            self,
            claims=(claim,),
            fallbacks=() if durable else tuple(dict.fromkeys((*self.claims, *self.fallbacks))),
            absent=False,
            absent_if_dead=not durable and (self.absent or self.absent_if_dead),
            daemon_pid=daemon_pid,
        )

    def conversed(
        self, messages: tuple[dict[str, str], ...], *, tokens: int, durable: bool, daemon_pid: int, question: str = ""
    ) -> Transcript:
        """A chat agent's turn was answered; it holds `tokens` tokens now."""
        return replace(
            self,
            messages=messages,
            question=question,
            floor_tokens=tokens,
            fallback_floor_tokens=tokens if durable else min(self.floor_tokens, self.fallback_floor_tokens),
            absent=False,
            absent_if_dead=not durable and (self.absent or self.absent_if_dead),
            daemon_pid=daemon_pid,
        )


@dataclass(slots=True)
class Shelf:
    """The transcripts of one slot's agents, one file each, and a journal of what was done. Owner: the slot's client.

    Args:
        folder: made if it is not there.
    """

    folder: Path
    transcripts: dict[str, Transcript] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Shelf:
        """Read what a predecessor has left."""
        folder.mkdir(parents=True, exist_ok=True)
        shelf = cls(folder)
        for path in sorted(folder.glob("*.json")):
            transcript = from_json(json.loads(path.read_text(encoding="utf-8")))
            shelf.transcripts[transcript.agent] = transcript
        return shelf

    def put(self, transcript: Transcript) -> None:
        """Keep what an agent may hold from now on."""
        self.transcripts[transcript.agent] = transcript
        path = self._path(transcript.agent)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(transcript)), encoding="utf-8")
        os.replace(temporary, path)

    def forget(self, agent: str) -> None:
        """The agent is gone."""
        self.transcripts.pop(agent, None)
        self._path(agent).unlink(missing_ok=True)

    def note(self, event: str, **facts: object) -> None:
        """One line of the journal; a line that SIGKILL tore is left out when it is read."""
        with (self.folder / "journal.jsonl").open("a", encoding="utf-8") as journal:
            journal.write(json.dumps({"event": event, **facts}) + "\n")

    def journal(self) -> Iterator[dict[str, Any]]:
        """What was noted, in order."""
        path = self.folder / "journal.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            yield entry

    def _path(self, agent: str) -> Path:
        return self.folder / f"{hashlib.blake2b(agent.encode(), digest_size=12).hexdigest()}.json"


def from_json(data: dict[str, Any]) -> Transcript:
    """A transcript as `asdict` wrote it."""
    claims = {name: tuple(Claim(**each) for each in data[name]) for name in ("claims", "fallbacks")}
    return Transcript(**(data | claims | {"messages": tuple(data["messages"])}))


__all__ = ["Claim", "Kind", "Shelf", "Transcript", "from_json"]
