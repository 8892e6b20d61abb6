"""`kvd bench eviction`: eviction policies on traces of agents at work, beside the best that anybody could do.

May import kvd.ids, kvd.vm, kvd.scheduler.prediction and siblings of the name `eviction_...`; no mlx.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from kvd.bench.eviction_replay import Optimum, Replay, Tally
from kvd.bench.eviction_speed import BAR_US, Speed, measure
from kvd.bench.eviction_workloads import WORKLOADS, Trace, generate
from kvd.cli_common import fail
from kvd.cli_options import json_option
from kvd.errors import EnvironmentFault, InvalidParams, KvdError
from kvd.ops.sizes import format_size
from kvd.vm.eviction import POLICIES, LruPolicy
from kvd.vm.trace import parse_trace

UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace at one budget.

    Attributes:
        trace: name of the workload, or of the file.
        budget: part of what all pages of the trace take at their most.
        budget_bytes: the same in bytes.
        policy: of `POLICIES`, or `optimum`.
        hit_rate: part of the pages needed by turns that was in RAM, 0 to 1.
        tally: the figures behind it.
    """

    trace: str
    budget: float
    budget_bytes: int
    policy: str
    hit_rate: float
    tally: Tally


def compare(trace: Trace, budgets: Sequence[float], policies: Sequence[str], *, predict: bool) -> Iterator[Row]:
    """Replay one trace under each policy and the optimum, at each budget.

    Args:
        trace: header and operations.
        budgets: parts of what all pages take at their most.
        policies: names of `POLICIES`.
        predict: load ahead for whom the order of turns makes likely; the optimum never does.

    Raises:
        InvalidParams: the trace contradicts itself.
    """
    header, lines = trace
    peak_bytes = Replay(header, lines, LruPolicy(), UNLIMITED_BYTES).run().peak_bytes
    for budget in budgets:
        budget_bytes = int(peak_bytes * budget)
        scout = Replay(header, lines, LruPolicy(), budget_bytes)
        tallies = {"lru": scout.run()}
        for name in policies:
            if predict or name not in tallies:
                tallies[name] = Replay(header, lines, POLICIES[name](), budget_bytes, predict=predict).run()
        best = Replay(header, lines, Optimum(scout.uses), budget_bytes).run()
        for name, tally in (*((name, tallies[name]) for name in policies), ("optimum", best)):
            yield Row(header.name, budget, budget_bytes, name, tally.hit_rate, tally)


def read_trace(path: Path) -> Trace:
    """A trace that `kvd serve --trace` wrote.

    Raises:
        InvalidParams: it is none.
        EnvironmentFault: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return parse_trace(file, source=str(path))
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{path} is no trace: {error}") from error
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {error.strerror}") from error


def parse_budgets(text: str) -> tuple[float, ...]:
    """Comma separated parts.

    Raises:
        InvalidParams: something that is not between 0 and 1.
    """
    try:
        budgets = tuple(float(part) for part in text.split(","))
    except ValueError:
        budgets = ()
    if not budgets or not all(0 < budget <= 1 for budget in budgets):
        raise InvalidParams(
            f"--budgets takes numbers above 0 and up to 1, such as 0.25,0.5, not {text!r}", parameter="budgets"
        )
    return budgets


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "trace         budget             policy    hit rate  refaults         in    ahead        out  refused"
    for row in rows:
        tally = row.tally
        yield (
            f"{row.trace:13} {row.budget:4.2f} {format_size(row.budget_bytes):>10}   {row.policy:8} "
            f"{row.hit_rate:9.3f} {tally.refaults:9} "
            f"{format_size(tally.in_bytes):>10} {format_size(tally.ahead_bytes):>8} "
            f"{format_size(tally.out_bytes):>10} {tally.refused_turns:8}"
        )


def _speeds(speeds: Sequence[Speed]) -> Iterator[str]:
    yield f"microseconds a page ({BAR_US:g} is the bar of look-up and touch); the first victim: microseconds a question"
    yield "policy       pages   look-up    touch    go and come    first victim"
    for each in speeds:
        yield (
            f"{each.policy:8} {each.pages:9} {each.lookup_us:9.3f} {each.touch_us:8.3f} {each.swap_us:14.2f} "
            f"{each.victim_us:15.0f}"
        )


@click.command("eviction")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="What `kvd serve --trace` wrote; may be repeated [default: generated workloads].",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(sorted(WORKLOADS)),
    help="Generated trace; may be repeated [default: all of them, unless --trace is given].",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of generated traces.")
@click.option(
    "--budgets", default="0.25,0.5,0.75", show_default=True, help="Parts of what all pages of a trace take, at most 1."
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(list(POLICIES)),
    help="May be repeated [default: all of them].",
)
@click.option(
    "--prefetch",
    type=click.Choice(["off", "predict"]),
    default="off",
    show_default=True,
    help="Load ahead as the daemon does, from a disk that takes no time, or let policies stand alone.",
)
@click.option("--speed", is_flag=True, help="Instead: how fast the pager is with --pages pages.")
@click.option(
    "--pages", type=click.IntRange(1), default=100_000, show_default=True, help="Pages in the table, with --speed."
)
@json_option
def eviction(
    traces: tuple[Path, ...],
    workloads: tuple[str, ...],
    seed: int,
    budgets: str,
    policies: tuple[str, ...],
    prefetch: str,
    speed: bool,
    pages: int,
    as_json: bool,
) -> None:
    """Replay traces through the real pager for each eviction policy, beside Belady's optimum. No model, no disk.

    Example: kvd bench eviction --trace day.jsonl --budgets 0.25,0.5
    """
    names = list(dict.fromkeys(policies)) or list(POLICIES)
    try:
        if speed:
            speeds = [measure(name, pages, repeats=3) for name in names]
            facts = {"bar_us": BAR_US, "speeds": [asdict(each) for each in speeds]}
            click.echo(json.dumps(facts) if as_json else "\n".join(_speeds(speeds)))
            return
        parts = parse_budgets(budgets)
        chosen = [read_trace(path) for path in traces]
        chosen += [generate(name, seed) for name in workloads or (() if traces else sorted(WORKLOADS))]
        rows = [row for trace in chosen for row in compare(trace, parts, names, predict=prefetch == "predict")]
    except KvdError as error:
        fail(error)
    if as_json:
        click.echo(json.dumps({"seed": seed, "prefetch": prefetch, "rows": [asdict(row) for row in rows]}))
        return
    click.echo("\n".join(_table(rows)))


__all__ = ["Row", "compare", "eviction", "parse_budgets", "read_trace"]
