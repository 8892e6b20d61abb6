"""The runs of `kvd bench serve`: client processes that decode together, and beside a long prompt.

May import kvd.bench, kvd.errors, kvd.model.tokenizer and kvd_client.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvd.bench.harness import DaemonProcess
from kvd.bench.serve_client import AgentProcess
from kvd.bench.serve_figures import (
    Turn,
    decode_tokens_s,
    engine_share,
    first_tokens_in_chunks,
    share_beside,
    whole_tokens_s,
)
from kvd.bench.text import technical_english
from kvd.errors import InvalidParams
from kvd.model.tokenizer import TextCodec
from kvd_client import Client

BAN_BIAS = -1e4
"""Of ids that would end a turn before it has made the tokens it is measured over."""

SETTLED = 8
"""Tokens of a turn that are made before anything beside it is measured."""

SHORT_TEXT = "List three reasons, in a few words each, why a page table is used."
SHORT_ARRIVALS = (1, 3, 5)
"""Chunks of a long prompt that are done when a short request is sent, half a chunk later."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        agents: that decode together.
        tokens: context of each.
        new_tokens: of each turn.
        long_tokens: of the long prompt, and of each agent that is swapped.
        repeats: runs of each; medians count.
    """

    agents: int = 8
    tokens: int = 512
    new_tokens: int = 64
    long_tokens: int = 4096
    repeats: int = 3


@dataclass(slots=True)
class Together:
    """Runs of agents that decode together, one entry a repeat.

    Attributes:
        one, all: tokens a second of one agent, and of all together.
        whole: new tokens a second of all, prompts included.
        engine_one, engine_all: the engine's own share of its time meanwhile.
    """

    one: list[float | None] = field(default_factory=list)
    all: list[float | None] = field(default_factory=list)
    whole: list[float | None] = field(default_factory=list)
    engine_one: list[float | None] = field(default_factory=list)
    engine_all: list[float | None] = field(default_factory=list)


@dataclass(slots=True)
class Beside:
    """Runs beside a long prompt.

    Attributes:
        shares: a decoding agent's rate relative to its rate alone, one entry a repeat.
        waits_chunks: times to the first token of short requests, in chunks of the prompt, several a repeat.
    """

    shares: list[float | None] = field(default_factory=list)
    waits_chunks: list[float] = field(default_factory=list)


class Prompts:
    """Texts of an exact length, another for each agent.

    Args:
        codec: the model's.
    """

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self._text = technical_english()
        self.ban = {str(token): BAN_BIAS for token in sorted(codec.eos_ids)}

    def text(self, number: int, tokens: int) -> str:
        """The `number`th text of about `tokens` ids (the cut may merge one otherwise).

        Raises:
            InvalidParams: the text to measure with is not that long.
        """
        begin = 20_000 * number % max(1, len(self._text) - 12 * tokens)
        part = self._text[begin : begin + 12 * tokens]
        ids = self.codec.encode_content(part)
        if len(ids) < tokens:
            raise InvalidParams(f"the text to measure with has fewer than {tokens} tokens", parameter="tokens")
        data = part.encode()
        return data[: sum(self.codec.byte_lengths(ids, data)[:tokens])].decode(errors="ignore")


class _Bench:
    """Client processes of one daemon. Owner: the run."""

    def __init__(
        self, socket: Path, client: Client, prompts: Prompts, sizes: Sizes, tell: Callable[[str], None]
    ) -> None:
        self._socket = socket
        self._client = client
        self._prompts = prompts
        self._sizes = sizes
        self._tell = tell

    # ---- decoding together -------------------------------------------------------------------------------------------

    def together(self) -> Together:
        """One agent and all: rates of decoding, of whole turns, and the engine's share of a step."""
        sizes = self._sizes
        texts = [self._prompts.text(agent, sizes.tokens) for agent in range(sizes.agents)]
        names = [f"agent-{agent}" for agent in range(sizes.agents)]
        found = Together()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(AgentProcess(self._socket)) for _ in names]
            for repeat in range(sizes.repeats):
                self._tell(f"run {repeat + 1} of {sizes.repeats}: whole turns of {sizes.agents} agents")
                turns, _ = self._turns(clients, names, texts)
                found.whole.append(whole_tokens_s(turns))
                self._cut(names, turns)
                self._tell(f"run {repeat + 1} of {sizes.repeats}: one agent, then {sizes.agents}")
                turns, share = self._turns(clients[:1], names[:1], texts[:1])
                found.one.append(decode_tokens_s(turns))
                found.engine_one.append(share)
                self._cut(names[:1], turns)
                turns, share = self._turns(clients, names, texts)
                found.all.append(decode_tokens_s(turns))
                found.engine_all.append(share)
                for name in names:
                    self._client.delete(name)
        return found

    def _turns(
        self, clients: Sequence[AgentProcess], names: Sequence[str], texts: Sequence[str]
    ) -> tuple[list[Turn], float | None]:
        """A turn of each, begun at once; and the engine's share of its time while all of them decoded."""
        sizes = self._sizes
        for client, name, text in zip(clients, names, texts, strict=True):
            client.send(name, text, max_tokens=sizes.new_tokens, ban=self._prompts.ban)
        # asked for from here, so that no client of a turn waits for the answer
        for client in clients:
            client.until("text", SETTLED // 2)
        before = self._statistics()
        clients[0].until("text", sizes.new_tokens - SETTLED // 2)
        share = engine_share(before, self._statistics())
        return [client.turn() for client in clients], share

    def _cut(self, names: Sequence[str], turns: Sequence[Turn]) -> None:
        """Take agents back to their prompts: what they decode next is what they decoded before."""
        for name, turn in zip(names, turns, strict=True):
            self._client.rollback(name, turn.prompt_tokens)

    # ---- beside a long prompt ----------------------------------------------------------------------------------------

    def beside_prefill(self) -> Beside:
        """What a decoding agent keeps of its rate, and how long short requests wait, while another reads."""
        found = Beside()
        for repeat in range(self._sizes.repeats):
            self._tell(f"run {repeat + 1} of {self._sizes.repeats}: decoding beside a long prompt")
            found.shares.append(self._decode_beside(repeat))
            self._tell(f"run {repeat + 1} of {self._sizes.repeats}: short requests beside a long prompt")
            found.waits_chunks += self._short_beside(repeat)
        return found

    def _decode_beside(self, repeat: int) -> float | None:
        sizes, prompts = self._sizes, self._prompts
        names = [f"decodes-{repeat}", f"reads-{repeat}"]
        with AgentProcess(self._socket) as decoder, AgentProcess(self._socket) as reader:
            # as long as it takes: it is left when the prompt is read
            room = max(sizes.new_tokens, sizes.long_tokens // 2)
            decoder.send(names[0], prompts.text(0, sizes.tokens), max_tokens=room, ban=prompts.ban)
            decoder.until("text", SETTLED + sizes.new_tokens // 2)
            reader.send(names[1], prompts.text(3 + repeat, sizes.long_tokens), max_tokens=1)
            read = reader.turn()
            share = share_beside(decoder.so_far(), read, settled=SETTLED)
        self._forget(names)
        return share

    def _short_beside(self, repeat: int) -> tuple[float, ...]:
        sizes = self._sizes
        names = [f"long-{repeat}", *(f"short-{repeat}-{arrival}" for arrival in SHORT_ARRIVALS)]
        short: list[Turn] = []
        with AgentProcess(self._socket) as reader, AgentProcess(self._socket) as asker:
            reader.send(names[0], self._prompts.text(5 + repeat, sizes.long_tokens), max_tokens=1)
            for name, arrival in zip(names[1:], SHORT_ARRIVALS, strict=True):
                if not reader.until("chunk", arrival):
                    break
                chunks = reader.so_far().chunks_s
                # not at the border of chunks, where it would wait least
                time.sleep((chunks[-1] - chunks[-2]) / 2 if len(chunks) > 1 else 0.0)
                asker.send(name, f"{name}: {SHORT_TEXT}", max_tokens=1)
                short.append(asker.turn())
            waits = first_tokens_in_chunks(short, reader.turn())
        self._forget(names)
        return waits

    def _forget(self, names: Sequence[str]) -> None:
        known = {info.agent for info in self._client.agents()}
        for name in names:
            if name in known:
                self._client.delete(name)

    def _statistics(self) -> Mapping[str, object]:
        return self._client.statistics().server


def run_together(daemon: DaemonProcess, prompts: Prompts, sizes: Sizes, tell: Callable[[str], None]) -> Together:
    """One agent and all: rates of decoding, of whole turns, and the engine's share of its time.

    Args:
        daemon: runs, and lets all agents run at once.
        prompts: texts to send.
        sizes: how much.
        tell: progress, one line each.
    """
    with daemon.client() as client:
        return _Bench(daemon.socket, client, prompts, sizes, tell).together()


def run_beside(daemon: DaemonProcess, prompts: Prompts, sizes: Sizes, tell: Callable[[str], None]) -> Beside:
    """What a decoding agent keeps of its rate, and how long short requests wait, while another reads a long prompt.

    Arguments as of `run_together`.
    """
    with daemon.client() as client:
        return _Bench(daemon.socket, client, prompts, sizes, tell).beside_prefill()


__all__ = ["Beside", "Prompts", "Sizes", "Together", "run_beside", "run_together"]
