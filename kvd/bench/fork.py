"""Branching: what a fork, a rollback and flipping back to an abandoned branch cost, and how much of that is the disk's.

An agent of N tokens is forked, its child is cut back inside its open page, turned to another end, and turned back.
Times are the client's, from sending the request to its reply, or to the first token of a turn; medians over the
repeats. A fork is durable before it is answered: the log's record and its name are flushed. What the daemon waited for
these flushes is told apart (`fsync_s` of its statistics), so that what kvd adds can be seen on any disk.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvd.bench.cli import parse_lengths
from kvd.bench.harness import UNSHARED, DaemonProcess, scratch_folder
from kvd.bench.ttft import Prompt, make_prompt
from kvd.cli_common import fail
from kvd.cli_options import json_option, model_options
from kvd.errors import EnvironmentFault, KvdError
from kvd.model.tokenizer import TextCodec
from kvd.vm.packing import IDLE_TICKS
from kvd_client import Client

CUT_TOKENS = 20
"""A rollback takes so many tokens off the end."""

REST_S = 0.1
"""Between two operations: what the daemon does by itself after one (its catalog, deletions) is not the next one's."""

PACK_TIMEOUT_S = 10.0 * IDLE_TICKS
"""How long to wait for idle agents to be packed."""


@dataclass(frozen=True, slots=True)
class Took:
    """One operation, in milliseconds: all of it, and what of that the disk took to flush."""

    ms: float
    fsync_ms: float

    @property
    def own_ms(self) -> float:
        """What is not the disk's."""
        return self.ms - self.fsync_ms


@dataclass(frozen=True, slots=True)
class ForkRow:
    """Figures for one length; all times are medians in milliseconds.

    Attributes:
        tokens: of the agent that is forked.
        fork_ms, fork_own_ms: a fork of an agent that has just run; without the flushes.
        packed_fork_ms, packed_fork_own_ms: of one that has been idle, whose open page is packed.
        rollback_ms, rollback_own_ms: a child cut back by `CUT_TOKENS`.
        copied_pages: sealed pages that a child did not share with its parent.
        child_bytes: what a child took in RAM beside shared pages: the tokens of its open page.
        away_ms: first token of a turn that diverges `CUT_TOKENS` before the end.
        back_ms: first token of the turn that goes back to the branch that was left.
        back_cached_tokens, back_prompt_tokens: the least that such a turn reused, and what it had to know.
    """

    tokens: int
    fork_ms: float
    fork_own_ms: float
    packed_fork_ms: float
    packed_fork_own_ms: float
    rollback_ms: float
    rollback_own_ms: float
    copied_pages: int
    child_bytes: int
    away_ms: float
    back_ms: float
    back_cached_tokens: int
    back_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ForkReport:
    """All rows, and how they were made."""

    model: str
    kv_format: str
    token_bytes: int
    repeats: int
    rows: tuple[ForkRow, ...]

    def facts(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return asdict(self)


def run_fork(
    *, model: str, folder: Path, lengths: Sequence[int], repeats: int, tell: Callable[[str], None]
) -> ForkReport:
    """Measure every length.

    Args:
        model: what `kvd serve --model` gets.
        folder: the same model's folder, for the tokenizer.
        lengths: of agents, in tokens.
        repeats: runs of each operation.
        tell: progress, one line each.
    """
    codec = TextCodec.from_folder(folder)
    rows: list[ForkRow] = []
    facts: dict[str, object] = {}
    with scratch_folder() as scratch:
        daemon = DaemonProcess(scratch / "data", model=model, options=UNSHARED)
        with daemon, daemon.client() as client:
            facts = client.model_info()
            for tokens in lengths:
                tell(f"{tokens}: compute")
                rows.append(_measure(client, make_prompt(codec, tokens), repeats, tell))
            token_bytes = int(client.statistics().server["token_bytes"])
    return ForkReport(
        model=model, kv_format=str(facts.get("kv_format")), token_bytes=token_bytes, repeats=repeats, rows=tuple(rows)
    )


def _measure(client: Client, prompt: Prompt, repeats: int, tell: Callable[[str], None]) -> ForkRow:
    name = f"agent-{prompt.tokens}"
    client.inject(name, prompt.context)
    tell(f"{prompt.tokens}: fork, roll back")
    _fork(client, name)  # what is loaded at first use is loaded now
    hot, cuts, children = [], [], []
    for _ in range(repeats):
        hot.append(_took(client, lambda: client.fork(name, f"{name}-child")))
        children.append(_own(client, f"{name}-child"))
        cuts.append(_took(client, lambda: client.rollback(f"{name}-child", prompt.tokens - CUT_TOKENS)))
        client.delete(f"{name}-child")
    _wait_until_packed(client, name)
    packed = [_fork(client, name) for _ in range(repeats)]
    tell(f"{prompt.tokens}: flip back")
    away, back = [], []
    left = prompt.context[: len(prompt.context) - len(prompt.suffix)]
    for run in range(repeats):
        away.append(client.generate(name, f"{left} no {run}", max_tokens=1))
        back.append(client.generate(name, prompt.context + prompt.suffix, max_tokens=1))
        client.rollback(name, prompt.tokens)
    return ForkRow(
        tokens=prompt.tokens,
        fork_ms=_median(took.ms for took in hot),
        fork_own_ms=_median(took.own_ms for took in hot),
        packed_fork_ms=_median(took.ms for took in packed),
        packed_fork_own_ms=_median(took.own_ms for took in packed),
        rollback_ms=_median(took.ms for took in cuts),
        rollback_own_ms=_median(took.own_ms for took in cuts),
        copied_pages=max(pages for pages, _ in children),
        child_bytes=max(tail_bytes for _, tail_bytes in children),
        away_ms=_median((turn.ttft_s or 0.0) * 1000 for turn in away),
        back_ms=_median((turn.ttft_s or 0.0) * 1000 for turn in back),
        back_cached_tokens=min(turn.cached_tokens for turn in back),
        back_prompt_tokens=back[0].prompt_tokens,
    )


def _fork(client: Client, name: str) -> Took:
    """Fork an agent and let go of the child; what the fork took."""
    took = _took(client, lambda: client.fork(name, f"{name}-child"))
    client.delete(f"{name}-child")
    return took


def _took(client: Client, operation: Callable[[], object]) -> Took:
    time.sleep(REST_S)
    before_s = float(client.statistics().server["fsync_s"])
    began_s = time.perf_counter()
    operation()
    ms = (time.perf_counter() - began_s) * 1000
    return Took(ms, (float(client.statistics().server["fsync_s"]) - before_s) * 1000)


def _segments(client: Client, name: str) -> list[dict[str, Any]]:
    return [segment for branch in client.residency(name)["agents"][0]["branches"] for segment in branch["segments"]]


def _own(client: Client, name: str) -> tuple[int, int]:
    """Sealed pages that an agent maps alone, and bytes of its open ones in RAM."""
    segments = _segments(client, name)
    alone = sum(page["shared_by"] == 1 for segment in segments for page in segment["pages"])
    return alone, sum(segment["tail"]["ram_bytes"] for segment in segments if segment["tail"] is not None)


def _wait_until_packed(client: Client, name: str) -> None:
    """Wait until the agent's open page has no frame.

    Raises:
        EnvironmentFault: it kept one for `PACK_TIMEOUT_S`.
    """
    deadline_s = time.monotonic() + PACK_TIMEOUT_S
    while any(segment["tail"] and segment["tail"]["state"] == "filling" for segment in _segments(client, name)):
        if time.monotonic() > deadline_s:
            raise EnvironmentFault(f"{name} was not packed within {PACK_TIMEOUT_S:g} s")
        time.sleep(0.1)


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 2)


@click.command("fork")
@click.option("--tokens", default="1000,4000,8000", show_default=True, help="Lengths of agents, comma separated.")
@click.option(
    "--repeats", type=click.IntRange(1), default=9, show_default=True, help="Runs of each operation; medians count."
)
@model_options
@json_option
def fork(tokens: str, repeats: int, model_name: str, model_dir: Path | None, as_json: bool) -> None:
    """Milliseconds of a fork, a rollback, a divergence and flipping back, with and without the disk's flushes.

    A length that is no multiple of 256 has an open page, of which a fork copies the tokens.

    Example: kvd bench fork --tokens 1000,8000 --json
    """
    from kvd.model.paths import model_dir as models
    from kvd.model.registry import resolve

    try:
        lengths = parse_lengths(tokens)
        folder = resolve(model_name, models(model_dir))
        report = run_fork(
            model=str(folder.path),
            folder=folder.path,
            lengths=lengths,
            repeats=repeats,
            tell=lambda line: click.echo(line, err=True),
        )
    except KvdError as error:
        fail(error)
    if as_json:
        click.echo(json.dumps(report.facts()))
        return
    click.echo(f"{report.model}, pages {report.kv_format}, medians of {report.repeats}; ms (ms without flushes)")
    click.echo("tokens            fork     of a packed one        rollback    away    back  cached of prompt")
    for row in report.rows:
        click.echo(
            f"{row.tokens:6} {row.fork_ms:7.1f} ({row.fork_own_ms:5.1f}) {row.packed_fork_ms:10.1f} "
            f"({row.packed_fork_own_ms:6.1f}) {row.rollback_ms:7.1f} ({row.rollback_own_ms:5.1f}) {row.away_ms:7.1f} "
            f"{row.back_ms:7.1f}  {row.back_cached_tokens} of {row.back_prompt_tokens}"
        )


__all__ = ["ForkReport", "ForkRow", "fork", "run_fork"]
