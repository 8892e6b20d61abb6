"""Segments whose tokens do not follow each other, and open tails in arrays of their own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from kvd.attention import (
    AttentionBackend,
    AttentionOutput,
    HostPages,
    MlxBackend,
    ReferenceBackend,
    Row,
    Run,
    Segment,
    host_pages,
    merge,
)
from kvd.attention.gather import dequantised
from kvd.attention.masks import hidden, positions_of, tile_spans, visible_range
from kvd.attention.reference import raw_keys
from kvd.errors import InternalError
from kvd.store.frame_pool import FramePool
from tests.attention.pages import LAYER, Pages, cpu_backend, runs_of

SCALE = 0.125


@pytest.fixture(params=["host", "device", "reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Every backend that runs here."""
    if request.param == "cpu":
        return cpu_backend()
    return ReferenceBackend() if request.param == "reference" else MlxBackend(request.param)


def check(mine: AttentionOutput, right: AttentionOutput) -> None:
    """Outputs and log-sum-exps agree."""
    np.testing.assert_allclose(np.array(mine.out), np.array(right.out), atol=5e-5)
    np.testing.assert_allclose(np.array(mine.lse), np.array(right.lse), atol=5e-5)


def attend(
    backend: AttentionBackend, pages: Pages, q: mx.array, segments: tuple[Segment, ...], **other: Any
) -> AttentionOutput:
    """Attention of one row whose queries are the last positions of its segments."""
    end = max(segment.runs[-1].start + segment.runs[-1].tokens for segment in segments)
    row = Row(segments, end - q.shape[2])
    return backend.attend(pages.pool, q, layer_index=LAYER, rows=(row,), scale=SCALE, **other)


def split(tokens: int, seed: int = 0) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of a high and a low precision segment: runs of 1 to 60 tokens in turn, the last ones alternating."""
    rng = np.random.default_rng(seed)
    high = np.zeros(tokens, bool)
    at = 0
    while at < tokens - 20:
        low_run, high_run = rng.integers(1, 60, 2)
        high[at + low_run : at + low_run + high_run] = True
        at += low_run + high_run
    high[-20:] = np.arange(20) % 2 == 0
    return np.flatnonzero(high), np.flatnonzero(~high)


def in_order(pages: Pages, q: mx.array, segments: tuple[Segment, ...], window: int | None) -> npt.NDArray[np.float64]:
    """Plain softmax attention over all tokens sorted by position: float64 [heads, L, v_dim]."""
    positions = np.concatenate([positions_of(segment.runs) for segment in segments])
    order = np.argsort(positions)
    np.testing.assert_array_equal(positions[order], np.arange(len(positions)))
    keys = np.concatenate([raw_keys(pages.pool, s, LAYER) for s in segments], axis=1)[:, order]
    values = [dequantised(pages.pool, s, LAYER, "v", 0, s.tokens) for s in segments]
    v = np.concatenate(values, axis=1)[:, order].astype(np.float64)
    x = np.array(q[0]).astype(np.float64)
    out = np.zeros((*x.shape[:2], v.shape[-1]))
    for head in range(x.shape[0]):
        kv = head * len(keys) // x.shape[0]
        for i in range(x.shape[1]):
            t = len(order) - x.shape[1] + i
            seen = slice(0 if window is None else max(0, t - window + 1), t + 1)
            weights = np.exp(SCALE * keys[kv, seen] @ x[head, i])
            out[head, i] = weights @ v[kv, seen] / weights.sum()
    return out


# ---- interleaved segments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 300])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("formats", [("q8", "q4"), ("k8v4", "q4c")], ids="/".join)
def test_high_and_low_segments_are_one_sequence(
    backend: AttentionBackend, formats: tuple[str, str], window: int | None, length: int
) -> None:
    """A split into two precisions, with tokens of the chunk in both, equals softmax over the tokens in their order."""
    pages = Pages()
    picks = split(900)
    segments = tuple(
        pages.segment(len(positions), name, runs=runs_of(positions))
        for name, positions in zip(formats, picks, strict=True)
    )
    assert all(len(segment.runs) > 10 for segment in segments)
    q = pages.queries(4, length)
    mine = attend(backend, pages, q, segments, window=window)
    np.testing.assert_allclose(np.array(mine.out[0]), in_order(pages, q, segments, window), atol=5e-5)
    check(mine, attend(ReferenceBackend(), pages, q, segments, window=window))


@pytest.mark.parametrize("length", [1, 20, 600])
@pytest.mark.parametrize("name", ["q4", "q4c"])
def test_splitting_a_segment_changes_nothing(backend: AttentionBackend, name: str, length: int) -> None:
    """The same bytes in one segment, or spread over two and merged by log-sum-exp, give the same attention."""
    pages = Pages()
    whole = pages.segment(1200, name)
    parts = tuple(pages.picked(whole, tokens) for tokens in split(1200, seed=1))
    q = pages.queries(4, length)
    right = attend(backend, pages, q, (whole,))
    check(attend(backend, pages, q, parts), right)
    row_start = 1200 - length
    alone = [
        backend.attend(pages.pool, q, layer_index=LAYER, rows=(Row((part,), row_start),), scale=SCALE) for part in parts
    ]
    check(merge(alone), right)


def test_a_later_token_of_a_short_segment_is_hidden(backend: AttentionBackend) -> None:
    """A token that is number 3 of its segment but 250 of the sequence is not seen by query 240."""
    pages = Pages()
    low = pages.segment(251, runs=(Run(0, 250), Run(251, 1)))
    high = pages.segment(1, "q8", runs=(Run(250, 1),))
    q = pages.queries(4, 12)
    both = attend(backend, pages, q, (low, high))
    before = pages.picked(low, np.arange(250))
    without = backend.attend(pages.pool, q[:, :, :10], layer_index=LAYER, rows=(Row((before,), 240),), scale=SCALE)
    np.testing.assert_allclose(np.array(both.out[:, :, :10]), np.array(without.out), atol=5e-5)
    assert np.abs(np.array(both.out - attend(backend, pages, q, (low,)).out))[:, :, 10:].max() > 1e-3


def test_visible_ranges_of_scattered_tiles_match_the_mask() -> None:
    """Tokens outside [low, high) are hidden from all queries; without `masked` all inside are visible to all."""
    rng = np.random.default_rng(0)
    pages = Pages()
    scattered = 0
    for _ in range(60):
        count = int(rng.integers(1, 700))
        positions = np.sort(rng.choice(count + int(rng.integers(0, 400)), count, replace=False))
        segment = pages.segment(count, runs=runs_of(positions))
        window = [None, 1, 40, 300][int(rng.integers(4))]
        start, queries = int(rng.integers(0, 1000)), int(rng.integers(1, 80))
        ages = np.arange(start, start + queries)[:, None] - positions[None]
        unseen = (ages < 0) if window is None else (ages < 0) | (ages >= window)
        seen = np.zeros(count, bool)
        first = 0 if window is None else start - window + 1
        for span in tile_spans(segment, 256, first, start + queries - 1):
            scattered += span.positions is not None
            low, high, masked = visible_range(span, start, queries, window)
            seen[span.start + low : span.start + max(low, high)] = True
            part = unseen[:, span.start + low : span.start + high]
            if low < high:
                np.testing.assert_array_equal(hidden(span, low, high, start, queries, window), part)
                assert masked or not part.any()
        assert not (~unseen).any(axis=0)[~seen].any()
    assert scattered > 20


def test_runs_ascend() -> None:
    """Runs that overlap or go back, or a tail longer than all tokens, are refused."""
    pages = Pages()
    good = pages.segment(100)
    for runs in ((Run(0, 60), Run(59, 40)), (Run(50, 50), Run(0, 50)), (Run(-1, 100),)):
        with pytest.raises(InternalError):
            Segment(good.block_table, runs, good.layer_format)
    tail = pages.with_tail(good, 40).tail
    with pytest.raises(InternalError):
        Segment(good.block_table, (Run(0, 39),), good.layer_format, tail=tail)


# ---- open tails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("tokens", "tail"), [(600, 88), (600, 30), (512 + 300, 300), (40, 40)])
@pytest.mark.parametrize("name", ["k8v4", "q4c"])
def test_a_tail_is_the_same_in_its_own_arrays(
    backend: AttentionBackend, name: str, tokens: int, tail: int, on_device: bool
) -> None:
    """The same bits whether the tail is in a frame or in numpy or mlx arrays; what lies beyond it is never read.

    Compiled kernels take a tail apart as a segment of its own and merge, which rounds differently; pools in host memory
    keep tails in frames.
    """
    tolerance = 1e-5 if backend.name == "cpu" else 0.0
    pages = Pages()
    segment = pages.segment(tokens, name)
    results = []
    queries = [pages.queries(4, length) for length in (1, 16, 40)]
    for each in (lambda: segment, lambda: pages.with_tail(segment, tail, on_device=on_device)):
        seen = each()
        results.append([attend(backend, pages, q, (seen,)) for q in queries])
    for framed, apart in zip(*results, strict=True):
        np.testing.assert_allclose(np.array(framed.out), np.array(apart.out), rtol=0, atol=tolerance)
        np.testing.assert_allclose(np.array(framed.lse), np.array(apart.lse), rtol=0, atol=tolerance)


def test_interleaved_segments_have_tails(backend: AttentionBackend) -> None:
    """Two precisions whose newest tokens, those of the chunk included, all lie in tails of their own."""
    pages = Pages()
    framed = tuple(
        pages.segment(len(positions), name, runs=runs_of(positions))
        for name, positions in zip(("q8", "q4c"), split(900, seed=2), strict=True)
    )
    q = pages.queries(4, 16)
    right = attend(backend, pages, q, framed)
    tails = tuple(pages.with_tail(segment, segment.tokens % 256) for segment in framed)
    check(attend(backend, pages, q, tails), right)


def test_an_empty_segment_counts_for_nothing(backend: AttentionBackend) -> None:
    """A precision that has no token yet, without pages or tail, does not disturb the other."""
    pages = Pages()
    full = pages.segment(100)
    empty = Segment((), (), full.layer_format)
    q = pages.queries(4, 3)
    check(
        attend(backend, pages, q, (full,)),
        backend.attend(pages.pool, q, layer_index=LAYER, rows=(Row((empty, full), 97),), scale=SCALE),
    )


# ---- handles --------------------------------------------------------------------------------------------------------


def test_pools_are_handles_that_backends_narrow(backend: AttentionBackend) -> None:
    """A pool that is not in host memory is refused in words; `FramePool` is host memory."""

    class Elsewhere:
        """A pool whose pages no backend here can read."""

        def layout(self, frame: int) -> None:
            """Says nothing."""

    pages = Pages()
    segment = pages.segment(10)
    assert isinstance(host_pages(FramePool(0)), HostPages)
    with pytest.raises(InternalError, match="Elsewhere are not in host memory"):
        backend.attend(Elsewhere(), pages.queries(4, 1), layer_index=LAYER, rows=(Row((segment,), 9),), scale=SCALE)
