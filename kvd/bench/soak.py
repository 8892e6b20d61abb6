"""`kvd bench soak`: a daemon under clients that behave at random, for as long as one likes; names what broke.

What is done and checked is in `kvd.bench.soak_run`; this is the command and its report.

May import anything of kvd and kvd_client.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click

from kvd.bench.harness import scratch_folder
from kvd.bench.soak_run import Soak, SoakPlan, SoakReport
from kvd.bench.soak_watch import WARM_UP_SHARE
from kvd.cli_common import fail
from kvd.cli_options import json_last_option, model_options
from kvd.cli_types import SIZE
from kvd.errors import InvalidParams, KvdError
from kvd.ops.sizes import format_size


@click.command("soak")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True, help="How long.")
@click.option("--clients", type=click.IntRange(1, 64), default=4, show_default=True, help="Client processes at a time.")
@click.option(
    "--budget", type=SIZE, default="64MB", show_default=True, help="RAM for KV; small, so that pages come and go."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything that clients draw.")
@click.option(
    "--kill-daemon-every",
    "kill_every_s",
    type=click.FloatRange(0, min_open=True),
    help="Kill the daemon with SIGKILL so many seconds after it was ready, and start it again [default: never].",
)
@click.option("--agents", type=click.IntRange(2), default=5, show_default=True, help="Most agents of a client.")
@click.option("--tokens", type=click.IntRange(64), default=1200, show_default=True, help="Length of an agent, about.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep data, logs and transcripts in this new folder.")
@model_options
@json_last_option
def soak(
    minutes: float,
    clients: int,
    budget: int,
    seed: int,
    kill_every_s: float | None,
    agents: int,
    tokens: int,
    folder: Path | None,
    model_name: str,
    model_dir: Path | None,
    as_json: bool,
) -> None:
    """Soak a daemon: turns, cancellations, kills, forks, evictions by many clients, then prove that all is well.

    Clients keep transcripts; at the end every agent must hold what its client was told, before and after a kill -9, and
    nothing may have leaked: memory, descriptors, threads, frames, files.

    Example: kvd bench soak --minutes 10 --clients 6 --kill-daemon-every 60
    """
    from kvd.model.paths import model_dir as models
    from kvd.model.registry import resolve

    try:
        plan = SoakPlan(
            seconds=minutes * 60,
            clients=clients,
            seed=seed,
            model=str(resolve(model_name, models(model_dir)).path),
            model_dir=models(model_dir),
            options=("--budget", str(budget)),
            kill_daemon_every_s=kill_every_s,
            agents=agents,
            longest_tokens=tokens,
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(_ended_by_sigterm())
            where = _new_folder(folder) if folder is not None else stack.enter_context(scratch_folder())
            report = Soak(plan, where, lambda line: click.echo(line, err=True)).run()
    except KvdError as error:
        fail(error)
    click.echo(json.dumps(report.facts()) if as_json else render(report))
    sys.exit(1 if report.troubles else 0)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the soak as Ctrl-C does, with every process it started."""

    def end(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _new_folder(folder: Path) -> Path:
    """Make the folder.

    Raises:
        InvalidParams: it is there already, with something in it.
    """
    folder = folder.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidParams(f"--folder must be new or empty, {folder} is not", parameter="folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def render(report: SoakReport) -> str:
    """The report for people."""
    lines = [
        f"{report.seconds:.0f} s: {report.turns} turns, {report.completion_tokens} new tokens "
        f"({report.tokens_s:.1f} tokens/s), {report.cached_tokens} of {report.prompt_tokens} prompt tokens reused",
        f"killed: the daemon {report.daemon_kills} times, clients {report.client_kills} times",
        f"agents held to their transcripts: {report.verified}; continuations compared: {report.continued}",
        *(f"  {count:6}  {what}" for what, count in report.done.items()),
        f"memory: at most {format_size(report.peak_footprint_bytes)}; {_growth(report)}",
        f"descriptors {report.open_files[0]} at first, {report.open_files[1]} at rest; "
        f"threads {report.threads[0]} and {report.threads[1]}",
    ]
    if report.figures:
        names = ("resident_bytes", "frames", "swap_bytes", "evictions", "faults", "largest_batch")
        lines.append("at rest: " + ", ".join(f"{name} {report.figures[name]}" for name in names))
    lines += [f"WRONG: {trouble}" for trouble in report.troubles]
    return "\n".join([*lines, "verdict: FAILED" if report.troubles else "verdict: passed"])


def _growth(report: SoakReport) -> str:
    growth = report.growth
    if growth is None:
        return "no daemon lived long enough to judge growth"
    return (
        f"beside pages {growth.bytes_per_minute / 1e6:+.2f} MB a minute over {growth.seconds:.0f} s after a warm-up of "
        f"{WARM_UP_SHARE:.0%} ({growth.bytes_grown / 1e6:+.1f} MB, allowed {growth.allowed_bytes / 1e6:.1f} MB)"
    )


__all__ = ["render", "soak"]
