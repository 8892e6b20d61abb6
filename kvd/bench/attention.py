"""Speed of a model over quantised pages: prefill and decode, against mlx-lm with a float32 cache, in one run.

Both sides run the same ids on the same BLAS with the same threads, one after the other: kvd's model step in this
process, mlx-lm in one of its own (`kvd.bench.reference`). Decoding is quoted as the median step. Beside each figure
of kvd stands its floor: the bytes a decode step must read at the rate this machine reads them, the products of a
prefill at the rate its BLAS multiplies. May import numpy, kvd.attention, kvd.model, kvd.store.frame_pool.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from kvd import launcher
from kvd.bench.machine import MachineRates, measure_rates
from kvd.bench.reference import PREFILL_STEPS, Speed, speed
from kvd.bench.text import technical_english
from kvd.cli_options import attention_option, json_option, kv_format_option, model_options
from kvd.errors import InvalidParams, KvdError
from kvd.ids import FrameId
from kvd.quant.spec import PAGE_TOKENS, UNCALIBRATED_FORMAT

if TYPE_CHECKING:
    from kvd.model.cache import SequenceCache

CHUNK_TOKENS = 512
DECODE_STEPS = 24


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """Figures for one context length.

    Attributes:
        tokens: context.
        prefill_tokens_s: kvd's cold prefill.
        prefill_floor_tokens_s: what the products alone allow.
        decode_tokens_s: kvd's decoding at that length.
        decode_floor_tokens_s: what reading weights and pages once a token allows.
        mlx_lm_prefill_tokens_s: mlx-lm's, the better prefill step.
        mlx_lm_step: that step.
        mlx_lm_decode_tokens_s: mlx-lm's.
        prefill_ratio, decode_ratio: kvd's over mlx-lm's.
    """

    tokens: int
    prefill_tokens_s: float
    prefill_floor_tokens_s: float
    decode_tokens_s: float
    decode_floor_tokens_s: float
    mlx_lm_prefill_tokens_s: float
    mlx_lm_step: int
    mlx_lm_decode_tokens_s: float
    prefill_ratio: float
    decode_ratio: float


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """All rows, and how they were made."""

    model: str
    kv_format: str
    attention: str
    threads: int
    read_gigabytes_s: float
    gigaflops_s: float
    rows: tuple[SpeedRow, ...]

    def facts(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return asdict(self)


def run_attention(
    folder: Path, lengths: Sequence[int], *, kv_format: str, attention: str, repeats: int, tell: Callable[[str], None]
) -> SpeedReport:
    """Measure every length.

    Args:
        folder: the model in mlx-lm's layout.
        lengths: context lengths in tokens.
        kv_format: `auto` or a named format.
        attention: `auto` or a backend's name.
        repeats: prefills of each length; the fastest counts, on both sides.
        tell: progress, one line each.

    Raises:
        InvalidParams: the text is too short for a length.
        KvdError: the model cannot be loaded, the format needs a calibration.
    """
    from kvd.model.loader import load
    from kvd.model.registry import ModelFolder

    loaded = load(ModelFolder(folder.name, folder))
    ids = loaded.codec.encode_content(technical_english()[: 8 * (max(lengths) + DECODE_STEPS)])
    if len(ids) < max(lengths) + DECODE_STEPS:
        raise InvalidParams(f"the text to measure with has fewer than {max(lengths)} tokens", parameter="tokens")
    rates = measure_rates()
    ours = _Paged(loaded, kv_format, attention)
    mine: dict[int, Speed] = {}
    for tokens in lengths:
        tell(f"{tokens}: kvd")
        mine[tokens] = ours.speed(ids, tokens, repeats)
    rows = []
    for tokens in lengths:
        theirs = {}
        for step in PREFILL_STEPS:
            tell(f"{tokens}: mlx-lm, prefill step {step}")
            theirs[step] = speed(folder, ids[: tokens + DECODE_STEPS], step=step, repeats=repeats, decode=DECODE_STEPS)
        best = min(theirs, key=lambda step: theirs[step].prefill_s)
        rows.append(_row(tokens, mine[tokens], theirs, best, ours, rates))
    report = launcher.report()
    return SpeedReport(
        model=folder.name,
        kv_format=ours.format_name,
        attention=ours.backend.name,
        threads=1 if report is None else report.threads,
        read_gigabytes_s=round(rates.read_bytes_s / 1e9, 1),
        gigaflops_s=round(rates.products_s / 1e9),
        rows=tuple(rows),
    )


class _Paged:
    """A loaded model over frames of its own, with the backend and assistance that the daemon would choose."""

    def __init__(self, loaded: Any, kv_format: str, attention: str) -> None:  # noqa: ANN401
        from kvd.attention.select import select_backend
        from kvd.model import cpu_assist
        from kvd.model.forward import Forward, limit_buffer_cache
        from kvd.model.probes import probes_for
        from kvd.quant.calibration import layer_operators, load_calibration, page_formats

        limit_buffer_cache()
        spec = loaded.spec
        calibration = load_calibration(loaded.folder.path, spec.fingerprint)
        constants = calibration.conditioning if calibration is not None else None
        chosen = calibration.chosen if calibration is not None else UNCALIBRATED_FORMAT
        self.format_name = chosen if kv_format == "auto" else kv_format
        if self.format_name == "q4c" and constants is None:
            raise InvalidParams("q4c needs a calibration: run `kvd calibrate` first", parameter="kv-format")
        formats = page_formats(spec, self.format_name, constants)
        self.layouts = [group.layout(each) for group, each in zip(spec.groups, formats, strict=True)]
        self._conditioning = layer_operators(spec, constants) if constants is not None else None
        self.backend = select_backend(attention, probes_for(spec, zip(spec.groups, formats, strict=True))).backend
        self._model = loaded.model
        if self.backend.name == "cpu":
            cpu_assist.install(loaded.model)
        self.spec = spec
        self._forward = Forward(loaded.model, assisted=self.backend.name == "cpu")
        table = int(loaded.model.model.embed_tokens.weight.nbytes)
        output = int(loaded.model.lm_head.weight.nbytes) if hasattr(loaded.model, "lm_head") else 0
        # a step reads one row of an untied embedding, and a tied one as its output projection
        self._decode_bytes = loaded.weights_bytes - (table if output else 0)
        self._prefill_bytes = loaded.weights_bytes - table - output

    def speed(self, ids: Sequence[int], tokens: int, repeats: int) -> Speed:
        """Cold prefill of `tokens` ids and decoding after it."""
        from kvd.attention.select import pool_for
        from kvd.model.cache import SequenceCache
        from kvd.model.dispatch import dispatching

        pages = -(-(tokens + DECODE_STEPS) // PAGE_TOKENS)
        sizes = [layout.payload_bytes for layout in self.layouts]
        pool = pool_for(self.backend, pages * sum(sizes), max(sizes))
        sequence = SequenceCache(
            pool=pool, spec=self.spec, layouts=self.layouts, backend=self.backend, conditioning=self._conditioning
        )
        for group, layout in enumerate(self.layouts):
            table = [FrameId(group * pages + page) for page in range(pages)]
            for frame in table:
                pool.create(frame, layout)
            sequence.set_block_table(group, table)
        with dispatching(self._model):
            return self._timed(sequence, ids, tokens, repeats)

    def _timed(self, sequence: SequenceCache, ids: Sequence[int], tokens: int, repeats: int) -> Speed:
        times = []
        for _ in range(repeats + 1):  # the first one compiles, loads and touches memory
            sequence.truncate(0)
            began = time.perf_counter()
            for start in range(0, tokens, CHUNK_TOKENS):
                chunk = ids[start : min(start + CHUNK_TOKENS, tokens)]
                self._forward.step(sequence, chunk, wants_logits=start + CHUNK_TOKENS >= tokens)
            times.append(time.perf_counter() - began)
        steps = []
        for step in range(DECODE_STEPS):
            began = time.perf_counter()
            logits = self._forward.step(sequence, [ids[tokens + step]], wants_logits=True)
            assert logits is not None
            np.argmax(logits)
            steps.append(time.perf_counter() - began)
        return Speed(min(times[1:]), statistics.median(steps))

    def decode_floor_s(self, tokens: int, rates: MachineRates) -> float:
        """Seconds to read the weights and the pages of `tokens` tokens once."""
        pages_bytes = tokens * sum(layout.token_bytes for layout in self.layouts)
        return float(self._decode_bytes + pages_bytes) / rates.read_bytes_s

    def prefill_floor_s(self, tokens: int, rates: MachineRates) -> float:
        """Seconds for the products of a cold prefill: weights for each token, scores and values for each pair."""
        operations = float(2 * tokens * self._prefill_bytes / 4)
        for layer in self.spec.layers:
            seen = tokens if layer.window is None else min(tokens, 2 * layer.window)
            operations += self.spec.query_heads * tokens * seen * (layer.k_dim + layer.v_dim)
        return operations / rates.products_s


def _row(tokens: int, mine: Speed, theirs: dict[int, Speed], step: int, ours: _Paged, rates: MachineRates) -> SpeedRow:
    decode_s = min(each.decode_s for each in theirs.values())
    return SpeedRow(
        tokens=tokens,
        prefill_tokens_s=round(tokens / mine.prefill_s, 1),
        prefill_floor_tokens_s=round(tokens / ours.prefill_floor_s(tokens, rates), 1),
        decode_tokens_s=round(1 / mine.decode_s, 1),
        decode_floor_tokens_s=round(1 / ours.decode_floor_s(tokens, rates), 1),
        mlx_lm_prefill_tokens_s=round(tokens / theirs[step].prefill_s, 1),
        mlx_lm_step=step,
        mlx_lm_decode_tokens_s=round(1 / decode_s, 1),
        prefill_ratio=round(theirs[step].prefill_s / mine.prefill_s, 2),
        decode_ratio=round(decode_s / mine.decode_s, 2),
    )


@click.command("attention")
@click.option("--tokens", default="1024,4096", show_default=True, help="Context lengths, comma separated.")
@click.option("--repeats", type=click.IntRange(1), default=2, show_default=True, help="Prefills; the fastest counts.")
@kv_format_option
@attention_option
@model_options
@click.option(
    "--device",
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="cpu: a whole model against mlx-lm. gpu: kernels alone against mlx's attention over bf16, without a model.",
)
@click.option("--batch", default="1,16", show_default=True, help="Rows of a call, comma separated (--device gpu).")
@click.option(
    "--whole-model", is_flag=True, help="With --device gpu: a model of Llama 3.1 8B's shape and random 4-bit weights."
)
@json_option
def attention(
    tokens: str,
    repeats: int,
    kv_format: str,
    attention: str,
    model_name: str,
    model_dir: Path | None,
    device: str,
    batch: str,
    whole_model: bool,
    as_json: bool,
) -> None:
    """Prefill and decode speed over quantised pages, against mlx-lm with a float32 cache, with floors.

    Examples: kvd bench attention --tokens 1024,4096,7168 --json;
    kvd bench attention --device gpu --tokens 4096,32768,131072
    """
    from kvd.bench.cli import parse_lengths
    from kvd.cli_common import fail

    if device == "gpu":
        _on_gpu(tokens, batch, whole_model=whole_model, as_json=as_json)
        return
    from kvd.model.paths import model_dir as models
    from kvd.model.registry import resolve

    try:
        report = run_attention(
            resolve(model_name, models(model_dir)).path,
            parse_lengths(tokens),
            kv_format=kv_format,
            attention=attention,
            repeats=repeats,
            tell=lambda line: click.echo(line, err=True),
        )
    except KvdError as error:
        fail(error)
    if as_json:
        click.echo(json.dumps(report.facts()))
        return
    click.echo(
        f"{report.model}, pages {report.kv_format}, attention {report.attention}, {report.threads} threads; this "
        f"machine reads {report.read_gigabytes_s} GB/s on one thread and multiplies {report.gigaflops_s} GFLOP/s"
    )
    click.echo("        prefill, tokens/s                    decode, tokens/s")
    click.echo("tokens      kvd    floor   mlx-lm   times      kvd    floor   mlx-lm   times")
    for row in report.rows:
        click.echo(
            f"{row.tokens:6} {row.prefill_tokens_s:8.0f} {row.prefill_floor_tokens_s:8.0f} "
            f"{row.mlx_lm_prefill_tokens_s:8.0f} {row.prefill_ratio:7.2f} {row.decode_tokens_s:8.1f} "
            f"{row.decode_floor_tokens_s:8.1f} {row.mlx_lm_decode_tokens_s:8.1f} {row.decode_ratio:7.2f}"
        )


def _on_gpu(tokens: str, batch: str, *, whole_model: bool, as_json: bool) -> None:
    """The kernels' table, or the whole model's at each context."""
    from kvd.bench.attention_gpu import run_gpu_attention, table_lines
    from kvd.bench.cli import parse_lengths
    from kvd.bench.gpu_model import run_gpu_model
    from kvd.cli_common import fail

    def tell(line: str) -> None:
        click.echo(line, err=True)

    try:
        if whole_model:
            for length in parse_lengths(tokens):
                facts = run_gpu_model(length, tell).facts()
                click.echo(json.dumps(facts, indent=None if as_json else 1))
            return
        report = run_gpu_attention(parse_lengths(tokens), parse_lengths(batch, "--batch"), tell)
    except KvdError as error:
        fail(error)
    click.echo(json.dumps(report.facts()) if as_json else "\n".join(table_lines(report)))


__all__ = ["SpeedReport", "SpeedRow", "attention", "run_attention"]
