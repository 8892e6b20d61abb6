"""Which decode kernel reads which pages for which row of a batch, and on which thread.

Theory of operation. A decode step has few queries, each of another row with pages and a length of its own. The kernel
takes a query, a stretch of pages and some KV heads. A query over many pages is cut into *pieces* of `PIECE_PAGES`,
whose results are merged by their sums; pieces, and where there is much to do their KV heads, are dealt out to threads,
the largest first. So the longest row does not decide alone how long a step takes. How a query is cut depends on its own
length only, and a piece is computed by one thread, in one order: results depend neither on the number of threads nor
on the other rows.

May import numpy, kvd.ids, kvd.quant.spec and kvd.attention.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.attention.interface import Row, Segment
from kvd.attention.masks import positions_of
from kvd.ids import FrameId
from kvd.quant.spec import PAGE_TOKENS, PageLayout

PIECE_PAGES: Final = 32
"""Pages of a piece: 8192 tokens take some hundred microseconds, far more than a call and its share of the merging."""

PARALLEL_VALUES: Final = 1 << 23
"""From so many key and value numbers on a decode step is spread over threads. One thread takes 0.7 ms for them,
starting another 0.05 ms where a core is free. Where none is, a second thread makes the step slower."""

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_PAGE_ADDRESSES: Final = 6 * 8
"""Bytes of a page's entry in a table."""


class Span(NamedTuple):
    """What one query sees.

    Attributes:
        page: column of the table where its row's pages begin.
        low: first token it sees, counted from there.
        high: one past the last.
    """

    page: int
    low: int
    high: int


class Piece(NamedTuple):
    """A stretch of pages of one query.

    Attributes:
        query: which.
        page: column of its first page in the table.
        pages: how many.
        seen: where its pages begin in `Pieces.seen`.
    """

    query: int
    page: int
    pages: int
    seen: int


class Pieces(NamedTuple):
    """A decode step, cut and dealt out.

    Attributes:
        pieces: in the order of queries, at least one for each.
        seen: int64 [pages of all pieces, 2]: which tokens of each page are attended to.
        queries: how many.
        shares: per thread, (piece, first KV head, KV heads).
    """

    pieces: tuple[Piece, ...]
    seen: Integers
    queries: int
    shares: tuple[tuple[tuple[int, int, int], ...], ...]


class StepPlan(NamedTuple):
    """What the layers of a cache group have in common while a step runs; valid while its frames stay where they are.

    Attributes:
        layout: of all pages.
        length: queries of each row.
        bases: int64 [rows' pages], where each row's frames begin in memory, row after row.
        ranges: per row, its part of `bases`.
        visible: per row, `visible`.
        pieces: for a decode step.
    """

    layout: PageLayout
    length: int
    bases: Integers
    ranges: tuple[slice, ...]
    visible: tuple[tuple[Integers, Integers], ...]
    pieces: Pieces | None


def visible(segment: Segment, query_start: int, queries: int, window: int | None) -> tuple[Integers, Integers]:
    """Which of the segment's tokens each query sees: int64 [queries] first and one past the last.

    Positions ascend within a segment, so what a query sees is one range of its tokens.
    """
    positions = np.arange(query_start, query_start + queries, dtype=np.int64)
    oldest = np.zeros(queries, np.int64) if window is None else positions - (window - 1)
    if len(segment.runs) == 1:
        start, tokens = segment.runs[0]
        high = np.minimum(np.maximum(positions + (1 - start), 0), tokens)
        return np.minimum(np.maximum(oldest - start, 0), high), high
    known = positions_of(segment.runs)
    high = np.searchsorted(known, positions, "right").astype(np.int64)
    return np.minimum(np.searchsorted(known, oldest).astype(np.int64), high), high


def plan_step(
    address: Callable[[FrameId], int],
    layout: PageLayout,
    rows: Sequence[Row],
    *,
    length: int,
    window: int | None,
    is_decode: bool,
    threads: int,
) -> StepPlan:
    """Plan a step of rows of one segment each, all in pages of `layout`, no open tails.

    Args:
        address: where a frame's memory begins.
        layout: of every page.
        rows: at least one.
        length: queries of each row.
        window: tokens a query sees.
        is_decode: cut it into pieces.
        threads: that may be used.
    """
    frames: list[FrameId] = []
    ranges: list[slice] = []
    seen: list[tuple[Integers, Integers]] = []
    spans: list[Span] = []
    for row in rows:
        (segment,) = row.segments
        begin = len(frames)
        frames += segment.block_table[: -(-segment.tokens // PAGE_TOKENS)]
        ranges.append(slice(begin, len(frames)))
        low, high = visible(segment, row.query_start, length, window)
        seen.append((low, high))
        spans += [Span(begin, int(a), int(b)) for a, b in zip(low, high, strict=True)] if is_decode else []
    values = layout.k_dim + layout.v_dim
    pieces = cut(spans, kv_heads=layout.kv_heads, values=values, threads=threads) if is_decode else None
    bases = np.array([address(frame) for frame in frames], np.int64)
    return StepPlan(layout, length, bases, tuple(ranges), tuple(seen), pieces)


def cut(spans: Sequence[Span], *, kv_heads: int, values: int, threads: int) -> Pieces:
    """Cut queries into pieces and deal them out.

    Args:
        spans: one per query.
        kv_heads: KV heads.
        values: numbers of a token and head, K and V.
        threads: that may be used.
    """
    pieces: list[Piece] = []
    seen: list[tuple[int, int]] = []
    for query, (begin, low, high) in enumerate(spans):
        first = low // PAGE_TOKENS
        stop = -(-high // PAGE_TOKENS) if low < high else first
        for page in range(first, max(stop, first + 1), PIECE_PAGES):
            count = min(PIECE_PAGES, stop - page)
            pieces.append(Piece(query, begin + page, count, len(seen)))
            seen += [
                (max(low - p * PAGE_TOKENS, 0), min(high - p * PAGE_TOKENS, PAGE_TOKENS))
                for p in range(page, page + count)
            ]
    is_long = len(seen) * PAGE_TOKENS * kv_heads * values >= PARALLEL_VALUES
    shares = _deal(pieces, kv_heads, threads if is_long else 1)
    return Pieces(tuple(pieces), np.array(seen, np.int64).reshape(-1, 2), len(spans), shares)


def _deal(pieces: Sequence[Piece], kv_heads: int, threads: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Everything in one share, or the KV heads of pieces in `threads` shares, the largest first to who has least."""
    if threads == 1:
        return (tuple((number, 0, kv_heads) for number in range(len(pieces))),)
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(min(threads, len(pieces) * kv_heads))]
    least = [(0, number) for number in range(len(shares))]
    for number in sorted(range(len(pieces)), key=lambda each: -pieces[each].pages):
        for head in range(kv_heads):
            load, share = heapq.heappop(least)
            shares[share].append((number, head, 1))
            heapq.heappush(least, (load + pieces[number].pages, share))
    return tuple(map(tuple, shares))


def decode(
    kernel: Callable[..., None],
    scratch_of: Callable[[int], int],
    pieces: Pieces,
    table: Integers,
    q: Floats,
    *,
    v_dim: int,
    factor: float,
) -> tuple[Floats, Floats, Floats]:
    """Attention of each query over its pages.

    Args:
        kernel: of `kvd.attention.cpu_decode`.
        scratch_of: address of a thread's scratch, by its number.
        pieces: see `cut`.
        table: int64 [kv_heads, pages, 6], C-contiguous; see the kernel's arguments.
        q: float32 [queries, heads, k_dim], C-contiguous.
        v_dim: width of a value.
        factor: of the scores, times log2(e).

    Returns:
        Output float32 [queries, heads, v_dim]; greatest scores (in powers of two) and sums of weights relative to them,
        [queries, heads].
    """
    heads, k_dim = q.shape[1:]
    kv_heads, pages, _ = table.shape
    repeats = heads // kv_heads
    out = np.empty((len(pieces.pieces), heads, v_dim), np.float32)
    top, total = np.empty((2, len(pieces.pieces), heads), np.float32)
    table_at, seen_at, q_at = table.ctypes.data, pieces.seen.ctypes.data, q.ctypes.data
    out_at, top_at, total_at = out.ctypes.data, top.ctypes.data, total.ctypes.data

    def work(thread: int) -> None:
        scratch = scratch_of(thread)
        for number, head, count in pieces.shares[thread]:
            query, page, stretch, seen = pieces.pieces[number]
            result = number * heads + head * repeats
            kernel(
                count,
                stretch,
                pages,
                table_at + (head * pages + page) * _PAGE_ADDRESSES,
                seen_at + seen * 16,
                q_at + (query * heads + head * repeats) * k_dim * 4,
                factor,
                scratch,
                out_at + result * v_dim * 4,
                top_at + result * 4,
                total_at + result * 4,
            )

    run_threads(work, len(pieces.shares))
    if len(pieces.pieces) == pieces.queries:
        return out, top, total
    return _merged(pieces, out, top, total)


def _merged(pieces: Pieces, out: Floats, top: Floats, total: Floats) -> tuple[Floats, Floats, Floats]:
    """Results of pieces to results of queries."""
    begins = [
        number for number, piece in enumerate(pieces.pieces) if not number or piece.query != _before(pieces, number)
    ]
    greatest = np.maximum.reduceat(top, begins)
    lengths = np.diff([*begins, len(pieces.pieces)])
    weights = total * np.exp2(top - greatest.repeat(lengths, 0))
    sums = np.add.reduceat(weights, begins)
    joined = np.add.reduceat(out * weights[..., None], begins) / sums[..., None]
    return joined.astype(np.float32), greatest, sums


def _before(pieces: Pieces, number: int) -> int:
    """The query of the piece before."""
    return pieces.pieces[number - 1].query


def run_threads(work: Callable[[int], None], threads: int) -> None:
    """`work` for each number below `threads`, one of them here; all have ended on return.

    Raises:
        BaseException: the first that any of them raised.
    """
    if threads == 1:
        work(0)
        return
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    others = [threading.Thread(target=guarded, args=(number,), name="kvd-attention") for number in range(1, threads)]
    started: list[threading.Thread] = []
    try:
        for other in others:
            other.start()
            started.append(other)
        guarded(0)
    finally:
        for other in started:
            other.join()
    if failures:
        raise failures[0]


__all__ = ["PIECE_PAGES", "Pieces", "Span", "StepPlan", "cut", "decode", "plan_step", "run_threads", "visible"]
