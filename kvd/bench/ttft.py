"""Time to first token: cold, hot (resident) and warm (after `kill -9`, page cache dropped), against mlx-lm's cold.

Each state adds the same 16 new tokens to a context of N tokens. The clock is the client's: from sending the request to
the first sampled token. Hot and warm runs start from the same state each time: the agent is rolled back to N tokens
first, outside the clock. Medians over the repeats; ratios are of one run, on one machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvd.bench.harness import UNSHARED, DaemonProcess, drop_page_cache, scratch_folder
from kvd.bench.reference import PREFILL_STEPS, first_token_s
from kvd.bench.text import technical_english
from kvd.errors import InvalidParams
from kvd.model.tokenizer import TextCodec
from kvd_client import Client, GenerateResult

NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TtftRow:
    """Figures for one context length; seconds are medians.

    Attributes:
        tokens: context before the new tokens.
        new_tokens: tokens added.
        cold_s, hot_s, warm_s: kvd's time to first token.
        mlx_lm_cold_s: mlx-lm's cold prefill of the same ids, the better prefill step.
        mlx_lm_step: that step.
        hot_ratio, warm_ratio: mlx-lm's cold over kvd's hot and warm.
        cold_speed_ratio: mlx-lm's cold time over kvd's cold time (above 1: kvd is faster).
        hot_cached_tokens, warm_cached_tokens: tokens reused in those runs.
        ready_s: daemon start after the kill, model load included.
    """

    tokens: int
    new_tokens: int
    cold_s: float
    hot_s: float
    warm_s: float
    mlx_lm_cold_s: float
    mlx_lm_step: int
    hot_ratio: float
    warm_ratio: float
    cold_speed_ratio: float
    hot_cached_tokens: int
    warm_cached_tokens: int
    ready_s: float


@dataclass(frozen=True, slots=True)
class TtftReport:
    """All rows, and how they were made."""

    model: str
    kv_format: str
    attention: str
    threads: int
    repeats: int
    page_cache: str
    rows: tuple[TtftRow, ...]

    def facts(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A context of exactly `tokens` ids and the text that adds `NEW_TOKENS` more."""

    context: str
    suffix: str
    ids: tuple[int, ...]
    tokens: int


def make_prompt(codec: TextCodec, tokens: int) -> Prompt:
    """Cut technical English where a context of `tokens` ids ends, and 16 ids after it.

    Raises:
        InvalidParams: the text is too short.
    """
    text = technical_english()
    ids = codec.encode_content(text[: (tokens + NEW_TOKENS) * 8])
    if len(ids) < tokens + 2 * NEW_TOKENS:
        raise InvalidParams(f"the text to measure with has fewer than {tokens} tokens", parameter="tokens")
    lengths = codec.byte_lengths(ids, text[: (tokens + NEW_TOKENS) * 8].encode())
    data = text.encode()
    border = sum(lengths[:tokens])
    context = data[:border].decode()
    suffix = data[border : border + sum(lengths[tokens : tokens + NEW_TOKENS])].decode()
    return Prompt(context, suffix, tuple(ids[: tokens + NEW_TOKENS]), len(codec.encode_content(context)))


def run_ttft(
    *,
    model: str,
    folder: Path,
    lengths: Sequence[int],
    repeats: int,
    options: Sequence[str],
    tell: Callable[[str], None],
) -> TtftReport:
    """Measure every length.

    Args:
        model: what `kvd serve --model` gets.
        folder: the same model's folder, for mlx-lm and the tokenizer.
        lengths: context lengths in tokens.
        repeats: runs of each state.
        options: further `kvd serve` options.
        tell: progress, one line each.
    """
    codec = TextCodec.from_folder(folder)
    rows: list[TtftRow] = []
    how = ""
    facts: dict[str, object] = {}
    for tokens in lengths:
        prompt = make_prompt(codec, tokens)
        with scratch_folder() as scratch:
            daemon = DaemonProcess(scratch / "data", model=model, options=(*UNSHARED, *options))
            with daemon:
                with daemon.client() as client:
                    facts = client.model_info()
                    tell(f"{tokens}: cold")
                    cold = [_cold(client, prompt, run) for run in range(repeats)]
                    tell(f"{tokens}: hot")
                    client.generate("warm", prompt.context, max_tokens=1)
                    hot = [_resumed(client, prompt) for _ in range(repeats + 1)][1:]
                warm: list[GenerateResult] = []
                ready: list[float] = []
                for _ in range(repeats):
                    tell(f"{tokens}: warm")
                    with daemon.client() as client:
                        client.rollback("warm", prompt.tokens)
                    daemon.kill()
                    how = drop_page_cache(daemon.data_dir)
                    ready.append(daemon.start())
                    with daemon.client() as client:
                        warm.append(client.generate("warm", prompt.context + prompt.suffix, max_tokens=1))
            tell(f"{tokens}: mlx-lm")
            reference = {
                step: statistics.median(first_token_s(folder, prompt.ids, step=step, repeats=repeats))
                for step in PREFILL_STEPS
            }
        rows.append(_row(prompt, cold, hot, warm, ready, reference))
    return TtftReport(
        model=model,
        kv_format=str(facts.get("kv_format")),
        attention=str(facts.get("attention")),
        threads=int(str(facts.get("threads", 0))),
        repeats=repeats,
        page_cache=how,
        rows=tuple(rows),
    )


def _cold(client: Client, prompt: Prompt, run: int) -> GenerateResult:
    """A new agent each time; deleted after, so that memory stays as it was."""
    name = f"cold-{run}"
    result = client.generate(name, prompt.context + prompt.suffix, max_tokens=1)
    client.delete(name)
    return result


def _resumed(client: Client, prompt: Prompt) -> GenerateResult:
    client.rollback("warm", prompt.tokens)
    return client.generate("warm", prompt.context + prompt.suffix, max_tokens=1)


def _row(
    prompt: Prompt,
    cold: Sequence[GenerateResult],
    hot: Sequence[GenerateResult],
    warm: Sequence[GenerateResult],
    ready: Sequence[float],
    reference: dict[int, float],
) -> TtftRow:
    step = min(reference, key=lambda candidate: reference[candidate])
    cold_s, hot_s, warm_s = (_median_s(results) for results in (cold, hot, warm))
    return TtftRow(
        tokens=prompt.tokens,
        new_tokens=NEW_TOKENS,
        cold_s=round(cold_s, 4),
        hot_s=round(hot_s, 4),
        warm_s=round(warm_s, 4),
        mlx_lm_cold_s=round(reference[step], 4),
        mlx_lm_step=step,
        hot_ratio=round(reference[step] / hot_s, 1),
        warm_ratio=round(reference[step] / warm_s, 1),
        cold_speed_ratio=round(reference[step] / cold_s, 2),
        hot_cached_tokens=min(result.cached_tokens for result in hot),
        warm_cached_tokens=min(result.cached_tokens for result in warm),
        ready_s=round(statistics.median(ready), 2),
    )


def _median_s(results: Sequence[GenerateResult]) -> float:
    times = [result.ttft_s for result in results]
    return statistics.median(time for time in times if time is not None)
