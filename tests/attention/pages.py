"""Random pages for attention tests."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvd.attention import Segment
from kvd.ids import FrameId
from kvd.quant.codec import encode
from kvd.quant.conditioning import Conditioning
from kvd.quant.spec import PAGE_TOKENS, PageLayout, named_format
from kvd.store.frame_pool import FramePool

LAYER = 5
"""Index of the only layer, not 0, so that nobody mistakes it for a position."""


class Pages:
    """A pool of one layer's random pages in one or more formats; frames are numbered backwards."""

    def __init__(self, *, kv_heads: int = 2, k_dim: int = 64, v_dim: int = 64, seed: int = 0) -> None:
        self.pool = FramePool(1 << 32)
        self.kv_heads, self.k_dim, self.v_dim = kv_heads, k_dim, v_dim
        self.rng = np.random.default_rng(seed)
        self._next = 10_000

    def segment(self, tokens: int, name: str = "q4", positions_start: int = 0, spread: float = 1.0) -> Segment:
        """`tokens` random tokens in new frames; `q4c` gets random constants."""
        digest = "x" if name == "q4c" else None
        page_format = named_format(name, k_dim=self.k_dim, v_dim=self.v_dim, layer_count=1, conditioning=digest)
        layout = PageLayout(
            layer_indices=(LAYER,), kv_heads=self.kv_heads, k_dim=self.k_dim, v_dim=self.v_dim, page_format=page_format
        )
        table = []
        for _ in range(-(-tokens // PAGE_TOKENS)):
            self._next -= 1
            frame = FrameId(self._next)
            self.pool.create(frame, layout)
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
        return Segment(tuple(table), tokens, page_format.layers[0], conditioning, positions_start)

    def queries(self, heads: int, tokens: int, batch: int = 1) -> mx.array:
        """Random queries [batch, heads, tokens, k_dim]."""
        return mx.array(self.rng.standard_normal((batch, heads, tokens, self.k_dim), dtype=np.float32))
