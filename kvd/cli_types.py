"""What options of `kvd` take beyond click's own types: sizes, shares, counts, limits. Errors name what is allowed.

May import click, kvd.errors and kvd.ops.sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from kvd.errors import KvdError
from kvd.ops.sizes import parse_share, parse_size

if TYPE_CHECKING:
    IntType = click.ParamType[int]
else:
    # older click has no type parameter at run time
    IntType = click.ParamType


class SizeType(IntType):
    """A size such as 10.2GB, 40MB, 512MiB, 100K."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse with the one size parser."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value), what=param.name if param and param.name else "size")
        except KvdError as error:
            self.fail(error.message, param, ctx)


SIZE = SizeType()


if TYPE_CHECKING:
    LimitType = click.ParamType[int | None]
else:
    LimitType = click.ParamType


class WriteLimit(LimitType):
    """`off`, or a size a minute such as 500MB/min."""

    name = "size/min|off"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Name what is allowed when it is neither."""
        text = str(value).strip().lower()
        if text == "off":
            return None
        try:
            return parse_size(text.removesuffix("/min").rstrip(), what="write-limit")
        except KvdError as error:
            self.fail(f"{error.message}, with or without /min, or off", param, ctx)


if TYPE_CHECKING:
    CountType = click.ParamType[int | Literal["auto"]]
else:
    CountType = click.ParamType


class AutoOrCount(CountType):
    """`auto`, or a whole number from 1 to a most.

    Args:
        most: the largest number.
    """

    name = "auto|count"

    def __init__(self, most: int) -> None:
        self._most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["auto"]:
        """Name what is allowed when it is neither."""
        text = str(value).strip()
        if text == "auto":
            return "auto"
        if text.isdecimal() and 1 <= int(text) <= self._most:
            return int(text)
        raise click.BadParameter(f"must be auto or a whole number from 1 to {self._most}, not {text!r}", ctx, param)


if TYPE_CHECKING:
    NumberType = click.ParamType[int | float]
    PairType = click.ParamType[tuple[str, int]]
else:
    # older click has no type parameter at run time
    NumberType = PairType = click.ParamType


class ShareType(NumberType):
    """A size, or a percentage, which becomes a part from 0 to 1."""

    name = "size|percent"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """Parse; an int is bytes, a float a part."""
        if isinstance(value, int | float):
            return value
        try:
            return parse_share(str(value), what=param.name if param and param.name else "size")
        except KvdError as error:
            self.fail(error.message, param, ctx)


class NamedSizeType(PairType):
    """NAME=SIZE."""

    name = "name=size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Split at the last `=`: names may have one."""
        if isinstance(value, tuple):
            return value
        name, equals, size = str(value).rpartition("=")
        if not (equals and name):
            self.fail(f"{str(value)!r} must be NAME=SIZE, such as work=4GB", param, ctx)
        return name, SIZE.convert(size, param, ctx)


__all__ = ["SIZE", "AutoOrCount", "NamedSizeType", "ShareType", "SizeType", "WriteLimit"]
