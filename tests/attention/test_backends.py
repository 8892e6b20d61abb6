"""Every backend and strategy against the reference, over formats, shapes, masks, batches; and peak memory."""

from __future__ import annotations

import tracemalloc
import types

import mlx.core as mx
import numpy as np
import pytest

from kvd.attention import (
    AttentionBackend,
    AttentionOutput,
    MlxBackend,
    ReferenceBackend,
    Row,
    Run,
    device_tiles,
    host_tiles,
    merge,
    mlx_backend,
)
from kvd.attention.masks import TileSpan, hidden, visible_range
from kvd.quant.spec import PAGE_TOKENS, LayerFormat, SideFormat
from tests.attention.pages import LAYER, Pages, cpu_backend

SHAPES = [(9, 3, 64, 64), (4, 1, 256, 256), (4, 4, 192, 128), (6, 2, 96, 64), (2, 2, 64, 64)]
"""(query heads, KV heads, k_dim, v_dim): SmolLM2, Gemma 3 270M, MLA-like, odd widths, MHA."""


@pytest.fixture(params=["host", "bare", "device", "packed", "cpu"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """The mlx backend in each strategy (`packed` and `bare` never dequantise); compiled kernels."""
    if request.param == "cpu":
        return cpu_backend()
    if request.param == "packed":
        plain = device_tiles.DeviceState.__init__

        def always_packed(self: device_tiles.DeviceState, *args: object, **options: object) -> None:
            plain(self, *args, **(options | {"packed": True}))  # type: ignore[arg-type]

        monkeypatch.setattr(device_tiles.DeviceState, "__init__", always_packed)
    if request.param == "bare":
        usual = host_tiles.HostState.__init__

        def always_bare(self: host_tiles.HostState, *args: object, **options: object) -> None:
            usual(self, *args, **(options | {"bare": True}))  # type: ignore[arg-type]

        monkeypatch.setattr(host_tiles.HostState, "__init__", always_bare)
    return MlxBackend("host" if request.param in ("host", "bare") else "device")


def check(mine: AttentionOutput, right: AttentionOutput, tolerance: float = 5e-5) -> None:
    """Outputs and log-sum-exps agree."""
    np.testing.assert_allclose(np.array(mine.out), np.array(right.out), atol=tolerance)
    np.testing.assert_allclose(np.array(mine.lse), np.array(right.lse), atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["q4", "k8v4", "q4c"])
@pytest.mark.parametrize("length", [1, 40])
def test_agrees_with_the_reference(
    backend: AttentionBackend, shape: tuple[int, int, int, int], name: str, length: int
) -> None:
    """One query and a chunk over a page border agree with float64 for every head layout and format."""
    heads, kv_heads, k_dim, v_dim = shape
    pages = Pages(kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim)
    segment = pages.segment(2 * PAGE_TOKENS + 21, name)
    q = pages.queries(heads, length)
    arguments = {"layer_index": LAYER, "rows": (Row((segment,), segment.tokens - length),), "scale": k_dim**-0.5}
    check(backend.attend(pages.pool, q, **arguments), ReferenceBackend().attend(pages.pool, q, **arguments))


@pytest.mark.parametrize("window", [1, 100, 256, 700])
@pytest.mark.parametrize("length", [1, 33, 300])
@pytest.mark.parametrize("mapped_from", [0, 1])
def test_windows(backend: AttentionBackend, window: int, length: int, mapped_from: int) -> None:
    """P31: a sliding window hides older tokens, also when their pages are not mapped at all."""
    pages = Pages()
    tokens = 1100
    start = mapped_from * PAGE_TOKENS
    if start > max(0, tokens - length - window + 1):
        start = 0
    segment = pages.segment(tokens - start, positions_start=start)
    q = pages.queries(4, length)
    arguments = {
        "layer_index": LAYER,
        "rows": (Row((segment,), tokens - length),),
        "scale": 0.125,
        "window": window,
    }
    check(backend.attend(pages.pool, q, **arguments), ReferenceBackend().attend(pages.pool, q, **arguments))


@pytest.mark.parametrize("length", [64, 513, 700])
def test_prefill_blocks_and_tiles(backend: AttentionBackend, length: int) -> None:
    """Chunks longer than a query block, from an empty context and after one, agree at every query."""
    pages = Pages()
    for past in (0, 130, 900):
        segment = pages.segment(past + length)
        q = pages.queries(4, length)
        arguments = {"layer_index": LAYER, "rows": (Row((segment,), past),), "scale": 0.125}
        check(backend.attend(pages.pool, q, **arguments), ReferenceBackend().attend(pages.pool, q, **arguments))


def test_segments_of_different_formats_merge(backend: AttentionBackend) -> None:
    """Raw, conditioned and 2-bit segments of one row merge by true log-sum-exp: centre terms are added back."""
    pages = Pages()
    segments = (
        pages.segment(256, "q4"),
        pages.segment(300, "q4c", positions_start=256),
        pages.segment(77, "q2", positions_start=556),
        pages.segment(60, "q4c", positions_start=633),
    )
    q = pages.queries(6, 20)
    arguments = {"layer_index": LAYER, "rows": (Row(segments, 673),), "scale": 0.2}
    check(backend.attend(pages.pool, q, **arguments), ReferenceBackend().attend(pages.pool, q, **arguments))


@pytest.mark.parametrize("name", ["q4", "q4c"])
def test_sinks_compare_with_true_scores(backend: AttentionBackend, name: str) -> None:
    """A sink takes weight from every query, also when keys are conditioned and scores lack their centre term."""
    pages = Pages()
    segment = pages.segment(400, name)
    q = pages.queries(4, 3)
    sinks = mx.array([0.0, 5.0, -3.0, 9.0])
    arguments = {"layer_index": LAYER, "rows": (Row((segment,), 397),), "scale": 0.125, "sinks": sinks}
    check(backend.attend(pages.pool, q, **arguments), ReferenceBackend().attend(pages.pool, q, **arguments))


def test_queries_that_see_nothing_give_zeros(backend: AttentionBackend) -> None:
    """A segment wholly outside the window contributes nothing: output 0, lse -inf, never NaN; merging ignores it."""
    pages = Pages()
    old, new = pages.segment(256), pages.segment(300, positions_start=256)
    q = pages.queries(4, 40)
    arguments = {"layer_index": LAYER, "scale": 0.125, "window": 50}
    alone = backend.attend(pages.pool, q, rows=(Row((old,), 516),), **arguments)
    assert not np.array(alone.out).any()
    assert np.isneginf(np.array(alone.lse)).all()
    both = backend.attend(pages.pool, q, rows=(Row((old, new), 516),), **arguments)
    check(both, backend.attend(pages.pool, q, rows=(Row((new,), 516),), **arguments))


def test_large_scores_do_not_overflow(backend: AttentionBackend) -> None:
    """Scores in the hundreds give finite results equal to the reference."""
    pages = Pages()
    segment = pages.segment(600, spread=30.0)
    q = pages.queries(4, 5) * 10
    arguments = {"layer_index": LAYER, "rows": (Row((segment,), 595),), "scale": 0.125}
    mine = backend.attend(pages.pool, q, **arguments)
    check(mine, ReferenceBackend().attend(pages.pool, q, **arguments), tolerance=5e-2)
    assert np.isfinite(np.array(mine.out)).all()


@pytest.mark.parametrize("heads", [2, 6])
def test_batch_rows_equal_single_rows(backend: AttentionBackend, heads: int) -> None:
    """P28, failure "batch hangs": rows of other lengths and formats in one call give each row's own bits, evaluated."""
    pages = Pages()
    rows = tuple(
        Row((pages.segment(tokens, name),), tokens - 2) for tokens, name in ((700, "q4"), (2, "k8v4"), (257, "q4c"))
    )
    q = pages.queries(heads, 2, batch=3)
    together = backend.attend(pages.pool, q, layer_index=LAYER, rows=rows, scale=0.125)
    for index, row in enumerate(rows):
        alone = backend.attend(pages.pool, q[index : index + 1], layer_index=LAYER, rows=(row,), scale=0.125)
        np.testing.assert_array_equal(np.array(together.out[index]), np.array(alone.out[0]))
        np.testing.assert_array_equal(np.array(together.lse[index]), np.array(alone.lse[0]))


def test_results_do_not_read_pages_later(backend: AttentionBackend) -> None:
    """Failure "corrupted quantisation": overwriting frames after the call changes nothing; no lazy reader is left."""
    pages = Pages()
    segment = pages.segment(300)
    q = pages.queries(4, 2)
    result = backend.attend(pages.pool, q, layer_index=LAYER, rows=(Row((segment,), 298),), scale=0.125)
    before = np.array(result.out)
    for frame in segment.block_table:
        pages.pool.view(frame)[:] = 255
    other = backend.attend(pages.pool, -q, layer_index=LAYER, rows=(Row((segment,), 298),), scale=0.125)
    mx.eval(other)
    np.testing.assert_array_equal(np.array(result.out), before)


def test_merge_is_softmax_over_the_union() -> None:
    """Merging halves of the keys equals attention over all of them; a single part is returned as it is."""
    pages = Pages()
    whole = pages.segment(512)
    halves = [
        Row((type(whole)(whole.block_table[i : i + 1], (Run(256 * i, 256),), whole.layer_format),), 508) for i in (0, 1)
    ]
    q = pages.queries(4, 4)
    backend = ReferenceBackend()
    parts = [backend.attend(pages.pool, q, layer_index=LAYER, rows=(row,), scale=0.125) for row in halves]
    check(merge(parts), backend.attend(pages.pool, q, layer_index=LAYER, rows=(Row((whole,), 508),), scale=0.125), 1e-6)
    assert merge(parts[:1]) is parts[0]


def test_outputs_have_the_queries_dtype(backend: AttentionBackend) -> None:
    """Half-precision queries get half-precision outputs; log-sum-exps are float32."""
    pages = Pages()
    segment = pages.segment(100)
    q = pages.queries(4, 2).astype(mx.bfloat16)
    result = backend.attend(pages.pool, q, layer_index=LAYER, rows=(Row((segment,), 98),), scale=0.125)
    assert (result.out.dtype, result.lse.dtype) == (mx.bfloat16, mx.float32)


CONTEXT, CHUNK, HEADS = 8192, 512, 8
NAIVE_BYTES = HEADS * CHUNK * CONTEXT * 4
"""One float32 score matrix of the whole context: 134 MB."""


def test_device_prefill_never_holds_a_score_matrix() -> None:
    """P24: at 8K context the peak of mlx memory stays under a fifth of one [heads, chunk, context] matrix."""
    pages = Pages()
    segment = pages.segment(CONTEXT)
    q = pages.queries(HEADS, CHUNK)
    mx.eval(q)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    backend = MlxBackend("device")
    backend.attend(pages.pool, q, layer_index=LAYER, rows=(Row((segment,), CONTEXT - CHUNK),), scale=0.125)
    assert mx.get_peak_memory() - before < NAIVE_BYTES / 5


@pytest.mark.parametrize("name", ["host", "cpu"])
def test_host_prefill_never_holds_a_score_matrix(name: str) -> None:
    """P24: the same for memory taken by numpy, and mlx memory grows by hardly more than the output."""
    backend = cpu_backend() if name == "cpu" else MlxBackend("host")
    pages = Pages()
    segment = pages.segment(CONTEXT)
    q = pages.queries(HEADS, CHUNK)
    mx.eval(q)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    try:
        backend.attend(pages.pool, q, layer_index=LAYER, rows=(Row((segment,), CONTEXT - CHUNK),), scale=0.125)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < NAIVE_BYTES / 10
    assert mx.get_peak_memory() - before < NAIVE_BYTES / 10


def test_the_naive_way_breaks_the_bound() -> None:
    """The bound of the two tests above means something: plain attention exceeds it."""
    q = mx.random.normal((1, HEADS, CHUNK, 64))
    k = mx.random.normal((1, HEADS, CONTEXT, 64))
    mx.eval(q, k)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval((q @ k.swapaxes(-1, -2)).max(axis=-1))
    assert mx.get_peak_memory() - before > NAIVE_BYTES / 5


@pytest.mark.parametrize("window", [None, 1, 40, 300])
def test_visible_ranges_match_the_mask(window: int | None) -> None:
    """Tokens outside [low, high) are hidden from all queries; without `masked` all inside are visible to all."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        query_start, queries = int(rng.integers(0, 1000)), int(rng.integers(1, 80))
        tile_start, tokens = int(rng.integers(0, 1000)), int(rng.integers(1, 400))
        span = TileSpan(0, tokens, tile_start)
        low, high, masked = visible_range(span, query_start, queries, window)
        unseen = hidden(span, 0, tokens, query_start, queries, window)
        seen_by_some = np.flatnonzero(~unseen.all(axis=0))
        assert set(seen_by_some) <= set(range(low, high))
        if low < high and not masked:
            assert not unseen[:, low:high].any()


def test_short_steps_take_few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short step over 4K tokens folds one tile on a device and a handful on the host; prefill takes eight."""
    folds: list[tuple[int, int]] = []
    for state in (mlx_backend.HostState, mlx_backend.DeviceState):
        original = state.fold

        def counted(self, block, low, high, mask, original=original):
            folds.append((low, high))
            original(self, block, low, high, mask)

        monkeypatch.setattr(state, "fold", counted)
    pages = Pages()
    segment = pages.segment(4096)
    for strategy, length, most in (("device", 16, 1), ("host", 16, 4), ("host", 64, 8)):
        folds.clear()
        q = pages.queries(4, length)
        MlxBackend(strategy).attend(
            pages.pool, q, layer_index=LAYER, rows=(Row((segment,), 4096 - length),), scale=0.125
        )
        assert len(folds) <= most


@pytest.mark.parametrize("has_metal", [True, False])
def test_packed_products_are_for_metal(monkeypatch: pytest.MonkeyPatch, has_metal: bool) -> None:
    """With CUDA mlx's product with several packed matrices is wrong: few queries take it on Metal only."""
    gpu = types.SimpleNamespace(type=mx.DeviceType.gpu)
    door = types.SimpleNamespace(
        **(vars(mx) | {"default_device": lambda: gpu, "metal": types.SimpleNamespace(is_available=lambda: has_metal)})
    )
    monkeypatch.setattr(device_tiles, "mx", door)
    layer = LayerFormat(SideFormat(8, 64), SideFormat(4, 64))
    state = device_tiles.DeviceState(mx.zeros((1, 4, 1, 64)), layer, 2, 64, 1.0, 1)
    assert state._packed is has_metal
