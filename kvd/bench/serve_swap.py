"""Agents that take turns and do not all fit in RAM: how much of swapping in is hidden behind decoding?

Theory of operation. Three agents of equal length, a budget for two and a half of them: the one whose turn it is holds
its pages, the pages of the next can come in meanwhile, those of the third have to go. Once one client runs them in
turn, so that only a prediction can know who is next; and once each has a client of its own, so that who is next waits
in line.

May import kvd.bench, kvd.quant.spec and kvd_client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvd.bench.harness import DaemonProcess
from kvd.bench.serve_client import AgentProcess
from kvd.bench.serve_figures import SwapSeconds, Turn, difference, hidden_share, swap_seconds
from kvd.bench.serve_runs import Prompts, Sizes
from kvd.quant.spec import PAGE_TOKENS

AGENTS = 3
RESIDENT_AGENTS = 2.5
LEARNED_ROUNDS = 2
"""Rounds before anything is measured: who is next has to be seen before it can be known."""

MEASURED_ROUNDS = 3
NEXT_TEXT = "\nGo on.\n"
_NEXT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SwapRun:
    """What one way of taking turns gave.

    Attributes:
        hidden: part of the time in which pages came in that something was computed; None when none came in.
        seconds: that time, and what of it showed.
        pages: pages that came in.
        turns: measured.
    """

    hidden: float | None
    seconds: SwapSeconds
    pages: int
    turns: int


def swap_budget_bytes(sizes: Sizes, *, token_bytes: float) -> int:
    """The budget for `RESIDENT_AGENTS` agents as long as they are in the end.

    Args:
        sizes: of the run.
        token_bytes: bytes of a token's pages.
    """
    tokens = sizes.long_tokens + 2 * (LEARNED_ROUNDS + MEASURED_ROUNDS) * (sizes.new_tokens + _NEXT_TOKENS)
    pages = -(-tokens // PAGE_TOKENS) + 1
    return int(RESIDENT_AGENTS * pages * PAGE_TOKENS * token_bytes)


def run_swap(daemon: DaemonProcess, prompts: Prompts, sizes: Sizes, tell: Callable[[str], None]) -> dict[str, SwapRun]:
    """Turns in a row (`in turn`) and clients that wait for each other (`in line`).

    Args:
        daemon: runs with the budget of `swap_budget_bytes`.
        prompts: texts to send.
        sizes: how much.
        tell: progress, one line each.
    """
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(AgentProcess(daemon.socket)) for _ in range(AGENTS)]
        talk = _Talk(clients, prompts, sizes)
        tell(f"{AGENTS} agents of {sizes.long_tokens} tokens with a budget for {RESIDENT_AGENTS:g}")
        control = stack.enter_context(daemon.client())
        for agent in range(AGENTS):
            talk.send(agent, 0)
            talk.finish(agent)

        def statistics() -> Mapping[str, object]:
            return control.statistics().server

        def measured(name: str, rounds: Callable[[int], list[Turn]]) -> SwapRun:
            tell(f"{AGENTS} agents {name}")
            rounds(LEARNED_ROUNDS)
            before = statistics()
            turns = rounds(MEASURED_ROUNDS)
            after = statistics()
            seconds = swap_seconds(before, after)
            pages = round(difference(before, after, "pages_loaded"))
            hidden = hidden_share(busy_s=seconds.busy_s, exposed_s=seconds.exposed_s)
            return SwapRun(hidden, seconds, pages, len(turns))

        return {"in turn": measured("in turn", talk.in_turn), "in line": measured("in line", talk.in_line)}


class _Talk:
    """What the agents said so far. Owner: the run."""

    def __init__(self, clients: Sequence[AgentProcess], prompts: Prompts, sizes: Sizes) -> None:
        self._clients = clients
        self._ban = prompts.ban
        self._new_tokens = sizes.new_tokens
        self._texts = [prompts.text(agent, sizes.long_tokens) for agent in range(len(clients))]

    def send(self, agent: int, new_tokens: int | None = None) -> None:
        """Begin an agent's turn."""
        wanted = self._new_tokens if new_tokens is None else new_tokens
        self._clients[agent].send(f"swaps-{agent}", self._texts[agent], max_tokens=wanted, ban=self._ban)

    def finish(self, agent: int) -> Turn:
        """Wait for its end, and note what was said and what comes next."""
        turn = self._clients[agent].turn()
        self._texts[agent] += str(turn.server["text"]) + NEXT_TEXT
        return turn

    def in_turn(self, rounds: int) -> list[Turn]:
        """One agent after the other."""
        turns = []
        for _ in range(rounds):
            for agent in range(len(self._clients)):
                self.send(agent)
                turns.append(self.finish(agent))
        return turns

    def in_line(self, rounds: int) -> list[Turn]:
        """All at once, each again as soon as it is done."""
        turns = []
        for agent in range(len(self._clients)):
            self.send(agent)
        for turn_of_each in range(rounds):
            for agent in range(len(self._clients)):
                turns.append(self.finish(agent))
                if turn_of_each + 1 < rounds:
                    self.send(agent)
        return turns


__all__ = ["AGENTS", "SwapRun", "run_swap", "swap_budget_bytes"]
