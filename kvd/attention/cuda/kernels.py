"""CUDA kernels over packed pages, launched on mlx arrays.

Theory of operation. Pages live in device memory that mlx allocated but does not track page by page: a kernel gets the
*addresses* of a row's frames (uint64, device memory), the byte offsets of a layer's six tensors in a frame, and the
range of tokens to look at. So tables can name any frame, nothing is copied between requests, and appending writes in
place. mlx orders kernels by the arrays they share; since pages are no arrays, every kernel that writes pages returns a
small array (`order`) which every later reader and writer takes as an input.

Decoding is split-K: a block handles one KV head of one row over a share of its tokens, with the query heads that share
the KV head as the narrow side of tensor-core products (up to 8 a block). Packed words are the other factor without
being unpacked: the bits of a code left in place are a denormal half, exactly a power of two times the code (see
`paged_decode.cuh`). Scales and biases stay outside the inner product. The block that ends last combines the splits by
log-sum-exp, so two streams of different bits are one launch: each split reads one of them.

Kernels are compiled once a process and variant by mlx (NVRTC, two to three seconds each). The source is small on
purpose: mlx hashes it at each launch. May import mlx, kvd.attention.errors, kvd.quant.spec.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, NamedTuple

import mlx.core as mx

from kvd.attention.errors import BackendUnavailable
from kvd.quant.spec import PAGE_TOKENS, SideFormat

MULTIPROCESSORS: Final = 132
"""Of an H100 or H200; on a GPU with another number splits are less well chosen."""

SHARED_BYTES: Final = 227 * 1024
"""Shared memory of a multiprocessor that blocks may use."""

HEADS_A_BLOCK: Final = 8
"""Query heads of one block: the narrow side of the tensor cores' product."""

_MOST_SPLITS: Final = 2 * MULTIPROCESSORS
_LOG2_E: Final = 1.4426950408889634
_TYPES: Final = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half", mx.float32: "float"}


class Stream(NamedTuple):
    """Tokens of one format, of every row of a batch.

    Attributes:
        frames: uint64 [B, pages], addresses of frames in device memory.
        places: int64 [6], byte offsets in a frame of k.codes, k.scales, k.biases, v.codes, v.scales, v.biases.
        spans: int32 [B, 2], first token to see and one past the last, counted in the pages of `frames`.
    """

    frames: mx.array
    places: mx.array
    spans: mx.array


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of a code of keys and values."""

    k: int
    v: int


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a decode kernel is compiled for."""

    bits: tuple[Bits, ...]
    k_dim: int
    v_dim: int
    heads: int
    chunks: int
    dtype: mx.Dtype
    scale: float
    warps: int
    stages: tuple[int, ...]
    tile: int

    @property
    def name(self) -> str:
        bits = "_".join(f"{b.k}{b.v}" for b in self.bits)
        stages = "".join(map(str, self.stages))
        factor = re.sub(r"[^0-9a-z]", "_", repr(self.scale))
        kind = _TYPES[self.dtype].strip("_")
        return (
            f"kvd_decode_{bits}_{self.k_dim}_{self.v_dim}_{self.heads}x{self.chunks}_{self.warps}_{stages}_{self.tile}"
            f"_{kind}_{factor}"
        )


def check_side(side: SideFormat, dim: int) -> None:
    """Raise BackendUnavailable unless the kernels can read this side of a page."""
    if (side.group, side.axis) != (64, "head_dim") or dim % 64:
        raise BackendUnavailable(
            f"the cuda kernels read groups of 64 along heads of n * 64, not {side.group} of {dim}, {side.axis}"
        )


def decode(
    queries: mx.array,
    streams: Sequence[tuple[Bits, Stream]],
    *,
    kv_heads: int,
    v_dim: int,
    longest: int,
    scale: float,
    counters: mx.array,
    order: mx.array,
    after: mx.array,
) -> tuple[mx.array, mx.array]:
    """Attention of one query a row.

    Args:
        queries: mx [B, heads, 1, k_dim], bfloat16, float16 or float32.
        streams: one or two, of different bits.
        kv_heads: KV heads.
        v_dim: width of a value.
        longest: tokens of the longest row, over all streams.
        scale: factor of the scores.
        counters: int32 [>= B * kv_heads * chunks], zeros; left zeros. Shared by launches that follow each other.
        order: what the last write to pages returned.
        after: an output of the launch before this one that used the same `counters`.

    Returns:
        (mx [B, heads, 1, v_dim] in the queries' dtype, natural log-sum-exp float32 [B, heads, 1]).
    """
    batch, heads, _, k_dim = queries.shape
    sharing = heads // kv_heads
    width = next(n for n in range(min(sharing, HEADS_A_BLOCK), 0, -1) if sharing % n == 0)
    shape = _shape(
        tuple(bits for bits, _ in streams), k_dim, v_dim, width, sharing // width, queries.dtype, scale, batch * longest
    )
    blocks = kv_heads * shape.chunks
    tiles = -(-longest // shape.tile)
    splits = max(1, min(_resident_blocks(shape) // (batch * blocks), -(-tiles // shape.warps), _MOST_SPLITS))
    if len(streams) > 1:
        splits = max(splits, min(8, max(2, tiles // shape.warps)))
    inputs = [queries]
    for _, stream in streams:
        inputs += [stream.frames, stream.places, stream.spans]
    out, lse, _, _ = _decode_kernel(shape)(
        inputs=[*inputs, counters, order, after],
        grid=(splits * shape.warps * 32, blocks, batch),
        threadgroup=(shape.warps * 32, 1, 1),
        output_shapes=[
            (batch, heads, 1, v_dim),
            (batch, heads, 1),
            (batch, heads, splits, v_dim),
            (batch, heads, splits, 2),
        ],
        output_dtypes=[queries.dtype, mx.float32, mx.float32, mx.float32],
    )
    return out, lse


def append(keys: mx.array, values: mx.array, bits: Bits, stream: Stream, starts: mx.array, order: mx.array) -> mx.array:
    """Quantise new tokens into pages, in place, as the codec does.

    Args:
        keys: mx [B, kv_heads, n, k_dim], conditioned already.
        values: mx [B, kv_heads, n, v_dim], same dtype.
        bits: of codes.
        stream: where; `spans` is not used.
        starts: int32 [B], place of each row's first new token, counted in the pages of the stream.
        order: what the last write to pages returned.

    Returns:
        The next `order`: int32, not all zeros if a value did not fit its format, here or in an append before.
    """
    batch, heads, tokens, k_dim = keys.shape
    v_dim = values.shape[-1]
    warps = batch * heads * tokens * (k_dim + v_dim) // 64
    blocks = -(-warps // 8)
    kernel = _append_kernel(bits, k_dim, v_dim, keys.dtype)
    done: mx.array = kernel(
        inputs=[keys, values, stream.frames, stream.places, starts, order],
        grid=(blocks * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(max(blocks, 4),)],
        output_dtypes=[mx.int32],
    )[0]
    return done


def dequantise(
    bits: Bits,
    stream: Stream,
    first: int,
    tokens: int,
    *,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    dtype: mx.Dtype,
    order: mx.array,
) -> tuple[mx.array, mx.array]:
    """Tokens [first, first + tokens) of one row as contiguous values.

    Args:
        bits: of codes.
        stream: of one row; `spans` is not used.
        first: first token, counted in the pages of the stream, a multiple of 256.
        tokens: how many.
        kv_heads: KV heads.
        k_dim: width of a key.
        v_dim: width of a value.
        dtype: of the result.
        order: what the last write to pages returned.

    Returns:
        mx [1, kv_heads, tokens, k_dim] and [1, kv_heads, tokens, v_dim].
    """
    kernel = _dequantise_kernel(bits, k_dim, v_dim, dtype)
    k, v = kernel(
        inputs=[stream.frames, stream.places, _whole_number(first // PAGE_TOKENS), _whole_number(tokens), order],
        grid=(-(-tokens // PAGE_TOKENS) * 256, 2 * kv_heads, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(1, kv_heads, tokens, k_dim), (1, kv_heads, tokens, v_dim)],
        output_dtypes=[dtype, dtype],
    )
    return k, v


def on_device(array: mx.array) -> mx.array:
    """A copy in device memory: arrays made by the host, and very small ones, live in memory that is slow to read.

    `array` must stay referenced until the result is evaluated: its buffer would be reused for the result.
    """
    return mx.add(array, mx.array(0, array.dtype))


@functools.lru_cache(256)
def _whole_number(value: int) -> mx.array:
    """int32 [4] of one number, in device memory."""
    host = mx.full((4,), value, mx.int32)
    mx.eval(host)
    device = on_device(host)
    mx.eval(device)
    return device


# ---- variants --------------------------------------------------------------------------------------------------------


def _stage_bytes(bits: Bits, k_dim: int, v_dim: int, tile: int) -> int:
    """Bytes of one tile in shared memory."""
    return tile * (k_dim * bits.k + v_dim * bits.v) // 8 + tile * 4 * (k_dim + v_dim) // 64


def _shared_bytes(shape: _Shape) -> int:
    """Dynamic shared memory of a block: the rings, or what the end of the kernel needs in their place."""
    rings = max(
        shape.warps * stages * _stage_bytes(bits, shape.k_dim, shape.v_dim, shape.tile)
        for bits, stages in zip(shape.bits, shape.stages, strict=True)
    )
    results = shape.warps * (64 + shape.heads * shape.v_dim * 4)
    quads = max(shape.warps * 32, shape.heads * shape.v_dim // 4)
    combining = 16 + 4 * (shape.heads * _MOST_SPLITS + 4) + 16 * quads
    return max(rings, results, combining) + 16


def _resident_blocks(shape: _Shape) -> int:
    """Blocks that run at once: 16 warps a multiprocessor if their shared memory fits."""
    fitting = SHARED_BYTES // (_shared_bytes(shape) + 1024)
    return MULTIPROCESSORS * max(1, min(16 // shape.warps, fitting))


@functools.lru_cache(256)
def _shape(
    bits: tuple[Bits, ...], k_dim: int, v_dim: int, heads: int, chunks: int, dtype: mx.Dtype, scale: float, tokens: int
) -> _Shape:
    """The variant for a shape: 16 warps a multiprocessor, as many stages as fit; wide heads need more registers."""
    wide = k_dim >= 256 or v_dim >= 256
    many = tokens >= 1 << 18
    # (warps, stages, tile), measured on an H200; 2-bit codes are bound by instructions, of which long tiles need less
    tries: list[tuple[int, int, int]] = [(8, 2, 32), (4, 2, 32)]
    if k_dim > 256:
        tries = [(8, 2, 16)]
    elif not wide and k_dim == v_dim:
        if many and len(bits) > 1:
            tries[:0] = [(8, 2, 64)]
        elif many:
            tries[:0] = [(16, 2, 64 if bits == (Bits(2, 2),) else 32)]
        else:
            tries[:0] = [(8, 3, 32)]
    for warps, stages, tile in [*tries, (4, 2, 16), (4, 1, 16), (2, 1, 16)]:
        shape = _Shape(bits, k_dim, v_dim, heads, chunks, dtype, scale, warps, (stages,) * len(bits), tile)
        blocks = max(1, (8 if wide else 16) // warps)
        if blocks * (_shared_bytes(shape) + 1024) <= SHARED_BYTES or (
            blocks > 1 and warps <= 8 and stages <= 2 and _shared_bytes(shape) + 1024 <= SHARED_BYTES
        ):
            return shape
    raise BackendUnavailable(f"no variant of the cuda kernel fits heads of {k_dim} and {v_dim}")


@functools.cache
def _source(name: str) -> str:
    """A header without comments and with little white space: mlx hashes it at every launch."""
    text = resources.files(__package__).joinpath(name).read_text("utf-8")
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r"\n\s*", "\n", text)


@functools.cache
def _decode_kernel(shape: _Shape) -> Any:  # noqa: ANN401  mlx's callable
    names = [name for i in range(len(shape.bits)) for name in (f"frames{i}", f"places{i}", f"spans{i}")]
    kind = _TYPES[shape.dtype]
    threads = shape.warps * 32

    def attend(i: int, low: str, high: str) -> str:
        bits = shape.bits[i]
        return f"""{{
  const kvd::Stream s{{(const kvd::u64*)frames{i} + (size_t)b * frames{i}_shape[1], (const long long*)places{i},
    spans{i}[2 * b], spans{i}[2 * b + 1]}};
  const int tile0 = s.begin / {shape.tile}, tiles = (s.end + {shape.tile - 1}) / {shape.tile} - tile0;
  const int at = split - ({low}), of = ({high}) - ({low});
  kvd::attend<{kind}, {bits.k}, {bits.v}, {shape.k_dim}, {shape.v_dim}, {shape.heads}, {shape.warps},
    {shape.stages[i]}, {shape.tile}>(q + (size_t)first * {shape.k_dim}, s, head,
    tile0 + (int)((long long)tiles * at / of), tile0 + (int)((long long)tiles * (at + 1) / of),
    {shape.scale * _LOG2_E!r}f, smem, pacc_, pml_, S);
}}"""

    if len(shape.bits) == 1:
        work = attend(0, "0", "S")
    else:
        # Splits are shared out by bytes; each reads one stream.
        cost = [
            _stage_bytes(bits, shape.k_dim, shape.v_dim, 1) + 160 * (shape.k_dim + shape.v_dim) // 256
            for bits in shape.bits
        ]
        work = f"""
const int n0 = spans0[2 * b + 1] - spans0[2 * b], n1 = spans1[2 * b + 1] - spans1[2 * b];
const float w0 = (float)n0 * {cost[0]}, w1 = (float)n1 * {cost[1]};
int cut = w0 + w1 > 0.f ? (int)(S * (w0 / (w0 + w1)) + 0.5f) : S;
if (n0 > 0 && cut == 0) cut = 1;
if (n1 > 0 && cut == S) cut = S - 1;
if (split < cut) {attend(0, "0", "cut")} else {attend(1, "cut", "S")}
"""
    source = f"""
#undef custom_kernel_{shape.name}
extern __shared__ __align__(128) char smem[];
const int S = gridDim.x, split = blockIdx.x, group = blockIdx.y, b = blockIdx.z, head = group / {shape.chunks};
const int cell = b * gridDim.y + group, first = cell * {shape.heads};
float* pacc_ = pacc + ((size_t)first * S + split) * {shape.v_dim};
float* pml_ = pml + ((size_t)first * S + split) * 2;
{work}
__threadfence();
__syncthreads();
int* last = (int*)smem;
if (threadIdx.x == 0) {{
  unsigned* counter = (unsigned*)const_cast<int*>(counters) + cell;
  const unsigned before = atomicAdd(counter, 1u);
  last[0] = before == S - 1;
  if (before == S - 1) *counter = 0;
}}
__syncthreads();
if (last[0]) {{
  __threadfence();
  kvd::combine<{kind}, {shape.v_dim}, {shape.heads}, {threads}>(pacc + (size_t)first * S * {shape.v_dim},
    pml + (size_t)first * S * 2, S, smem + 16, out + (size_t)first * {shape.v_dim}, lse + first);
}}
"""
    return mx.fast.cuda_kernel(
        name=shape.name,
        input_names=["q", *names, "counters", "order", "after"],
        output_names=["out", "lse", "pacc", "pml"],
        header=_source("paged_decode.cuh") + _bounds(shape),
        source=source,
        shared_memory=_shared_bytes(shape),
    )


def _bounds(shape: _Shape) -> str:
    """Launch bounds, which mlx has no argument for: a macro puts them before the kernel's name, where it is defined."""
    name = f"custom_kernel_{shape.name}"
    blocks = _resident_blocks(shape) // MULTIPROCESSORS
    return f"\n#define {name} __launch_bounds__({shape.warps * 32}, {blocks}) {name}\n"


@functools.cache
def _append_kernel(bits: Bits, k_dim: int, v_dim: int, dtype: mx.Dtype) -> Any:  # noqa: ANN401
    kind = _TYPES[dtype]
    key_groups, value_groups = k_dim // 64, v_dim // 64

    def encode(side: str, at: int, width: int, code_bits: int) -> str:
        row, groups = width * code_bits // 8, width // 64
        return f"""bad = kvd::encode_group<{kind}, {code_bits}>(
    {side} + (((size_t)b * heads + head) * n + i) * {width} + group * 64,
    frame + places[{at}] + row * {row} + group * {8 * code_bits},
    frame + places[{at + 1}] + (row * {groups} + group) * 2,
    frame + places[{at + 2}] + (row * {groups} + group) * 2);"""

    source = f"""
const int heads = k_shape[1], n = k_shape[2];
const int warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, all = {key_groups + value_groups};
bool bad = false;
if (warp < k_shape[0] * heads * n * all) {{
  const int cell = warp % all, r = warp / all, i = r % n, head = (r / n) % heads, b = r / (n * heads);
  const int slot = starts[b] + i;
  char* frame = (char*)frames[(size_t)b * frames_shape[1] + slot / 256];
  const long long row = (long long)head * 256 + slot % 256;
  if (cell < {key_groups}) {{ const int group = cell; {encode("k", 0, k_dim, bits.k)} }}
  else {{ const int group = cell - {key_groups}; {encode("v", 3, v_dim, bits.v)} }}
}}
if (blockIdx.x == 0) for (int i = threadIdx.x; i < order_shape[0]; i += blockDim.x) bad |= order[i] != 0;
const int any = __syncthreads_or(bad);
if (threadIdx.x == 0) done[blockIdx.x] = any;
if (blockIdx.x == 0 && threadIdx.x < 4 && threadIdx.x >= gridDim.x) done[threadIdx.x] = 0;
"""
    return mx.fast.cuda_kernel(
        name=f"kvd_append_{bits.k}{bits.v}_{k_dim}_{v_dim}_{kind.strip('_')}",
        input_names=["k", "v", "frames", "places", "starts", "order"],
        output_names=["done"],
        header=_source("pages.cuh"),
        source=source,
    )


@functools.cache
def _dequantise_kernel(bits: Bits, k_dim: int, v_dim: int, dtype: mx.Dtype) -> Any:  # noqa: ANN401
    kind = _TYPES[dtype]

    def decode_side(side: str, at: int, width: int, code_bits: int) -> str:
        return (
            f"kvd::decode_rows<{kind}, {code_bits}, {width}>(frame + places[{at}] + row * {width * code_bits // 8}, "
            f"frame + places[{at + 1}] + row * {width // 32}, frame + places[{at + 2}] + row * {width // 32}, "
            f"rows, {side} + ((size_t)head * n + page * 256) * {width});"
        )

    source = f"""
const int n = tokens[0], page = blockIdx.x, head = blockIdx.y >> 1;
const int rows = min(256, n - page * 256);
if (rows <= 0) return;
const char* frame = (const char*)frames[first[0] + page];
const long long row = (long long)head * 256;
if (blockIdx.y & 1) {{ {decode_side("v", 3, v_dim, bits.v)} }} else {{ {decode_side("k", 0, k_dim, bits.k)} }}
"""
    return mx.fast.cuda_kernel(
        name=f"kvd_dequantise_{bits.k}{bits.v}_{k_dim}_{v_dim}_{kind.strip('_')}",
        input_names=["frames", "places", "first", "tokens", "order"],
        output_names=["k", "v"],
        header=_source("pages.cuh"),
        source=source,
    )


__all__ = ["Bits", "Stream", "append", "check_side", "decode", "dequantise", "on_device"]
