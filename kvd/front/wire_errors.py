"""kvd's exceptions as errors of the wire: each `KvdError.name` has one code in `kvd_client.wire.codes`."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.errors import KvdError
from kvd_client.wire import CODES, ErrorObject

_MAX_DEPTH = 8


def to_error_object(error: KvdError) -> ErrorObject:
    """The error a client sees. A name without a code (a bug that a test finds) falls back to the nearest base's."""
    bases = (getattr(base, "name", "") for base in type(error).__mro__)
    name = next((name for name in bases if name in CODES), "internal")
    data = {str(key): plain(value) for key, value in error.data.items()}
    return ErrorObject.of(name, _clean(error.message), data=data, retry_after_s=error.retry_after_s)


def plain(value: object, depth: int = 0) -> object:
    """`value` as msgpack can carry it; what it cannot is shown as text."""
    if value is None or isinstance(value, bool | float | bytes):
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else str(value)
    if isinstance(value, str):
        return _clean(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {_clean(str(key)): plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [plain(item, depth + 1) for item in value]
    return _clean(str(value))


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
