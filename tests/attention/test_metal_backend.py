"""The metal backend against the reference: its kernels' own source compiled as C++, and frames in slabs."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kvd.attention import (
    AttentionOutput,
    BackendDisagrees,
    MlxBackend,
    ReferenceBackend,
    Row,
    Run,
    ShapeProbe,
)
from kvd.attention.metal_backend import MetalBackend, SlabPool
from kvd.attention.select import self_test
from kvd.attention.unified_slabs import UNIT_BYTES, UnifiedSlabs
from kvd.errors import InternalError
from kvd.quant.spec import LayerFormat, SideFormat
from tests.attention.pages import LAYER, Pages
from tests.support import metal_shim


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> MetalBackend:
    """The backend with kernels that run on the CPU."""
    if metal_shim.COMPILER is None or sys.platform != "linux":
        pytest.skip("the kernels' source is compiled as C++, which needs a compiler and Linux")
    folder: Path = tmp_path_factory.mktemp("metal")
    return MetalBackend(metal_shim.maker_in(folder))


def pages_in_slabs(**shape: int) -> Pages:
    """Random pages in several slabs."""
    pages = Pages(**shape)
    pages.pool = SlabPool(1 << 21, UnifiedSlabs(1 << 21, 1 << 18))
    return pages


def check(backend: MetalBackend, pages: Pages, q: mx.array, rows: tuple[Row, ...], **options: object) -> None:
    """The kernel itself takes the step and agrees with float64."""
    arguments = {"layer_index": LAYER, "rows": rows, "scale": q.shape[-1] ** -0.5, **options}
    before = backend.kernel_steps
    mine = backend.attend(pages.pool, q, **arguments)  # type: ignore[arg-type]
    assert backend.kernel_steps == before + 1
    right = ReferenceBackend().attend(pages.pool, q, **arguments)  # type: ignore[arg-type]
    np.testing.assert_allclose(np.array(mine.out), np.array(right.out), atol=5e-5)
    np.testing.assert_allclose(np.array(mine.lse), np.array(right.lse), atol=5e-5)


@pytest.mark.parametrize(
    ("shape", "name", "length"),
    [
        ((9, 3, 64, 64), "q4c", 1),
        ((4, 2, 192, 128), "k8v4", 2),
        ((6, 2, 96, 64), "q2", 3),
        ((4, 1, 256, 256), "q8", 5),
    ],
    ids=str,
)
def test_the_kernel_agrees_with_the_reference(
    backend: MetalBackend, shape: tuple[int, int, int, int], name: str, length: int
) -> None:
    """Widths 64 to 256, K unlike V, 2, 4 and 8 bits, conditioned keys, one and several queries: as float64."""
    heads, kv_heads, k_dim, v_dim = shape
    pages = pages_in_slabs(kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim)
    segment = pages.segment(300, name)
    check(backend, pages, pages.queries(heads, length), (Row((segment,), 300 - length),))


def test_a_batch_of_unequal_rows_runs_windows_and_sinks(backend: MetalBackend) -> None:
    """P31: rows of 3 and 520 tokens, positions in two runs, a window and sinks, in one launch."""
    pages = pages_in_slabs()
    long = pages.segment(520, runs=(Run(0, 300), Run(310, 220)))
    rows = (Row((pages.segment(3),), 1), Row((long,), 528))
    q = pages.queries(4, 2, batch=2)
    check(backend, pages, q, rows)
    check(backend, pages, q, rows, window=250, sinks=mx.array([0.5, -1.0, 2.0, 0.0]))


def test_rows_of_two_formats_merge(backend: MetalBackend) -> None:
    """A row with a high and a low precision segment, beside a row with one, agrees with float64."""
    pages = pages_in_slabs()
    high, low = pages.segment(40, "q4"), pages.segment(270, "q2", positions_start=40)
    rows = (Row((high, low), 309), Row((pages.segment(50),), 49))
    check(backend, pages, pages.queries(4, 1, batch=2), rows)


def test_what_the_kernel_cannot_take_goes_to_the_mlx_backend(backend: MetalBackend) -> None:
    """A chunk, a tail outside the pages and a pool outside the slabs are computed another way, and counted."""
    pages = pages_in_slabs()
    segment = pages.segment(60)
    plain = Pages()
    cases = [
        (pages, segment, pages.queries(4, 40)),
        (pages, pages.with_tail(pages.segment(60), 10), pages.queries(4, 1)),
        (plain, plain.segment(60), plain.queries(4, 1)),
    ]
    for where, each, q in cases:
        kernel, other = backend.kernel_steps, backend.other_steps
        arguments = {"layer_index": LAYER, "rows": (Row((each,), 60 - q.shape[2]),), "scale": 0.125}
        mine = backend.attend(where.pool, q, **arguments)
        assert (backend.kernel_steps, backend.other_steps) == (kernel, other + 1)
        right = ReferenceBackend().attend(where.pool, q, **arguments)
        np.testing.assert_allclose(np.array(mine.out), np.array(right.out), atol=5e-5)


def test_the_self_test_runs_the_kernel(backend: MetalBackend) -> None:
    """At start the kernel itself is compared with the reference, over pages in slabs; a wrong one is refused."""
    probe = ShapeProbe(4, 2, 64, 64, LayerFormat(SideFormat(4, 64), SideFormat(4, 64)))
    before = backend.kernel_steps
    self_test(backend, probe)
    assert backend.kernel_steps == before + 1

    class Wrong(MetalBackend):
        def attend(self, *args: object, **options: object) -> AttentionOutput:
            right = backend.attend(*args, **options)  # type: ignore[arg-type]
            return AttentionOutput(right.out + 1, right.lse)

    with pytest.raises(BackendDisagrees):
        self_test(Wrong(lambda **_: backend._kernels), probe)


def test_slabs_share_one_budget_and_go_back_when_empty() -> None:
    """Frames are zeroed ranges of slabs; freed ranges join; an empty slab is given up; mlx sees numpy's writes."""
    slabs = UnifiedSlabs(16 * 4 * UNIT_BYTES, 0)
    assert slabs.held_bytes == 0
    three, _ = slabs.allocate(3 * UNIT_BYTES - 5)
    one, taken = slabs.allocate(1)
    assert taken == UNIT_BYTES
    assert slabs.held_bytes == 4 * UNIT_BYTES
    place = slabs.locate(int(one.ctypes.data))
    assert place == (0, 3 * UNIT_BYTES)
    one[0] = 7
    assert int(slabs.arrays()[0][3 * UNIT_BYTES // 4]) == 7
    slabs.release(one)
    again, _ = slabs.allocate(1)
    assert slabs.locate(int(again.ctypes.data)) == place
    assert again[0] == 0
    slabs.release(three)
    slabs.release(again)
    assert slabs.held_bytes == 0
    with pytest.raises(InternalError):
        slabs.release(again)


def test_a_frame_that_fits_no_slab_gets_a_mapping() -> None:
    """More than a slab holds is still served, said to be outside, and counted until it is released."""
    slabs = UnifiedSlabs(16 * UNIT_BYTES, 0)
    large, _ = slabs.allocate(2 * UNIT_BYTES)
    assert slabs.locate(int(large.ctypes.data)) is None
    assert slabs.outside_frames == 1
    slabs.release(large)
    assert slabs.outside_frames == 0


def test_the_mlx_backend_runs_over_slabs() -> None:
    """Pages in slabs read as any host pages do."""
    pages = pages_in_slabs()
    segment, q = pages.segment(300), pages.queries(4, 20)
    arguments = {"layer_index": LAYER, "rows": (Row((segment,), 280),), "scale": 0.125}
    for strategy in ("host", "device"):
        mine = MlxBackend(strategy).attend(pages.pool, q, **arguments)  # type: ignore[arg-type]
        right = ReferenceBackend().attend(pages.pool, q, **arguments)
        np.testing.assert_allclose(np.array(mine.out), np.array(right.out), atol=5e-5)
