"""`kvd bench ppl`: what each page format costs in perplexity and takes in bytes, through real pages.

Every window runs through the model over a real frame pool, block tables and the attention backend, as serving does, in
prefill chunks; the baseline is the same model with an unquantised cache on the same windows. Bytes are counted from the
frames that were written, never from a formula (P29). `q4t` has no pages yet: its codec is measured. May import click,
mlx, numpy, kvd.attention, kvd.model, kvd.quant, kvd.store.frame_pool.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import numpy as np

from kvd.cli_common import fail
from kvd.cli_options import json_option, model_options
from kvd.errors import InvalidParams, KvdError
from kvd.ids import FrameId
from kvd.model.progress import Reporter, SilentReporter, reporter_for
from kvd.quant.spec import NAMED_FORMATS, PAGE_TOKENS

if TYPE_CHECKING:
    from kvd.attention import AttentionBackend
    from kvd.model.cache import SequenceCache
    from kvd.quant.calibrate import Loaded
    from kvd.quant.conditioning import Conditioning
    from kvd.store.frame_pool import FramePool

DEFAULT_FORMATS: Final = ("q8", "k8v4", "q4c", "q4")
CODEC_ONLY: Final = ("q4t",)
"""Formats that have a codec and no pages (decision 11): measured through caches that round as the codec does."""

DEFAULT_WINDOWS: Final = 4
WINDOW_TOKENS: Final = 1024

_STUDENT_T: Final[Mapping[int, float]] = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
"""Two-sided 95 % quantiles by degrees of freedom; beyond the table the normal quantile is close enough."""


@dataclass(frozen=True, slots=True)
class PplRow:
    """One format's result.

    Attributes:
        format: its name.
        ppl_fp: perplexity with an unquantised cache.
        ppl: perplexity over pages of this format.
        ratio: `ppl / ppl_fp`.
        ratio_low: lower end of the 95 % interval of the ratio, over windows; None with a single window.
        ratio_high: upper end.
        bytes_per_token: KV bytes of one token, all layers, counted in frames.
        ratio_to_fp16: `bytes_per_token` relative to FP16.
        windows: windows scored.
        tokens: tokens scored.
    """

    format: str
    ppl_fp: float
    ppl: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    bytes_per_token: float
    ratio_to_fp16: float
    windows: int
    tokens: int


def run_ppl(
    loaded: Loaded,
    formats: Sequence[str] = DEFAULT_FORMATS,
    *,
    windows: int = DEFAULT_WINDOWS,
    window_tokens: int = WINDOW_TOKENS,
    conditioning: Sequence[Conditioning] | None = None,
    backend: AttentionBackend | None = None,
    progress: Reporter | None = None,
) -> list[PplRow]:
    """Measure formats on a loaded model.

    Args:
        loaded: the model.
        formats: names of `NAMED_FORMATS` or `CODEC_ONLY`.
        windows: windows of text to score.
        window_tokens: tokens of each.
        conditioning: constants for `q4c`; None takes the calibration beside the model, or measures them on other text.
        backend: attention backend; None takes `MlxBackend`.
        progress: told about stages.

    Returns:
        One row per format, in the order given.

    Raises:
        InvalidParams: an unknown format, or too little text.
    """
    from kvd.attention import MlxBackend
    from kvd.model.dispatch import dispatching
    from kvd.quant.calibrate import CALIBRATION_WINDOWS, plain_caches, text_windows, window_loss

    reporter = progress if progress is not None else SilentReporter()
    _check_formats(formats)
    pieces = text_windows(loaded, CALIBRATION_WINDOWS + windows, window_tokens)
    scored = pieces[CALIBRATION_WINDOWS:]
    constants = _constants(loaded, formats, conditioning, pieces[:CALIBRATION_WINDOWS], reporter)
    reporter.stage("perplexity without quantisation", windows)
    with dispatching(loaded.model):
        baseline = [window_loss(loaded.model, ids, plain_caches(loaded.spec), reporter) for ids in scored]
        rows: list[PplRow] = []
        for name in formats:
            reporter.stage(f"perplexity of {name}", windows)
            if name in CODEC_ONLY:
                losses, bytes_per_token = _measure_codec(loaded, scored, reporter)
            else:
                losses, bytes_per_token = _measure(loaded, name, constants, scored, backend or MlxBackend(), reporter)
            rows.append(_row(loaded, name, baseline, losses, bytes_per_token, window_tokens))
    return rows


def _measure(
    loaded: Loaded,
    name: str,
    constants: Sequence[Conditioning] | None,
    windows: Sequence[Sequence[int]],
    backend: AttentionBackend,
    reporter: Reporter,
) -> tuple[list[float], float]:
    """(mean loss per window, measured bytes per token) of one format over real pages."""
    from kvd.model.cache import SequenceCache
    from kvd.quant.calibration import layer_operators, page_formats
    from kvd.store.frame_pool import FramePool

    spec = loaded.spec
    formats = page_formats(spec, name, constants)
    layouts = [group.layout(page_format) for group, page_format in zip(spec.groups, formats, strict=True)]
    page_count = -(-max(map(len, windows)) // PAGE_TOKENS)
    losses: list[float] = []
    used_bytes = used_tokens = 0
    for ids in windows:
        pool = FramePool(budget_bytes=page_count * sum(layout.payload_bytes for layout in layouts))
        sequence = SequenceCache(
            pool=pool,
            spec=spec,
            layouts=layouts,
            backend=backend,
            conditioning=layer_operators(spec, constants) if constants is not None else None,
        )
        tables = []
        for group, layout in enumerate(layouts):
            table = [FrameId(group * page_count + page) for page in range(page_count)]
            for frame in table:
                pool.create(frame, layout)
            sequence.set_block_table(group, table)
            tables.append(table)
        losses.append(_paged_loss(loaded, sequence, ids))
        used_bytes += sum(written_bytes(pool, table, sequence.tokens) for table in tables)
        used_tokens += sequence.tokens
        reporter.advance(1)
    return losses, used_bytes / used_tokens


def _measure_codec(loaded: Loaded, windows: Sequence[Sequence[int]], reporter: Reporter) -> tuple[list[float], float]:
    """(mean loss per window, bytes per token that mean something) of `q4t`, without pages."""
    from kvd.quant.calibrate import window_loss
    from kvd.quant.simulate import GroupedKeysCache
    from kvd.quant.spec import LayerFormat, SideFormat, group_for

    losses: list[float] = []
    used_bytes = used_tokens = 0
    for ids in windows:
        caches = [
            GroupedKeysCache(LayerFormat(SideFormat(4, 64, axis="tokens"), SideFormat(4, group_for(layer.v_dim))))
            for layer in loaded.spec.layers
        ]
        losses.append(window_loss(loaded.model, ids, caches, reporter))
        used_bytes += sum(cache.encoded_bytes for cache in caches)
        used_tokens += caches[0].offset
    return losses, used_bytes / used_tokens


def _paged_loss(loaded: Loaded, sequence: SequenceCache, ids: Sequence[int]) -> float:
    """Mean loss of ids[1:], the model running over the sequence's pages in prefill chunks."""
    import mlx.core as mx

    from kvd.quant.calibrate import CHUNK_TOKENS, chunk_loss

    total = 0.0
    for start in range(0, len(ids) - 1, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(ids) - 1)
        sequence.begin_step(end - start)
        hidden = loaded.model.model(mx.array([list(ids[start:end])]), cache=sequence.layer_caches)
        total += chunk_loss(loaded.model, hidden, ids[start + 1 : end + 1])
        sequence.end_step()
    return total / (len(ids) - 1)


def written_bytes(pool: FramePool, table: Sequence[FrameId], tokens: int) -> int:
    """Bytes that `tokens` tokens take in the frames of a block table, read out of the frames."""
    total = 0
    for page, frame in enumerate(table):
        here = min(max(tokens - page * PAGE_TOKENS, 0), PAGE_TOKENS)
        total += len(pool.extract(frame, 0, here))
    return total


def _constants(
    loaded: Loaded,
    formats: Sequence[str],
    given: Sequence[Conditioning] | None,
    windows: Sequence[Sequence[int]],
    reporter: Reporter,
) -> Sequence[Conditioning] | None:
    """Conditioning constants if a format needs them: given, stored, or measured on `windows`."""
    from kvd.quant.calibrate import measure_conditioning
    from kvd.quant.calibration import load_calibration

    if "q4c" not in formats or given is not None:
        return given
    stored = load_calibration(loaded.folder.path, loaded.spec.fingerprint)
    return stored.conditioning if stored is not None else measure_conditioning(loaded, windows, reporter)


def _row(
    loaded: Loaded,
    name: str,
    baseline: Sequence[float],
    losses: Sequence[float],
    bytes_per_token: float,
    window_tokens: int,
) -> PplRow:
    """Statistics of one format; the interval is over windows, paired with the baseline of the same window."""
    count = len(losses)
    differences = np.array(losses) - np.array(baseline)
    mean = float(differences.mean())
    low = high = None
    if count > 1:
        half = _STUDENT_T.get(count - 1, 1.96) * float(differences.std(ddof=1)) / math.sqrt(count)
        low, high = math.exp(mean - half), math.exp(mean + half)
    fp16_bytes = sum(group.fp16_token_bytes for group in loaded.spec.groups)
    return PplRow(
        format=name,
        ppl_fp=math.exp(float(np.mean(baseline))),
        ppl=math.exp(float(np.mean(losses))),
        ratio=math.exp(mean),
        ratio_low=low,
        ratio_high=high,
        bytes_per_token=bytes_per_token,
        ratio_to_fp16=bytes_per_token / fp16_bytes,
        windows=count,
        tokens=count * (window_tokens - 1),
    )


def _check_formats(formats: Sequence[str]) -> None:
    known = (*NAMED_FORMATS, *CODEC_ONLY)
    if not formats:
        raise InvalidParams(f"give at least one page format of {', '.join(known)}", parameter="formats")
    for name in formats:
        if name not in known:
            raise InvalidParams(f"kv format must be one of {', '.join(known)}, not {name!r}", format=name)


@click.command("ppl")
@model_options
@click.option(
    "--formats",
    default=",".join(DEFAULT_FORMATS),
    show_default=True,
    help="Page formats, comma separated; q4t is measured without pages.",
)
@click.option(
    "--windows", type=click.IntRange(min=1), default=DEFAULT_WINDOWS, show_default=True, help="Windows of text."
)
@click.option(
    "--window-tokens", type=click.IntRange(min=2), default=WINDOW_TOKENS, show_default=True, help="Tokens each."
)
@json_option
def ppl(model_name: str, model_dir: Path | None, formats: str, windows: int, window_tokens: int, as_json: bool) -> None:
    """Perplexity and bytes of page formats, on text that ships with Python.

    Example: kvd bench ppl --formats q4,q8 --windows 2
    """
    from kvd.model.loader import load
    from kvd.model.registry import resolve

    names = [name.strip() for name in formats.split(",") if name.strip()]
    reporter: Reporter = SilentReporter() if as_json else reporter_for()
    try:
        _check_formats(names)  # before the model is loaded
        loaded = load(resolve(model_name, model_dir))
        rows = run_ppl(loaded, names, windows=windows, window_tokens=window_tokens, progress=reporter)
    except KvdError as error:
        fail(error)
    finally:
        reporter.close()
    if as_json:
        click.echo(json.dumps({"model": loaded.spec.model_name, "rows": [asdict(row) for row in rows]}))
        return
    click.echo(f"{loaded.spec.model_name}: {rows[0].tokens} tokens, FP perplexity {rows[0].ppl_fp:.3f}")
    click.echo(f"{'format':8} {'ppl':>9} {'ratio':>7} {'95 % interval':>17} {'bytes/token':>12} {'of FP16':>8}")
    for row in rows:
        interval = "-" if row.ratio_low is None else f"{row.ratio_low:.4f}-{row.ratio_high:.4f}"
        click.echo(
            f"{row.format:8} {row.ppl:9.3f} {row.ratio:7.4f} {interval:>17} {row.bytes_per_token:12.0f} "
            f"{row.ratio_to_fp16:8.5f}"
        )
