"""What the events of a run amount to: rates, shares and ratios of `kvd bench serve`. Pure.

Theory of operation. A client notes when each event of its turn arrived, on a clock that all processes of the machine
share. Everything quoted is made of these times and of the daemon's counters here, so that it can be checked without a
daemon. A figure that a run does not yield (a prompt was done before anything could be measured beside it) is None, and
so is the verdict on it.

May import nothing of kvd.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as its client saw it; times are seconds of the machine's monotonic clock.

    Attributes:
        sent_s: the request was sent.
        first_s: its first token was there; None when none came.
        texts_s: a piece of text was there, one for each token where each token ends a character.
        chunks_s: a prefill chunk was done.
        tokens: new tokens by the daemon's count, or pieces of text when the turn was left early.
        server: what else the daemon said of it (`swap_in_s`, `prompt_tokens`, ...).
    """

    sent_s: float
    first_s: float | None
    texts_s: tuple[float, ...]
    chunks_s: tuple[float, ...]
    tokens: int
    server: Mapping[str, object]

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first new one."""
        return round(number(self.server, "prompt_tokens"))

    @property
    def last_s(self) -> float | None:
        """When its last text was there."""
        return self.texts_s[-1] if self.texts_s else self.first_s


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure beside its bar.

    Attributes:
        name: what it is.
        value: as measured; None when the run did not yield it.
        bar: what is asked for.
        sense: whether `value` is to be at least or at most that.
        floor: the best that bytes, operations or settings of this machine allow; None where nothing says so.
        note: what it is made of.
    """

    name: str
    value: float | None
    bar: float
    sense: Literal["at least", "at most"]
    floor: float | None
    note: str

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without a value."""
        if self.value is None:
            return None
        return self.value >= self.bar if self.sense == "at least" else self.value <= self.bar


def decode_tokens_s(turns: Sequence[Turn]) -> float | None:
    """Tokens a second of turns that decode together, from the earliest first token to the last token of all.

    The first token of each turn came of its prompt and is not counted.
    """
    firsts = [turn.first_s for turn in turns if turn.first_s is not None]
    lasts = [turn.last_s for turn in turns if turn.last_s is not None]
    if len(firsts) < len(turns) or not turns or max(lasts) <= min(firsts):
        return None
    return sum(turn.tokens - 1 for turn in turns) / (max(lasts) - min(firsts))


def whole_tokens_s(turns: Sequence[Turn]) -> float | None:
    """New tokens a second of turns, from the first request to the last token: prompts included."""
    lasts = [turn.last_s for turn in turns if turn.last_s is not None]
    if len(lasts) < len(turns) or not turns:
        return None
    return sum(turn.tokens for turn in turns) / (max(lasts) - min(turn.sent_s for turn in turns))


def texts_per_s(turn: Turn, begin_s: float, end_s: float) -> float | None:
    """Pieces of text a second that arrived between two moments."""
    if end_s <= begin_s:
        return None
    return sum(begin_s < at <= end_s for at in turn.texts_s) / (end_s - begin_s)


def share_beside(turn: Turn, prefill: Turn, *, settled: int) -> float | None:
    """Rate of a decoding turn during another's prefill, relative to its own rate before that.

    Args:
        turn: who decodes, before and during the prefill.
        prefill: who reads a long prompt.
        settled: pieces of text of `turn` that are left out at its beginning.
    """
    if prefill.first_s is None or len(turn.texts_s) <= settled:
        return None
    alone = texts_per_s(turn, turn.texts_s[settled], prefill.sent_s)
    beside = texts_per_s(turn, prefill.sent_s, prefill.first_s)
    return beside / alone if alone and beside is not None else None


def chunk_s(prefill: Turn, others: Sequence[Turn]) -> float | None:
    """Median seconds between two chunks of a prompt, of those times in which nobody else was served."""
    gaps = [
        (begin, end)
        for begin, end in zip(prefill.chunks_s, prefill.chunks_s[1:], strict=False)
        if not any(other.sent_s < end and (other.last_s or end) > begin for other in others)
    ]
    return statistics.median(end - begin for begin, end in gaps) if gaps else None


def first_tokens_in_chunks(short: Sequence[Turn], prefill: Turn) -> tuple[float, ...]:
    """Times to the first token of requests that arrived during a prefill, in its chunks; empty when there are none."""
    unit_s = chunk_s(prefill, short)
    end_s = prefill.first_s if prefill.first_s is not None else max(prefill.chunks_s, default=prefill.sent_s)
    if not unit_s:
        return ()
    return tuple(
        (turn.first_s - turn.sent_s) / unit_s for turn in short if turn.first_s is not None and turn.sent_s < end_s
    )


def engine_share(before: Mapping[str, object], after: Mapping[str, object]) -> float | None:
    """Part of the engine's busy time that is neither the model's nor the sampler's, between two statistics."""
    busy_s, forward_s, sampling_s = (
        difference(before, after, name) for name in ("engine_busy_s", "forward_s", "sampling_s")
    )
    return (busy_s - forward_s - sampling_s) / busy_s if busy_s > 0 else None


def hidden_share(*, busy_s: float, exposed_s: float) -> float | None:
    """Part of the time in which pages came in that something was computed meanwhile; None when none came in."""
    return 1.0 - exposed_s / busy_s if busy_s > 0 else None


@dataclass(frozen=True, slots=True)
class SwapSeconds:
    """Between two statistics of a daemon.

    Attributes:
        busy_s: pages were being read.
        exposed_s: a turn waited for pages and nothing was computed.
        waited_s: turns waited for pages, each by itself, whether or not others were computed.
    """

    busy_s: float
    exposed_s: float
    waited_s: float


def swap_seconds(before: Mapping[str, object], after: Mapping[str, object]) -> SwapSeconds:
    """What swapping in took between two statistics."""
    busy_s, exposed_s, waited_s = (
        difference(before, after, f"swap_in_{what}_s") for what in ("busy", "exposed", "waited")
    )
    return SwapSeconds(busy_s, exposed_s, waited_s)


def decode_floor_tokens_s(*, rows: int, weight_bytes: float, page_bytes: float, read_bytes_s: float) -> float:
    """Tokens a second of a batch whose steps do nothing but read the weights once and each row's pages.

    Args:
        rows: of the batch.
        weight_bytes: that a step reads.
        page_bytes: of one row.
        read_bytes_s: that one thread reads.
    """
    return rows * read_bytes_s / (weight_bytes + rows * page_bytes)


def difference(before: Mapping[str, object], after: Mapping[str, object], name: str) -> float:
    """How much a counter grew."""
    return number(after, name) - number(before, name)


def number(facts: Mapping[str, object], name: str) -> float:
    """A number among facts, 0 when it is not there."""
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def middle(values: Sequence[float | None]) -> float | None:
    """The median of what was measured; None when nothing was."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratio(over: float | None, under: float | None) -> float | None:
    """A quotient, None when a part is missing."""
    return over / under if over is not None and under else None


__all__ = [
    "Figure",
    "SwapSeconds",
    "Turn",
    "chunk_s",
    "decode_floor_tokens_s",
    "decode_tokens_s",
    "difference",
    "engine_share",
    "first_tokens_in_chunks",
    "hidden_share",
    "middle",
    "number",
    "ratio",
    "share_beside",
    "swap_seconds",
    "texts_per_s",
    "whole_tokens_s",
]
