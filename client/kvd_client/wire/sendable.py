"""Whether the peer takes the structure of a message of ours: what a framer there would end the connection for.

Theory of operation. A connection may carry the calls of many people (the HTTP gateway has one), and a message outside
the peer's bounds ends it for all of them. So the sender looks first: the walk counts what `framing` counts, on objects
instead of headers, level by level, so that depth costs no stack. Containers of plain values, nearly all, are looked at
in C. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from kvd_client.wire.errors import EncodeError
from kvd_client.wire.framing import WireLimits

_TEXT: Final = frozenset({str})
_SCALARS: Final = frozenset({str, int, float, bool, type(None), bytes})
_SHORT: Final = 8
FLAT_VALUES: Final = _SHORT * _SHORT + 2
"""Most values of a message with a flat map at its end, beyond its own elements and two for each key of the map: those
of the lists, the message itself and a list around the map."""

FLAT_DEPTH: Final = 4
"""Its containers that may lie in one another: the message, a list, the map, a list in it."""


def check_sendable(message: list[object], limits: WireLimits) -> None:
    """Look at a message that msgpack could encode.

    Raises:
        EncodeError: the peer takes none that is nested so deep, has so many values, or keys that are no text.
    """
    level: list[Any] = [message]
    values = 1
    for _ in range(limits.max_send_depth):
        below: list[Any] = []
        for container in level:
            children: Iterable[Any] = container
            values += len(container)
            if isinstance(container, dict):
                if not _TEXT.issuperset(map(type, container)) and not all(isinstance(key, str) for key in container):
                    raise EncodeError("a message cannot be encoded: the keys of a map must be strings")
                children = container.values()
                values += len(container)
            if values > limits.max_send_values:
                raise EncodeError(
                    f"a message cannot be encoded: it has more than the {limits.max_send_values} values that the peer "
                    "accepts (map keys and containers count)"
                )
            if not _SCALARS.issuperset(map(type, children)):
                below += [child for child in children if isinstance(child, dict | list | tuple) and child]
        if not below:
            return
        level = below
    raise EncodeError(
        f"a message cannot be encoded: it is nested more than {limits.max_send_depth} deep, which the peer accepts"
    )


def is_flat(message: list[object], limits: WireLimits) -> bool:
    """Whether it is a few plain values and a map of such at its end, in a list perhaps: nearly all messages are.

    Those can be sent; `check_sendable` looks at the others.
    """
    body = message[-1]
    if type(body) is list and len(body) == 1:
        body = body[0]
    if type(body) is not dict or len(message) + 2 * len(body) + FLAT_VALUES > limits.max_send_values:
        return False
    if limits.max_send_depth < FLAT_DEPTH:
        return False
    return is_flat_map(body) and _SCALARS.issuperset(map(type, message[:-1]))


def is_flat_map(body: dict[Any, Any]) -> bool:
    """Whether a map has text as keys and plain values, of which a few may be short lists of plain values."""
    if not _TEXT.issuperset(map(type, body)):
        return False
    if _SCALARS.issuperset(map(type, body.values())):
        return True
    lists = 0
    for value in body.values():
        if type(value) is list:
            lists += 1
            if len(value) > _SHORT or not _SCALARS.issuperset(map(type, value)):
                return False
        elif type(value) not in _SCALARS:
            return False
    return lists <= _SHORT


__all__ = ["FLAT_DEPTH", "FLAT_VALUES", "check_sendable", "is_flat", "is_flat_map"]
