"""The compiled kernels themselves, at every vector width, against float64; they read nothing beyond the pages."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="compiled kernels need llvmlite")

from kvd.attention.cpu_decode import DecodeShape, SideShape, decode_kernel
from kvd.attention.cpu_prefill import PrefillShape, prefill_kernel
from kvd.native import KernelUnavailable
from kvd.native.blas import blas
from kvd.native.build import processor
from kvd.quant.codec import decode, encode
from kvd.quant.spec import PAGE_TOKENS, SideFormat, group_for

pytestmark = pytest.mark.skipif(not processor().has_fma, reason="this processor has no fused multiply-add")

LOG2_E = math.log2(math.e)
SHAPES = [
    (dims, bits, processor().lanes)
    for dims in ((64, 64), (256, 256), (192, 128), (96, 32))
    for bits in ((4, 4), (8, 4), (2, 2), (8, 8))
]
SHAPES += [(*some, lanes) for some in (((64, 64), (8, 4)), ((192, 128), (4, 4))) for lanes in (4, 8, 16)]
"""Widths of keys and values, their bits, lanes of a vector: this processor's on every shape, the others on two."""


class GuardedPages:
    """Random packed pages, each array of each page at the very end of a mapping whose next system page is forbidden."""

    def __init__(self, heads: int, tokens: int, dims: tuple[int, int], bits: tuple[int, int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.count = -(-tokens // PAGE_TOKENS)
        self.keep: list[Any] = []
        self.values: list[np.ndarray] = []
        self.table = np.zeros((heads, self.count, 6), np.int64)
        for side, (dim, width) in enumerate(zip(dims, bits, strict=True)):
            side_format = SideFormat(width, group_for(dim))
            x = rng.standard_normal((heads, self.count * PAGE_TOKENS, dim)).astype(np.float32)
            encoded = encode(x, side_format)
            self.values.append(decode(*encoded, side_format)[:, :tokens].astype(np.float64))
            for part, array in enumerate(encoded):
                if part:
                    array[:, tokens:] = 0x7FC0  # NaN: what lies beyond the tokens means nothing
                for page in range(self.count):
                    for head in range(heads):
                        rows = np.ascontiguousarray(array[head, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS])
                        self.table[head, page, 3 * side + part] = self._place(rows)

    def _place(self, rows: np.ndarray) -> int:
        system_page = mmap.PAGESIZE
        length = -(-rows.nbytes // system_page) * system_page
        memory = mmap.mmap(-1, length + system_page)
        base = np.frombuffer(memory, np.uint8)
        at = length - rows.nbytes
        base[at:length] = rows.view(np.uint8).reshape(-1)
        address = int(base.ctypes.data)
        if sys.platform == "linux":
            library = ctypes.CDLL(None)
            assert library.mprotect(ctypes.c_void_p(address + length), ctypes.c_size_t(system_page), 0) == 0
        self.keep.append((memory, base))
        return address + at


def sides(dims: tuple[int, int], bits: tuple[int, int], lanes: int) -> tuple[SideShape, SideShape]:
    """Shapes of keys and values."""
    return tuple(SideShape(b, group_for(d), d, lanes) for b, d in zip(bits, dims, strict=True))  # type: ignore[return-value]


def attention(q: np.ndarray, pages: GuardedPages, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 output [heads, L, v_dim] and base-2 log of the softmax denominators [heads, L]."""
    keys, values = pages.values
    repeats = len(q) // len(keys)
    scores = np.einsum("hld,htd->hlt", q.astype(np.float64), keys.repeat(repeats, 0)) * q.shape[-1] ** -0.5
    at = np.arange(keys.shape[1])
    scores = np.where((at >= low[:, None]) & (at < high[:, None]), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1)
    out = np.einsum("hlt,htd->hld", weights, values.repeat(repeats, 0)) / total[..., None]
    return out, (top[..., 0] + np.log(total)) * LOG2_E


@pytest.mark.parametrize(("dims", "bits", "lanes"), list(dict.fromkeys(SHAPES)), ids=str)
def test_decode(dims: tuple[int, int], bits: tuple[int, int], lanes: int) -> None:
    """Whole pages, part of the first and of the last, several heads, more query heads than one round takes."""
    heads, repeats, tokens, low = 2, 6, 700, 5
    pages = GuardedPages(heads, tokens, dims, bits)
    shape = DecodeShape(*sides(dims, bits, lanes), 3, repeats)
    q = np.random.default_rng(1).standard_normal((heads * repeats, dims[0])).astype(np.float32)
    seen = np.array([[low, 256], [0, 256], [0, tokens - 512]], np.int64)
    scratch = np.full(shape.scratch_floats, np.nan, np.float32)
    out = np.empty((len(q), dims[1]), np.float32)
    top, total = np.empty((2, len(q)), np.float32)
    decode_kernel(shape)(
        heads, 3, 3, pages.table.ctypes.data, seen.ctypes.data, q.ctypes.data, dims[0] ** -0.5 * LOG2_E,
        scratch.ctypes.data, out.ctypes.data, top.ctypes.data, total.ctypes.data,
    )  # fmt: skip
    right, sums = attention(q[:, None], pages, np.array([low]), np.array([tokens]))
    np.testing.assert_allclose(out, right[:, 0], atol=3e-6)
    np.testing.assert_allclose(top + np.log2(total), sums[:, 0], atol=3e-6)


@pytest.mark.parametrize(("dims", "bits", "lanes"), list(dict.fromkeys(SHAPES)), ids=str)
def test_prefill(dims: tuple[int, int], bits: tuple[int, int], lanes: int) -> None:
    """A chunk over page borders in blocks of an odd length, under a window that begins inside a page."""
    try:
        library = blas()
    except KernelUnavailable as error:
        pytest.skip(str(error))
    heads, repeats, tokens, length, window = 2, 3, 700, 70, 300
    pages = GuardedPages(heads, tokens, dims, bits)
    shape = PrefillShape(*sides(dims, bits, lanes), repeats, 33)
    q = np.random.default_rng(1).standard_normal((heads * repeats, length, dims[0])).astype(np.float32)
    high = np.arange(tokens - length + 1, tokens + 1, dtype=np.int64)
    low = high - window
    scratch = np.full(shape.scratch_floats, np.nan, np.float32)
    out = np.empty((length, len(q), dims[1]), np.float32)
    top, total = np.empty((2, len(q), length), np.float32)
    items = heads * -(-length // 33)
    for first in (0, 1):  # two threads' shares
        prefill_kernel(shape)(
            first, items, 2, length, len(q), pages.count, pages.table.ctypes.data, low.ctypes.data, high.ctypes.data,
            q.ctypes.data, q.strides[0] // 4, q.strides[1] // 4, dims[0] ** -0.5 * LOG2_E, scratch.ctypes.data,
            out.ctypes.data, top.ctypes.data, total.ctypes.data, library.sgemm,
        )  # fmt: skip
    right, sums = attention(q, pages, low, high)
    np.testing.assert_allclose(out.swapaxes(0, 1), right, atol=5e-6)
    np.testing.assert_allclose(top + np.log2(total), sums, atol=5e-6)
