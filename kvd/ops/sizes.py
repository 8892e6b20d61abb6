"""The one parser and the one formatter of sizes: `10.2GB`, `512MiB`, `100K`, `1_000_000`.

Units follow IEC 80000-13: `K`, `KB` are 1000 bytes, `Ki`, `KiB` are 1024. Upper and lower case mean the same, bits are
never meant. Figures are exact: `10.2GB` is 10,200,000,000 bytes, not the nearest float. Imports kvd.ops.errors only.
"""

from __future__ import annotations

import re
from fractions import Fraction

from kvd.ops.errors import InvalidSize

__all__ = ["format_size", "parse_share", "parse_size"]

ALLOWED = "a number with an optional unit, such as 1_000_000, 100K, 40MB, 512MiB or 10.2GB"
LIMIT_BYTES = 2**63 - 1
"""Larger figures do not fit the files and messages they end up in."""

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_FORM = re.compile(r"(?P<number>\d+(?:_\d+)*(?:\.\d+)?)\s*(?P<prefix>[kmgtp]?)(?P<binary>i?)b?", re.IGNORECASE)


def parse_size(value: str | int, *, what: str = "size") -> int:
    """Bytes meant by a text.

    Args:
        value: the text, or a number of bytes from a configuration file.
        what: the name of the setting, for the error.

    Returns:
        Bytes, 0 or more; a fraction of a byte is dropped.

    Raises:
        InvalidSize: it is no size; the message lists the allowed forms, `data` has the text.
    """
    text = str(value).strip()
    match = _FORM.fullmatch(text) if text.isascii() and not isinstance(value, bool) else None
    if match is None or (match["binary"] and not match["prefix"]):
        raise InvalidSize(f"{what} {str(value)!r} is not a size: give {ALLOWED}", what=what, value=str(value))
    base = 1024 if match["binary"] else 1000
    exact = Fraction(match["number"].replace("_", "")) * base ** _POWERS[match["prefix"].lower()]
    if exact > LIMIT_BYTES:
        raise InvalidSize(f"{what} {text!r} is over the limit of {format_size(LIMIT_BYTES)}", what=what, value=text)
    return int(exact)


def parse_share(value: str, *, what: str = "size") -> int | float:
    """Bytes, or a part of something: `4GB` is 4,000,000,000, `40%` is 0.4.

    Args:
        value: the text.
        what: the name of the setting, for the error.

    Raises:
        InvalidSize: it is neither; the message lists the allowed forms.
    """
    text = value.strip()
    if not text.endswith("%"):
        return parse_size(text, what=what)
    digits = text[:-1].strip()
    if not re.fullmatch(r"\d+(?:\.\d+)?", digits, re.ASCII) or float(digits) > 100:
        raise InvalidSize(f"{what} {value!r} is not a percentage from 0% to 100%", what=what, value=value)
    return float(digits) / 100


def format_size(size_bytes: int) -> str:
    """Bytes for people, in decimal units with three digits: `10.2 GB`. `parse_size` reads it back.

    Args:
        size_bytes: bytes; negative ones are shown with a sign.
    """
    sign, magnitude = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    if magnitude < 1000:
        return f"{sign}{magnitude} B"
    for power, unit in enumerate(("KB", "MB", "GB", "TB", "PB", "EB"), start=1):
        amount = Fraction(magnitude, 1000**power)
        decimals = 2 if amount < 10 else 1 if amount < 100 else 0
        shown = round(amount, decimals)
        if shown < 1000 or unit == "EB":
            digits = f"{float(shown):.{decimals}f}"
            return f"{sign}{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {unit}"
    raise AssertionError("the loop's last unit always returns")
