"""`kvd bench`: every figure the README quotes. Commands are loaded when they are used: they import mlx."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import click

from kvd.cli_common import fail
from kvd.cli_options import json_option, model_options
from kvd.errors import InvalidParams, KvdError
from kvd_client.cli_lazy import LazyGroup

COMMANDS: Final = {
    "attention": (
        "kvd.bench.attention:attention",
        "Prefill and decode speed over quantised pages, against mlx-lm with a float32 cache, with floors.",
    ),
    "capacity": (
        "kvd.bench.capacity:capacity",
        "Bytes of an agent and agents in a budget: with all tokens of all layers, and with what the next step sees.",
    ),
    "eviction": (
        "kvd.bench.eviction:eviction",
        "Replay traces through the real pager for each eviction policy, beside Belady's optimum.",
    ),
    "fork": (
        "kvd.bench.fork:fork",
        "Milliseconds of a fork, a rollback, a divergence and flipping back, with and without the disk's flushes.",
    ),
    "ppl": ("kvd.bench.ppl:ppl", "Perplexity and bytes of page formats, on text that ships with Python."),
    "rpc": (
        "kvd.bench.rpc:rpc",
        "What the protocol costs: round trips and events against a bare echo, a gateway's part, many clients at once.",
    ),
    "serve": (
        "kvd.bench.serve:serve",
        "What several agents get of one daemon: together, beside a long prompt, and in too little RAM.",
    ),
    "soak": (
        "kvd.bench.soak:soak",
        "Soak a daemon: turns, cancellations, kills, forks, evictions by many clients, then prove that all is well.",
    ),
    "startup": (
        "kvd.bench.startup:startup",
        "Time from starting the daemon to its first possible answer, with many agents on disk against none.",
    ),
    "swap": (
        "kvd.bench.swap:swap",
        "Swap-out and swap-in of one agent, beside plain writes and reads of the same files; the page table's speed.",
    ),
    "ttft": (
        "kvd.bench.cli:ttft",
        "Time to first token with 16 new tokens: cold, hot, warm after kill -9, against mlx-lm's own cold prefill.",
    ),
}
"""Where each command is, and the first sentence of its help."""


@click.group(cls=LazyGroup, lazy=COMMANDS)
def bench() -> None:
    """Measure speed, memory and quality, and prove that nothing is lost.

    Speed: of attention (attention), of the first token (ttft), of forks (fork), of several agents of one daemon
    (serve), of the disk (swap), of a start with many agents (startup), of the protocol (rpc).

    Quality and memory: perplexity of page formats (ppl), agents in a budget (capacity), what eviction policies cost
    (eviction).

    Proof: a daemon under clients that behave at random (soak).
    """


@click.command("ttft")
@click.option("--tokens", default="1024,4096", show_default=True, help="Context lengths, comma separated.")
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each state; medians count."
)
@model_options
@json_option
def ttft(tokens: str, repeats: int, model_name: str, model_dir: Path | None, as_json: bool) -> None:
    """Time to first token with 16 new tokens: cold, hot, warm after kill -9, against mlx-lm's own cold prefill.

    Warm: the daemon was killed with SIGKILL, its files were dropped from the page cache, a new daemon is ready.

    Example: kvd bench ttft --tokens 1024,4096 --json
    """
    from kvd.bench.ttft import run_ttft
    from kvd.model.paths import model_dir as models
    from kvd.model.registry import resolve

    try:
        lengths = parse_lengths(tokens)
        folder = resolve(model_name, models(model_dir))
        report = run_ttft(
            model=str(folder.path),
            folder=folder.path,
            lengths=lengths,
            repeats=repeats,
            options=(),
            tell=lambda line: click.echo(line, err=True),
        )
    except KvdError as error:
        fail(error)
    if as_json:
        click.echo(json.dumps(report.facts()))
        return
    click.echo(
        f"{report.model}, pages {report.kv_format}, attention {report.attention}, {report.threads} threads, medians of "
        f"{report.repeats}, page cache dropped by {report.page_cache}"
    )
    click.echo("tokens   cold s    hot s   warm s  mlx-lm cold s  hot x  warm x  cold speed x")
    for row in report.rows:
        click.echo(
            f"{row.tokens:6} {row.cold_s:8.3f} {row.hot_s:8.3f} {row.warm_s:8.3f} {row.mlx_lm_cold_s:14.3f} "
            f"{row.hot_ratio:6.1f} {row.warm_ratio:7.1f} {row.cold_speed_ratio:13.2f}"
        )


def parse_lengths(text: str, option: str = "--tokens") -> tuple[int, ...]:
    """Comma separated numbers of an option.

    Raises:
        InvalidParams: something that is not a positive integer.
    """
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        example = "1024,4096" if option == "--tokens" else "1,16"
        raise InvalidParams(
            f"{option} takes positive integers, such as {example}, not {text!r}", parameter=option.lstrip("-")
        )
    return lengths


__all__ = ["COMMANDS", "bench", "parse_lengths", "ttft"]
