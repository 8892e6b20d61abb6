"""kvd's exceptions as errors of the wire.

The wire has few names, which clients handle, each with one code (`kvd_client.wire.codes`). Packages of kvd name their
faults more finely; such a name belongs to one family of the wire and travels in `data` as `fault`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvd.errors import KvdError
from kvd_client.wire import CODES, ErrorObject

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "agent_file_foreign": "unsupported",
        "agent_file_invalid": "invalid_request",
        "agent_file_too_new": "unsupported",
        "backend_unavailable": "config_error",
        "conditioning_damaged": "storage_error",
        "data_folder_locked": "storage_error",
        "data_folder_exposed": "storage_error",
        "data_folder_malformed": "storage_error",
        "data_folder_too_new": "storage_error",
        "digest_mismatch": "model_error",
        "disk": "storage_error",
        "download_failed": "model_error",
        "file": "environment",
        "file_refused": "invalid_request",
        "log_corrupt": "storage_error",
        "log_unreadable": "storage_error",
        "log_damaged": "storage_error",
        "log_vanished": "storage_error",
        "memory_pressure": "busy",
        "model_corrupt": "model_error",
        "model_not_found": "model_error",
        "not_deleted": "storage_error",
        "page_corrupt": "storage_error",
        "page_dropped": "storage_error",
        "page_missing": "storage_error",
        "quota_exceeded": "storage_error",
        "template_refused": "invalid_params",
        "swap_off": "unsupported",
        "unsupported_model": "unsupported",
    }
)
"""Fine name -> name on the wire. Bugs (`InternalError`) need no line: all of them are `internal`."""

_MAX_DEPTH = 8


def wire_name(kind: type[KvdError]) -> str:
    """The name on the wire of an error class: its own, its family's, or else that of its nearest base."""
    for base in kind.__mro__:
        name = getattr(base, "name", "")
        if name in CODES:
            return str(name)
        if name in FAMILIES:
            return FAMILIES[name]
    return "internal"


def to_error_object(error: KvdError) -> ErrorObject:
    """The error a client sees."""
    name = wire_name(type(error))
    data = {str(key): plain(value) for key, value in error.data.items()}
    if error.name != name:
        data.setdefault("fault", error.name)
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
