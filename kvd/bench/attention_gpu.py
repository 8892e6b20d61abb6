"""Speed of attention over packed pages on a GPU, against mlx's fused attention over bf16 arrays, in one run.

One decode query a row, the shape of Llama 3.1 8B (32 query heads, 8 KV heads of 128). Calls are chained (the output of
one is the query of the next) and rotate over several sets of pages, so that neither the cache of the chip nor idle
launches flatter a figure; each figure is the median of several chains. Beside it stands its floor: the bytes the call
must read, at the rate at which this device copies. May import mlx, numpy, kvd.attention, kvd.quant, kvd.ids.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from kvd.errors import InvalidParams
from kvd.ids import FrameId
from kvd.quant.spec import PAGE_TOKENS, LayerFormat, PageFormat, PageLayout, SideFormat

if TYPE_CHECKING:
    import mlx.core as mx

    from kvd.attention.interface import Row

QUERY_HEADS: Final = 32
KV_HEADS: Final = 8
WIDTH: Final = 128
HIGH_SHARE: Final = 0.3
"""Part of the tokens that the mixed format keeps in 4 bits; the rest has 2."""

CACHE_BYTES: Final = 200 << 20
"""Sets of pages rotate until they hold more than this: several times a GPU's second-level cache."""

_CHAINS: Final = 7
_CALLS: Final = 24
_CHUNK: Final = 4096


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Figures of one context length and batch.

    Attributes:
        tokens: context of each row.
        batch: rows.
        sdpa_us: mlx's fused attention over bf16 keys and values.
        times_us: of each page format.
        floors_us: of each page format, its bytes at the copy rate.
        sdpa_ratio: SDPA's time over each format's.
        floor_share: each format's floor over its time.
    """

    tokens: int
    batch: int
    sdpa_us: float
    times_us: dict[str, float]
    floors_us: dict[str, float]
    sdpa_ratio: dict[str, float]
    floor_share: dict[str, float]


@dataclass(frozen=True, slots=True)
class KernelReport:
    """All rows, and on what."""

    device: str
    copy_gigabytes_s: float
    append_us: float
    append_peak_bytes: int
    append_pool_bytes: int
    rows: tuple[KernelRow, ...]

    def facts(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return asdict(self)


def run_gpu_attention(lengths: Sequence[int], batches: Sequence[int], tell: Callable[[str], None]) -> KernelReport:
    """Measure every length and batch.

    Args:
        lengths: context lengths in tokens.
        batches: rows of a call.
        tell: progress, one line each.

    Raises:
        InvalidParams: this machine has no GPU that kvd has kernels for.
    """
    import mlx.core as mx

    if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
        raise InvalidParams("--device gpu needs an NVIDIA GPU and mlx's CUDA backend", parameter="device")
    mx.random.seed(7)
    rate = _copy_rate()
    append_us, peak, pool_bytes = _append_figures()
    rows = []
    for tokens in lengths:
        for batch in batches:
            tell(f"{batch} x {tokens}")
            rows.append(_row(tokens, batch, rate))
    return KernelReport(
        device=str(mx.device_info().get("device_name", "GPU")),
        copy_gigabytes_s=round(rate / 1e9),
        append_us=append_us,
        append_peak_bytes=peak,
        append_pool_bytes=pool_bytes,
        rows=tuple(rows),
    )


def _layout(bits: int) -> PageLayout:
    side = SideFormat(bits, 64)
    return PageLayout(
        layer_indices=(0,),
        kv_heads=KV_HEADS,
        k_dim=WIDTH,
        v_dim=WIDTH,
        page_format=PageFormat("bench", (LayerFormat(side, side),)),
    )


def _formats() -> dict[str, tuple[tuple[int, float], ...]]:
    """Page formats: bits and the part of the tokens that have them."""
    return {"q4": ((4, 1.0),), "q2": ((2, 1.0),), "q4+q2": ((4, HIGH_SHARE), (2, 1.0 - HIGH_SHARE))}


def _row(tokens: int, batch: int, rate: float) -> KernelRow:
    """One line of the table."""
    import mlx.core as mx

    query = mx.random.normal((batch, QUERY_HEADS, 1, WIDTH)).astype(mx.bfloat16)
    mx.eval(query)
    sdpa_us = _sdpa_us(query, tokens)
    times, floors = {}, {}
    for name, parts in _formats().items():
        n_bytes = 0
        for bits, share in parts:
            n_bytes += batch * int(tokens * share) * _layout(bits).token_bytes
        times[name] = _paged_us(query, tokens, parts, sets=max(1, min(8, -(-CACHE_BYTES // n_bytes))))
        floors[name] = round(1e6 * n_bytes / rate, 1)
        mx.clear_cache()
    return KernelRow(
        tokens=tokens,
        batch=batch,
        sdpa_us=sdpa_us,
        times_us=times,
        floors_us=floors,
        sdpa_ratio={name: round(sdpa_us / us, 2) for name, us in times.items()},
        floor_share={name: round(floors[name] / us, 2) for name, us in times.items()},
    )


def _sdpa_us(query: mx.array, tokens: int) -> float:
    """Microseconds of fused attention over bf16 arrays."""
    import mlx.core as mx

    shape = (query.shape[0], KV_HEADS, tokens, WIDTH)
    n_bytes = 4 * query.shape[0] * KV_HEADS * tokens * WIDTH
    sets = []
    for _ in range(max(1, min(8, -(-CACHE_BYTES // n_bytes)))):
        pair = [mx.random.normal(shape, dtype=mx.bfloat16) for _ in range(2)]
        mx.eval(pair)
        sets.append(pair)

    def call(q: mx.array, i: int) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, *sets[i % len(sets)], scale=WIDTH**-0.5)

    us = _chain_us(query, call)
    sets.clear()
    mx.clear_cache()
    return us


def _paged_us(query: mx.array, tokens: int, parts: Sequence[tuple[int, float]], *, sets: int) -> float:
    """Microseconds of the backend over pages."""
    from kvd.attention.cuda.backend import CudaBackend
    from kvd.attention.cuda.pool import DevicePool

    backend, pool = CudaBackend(), DevicePool(1 << 36)
    batches = [_rows(backend, pool, query.shape[0], tokens, parts) for _ in range(sets)]

    def call(q: mx.array, i: int) -> mx.array:
        return backend.attend(pool, q, layer_index=0, rows=batches[i % sets], scale=WIDTH**-0.5).out

    return _chain_us(query, call)


def _rows(backend: object, pool: object, batch: int, tokens: int, parts: Sequence[tuple[int, float]]) -> list[Row]:
    """Rows over fresh pages of random tokens, their frames interleaved over the rows."""
    import mlx.core as mx

    from kvd.attention.cuda.backend import CudaBackend
    from kvd.attention.cuda.kernels import Bits, Stream
    from kvd.attention.cuda.pool import DevicePool
    from kvd.attention.interface import Row, Run, Segment

    assert isinstance(backend, CudaBackend)
    assert isinstance(pool, DevicePool)
    segments: list[list[Segment]] = [[] for _ in range(batch)]
    start = 0
    for bits, share in parts:
        count = int(tokens * share)
        layout = _layout(bits)
        tables: list[list[FrameId]] = [[] for _ in range(batch)]
        for _ in range(-(-count // PAGE_TOKENS)):
            for table in tables:
                frame = FrameId(len(pool))
                pool.create(frame, layout)
                table.append(frame)
        frozen = [tuple(table) for table in tables]
        for at_row, pages in enumerate(frozen):
            frames = backend.frame_table(pool, [pages])
            for first in range(0, count, _CHUNK):
                n = min(_CHUNK, count - first)
                k, v = (mx.random.normal((1, KV_HEADS, n, WIDTH), dtype=mx.bfloat16) for _ in range(2))
                at = backend.whole_numbers([first])
                pool.append(k, v, Bits(bits, bits), Stream(frames, pool.places(layout, 0), at), at)
            pool.check_appended()
            segments[at_row].append(Segment(pages, (Run(start, count),), layout.page_format.layers[0]))
        start += count
    return [Row(tuple(each), start - 1) for each in segments]


def _chain_us(query: mx.array, step: Callable[[mx.array, int], mx.array]) -> float:
    """Median microseconds a call, of several chains of dependent calls."""
    import mlx.core as mx

    times = []
    for chain in range(_CHAINS + 2):
        q = query
        mx.synchronize()
        for i in range(_CALLS):
            q = step(q, i)
        began = time.perf_counter()
        mx.eval(q)
        if chain >= 2:
            times.append((time.perf_counter() - began) / _CALLS)
    return round(1e6 * statistics.median(times), 1)


def _copy_rate() -> float:
    """Bytes a second that the device copies, reads and writes both counted."""
    import mlx.core as mx

    source = mx.random.randint(0, 1 << 30, (1 << 29,), dtype=mx.int32)
    mx.eval(source)
    best = 0.0
    for _ in range(5):
        mx.synchronize()
        began = time.perf_counter()
        copies = [source + 1 for _ in range(4)]
        mx.eval(copies)
        best = max(best, 4 * 2 * source.nbytes / (time.perf_counter() - began))
        del copies
    return best


def _append_figures() -> tuple[float, int, int]:
    """(microseconds an append in a chain, most memory beyond the start in 10,000 appends, bytes of the pool)."""
    import mlx.core as mx

    from kvd.attention.cuda.backend import CudaBackend
    from kvd.attention.cuda.kernels import Bits, Stream
    from kvd.attention.cuda.pool import DevicePool

    backend, pool, layout = CudaBackend(), DevicePool(1 << 31), _layout(4)
    frames = tuple(FrameId(n) for n in range(40))
    for frame in frames:
        pool.create(frame, layout)
    table, places = backend.frame_table(pool, [frames]), pool.places(layout, 0)
    k = mx.random.normal((1, KV_HEADS, 1, WIDTH)).astype(mx.bfloat16)
    slots = [mx.array([n, 0, 0, 0], mx.int32) for n in range(10_000)]
    mx.eval(k, slots)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    times = []
    for first in range(0, 10_000, 100):
        for n in range(first, first + 100):
            pool.append(k, k, Bits(4, 4), Stream(table, places, slots[n]), slots[n])
        began = time.perf_counter()
        pool.check_appended()
        times.append((time.perf_counter() - began) / 100)
    return round(1e6 * statistics.median(times), 1), mx.get_peak_memory() - before, pool.slab_bytes


def table_lines(report: KernelReport) -> list[str]:
    """The report as text."""
    names = list(_formats())
    lines = [
        f"{report.device}, copies {report.copy_gigabytes_s:.0f} GB/s; an append takes {report.append_us} us a layer, "
        f"{report.append_peak_bytes} bytes beside a pool of {report.append_pool_bytes} in 10,000 steps",
        "microseconds a call, one query a row, 32/8 heads of 128: time (times SDPA's speed, share of the floor)",
        f"{'tokens':>7} {'rows':>4} {'bf16 SDPA':>9}  " + "  ".join(f"{name:>24}" for name in names),
    ]
    for row in report.rows:
        cells = [f"{row.times_us[n]:8.1f} ({row.sdpa_ratio[n]:5.2f} x, {row.floor_share[n]:4.2f})" for n in names]
        lines.append(f"{row.tokens:7} {row.batch:4} {row.sdpa_us:9.1f}  " + "  ".join(f"{c:>24}" for c in cells))
    return lines


__all__ = ["KernelReport", "KernelRow", "run_gpu_attention", "table_lines"]
