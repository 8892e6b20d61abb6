"""The options of `kvd serve` that bound memory beside the budget, and their types.

May import click, kvd.cli_types, kvd.errors and kvd.ops.sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvd.cli_types import SIZE
from kvd.errors import KvdError
from kvd.ops.sizes import parse_share

F = TypeVar("F", bound=Callable[..., Any])

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


def memory_options(command: F) -> F:
    """Add the limits of memory beside the budget."""
    for option in (
        click.option(
            "--namespace-quota",
            "namespace_quotas",
            type=NamedSizeType(),
            multiple=True,
            envvar="KVD_NAMESPACE_QUOTA",
            show_envvar=True,
            help="RAM that pages of a namespace's agents should take at most; may be given several times.",
        ),
        click.option(
            "--branch-limit",
            type=SIZE,
            envvar="KVD_BRANCH_LIMIT",
            show_envvar=True,
            help="Bytes that an agent's abandoned branches may take [default: any, of four branches].",
        ),
        click.option(
            "--footprint-limit",
            type=SIZE,
            envvar="KVD_FOOTPRINT_LIMIT",
            show_envvar=True,
            help="Memory of the whole process above which new requests are told to come again "
            "[default: nine tenths of the machine's].",
        ),
        click.option(
            "--pin-limit",
            type=ShareType(),
            envvar="KVD_PIN_LIMIT",
            show_envvar=True,
            default="50%",
            show_default=True,
            help="What pinned agents may hold together: a percentage of what the budget leaves to requests, or a size.",
        ),
    ):
        command = option(command)
    return command
