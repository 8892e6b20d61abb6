"""Around every route: a request id, the Host header, the API key, the media type, errors, one log line, metrics.

May import starlette and siblings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvd.gateway.answers import new_id
from kvd.gateway.auth import check_host, check_key
from kvd.gateway.errors import ApiError, ClientGone, Dialect
from kvd.gateway.metrics import Metrics
from kvd.gateway.record import Record
from kvd.gateway.settings import GatewaySettings
from kvd.gateway.turns import BUG

UNGUARDED = ("/health",)
"""Paths that need no API key: they tell nothing but whether requests are served."""
DRAIN_S = 2.0
"""How long the rest of a refused body may take."""
STATUS_GONE = 499
"""In log and metrics: the client left before anything was sent (nginx's number)."""


class Log(Protocol):
    """The part of a logger that is used here."""

    def info(self, event: str, **facts: object) -> object:
        """What went well."""

    def warning(self, event: str, **facts: object) -> object:
        """What did not."""

    def exception(self, event: str, **facts: object) -> object:
        """A bug, with its traceback."""


class Around:
    """What holds for every request. Owner: the event loop.

    Args:
        inner: the routes.
        settings: of the gateway.
        log: gets one line a request.
        metrics: counts it.
        clock: monotonic seconds.
    """

    def __init__(
        self, inner: ASGIApp, settings: GatewaySettings, log: Log, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._inner = inner
        self._settings = settings
        self._log = log
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = _headers(scope)
        path = scope["path"]
        record = Record(new_id("req_"), scope["method"], path, self._clock)
        scope.setdefault("state", {})["record"] = record
        scope["app"] = self  # where there is one, the router raises what it refuses
        body = _Body(receive)
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                ids = [(name, record.request_id.encode()) for name in (b"x-request-id", b"request-id")]
                message = {**message, "headers": [*message.get("headers", []), *ids]}
            await send(message)

        self._metrics.begin()
        try:
            await self._served(scope, body.receive, sending, headers, record)
        except (ClientGone, ClientDisconnect):
            record.outcome, record.status = "disconnected", record.status or STATUS_GONE
        except Exception as error:
            fault = _fault_of(error, record.method, path)
            if fault is None:
                self._log.exception("bug", request_id=record.request_id, path=path)
                fault = ApiError("internal", BUG)
            record.failed(fault)
            if not started:
                await body.drain(self._settings.max_body_bytes)
                told = fault.body(dialect_of(path, headers), record.request_id)
                response = JSONResponse(told, status_code=fault.status, headers=fault.headers())
                await response(scope, receive, sending)
        finally:
            self._done(record)

    async def _served(
        self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str], record: Record
    ) -> None:
        settings = self._settings
        check_host(headers.get("host"), settings.allowed_hosts)
        if record.path not in UNGUARDED:
            record.namespace = check_key(settings.keys, headers, settings.namespace)
        if record.method == "POST":
            media = headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json":  # a browser may not send that to a foreign site without asking first
                raise ApiError("media_type", f"content-type must be application/json, not {media[:40]!r}")
            if headers.get("content-encoding", "identity").strip().lower() != "identity":
                raise ApiError(
                    "invalid",
                    "content-encoding must be identity: compressed bodies are not read",
                    details={"error_code": "request_body_encoding_unsupported"},
                )
        await self._inner(scope, receive, send)

    def _done(self, record: Record) -> None:
        self._metrics.end(record)
        told = self._log.info if record.outcome in ("ok", "disconnected") else self._log.warning
        told("request", **record.line())


class _Body:
    """A request's body on its way. Owner: the request.

    An answer that comes while the client still sends is lost when the connection is closed on what was not read: the
    client then sees a reset instead of its 401 or 413. So the rest is read and dropped, within bounds, before an error.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ended = False

    async def receive(self) -> Message:
        """The next message of the connection."""
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._ended = True
        return message

    async def drain(self, most_bytes: int) -> None:
        """Read what is left, so many bytes and so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                read_bytes = 0
                while not self._ended and read_bytes <= most_bytes:
                    read_bytes += len((await self.receive()).get("body", b""))


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Which service a request takes this for: by its path, and where both have it by Anthropic's version header."""
    if path.startswith("/v1/messages") or "anthropic-version" in headers:
        return "anthropic"
    return "openai"


def _headers(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name; of repeated ones the first."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


def _fault_of(error: Exception, method: str, path: str) -> ApiError | None:
    """What a client is told of an exception; None for a bug."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException) and error.status_code == 405:
        return ApiError("method_not_allowed", f"{method} is not allowed for {path[:80]}")
    if isinstance(error, HTTPException):
        return ApiError("not_found", f"there is no {method} {path[:80]} here; docs/gateway.md lists what is")
    return None


__all__ = ["Around", "Log", "dialect_of"]
