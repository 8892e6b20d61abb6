"""The model side of paged KV: cache objects that mlx-lm models accept, backed by frames of the pool.

Theory of operation. A `SequenceCache` belongs to one address space. It knows, per cache group, the block table (frames
in token order, the open tail last) and how many tokens are computed. A step is

    sequence.set_block_table(group, frames)      # frames for the step's tokens are mapped by the caller
    sequence.begin_step(n)
    model(ids, cache=sequence.layer_caches)      # every layer writes its n tokens, then attends
    sequence.end_step()                          # the tokens count from here on

Inside the model each layer calls `update_and_fetch`, which *evaluates* K and V, conditions the keys, encodes both with
the codec and writes the codes into the frames. It returns handles instead of arrays; the dispatcher of
`kvd.model.dispatch` sees whose cache it is and asks the backend for attention over the pages, so what is attended to is
always what was stored. A model that does arithmetic on fetched arrays fails at once instead of computing nonsense.

Nothing is lazy across the border: when `update_and_fetch` returns, the bytes are in the frames. If a step fails, the
tokens are not counted; the bytes after `tokens` mean nothing and the next step overwrites them.

May import mlx, numpy, kvd.attention, kvd.quant, kvd.store.frame_pool, kvd.model.spec and errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

from kvd.attention import AttentionBackend, Row, Run, Segment, UnsupportedMask
from kvd.errors import InternalError, InvalidParams
from kvd.ids import FrameId
from kvd.model.errors import UnsupportedModel
from kvd.model.page_writer import page_writer
from kvd.model.spec import CacheGroup, ModelCacheSpec
from kvd.quant.codec import F32Array
from kvd.quant.conditioning import LayerConditioning
from kvd.quant.spec import PAGE_TOKENS, LayerFormat, PageLayout
from kvd.store.frame_pool import FramePool

Mask = mx.array | Literal["causal"] | None


@dataclass(frozen=True, slots=True)
class PagedHandle:
    """What `update_and_fetch` returns in place of K or V: the shape they would have, no data.

    Attributes:
        shape: (1, kv_heads, tokens, dim) of everything cached.
        dtype: dtype of what the model passed in.
    """

    shape: tuple[int, int, int, int]
    dtype: mx.Dtype


class KvLayerCache:
    """One layer's cache as mlx-lm knows it (`offset`, `update_and_fetch`, `make_mask`, `state`), for one sequence.

    Owner: its `SequenceCache`; only the engine thread calls it.
    """

    def __init__(
        self,
        sequence: SequenceCache,
        group: CacheGroup,
        layer_index: int,
        layer_format: LayerFormat,
        conditioning: LayerConditioning | None,
    ) -> None:
        self._sequence = sequence
        self._group = group
        self.layer_index = layer_index
        self._format = layer_format
        self._conditioning = conditioning
        self._writer = page_writer(layer_format, group.layer.k_dim, group.layer.v_dim)
        self._written_tokens = 0

    @property
    def offset(self) -> int:
        """Position of the next token: RoPE positions start here."""
        return self._sequence.base_tokens + self._written_tokens

    @property
    def state(self) -> list[mx.array]:
        """Arrays a caller would evaluate between chunks: none, everything is in the frames already."""
        return []

    def reset_step(self) -> None:
        """A step begins or ended: nothing of it is written yet."""
        self._written_tokens = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedHandle, PagedHandle]:
        """Quantise the step's keys and values into the frames (in a replay: write nothing).

        Args:
            keys: mx [1, kv_heads, n, k_dim], after RoPE.
            values: mx [1, kv_heads, n, v_dim].

        Returns:
            Handles for K and V of all tokens including these.

        Raises:
            InternalError: outside a step, or another number of tokens than the step announced.
            NonFiniteValues: NaN or infinity; the step's tokens do not count.
        """
        batch, heads, tokens, k_dim = keys.shape
        if batch != 1:
            raise InternalError(f"a sequence cache holds one sequence, not a batch of {batch}")
        start = self.offset
        self._sequence.check_step(tokens)
        if not self._sequence.replaying:
            self._write(keys, values, start)
        self._written_tokens = tokens
        total = start + tokens
        return (
            PagedHandle((1, heads, total, k_dim), keys.dtype),
            PagedHandle((1, heads, total, values.shape[-1]), values.dtype),
        )

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:  # noqa: N803
        """The mask a model asks for before its layers run.

        The backend makes its own masks from positions and the layer's window, so the usual answer is the word `causal`
        (or None for one token). An array is made only when the model insists; it may be passed on, not changed.

        Args:
            N: queries of the step (mlx-lm's name).
            return_array: the model needs an array.
            window_size: the window the model believes this layer has.

        Raises:
            UnsupportedMask: the window is not the layer's.
        """
        window = self._group.layer.window
        if window_size is not None and window_size != window:
            raise UnsupportedMask(
                f"layer {self.layer_index} has window {window}, the model asks for {window_size}", window=window_size
            )
        if not return_array:
            return None if N == 1 else "causal"
        ages = mx.arange(self.offset, self.offset + N)[:, None] - mx.arange(self.offset + N)[None]
        mask = ages >= 0
        if window is not None:
            mask = mask & (ages < window)
        self._sequence.remember_mask(mask)
        return mask

    def attend(self, queries: mx.array, *, scale: float, mask: Mask, sinks: mx.array | None = None) -> mx.array:
        """Attention of the step's queries over everything cached.

        Args:
            queries: mx [1, heads, n, k_dim], after RoPE.
            scale: factor of the scores.
            mask: what `make_mask` answered.
            sinks: mx [heads] or None.

        Returns:
            mx [1, heads, n, v_dim], evaluated.

        Raises:
            UnsupportedMask: `mask` is not this cache's.
        """
        length = queries.shape[2]
        own = (mask is None and length == 1) or (isinstance(mask, str) and mask == "causal")
        if not own and not self._sequence.made_mask(mask):
            raise UnsupportedMask(f"layer {self.layer_index} got a mask that its cache did not make")
        table, first_page = self._sequence.mapped(self._group.group_id)
        start = first_page * PAGE_TOKENS
        segment = Segment(table, (Run(start, self.offset - start),), self._format, self._conditioning)
        result = self._sequence.backend.attend(
            self._sequence.pool,
            queries,
            layer_index=self.layer_index,
            rows=(Row((segment,), self.offset - length),),
            scale=scale,
            window=self._group.layer.window,
            sinks=sinks,
        )
        return result.out

    @property
    def step_host(self) -> Callable[[F32Array, F32Array, F32Array, float], F32Array]:
        """Writes and attends on numpy arrays (see `kvd.model.host_block.HostCache`).

        Raises:
            AttributeError: the backend works on mlx arrays only; `hasattr` tells.
        """
        attend = self._sequence.backend.attend_host  # type: ignore[attr-defined]  # only some have it
        return functools.partial(self._step_host, attend)

    def _step_host(
        self, attend: Callable[..., F32Array], queries: F32Array, keys: F32Array, values: F32Array, scale: float
    ) -> F32Array:
        """New keys and values into the frames, then attention: [n, heads, dim] each, [n, heads, v_dim] back."""
        start, tokens = self.offset, len(keys)
        self._sequence.check_step(tokens)
        if self._conditioning is not None:
            queries = _through(self._conditioning.condition_queries, queries)
            keys = _through(self._conditioning.condition_keys, keys)
        if not self._sequence.replaying:
            self._write_host(keys.swapaxes(0, 1), values.swapaxes(0, 1), start)
        self._written_tokens = tokens
        table, first_page = self._sequence.mapped(self._group.group_id)
        first = first_page * PAGE_TOKENS
        segment = Segment(table, (Run(first, self.offset - first),), self._format, self._conditioning)
        return attend(
            self._sequence.pool,
            queries,
            layer_index=self.layer_index,
            query_start=start,
            segment=segment,
            scale=scale,
            window=self._group.layer.window,
        )

    def _write(self, keys: mx.array, values: mx.array, start: int) -> None:
        """Encode K and V [1, kv_heads, n, dim] and write them at positions start.., across pages."""
        if self._conditioning is not None:
            keys = self._conditioning.condition_keys(keys)
        keys, values = keys.astype(mx.float32), values.astype(mx.float32)
        mx.eval(keys, values)
        self._write_host(_host_array(keys), _host_array(values), start)

    def _write_host(self, k: F32Array, v: F32Array, start: int) -> None:
        """Encode float32 [kv_heads, n, dim], keys conditioned, and write them at positions start.., across pages."""
        table, first_page = self._sequence.mapped(self._group.group_id)
        end = start + k.shape[1]
        for page in range(start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            low, high = max(start, page * PAGE_TOKENS), min(end, (page + 1) * PAGE_TOKENS)
            part = slice(low - start, high - start)
            self._writer.write(
                self._sequence.pool,
                table[page - first_page],
                self.layer_index,
                k[:, part],
                v[:, part],
                low % PAGE_TOKENS,
            )


class SequenceCache:
    """Paged KV of one address space, as the model sees it.

    Owner: the engine thread. `tokens` changes in `end_step` and `truncate` only; block tables in `set_block_table`.

    Args:
        pool: where frames live.
        spec: the model's cache geometry.
        layouts: one page layout per cache group, in group order.
        backend: attention backend.
        conditioning: operators by layer index in the model, for every layer whose format conditions its keys.
        tokens: tokens already computed (a restored space).

    Attributes:
        tokens: tokens whose KV exists.
        replaying: True between `begin_replay` and `end_step`: nothing is written.

    Raises:
        UnsupportedModel: a layer's cache is not paged K and V.
        InvalidParams: layouts do not fit the spec, or constants are missing.
    """

    def __init__(
        self,
        *,
        pool: FramePool,
        spec: ModelCacheSpec,
        layouts: Sequence[PageLayout],
        backend: AttentionBackend,
        conditioning: Mapping[int, LayerConditioning] | None = None,
        tokens: int = 0,
    ) -> None:
        groups = spec.groups
        for index, layer in enumerate(spec.layers):
            if layer.kind not in ("full", "sliding"):
                raise UnsupportedModel(f"layer {index} has a cache of kind {layer.kind}, which has no KV pages")
        if tuple(layout.layer_indices for layout in layouts) != tuple(group.layer_indices for group in groups):
            raise InvalidParams(f"{len(layouts)} layouts do not fit the model's {len(groups)} cache groups")
        self.pool = pool
        self.spec = spec
        self.backend = backend
        self.layouts = tuple(layouts)
        self.tokens = tokens
        self._tables: list[tuple[FrameId, ...]] = [()] * len(groups)
        self._first_pages = [0] * len(groups)
        self._step_tokens = 0
        self.replaying = False
        self._masks: list[mx.array] = []
        layers: dict[int, KvLayerCache] = {}
        for group, layout in zip(groups, layouts, strict=True):
            for at, layer_index in enumerate(group.layer_indices):
                layer_format = layout.page_format.layers[at]
                operators = _operators(layer_format, layer_index, conditioning or {})
                layers[layer_index] = KvLayerCache(self, group, layer_index, layer_format, operators)
        self._layers = [layers[index] for index in sorted(layers)]

    @property
    def layer_caches(self) -> list[KvLayerCache]:
        """One cache per model layer, in order: the model's `cache` argument."""
        return list(self._layers)

    @property
    def base_tokens(self) -> int:
        """Position of the running step's first token (`tokens` when none runs)."""
        return self.tokens - 1 if self.replaying else self.tokens

    def set_block_table(self, group: int, frames: Sequence[FrameId], *, first_page: int = 0) -> None:
        """Map frames to a group's pages.

        Args:
            group: cache group.
            frames: frames of pages first_page, first_page + 1, … in token order, the open tail and frames for tokens to
                come included.
            first_page: pages before it are not mapped (a sliding group keeps only its window).

        Raises:
            InternalError: a frame does not exist or has another format.
        """
        layout = self.layouts[group]
        for frame in frames:
            if self.pool.layout(frame).format_id != layout.format_id:
                raise InternalError(f"frame {frame} does not have format {layout.format_id}")
        self._tables[group] = tuple(frames)
        self._first_pages[group] = first_page

    def begin_step(self, n_tokens: int) -> None:
        """The next model call appends `n_tokens` tokens.

        Raises:
            InternalError: a step is running, or a group lacks frames for tokens to come or in its window.
        """
        self._check_idle()
        if n_tokens < 1:
            raise InternalError(f"a step has at least one token, not {n_tokens}")
        self._check_mapped(self.tokens + n_tokens)
        self._step_tokens = n_tokens

    def begin_replay(self) -> None:
        """The next model call computes the last token again, for its logits: it reads all KV and writes none.

        Raises:
            InternalError: a step is running, there is no token, or a group lacks frames.
        """
        self._check_idle()
        if self.tokens < 1:
            raise InternalError("there is no token to replay")
        self._check_mapped(self.tokens)
        self._step_tokens, self.replaying = 1, True

    def end_step(self) -> None:
        """The model call is over: its tokens count (none after a replay).

        Raises:
            InternalError: no step is running, or a layer did not write; the tokens do not count then.
        """
        if not self._step_tokens:
            raise InternalError("no step is running")
        behind = [layer.layer_index for layer in self._layers if layer.offset != self.base_tokens + self._step_tokens]
        grown = 0 if self.replaying else self._step_tokens
        self.abort_step()
        if behind:
            raise InternalError(f"layers {behind} wrote nothing in this step", layers=behind)
        self.tokens += grown

    def abort_step(self) -> None:
        """Forget the running step, if any; its tokens do not count and will be overwritten."""
        self._step_tokens = 0
        self.replaying = False
        self._masks.clear()
        for layer in self._layers:
            layer.reset_step()

    def truncate(self, tokens: int) -> None:
        """Cut to the first `tokens` tokens. Frames stay as mapped; the caller sets shorter tables when it drops some.

        Raises:
            InternalError: a step is running, or there are not that many tokens.
        """
        self._check_idle()
        if not 0 <= tokens <= self.tokens:
            raise InternalError(f"cannot cut {self.tokens} tokens to {tokens}")
        self.tokens = tokens

    def check_step(self, tokens: int) -> None:
        """Raise InternalError unless a step of `tokens` tokens is running."""
        if tokens != self._step_tokens:
            raise InternalError(f"the model appends {tokens} tokens in a step of {self._step_tokens}")

    def mapped(self, group: int) -> tuple[tuple[FrameId, ...], int]:
        """A group's frames and the page number of the first."""
        return self._tables[group], self._first_pages[group]

    def remember_mask(self, mask: mx.array) -> None:
        """A layer handed this array to the model; it may come back in this step."""
        self._masks.append(mask)

    def made_mask(self, mask: Mask) -> bool:
        """True if the array was made for the running step."""
        return any(mask is made for made in self._masks)

    def _check_idle(self) -> None:
        if self._step_tokens:
            raise InternalError("a step is running")

    def _check_mapped(self, tokens: int) -> None:
        """Raise InternalError unless every group has frames for all that a step up to `tokens` writes and sees."""
        for number, (table, first_page) in enumerate(zip(self._tables, self._first_pages, strict=True)):
            low, high = first_page * PAGE_TOKENS, (first_page + len(table)) * PAGE_TOKENS
            window = self.spec.groups[number].layer.window
            if high < tokens or low > (0 if window is None else max(0, self.base_tokens - window + 1)):
                raise InternalError(
                    f"group {number} maps tokens {low} to {high}, not all that a step to {tokens} needs"
                )


def _through(operator: Callable[[mx.array], mx.array], x: F32Array) -> F32Array:
    """A conditioning operator on float32 [n, heads, dim]."""
    return np.ascontiguousarray(np.array(operator(mx.array(x.swapaxes(0, 1)[None])))[0].swapaxes(0, 1))


def _host_array(x: mx.array) -> F32Array:
    """Evaluated float32 mx [1, heads, n, dim] as numpy [heads, n, dim]: a view of mlx's buffer, read at once."""
    array: F32Array = np.array(x, copy=False)[0]
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def _operators(
    layer_format: LayerFormat, layer_index: int, conditioning: Mapping[int, LayerConditioning]
) -> LayerConditioning | None:
    """Operators of a layer, None for raw keys; raises InvalidParams when the format needs them and they are missing."""
    digest = layer_format.k.conditioning
    if digest is None:
        return None
    if layer_index not in conditioning:
        raise InvalidParams(f"layer {layer_index} needs conditioning constants {digest}, which are not loaded")
    return conditioning[layer_index]
