"""Attention over quantised pages: one interface, several backends.

- `interface`: segments, runs, open tails, rows, results, the backend protocol, merging by log-sum-exp.
- `reference`: dequantise everything, softmax in float64: the oracle of every test.
- `masks`: tiles of a segment, what queries see of each.
- `gather`: a tile's tokens out of host pages and the open tail, packed or dequantised.
- `mlx_backend`: walks the context in tiles with an online softmax.
- `host_tiles`: a tile's arithmetic in numpy and BLAS, for CPU.
- `device_tiles`: a tile's arithmetic in mlx operations, for GPUs.
- `cpu_backend`: compiled kernels over packed pages, for Linux CPUs.
- `cpu_decode`: its kernel for a few queries, straight from the codes.
- `cpu_rows`: which rows, pages and heads of a decode step its kernel takes, and on which thread.
- `cpu_prefill`: its kernel for many queries, a page dequantised at a time.
- `metal_backend`: decode steps on Apple GPUs by kernels over packed pages, the rest by `mlx_backend`.
- `metal_kernels`: the source of these kernels and the calls that build them.
- `unified_slabs`: frames inside a few large mlx arrays that kernels and numpy share.
- `cuda`: backend, pool and kernels for NVIDIA GPUs (a package; imported only where mlx has a CUDA device).
- `select`: which backend runs, after a self-test against `reference`.
- `errors`: the package's error classes.

May import mlx, numpy, kvd.errors, kvd.ids, kvd.native, kvd.quant and kvd.store.frame_pool; nothing of model, vm,
scheduler, front.
"""

from kvd.attention.errors import BackendDisagrees, BackendUnavailable, UnsupportedMask
from kvd.attention.interface import (
    AttentionBackend,
    AttentionOutput,
    DeviceWriter,
    HostPages,
    PageSource,
    Row,
    Run,
    Segment,
    TailArrays,
    TailSide,
    host_pages,
    merge,
)
from kvd.attention.mlx_backend import MlxBackend
from kvd.attention.reference import ReferenceBackend
from kvd.attention.select import BackendChoice, ShapeProbe, pool_for, select_backend

__all__ = [
    "AttentionBackend",
    "AttentionOutput",
    "BackendChoice",
    "BackendDisagrees",
    "BackendUnavailable",
    "DeviceWriter",
    "HostPages",
    "MlxBackend",
    "PageSource",
    "ReferenceBackend",
    "Row",
    "Run",
    "Segment",
    "ShapeProbe",
    "TailArrays",
    "TailSide",
    "UnsupportedMask",
    "host_pages",
    "merge",
    "pool_for",
    "select_backend",
]
