"""How keys and values become bits.

- `spec`: page formats and the exact bytes of a page; imports kvd.ids and kvd.errors only.
- `codec`: the one codec (numpy) that every backend must match; imports spec and errors.
- `token_groups`: the codec of keys grouped along tokens, which no pages use yet; imports spec, codec and errors.
- `native_codec`: the same as a compiled kernel, for Linux CPUs; imports kvd.native, codec, errors.
- `conditioning`: static key conditioning, its constants and their files; imports mlx, errors.
- `simulate`: caches that quantise on write without pages, for calibration; imports mlx, both codecs, conditioning.
- `calibration`: the result of calibration and its files; imports kvd.model.spec, codec, conditioning, spec.
- `calibrate`: chooses a format for a model by perplexity; imports mlx, parts of kvd.model.
- `errors`: the package's error classes; imports kvd.errors.

Nothing here imports from vm, store, attention, scheduler or front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.quant.errors import ConditioningDamaged, NonFiniteValues
from kvd.quant.spec import NAMED_FORMATS, PAGE_TOKENS, LayerFormat, PageFormat, PageLayout, SideFormat, named_format

if TYPE_CHECKING:
    from kvd.quant.codec import decode, encode

__all__ = [
    "NAMED_FORMATS",
    "PAGE_TOKENS",
    "ConditioningDamaged",
    "LayerFormat",
    "NonFiniteValues",
    "PageFormat",
    "PageLayout",
    "SideFormat",
    "decode",
    "encode",
    "named_format",
]


def __getattr__(name: str) -> object:
    if name in ("decode", "encode"):  # what only counts bytes does without numpy
        from kvd.quant import codec

        return getattr(codec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
