"""The table of wire errors: one stable name, one integer code, in both directions.

Hundreds tell the fault: 1xx the request, 2xx the machine (may heal), 3xx the connection, 4xx a bug of the daemon.
Codes are never reused; a client that meets an unknown one shows its name and message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

CODES: Mapping[str, int] = MappingProxyType(
    {
        "invalid_request": 100,
        "invalid_params": 101,
        "invalid_text": 102,
        "method_not_found": 103,
        "unsupported": 104,
        "agent_not_found": 110,
        "agent_exists": 111,
        "agent_busy": 112,
        "not_resumable": 113,
        "context_full": 120,
        "budget_exceeded": 121,
        "cancelled": 190,
        "busy": 200,
        "draining": 201,
        "not_ready": 202,
        "environment": 210,
        "storage_error": 211,
        "model_error": 212,
        "config_error": 213,
        "protocol": 300,
        "slow_reader": 301,
        "internal": 400,
    }
)
"""Error name -> code."""

NAMES: Mapping[int, str] = MappingProxyType({code: name for name, code in CODES.items()})
"""Code -> error name."""


@dataclass(frozen=True, slots=True)
class ErrorObject:
    """An error as it travels: `{code, name, message, data, retry_after_s}`.

    Attributes:
        code: integer of `CODES`; whatever the peer sent when its name is newer than this table.
        name: stable word for programs.
        message: one or two sentences for people.
        data: plain facts for programs.
        retry_after_s: seconds after which the same call may succeed; None when waiting does not help.
    """

    code: int
    name: str
    message: str
    data: Mapping[str, object] = field(default_factory=dict)
    retry_after_s: float | None = None

    @classmethod
    def of(
        cls, name: str, message: str, *, data: Mapping[str, object] | None = None, retry_after_s: float | None = None
    ) -> ErrorObject:
        """Build the error called `name`.

        Raises:
            KeyError: the table has no such name.
        """
        return cls(CODES[name], name, message, dict(data or {}), retry_after_s)

    def to_wire(self) -> dict[str, object]:
        """The map that is sent."""
        return {
            "code": self.code,
            "name": self.name,
            "message": self.message,
            "data": dict(self.data),
            "retry_after_s": self.retry_after_s,
        }

    @classmethod
    def from_wire(cls, value: object) -> ErrorObject:
        """Read what a peer sent; anything unexpected becomes an `internal` error that shows it, never an exception."""
        if not isinstance(value, dict):
            return cls(CODES["internal"], "internal", str(value)[:1000])
        name, code, message = value.get("name"), value.get("code"), value.get("message")
        if type(code) is not int:
            code = CODES.get(name, CODES["internal"]) if isinstance(name, str) else CODES["internal"]
        if not isinstance(name, str):
            name = NAMES.get(code, "internal")
        data, retry = value.get("data"), value.get("retry_after_s")
        return cls(
            code,
            name,
            message if isinstance(message, str) else name,
            data if isinstance(data, dict) else {},
            float(retry) if isinstance(retry, int | float) and not isinstance(retry, bool) else None,
        )
