"""The RAM pool on CPU: frames of numpy memory that kernels and the codec read and write in place.

Theory of operation. A frame holds one page, its tensors in `PageLayout` order, so that frame, swap file and log
fragment are the same bytes. **A frame is a slab of its own**: an anonymous mapping, made when the frame is created and
returned when it is dropped, to the operating system or to `kvd.store.frame_memory`, which keeps a few. Pages are large
(1.6 MB for a 135M model), so larger slabs would save nothing, while a half-empty slab of one format could not serve
another: here frames of all formats share one byte budget, nothing strands, and dropped memory is really gone (an
allocator's heap would keep it: glibc raises its mapping threshold as soon as one large block is freed). Whoever still
holds a view of a dropped frame keeps that memory alive, but never sees another page's bytes in it.

Owner: the engine thread; every method is called by it alone. Other threads get `bytes` (`export`, `extract`), never
views. May import numpy, kvd.errors, kvd.ids, kvd.quant.spec and kvd.store.fragment.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvd.errors import InternalError, InvalidParams
from kvd.ids import FrameId
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.store.fragment import Fragment, anonymous_memory, extract, move_tokens

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {"U32": np.dtype("<u4"), "BF16": np.dtype("<u2")}

OctetArray = npt.NDArray[np.uint8]


class FrameAllocator(Protocol):
    """Where the memory of frames comes from; called by the engine thread only."""

    @property
    def kept_bytes(self) -> int:
        """Memory it holds for frames to come and does not count as any frame's."""

    def allocate(self, n_bytes: int, *, zeroed: bool = True) -> tuple[OctetArray, int]:
        """Writable memory uint8 [n_bytes], and the bytes it really takes. Unless `zeroed` it may hold anything."""

    def release(self, octets: OctetArray) -> None:
        """Take back what `allocate` returned, the caller's last reference but its own; it may serve another frame."""

    def set_budget(self, budget_bytes: int) -> None:
        """The pool's limit is another one; what is kept for frames to come may be less for it."""

    def trim(self) -> int:
        """Memory is short: give back what is kept for frames to come; returns its bytes."""


class AnonymousMappings:
    """A mapping per frame (implements `FrameAllocator`): it lives as long as any view of it."""

    kept_bytes = 0

    def allocate(self, n_bytes: int, *, zeroed: bool = True) -> tuple[OctetArray, int]:
        """See `FrameAllocator.allocate`; the mapping always starts zeroed."""
        slab_bytes = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # The array keeps the mapping alive; it goes back to the system when the last view is gone.
        return np.frombuffer(anonymous_memory(slab_bytes), np.uint8, n_bytes), slab_bytes

    def release(self, octets: OctetArray) -> None:
        """Nothing to do: the last view returns the mapping."""

    def set_budget(self, budget_bytes: int) -> None:
        """Nothing is kept, whatever the budget."""

    def trim(self) -> int:
        """Nothing is kept."""
        return 0


@dataclass(frozen=True, slots=True)
class SideArrays:
    """Keys or values of one layer in one frame: writable views.

    Attributes:
        codes: uint32 [kv_heads, 256, words].
        scales: uint16 [kv_heads, 256, groups], bf16 bits.
        biases: as `scales`.
    """

    codes: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.uint16]
    biases: npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class LayerArrays:
    """One layer in one frame."""

    k: SideArrays
    v: SideArrays


@dataclass(frozen=True, slots=True)
class FramePoolStatistics:
    """What the pool holds and did.

    Attributes:
        frames: frames that exist.
        resident_bytes: payload bytes of all frames.
        peak_resident_bytes: the greatest `resident_bytes` so far.
        slab_bytes: bytes really mapped: payload rounded up to the system's pages, and what is kept for frames to come.
        kept_bytes: of these, what is kept.
        budget_bytes: the limit of `resident_bytes`.
        frames_created: frames created since start.
        frames_dropped: frames dropped since start.
    """

    frames: int
    resident_bytes: int
    peak_resident_bytes: int
    slab_bytes: int
    kept_bytes: int
    budget_bytes: int
    frames_created: int
    frames_dropped: int


class Frames(Protocol):
    """What pager and store need of a pool, wherever its frames are: `FramePool`, or a pool on a device."""

    @property
    def resident_bytes(self) -> int:
        """Payload bytes of all frames."""

    @property
    def budget_bytes(self) -> int:
        """Most payload bytes that may exist at once."""

    def set_budget(self, budget_bytes: int) -> None:
        """Change the limit."""

    def trim(self) -> int:
        """Give back memory that serves no frame; returns its bytes."""

    def __contains__(self, frame: object) -> bool: ...

    def __len__(self) -> int: ...

    def create(self, frame: FrameId, layout: PageLayout) -> None:
        """Make a frame."""

    def drop(self, frame: FrameId) -> None:
        """Free a frame."""

    def load(self, frame: FrameId, layout: PageLayout, payload: bytes | memoryview) -> None:
        """Make a frame that holds a whole payload."""

    def layout(self, frame: FrameId) -> PageLayout:
        """Layout the frame was created with."""

    def export(self, frame: FrameId) -> bytes:
        """The whole payload, an owned copy."""

    def fill(self, frame: FrameId, payload: bytes | memoryview) -> None:
        """Overwrite the whole frame."""

    def extract(self, frame: FrameId, start: int, end: int) -> bytes:
        """A fragment's bytes."""

    def fragment(self, frame: FrameId, tokens: int) -> Fragment:
        """The first tokens, a copy that needs no frame."""

    def insert(self, frame: FrameId, start: int, end: int, data: bytes | memoryview, upto: int | None = None) -> None:
        """Write a fragment back."""

    def discard_appended(self) -> None:
        """A step was given up: forget what was found of the tokens it wrote."""

    def check_appended(self) -> None:
        """Raise NonFiniteValues if tokens written since the last call did not fit their formats."""

    def statistics(self) -> FramePoolStatistics:
        """Figures of this moment."""


class _Frame:
    """One frame: its memory and its views. Made by FramePool only."""

    __slots__ = ("_layers", "address", "layout", "octets", "slab_bytes")

    def __init__(self, layout: PageLayout, allocator: FrameAllocator, *, zeroed: bool) -> None:
        self.layout = layout
        self.octets, self.slab_bytes = allocator.allocate(layout.payload_bytes, zeroed=zeroed)
        self.address = int(self.octets.ctypes.data)
        self._layers: dict[int, LayerArrays] = {}

    def forget_views(self) -> OctetArray:
        """Let go of everything but the memory itself, and give that away."""
        octets, self.octets = self.octets, np.empty(0, np.uint8)
        self._layers.clear()
        return octets

    def layer(self, layer_index: int) -> LayerArrays:
        """Views of one layer, made once."""
        found = self._layers.get(layer_index)
        if found is None:
            views = [
                self.octets[t.offset_bytes : t.offset_bytes + t.tensor_bytes].view(_DTYPES[t.dtype]).reshape(t.shape)
                for t in self.layout.layer_tensors(layer_index)
            ]
            found = LayerArrays(SideArrays(*views[:3]), SideArrays(*views[3:]))
            self._layers[layer_index] = found
        return found


class FramePool:
    """Frames by number. Mutated by the engine thread through `create` and `drop` only; content through the views.

    Args:
        budget_bytes: most payload bytes that may exist at once. The pager keeps to it by eviction; the pool refuses to
            be the place where a mistake there becomes swapping of the whole machine.
        allocator: where memory comes from; None for a mapping per frame. Others may reuse a dropped frame's memory at
            once, so views of it must not outlive `drop`.
    """

    def __init__(self, budget_bytes: int, allocator: FrameAllocator | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._allocator: FrameAllocator = AnonymousMappings() if allocator is None else allocator
        self._frames: dict[FrameId, _Frame] = {}
        self._resident_bytes = 0
        self._peak_resident_bytes = 0
        self._slab_bytes = 0
        self._created = 0
        self._dropped = 0

    @property
    def resident_bytes(self) -> int:
        """Payload bytes of all frames."""
        return self._resident_bytes

    @property
    def slab_bytes(self) -> int:
        """Bytes really mapped: `resident_bytes`, less than one system page a frame, and what the allocator keeps."""
        return self._slab_bytes + self._allocator.kept_bytes

    @property
    def budget_bytes(self) -> int:
        """Most payload bytes that may exist at once."""
        return self._budget_bytes

    def set_budget(self, budget_bytes: int) -> None:
        """Change the limit. Frames beyond a lower one stay until they are dropped; only `create` is refused."""
        self._budget_bytes = budget_bytes
        self._allocator.set_budget(budget_bytes)

    def trim(self) -> int:
        """Give back memory that serves no frame; returns its bytes."""
        return self._allocator.trim()

    def __contains__(self, frame: object) -> bool:
        return frame in self._frames

    def __len__(self) -> int:
        return len(self._frames)

    def create(self, frame: FrameId, layout: PageLayout) -> None:
        """Make a frame of zeros.

        Args:
            frame: a number not in use.
            layout: layout of the page it will hold.

        Raises:
            InternalError: the number is in use, or the frame does not fit the budget; nothing changed.
        """
        self._create(frame, layout, zeroed=True)

    def load(self, frame: FrameId, layout: PageLayout, payload: bytes | memoryview) -> None:
        """Make a frame that holds a whole payload.

        Raises:
            InternalError: as `create`.
            InvalidParams: `payload` is not exactly `payload_bytes` long; nothing changed.
        """
        if len(payload) != layout.payload_bytes:
            raise InvalidParams(f"a payload of this frame has {layout.payload_bytes} bytes, not {len(payload)}")
        self._create(frame, layout, zeroed=False)
        self.fill(frame, payload)

    def _create(self, frame: FrameId, layout: PageLayout, *, zeroed: bool) -> None:
        if frame in self._frames:
            raise InternalError(f"frame {frame} exists already", frame=frame)
        needed_bytes = self._resident_bytes + layout.payload_bytes
        if needed_bytes > self._budget_bytes:
            raise InternalError(
                f"frame {frame} would make {needed_bytes} bytes resident; the budget is {self._budget_bytes}",
                needed_bytes=needed_bytes,
                budget_bytes=self._budget_bytes,
            )
        made = _Frame(layout, self._allocator, zeroed=zeroed)
        self._frames[frame] = made
        self._resident_bytes = needed_bytes
        self._peak_resident_bytes = max(self._peak_resident_bytes, needed_bytes)
        self._slab_bytes += made.slab_bytes
        self._created += 1

    def drop(self, frame: FrameId) -> None:
        """Free a frame; its memory goes back to the allocator once nobody holds a view of it.

        Raises:
            InternalError: no such frame.
        """
        gone = self._frame(frame)
        del self._frames[frame]
        self._resident_bytes -= gone.layout.payload_bytes
        self._slab_bytes -= gone.slab_bytes
        self._dropped += 1
        octets = gone.forget_views()
        self._allocator.release(octets)

    def layout(self, frame: FrameId) -> PageLayout:
        """Layout the frame was created with."""
        return self._frame(frame).layout

    def view(self, frame: FrameId) -> OctetArray:
        """The frame's memory, uint8 [payload_bytes], writable, not a copy."""
        return self._frame(frame).octets

    def layer(self, frame: FrameId, layer_index: int) -> LayerArrays:
        """Views of one layer.

        Args:
            frame: an existing frame.
            layer_index: index of the layer in the model; one of the layout's.
        """
        return self._frame(frame).layer(layer_index)

    def address(self, frame: FrameId) -> int:
        """Where the frame's memory begins, for compiled kernels; valid until `drop`."""
        return self._frame(frame).address

    def export(self, frame: FrameId) -> bytes:
        """The whole payload, an owned copy."""
        return self._frame(frame).octets.tobytes()

    def fill(self, frame: FrameId, payload: bytes | memoryview) -> None:
        """Overwrite the whole frame.

        Raises:
            InvalidParams: `payload` is not exactly `payload_bytes` long; the frame is unchanged.
        """
        octets = self._frame(frame).octets
        if len(payload) != octets.size:
            raise InvalidParams(f"a payload of this frame has {octets.size} bytes, not {len(payload)}")
        octets[:] = np.frombuffer(payload, np.uint8)

    def extract(self, frame: FrameId, start: int, end: int) -> bytes:
        """A fragment: tokens [start, end) of every tensor, in layout order, each [kv_heads, end - start, width].

        Raises:
            InvalidParams: not 0 <= start <= end <= 256.
        """
        _check_range(start, end)
        held = self._frame(frame)
        return extract(held.layout, held.octets, PAGE_TOKENS, start, end)

    def fragment(self, frame: FrameId, tokens: int) -> Fragment:
        """The first `tokens` tokens, a copy that needs no frame.

        Raises:
            InvalidParams: not 1 <= tokens <= 256.
        """
        _check_range(1, tokens)
        held = self._frame(frame)
        return Fragment(held.layout, tokens, held.octets, capacity_tokens=PAGE_TOKENS)

    def insert(self, frame: FrameId, start: int, end: int, data: bytes | memoryview, upto: int | None = None) -> None:
        """Write a fragment back.

        Args:
            frame: an existing frame.
            start: first token of the fragment.
            end: one past its last token.
            data: bytes of `extract(start, end)` from a frame of the same layout.
            upto: write only tokens [start, upto); None for all.

        Raises:
            InvalidParams: a bad range, or `data` has another length; the frame is unchanged.
        """
        _check_range(start, end)
        stop = end if upto is None else upto
        if not start <= stop <= end:
            raise InvalidParams(f"upto must be in [{start}, {end}], not {stop}")
        held = self._frame(frame)
        tokens = end - start
        if len(data) != tokens * held.layout.token_bytes:
            raise InvalidParams(
                f"a fragment of {tokens} tokens has {tokens * held.layout.token_bytes} bytes, not {len(data)}"
            )
        source = np.frombuffer(data, np.uint8)
        move_tokens(held.layout, source, (tokens, 0), held.octets, (PAGE_TOKENS, start), stop - start)

    def discard_appended(self) -> None:
        """Nothing to forget, for the same reason as in `check_appended`."""

    def check_appended(self) -> None:
        """Nothing to see: who writes into host memory raises at once."""

    def statistics(self) -> FramePoolStatistics:
        """Figures of this moment."""
        return FramePoolStatistics(
            frames=len(self._frames),
            resident_bytes=self._resident_bytes,
            peak_resident_bytes=self._peak_resident_bytes,
            slab_bytes=self.slab_bytes,
            kept_bytes=self._allocator.kept_bytes,
            budget_bytes=self._budget_bytes,
            frames_created=self._created,
            frames_dropped=self._dropped,
        )

    def _frame(self, frame: FrameId) -> _Frame:
        found = self._frames.get(frame)
        if found is None:
            raise InternalError(f"no frame {frame}", frame=frame)
        return found


def _check_range(start: int, end: int) -> None:
    """Raise InvalidParams unless 0 <= start <= end <= PAGE_TOKENS."""
    if not 0 <= start <= end <= PAGE_TOKENS:
        raise InvalidParams(f"token range must lie in [0, {PAGE_TOKENS}], not [{start}, {end})")
