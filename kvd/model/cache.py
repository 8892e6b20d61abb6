"""The model side of paged KV: one address space, backed by frames of the pool.

Theory of operation. A `SequenceCache` belongs to one address space. It knows, per cache group, the block table (frames
in token order, the open tail last) and how many tokens are computed. A step is

    sequence.set_block_table(group, frames)      # frames for the step's tokens are mapped by the caller
    sequence.begin_step(n)
    model(ids, cache=sequence.layer_caches)      # every layer writes its n tokens, then attends
    sequence.end_step()                          # the tokens count from here on

What a model meets is in `kvd.model.layer_cache`: each layer's K and V are quantised into the frames when the model
hands them over, and what is attended to is always what was stored. Steps of several address spaces at once are in
`kvd.model.batch_cache`; this is their building block, and alone it is a batch of one.

Nothing is lazy across the border: when `update_and_fetch` returns, the bytes are in the frames (a `DeviceWriter` queues
them; they are there, and looked at, when `end_step` returns). If a step fails, the tokens are not counted; the bytes
after `tokens` mean nothing and the next step overwrites them.

May import kvd.attention, kvd.quant, kvd.store.frame_pool, kvd.model.layer_cache, spec and errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvd.attention import AttentionBackend
from kvd.errors import InternalError, InvalidParams
from kvd.ids import FrameId
from kvd.model.errors import UnsupportedModel
from kvd.model.layer_cache import KvLayerCache, Mask, PagedHandle, PagedLayer, StepState
from kvd.model.spec import ModelCacheSpec
from kvd.quant.conditioning import LayerConditioning
from kvd.quant.spec import PAGE_TOKENS, LayerFormat, PageLayout
from kvd.store.frame_pool import Frames


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
        layers: what each model layer keeps of it, in order.
        replaying: True between `begin_replay` and `end_step`: nothing is written.

    Raises:
        UnsupportedModel: a layer's cache is not paged K and V.
        InvalidParams: layouts do not fit the spec, or constants are missing.
    """

    def __init__(
        self,
        *,
        pool: Frames,
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
        self._state = StepState()
        layers: dict[int, PagedLayer] = {}
        for group, layout in zip(groups, layouts, strict=True):
            for at, layer_index in enumerate(group.layer_indices):
                layer_format = layout.page_format.layers[at]
                operators = _operators(layer_format, layer_index, conditioning or {})
                layers[layer_index] = PagedLayer(self, group, layer_index, layer_format, operators)
        self.layers = tuple(layers[index] for index in sorted(layers))
        self._layer_caches = [KvLayerCache((layer,), self._state) for layer in self.layers]

    @property
    def layer_caches(self) -> list[KvLayerCache]:
        """One cache per model layer, in order: the model's `cache` argument."""
        return list(self._layer_caches)

    @property
    def stepping(self) -> bool:
        """Whether a step is running."""
        return self._step_tokens > 0

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
        self.replaying = True  # from here on the step begins one token earlier, and so does its window
        try:
            self._check_mapped(self.tokens)
        except InternalError:
            self.replaying = False
            raise
        self._step_tokens = 1

    def end_step(self) -> None:
        """The model call is over: its tokens count (none after a replay).

        Raises:
            InternalError: no step is running, or a layer did not write; the tokens do not count then.
            NonFiniteValues: a device found that a value does not fit its format; likewise.
        """
        if not self._step_tokens:
            raise InternalError("no step is running")
        try:
            self.pool.check_appended()
        except BaseException:
            self.abort_step()
            raise
        behind = self.layers_behind()
        grown = 0 if self.replaying else self._step_tokens
        self.abort_step()
        if behind:
            raise InternalError(f"layers {behind} wrote nothing in this step", layers=behind)
        self.tokens += grown

    def abort_step(self) -> None:
        """Forget the running step, if any; its tokens do not count and will be overwritten."""
        self.pool.discard_appended()
        self._step_tokens = 0
        self.replaying = False
        self._state.clear()
        for layer in self.layers:
            layer.reset_step()

    def layers_behind(self) -> list[int]:
        """Layers that have not written what the running step announced."""
        return [layer.layer_index for layer in self.layers if layer.offset != self.base_tokens + self._step_tokens]

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


__all__ = ["KvLayerCache", "Mask", "PagedHandle", "SequenceCache"]
