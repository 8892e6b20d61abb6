"""Around every route: a request id, the Host header, the API key, the media type, errors, one log line, metrics.

May import starlette and siblings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvd.gateway.answers import new_id
from kvd.gateway.auth import KeyKeeper, check_host, check_key
from kvd.gateway.bodies import Bodies, Body
from kvd.gateway.errors import ApiError, ClientGone, Dialect
from kvd.gateway.metrics import Metrics
from kvd.gateway.record import Record
from kvd.gateway.settings import GatewaySettings
from kvd.gateway.sse import JsonReply
from kvd.gateway.turns import BUG

UNGUARDED = ("/", "/health")
"""Paths that need no API key: they tell nothing but whether requests are served, and the page's empty frame."""
UNGUARDED_FOLDER = "/static/"
TELL_EVERY_S = 0.25
"""How long the line of a request that is over waits for others. Written at once it would hold up the client's next
request, which may follow on the answer, by more than reading that request costs."""
MOST_UNTOLD = 64
"""Lines that are written together: under a flood of requests more would hold up everybody's streams noticeably."""
STATUS_GONE = 499
"""In log and metrics: the client left before anything was sent (nginx's number)."""
STATUS_STOPPED = 503
"""In log and metrics: the gateway stopped before anything was sent."""


class Log(Protocol):
    """The part of a logger that is used here."""

    def info(self, event: str, **facts: object) -> object:
        """What went well."""

    def warning(self, event: str, **facts: object) -> object:
        """What did not."""

    def error(self, event: str, **facts: object) -> object:
        """What somebody has to see to."""

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
        keys: who may come in.
    """

    def __init__(
        self,
        inner: ASGIApp,
        settings: GatewaySettings,
        log: Log,
        metrics: Metrics,
        clock: Callable[[], float],
        keys: KeyKeeper,
    ) -> None:
        self._inner = inner
        self._settings = settings
        self._keys = keys
        self._log = log
        self._metrics = metrics
        self._clock = clock
        self._bodies = Bodies(settings.max_held_bytes)
        self._ended: list[tuple[Record, float]] = []
        self._telling: asyncio.TimerHandle | None = None
        self._is_closed = False

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
        body = Body(receive, self._bodies, self._settings.body_s)
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
        except asyncio.CancelledError:  # the gateway stops
            record.outcome, record.status = "cancelled", record.status or STATUS_STOPPED
            raise
        except Exception as error:
            fault = _fault_of(error, record.method, path)
            if fault is None:
                self._log.exception("bug", request_id=record.request_id, path=path)
                fault = ApiError("internal", BUG)
            record.failed(fault)
            if not started:
                await body.drain(self._settings.max_body_bytes)
                told = fault.body(dialect_of(path, headers), record.request_id)
                # whoever sends a body without an end must not keep its connection by it
                leave = {"connection": "close"} if body.has_rest else {}
                head = {**fault.headers(), **_allowed_by(error), **leave}
                response = JsonReply(told, status_code=fault.status, headers=head)
                await response(scope, receive, sending)
        finally:
            body.close()
            self._done(record)

    async def _served(
        self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str], record: Record
    ) -> None:
        settings = self._settings
        check_host(headers.get("host"), settings.allowed_hosts)
        if record.path not in UNGUARDED and not record.path.startswith(UNGUARDED_FOLDER):
            namespace = record.namespace = check_key(self._keys.ring, headers, settings.namespace)
            scope["state"]["may_stay"] = lambda: self._may_stay(headers, namespace)
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

    def _may_stay(self, headers: Mapping[str, str], namespace: str) -> bool:
        """Whether the key that let a request in still does: what has no end by itself asks from time to time."""
        try:
            return check_key(self._keys.ring, headers, self._settings.namespace) == namespace
        except ApiError:
            return False

    def _done(self, record: Record) -> None:
        record.over()
        self._metrics.over()
        self._ended.append((record, time.time()))
        if self._is_closed or len(self._ended) >= MOST_UNTOLD:
            self.tell()
        elif self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_EVERY_S, self.tell)

    def tell(self) -> None:
        """Count and log the requests that are over and were not told yet: whoever asks for figures gets them all."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        ended, self._ended = self._ended, []
        for record, at_s in ended:
            try:
                self._tell_one(record, at_s)
            except Exception:  # costs no line of the others, and no scrape its answer
                with suppress(Exception):
                    self._log.exception("bug", request_id=record.request_id, path=record.path)

    def _tell_one(self, record: Record, at_s: float) -> None:
        self._metrics.end(record)
        if record.path.startswith(UNGUARDED_FOLDER) and record.outcome == "ok":
            return  # the page's ten files are one look at it, which the line of its stream tells
        told = self._log.info if record.outcome in ("ok", "disconnected") else self._log.warning
        told("request", at_s=at_s, **record.line())

    def close(self) -> None:
        """Tell what is left; whatever ends from now on is told at once."""
        self._is_closed = True
        self.tell()


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


def _allowed_by(error: Exception) -> Mapping[str, str]:
    """The header that says which methods a path has, of the router's refusal of one."""
    return error.headers or {} if isinstance(error, HTTPException) and error.status_code == 405 else {}


def _fault_of(error: Exception, method: str, path: str) -> ApiError | None:
    """What a client is told of an exception; None for a bug."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = _allowed_by(error).get("Allow", "another method")
        return ApiError("method_not_allowed", f"{method} is not allowed for {path[:80]}; {allowed} is")
    if isinstance(error, HTTPException):
        return ApiError("not_found", f"there is no {method} {path[:80]} here; docs/gateway.md lists what is")
    return None


__all__ = ["Around", "Log", "dialect_of"]
