"""Routes the attention of a loaded mlx-lm model to caches that compute it themselves.

mlx-lm's model files import `scaled_dot_product_attention` by name, so the function is replaced in the module whose code
calls it: the one that defines the attention class, not the wrapper that was loaded (Gemma 3's text model lives in
`gemma3_text`). A cache with a method `attend` (`KvLayerCache`, and the caches of calibration) is asked; calls with any
other cache go to the original. DeepSeek V3 does arithmetic on what a cache returns, so there the call of the attention
class is replaced as a whole (`kvd.model.latent`), by the same rule.

A batch has one offset per row. mlx's rotary embedding takes them, and so does every class of mlx-lm's around it but
one: `DynamicNTKScalingRoPE` computes one base from the offset. With several offsets it is asked row by row. Nothing
else of mlx-lm is changed.

May import mlx, kvd.model.errors and latent.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import mlx.core as mx

from kvd.model import latent
from kvd.model.errors import UnsupportedModel

_FUNCTION: Final = "scaled_dot_product_attention"
_ORIGINAL: Final = "__kvd_original__"
_ROPE_MODULE: Final = "mlx_lm.models.rope_utils"
_ROPE_OF_ONE_OFFSET: Final = "DynamicNTKScalingRoPE"


class _Place(NamedTuple):
    """A function that is replaced.

    Attributes:
        owner: the module or class that holds it.
        name: under this name.
        wrap: makes the replacement from what is there.
    """

    owner: Any
    name: str
    wrap: Callable[[Callable[..., mx.array]], Callable[..., mx.array]]


def install(model: Any) -> tuple[str, ...]:  # noqa: ANN401  the mlx-lm door
    """Install the dispatcher for a model. Installing again changes nothing.

    Args:
        model: a loaded mlx-lm model (its modules are walked for attention classes).

    Returns:
        Names of the modules that hold the dispatcher now, sorted.

    Raises:
        UnsupportedModel: no layer's class comes from a module that imports the function; nothing was changed.
    """
    places = _places(model)
    if not places:
        raise UnsupportedModel(f"no layer of {type(model).__module__} calls mlx-lm's {_FUNCTION}")
    for place in places:
        current = getattr(place.owner, place.name)
        if not hasattr(current, _ORIGINAL):
            replacement = place.wrap(current)
            setattr(replacement, _ORIGINAL, current)
            setattr(place.owner, place.name, replacement)
    return tuple(sorted(module.__name__ for module in attention_modules(model)))


@contextlib.contextmanager
def dispatching(model: Any) -> Iterator[None]:  # noqa: ANN401
    """The dispatcher is installed inside the block; afterwards everything is as it was before."""
    before = [(place, getattr(place.owner, place.name)) for place in _places(model)]
    install(model)
    try:
        yield
    finally:
        for place, function in before:
            setattr(place.owner, place.name, function)


def attention_modules(model: Any) -> list[ModuleType]:  # noqa: ANN401
    """Modules that define the `__call__` of some submodule of the model and import the function by name."""
    found: dict[str, ModuleType] = {}
    for part in model.modules():
        # A class may inherit __call__; the name is looked up where the code was written.
        owner = next((cls for cls in type(part).__mro__ if "__call__" in vars(cls)), None)
        module = sys.modules.get(owner.__module__) if owner is not None else None
        if module is not None and _FUNCTION in vars(module):
            found[module.__name__] = module
    return list(found.values())


def _places(model: Any) -> list[_Place]:  # noqa: ANN401
    """Everything that is replaced for a model."""
    functions = [_Place(module, _FUNCTION, _dispatcher) for module in attention_modules(model)]
    ropes = {
        type(part)
        for part in model.modules()
        if (type(part).__module__, type(part).__name__) == (_ROPE_MODULE, _ROPE_OF_ONE_OFFSET)
    }
    classes = [_Place(kind, "__call__", latent.attending) for kind in latent.attention_classes(model)]
    return functions + classes + [_Place(kind, "__call__", _row_by_row) for kind in ropes] if functions else []


def _row_by_row(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A rotary embedding's `__call__` that also takes an offset for each row."""

    @functools.wraps(original)
    def call(rope: Any, x: mx.array, offset: Any = 0) -> mx.array:  # noqa: ANN401
        if not isinstance(offset, mx.array) or offset.ndim == 0:
            return original(rope, x, offset)
        rows = range(offset.shape[0])
        return mx.concatenate([original(rope, x[row : row + 1], offset[row].item()) for row in rows])

    return call


def _dispatcher(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A function with the original's signature that asks caches which can attend themselves."""

    @functools.wraps(original)
    def dispatch(
        queries: mx.array,
        keys: Any,  # noqa: ANN401  handles of kvd caches, arrays of others
        values: Any,  # noqa: ANN401
        cache: Any = None,  # noqa: ANN401
        scale: float = 1.0,
        mask: Any = None,  # noqa: ANN401
        sinks: mx.array | None = None,
        **other: Any,  # noqa: ANN401
    ) -> mx.array:
        attend: Callable[..., mx.array] | None = getattr(cache, "attend", None)
        if attend is not None:
            return attend(queries, scale=scale, mask=mask, sinks=sinks)
        if sinks is not None:
            other["sinks"] = sinks
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **other)

    return dispatch
