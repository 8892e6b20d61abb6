"""`kvd bench`: every figure the README quotes. Commands are loaded when they are used: they import mlx."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import NoReturn

import click

from kvd.errors import InvalidParams, KvdError
from kvd.model.sources import DEFAULT_MODEL

COMMANDS = {
    "attention": ("kvd.bench.attention", "attention"),
    "capacity": ("kvd.bench.capacity", "capacity"),
    "eviction": ("kvd.bench.eviction", "eviction"),
    "fork": ("kvd.bench.fork", "fork"),
    "ppl": ("kvd.bench.ppl", "ppl"),
    "rpc": ("kvd.bench.rpc", "rpc"),
    "serve": ("kvd.bench.serve", "serve"),
    "soak": ("kvd.bench.soak", "soak"),
    "startup": ("kvd.bench.startup", "startup"),
    "swap": ("kvd.bench.swap", "swap"),
    "ttft": ("kvd.bench.cli", "ttft"),
}


class LazyGroup(click.Group):
    """A group whose commands live in modules that are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command, or None."""
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group(cls=LazyGroup)
def bench() -> None:
    """Measure speed (attention, swap), perplexity (ppl), first token (ttft), forks (fork), agents (serve), calls (rpc).

    And a start with many agents on disk (startup).

    Count: bytes of an agent, and agents in a budget (capacity); what eviction policies cost (eviction).
    Prove: that nothing is lost or leaks (soak).
    """


@click.command("ttft")
@click.option("--tokens", default="1024,4096", show_default=True, help="Context lengths, comma separated.")
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each state; medians count."
)
@click.option(
    "--model",
    "model_name",
    default=DEFAULT_MODEL,
    show_default=True,
    help="Installed model's name, or a folder in mlx-lm's layout.",
)
@click.option(
    "--model-dir",
    envvar="KVD_MODEL_DIR",
    show_envvar=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of installed models [default: kvd-models in the user's data folder].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
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


def fail(error: KvdError) -> NoReturn:
    """Report an error and exit: 2 for a wrong call, 1 otherwise."""
    click.echo(f"kvd: {error.message}", err=True)
    sys.exit(2 if isinstance(error, InvalidParams) else 1)


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


__all__ = ["bench", "fail", "parse_lengths", "ttft"]
