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


def check_sendable(message: list[object], limits: WireLimits) -> None:
    """Look at a message that msgpack could encode.

    Raises:
        EncodeError: the peer takes none that is nested so deep, has so many values, or keys that are no text.
    """
    if _is_flat(message, limits):
        return
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


def _is_flat(message: list[object], limits: WireLimits) -> bool:
    """Whether it is a few plain values and a map of such at its end, in a list perhaps: nearly all messages are."""
    body = message[-1]
    if type(body) is list and len(body) == 1:
        body = body[0]
    if type(body) is not dict or 2 * len(body) + len(message) >= limits.max_send_values - 1:
        return False
    if limits.max_send_depth < 3:
        return False
    if not _TEXT.issuperset(map(type, body)) or not _SCALARS.issuperset(map(type, body.values())):
        return False
    return _SCALARS.issuperset(map(type, message[:-1]))


__all__ = ["check_sendable"]
