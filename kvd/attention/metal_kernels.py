"""Source of the Metal kernels, and the calls that build them.

Theory of operation: split-K paged flash decoding. A threadgroup of 4 simdgroups serves one (row, block of queries, KV
head, split of the tokens); the query heads that share a KV head are rows of one block, so a key is loaded once for all.
A simdgroup takes every fourth token of the split. Lane l holds values l, 32 + l, 64 + l ... of a head, so the words of
a token are read side by side and a quantisation group is the same for all lanes: a score is the sum over groups of
scale * (sum of code * q) + bias * (sum of q), with scale and bias outside the inner product and one `simd_sum` for all.
Softmax is online and base 2 (Dao et al., 2022; queries come scaled by log2 e). The simdgroups merge in threadgroup
memory, the splits in a second kernel, which also gives the natural log-sum-exp.

The text avoids everything that ties it to one compiler, so that the tests run the very same source as C++.

May import mlx, kvd.quant.spec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx

from kvd.attention.unified_slabs import SLABS

SIMDGROUPS: Final = 4
THREADS: Final = 32 * SIMDGROUPS
"""Threads of a threadgroup of the decode kernel."""

SLAB_NAMES: Final = tuple(f"slab{index}" for index in range(SLABS))

KernelMaker = Callable[..., Callable[..., list[mx.array]]]
"""`mx.fast.metal_kernel`, or what the tests put in its place."""

HEADER: Final = """
using namespace metal;
constant constexpr float NOTHING = -3.0e38f;
"""

_PICK_SLAB: Final = "\n".join(f"            case {index}: base = slab{index}; break;" for index in range(1, SLABS))

# parts: 8 integers each: first page, tokens, first run, runs, query start, three spare.
# table: (slab, offset of the layer in words) per page. runs: (first token, position) per run. dims: split_tokens,
# window (0 for none), queries a row has (L). Grid: x = splits * THREADS, y = KV heads * blocks, z = parts.
DECODE_SOURCE: Final = (
    """
    constexpr uint EK = DK / 32, EV = DV / 32;
    constexpr uint WK = DK * BK / 32, WV = DV * BV / 32, NGK = DK / GK, NGV = DV / GV;
    constexpr uint CODES_K = KVH * 256 * WK, META_K = KVH * 256 * NGK / 2;
    constexpr uint CODES_V = KVH * 256 * WV, META_V = KVH * 256 * NGV / 2;
    uint lane = thread_index_in_simdgroup;
    uint group = simdgroup_index_in_threadgroup;
    uint split = threadgroup_position_in_grid.x;
    uint head = threadgroup_position_in_grid.y / BLOCKS;
    uint block = threadgroup_position_in_grid.y % BLOCKS;
    uint part = threadgroup_position_in_grid.z;
    uint splits = threadgroups_per_grid.x;
    int split_tokens = dims[0], window = dims[1], length = dims[2];
    int first_page = parts[part * 8], tokens = parts[part * 8 + 1];
    int first_run = parts[part * 8 + 2], run_count = parts[part * 8 + 3], query_start = parts[part * 8 + 4];

    threadgroup float shared_top[SIMDGROUPS * ROWS];
    threadgroup float shared_total[SIMDGROUPS * ROWS];
    threadgroup float shared_out[SIMDGROUPS * DV];

    float query[ROWS][EK], query_sum[ROWS][NGK], out[ROWS][EV], top[ROWS], total[ROWS];
    for (uint r = 0; r < ROWS; ++r) {
        uint row = block * ROWS + r;
        top[r] = NOTHING;
        total[r] = 0.0f;
        for (uint j = 0; j < EV; ++j) { out[r][j] = 0.0f; }
        for (uint g = 0; g < NGK; ++g) { query_sum[r][g] = 0.0f; }
        for (uint j = 0; j < EK; ++j) {
            query[r][j] = row < R ? queries[((part * KVH + head) * R + row) * DK + j * 32 + lane] : 0.0f;
            query_sum[r][j * 32 / GK] += query[r][j];
        }
    }

    int begin = int(split) * split_tokens;
    int end = begin + split_tokens < tokens ? begin + split_tokens : tokens;
    int run = 0;
    for (int token = begin + int(group); token < end; token += SIMDGROUPS) {
        while (run + 1 < run_count && runs[2 * (first_run + run + 1)] <= token) { ++run; }
        int position = runs[2 * (first_run + run) + 1] + token - runs[2 * (first_run + run)];
        // Oldest query of the step: what it must not see for age, later ones must not either.
        if (position > query_start + length - 1 || (window > 0 && query_start - position >= window)) { continue; }
        uint entry = uint(first_page + token / 256);
        uint at = head * 256 + uint(token % 256);
        const device uint* base = slab0;
        switch (table[2 * entry]) {
"""
    + _PICK_SLAB
    + """
            default: break;
        }
        base += table[2 * entry + 1];
        const device uint* codes = base + at * WK;
        const device ushort* scales = (const device ushort*)(base + CODES_K) + at * NGK;
        const device ushort* biases = (const device ushort*)(base + CODES_K + META_K) + at * NGK;
        float score[ROWS];
        for (uint r = 0; r < ROWS; ++r) { score[r] = 0.0f; }
        for (uint g = 0; g < NGK; ++g) {
            float inner[ROWS];
            for (uint r = 0; r < ROWS; ++r) { inner[r] = 0.0f; }
            for (uint j = g * GK / 32; j < (g + 1) * GK / 32; ++j) {
                uint bit = (j * 32 + lane) * BK;
                float code = float((codes[bit / 32] >> (bit % 32)) & ((1u << BK) - 1u));
                for (uint r = 0; r < ROWS; ++r) { inner[r] += code * query[r][j]; }
            }
            float scale = as_type<float>(uint(scales[g]) << 16);
            float bias = as_type<float>(uint(biases[g]) << 16);
            for (uint r = 0; r < ROWS; ++r) { score[r] += scale * inner[r] + bias * query_sum[r][g]; }
        }
        base += CODES_K + 2 * META_K;
        codes = base + at * WV;
        scales = (const device ushort*)(base + CODES_V) + at * NGV;
        biases = (const device ushort*)(base + CODES_V + META_V) + at * NGV;
        float value[EV];
        for (uint j = 0; j < EV; ++j) {
            uint bit = (j * 32 + lane) * BV;
            float code = float((codes[bit / 32] >> (bit % 32)) & ((1u << BV) - 1u));
            value[j] = code * as_type<float>(uint(scales[j * 32 / GV]) << 16)
                     + as_type<float>(uint(biases[j * 32 / GV]) << 16);
        }
        for (uint r = 0; r < ROWS; ++r) {
            float whole = simd_sum(score[r]);
            uint row = block * ROWS + r;
            int age = query_start + int(row) % length - position;
            if (row >= R || age < 0 || (window > 0 && age >= window)) { continue; }
            float higher = whole > top[r] ? whole : top[r];
            float keep = exp2(top[r] - higher), weight = exp2(whole - higher);
            top[r] = higher;
            total[r] = total[r] * keep + weight;
            for (uint j = 0; j < EV; ++j) { out[r][j] = out[r][j] * keep + weight * value[j]; }
        }
    }

    if (lane == 0) {
        for (uint r = 0; r < ROWS; ++r) {
            shared_top[group * ROWS + r] = top[r];
            shared_total[group * ROWS + r] = total[r];
        }
    }
    for (uint r = 0; r < ROWS; ++r) {
        for (uint j = 0; j < EV; ++j) { shared_out[group * DV + j * 32 + lane] = out[r][j]; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint row = block * ROWS + r;
        float highest = NOTHING, sum = 0.0f;
        for (uint g = 0; g < SIMDGROUPS; ++g) {
            highest = shared_top[g * ROWS + r] > highest ? shared_top[g * ROWS + r] : highest;
        }
        for (uint g = 0; g < SIMDGROUPS; ++g) {
            sum += shared_total[g * ROWS + r] * exp2(shared_top[g * ROWS + r] - highest);
        }
        uint to = ((part * KVH + head) * R + row) * splits + split;
        if (row < R) {
            for (uint d = group * 32 + lane; d < DV; d += SIMDGROUPS * 32) {
                float mixed = 0.0f;
                for (uint g = 0; g < SIMDGROUPS; ++g) {
                    mixed += shared_out[g * DV + d] * exp2(shared_top[g * ROWS + r] - highest);
                }
                partial_out[to * DV + d] = mixed;
            }
            if (group == 0 && lane == 0) {
                partial_top[to] = highest;
                partial_total[to] = sum;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
"""
)

# Grid: x = 32, y = rows of all parts. dims: splits.
MERGE_SOURCE: Final = """
    uint lane = thread_index_in_simdgroup;
    uint row = threadgroup_position_in_grid.y;
    uint splits = uint(dims[0]);
    float highest = NOTHING, total = 0.0f;
    for (uint s = lane; s < splits; s += 32) {
        highest = partial_top[row * splits + s] > highest ? partial_top[row * splits + s] : highest;
    }
    highest = simd_max(highest);
    for (uint s = lane; s < splits; s += 32) {
        total += partial_total[row * splits + s] * exp2(partial_top[row * splits + s] - highest);
    }
    total = simd_sum(total);
    for (uint d = lane; d < DV; d += 32) {
        float mixed = 0.0f;
        for (uint s = 0; s < splits; ++s) {
            mixed += partial_out[(row * splits + s) * DV + d] * exp2(partial_top[row * splits + s] - highest);
        }
        out[row * DV + d] = total > 0.0f ? mixed / total : 0.0f;
    }
    if (lane == 0) {
        lse[row] = total > 0.0f ? (highest + log2(total)) * 0.69314718055994531f : -INFINITY;
    }
"""


class DecodeKernels:
    """The two kernels, ready to be called.

    Args:
        maker: `mx.fast.metal_kernel` or a replacement with its signature.
    """

    def __init__(self, maker: KernelMaker) -> None:
        self._decode = maker(
            name="kvd_paged_decode",
            input_names=[*SLAB_NAMES, "queries", "table", "parts", "runs", "dims"],
            output_names=["partial_out", "partial_top", "partial_total"],
            source=DECODE_SOURCE,
            header=HEADER,
        )
        self._merge = maker(
            name="kvd_merge_splits",
            input_names=["partial_out", "partial_top", "partial_total", "dims"],
            output_names=["out", "lse"],
            source=MERGE_SOURCE,
            header=HEADER,
        )

    def __call__(
        self,
        slabs: Sequence[mx.array],
        queries: mx.array,
        tables: Sequence[mx.array],
        *,
        splits: int,
        split_tokens: int,
        window: int,
        length: int,
        template: dict[str, int],
    ) -> tuple[mx.array, mx.array]:
        """Run both kernels.

        Args:
            slabs: 16 arrays uint32.
            queries: mx float32 [parts, kv_heads, R, k_dim], scaled by scale * log2 e; row r is query r % length.
            tables: `table` uint32, `parts` int32, `runs` int32, each of at least 8 entries.
            splits: splits of the longest part.
            split_tokens: tokens of each.
            window: tokens a query sees, 0 for all.
            length: queries of a part.
            template: KVH, DK, DV, BK, BV, GK, GV (heads, widths, bits, groups) and ROWS (of a block).

        Returns:
            out mx float32 [parts, kv_heads, R, v_dim] and lse mx float32 [parts, kv_heads, R], lazy.
        """
        parts, kv_heads, rows, _ = queries.shape
        blocks, v_dim = -(-rows // template["ROWS"]), template["DV"]
        constants = [*template.items(), ("R", rows), ("BLOCKS", blocks), ("SIMDGROUPS", SIMDGROUPS)]
        total = parts * kv_heads * rows
        partial = self._decode(
            inputs=[*slabs, queries, *tables, _dims(split_tokens, window, length)],
            template=constants,
            grid=(splits * THREADS, kv_heads * blocks, parts),
            threadgroup=(THREADS, 1, 1),
            # At least 8 rows: mlx would pass less to the second kernel in another address space.
            output_shapes=[(max(total, 8), splits, v_dim), (max(total, 8), splits), (max(total, 8), splits)],
            output_dtypes=[mx.float32] * 3,
        )
        out, lse = self._merge(
            inputs=[*partial, _dims(splits)],
            template=[("DV", v_dim)],
            grid=(32, total, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(total, v_dim), (total,)],
            output_dtypes=[mx.float32] * 2,
        )
        return out.reshape(parts, kv_heads, rows, v_dim), lse.reshape(parts, kv_heads, rows)


def _dims(*values: int) -> mx.array:
    """Integers as an input; mlx passes arrays of fewer than 8 in another address space, so it is padded."""
    return padded(values, mx.int32)


def padded(values: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Mx array of integers with at least 8 entries."""
    return mx.array([*values, *[0] * (8 - len(values))], dtype)
