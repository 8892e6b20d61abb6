"""The frame pool: exact bytes, fragments, one budget for all formats, memory that really goes back."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import InternalError, InvalidParams
from kvd.ids import FrameId
from kvd.quant.codec import encode
from kvd.quant.spec import PAGE_TOKENS, PageLayout, named_format
from kvd.store.frame_pool import FramePool

ONE, TWO, THREE = FrameId(1), FrameId(2), FrameId(3)


def layout(name: str = "q4", *, layers: tuple[int, ...] = (0, 3), kv_heads: int = 2, dim: int = 64) -> PageLayout:
    """A small layout; layer indices with a gap, as in a group of a hybrid model."""
    page_format = named_format(name, k_dim=dim, v_dim=dim, layer_count=len(layers))
    return PageLayout(layer_indices=layers, kv_heads=kv_heads, k_dim=dim, v_dim=dim, page_format=page_format)


def noise(bytes_count: int, seed: int = 0) -> bytes:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, bytes_count, np.uint8).tobytes()


def pool_with(*frames: FrameId, name: str = "q4") -> FramePool:
    """A pool with these frames."""
    pool = FramePool(1 << 30)
    for frame in frames:
        pool.create(frame, layout(name))
    return pool


def test_a_new_frame_is_zero() -> None:
    """Frames start as zeros, also when one was dropped before: no page's bytes leak into another (P33)."""
    pool = pool_with(ONE)
    pool.fill(ONE, noise(layout().payload_bytes))
    pool.drop(ONE)
    pool.create(TWO, layout())
    assert not pool.view(TWO).any()


def test_views_have_the_layouts_shapes_and_share_memory() -> None:
    """Layer arrays are writable views in payload order; what is written through them is in the export."""
    pool, page = pool_with(ONE), layout()
    arrays = pool.layer(ONE, 3)
    assert arrays.k.codes.shape == (2, PAGE_TOKENS, 8)
    assert arrays.k.codes.dtype == np.uint32
    assert arrays.v.scales.shape == (2, PAGE_TOKENS, 1)
    assert arrays.v.biases.dtype == np.uint16
    arrays.k.codes[:] = 0x01020304
    exported = pool.export(ONE)
    spec = next(t for t in page.tensors if t.name == "layers.3.k.codes")
    assert exported[spec.offset_bytes : spec.offset_bytes + spec.tensor_bytes] == b"\4\3\2\1" * (2 * PAGE_TOKENS * 8)
    assert exported.count(0) == page.payload_bytes - spec.tensor_bytes
    assert pool.layer(ONE, 3) is arrays


def test_q4_pages_take_what_the_paper_says() -> None:
    """Real page bytes relative to FP16: (1 + 8/64)/4 = 0.28125 for q4 (P29)."""
    pool, page = pool_with(ONE), layout()
    fp16_bytes = 2 * 2 * page.kv_heads * PAGE_TOKENS * page.k_dim * len(page.layer_indices)
    assert len(pool.export(ONE)) / fp16_bytes == 0.28125


def test_export_is_owned_and_fill_restores_it() -> None:
    """Exported bytes do not change with the frame; filling another frame with them makes equal arrays."""
    pool = pool_with(ONE, TWO)
    content = noise(layout().payload_bytes)
    pool.fill(ONE, content)
    exported = pool.export(ONE)
    pool.view(ONE)[:] = 0
    assert exported == content
    pool.fill(TWO, exported)
    assert pool.export(TWO) == content


@pytest.mark.parametrize("change", [-1, 1, -1000])
def test_a_payload_of_another_length_is_refused(change: int) -> None:
    """Failure "attention NaNs after load": bytes that do not fit the layout never reach a frame."""
    pool = pool_with(ONE)
    with pytest.raises(InvalidParams):
        pool.fill(ONE, noise(layout().payload_bytes + change))
    assert not pool.view(ONE).any()


@given(
    st.integers(0, PAGE_TOKENS),
    st.integers(0, PAGE_TOKENS),
    st.integers(0, PAGE_TOKENS),
    st.sampled_from(["q4", "k8v4"]),
)
@settings(max_examples=25, deadline=None)
def test_fragments_carry_tokens(a: int, b: int, cut: int, name: str) -> None:
    """A fragment holds exactly its tokens; inserting up to a token writes those and touches no other byte."""
    start, end = min(a, b), max(a, b)
    upto = min(max(cut, start), end)
    pool = pool_with(ONE, TWO, name=name)
    page = layout(name)
    pool.fill(ONE, noise(page.payload_bytes, 1))
    pool.fill(TWO, noise(page.payload_bytes, 2))
    fragment = pool.extract(ONE, start, end)
    assert len(fragment) == (end - start) * page.token_bytes
    outside = pool.extract(TWO, 0, start), pool.extract(TWO, upto, PAGE_TOKENS)
    pool.insert(TWO, start, end, fragment, upto=upto)
    assert pool.extract(TWO, start, upto) == pool.extract(ONE, start, upto)
    assert (pool.extract(TWO, 0, start), pool.extract(TWO, upto, PAGE_TOKENS)) == outside


def test_fragments_are_in_record_format() -> None:
    """Tensor by tensor in layout order, each [kv_heads, tokens, width], C-contiguous (kvd.store.records)."""
    pool = pool_with(ONE)
    pool.fill(ONE, noise(layout().payload_bytes))
    expected = b""
    for index in layout().layer_indices:
        arrays = pool.layer(ONE, index)
        for side in (arrays.k, arrays.v):
            expected += b"".join(part[:, 7:19].tobytes() for part in (side.codes, side.scales, side.biases))
    assert pool.extract(ONE, 7, 19) == expected


@pytest.mark.parametrize(("start", "end", "upto"), [(-1, 4, None), (5, 4, None), (0, 257, None), (2, 6, 7), (2, 6, 1)])
def test_bad_ranges_are_refused(start: int, end: int, upto: int | None) -> None:
    """A range outside the page raises and writes nothing."""
    pool = pool_with(ONE)
    with pytest.raises(InvalidParams):
        pool.insert(ONE, start, end, noise(max(0, end - start) * layout().token_bytes), upto=upto)
    assert not pool.view(ONE).any()


def test_a_fragment_of_another_length_is_refused() -> None:
    """A fragment must have the bytes its tokens take."""
    pool = pool_with(ONE)
    with pytest.raises(InvalidParams):
        pool.insert(ONE, 0, 4, noise(4 * layout().token_bytes - 2))


def test_formats_share_one_budget_and_nothing_strands() -> None:
    """P21: frames of any format fit until their bytes reach the budget, in any order of coming and going."""
    small, large = layout("q4"), layout("q8")
    budget = 4 * large.payload_bytes
    pool = FramePool(budget)
    fits = budget // small.payload_bytes
    for number in range(fits):
        pool.create(FrameId(number), small)
    for number in range(0, fits, 2):
        pool.drop(FrameId(number))
    more = (budget - pool.resident_bytes) // large.payload_bytes
    assert more >= 1
    for number in range(more):
        pool.create(FrameId(1000 + number), large)
    assert budget - large.payload_bytes < pool.resident_bytes <= budget


def test_beyond_the_budget_is_refused() -> None:
    """P22: a frame that does not fit is refused before memory is taken; lowering the budget keeps what exists."""
    page = layout()
    pool = FramePool(2 * page.payload_bytes)
    pool.create(ONE, page)
    pool.create(TWO, page)
    with pytest.raises(InternalError) as refused:
        pool.create(THREE, page)
    assert refused.value.data["budget_bytes"] == 2 * page.payload_bytes
    assert (THREE in pool, len(pool)) == (False, 2)
    pool.drop(ONE)
    pool.set_budget(page.payload_bytes)
    with pytest.raises(InternalError):
        pool.create(THREE, page)
    assert TWO in pool


def test_slabs_hold_hardly_more_than_pages() -> None:
    """P21: `slab_bytes` counts what is mapped: less than one system page more per frame, nothing when empty."""
    pool = FramePool(1 << 30)
    for number in range(20):
        pool.create(FrameId(number), layout("k8v4" if number % 3 else "q2"))
    assert pool.resident_bytes <= pool.slab_bytes < pool.resident_bytes + 20 * mmap.PAGESIZE
    for number in range(20):
        pool.drop(FrameId(number))
    assert (pool.resident_bytes, pool.slab_bytes) == (0, 0)


def test_dropped_memory_is_unmapped() -> None:
    """P23: the mapping dies with its frame, not with the pool; a view that somebody holds stays readable."""
    pool = pool_with(ONE, TWO)
    pool.fill(TWO, noise(layout().payload_bytes))
    gone = weakref.ref(pool.view(ONE).base.obj if hasattr(pool.view(ONE).base, "obj") else pool.view(ONE).base)
    held = pool.layer(TWO, 0).k.codes
    copy = held.copy()
    pool.drop(ONE)
    pool.drop(TWO)
    pool.create(THREE, layout())
    assert gone() is None
    np.testing.assert_array_equal(held, copy)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see resident memory")
def test_resident_memory_falls_when_frames_are_dropped() -> None:
    """P23: after dropping 64 MB of touched frames the process is smaller by most of that."""

    def rss_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    page = layout(layers=tuple(range(16)), kv_heads=4)
    count = (64 << 20) // page.payload_bytes
    pool = FramePool(1 << 30)
    for number in range(count):
        pool.create(FrameId(number), page)
        pool.view(FrameId(number))[:] = 1
    full = rss_bytes()
    for number in range(count):
        pool.drop(FrameId(number))
    assert full - rss_bytes() > 0.9 * count * page.payload_bytes


def test_frame_numbers_are_checked() -> None:
    """Using a frame that does not exist, or creating one twice, is our bug and says which."""
    pool = pool_with(ONE)
    with pytest.raises(InternalError):
        pool.create(ONE, layout())
    for use in (pool.drop, pool.view, pool.export, pool.layout):
        with pytest.raises(InternalError):
            use(TWO)


def test_statistics_add_up() -> None:
    """Counts and bytes follow creations and drops; the peak stays."""
    pool = pool_with(ONE, TWO)
    pool.drop(ONE)
    figures = pool.statistics()
    assert (figures.frames, figures.frames_created, figures.frames_dropped) == (1, 2, 1)
    assert figures.resident_bytes == layout().payload_bytes
    assert figures.peak_resident_bytes == 2 * layout().payload_bytes
    assert figures.budget_bytes == 1 << 30


def test_encoded_tokens_land_where_the_layout_says() -> None:
    """Codec output assigned to a layer's arrays is found at the tensors' offsets, little end first."""
    pool, page = pool_with(ONE), layout()
    x = np.random.default_rng(5).standard_normal((2, 10, 64), dtype=np.float32)
    encoded = encode(x, page.page_format.layers[0].k)
    side = pool.layer(ONE, 0).k
    side.codes[:, :10], side.scales[:, :10], side.biases[:, :10] = encoded
    first = page.tensors[0]
    codes = np.frombuffer(pool.export(ONE), "<u4", 2 * PAGE_TOKENS * 8, first.offset_bytes).reshape(2, PAGE_TOKENS, 8)
    np.testing.assert_array_equal(codes[:, :10], encoded.codes)
