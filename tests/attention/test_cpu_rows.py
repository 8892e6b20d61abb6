"""One call for the rows of a batch: each row gets what it would get alone, whoever else is there, on any threads."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from kvd.attention import MlxBackend, ReferenceBackend, Row, Segment, cpu_rows
from tests.attention.pages import LAYER, Pages, cpu_backend

LENGTHS = [1, 255, 256, 257, 700, 40, 511, 900]
SHAPES = [(2, 1, 64, 64), (1, 2, 64, 64), (2, 3, 64, 64), (1, 4, 256, 256), (2, 5, 64, 64), (1, 8, 96, 64)]
"""KV heads, query heads of each, widths of K and V; with 6 and 7 more, all GQA ratios to 8."""


def batch_of(pages: Pages, name: str, *, lengths: list[int] = LENGTHS, alike: bool = True) -> list[Row]:
    """Rows of random tokens; the last one is the query's own."""
    segments = [pages.segment(tokens, name) for tokens in lengths]
    if alike:
        segments = [replace(each, conditioning=segments[0].conditioning) for each in segments]
    return [Row((segment,), segment.tokens - 1) for segment in segments]


def queries_of(rows: int, heads: int, dim: int, length: int = 1) -> mx.array:
    """Random mx [rows, heads, length, dim]."""
    return mx.array(np.random.default_rng(7).standard_normal((rows, heads, length, dim), dtype=np.float32))


@pytest.mark.parametrize("name", ["q4", "k8v4", "q4c", "q8", "q2"])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 6, 64, 64), (1, 7, 64, 64)], ids=str)
def test_rows_are_what_they_are_alone(name: str, shape: tuple[int, int, int, int]) -> None:
    """1 to 8 rows of unequal lengths: `cpu` gives each the very bits it gets alone, and agrees with the reference."""
    kv_heads, repeats, k_dim, v_dim = shape
    pages = Pages(kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim)
    rows, queries = batch_of(pages, name), queries_of(len(LENGTHS), kv_heads * repeats, k_dim)
    backend = cpu_backend()
    arguments = {"layer_index": LAYER, "scale": k_dim**-0.5}
    right = ReferenceBackend().attend(pages.pool, queries, rows=rows, **arguments)
    alone = [
        backend.attend(pages.pool, queries[number : number + 1], rows=rows[number : number + 1], **arguments)
        for number in range(len(rows))
    ]
    for count in (1, 2, 3, 5, 8):
        mine = backend.attend(pages.pool, queries[:count], rows=rows[:count], **arguments)
        for number in range(count):
            np.testing.assert_array_equal(np.array(mine.out[number]), np.array(alone[number].out[0]))
            np.testing.assert_array_equal(np.array(mine.lse[number]), np.array(alone[number].lse[0]))
        np.testing.assert_allclose(np.array(mine.out), np.array(right.out[:count]), atol=2e-5)
        np.testing.assert_allclose(np.array(mine.lse), np.array(right.lse[:count]), atol=2e-5)


@pytest.mark.parametrize("backend", [ReferenceBackend(), MlxBackend()], ids=["reference", "mlx"])
def test_other_backends_keep_rows_apart(backend: ReferenceBackend | MlxBackend) -> None:
    """Row equality holds to the bit for the oracle and the portable backend too."""
    pages = Pages()
    rows, queries = batch_of(pages, "q4", alike=False), queries_of(len(LENGTHS), 6, 64)
    whole = backend.attend(pages.pool, queries, layer_index=LAYER, rows=rows, scale=0.1)
    for number, row in enumerate(rows):
        one = backend.attend(pages.pool, queries[number : number + 1], layer_index=LAYER, rows=[row], scale=0.1)
        np.testing.assert_array_equal(np.array(whole.out[number]), np.array(one.out[0]))


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("length", [1, 2])
def test_windows_sinks_and_two_queries(window: int | None, length: int) -> None:
    """Sliding rows read only the pages of their window; sinks join every row's softmax."""
    pages, sinks = Pages(), mx.array([0.5, -1.0, 2.0, 0.0])
    rows = [replace(row, query_start=max(0, row.query_start - length + 1)) for row in batch_of(pages, "q4c")[1:]]
    queries = queries_of(len(rows), 4, 64, length)
    arguments = {"layer_index": LAYER, "rows": rows, "scale": 0.2, "window": window, "sinks": sinks}
    mine = cpu_backend().attend(pages.pool, queries, **arguments)
    right = ReferenceBackend().attend(pages.pool, queries, **arguments)
    for a, b in zip(mine, right, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=2e-5)


def test_rows_of_several_formats_and_constants_share_a_call() -> None:
    """Rows that are not alike, with other formats, constants, or nothing to see in a tail, are computed one by one."""
    pages = Pages()
    segments: list[Segment] = [pages.segment(300, name) for name in ("q4", "q4c", "q4c", "q8")]
    segments.append(pages.with_tail(pages.segment(270, "q4"), 20))
    rows, queries = [Row((each,), each.tokens - 1) for each in segments], queries_of(5, 4, 64)
    mine = cpu_backend().attend(pages.pool, queries, layer_index=LAYER, rows=rows, scale=0.1)
    right = ReferenceBackend().attend(pages.pool, queries, layer_index=LAYER, rows=rows, scale=0.1)
    np.testing.assert_allclose(np.array(mine.out), np.array(right.out), atol=2e-5)


def test_pieces_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one page merge to the whole; the number of threads does not change a bit."""
    pages = Pages(kv_heads=3)
    rows, queries = batch_of(pages, "q4"), queries_of(len(LENGTHS), 9, 64)
    arguments = {"layer_index": LAYER, "rows": rows, "scale": 0.1}
    whole = cpu_backend().attend(pages.pool, queries, **arguments)
    monkeypatch.setattr(cpu_rows, "PIECE_PAGES", 1)
    monkeypatch.setattr(cpu_rows, "PARALLEL_VALUES", 0)
    results = []
    for threads in (1, 2, 5):
        backend = cpu_backend()
        monkeypatch.setattr(backend, "_threads", threads)
        results.append(backend.attend(pages.pool, queries, **arguments))
    for each in results[1:]:
        np.testing.assert_array_equal(np.array(each.out), np.array(results[0].out))
        np.testing.assert_array_equal(np.array(each.lse), np.array(results[0].lse))
    np.testing.assert_allclose(np.array(results[0].out), np.array(whole.out), atol=1e-6)
    np.testing.assert_allclose(np.array(results[0].lse), np.array(whole.lse), atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_every_token_is_dealt_out_once(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Shares hold each KV head of each piece once, pieces cover what each query sees, and threads have equal parts."""
    monkeypatch.setattr(cpu_rows, "PARALLEL_VALUES", 0)
    spans = [
        cpu_rows.Span(0, 300, 20_000),
        cpu_rows.Span(79, 0, 1),
        cpu_rows.Span(80, 5, 5),
        cpu_rows.Span(80, 0, 9000),
    ]
    cut = cpu_rows.cut(spans, kv_heads=2, values=128, threads=threads)
    for query, (begin, low, high) in enumerate(spans):
        mine = [piece for piece in cut.pieces if piece.query == query]
        tokens = [
            (piece.page - begin + page) * 256 + token
            for piece in mine
            for page in range(piece.pages)
            for token in range(*cut.seen[piece.seen + page])
        ]
        assert mine
        assert tokens == list(range(low, high))
    dealt = sorted(
        (piece, head) for share in cut.shares for piece, first, n in share for head in range(first, first + n)
    )
    assert dealt == [(piece, head) for piece in range(len(cut.pieces)) for head in range(2)]
    loads = [sum(cut.pieces[piece].pages * n for piece, _, n in share) for share in cut.shares]
    assert max(loads) <= sum(loads) / len(loads) + cpu_rows.PIECE_PAGES


def test_a_failure_on_a_thread_is_raised() -> None:
    """What a thread raises reaches the caller after all threads have ended."""

    def work(number: int) -> None:
        if number == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cpu_rows.run_threads(work, 3)
