"""`kvd bench serve`: what several agents get of one daemon, each figure beside its bar, in one run on one machine.

A real daemon on a folder of its own, a client process for each agent, the clients' clock. Six questions: how much more
do several agents get together than one; what does an agent get while another reads a long prompt; how long does a short
request wait then; how much of swapping in do agents wait for that do not fit together; what does the engine itself
take of a step; and is mlx-lm's own batched generation faster.

May import click, kvd.bench, kvd.errors, kvd.model and kvd_client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from kvd.bench.harness import UNSHARED, DaemonProcess, scratch_folder
from kvd.bench.machine import MachineRates, measure_rates
from kvd.bench.serve_figures import Figure, decode_floor_tokens_s, middle, number, ratio
from kvd.bench.serve_reference import BatchSpeed, batch_speed
from kvd.bench.serve_runs import Beside, Prompts, Sizes, Together, run_beside, run_together
from kvd.bench.serve_swap import SwapRun, run_swap, swap_budget_bytes
from kvd.cli_options import json_option, model_options
from kvd.errors import KvdError
from kvd.model.tokenizer import TextCodec

QUICK = Sizes(tokens=256, new_tokens=24, long_tokens=2048, repeats=1)
"""What `--quick` takes for what is not given."""


@dataclass(frozen=True, slots=True)
class ServeReport:
    """All figures, what they are made of, and how.

    Attributes:
        read_gigabytes_s, gigaflops_s: what the machine can do at most (`kvd.bench.machine`).
        sizes: how much was measured.
        figures: beside their bars.
        together, beside, swap: the runs.
        mlx_lm: its batched generation of the same prompts.
        floors_tokens_s: of decoding, for one agent and for all.
    """

    model: str
    kv_format: str
    attention: str
    threads: int
    read_gigabytes_s: float
    gigaflops_s: float
    sizes: Sizes
    figures: tuple[Figure, ...]
    together: Together
    beside: Beside
    swap: Mapping[str, SwapRun]
    mlx_lm: BatchSpeed
    floors_tokens_s: tuple[float, float]

    def facts(self) -> dict[str, object]:
        """Plain data for `--json`: each figure with `met`."""
        return asdict(self) | {"figures": [asdict(figure) | {"met": figure.met} for figure in self.figures]}


def run_serve(*, model: str, folder: Path, sizes: Sizes, tell: Callable[[str], None]) -> ServeReport:
    """Measure everything.

    Args:
        model: what `kvd serve --model` gets.
        folder: the same model's folder, for mlx-lm and the tokenizer.
        sizes: how much.
        tell: progress, one line each.

    Raises:
        InvalidParams: the text to measure with is too short for a length.
        EnvironmentFault: a daemon, a client or mlx-lm failed; the message ends with its last words.
    """
    prompts = Prompts(TextCodec.from_folder(folder))
    rates = measure_rates()
    with scratch_folder() as scratch:
        options = (*UNSHARED, "--max-batch", str(sizes.agents + 1))
        with DaemonProcess(scratch / "data", model=model, options=options) as daemon:
            with daemon.client() as client:
                facts = client.model_info()
            together = run_together(daemon, prompts, sizes, tell)
            beside = run_beside(daemon, prompts, sizes, tell)
        budget_bytes = swap_budget_bytes(sizes, token_bytes=number(facts, "token_bytes"))
        options = (*UNSHARED, "--budget", str(budget_bytes))
        with DaemonProcess(scratch / "small", model=model, options=options) as daemon:
            swap = run_swap(daemon, prompts, sizes, tell)
    tell("mlx-lm's batched generation")
    ids = [prompts.codec.encode_content(prompts.text(agent, sizes.tokens)) for agent in range(sizes.agents)]
    mlx_lm = batch_speed(folder, ids, new_tokens=sizes.new_tokens, repeats=sizes.repeats)
    floors = _floors(folder, sizes, number(facts, "token_bytes"), rates)
    return ServeReport(
        model=str(facts.get("model")),
        kv_format=str(facts.get("kv_format")),
        attention=str(facts.get("attention")),
        threads=round(number(facts, "threads")),
        read_gigabytes_s=round(rates.read_bytes_s / 1e9, 1),
        gigaflops_s=round(rates.products_s / 1e9),
        sizes=sizes,
        figures=figures_of(sizes, together, beside, swap, mlx_lm, floors),
        together=together,
        beside=beside,
        swap=swap,
        mlx_lm=mlx_lm,
        floors_tokens_s=floors,
    )


def figures_of(
    sizes: Sizes,
    together: Together,
    beside: Beside,
    swap: Mapping[str, SwapRun],
    mlx_lm: BatchSpeed,
    floors_tokens_s: tuple[float, float],
) -> tuple[Figure, ...]:
    """The figures that have a bar, of what was measured."""
    one, every, whole = middle(together.one), middle(together.all), middle(together.whole)
    count, (floor_one, floor_all) = sizes.agents, floors_tokens_s
    waits = beside.waits_chunks
    figures = [
        Figure(
            f"{count} agents decoding, times one agent",
            ratio(every, one),
            3.0,
            "at least",
            floor_all / floor_one,
            f"{_shown(every)} and {_shown(one)} tokens/s, where reading allows {floor_all:.0f} and {floor_one:.0f}",
        ),
        Figure(
            "decoding beside a long prompt, share of the rate alone",
            middle(beside.shares),
            0.4,
            "at least",
            None,
            f"a prompt of {sizes.long_tokens} tokens",
        ),
        Figure(
            "first token of a short request beside a long prompt, in chunks",
            middle(waits),
            2.0,
            "at most",
            None,
            f"{len(waits)} requests, at most {max(waits):.2f}"
            if waits
            else "no chunk of the prompt went undisturbed: take a longer one",
        ),
    ]
    figures += [
        Figure(
            f"swapping in that is hidden behind decoding, agents {name}",
            run.hidden,
            0.7,
            "at least",
            None,
            f"{run.pages} pages in {run.seconds.busy_s:.3f} s, {run.seconds.exposed_s:.3f} s with nothing else to do; "
            f"{run.turns} turns waited {run.seconds.waited_s:.3f} s, beside others or not",
        )
        for name, run in swap.items()
    ]
    figures += [
        Figure(
            f"the engine's own share of its time, {name}",
            middle(shares),
            0.05,
            "at most",
            None,
            "messages, plans, books and events; not the model, not sampling",
        )
        for name, shares in (("one agent", together.engine_one), (f"{count} agents", together.engine_all))
    ]
    return (
        *figures,
        Figure(
            f"{count} agents decoding, times mlx-lm's batch of {count}",
            ratio(every, mlx_lm.decode_tokens_s),
            1.0,
            "at least",
            floor_all / mlx_lm.decode_tokens_s,
            f"{_shown(every)} and {mlx_lm.decode_tokens_s:.1f} tokens/s",
        ),
        Figure(
            f"{count} whole turns, times mlx-lm's batch of {count}",
            ratio(whole, mlx_lm.whole_tokens_s),
            1.0,
            "at least",
            None,
            f"{_shown(whole)} and {mlx_lm.whole_tokens_s:.1f} new tokens/s, prompts of {sizes.tokens} tokens included",
        ),
    )


def _floors(folder: Path, sizes: Sizes, token_bytes: float, rates: MachineRates) -> tuple[float, float]:
    """Decoding that only reads, of one agent and of all."""
    weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    page_bytes = token_bytes * (sizes.tokens + sizes.new_tokens / 2)
    one, every = (
        decode_floor_tokens_s(
            rows=rows, weight_bytes=weight_bytes, page_bytes=page_bytes, read_bytes_s=rates.read_bytes_s
        )
        for rows in (1, sizes.agents)
    )
    return one, every


def _shown(value: float | None) -> str:
    return "no figure" if value is None else f"{value:.1f}"


def table_lines(report: ServeReport) -> list[str]:
    """The report as people read it."""
    sizes = report.sizes
    lines = [
        f"{report.model}, pages {report.kv_format}, attention {report.attention}, {report.threads} threads; "
        f"this machine reads {report.read_gigabytes_s} GB/s on one thread and multiplies {report.gigaflops_s} GFLOP/s",
        f"{sizes.agents} agents of {sizes.tokens} tokens, {sizes.new_tokens} new ones each, medians of {sizes.repeats}",
        f"{'':64} {'measured':>8}  {'bar':>14}  met  floor",
    ]
    for figure in report.figures:
        value = "-" if figure.value is None else f"{figure.value:.3f}"
        met = {True: "yes", False: "no", None: "-"}[figure.met]
        floor = "-" if figure.floor is None else f"{figure.floor:.2f}"
        bar = f"{figure.sense} {figure.bar:g}"
        lines.append(f"{figure.name:64} {value:>8}  {bar:>14}  {met:>3}  {floor:>5}  {figure.note}")
    return lines


@click.command("serve")
@click.option("--agents", type=click.IntRange(2, 64), default=8, show_default=True, help="Agents that decode together.")
@click.option("--tokens", type=click.IntRange(16), help="Context of each agent [default: 512].")
@click.option("--new-tokens", type=click.IntRange(16), help="New tokens of each turn [default: 64].")
@click.option(
    "--long-tokens", type=click.IntRange(64), help="The long prompt, and the agents that are swapped [default: 4096]."
)
@click.option("--repeats", type=click.IntRange(1), help="Runs of each; medians count [default: 3].")
@click.option(
    "--quick", is_flag=True, help="One run with 256, 24 and 2048 tokens, unless given: to look, not to quote."
)
@model_options
@json_option
def serve(
    agents: int,
    tokens: int | None,
    new_tokens: int | None,
    long_tokens: int | None,
    repeats: int | None,
    quick: bool,
    model_name: str,
    model_dir: Path | None,
    as_json: bool,
) -> None:
    """What several agents get of one daemon: together, beside a long prompt, and in too little RAM.

    Each figure stands beside its bar; the last two are against mlx-lm's own batched generation of the same prompts.

    Example: kvd bench serve --agents 8 --json
    """
    from kvd.cli_common import fail
    from kvd.model.paths import model_dir as models
    from kvd.model.registry import resolve

    usual = QUICK if quick else Sizes()
    sizes = Sizes(
        agents=agents,
        tokens=tokens or usual.tokens,
        new_tokens=new_tokens or usual.new_tokens,
        long_tokens=long_tokens or usual.long_tokens,
        repeats=repeats or usual.repeats,
    )
    try:
        folder = resolve(model_name, models(model_dir)).path
        report = run_serve(model=str(folder), folder=folder, sizes=sizes, tell=lambda line: click.echo(line, err=True))
    except KvdError as error:
        fail(error)
    click.echo(json.dumps(report.facts()) if as_json else "\n".join(table_lines(report)))


__all__ = ["ServeReport", "figures_of", "run_serve", "serve", "table_lines"]
