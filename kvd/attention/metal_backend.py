"""The backend for Apple GPUs: decode steps by kernels over packed pages, everything else by the `mlx` backend.

A step of up to 8 queries whose pages all lie in slabs (`unified_slabs`) takes one launch for the whole batch, however
long its rows are. Prefill, an open tail outside the pages, a segment in many runs and a frame outside the slabs go to
the `mlx` backend, which reads the same memory; `kernel_steps` and `other_steps` count both.

Not run on Metal so far: the kernels' source is tested as C++ (`tests/attention/test_metal_backend.py`), and the
self-test at start decides on the device. May import mlx, kvd.quant, kvd.store.frame_pool, kvd.attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, cast

import mlx.core as mx

from kvd.attention.gather import side_shape
from kvd.attention.interface import AttentionOutput, HostPages, PageSource, Row, Segment, merge, with_sinks
from kvd.attention.metal_kernels import DecodeKernels, KernelMaker, padded
from kvd.attention.mlx_backend import MlxBackend
from kvd.attention.unified_slabs import UnifiedSlabs
from kvd.quant.spec import PAGE_TOKENS
from kvd.store.frame_pool import FramePool

DECODE_QUERIES: Final = 8
"""Up to so many queries a row the kernel takes a step."""

MAX_RUNS: Final = 8
"""A lane walks through the runs; more are left to the other backend."""

TARGET_THREADGROUPS: Final = 512
"""Splits are made until a launch has about so many: enough to keep every core of a large GPU busy."""

_BLOCK_VALUES: Final = 32
"""Values of queries or outputs a lane holds in registers; bounds the rows of a block."""


class MetalBackend:
    """Attention on Apple GPUs (implements `AttentionBackend`).

    Args:
        maker: builds kernels; `mx.fast.metal_kernel` if None.
    """

    name = "metal"

    def __init__(self, maker: KernelMaker | None = None) -> None:
        self._kernels = DecodeKernels(cast("KernelMaker", mx.fast.metal_kernel) if maker is None else maker)
        self._others = MlxBackend("device")
        self.kernel_steps = 0
        self.other_steps = 0

    def make_pool(self, budget_bytes: int, largest_frame_bytes: int) -> FramePool:
        """A pool whose pages the kernels can read; steps over another pool go to the `mlx` backend.

        Args:
            budget_bytes: as in `FramePool`.
            largest_frame_bytes: payload of the largest frame it will hold.
        """
        return SlabPool(budget_bytes, UnifiedSlabs(budget_bytes, largest_frame_bytes))

    def attend(
        self,
        pages: PageSource,
        queries: mx.array,
        *,
        layer_index: int,
        rows: Sequence[Row],
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> AttentionOutput:
        """See `AttentionBackend.attend`."""
        if isinstance(pages, SlabPool) and _suits(pages, queries, rows, layer_index):
            self.kernel_steps += 1
            return self._attend_by_kernel(pages, queries, layer_index, rows, scale, window, sinks)
        self.other_steps += 1
        return self._others.attend(
            pages, queries, layer_index=layer_index, rows=rows, scale=scale, window=window, sinks=sinks
        )

    def _attend_by_kernel(
        self,
        pages: SlabPool,
        queries: mx.array,
        layer_index: int,
        rows: Sequence[Row],
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> AttentionOutput:
        """One launch per alike column of segments; rows that differ in their segments one after the other."""
        columns = [[segment for segment in row.segments if segment.tokens] for row in rows]
        if any(len(column) != len(columns[0]) or not all(map(_alike, column, columns[0])) for column in columns):
            parts = [
                self._attend_by_kernel(pages, queries[at : at + 1], layer_index, [row], scale, window, sinks)
                for at, row in enumerate(rows)
            ]
            whole = AttentionOutput(mx.concatenate([p.out for p in parts]), mx.concatenate([p.lse for p in parts]))
            mx.eval(whole)
            return whole
        starts = [row.query_start for row in rows]
        found = [
            self._launch(pages, queries, layer_index, segments, starts, scale, window)
            for segments in zip(*columns, strict=True)
        ]
        result = with_sinks(merge(found), sinks)
        mx.eval(result)
        return result

    def _launch(
        self,
        pages: SlabPool,
        queries: mx.array,
        layer_index: int,
        segments: Sequence[Segment],
        starts: Sequence[int],
        scale: float,
        window: int | None,
    ) -> AttentionOutput:
        """A batch over one segment each, all alike; lazy."""
        batch, heads, length, k_dim = queries.shape
        first = segments[0]
        kv_heads, v_dim = side_shape(pages, first, layer_index, "v")
        asked = queries.astype(mx.float32)
        if first.conditioning is not None:
            asked = first.conditioning.condition_queries(asked)
        asked = (asked * (scale * math.log2(math.e))).reshape(batch, kv_heads, heads // kv_heads * length, k_dim)
        rows_of_block = max(1, min(asked.shape[2], 32 * _BLOCK_VALUES // max(k_dim, v_dim)))
        launches = kv_heads * batch * -(-asked.shape[2] // rows_of_block)
        longest = max(segment.tokens for segment in segments)
        wanted = max(1, min(-(-longest // PAGE_TOKENS), -(-TARGET_THREADGROUPS // launches)))
        split_tokens = -(-longest // wanted)
        out, lse = self._kernels(
            pages.slabs.arrays(),
            asked,
            _tables(pages, layer_index, segments, starts),
            splits=-(-longest // split_tokens),
            split_tokens=split_tokens,
            window=window or 0,
            length=length,
            template={
                "KVH": kv_heads,
                "DK": k_dim,
                "DV": v_dim,
                "BK": first.layer_format.k.bits,
                "BV": first.layer_format.v.bits,
                "GK": first.layer_format.k.group,
                "GV": first.layer_format.v.group,
                "ROWS": rows_of_block,
            },
        )
        lse = lse.reshape(batch, heads, length)
        if first.conditioning is not None:
            lse = lse + scale * first.conditioning.centre_term(queries)
        return AttentionOutput(out.reshape(batch, heads, length, v_dim).astype(queries.dtype), lse)


class SlabPool(FramePool):
    """A `FramePool` in slabs that also says where they are."""

    def __init__(self, budget_bytes: int, slabs: UnifiedSlabs) -> None:
        super().__init__(budget_bytes, slabs)
        self.slabs = slabs


def _suits(pages: SlabPool, queries: mx.array, rows: Sequence[Row], layer_index: int) -> bool:
    """Whether the kernel can take a step."""
    if queries.shape[2] > DECODE_QUERIES or queries.shape[3] % 32 or queries.shape[3] > 256:
        return False
    for row in rows:
        segments = [segment for segment in row.segments if segment.tokens]
        if not segments:
            return False
        for segment in segments:
            if segment.tail is not None or len(segment.runs) > MAX_RUNS:
                return False
            frames = segment.block_table[: -(-segment.tokens // PAGE_TOKENS)]
            if any(pages.slabs.locate(pages.address(frame)) is None for frame in frames):
                return False
            v_dim = side_shape(pages, segment, layer_index, "v")[1]
            if v_dim % 32 or v_dim > 256:
                return False
    return True


def _alike(one: Segment, other: Segment) -> bool:
    """Whether two segments fit one launch."""
    return one.layer_format == other.layer_format and one.conditioning is other.conditioning


def _tables(
    pages: HostPages, layer_index: int, segments: Sequence[Segment], starts: Sequence[int]
) -> tuple[mx.array, mx.array, mx.array]:
    """`table`, `parts` and `runs` of a launch, as `metal_kernels` reads them."""
    assert isinstance(pages, SlabPool)
    table: list[int] = []
    parts: list[int] = []
    runs: list[int] = []
    for segment, start in zip(segments, starts, strict=True):
        present = [run for run in segment.runs if run.tokens]
        parts += [len(table) // 2, segment.tokens, len(runs) // 2, len(present), start, 0, 0, 0]
        before = 0
        for run in present:
            runs += [before, run.start]
            before += run.tokens
        for frame in segment.block_table[: -(-segment.tokens // PAGE_TOKENS)]:
            place = pages.slabs.locate(pages.address(frame))
            assert place is not None
            layer_bytes = pages.layout(frame).layer_tensors(layer_index)[0].offset_bytes
            table += [place.slab, (place.offset_bytes + layer_bytes) // 4]
    return padded(table, mx.uint32), padded(parts, mx.int32), padded(runs, mx.int32)
