"""`kvd bench capacity`: bytes of an agent and agents in a budget, as the papers count and as kvd does. Arithmetic only.

The papers keep every token of every layer: an agent of N tokens takes N times the bytes of one token. kvd counts whole
pages, and of a group with a window only those that the next step sees; the rest is on disk. Beside the agents that
wait, one runs, whose window is wider by the step it takes; and a part of the budget is reserved for copies. Both
columns come from the functions that the daemon itself uses: nothing here is measured or remembered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from kvd.bench.cli import parse_lengths
from kvd.cli_common import fail
from kvd.cli_options import MODEL_HELP, complete_models, json_option, kv_format_option, model_dir_option
from kvd.cli_types import SIZE
from kvd.errors import KvdError
from kvd.ids import Fingerprint
from kvd.model.cache_spec import build_cache_spec
from kvd.model.describe import stored_calibration
from kvd.model.folder import ModelFolder
from kvd.model.spec import ModelCacheSpec
from kvd.ops.sizes import format_size
from kvd.quant.spec import PAGE_TOKENS, UNCALIBRATED_FORMAT, PageLayout
from kvd.vm.budget import Budget
from kvd.vm.window import first_seen_page, most_pages

SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    # config.json of google/gemma-3-270m
    "gemma3-270m": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32_768,
        "vocab_size": 262_144,
    },
    # text_config in config.json of google/gemma-3-12b-it, with the defaults it leaves out
    "gemma3-12b": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
    },
    # config.json of meta-llama/Llama-3.1-8B-Instruct
    "llama3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "vocab_size": 128_256,
    },
    # config.json of HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "vocab_size": 49_152,
    },
}
"""Shapes of models that need not be on this machine; each names where its figures come from."""

COPIES: Final = 3
"""Page writes and loads in flight at once, as the daemon's default budget allows them."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one context length costs.

    Attributes:
        tokens: of each agent.
        whole_bytes: of an agent with every token of every layer.
        resident_bytes: of an agent's pages that its next step sees.
        running_bytes: the most a running agent needs at once while it grows to so many tokens.
        agents_whole: agents the budget holds as the papers count.
        agents_fp16: the same in FP16.
        agents_resident: agents that are in RAM at once in kvd, one of them running; more than those live on disk.
    """

    tokens: int
    whole_bytes: int
    resident_bytes: int
    running_bytes: int
    agents_whole: int
    agents_fp16: int
    agents_resident: int


@dataclass(frozen=True, slots=True)
class Report:
    """A model's row of figures.

    Attributes:
        model: its name.
        kv_format: page format of every group.
        kv_format_reason: why that one.
        budget_bytes: RAM for pages.
        token_bytes, fp16_token_bytes: of one token over all layers, in that format and in FP16.
        sliding_token_bytes: of `token_bytes`, those of layers with a window.
        windows: tokens seen, per cache group; None for all.
        rows: one per context length within the model's context.
    """

    model: str
    kv_format: str
    kv_format_reason: str
    budget_bytes: int
    token_bytes: int
    fp16_token_bytes: int
    sliding_token_bytes: int
    windows: tuple[int | None, ...]
    rows: tuple[Capacity, ...]


def account(
    spec: ModelCacheSpec, kv_format: str, lengths: tuple[int, ...], budget_bytes: int, reason: str = "chosen"
) -> Report:
    """Count a model's pages both ways. Context lengths beyond the model's are left out.

    Args:
        spec: the model's cache geometry.
        kv_format: a named page format, for every group.
        lengths: tokens of an agent.
        budget_bytes: RAM for pages.
        reason: why that format, for whoever reads the report.

    Raises:
        InvalidParams: an unknown format, or one that does not fit the model's widths.
    """
    layouts = _layouts(spec, kv_format)
    windows = tuple(group.layer.window for group in spec.groups)
    token_bytes = [layout.token_bytes for layout in layouts]
    fp16_bytes = sum(group.fp16_token_bytes for group in spec.groups)
    budget = Budget(budget_bytes, max_copies=COPIES)
    budget.set_formats([tuple(layout.payload_bytes for layout in layouts)])
    rows = []
    for tokens in (length for length in lengths if length <= spec.context_tokens):
        pages = -(-tokens // PAGE_TOKENS)
        resident = running = 0
        for layout, window in zip(layouts, windows, strict=True):
            resident += layout.payload_bytes * (pages - first_seen_page(tokens, window, PAGE_TOKENS))
            running += layout.payload_bytes * most_pages(tokens, window, spec.chunk_tokens, PAGE_TOKENS)
        room = budget.usable_bytes - running
        rows.append(
            Capacity(
                tokens=tokens,
                whole_bytes=tokens * sum(token_bytes),
                resident_bytes=resident,
                running_bytes=running,
                agents_whole=budget_bytes // (tokens * sum(token_bytes)),
                agents_fp16=budget_bytes // (tokens * fp16_bytes),
                agents_resident=0 if room < 0 else 1 + room // resident,
            )
        )
    sliding = sum(each for each, window in zip(token_bytes, windows, strict=True) if window is not None)
    return Report(
        model=spec.model_name,
        kv_format=kv_format,
        kv_format_reason=reason,
        budget_bytes=budget_bytes,
        token_bytes=sum(token_bytes),
        fp16_token_bytes=fp16_bytes,
        sliding_token_bytes=sliding,
        windows=windows,
        rows=tuple(rows),
    )


def known_spec(name: str) -> ModelCacheSpec:
    """The cache geometry of one of `SHAPES`."""
    return build_cache_spec(SHAPES[name], model_name=name, fingerprint=Fingerprint("0" * 32), item_bytes=2)


def page_format_of(folder: ModelFolder, wanted: str) -> tuple[str, str]:
    """The format that new agents of a model get, and why, as far as its folder tells without its weights.

    Args:
        folder: of the model; one that is not there counts as not calibrated.
        wanted: `auto` or a named format.
    """
    if wanted != "auto":
        return wanted, "chosen"
    found = stored_calibration(folder)
    return (UNCALIBRATED_FORMAT, "not calibrated") if found is None else (str(found["kv_format"]), "calibrated")


def _layouts(spec: ModelCacheSpec, kv_format: str) -> list[PageLayout]:
    # conditioned keys take the bytes of others; only the name of their constants is missing here
    conditioning = "0" * 12 if kv_format == "q4c" else None
    return [group.layout(group.format(kv_format, conditioning)) for group in spec.groups]


def _lines(report: Report) -> list[str]:
    seen = "; ".join("all tokens" if window is None else f"{window} tokens" for window in report.windows)
    ratio = report.token_bytes / report.fp16_token_bytes
    lines = [
        f"{report.model}, {report.kv_format} ({report.kv_format_reason}), budget {format_size(report.budget_bytes)}: "
        f"{report.token_bytes} bytes a token ({ratio:.3f} of FP16), {report.sliding_token_bytes} of them in layers "
        f"with a window; groups of layers see: {seen}",
        "                all tokens of all layers          what the next step sees",
        " tokens   an agent  agents  agents FP16    an agent   running  agents",
    ]
    for row in report.rows:
        lines.append(
            f"{row.tokens:7} {format_size(row.whole_bytes):>10} {row.agents_whole:7} {row.agents_fp16:12} "
            f"{format_size(row.resident_bytes):>11} {format_size(row.running_bytes):>9} {row.agents_resident:7}"
        )
    return lines


@click.command("capacity")
@click.option(
    "--spec",
    "names",
    multiple=True,
    type=click.Choice(sorted(SHAPES)),
    help="Known shape, which need not be installed; may be repeated.",
)
@click.option(
    "--model",
    "model_name",
    envvar="KVD_MODEL",
    show_envvar=True,
    shell_complete=complete_models,
    help=f"{MODEL_HELP} [default: all known shapes].",
)
@model_dir_option
@click.option("--tokens", default="4096,8192,16384,32768", show_default=True, help="Context lengths, comma separated.")
@kv_format_option
@click.option("--budget", type=SIZE, default="10.2GB", show_default=True, help="RAM for pages.")
@json_option
@click.pass_context
def capacity(
    ctx: click.Context,
    /,
    names: tuple[str, ...],
    model_name: str | None,
    model_dir: Path | None,
    tokens: str,
    kv_format: str,
    budget: int,
    as_json: bool,
) -> None:
    """Bytes of an agent and agents in a budget: with all tokens of all layers, and with what the next step sees.

    A group is the layers that see equally far back: all tokens, or a window of the latest ones. `an agent` is what one
    takes that waits for its turn, `running` the most one needs while it runs (its window is wider by the tokens of a
    step), `agents` how many are in RAM at once, one of them running; more than those are on disk. --kv-format auto is
    what the model's calibration found, or without one k8v4, as `kvd serve` takes it.

    Example: kvd bench capacity --spec gemma3-12b --tokens 4096,32768
    """
    from kvd.model.paths import model_dir as models
    from kvd.model.registry import resolve

    try:
        lengths = parse_lengths(tokens)
        root = models(model_dir)
        if names and ctx.get_parameter_source("model_name") is not ParameterSource.COMMANDLINE:
            model_name = None  # shapes were named on the spot: a model of the environment or the file is not meant
        shapes = names or (() if model_name else sorted(SHAPES))
        found = [(known_spec(name), ModelFolder(name, root / name)) for name in shapes]
        if model_name:
            folder = resolve(model_name, root)
            unknown = Fingerprint("0" * 32)  # of no interest here, and reading all weights takes time
            spec = build_cache_spec(folder.config(), model_name=folder.name, fingerprint=unknown, item_bytes=2)
            found.append((spec, folder))
        reports = []
        for spec, folder in found:
            name, reason = page_format_of(folder, kv_format)
            reports.append(account(spec, name, lengths, budget, reason))
    except KvdError as error:
        fail(error)
    if as_json:
        click.echo(json.dumps({"models": [asdict(report) for report in reports]}))
        return
    click.echo("\n\n".join("\n".join(_lines(report)) for report in reports))


__all__ = ["SHAPES", "Capacity", "Report", "account", "capacity", "known_spec", "page_format_of"]
