"""Random pages for attention tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from kvd.attention import AttentionBackend, Run, Segment, TailArrays, TailSide
from kvd.attention.gather import gather
from kvd.attention.masks import positions_of
from kvd.attention.select import BACKENDS
from kvd.ids import FrameId
from kvd.native import KernelUnavailable
from kvd.quant.codec import encode
from kvd.quant.conditioning import Conditioning
from kvd.quant.spec import PAGE_TOKENS, PageLayout, named_format
from kvd.store.frame_pool import FramePool

LAYER = 5
"""Index of the only layer, not 0, so that nobody mistakes it for a position."""


def cpu_backend() -> AttentionBackend:
    """The backend of compiled kernels; where it cannot run, its tests are skipped with the reason."""
    try:
        return BACKENDS["cpu"]()
    except KernelUnavailable as error:
        pytest.skip(str(error))


class Pages:
    """A pool of one layer's random pages in one or more formats; frames are numbered backwards."""

    def __init__(self, *, kv_heads: int = 2, k_dim: int = 64, v_dim: int = 64, seed: int = 0) -> None:
        self.pool = FramePool(1 << 32)
        self.kv_heads, self.k_dim, self.v_dim = kv_heads, k_dim, v_dim
        self.rng = np.random.default_rng(seed)
        self._next = 10_000

    def segment(
        self,
        tokens: int,
        name: str = "q4",
        positions_start: int = 0,
        spread: float = 1.0,
        runs: tuple[Run, ...] | None = None,
    ) -> Segment:
        """`tokens` random tokens in new frames, at consecutive positions or at those of `runs`.

        `q4c` gets random constants.
        """
        digest = "x" if name == "q4c" else None
        page_format = named_format(name, k_dim=self.k_dim, v_dim=self.v_dim, layer_count=1, conditioning=digest)
        layout = PageLayout(
            layer_indices=(LAYER,), kv_heads=self.kv_heads, k_dim=self.k_dim, v_dim=self.v_dim, page_format=page_format
        )
        table = []
        for _ in range(-(-tokens // PAGE_TOKENS)):
            frame = self.frame(layout)
            arrays = self.pool.layer(frame, LAYER)
            for side, side_format, dim in (
                (arrays.k, page_format.layers[0].k, self.k_dim),
                (arrays.v, page_format.layers[0].v, self.v_dim),
            ):
                x = self.rng.standard_normal((self.kv_heads, PAGE_TOKENS, dim), dtype=np.float32) * np.float32(spread)
                side.codes[:], side.scales[:], side.biases[:] = encode(x, side_format)
            table.append(frame)
        conditioning = None
        if digest is not None:
            shape = (1, self.kv_heads, self.k_dim)
            centre = self.rng.standard_normal(shape, dtype=np.float32)
            scale = np.exp(self.rng.standard_normal(shape, dtype=np.float32) / 4)
            conditioning = Conditioning(centre, scale).layers[0]
        where = runs if runs is not None else (Run(positions_start, tokens),)
        return Segment(tuple(table), where, page_format.layers[0], conditioning)

    def frame(self, layout: PageLayout) -> FrameId:
        """A new frame."""
        self._next -= 1
        self.pool.create(FrameId(self._next), layout)
        return FrameId(self._next)

    def picked(self, segment: Segment, tokens: npt.NDArray[np.int64]) -> Segment:
        """Some tokens of a segment, ascending, copied into new frames and kept at their positions."""
        layout = self.pool.layout(segment.block_table[0])
        table = [self.frame(layout) for _ in range(-(-len(tokens) // PAGE_TOKENS))]
        for side in ("k", "v"):
            whole = gather(self.pool, segment, LAYER, side, 0, segment.tokens)
            for page, frame in enumerate(table):
                chosen = tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
                arrays = getattr(self.pool.layer(frame, LAYER), side)
                for part in ("codes", "scales", "biases"):
                    getattr(arrays, part)[:, : len(chosen)] = getattr(whole, part)[:, chosen]
        return replace(segment, block_table=tuple(table), runs=runs_of(positions_of(segment.runs)[tokens]))

    def with_tail(self, segment: Segment, tokens: int, *, on_device: bool = False, spare: int = 7) -> Segment:
        """The segment with its last `tokens` tokens in arrays of their own, and rubbish where they were.

        The arrays have room for `spare` tokens more, which hold rubbish as well.
        """
        paged = segment.tokens - tokens
        sides = []
        for side in ("k", "v"):
            parts = []
            for part in gather(self.pool, segment, LAYER, side, paged, segment.tokens):
                wide = np.full((part.shape[0], tokens + spare, part.shape[2]), 0x7FC0, part.dtype)
                wide[:, :tokens] = part
                parts.append(mx.array(wide) if on_device else wide)
            sides.append(TailSide(*parts))
        table = segment.block_table[: -(-paged // PAGE_TOKENS)]
        for page, frame in enumerate(segment.block_table):
            arrays = self.pool.layer(frame, LAYER)
            for array in (arrays.k, arrays.v):
                array.codes[:, max(paged - page * PAGE_TOKENS, 0) :] = 0xFFFFFFFF
                array.scales[:, max(paged - page * PAGE_TOKENS, 0) :] = 0x7FC0
        return replace(segment, block_table=table, tail=TailArrays(sides[0], sides[1], tokens))

    def queries(self, heads: int, tokens: int, batch: int = 1) -> mx.array:
        """Random queries [batch, heads, tokens, k_dim]."""
        return mx.array(self.rng.standard_normal((batch, heads, tokens, self.k_dim), dtype=np.float32))


def runs_of(positions: Sequence[int] | npt.NDArray[np.int64]) -> tuple[Run, ...]:
    """Ascending positions as runs."""
    runs: list[Run] = []
    for position in map(int, positions):
        if runs and runs[-1].start + runs[-1].tokens == position:
            runs[-1] = Run(runs[-1].start, runs[-1].tokens + 1)
        else:
            runs.append(Run(position, 1))
    return tuple(runs)
