"""The `cuda` backend and its pool on a real device: numbers against the reference, bytes against the codec.

Skipped where mlx has no CUDA device. Each test draws fresh pages; frames are numbered backwards and lie between others.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from kvd.attention.interface import Row, Run, Segment
from kvd.attention.reference import ReferenceBackend
from kvd.ids import FrameId
from kvd.quant.codec import encode
from kvd.quant.conditioning import Conditioning
from kvd.quant.errors import NonFiniteValues
from kvd.quant.spec import PAGE_TOKENS, LayerFormat, PageFormat, PageLayout, SideFormat
from kvd.store.fragment import Fragment
from kvd.store.frame_pool import FramePool

ON_CUDA = hasattr(mx, "cuda") and mx.cuda.is_available()
pytestmark = [
    pytest.mark.skipif(not ON_CUDA, reason="mlx has no CUDA device here"),
    pytest.mark.leaks("the driver opens descriptors for the whole process when it is first used"),
]


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    """Computes on the GPU, whatever the suite's default device is."""
    before = mx.default_device()
    if ON_CUDA:
        mx.set_default_device(mx.gpu)
    yield
    mx.set_default_device(before)


def layout_of(k_bits: int, v_bits: int, kv_heads: int, k_dim: int, v_dim: int, layers: int = 2) -> PageLayout:
    """Layout of pages of a few layers."""
    layer = LayerFormat(SideFormat(k_bits, 64), SideFormat(v_bits, 64))
    return PageLayout(
        layer_indices=tuple(range(layers)),
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        page_format=PageFormat("test", (layer,) * layers),
    )


class Mirrored:
    """The same random pages in a host pool and in a device pool."""

    def __init__(self, rng: np.random.Generator, budget: int = 1 << 30) -> None:
        from kvd.attention.cuda.pool import DevicePool

        self.rng = rng
        self.host, self.device = FramePool(budget), DevicePool(budget)
        self._next = 10_000

    def segment(self, layout: PageLayout, runs: tuple[Run, ...], conditioning: object = None) -> Segment:
        """Random tokens at the positions of `runs`; what pages hold beyond them is NaN."""
        tokens = sum(run.tokens for run in runs)
        pages = -(-tokens // PAGE_TOKENS)
        table = []
        for page in range(pages):
            self._next -= 3
            frame = FrameId(self._next)
            table.append(frame)
            self.host.create(frame, layout)
            self.device.create(frame, layout)
            used = min(tokens - page * PAGE_TOKENS, PAGE_TOKENS)
            for at, layer in enumerate(layout.layer_indices):
                arrays = self.host.layer(frame, layer)
                formats = layout.page_format.layers[at]
                for side, side_format, dim in (
                    (arrays.k, formats.k, layout.k_dim),
                    (arrays.v, formats.v, layout.v_dim),
                ):
                    values = self.rng.standard_normal((layout.kv_heads, PAGE_TOKENS, dim), dtype=np.float32)
                    side.codes[:], side.scales[:], side.biases[:] = encode(values * 1.5 + 0.3, side_format)
                    side.scales[:, used:] = side.biases[:, used:] = 0x7FC0
            self.device.fill(frame, self.host.export(frame))
        return Segment(tuple(table), runs, layout.page_format.layers[0], conditioning)  # type: ignore[arg-type]


def relative_error(mine: mx.array, right: mx.array) -> float:
    """Norm of the difference over the norm of the reference."""
    a, b = np.array(mine.astype(mx.float32)), np.array(right.astype(mx.float32))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


SHAPES = [
    # kv heads, heads, k_dim, v_dim
    (8, 32, 128, 128),
    (3, 9, 64, 64),
    (1, 4, 256, 256),
    (4, 4, 192, 128),
    (2, 14, 128, 128),
    (1, 16, 576, 512),
]


@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (2, 2), (8, 8), (4, 2)], ids=lambda b: f"k{b[0]}v{b[1]}")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_decode_agrees_with_the_reference(bits: tuple[int, int], shape: tuple[int, int, int, int]) -> None:
    """A batch of unequal lengths, with and without a window and sinks, within bf16's rounding (P30)."""
    from kvd.attention.cuda.backend import CudaBackend

    kv_heads, heads, k_dim, v_dim = shape
    rng = np.random.default_rng()
    pools = Mirrored(rng)
    layout = layout_of(*bits, kv_heads, k_dim, v_dim)
    lengths = (1, 700, 33, 256, 5000)
    rows = [Row((pools.segment(layout, (Run(0, n),)),), n - 1) for n in lengths]
    backend = CudaBackend()
    queries = mx.array(rng.standard_normal((len(rows), heads, 1, k_dim), dtype=np.float32)).astype(mx.bfloat16)
    sinks = mx.array(rng.standard_normal(heads, dtype=np.float32))
    for window, sink in ((None, None), (300, None), (300, sinks)):
        for layer in (0, 1):
            call = {"layer_index": layer, "rows": rows, "scale": k_dim**-0.5, "window": window, "sinks": sink}
            mine = backend.attend(pools.device, queries, **call)
            right = ReferenceBackend().attend(pools.host, queries.astype(mx.float32), **call)
            assert relative_error(mine.out, right.out) < 4e-3
            assert float(mx.abs(mine.lse - right.lse).max()) < 4e-3


@pytest.mark.parametrize("spread", [1e-6, 1e3], ids=["tiny", "huge"])
def test_decode_takes_queries_of_any_size(spread: float) -> None:
    """Queries outside a half's range keep their precision."""
    from kvd.attention.cuda.backend import CudaBackend

    rng = np.random.default_rng()
    pools = Mirrored(rng)
    row = Row((pools.segment(layout_of(4, 4, 2, 128, 128), (Run(0, 600),)),), 599)
    queries = mx.array(rng.standard_normal((1, 4, 1, 128), dtype=np.float32) * spread)
    call = {"layer_index": 0, "rows": [row], "scale": 1e-3 / spread}
    mine = CudaBackend().attend(pools.device, queries, **call)
    right = ReferenceBackend().attend(pools.host, queries, **call)
    assert relative_error(mine.out, right.out) < 2e-3


def test_two_formats_are_one_launch() -> None:
    """High- and low-precision segments of every row merge by log-sum-exp, empty and windowed ones included."""
    from kvd.attention.cuda.backend import CudaBackend

    rng = np.random.default_rng()
    pools = Mirrored(rng)
    high, low = layout_of(4, 4, 8, 128, 128), layout_of(2, 2, 8, 128, 128)
    rows = []
    for lead, rest in ((4, 4000), (900, 2), (256, 512)):
        first = pools.segment(high, (Run(0, lead), Run(lead + rest, 40)))
        rows.append(Row((first, pools.segment(low, (Run(lead, rest),))), lead + rest + 39))
    queries = mx.array(rng.standard_normal((3, 32, 1, 128), dtype=np.float32)).astype(mx.bfloat16)
    for window in (None, 30, 600):
        call = {"layer_index": 1, "rows": rows, "scale": 128**-0.5, "window": window}
        mine = CudaBackend().attend(pools.device, queries, **call)
        right = ReferenceBackend().attend(pools.host, queries.astype(mx.float32), **call)
        assert relative_error(mine.out, right.out) < 4e-3


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bf16", "f32"])
def test_prefill_agrees_with_the_reference(shape: tuple[int, int, int, int], dtype: mx.Dtype) -> None:
    """Chunks across page borders, windows and sinks."""
    from kvd.attention.cuda.backend import CudaBackend

    kv_heads, heads, k_dim, v_dim = shape
    rng = np.random.default_rng()
    pools = Mirrored(rng)
    segment = pools.segment(layout_of(4, 4, kv_heads, k_dim, v_dim), (Run(0, 900),))
    sinks = mx.array(rng.standard_normal(heads, dtype=np.float32))
    for queries_count, window, sink in ((2, None, None), (48, None, None), (300, 200, None), (300, None, sinks)):
        queries = mx.array(rng.standard_normal((1, heads, queries_count, k_dim), dtype=np.float32)).astype(dtype)
        call = {
            "layer_index": 0,
            "rows": [Row((segment,), 900 - queries_count)],
            "scale": k_dim**-0.5,
            "window": window,
        }
        mine = CudaBackend().attend(pools.device, queries, sinks=None if sink is None else sink.astype(dtype), **call)
        right = ReferenceBackend().attend(pools.host, queries.astype(mx.float32), sinks=sink, **call)
        assert relative_error(mine.out, right.out) < (1e-2 if dtype == mx.bfloat16 else 2e-3)


def test_conditioned_keys() -> None:
    """Queries are conditioned with the keys, and the log-sum-exp has the centre's term."""
    from kvd.attention.cuda.backend import CudaBackend

    rng = np.random.default_rng()
    pools = Mirrored(rng)
    shape = (1, 2, 128)
    operators = Conditioning(
        rng.standard_normal(shape, dtype=np.float32), np.exp(rng.standard_normal(shape, dtype=np.float32) / 4)
    ).layers[0]
    segment = pools.segment(layout_of(4, 4, 2, 128, 128), (Run(0, 700),), operators)
    for count in (1, 40):
        queries = mx.array(rng.standard_normal((1, 8, count, 128), dtype=np.float32))
        call = {"layer_index": 0, "rows": [Row((segment,), 700 - count)], "scale": 128**-0.5}
        mine = CudaBackend().attend(pools.device, queries, **call)
        right = ReferenceBackend().attend(pools.host, queries, **call)
        assert relative_error(mine.out, right.out) < 3e-3
        assert float(mx.abs(mine.lse - right.lse).max()) < 5e-3


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (2, 2), (8, 8)], ids=lambda b: f"k{b[0]}v{b[1]}")
def test_appended_bytes_are_the_codecs(bits: tuple[int, int], dtype: mx.Dtype) -> None:
    """One codec defines the truth: the kernel writes its bytes, for odd values too, and nothing else (P14)."""
    from kvd.attention.cuda.backend import CudaBackend
    from kvd.attention.cuda.kernels import Bits, Stream

    rng = np.random.default_rng()
    pools = Mirrored(rng)
    layout = layout_of(*bits, 3, 192, 128)
    runs = (Run(0, 700),)
    segments = [pools.segment(layout, runs), pools.segment(layout, runs)]
    values = [rng.standard_normal((2, 3, 300, dim), dtype=np.float32) for dim in (192, 128)]
    for x in values:
        x[0, 0, :4] = np.array([0.0, 1e-12, -3.0, 1e4], np.float32)[:, None]
        x[0, 1, :, 0] *= 1e3
        x[1, 2, 5, :] = -0.0
    k, v = (mx.array(x).astype(dtype) for x in values)
    backend = CudaBackend()
    frames = backend.frame_table(pools.device, [segment.block_table for segment in segments])
    starts = [200, 256]
    stream = Stream(frames, pools.device.places(layout, 1), starts_array := backend.whole_numbers(starts))
    pools.device.append(k, v, Bits(*bits), stream, starts_array)
    pools.device.check_appended()
    formats = layout.page_format.layers[1]
    for row, segment in enumerate(segments):
        for array, side_format, name in ((k, formats.k, "k"), (v, formats.v, "v")):
            encoded = encode(np.array(array[row].astype(mx.float32)), side_format)
            for i in range(300):
                slot = starts[row] + i
                side = getattr(pools.host.layer(segment.block_table[slot // 256], 1), name)
                for part, new in zip((side.codes, side.scales, side.biases), encoded, strict=True):
                    part[:, slot % 256] = new[:, i]
        for frame in segment.block_table:
            assert pools.device.export(frame) == pools.host.export(frame)


def test_values_that_do_not_fit_are_reported() -> None:
    """NaN, infinity and values beyond bf16 raise at the end of the step, as the codec does; the next step is clean."""
    from kvd.attention.cuda.backend import CudaBackend
    from kvd.attention.cuda.kernels import Bits, Stream

    pools = Mirrored(np.random.default_rng())
    layout = layout_of(4, 4, 2, 64, 64)
    segment = pools.segment(layout, (Run(0, 512),))
    backend = CudaBackend()
    starts = backend.whole_numbers([3])
    stream = Stream(backend.frame_table(pools.device, [segment.block_table]), pools.device.places(layout, 0), starts)
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((1, 2, 400, 64), np.float32)
        x[0, 1, 399, 63] = bad
        pools.device.append(mx.array(x), mx.ones((1, 2, 400, 64)), Bits(4, 4), stream, starts)
        with pytest.raises(NonFiniteValues):
            pools.device.check_appended()
    pools.device.append(mx.ones((1, 2, 400, 64)), mx.ones((1, 2, 400, 64)), Bits(4, 4), stream, starts)
    pools.device.check_appended()


def test_bytes_move_as_on_the_host() -> None:
    """Export, fill, extract and insert give the host pool's bytes, and so do tails that are packed and unpacked."""
    rng = np.random.default_rng()
    pools = Mirrored(rng)
    layout = layout_of(8, 4, 3, 64, 64)
    table = pools.segment(layout, (Run(0, 512),)).block_table
    for pool in (pools.host, pools.device):
        packed = Fragment(layout, 77, pool.extract(table[0], 0, 77))
        pool.insert(table[1], 0, 77, packed.data)
        pool.insert(table[0], 5, 90, rng.bytes(0) + pools.host.extract(table[1], 100, 185))
    for start, end in ((0, 256), (3, 4), (17, 200), (9, 9)):
        assert pools.device.extract(table[1], start, end) == pools.host.extract(table[1], start, end)
    assert [pools.device.export(f) for f in table] == [pools.host.export(f) for f in table]


def test_ten_thousand_appends_copy_no_pool() -> None:
    """Appending writes in place: the memory that mlx holds does not grow, the frames keep their addresses (P14)."""
    from kvd.attention.cuda.backend import CudaBackend
    from kvd.attention.cuda.kernels import Bits, Stream

    pools = Mirrored(np.random.default_rng(), budget=1 << 31)
    layout = layout_of(4, 4, 8, 128, 128, layers=1)
    segment = pools.segment(layout, (Run(0, 10_240),))
    backend = CudaBackend()
    frames = backend.frame_table(pools.device, [segment.block_table])
    addresses = [pools.device.device_address(frame) for frame in segment.block_table]
    places = pools.device.places(layout, 0)
    k = mx.random.normal((1, 8, 1, 128)).astype(mx.bfloat16)
    queries = mx.random.normal((1, 32, 1, 128)).astype(mx.bfloat16)
    mx.eval(k, queries)
    slots = [mx.array([i, 0, 0, 0], mx.int32) for i in range(10_000)]
    mx.eval(slots)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for i in range(10_000):
        pools.device.append(k, k, Bits(4, 4), Stream(frames, places, slots[i]), slots[i])
        if i % 100 == 99:
            row = Row((Segment(segment.block_table, (Run(0, i + 1),), segment.layer_format),), i)
            out = backend.attend(pools.device, queries, layer_index=0, rows=[row], scale=0.1).out
            pools.device.check_appended()
            mx.eval(out)
    assert mx.get_peak_memory() - before < pools.device.slab_bytes / 4
    assert [pools.device.device_address(frame) for frame in segment.block_table] == addresses
    expected = encode(np.array(k[0].astype(mx.float32)), segment.layer_format.k).codes[:, 0]
    whole = np.frombuffer(pools.device.export(segment.block_table[20]), np.uint32)[: 8 * 256 * 16].reshape(8, 256, 16)
    assert (whole == expected[:, None]).all()


def test_sinks_and_conditioned_keys_in_a_chunk() -> None:
    """A sink joins the softmax of true scores, not of those that lack the centre's term."""
    from kvd.attention.cuda.backend import CudaBackend

    rng = np.random.default_rng()
    pools = Mirrored(rng)
    shape = (1, 2, 128)
    operators = Conditioning(
        rng.standard_normal(shape, dtype=np.float32), np.exp(rng.standard_normal(shape, dtype=np.float32) / 4)
    ).layers[0]
    segment = pools.segment(layout_of(8, 8, 2, 128, 128), (Run(0, 700),), operators)
    sinks = mx.array(rng.standard_normal(8, dtype=np.float32))
    for count in (1, 40, 600):
        queries = mx.array(rng.standard_normal((1, 8, count, 128), dtype=np.float32))
        call = {"layer_index": 0, "rows": [Row((segment,), 700 - count)], "scale": 128**-0.5, "sinks": sinks}
        mine = CudaBackend().attend(pools.device, queries, **call)
        right = ReferenceBackend().attend(pools.host, queries, **call)
        assert relative_error(mine.out, right.out) < 3e-3
        assert float(mx.abs(mine.lse - right.lse).max()) < 5e-3


def test_rows_and_layers_of_different_formats() -> None:
    """A batch may mix formats, and layers of one group may differ: each is read as what it is."""
    from kvd.attention.cuda.backend import CudaBackend

    rng = np.random.default_rng()
    pools = Mirrored(rng)
    formats = [LayerFormat(SideFormat(bits, 64), SideFormat(bits, 64)) for bits in (4, 8)]
    mixed = PageLayout(
        layer_indices=(0, 1), kv_heads=2, k_dim=64, v_dim=64, page_format=PageFormat("mix", tuple(formats))
    )
    backend = CudaBackend()
    segment = pools.segment(mixed, (Run(0, 300),))
    queries = mx.array(rng.standard_normal((1, 4, 1, 64), dtype=np.float32))
    for layer in (0, 1):
        row = Row((Segment(segment.block_table, segment.runs, formats[layer]),), 299)
        call = {"layer_index": layer, "rows": [row], "scale": 0.125}
        mine = backend.attend(pools.device, queries, **call)
        assert relative_error(mine.out, ReferenceBackend().attend(pools.host, queries, **call).out) < 2e-3
    rows = [
        Row((pools.segment(layout_of(b, b, 2, 64, 64), (Run(0, n),)),), n - 1) for b, n in ((4, 300), (8, 40), (2, 9))
    ]
    queries = mx.array(rng.standard_normal((3, 4, 1, 64), dtype=np.float32))
    call = {"layer_index": 0, "rows": rows, "scale": 0.125}
    mine = backend.attend(pools.device, queries, **call)
    assert relative_error(mine.out, ReferenceBackend().attend(pools.host, queries, **call).out) < 2e-3


def test_frames_may_go_while_results_wait() -> None:
    """A result nobody looked at is computed before its frames' memory serves others."""
    from kvd.attention.cuda.backend import CudaBackend

    rng = np.random.default_rng()
    pools = Mirrored(rng)
    layout = layout_of(4, 4, 2, 64, 64)
    segment = pools.segment(layout, (Run(0, 1000),))
    queries = mx.array(rng.standard_normal((1, 4, 1, 64), dtype=np.float32))
    call = {"layer_index": 0, "rows": [Row((segment,), 999)], "scale": 0.125}
    mine = CudaBackend().attend(pools.device, queries, **call)
    for frame in segment.block_table:
        pools.device.drop(frame)
    assert pools.device.slab_bytes == 0
    mx.clear_cache()
    poison = [mx.full((layout.payload_bytes // 4,), float("nan")) for _ in range(8)]
    mx.eval(poison)
    assert relative_error(mine.out, ReferenceBackend().attend(pools.host, queries, **call).out) < 2e-3


def test_the_self_test_passes() -> None:
    """Select takes the backend on this device, appended bytes included."""
    from kvd.attention.cuda.backend import CudaBackend
    from kvd.attention.select import ShapeProbe, self_test

    for bits in (4, 8):
        side = SideFormat(bits, 64)
        self_test(CudaBackend(), ShapeProbe(8, 2, 128, 128, LayerFormat(side, side)))
