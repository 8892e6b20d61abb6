"""Fragments: tokens without a frame have exactly the bytes that the frame had, however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import InvalidParams
from kvd.ids import FrameId
from kvd.quant.spec import PAGE_TOKENS, LayerFormat, PageFormat, PageLayout, SideFormat
from kvd.store.fragment import Fragment
from kvd.store.frame_pool import FramePool
from tests.store.test_frame_pool import layout, noise

ONE, TWO = FrameId(1), FrameId(2)


def mixed() -> PageLayout:
    """Layers of different formats, alike ones apart and next to each other."""
    low, high = (LayerFormat(SideFormat(bits, 64), SideFormat(4, 64)) for bits in (4, 8))
    page_format = PageFormat("mixed", (low, low, high, low))
    return PageLayout(layer_indices=(0, 1, 2, 5), kv_heads=3, k_dim=64, v_dim=128, page_format=page_format)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), which=st.sampled_from(["q4", "q8", "mixed"]))
def test_a_fragment_is_what_the_frame_held(data: st.DataObject, which: str) -> None:
    """P14: per tensor the rows of the tokens, in layout order: as slices of the tensors say, and back into a frame."""
    page = mixed() if which == "mixed" else layout(which)
    tokens = data.draw(st.integers(1, PAGE_TOKENS))
    start = data.draw(st.integers(0, tokens))
    end = data.draw(st.integers(start, tokens))
    pool = FramePool(1 << 30)
    pool.create(ONE, page)
    pool.fill(ONE, noise(page.payload_bytes, tokens))
    fragment = pool.fragment(ONE, tokens)
    slices = []
    for tensor in page.tensors:
        heads, _, _ = tensor.shape
        octets = pool.view(ONE)[tensor.offset_bytes : tensor.offset_bytes + tensor.tensor_bytes]
        slices.append(octets.reshape(heads, PAGE_TOKENS, -1)[:, start:end].tobytes())
    assert fragment.part(start, end) == pool.extract(ONE, start, end) == b"".join(slices)
    assert bytes(fragment.data) == pool.extract(ONE, 0, tokens)
    assert fragment.octets.nbytes == tokens * page.token_bytes
    before = pool.export(ONE)
    pool.create(TWO, page)
    pool.insert(TWO, 0, tokens, fragment.data)
    assert pool.extract(TWO, 0, tokens) == pool.extract(ONE, 0, tokens)
    assert not any(pool.extract(TWO, tokens, PAGE_TOKENS))
    if end:
        assert bytes(fragment.head(end).data) == pool.extract(ONE, 0, end)
    assert pool.export(ONE) == before


def test_a_fragment_outlives_its_frame() -> None:
    """It is a copy: what becomes of the frame is nothing to it."""
    page = layout()
    pool = FramePool(1 << 30)
    pool.create(ONE, page)
    pool.fill(ONE, noise(page.payload_bytes))
    fragment, expected = pool.fragment(ONE, 9), pool.extract(ONE, 0, 9)
    pool.view(ONE)[:] = 0
    pool.drop(ONE)
    assert bytes(fragment.data) == expected


def test_bad_fragments_are_refused() -> None:
    """Bytes that are not the tokens', no tokens, and parts that are not there."""
    page = layout()
    for tokens, n_bytes in ((3, 3 * page.token_bytes - 1), (0, 0), (3, 4 * page.token_bytes)):
        with pytest.raises(InvalidParams, match="are not in"):
            Fragment(page, tokens, noise(n_bytes))
    with pytest.raises(InvalidParams, match="4 of 3 tokens"):
        Fragment(page, 4, noise(3 * page.token_bytes), capacity_tokens=3)
    fragment = Fragment(page, 3, noise(3 * page.token_bytes))
    for start, end in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(InvalidParams, match="must lie in"):
            fragment.part(start, end)
    for tokens in (0, 4):
        with pytest.raises(InvalidParams, match="1 to 3"):
            fragment.head(tokens)
    pool = FramePool(1 << 30)
    pool.create(ONE, page)
    for tokens in (0, 257):
        with pytest.raises(InvalidParams):
            pool.fragment(ONE, tokens)
