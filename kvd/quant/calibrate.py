"""Choosing a page format for a model, once: the smallest whose perplexity on held-out text is within 2 % of FP.

Theory of operation. Some models' keys have outlier channels that 4 bits cannot hold (SmolLM2-135M: perplexity times
1.17); others lose nothing. So the format is measured, not assumed. The text ships with CPython (`pydoc_data.topics`).
Two windows give the range of each key channel, from which the conditioning constants follow; other windows are scored
in FP and then in each format, smallest first, with every key and value sent through the real codec before it is
attended to. The first format that keeps the perplexity is chosen and stored beside the model
(`kvd.quant.calibration`).

May import mlx, numpy, this package and, of kvd.model, spec, dispatch, forward, loader, registry and progress.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np

from kvd.errors import InvalidParams
from kvd.model.dispatch import dispatching
from kvd.model.forward import project
from kvd.model.progress import Reporter, SilentReporter
from kvd.model.registry import ModelFolder
from kvd.model.spec import ModelCacheSpec
from kvd.quant.calibration import Calibration, FormatScore, layer_operators, page_formats, save_calibration
from kvd.quant.codec import CODEC_VERSION
from kvd.quant.conditioning import Conditioning
from kvd.quant.simulate import PlainCache, RangeCache, SimulatedCache
from kvd.quant.spec import PageFormat

CANDIDATES: Final = ("q4", "q4c", "k8v4", "q8")
"""Formats tried, smallest first; of equal bytes the simpler first. 2 bits are never chosen without being asked for."""

RATIO_LIMIT: Final = 1.02
"""Greatest perplexity relative to FP that `auto` accepts."""

HOPELESS_RATIO: Final = 1.1
"""Beyond it a window is enough to reject a format: windows of one text differ by a few per cent at most."""

WINDOW_TOKENS: Final = 1024
CALIBRATION_WINDOWS: Final = 2
SCORED_WINDOWS: Final = 2
SINK_TOKENS: Final = 8
"""Tokens at the start of a window that do not count for the range of keys."""

CHUNK_TOKENS: Final = 512
LOSS_LOGIT_BYTES: Final = 100_000_000
"""Logits that scoring holds at once, in float32."""


class TextEncoder(Protocol):
    """The part of a model's text codec that calibration needs."""

    def encode_content(self, text: str) -> list[int]:
        """Token ids of plain text."""


class Loaded(Protocol):
    """A loaded model as calibration sees it (`kvd.model.loader.LoadedModel`)."""

    @property
    def model(self) -> Any:  # noqa: ANN401  the mlx-lm door
        """`model(ids, cache=...)` gives logits [batch, tokens, vocab]."""

    @property
    def codec(self) -> TextEncoder:
        """Text to ids."""

    @property
    def spec(self) -> ModelCacheSpec:
        """Cache geometry."""

    @property
    def folder(self) -> ModelFolder:
        """Where the model lies."""


def calibrate_model(
    target: Loaded | ModelFolder,
    progress: Reporter | None = None,
    *,
    candidates: Sequence[str] = CANDIDATES,
    window_tokens: int = WINDOW_TOKENS,
) -> Calibration:
    """Calibrate a model and store the result beside it.

    Args:
        target: a loaded model, or the folder of one (it is loaded then).
        progress: told about stages; None is silent.
        candidates: formats to try, smallest first.
        window_tokens: tokens of each window.

    Returns:
        The result; if no candidate keeps within `RATIO_LIMIT`, the one with the least ratio is chosen.

    Raises:
        InvalidParams: the text is too short for the windows.
        KvdError: loading failed (see `kvd.model.loader.load`).
    """
    reporter = progress if progress is not None else SilentReporter()
    loaded = _load(target, reporter) if isinstance(target, ModelFolder) else target
    began = time.monotonic()
    windows = text_windows(loaded, CALIBRATION_WINDOWS + SCORED_WINDOWS, window_tokens)
    scored = windows[CALIBRATION_WINDOWS:]
    scores: list[FormatScore] = []
    with dispatching(loaded.model):
        conditioning = measure_conditioning(loaded, windows[:CALIBRATION_WINDOWS], reporter)
        reporter.stage("calibrating, once: perplexity in full precision", len(scored))
        baseline = [window_loss(loaded.model, ids, plain_caches(loaded.spec), reporter) for ids in scored]
        for name in candidates:
            score = _score(loaded, name, conditioning, scored, baseline, reporter)
            scores.append(score)
            if score.ratio <= RATIO_LIMIT:
                break
    chosen = scores[-1] if scores[-1].ratio <= RATIO_LIMIT else min(scores, key=lambda score: score.ratio)
    result = Calibration(
        fingerprint=loaded.spec.fingerprint,
        codec_version=CODEC_VERSION,
        chosen=chosen.format,
        ppl_fp=float(np.exp(np.mean(baseline))),
        scored_tokens=sum(len(ids) - 1 for ids in scored),
        scores=tuple(scores),
        conditioning=conditioning,
        elapsed_s=time.monotonic() - began,
    )
    save_calibration(result, loaded.folder.path)
    return result


def measure_conditioning(
    loaded: Loaded, windows: Sequence[Sequence[int]], reporter: Reporter
) -> tuple[Conditioning, ...]:
    """Conditioning constants of each cache group from the key ranges over `windows` (lists of token ids)."""
    reporter.stage("calibrating, once: range of key channels", len(windows))
    low: dict[int, Any] = {}
    high: dict[int, Any] = {}
    for ids in windows:
        caches = [RangeCache(SINK_TOKENS) for _ in loaded.spec.layers]
        window_loss(loaded.model, ids, caches, reporter)
        for index, cache in enumerate(caches):
            if cache.low is None or cache.high is None:
                raise InvalidParams(f"a window of {len(ids)} tokens is too short to measure keys")
            low[index] = np.minimum(low.get(index, cache.low), cache.low)
            high[index] = np.maximum(high.get(index, cache.high), cache.high)
    return tuple(
        Conditioning.from_range(
            np.stack([low[index] for index in group.layer_indices]),
            np.stack([high[index] for index in group.layer_indices]),
        )
        for group in loaded.spec.groups
    )


def _score(
    loaded: Loaded,
    name: str,
    conditioning: tuple[Conditioning, ...],
    windows: Sequence[Sequence[int]],
    baseline: Sequence[float],
    reporter: Reporter,
) -> FormatScore:
    """Perplexity of one format over `windows`, of which `baseline` has the losses without quantisation.

    A format that is far off after some windows is not scored on the rest.
    """
    reporter.stage(f"calibrating, once: perplexity with {name}", len(windows))
    losses: list[float] = []
    encoded_bytes, tokens = 0, 0
    for ids in windows:
        caches = simulated_caches(loaded.spec, page_formats(loaded.spec, name, conditioning), conditioning)
        losses.append(window_loss(loaded.model, ids, caches, reporter))
        encoded_bytes += sum(cache.encoded_bytes for cache in caches)
        tokens += caches[0].offset
        ratio = float(np.exp(np.mean(np.subtract(losses, baseline[: len(losses)]))))
        if ratio > HOPELESS_RATIO:
            break
    return FormatScore(name, float(np.exp(np.mean(losses))), ratio, encoded_bytes / tokens)


def plain_caches(spec: ModelCacheSpec) -> list[PlainCache]:
    """Unquantised caches for every layer."""
    return [PlainCache() for _ in spec.layers]


def simulated_caches(
    spec: ModelCacheSpec, formats: Sequence[PageFormat], conditioning: Sequence[Conditioning]
) -> list[SimulatedCache]:
    """Caches that quantise on write, one per model layer."""
    operators = layer_operators(spec, conditioning)
    layers = {
        index: layer_format
        for group, page_format in zip(spec.groups, formats, strict=True)
        for index, layer_format in zip(group.layer_indices, page_format.layers, strict=True)
    }
    return [SimulatedCache(layers[i], operators[i] if layers[i].k.conditioning else None) for i in sorted(layers)]


def window_loss(model: Any, ids: Sequence[int], caches: Any, reporter: Reporter | None = None) -> float:  # noqa: ANN401
    """Mean negative log-likelihood of ids[1:] given what precedes each, in chunks of `CHUNK_TOKENS`.

    Args:
        model: an mlx-lm model.
        ids: a window of tokens, at least two.
        caches: fresh caches, one per layer.
        reporter: told when the window is done.
    """
    total = 0.0
    for start in range(0, len(ids) - 1, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(ids) - 1)
        hidden = model.model(mx.array([list(ids[start:end])]), cache=caches)
        total += chunk_loss(model, hidden, ids[start + 1 : end + 1])
    if reporter is not None:
        reporter.advance(1)
    return total / (len(ids) - 1)


def chunk_loss(model: Any, hidden: mx.array, targets: Sequence[int]) -> float:  # noqa: ANN401
    """Summed negative log-likelihood of a chunk.

    Logits are made for some tokens at a time: a chunk's over a vocabulary of 262,144 would take half a gigabyte. The
    normaliser is computed in numpy, whose vectorised exponential is many times faster than mlx's on CPU.

    Args:
        model: an mlx-lm model.
        hidden: mx [1, n, hidden], what the model's layers made of the chunk.
        targets: n ids, each the one after the token of its row.
    """
    vocab_tokens = project(model, hidden[:, :1]).shape[-1]
    rows = max(1, LOSS_LOGIT_BYTES // (4 * vocab_tokens))
    return sum(
        _rows_loss(project(model, hidden[:, at : at + rows]), targets[at : at + rows])
        for at in range(0, len(targets), rows)
    )


def _rows_loss(logits: mx.array, targets: Sequence[int]) -> float:
    """Summed negative log-likelihood of n target ids under logits mx [1, n, vocab]."""
    scores = np.array(logits[0].astype(mx.float32))
    top = scores.max(axis=-1)
    picked = scores[np.arange(len(targets)), np.asarray(targets)]
    np.exp(np.subtract(scores, top[:, None], out=scores), out=scores)
    return float((np.log(scores.sum(axis=-1, dtype=np.float64)) + top - picked).sum())


def text_windows(loaded: Loaded, count: int, window_tokens: int) -> list[list[int]]:
    """Windows of token ids from the documentation that ships with CPython, spread over it, never overlapping.

    Raises:
        InvalidParams: the text has fewer tokens than asked for.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    stride = len(text) // count
    windows: list[list[int]] = []
    for index in range(count):
        part = text[index * stride : (index + 1) * stride]
        # No tokenizer makes tokens longer than 16 characters on average; encoding all of the text would take seconds.
        ids = loaded.codec.encode_content(part[: 16 * window_tokens])[:window_tokens]
        if len(ids) < window_tokens:
            raise InvalidParams(f"the text has no {count} windows of {window_tokens} tokens")
        windows.append(ids)
    return windows


def _load(folder: ModelFolder, reporter: Reporter) -> Loaded:
    """Load a folder; imported here because loading pulls in mlx-lm."""
    from kvd.model.loader import load

    reporter.stage(f"loading {folder.name}")
    return load(folder)
