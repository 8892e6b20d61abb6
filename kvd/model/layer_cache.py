"""One layer of paged KV: what it keeps of each sequence, and the cache object that a model's layer meets.

Theory of operation. A `PagedLayer` is one layer of one sequence: it encodes tokens into the sequence's frames and says
what attention may read. A `KvLayerCache` is what mlx-lm calls: the same layer of one sequence or of several, row by row
of a batch. Rows have nothing in common but the step: each has its own block table, length, format and constants, so
nothing is padded, and rows of any length run together. `update_and_fetch` *evaluates* K and V, conditions the keys,
encodes both with the codec and writes the codes into the frames of each row. It returns handles instead of arrays; the
dispatcher of `kvd.model.dispatch` sees whose cache it is and asks the backend for attention over the pages of all rows,
in one call. With a `DeviceWriter` the tokens are queued instead and never pass through the host; what does not fit is
found when the step ends. A model that does arithmetic on fetched arrays fails at once instead of computing nonsense.

May import mlx, numpy, kvd.attention, kvd.ids, kvd.quant, kvd.model.page_writer, spec and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import numpy as np

from kvd.attention import DeviceWriter, Row, Run, Segment, UnsupportedMask, host_pages
from kvd.errors import InternalError
from kvd.ids import FrameId
from kvd.model.page_writer import NativeWriter, page_writer
from kvd.model.spec import CacheGroup
from kvd.quant.codec import F32Array
from kvd.quant.conditioning import LayerConditioning
from kvd.quant.spec import PAGE_TOKENS, LayerFormat

if TYPE_CHECKING:
    from kvd.model.cache import SequenceCache

Mask = mx.array | Literal["causal"] | None


@dataclass(frozen=True, slots=True)
class PagedHandle:
    """What `update_and_fetch` returns in place of K or V: the shape they would have, no data.

    Attributes:
        shape: (rows, kv_heads, tokens, dim) of everything cached; tokens of the longest row.
        dtype: dtype of what the model passed in.
    """

    shape: tuple[int, int, int, int]
    dtype: mx.Dtype


@dataclass(slots=True)
class StepState:
    """What the layers of a running step share; empty between steps.

    Attributes:
        masks: arrays that a layer handed to the model; they may come back in this step.
        plans: what a backend prepared for the layers of a cache group, by group and rows. A plan holds addresses of
            frames, so it must not outlive the step that holds these in place.
        places: where the step's token of each row that grows is written, likewise: row, address of its frame, place.
        offsets: positions of all rows as an array, which every layer asks for twice: on a GPU making one costs more
            than a small kernel.
    """

    masks: list[mx.array] = field(default_factory=list)
    plans: dict[tuple[int, tuple[int, ...]], Any] = field(default_factory=dict)
    places: dict[tuple[int, tuple[int, ...]], list[tuple[int, int, int]]] = field(default_factory=dict)
    offsets: dict[tuple[int, ...], mx.array] = field(default_factory=dict)

    def clear(self) -> None:
        """The step is over."""
        self.offsets.clear()
        self.masks.clear()
        self.plans.clear()
        self.places.clear()


class PagedLayer:
    """One layer of one sequence.

    Owner: its `SequenceCache`; only the engine thread calls it.

    Attributes:
        sequence: the sequence.
        group: the layer's cache group.
        layer_index: index of the layer in the model.
        layer_format: how it is quantised.
        conditioning: operators of its keys, None for raw ones.
    """

    def __init__(
        self,
        sequence: SequenceCache,
        group: CacheGroup,
        layer_index: int,
        layer_format: LayerFormat,
        conditioning: LayerConditioning | None,
    ) -> None:
        self.sequence = sequence
        self.group = group
        self.layer_index = layer_index
        self.layer_format = layer_format
        self.conditioning = conditioning
        self._writer = page_writer(layer_format, group.layer.k_dim, group.layer.v_dim)
        self._written_tokens = 0

    @property
    def offset(self) -> int:
        """Position of the next token: RoPE positions start here."""
        return self.sequence.base_tokens + self._written_tokens

    @property
    def format_key(self) -> object:
        """Equal for rows whose pages have the same layout and constants: format ids contain the constants' digest."""
        return self.sequence.layouts[self.group.group_id].format_id

    def reset_step(self) -> None:
        """A step begins or ended: nothing of it is written yet."""
        self._written_tokens = 0

    def take(self, k: F32Array, v: F32Array) -> None:
        """Write the step's tokens into the frames (in a replay: nothing).

        Args:
            k: float32 [kv_heads, n, k_dim], conditioned; the last axis contiguous.
            v: float32 [kv_heads, n, v_dim].

        Raises:
            NonFiniteValues: NaN or infinity; the step's tokens do not count.
        """
        if not self.sequence.replaying:
            self._write(k, v)
        self.count(k.shape[1])

    @property
    def native_writer(self) -> NativeWriter | None:
        """What writes tokens of several rows at once, where the compiled codec runs."""
        return self._writer if isinstance(self._writer, NativeWriter) else None

    def count(self, tokens: int) -> None:
        """The step's tokens are written."""
        self._written_tokens = tokens

    def target(self) -> tuple[tuple[FrameId, ...], int]:
        """Block table, and the place of the next token counted in its pages."""
        table, first_page = self.sequence.mapped(self.group.group_id)
        return table, self.offset - first_page * PAGE_TOKENS

    def row(self, queries: int) -> Row:
        """Everything written, for that many last positions."""
        end = self.offset
        table, first_page = self.sequence.mapped(self.group.group_id)
        start = first_page * PAGE_TOKENS
        segment = Segment(table, (Run(start, end - start),), self.layer_format, self.conditioning)
        return Row((segment,), end - queries)

    def _write(self, k: F32Array, v: F32Array) -> None:
        """Encode across pages."""
        pool = host_pages(self.sequence.pool)
        table, first_page = self.sequence.mapped(self.group.group_id)
        start = self.offset
        end = start + k.shape[1]
        for page in range(start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            low, high = max(start, page * PAGE_TOKENS), min(end, (page + 1) * PAGE_TOKENS)
            part = slice(low - start, high - start)
            self._writer.write(
                pool,
                table[page - first_page],
                self.layer_index,
                k[:, part],
                v[:, part],
                low % PAGE_TOKENS,
            )


class KvLayerCache:
    """One layer's cache as mlx-lm knows it (`offset`, `update_and_fetch`, `make_mask`, `state`), for rows of a batch.

    Only the engine thread calls it.

    Args:
        rows: the layer of each sequence; at least one, all of the same backend and pool.
        state: what the layers of a step share.
    """

    def __init__(self, rows: Sequence[PagedLayer], state: StepState) -> None:
        self._rows = tuple(rows)
        self._state = state
        self.layer_index = rows[0].layer_index
        self._window = rows[0].group.layer.window
        alike: dict[object, list[int]] = {}
        for number, row in enumerate(self._rows):
            alike.setdefault(row.format_key, []).append(number)
        self._parts = [tuple(part) for part in alike.values()]

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: an int for one sequence, else mx int32 [rows], which `mx.fast.rope` takes."""
        if len(self._rows) == 1:
            return self._rows[0].offset
        starts = self.starts
        found = self._state.offsets.get(starts)
        if found is None:
            found = self._state.offsets[starts] = mx.array(starts, mx.int32)
        return found

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of each row's next token."""
        return tuple([row.offset for row in self._rows])

    @property
    def state(self) -> list[mx.array]:
        """Arrays a caller would evaluate between chunks: none, everything is in the frames already."""
        return []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedHandle, PagedHandle]:
        """Quantise the step's keys and values into the frames of each row (in a replay: write nothing).

        Args:
            keys: mx [rows, kv_heads, n, k_dim], after RoPE.
            values: mx [rows, kv_heads, n, v_dim].

        Returns:
            Handles for K and V of all tokens including these.

        Raises:
            InternalError: outside a step, another number of tokens than the step announced, or of rows.
            NonFiniteValues: NaN or infinity; the step's tokens do not count, of no row (a `DeviceWriter` tells it when
                the step ends).
        """
        batch, _, tokens, _ = keys.shape
        if batch != len(self._rows):
            raise InternalError(f"a cache of {len(self._rows)} sequences does not hold a batch of {batch}")
        self._check_step(tokens)
        backend = self._rows[0].sequence.backend
        if isinstance(backend, DeviceWriter):
            self._append(backend, keys, values)
            return self._handles(keys, values)
        v = values.astype(mx.float32)
        for part in self._parts:
            chosen = keys if len(part) == batch else keys[mx.array(part)]
            conditioning = self._rows[part[0]].conditioning
            k = chosen.astype(mx.float32) if conditioning is None else conditioning.condition_keys(chosen)
            mx.eval(k, v)
            k_host, v_host = host_array(k), host_array(v)
            for place, number in enumerate(part):
                self._rows[number].take(k_host[place], v_host[number])
        return self._handles(keys, values)

    def _append(self, backend: DeviceWriter, keys: mx.array, values: mx.array) -> None:
        """`update_and_fetch` where the backend writes."""
        tokens = keys.shape[2]
        for part in self._parts:
            writing = [number for number in part if not self._rows[number].sequence.replaying]
            if writing:
                k, v = (keys, values) if len(writing) == len(keys) else (x[mx.array(writing)] for x in (keys, values))
                conditioning = self._rows[writing[0]].conditioning
                backend.append(
                    self._rows[0].sequence.pool,
                    k if conditioning is None else conditioning.condition_keys(k),
                    v,
                    layer_index=self.layer_index,
                    targets=[self._rows[number].target() for number in writing],
                )
            for number in part:
                self._rows[number].count(tokens)

    def _handles(self, keys: mx.array, values: mx.array) -> tuple[PagedHandle, PagedHandle]:
        """Stand-ins for everything cached."""
        batch, heads, _, k_dim = keys.shape
        total = max(row.offset for row in self._rows)
        return (
            PagedHandle((batch, heads, total, k_dim), keys.dtype),
            PagedHandle((batch, heads, total, values.shape[-1]), values.dtype),
        )

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:  # noqa: N803
        """The mask a model asks for before its layers run.

        The backend makes its own masks from positions and the layer's window, so the usual answer is the word `causal`
        (or None for one token). An array is made only when the model insists; it may be passed on, not changed.

        Args:
            N: queries of the step (mlx-lm's name).
            return_array: the model needs an array: bool [N, tokens], for several rows [rows, 1, N, tokens].
            window_size: the window the model believes this layer has.

        Raises:
            UnsupportedMask: the window is not the layer's.
        """
        if window_size is not None and window_size != self._window:
            raise UnsupportedMask(
                f"layer {self.layer_index} has window {self._window}, the model asks for {window_size}",
                window=window_size,
            )
        if not return_array:
            return None if N == 1 else "causal"
        starts = np.array(self.starts)[:, None, None, None]
        ages = starts + np.arange(N)[:, None] - np.arange(starts.max() + N)
        visible = ages >= 0 if self._window is None else (ages >= 0) & (ages < self._window)
        mask = mx.array(visible[0, 0] if len(self._rows) == 1 else visible)
        self._state.masks.append(mask)
        return mask

    def attend(self, queries: mx.array, *, scale: float, mask: Mask, sinks: mx.array | None = None) -> mx.array:
        """Attention of the step's queries over everything cached, all rows in one call of the backend.

        Args:
            queries: mx [rows, heads, n, k_dim], after RoPE.
            scale: factor of the scores.
            mask: what `make_mask` answered.
            sinks: mx [heads] or None.

        Returns:
            mx [rows, heads, n, v_dim], evaluated.

        Raises:
            UnsupportedMask: `mask` is not this step's.
        """
        length = queries.shape[2]
        own = (mask is None and length == 1) or (isinstance(mask, str) and mask == "causal")
        if not own and not any(mask is made for made in self._state.masks):
            raise UnsupportedMask(f"layer {self.layer_index} got a mask that its cache did not make")
        sequence = self._rows[0].sequence
        result = sequence.backend.attend(
            sequence.pool,
            queries,
            layer_index=self.layer_index,
            rows=tuple([row.row(length) for row in self._rows]),
            scale=scale,
            window=self._window,
            sinks=sinks,
        )
        return result.out

    @property
    def step_host(self) -> Callable[[F32Array, F32Array, F32Array, float], F32Array]:
        """Writes and attends on numpy arrays (see `kvd.model.host_block.HostCache`).

        Raises:
            AttributeError: the backend works on mlx arrays only; `hasattr` tells.
        """
        self._rows[0].sequence.backend.attend_host  # type: ignore[attr-defined]  # noqa: B018  only some have it
        return self._step_host

    def _step_host(self, queries: F32Array, keys: F32Array, values: F32Array, scale: float) -> F32Array:
        """New keys and values into the frames, then attention: [rows * n, heads, dim] each, and so the result."""
        count = len(self._rows)
        tokens = len(keys) // count
        self._check_step(tokens)
        if len(self._parts) == 1:
            return self._step_part(self._parts[0], queries, keys, values, scale)
        out = np.empty((*queries.shape[:2], values.shape[2]), np.float32)
        for part in self._parts:
            places = (np.array(part)[:, None] * tokens + np.arange(tokens)).ravel()
            out[places] = self._step_part(part, queries[places], keys[places], values[places], scale)
        return out

    def _step_part(
        self, part: tuple[int, ...], queries: F32Array, keys: F32Array, values: F32Array, scale: float
    ) -> F32Array:
        """`_step_host` for rows that have one format."""
        rows = [self._rows[number] for number in part]
        first, tokens = rows[0], len(keys) // len(part)
        if first.conditioning is not None:
            queries = _through(first.conditioning.condition_queries, queries)
            keys = _through(first.conditioning.condition_keys, keys)
        self._take(part, keys, values)
        key = (first.group.group_id, part)
        backend: Any = first.sequence.backend
        plan = self._state.plans.get(key)
        if plan is None:
            seen = [row.row(tokens) for row in rows]
            plan = backend.plan_host(first.sequence.pool, rows=seen, length=tokens, window=self._window)
            self._state.plans[key] = plan
        attended: F32Array = backend.attend_host(
            plan, queries, layer_index=self.layer_index, layer_format=first.layer_format, scale=scale
        )
        return attended

    def _take(self, part: tuple[int, ...], keys: F32Array, values: F32Array) -> None:
        """Write the step's tokens of rows that have one format: float32 [rows * n, kv_heads, dim], keys conditioned."""
        rows = [self._rows[number] for number in part]
        first, tokens = rows[0], len(keys) // len(part)
        writer = first.native_writer
        if tokens > 1 or writer is None:
            k, v = keys.swapaxes(0, 1), values.swapaxes(0, 1)
            for number, row in enumerate(rows):
                at = slice(number * tokens, (number + 1) * tokens)
                row.take(k[:, at], v[:, at])
            return
        # one token a row: where it goes is the same for every layer of the group, so it is found once a step
        group = first.group.group_id
        places = self._state.places.get((group, part))
        if places is None:
            places = self._state.places[group, part] = _places(rows)
        writer.write_tokens(first.sequence.layouts[group], self.layer_index, keys, values, places)
        for row in rows:
            row.count(1)

    def _check_step(self, tokens: int) -> None:
        for row in self._rows:
            row.sequence.check_step(tokens)


def _places(rows: Sequence[PagedLayer]) -> list[tuple[int, int, int]]:
    """Row, address of the frame, and place in the page of the next token of each row that grows."""
    pool = host_pages(rows[0].sequence.pool)
    places = []
    for number, row in enumerate(rows):
        if not row.sequence.replaying:
            table, at = row.target()
            places.append((number, pool.address(table[at // PAGE_TOKENS]), at % PAGE_TOKENS))
    return places


def _through(operator: Callable[[mx.array], mx.array], x: F32Array) -> F32Array:
    """A conditioning operator on float32 [n, heads, dim]."""
    return np.ascontiguousarray(np.array(operator(mx.array(x.swapaxes(0, 1)[None])))[0].swapaxes(0, 1))


def host_array(x: mx.array) -> F32Array:
    """Evaluated float32 mx [rows, heads, n, dim] as numpy, its last axis dense: a view where possible, read at once."""
    array: F32Array = np.array(x, copy=False)
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


__all__ = ["KvLayerCache", "Mask", "PagedHandle", "PagedLayer", "StepState"]
