"""What a client of the gateway can be told, in the words of the service whose dialect it speaks.

    ApiError     one fault of the table `KINDS`; carries what both dialects show
    ClientGone   the client closed its connection: nobody is left to be told
    GatewayConfigError, CannotListen   told to whoever starts the gateway

Every error of `kvd_client` becomes one `ApiError` (`from_daemon`); messages stay the daemon's own, since those name the
allowed values. May import kvd_client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvd_client import CallTimeout, DaemonUnreachable, KvdClientError, RemoteError

Dialect = Literal["openai", "anthropic"]


@dataclass(frozen=True, slots=True)
class Kind:
    """How both services send one kind of fault.

    Attributes:
        status: the HTTP status.
        openai_type, openai_code: `type` and `code` of OpenAI's error object.
        anthropic_type: `type` of Anthropic's.
    """

    status: int
    openai_type: str
    openai_code: str | None
    anthropic_type: str


_INVALID = "invalid_request_error"

KINDS: Mapping[str, Kind] = {
    "invalid": Kind(400, _INVALID, None, _INVALID),
    "unsupported": Kind(400, _INVALID, "unsupported_parameter", _INVALID),
    "unknown_parameter": Kind(400, _INVALID, "unknown_parameter", _INVALID),
    "context_length": Kind(400, _INVALID, "context_length_exceeded", _INVALID),
    "authentication": Kind(401, _INVALID, "invalid_api_key", "authentication_error"),
    "permission": Kind(403, _INVALID, "forbidden", "permission_error"),
    "not_found": Kind(404, _INVALID, "not_found", "not_found_error"),
    "model_not_found": Kind(404, _INVALID, "model_not_found", "not_found_error"),
    "method_not_allowed": Kind(405, _INVALID, "method_not_allowed", _INVALID),
    "slow": Kind(408, _INVALID, "request_timeout", _INVALID),
    "conflict": Kind(409, "conflict_error", None, "conflict_error"),
    "too_large": Kind(413, _INVALID, "request_too_large", "request_too_large"),
    "media_type": Kind(415, _INVALID, "unsupported_media_type", _INVALID),
    "rate_limit": Kind(429, "requests", "rate_limit_exceeded", "rate_limit_error"),
    "internal": Kind(500, "server_error", "internal_error", "api_error"),
    "unavailable": Kind(503, "server_error", "service_unavailable", "api_error"),
    "timeout": Kind(504, "server_error", "timeout", "timeout_error"),
}
"""Kind of fault -> how it is sent."""

_DAEMON_KINDS: Mapping[str, str] = {
    "invalid_request": "invalid",
    "invalid_params": "invalid",
    "invalid_text": "invalid",
    "method_not_found": "unsupported",
    "unsupported": "unsupported",
    "agent_not_found": "not_found",
    "agent_exists": "conflict",
    "agent_busy": "conflict",
    "not_resumable": "conflict",
    "context_full": "context_length",
    "budget_exceeded": "context_length",
    "cancelled": "unavailable",  # nobody else cancels: the daemon is going down
    "busy": "rate_limit",
    "draining": "unavailable",
    "not_ready": "unavailable",
    "environment": "unavailable",
    "storage_error": "unavailable",
    "model_error": "internal",
    "config_error": "internal",
    "protocol": "internal",
    "slow_reader": "unavailable",
    "internal": "internal",
}
"""Name of the daemon's error -> kind; has every name of the wire's table."""

UNREACHABLE_RETRY_S = 1.0
"""A daemon that is restarted is back within seconds."""


class ApiError(Exception):
    """One fault, told in either dialect.

    Args:
        kind: a name of `KINDS`.
        message: what is wrong and what is allowed, for people.
        param: the field of the request, with its place, such as `messages[2].content`.
        code: instead of the kind's, for OpenAI's `code`.
        retry_after_s: when the same request may succeed.
        details: what Anthropic's SDK looks at, with an `error_code`.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """The HTTP status."""
        return KINDS[self.kind].status

    def body(self, dialect: Dialect, request_id: str) -> dict[str, object]:
        """The JSON body, as the service of that dialect sends it."""
        if dialect == "anthropic":
            return {"type": "error", "error": self.anthropic_error(), "request_id": request_id}
        return {"error": self.openai_error()}

    def openai_error(self) -> dict[str, object]:
        """OpenAI's error object."""
        kind = KINDS[self.kind]
        code = self.code or kind.openai_code
        return {"message": self.message, "type": kind.openai_type, "param": self.param, "code": code}

    def anthropic_error(self) -> dict[str, object]:
        """Anthropic's error object, which has no field for the parameter: the message starts with it."""
        named = self.param is None or self.message.startswith(self.param)
        text = self.message if named else f"{self.param}: {self.message}"
        told: dict[str, object] = {"type": KINDS[self.kind].anthropic_type, "message": text}
        return told if self.details is None else {**told, "details": dict(self.details)}

    def headers(self) -> dict[str, str]:
        """Headers that go with it: `retry-after` in whole seconds, at least one; the end of a slow connection."""
        if self.kind == "slow":
            return {"connection": "close"}
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


class GatewayConfigError(ValueError):
    """A setting is wrong; the message names it and the allowed values.

    Args:
        message: for whoever set it.
        setting: the option's name.
    """

    def __init__(self, message: str, *, setting: str) -> None:
        super().__init__(message)
        self.setting = setting


class CannotListen(Exception):
    """The address is taken, or not one of this machine."""


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def invalid(param: str, message: str) -> ApiError:
    """A field of the request is wrong."""
    return ApiError("invalid", message, param=param)


def from_daemon(error: KvdClientError, names: Mapping[str, str] | None = None) -> ApiError:
    """The fault that an error of the daemon, or of the way to it, is to a client.

    Args:
        error: of `kvd_client`.
        names: the daemon's parameters -> the fields of the dialect they came from, where those differ.
    """
    if isinstance(error, DaemonUnreachable):
        return ApiError("unavailable", error.message, code="daemon_unreachable", retry_after_s=UNREACHABLE_RETRY_S)
    if isinstance(error, CallTimeout):
        return ApiError("timeout", error.message)
    if not isinstance(error, RemoteError):
        return ApiError("internal", error.message)
    parameter = error.data.get("parameter")
    param = (names or {}).get(parameter, parameter) if isinstance(parameter, str) else None
    kind = _DAEMON_KINDS.get(error.name, "internal")
    return ApiError(kind, error.message, param=param, retry_after_s=error.retry_after_s)


__all__ = [
    "KINDS",
    "ApiError",
    "CannotListen",
    "ClientGone",
    "Dialect",
    "GatewayConfigError",
    "Kind",
    "from_daemon",
    "invalid",
]
