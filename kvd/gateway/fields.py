"""One JSON object of a request, read field by field: every getter checks type and range and names what is allowed.

No I/O. May import siblings only.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kvd.gateway.errors import ApiError, invalid

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON spells half of a pair."""


class Fields:
    """A JSON object and where it stands in the request. Immutable.

    Args:
        raw: the object.
        place: its path, such as `messages[0]`; empty for the request itself.
    """

    def __init__(self, raw: Mapping[str, Any], place: str = "") -> None:
        self.raw = raw
        self.place = place

    @classmethod
    def of(cls, value: object, place: str) -> Fields:
        """The object at a place.

        Raises:
            ApiError: it is none.
        """
        if not isinstance(value, dict):
            raise invalid(place, f"{place} must be an object, not {_kind(value)}")
        return cls(value, place)

    def path(self, name: str) -> str:
        """The path of a field."""
        return f"{self.place}.{name}" if self.place else name

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw.get(name) is not None

    def wrong(self, name: str, message: str) -> NoReturn:
        """Refuse a field: `message` follows its path.

        Raises:
            ApiError: always.
        """
        raise invalid(self.path(name), f"{self.path(name)} {message}")

    def _instead(self, name: str, found: str) -> str:
        """What a message says of a field that is not what it must be."""
        return f", not {found}" if name in self.raw else "; it is missing"

    def refuse_unknown(self, allowed: frozenset[str]) -> None:
        """Raise unless every field is allowed; a misspelt one must not be ignored in silence."""
        if not allowed.issuperset(self.raw):
            unknown = sorted(self.raw.keys() - allowed)
            names = ", ".join(self.path(name) for name in unknown)
            raise ApiError(
                "unknown_parameter",
                f"unrecognized request argument supplied: {names}; known are {', '.join(sorted(allowed))}",
                param=self.path(unknown[0]),
            )

    def refuse(self, name: str, why: str, *, harmless: Sequence[object] = (None, False)) -> None:
        """Raise where a field asks for what the gateway cannot do; `harmless` values ask for nothing."""
        if name in self.raw and not any(self.raw[name] is each or self.raw[name] == each for each in harmless):
            raise ApiError("unsupported", f"{self.path(name)} is not supported: {why}", param=self.path(name))

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required when there is no default."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self.wrong(name, f"must be a string{self._instead(name, _kind(value))}")
        return value

    def optional_text(self, name: str) -> str | None:
        """A string, or None where it is absent or null."""
        return self.text(name) if self.has(name) else None

    def choice(self, name: str, allowed: Sequence[str], default: str | None = None) -> str:
        """One of some strings."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in allowed:
            self.wrong(name, f"must be one of {', '.join(allowed)}{self._instead(name, _shown(value))}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(name, f"must be true or false, not {_shown(value)}")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]; required when there is no default."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.wrong(name, f"must be an integer from {low} to {high}{self._instead(name, _shown(value))}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high], or None where it is absent or null."""
        return self.integer(name, low, high) if self.has(name) else None

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A number in [low, high]."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            self.wrong(name, f"must be a number from {low:g} to {high:g}, not {_shown(value)}")
        return float(value)

    def strings(self, name: str) -> list[str]:
        """A string or a list of them; empty where it is absent or null."""
        value = self.raw.get(name)
        values = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(values, list) or not all(isinstance(each, str) and each for each in values):
            self.wrong(name, "must be a non-empty string or a list of them")
        return list(values)

    def items(self, name: str) -> list[Any]:
        """A list; empty where it is absent or null."""
        value = self.raw.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.wrong(name, f"must be a list, not {_kind(value)}")
        return value

    def objects(self, name: str) -> list[Fields]:
        """A list of objects; empty where it is absent or null."""
        return [Fields.of(each, f"{self.path(name)}[{index}]") for index, each in enumerate(self.items(name))]

    def inner(self, name: str) -> Fields:
        """An object inside; an empty one where it is absent or null."""
        return Fields.of(self.raw[name], self.path(name)) if self.has(name) else Fields({}, self.path(name))


def parse_body(data: bytes) -> Fields:
    """The request's body.

    Raises:
        ApiError: it is no JSON object, or has strings or keys that are no text: nothing of it could be said again.
    """
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
        value = _DECODER.decode(text)
        if _SURROGATE.search(text) is not None:  # of pairs JSON makes one character
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ApiError("invalid", "the request's JSON is nested too deep") from None
    except UnicodeEncodeError as error:
        found = f"U+{ord(error.object[error.start]):04X}"
        raise ApiError("invalid", f"the request has a lone surrogate ({found}), which is no character") from None
    except ValueError as error:
        raise ApiError("invalid", f"the request's body is not valid JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise ApiError("invalid", f"the request's body must be a JSON object, not {_kind(value)}")
    return Fields(value)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)
"""Made once: `json.loads` makes one for each text that is read in another way than its own."""


def _kind(value: object) -> str:
    """The JSON type of a value, for messages."""
    if isinstance(value, bool):
        return "a boolean"
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _shown(value: object) -> str:
    """A value for a message: short, and never a whole prompt."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else _kind(value)


__all__ = ["Fields", "parse_body"]
