"""Values that JSON and UTF-8 can hold, and refusals of all others that name the place.

Pure. May import kvd.errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvd.errors import InvalidParams, InvalidText


def check_text(name: str, value: str, *, parameter: str = "") -> None:
    """Refuse text that UTF-8 cannot carry. `parameter` it came in, if `name` is a place inside one.

    Raises:
        InvalidText: with the position of the lone surrogate.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidText(
            f"{name} has a lone surrogate at character {error.start}; send whole characters",
            parameter=parameter or name,
            character=error.start,
        ) from None


def check_plain(parameter: str, name: str, value: object) -> None:
    """Refuse what JSON could not hold, anywhere inside a value: templates render messages and tools as JSON.

    Args:
        parameter: it came in.
        name: the place inside, for messages.
        value: maps, lists, text, numbers.

    Raises:
        InvalidText: text that UTF-8 cannot carry.
        InvalidParams: bytes, or a number that is none.
    """
    if isinstance(value, str):
        check_text(name, value, parameter=parameter)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_text(f"a key of {name}", str(key), parameter=parameter)
            check_plain(parameter, f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(parameter, f"{name}[{index}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidParams(f"{name} must be a finite number, not {value}", parameter=parameter)
    elif not isinstance(value, bool | int | float | None):
        raise InvalidParams(
            f"{name} must be text, a number, a list or a map, not {type(value).__name__}", parameter=parameter
        )
