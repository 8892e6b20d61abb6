"""Frames in the memory of an NVIDIA GPU: the same bytes as on the host, moved and written by kernels.

Theory of operation. **A frame is an array of its own**, as it is a mapping of its own on the host: nothing strands, and
frames of all formats share one budget to the byte. Its address is read once, by a kernel, when it is made. mlx moves an
array to other memory when the host reads it, so nothing but kernels ever touches a frame: bytes leave as the output of
a kernel (`export`, `extract`) and come in as its input (`fill`, `insert`).

Kernels that write frames return `order`; whoever reads or writes frames later takes it as an input (see `kernels`).
Kernels that read frames leave an output in `readers`. Before a frame is dropped all of them run (`settle`).

Owner: the engine thread. May import mlx, numpy, kvd.attention, kvd.errors, kvd.ids, kvd.quant.spec,
kvd.store.fragment, kvd.store.frame_pool.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvd.attention.cuda.kernels import Bits, Stream, append, on_device
from kvd.errors import InternalError, InvalidParams
from kvd.ids import FrameId
from kvd.quant.errors import NonFiniteValues
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.store.fragment import Fragment
from kvd.store.frame_pool import FramePoolStatistics


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame: its array, which only kernels touch, and where that begins in device memory."""

    layout: PageLayout
    array: mx.array
    address: int


class DevicePool:
    """Frames by number, in device memory; the interface of `kvd.store.frame_pool.FramePool` without views.

    Args:
        budget_bytes: most payload bytes that may exist at once.

    Attributes:
        order: what the last write returned.
        epoch: changes whenever an address does: tables of addresses made before are stale.
        readers: outputs of kernels that read frames and may not have run.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._frames: dict[FrameId, _Frame] = {}
        self._resident_bytes = self._peak_resident_bytes = self._created = self._dropped = 0
        self._places: dict[tuple[int, int], mx.array] = {}
        self._layouts: dict[int, PageLayout] = {}
        self._unseen = False
        self.epoch = 0
        self.readers: list[mx.array] = []
        self.order = mx.zeros((4,), mx.int32)
        mx.eval(self.order)

    # ---- frames ------------------------------------------------------------------------------------------------------

    @property
    def resident_bytes(self) -> int:
        """Payload bytes of all frames."""
        return self._resident_bytes

    @property
    def slab_bytes(self) -> int:
        """Bytes of device memory really held: mlx rounds a frame up to its allocator's unit."""
        return self._resident_bytes

    @property
    def budget_bytes(self) -> int:
        """Most payload bytes that may exist at once."""
        return self._budget_bytes

    def set_budget(self, budget_bytes: int) -> None:
        """Change the limit. Frames beyond a lower one stay until they are dropped; only `create` is refused."""
        self._budget_bytes = budget_bytes

    def trim(self) -> int:
        """Nothing to do: mlx keeps what frames leave, and gives it back with its own cache."""
        return 0

    def __contains__(self, frame: object) -> bool:
        return frame in self._frames

    def __len__(self) -> int:
        return len(self._frames)

    def create(self, frame: FrameId, layout: PageLayout) -> None:
        """Make a frame; what it holds means nothing yet.

        Raises:
            InternalError: the number is in use, or the frame does not fit the budget; nothing changed.
        """
        if frame in self._frames:
            raise InternalError(f"frame {frame} exists already", frame=frame)
        needed_bytes = self._resident_bytes + layout.payload_bytes
        if needed_bytes > self._budget_bytes:
            raise InternalError(
                f"frame {frame} would make {needed_bytes} bytes resident; the budget is {self._budget_bytes}",
                needed_bytes=needed_bytes,
                budget_bytes=self._budget_bytes,
            )
        array = mx.zeros((-(-layout.payload_bytes // 4),), mx.uint32)
        mx.eval(array)
        self._frames[frame] = _Frame(layout, array, _address(array))
        self.epoch += 1
        self._resident_bytes = needed_bytes
        self._peak_resident_bytes = max(self._peak_resident_bytes, needed_bytes)
        self._created += 1

    def drop(self, frame: FrameId) -> None:
        """Free a frame.

        Raises:
            InternalError: no such frame.
        """
        gone = self._frame(frame)
        self.settle()  # mlx may give the memory to somebody else at once
        del self._frames[frame]
        self.epoch += 1
        self._resident_bytes -= gone.layout.payload_bytes
        self._dropped += 1

    def layout(self, frame: FrameId) -> PageLayout:
        """Layout the frame was created with."""
        return self._frame(frame).layout

    def device_address(self, frame: FrameId) -> int:
        """Where the frame begins in device memory; valid until `drop`."""
        return self._frame(frame).address

    def places(self, layout: PageLayout, layer_index: int) -> mx.array:
        """int64 [6] in device memory: byte offsets in a frame of a layer's tensors."""
        key = (id(layout), layer_index)
        found = self._places.get(key)
        if found is None:
            self._layouts[id(layout)] = layout  # its id stays its own as long as the table has it
            host = mx.array([tensor.offset_bytes for tensor in layout.layer_tensors(layer_index)], mx.int64)
            found = self._places[key] = on_device(host)
            mx.eval(found)
        return found

    def statistics(self) -> FramePoolStatistics:
        """Figures of this moment."""
        return FramePoolStatistics(
            frames=len(self._frames),
            resident_bytes=self._resident_bytes,
            peak_resident_bytes=self._peak_resident_bytes,
            slab_bytes=self.slab_bytes,
            kept_bytes=0,
            budget_bytes=self._budget_bytes,
            frames_created=self._created,
            frames_dropped=self._dropped,
        )

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def append(self, keys: mx.array, values: mx.array, bits: Bits, stream: Stream, starts: mx.array) -> None:
        """Quantise new tokens into frames; lazy, in order with all that follows. See `kernels.append`."""
        self.order = append(keys, values, bits, stream, starts, self.order)
        self._unseen = True

    def settle(self) -> None:
        """Let every kernel run that reads or writes frames."""
        readers, self.readers = self.readers, []
        mx.eval(self.order, *readers)

    def discard_appended(self) -> None:
        """A step was given up: what its appends found concerns nobody."""
        if not self._unseen:
            return
        self.settle()
        self._unseen = False
        self.order = mx.zeros((4,), mx.int32)
        mx.eval(self.order)

    def check_appended(self) -> None:
        """See that all tokens appended since the last call fit their formats; evaluates them.

        Raises:
            NonFiniteValues: one did not.
        """
        self.settle()
        if not self._unseen:
            return
        self._unseen = False
        # `order` says it of all appends so far, and is small: the host reads it without another kernel
        if np.array(self.order).any():
            self.order = mx.zeros((4,), mx.int32)
            mx.eval(self.order)
            raise NonFiniteValues("keys or values are not finite, or a scale or bias does not fit bf16")

    def export(self, frame: FrameId) -> bytes:
        """The whole payload, an owned copy."""
        held = self._frame(frame)
        return self._read([(held.address, held.layout.payload_bytes)])

    def load(self, frame: FrameId, layout: PageLayout, payload: bytes | memoryview) -> None:
        """Make a frame that holds a whole payload.

        Raises:
            InvalidParams: `payload` is not exactly `payload_bytes` long.
        """
        self.create(frame, layout)
        self.fill(frame, payload)

    def fill(self, frame: FrameId, payload: bytes | memoryview) -> None:
        """Overwrite the whole frame.

        Raises:
            InvalidParams: `payload` is not exactly `payload_bytes` long; the frame is unchanged.
        """
        held = self._frame(frame)
        if len(payload) != held.layout.payload_bytes:
            raise InvalidParams(f"a payload of this frame has {held.layout.payload_bytes} bytes, not {len(payload)}")
        self._write([(held.address, len(payload))], payload)

    def extract(self, frame: FrameId, start: int, end: int) -> bytes:
        """A fragment: tokens [start, end) of every tensor, in layout order, each [kv_heads, end - start, width].

        Raises:
            InvalidParams: not 0 <= start <= end <= 256.
        """
        _check_range(start, end)
        return self._read(_pieces(self._frame(frame), start, end))

    def fragment(self, frame: FrameId, tokens: int) -> Fragment:
        """The first `tokens` tokens, a copy in host memory that needs no frame.

        Raises:
            InvalidParams: not 1 <= tokens <= 256.
        """
        _check_range(1, tokens)
        return Fragment(self.layout(frame), tokens, self.extract(frame, 0, tokens))

    def insert(self, frame: FrameId, start: int, end: int, data: bytes | memoryview, upto: int | None = None) -> None:
        """Write a fragment back.

        Args:
            frame: an existing frame.
            start: first token of the fragment.
            end: one past its last token.
            data: bytes of `extract(start, end)` from a frame of the same layout.
            upto: not less than start: tokens after it mean nothing, they may be written or not; None for all.

        Raises:
            InvalidParams: a bad range, or `data` has another length; the frame is unchanged.
        """
        _check_range(start, end)
        if not start <= (end if upto is None else upto) <= end:
            raise InvalidParams(f"upto must be in [{start}, {end}], not {upto}")
        held = self._frame(frame)
        expected = (end - start) * held.layout.token_bytes
        if len(data) != expected:
            raise InvalidParams(f"a fragment of {end - start} tokens has {expected} bytes, not {len(data)}")
        self._write(_pieces(held, start, end), data)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _read(self, pieces: Sequence[tuple[int, int]]) -> bytes:
        """The bytes at (address, length) pieces, one after the other."""
        total = sum(length for _, length in pieces)
        if not total:
            return b""
        out = _mover("read")(
            inputs=[_piece_table(pieces), self.order],
            grid=(256, len(pieces), 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(total // 2,)],
            output_dtypes=[mx.uint16],
        )[0]
        mx.eval(out)
        return np.array(out).tobytes()

    def _write(self, pieces: Sequence[tuple[int, int]], data: bytes | memoryview) -> None:
        """Write bytes to (address, length) pieces, one after the other; done when it returns."""
        if not data:
            return
        source = mx.array(np.frombuffer(data, np.uint16))
        self.order = _mover("write")(
            inputs=[source, _piece_table(pieces), self.order],
            grid=(256, len(pieces), 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(4,)],
            output_dtypes=[mx.int32],
        )[0]
        mx.eval(self.order)

    def _frame(self, frame: FrameId) -> _Frame:
        found = self._frames.get(frame)
        if found is None:
            raise InternalError(f"no frame {frame}", frame=frame)
        return found


def _pieces(held: _Frame, start: int, end: int) -> list[tuple[int, int]]:
    """Where tokens [start, end) of a frame are: per tensor and head one run of bytes."""
    pieces = []
    for tensor in held.layout.tensors:
        heads, tokens, _ = tensor.shape
        row = tensor.tensor_bytes // (heads * tokens)
        for head in range(heads):
            at = held.address + tensor.offset_bytes + (head * tokens + start) * row
            pieces.append((at, (end - start) * row))
    return pieces


def _piece_table(pieces: Sequence[tuple[int, int]]) -> mx.array:
    """uint64 [pieces, 3]: address, bytes, and where the piece begins among all of them."""
    table = np.zeros((len(pieces), 3), np.uint64)
    table[:, :2] = pieces
    table[1:, 2] = np.cumsum(table[:-1, 1])
    return mx.array(table)


@functools.cache
def _mover(direction: str) -> Any:  # noqa: ANN401  mlx's callable
    """Kernel that copies pieces of frames to or from an array; lengths and places are even."""
    reading = direction == "read"
    outside = "out" if reading else "source"
    move = "outside[i] = inside[i]" if reading else "inside[i] = outside[i]"
    # what an append before it found stays to be seen
    end = (
        ""
        if reading
        else """
int bad = 0;
if (blockIdx.y == 0) for (int i = threadIdx.x; i < order_shape[0]; i += blockDim.x) bad |= order[i] != 0;
bad = __syncthreads_or(bad);
if (blockIdx.y == 0 && threadIdx.x < 4) done[threadIdx.x] = bad;
"""
    )
    source = f"""
const unsigned long long* piece = (const unsigned long long*)pieces + 3 * blockIdx.y;
unsigned short* inside = (unsigned short*)piece[0];
auto* outside = {outside} + piece[2] / 2;
const long long n = piece[1] / 2;
for (long long i = threadIdx.x; i < n; i += blockDim.x) {move};
{end}
"""
    inputs = ["pieces", "order"] if reading else ["source", "pieces", "order"]
    return mx.fast.cuda_kernel(
        name=f"kvd_pages_{direction}",
        input_names=inputs,
        output_names=["out"] if reading else ["done"],
        source=source,
    )


def _address(array: mx.array) -> int:
    """Where an array begins in device memory."""
    kernel: Any = _address_kernel()
    out = kernel(
        inputs=[array],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(2,)],
        output_dtypes=[mx.uint64],
    )[0]
    return int(out[0].item())


@functools.cache
def _address_kernel() -> Any:  # noqa: ANN401
    return mx.fast.cuda_kernel(
        name="kvd_address",
        input_names=["array"],
        output_names=["out"],
        source="out[0] = (unsigned long long)array; out[1] = 0;",
    )


def _check_range(start: int, end: int) -> None:
    """Raise InvalidParams unless 0 <= start <= end <= PAGE_TOKENS."""
    if not 0 <= start <= end <= PAGE_TOKENS:
        raise InvalidParams(f"token range must lie in [0, {PAGE_TOKENS}], not [{start}, {end})")


__all__ = ["DevicePool"]
