"""Which attention backend runs: the fastest right one, checked against `reference` on this device and these shapes.

A wrong kernel must never serve text: the self-test runs at start, and a backend that disagrees is passed over with a
notice that the daemon logs and `hello` repeats. Of those that agree, the one that is fastest on a decode step and a
prefill chunk of each shape is taken; the data folder records it, and later starts follow the record. May import mlx,
numpy, kvd.native, kvd.quant, kvd.store.frame_pool, kvd.attention.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import mlx.core as mx
import numpy as np

from kvd.attention.errors import BackendDisagrees, BackendUnavailable
from kvd.attention.gather import gather
from kvd.attention.interface import AttentionBackend, DeviceWriter, Row, Run, Segment, TailArrays, TailSide
from kvd.attention.metal_backend import MetalBackend
from kvd.attention.mlx_backend import MlxBackend
from kvd.attention.reference import ReferenceBackend
from kvd.ids import FrameId
from kvd.native import KernelUnavailable
from kvd.quant.codec import encode
from kvd.quant.conditioning import Conditioning
from kvd.quant.spec import PAGE_TOKENS, LayerFormat, PageFormat, PageLayout
from kvd.store.frame_memory import RecycledMappings
from kvd.store.frame_pool import FramePool, Frames


def _cuda_backend() -> AttentionBackend:
    """Kernels for NVIDIA GPUs; imported here because nothing else needs them."""
    from kvd.attention.cuda import CudaBackend

    return CudaBackend()


def _cpu_backend() -> AttentionBackend:
    """Compiled kernels; imported here because they need a library that GPUs do without.

    Raises:
        KernelUnavailable: this machine cannot run them.
    """
    try:
        from kvd.attention.cpu_backend import CpuBackend
    except ImportError as error:
        raise KernelUnavailable(f"llvmlite is not installed ({error})") from None
    return CpuBackend()


BACKENDS: Final[Mapping[str, Callable[[], AttentionBackend]]] = {
    **({"metal": MetalBackend} if mx.metal.is_available() else {}),
    **({"cuda": _cuda_backend} if hasattr(mx, "cuda") and mx.cuda.is_available() else {}),
    "cpu": _cpu_backend,
    "mlx": MlxBackend,
    "reference": ReferenceBackend,
}
"""Backends in order of preference."""

ATTENTION_CHOICES: Final = ("auto", *BACKENDS)
"""What `--attention` accepts on this machine."""

_TRIES: Final = 5
_TOLERANCES: Final = {"float32": (2e-3, 0.0), "float16": (3e-3, 2.0**-10), "bfloat16": (4e-3, 2.0**-7)}
"""Greatest difference from the reference by dtype of the queries, and that much of a value more: room for TF32
products, for K rounded to the dtype, and for outputs that both round."""


@dataclass(frozen=True, slots=True)
class ShapeProbe:
    """Geometry the self-test tries: one cache group in one layer format; `kvd.model.probes` lists those in use.

    Attributes:
        query_heads: attention heads.
        kv_heads: KV heads.
        k_dim: width of a key head.
        v_dim: width of a value head.
        layer_format: formats of K and V.
        window: sliding window in tokens; None for full attention.
        dtype: of activations: kernels for GPUs are other ones for each.
    """

    query_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    layer_format: LayerFormat
    window: int | None = None
    dtype: str = "float32"

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> mx.array:
        """Normal numbers in the probe's dtype: what a model computing in it hands over."""
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(getattr(mx, self.dtype))


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What was chosen.

    Attributes:
        backend: the backend to use.
        notices: sentences for the log and `hello`, one per backend that was passed over; empty when all is well.
        timings_ms: of the backends that were compared, what a decode step and a prefill chunk took over all shapes.
    """

    backend: AttentionBackend
    notices: tuple[str, ...]
    timings_ms: Mapping[str, float] = field(default_factory=dict)


def select_backend(
    requested: str,
    probes: Sequence[ShapeProbe],
    backends: Mapping[str, Callable[[], AttentionBackend]] = BACKENDS,
) -> BackendChoice:
    """Choose a backend.

    Args:
        requested: `auto` or a backend's name.
        probes: shapes that must be right.
        backends: constructors by name, in order of preference; the last is trusted (`reference`).

    Returns:
        The requested backend if it agrees with the reference, else the next that does; for `auto` the fastest.

    Raises:
        BackendUnavailable: `requested` is unknown.
    """
    names = list(backends)
    if requested != "auto" and requested not in backends:
        raise BackendUnavailable(
            f"attention must be one of {', '.join(('auto', *names))} on this machine, not {requested!r}",
            requested=requested,
        )
    candidates = suitable_backends(names) if requested == "auto" else [requested, *names[names.index(requested) + 1 :]]
    notices: list[str] = []
    timings_ms: dict[str, float] = {}
    right: dict[str, AttentionBackend] = {}
    for name in candidates:
        if right and (requested != "auto" or name == "reference"):
            break  # a right one is found; the reference is never faster
        try:
            backend = backends[name]()
            for probe in probes:
                self_test(backend, probe)
        except Exception as error:  # a kernel may fail in any way; each means: not this one
            notices.append(f"attention backend {name} is not used: {error}")
            continue
        right[name] = backend
    if len(right) > 1:
        timed = [times_ms(right, probe) for probe in probes]
        timings_ms = {name: round(sum(each[name] for each in timed), 3) for name in right}
        fastest = min(timings_ms, key=lambda name: timings_ms[name])
        return BackendChoice(right[fastest], tuple(notices), timings_ms)
    if right:
        return BackendChoice(next(iter(right.values())), tuple(notices))
    notices.append("no attention backend passed its self-test; the reference is used, which is slow")
    return BackendChoice(ReferenceBackend(), tuple(notices))


def suitable_backends(names: Sequence[str] = tuple(BACKENDS)) -> list[str]:
    """Those of `names` worth trying unasked: compiled kernels only where MLX computes on the CPU of a Linux machine."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu and sys.platform == "linux"
    return [name for name in names if name != "cpu" or on_cpu]


def times_ms(backends: Mapping[str, AttentionBackend], probe: ShapeProbe) -> dict[str, float]:
    """Milliseconds of a decode step and a prefill chunk of 256 over two pages, each the best of a few tries.

    The backends take turns: the choice is kept for good, and other work on the machine, such as several daemons that
    start together, comes and goes within a series of tries.
    """
    rng = np.random.default_rng(7)
    host, segment = _random_segment(probe, 2 * PAGE_TOKENS, rng)
    pools = {name: _pool_like(backend, host, segment) for name, backend in backends.items()}
    total_s = dict.fromkeys(backends, 0.0)
    for queries in (1, PAGE_TOKENS):
        q = probe.random(rng, (1, probe.query_heads, queries, probe.k_dim))
        mx.eval(q)
        row = Row((segment,), segment.tokens - queries)
        scale, best_s = probe.k_dim**-0.5, dict.fromkeys(backends, math.inf)
        for _ in range(_TRIES):
            for name, backend in backends.items():
                began = time.perf_counter()
                mx.eval(
                    backend.attend(pools[name], q, layer_index=0, rows=(row,), scale=scale, window=probe.window).out
                )
                best_s[name] = min(best_s[name], time.perf_counter() - began)
        for name, each_s in best_s.items():
            total_s[name] += each_s
    return {name: 1e3 * each_s for name, each_s in total_s.items()}


def self_test(backend: AttentionBackend, probe: ShapeProbe) -> None:
    """Compare a backend with the reference on random pages.

    One query, a short step and a chunk across a page border; then the short step once more with the open tail in arrays
    of its own and with positions in two runs, both inside the chunk.

    Raises:
        BackendDisagrees: an output or log-sum-exp differs.
    """
    if isinstance(backend, ReferenceBackend):
        return
    tokens = 2 * PAGE_TOKENS + 44
    rng = np.random.default_rng(7)
    host, segment = _random_segment(probe, tokens, rng)
    pools = (_pool_like(backend, host, segment), host)
    for queries in (1, 16, 48):
        _compare(backend, probe, pools, Row((segment,), tokens - queries), queries, rng)
    # Tokens 9 to 11 of the last 16 positions belong to another segment.
    runs = (Run(0, tokens - 8), Run(tokens - 5, 8))
    if isinstance(backend, DeviceWriter):
        _compare_appended(backend, probe, pools, segment, rng)
    split = replace(segment, runs=runs) if backend.name == "cuda" else _with_tail(host, segment, runs)
    _compare(backend, probe, pools, Row((split,), tokens - 13), 16, rng)


def _compare(
    backend: AttentionBackend,
    probe: ShapeProbe,
    pools: tuple[Frames, FramePool],
    row: Row,
    queries: int,
    rng: np.random.Generator,
) -> None:
    """Raise BackendDisagrees unless backend and reference agree on random queries of one row."""
    q = probe.random(rng, (1, probe.query_heads, queries, probe.k_dim))
    mine, right = (
        one.attend(pool, q, layer_index=0, rows=(row,), scale=probe.k_dim**-0.5, window=probe.window)
        for one, pool in zip((backend, ReferenceBackend()), pools, strict=True)
    )
    for what, one, two in (("output", mine.out, right.out), ("lse", mine.lse, right.lse)):
        left, other = one.astype(mx.float32), two.astype(mx.float32)
        allowed, rounding = _TOLERANCES[probe.dtype]
        difference = float(mx.abs(left - other).max())
        if not float((mx.abs(left - other) - rounding * mx.abs(other)).max()) <= allowed:  # also catches NaN
            raise BackendDisagrees(
                f"{what} for {queries} queries ({_words(probe)}) differs from the reference by {difference:.3g}",
                difference=difference,
            )


def _compare_appended(
    backend: DeviceWriter,
    probe: ShapeProbe,
    pools: tuple[Frames, FramePool],
    segment: Segment,
    rng: np.random.Generator,
) -> None:
    """Raise BackendDisagrees unless tokens appended across a page border are the codec's and nothing else changed.

    Leaves the same tokens in both pools.
    """
    device, host = pools
    first, count = PAGE_TOKENS - 9, 21
    # operators of conditioned formats give float32
    given = probe if probe.layer_format.k.conditioning is None else replace(probe, dtype="float32")
    keys, values = (given.random(rng, (1, probe.kv_heads, count, dim)) for dim in (probe.k_dim, probe.v_dim))
    backend.append(device, keys, values, layer_index=0, targets=[(segment.block_table, first)])
    device.check_appended()
    encoded_keys, encoded_values = (
        encode(np.array(x.astype(mx.float32))[0], side)
        for x, side in ((keys, probe.layer_format.k), (values, probe.layer_format.v))
    )
    for i in range(count):
        page, slot = divmod(first + i, PAGE_TOKENS)
        arrays = host.layer(segment.block_table[page], 0)
        for side, encoded in ((arrays.k, encoded_keys), (arrays.v, encoded_values)):
            side.codes[:, slot], side.scales[:, slot] = encoded.codes[:, i], encoded.scales[:, i]
            side.biases[:, slot] = encoded.biases[:, i]
    if any(device.export(frame) != host.export(frame) for frame in segment.block_table):
        raise BackendDisagrees(f"appended bytes ({_words(probe)}) are not the codec's", difference=1.0)


def _words(probe: ShapeProbe) -> str:
    """What a probe is, for a message."""
    keys, values = probe.layer_format.k, probe.layer_format.v
    conditioned = "conditioned " if keys.conditioning is not None else ""
    dtype = "" if probe.dtype == "float32" else f", {probe.dtype}"
    return f"{conditioned}{keys.bits}-bit keys of {probe.k_dim}, {values.bits}-bit values of {probe.v_dim}{dtype}"


def _with_tail(pool: FramePool, segment: Segment, runs: tuple[Run, ...]) -> Segment:
    """The same tokens at the positions of `runs`; those after the last whole page come from arrays outside the pool."""
    paged_tokens = segment.tokens // PAGE_TOKENS * PAGE_TOKENS
    k, v = (TailSide(*gather(pool, segment, 0, side, paged_tokens, segment.tokens)) for side in ("k", "v"))
    return Segment(
        block_table=segment.block_table[: paged_tokens // PAGE_TOKENS],
        runs=runs,
        layer_format=segment.layer_format,
        conditioning=segment.conditioning,
        tail=TailArrays(k, v, segment.tokens - paged_tokens),
    )


def pool_for(backend: AttentionBackend, budget_bytes: int, largest_frame_bytes: int) -> Frames:
    """A pool where the backend's kernels can read it: in host memory, in slabs that a GPU shares, or on a device.

    Args:
        backend: the backend in use.
        budget_bytes: as in `FramePool`.
        largest_frame_bytes: payload of the largest frame it will hold.
    """
    if isinstance(backend, MetalBackend):
        return backend.make_pool(budget_bytes, largest_frame_bytes)
    if backend.name == "cuda":
        from kvd.attention.cuda import DevicePool

        return DevicePool(budget_bytes)
    return FramePool(budget_bytes, RecycledMappings(budget_bytes))


def _pool_like(backend: AttentionBackend, host: FramePool, segment: Segment) -> Frames:
    """The pages of a segment where the backend reads them."""
    layouts = [host.layout(frame) for frame in segment.block_table]
    pool = pool_for(backend, host.resident_bytes, max(layout.payload_bytes for layout in layouts))
    for frame, layout in zip(segment.block_table, layouts, strict=True):
        pool.create(frame, layout)
        pool.fill(frame, host.export(frame))
    return pool


def _random_segment(probe: ShapeProbe, tokens: int, rng: np.random.Generator) -> tuple[FramePool, Segment]:
    """A pool with `tokens` random tokens of one layer, and the segment that maps them."""
    layout = PageLayout(
        layer_indices=(0,),
        kv_heads=probe.kv_heads,
        k_dim=probe.k_dim,
        v_dim=probe.v_dim,
        page_format=PageFormat("probe", (probe.layer_format,)),
    )
    page_count = -(-tokens // PAGE_TOKENS)
    pool = FramePool(budget_bytes=page_count * layout.payload_bytes)
    # Frame numbers run backwards, so a backend that ignores the block table fails.
    table = tuple(FrameId(page_count - page) for page in range(page_count))
    for frame in table:
        pool.create(frame, layout)
        arrays = pool.layer(frame, 0)
        for side, side_format, dim in (
            (arrays.k, probe.layer_format.k, probe.k_dim),
            (arrays.v, probe.layer_format.v, probe.v_dim),
        ):
            encoded = encode(rng.standard_normal((probe.kv_heads, PAGE_TOKENS, dim), dtype=np.float32), side_format)
            side.codes[:], side.scales[:], side.biases[:] = encoded
    conditioning = None
    if probe.layer_format.k.conditioning is not None:
        shape = (1, probe.kv_heads, probe.k_dim)
        centre = rng.standard_normal(shape, dtype=np.float32)
        conditioning = Conditioning(centre, np.exp(rng.standard_normal(shape, dtype=np.float32) / 4)).layers[0]
    return pool, Segment(table, (Run(0, tokens),), probe.layer_format, conditioning)
