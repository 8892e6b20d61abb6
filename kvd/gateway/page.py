"""The page at `/`: its files, the picture it shows as JSON, and what changes in it as server-sent events.

The files are served from memory, by the names that are there, so no path is ever made of what a request says. They
hold nothing of anybody and need no key; what they ask for does. A content security policy lets the page load and talk
to nothing but this gateway, run no script but its files, and be framed by nobody; with `require-trusted-types-for`
no text can become markup, whatever prompts hold. May import starlette, kvd_client and siblings.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from kvd.gateway.errors import ApiError
from kvd.gateway.monitor import Monitor
from kvd.gateway.sse import COMMENT_PING
from kvd.gateway.streams import EventStream
from kvd.gateway.watch import MAX_VIEWERS, Watch

MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'"
)
SECURE = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
MOST_PING_S = 15.0
"""The page takes a stream that was silent for 40 s for dead."""
SHORTEST_GAP_S = 0.25
"""A viewer gets at most so many pictures a second as fit: eyes need no more."""
FOREIGN = frozenset({"cross-site", "same-site"})
"""Values of `Sec-Fetch-Site` of pages that are not ours: they could not read an answer, but hold a viewer's place."""


class Page:
    """Owner: the event loop.

    Args:
        watch: what is shown.
        ping_s: a stream that has nothing to say says so this often, `MOST_PING_S` at most.
        shared: viewers have keys, so that those of one namespace may not take all places.
    """

    def __init__(self, watch: Watch, *, ping_s: float, shared: bool) -> None:
        self._watch = watch
        self._shared = shared
        self._held: Counter[str] = Counter()
        """Viewers of each namespace."""
        self._ping_s = min(ping_s, MOST_PING_S)
        self._run = secrets.token_hex(8)
        """In the ids of events: versions of another gateway mean nothing here."""
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End all streams: they have no end of their own, and would hold up the gateway's."""
        self._stopping.set()

    def go_on(self) -> None:
        """Serve streams again."""
        self._stopping.clear()

    async def file(self, request: Request) -> Response:
        """One of the page's files; `/` is `index.html`."""
        name = request.path_params.get("name", "index.html")
        found = static_files().get(name)
        if found is None:
            raise ApiError("not_found", f"there is no {name[:80]!r} among the page's files")
        data, headers = found
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers)

    async def picture(self, request: Request) -> Response:
        """Everything that the page shows, as JSON."""
        _refuse_foreign(request)
        leave = self._enter(request.state.record.namespace)
        try:
            await self._watch.fresh()
            body = self._watch.monitor.since(None, request.state.record.namespace)
        finally:
            leave()
        return Response(body, media_type="application/json", headers=SECURE | {"cache-control": "no-store"})

    async def stream(self, request: Request) -> Response:
        """The picture, then what changes in it, as events."""
        _refuse_foreign(request)
        if request.method == "HEAD":  # would be silent for ever
            return Response(media_type=EventStream.media_type, headers=SECURE)
        namespace, may_stay = request.state.record.namespace, request.state.may_stay
        leave = self._enter(namespace)
        source = self._events(namespace, self._seen(request), may_stay)
        return EventStream(source, SECURE, leave, over=lambda: self._until_over(may_stay))

    def _enter(self, namespace: str) -> Callable[[], None]:
        """Take a viewer's place; returns what gives it back.

        Where there are keys a namespace gets no more places than it leaves free: one alone has half of them, the next
        one half of the rest, and so on.

        Raises:
            ApiError: too many look, of this namespace or altogether.
        """
        held = self._held[namespace]
        if self._shared and held and held >= MAX_VIEWERS - self._watch.viewers:
            raise ApiError(
                "rate_limit",
                f"{held} of {MAX_VIEWERS} viewers of the page are of your key's namespace, the others' places are "
                "kept for other keys; come back later",
                retry_after_s=10.0,
            )
        self._watch.enter()
        self._held[namespace] += 1

        def leave() -> None:
            self._held[namespace] -= 1
            self._held += Counter()  # names that nobody uses any more are forgotten
            self._watch.leave()

        return leave

    async def _until_over(self, may_stay: Callable[[], bool]) -> None:
        """Return when a stream is to end: also one whose viewer does not read, so that it cannot be told."""
        while not self._stopping.is_set() and may_stay():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ping_s):
                    await self._stopping.wait()

    def _seen(self, request: Request) -> int | None:
        """The version that a viewer which comes back has; None when it is to begin anew."""
        run, _, version = request.headers.get("last-event-id", "").partition("-")
        known = run == self._run and version.isascii() and version.isdecimal() and len(version) < 16
        return int(version) if known else None

    async def _events(
        self, namespace: str, seen: int | None, may_stay: Callable[[], bool]
    ) -> AsyncGenerator[bytes, None]:
        monitor = self._watch.monitor
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            yield COMMENT_PING  # the headers go out at once, whatever the daemon does
            await self._watch.fresh()
            while not stopping.done() and may_stay():
                version = monitor.version
                if seen is None or version != seen:
                    data = monitor.since(seen, namespace)
                    yield b"id: %s-%d\nevent: picture\ndata: %s\n\n" % (self._run.encode(), version, data)
                    seen = version
                    await asyncio.wait({stopping}, timeout=SHORTEST_GAP_S)
                elif not await self._something(monitor, seen, stopping):
                    yield COMMENT_PING
        finally:
            stopping.cancel()

    async def _something(self, monitor: Monitor, seen: int, stopping: asyncio.Task[Literal[True]]) -> bool:
        """Wait for a newer version or the end; False when neither came for too long."""
        moved = asyncio.ensure_future(monitor.moved(seen))
        try:
            waited: set[asyncio.Future[Any]] = {stopping, moved}
            done, _ = await asyncio.wait(waited, timeout=self._ping_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
        return bool(done)


def _refuse_foreign(request: Request) -> None:
    """Refuse what another site's page asks for.

    Raises:
        ApiError: the browser says so.
    """
    if request.headers.get("sec-fetch-site") in FOREIGN:
        raise ApiError("permission", "pages of other sites may not look at this one's", code="foreign_site")


@cache
def static_files() -> Mapping[str, tuple[bytes, Mapping[str, str]]]:
    """The page's files by name: their bytes and headers."""
    found = {}
    for file in (files(__package__) / "static").iterdir():
        media = MEDIA.get("." + file.name.rpartition(".")[2])
        if media is None:
            continue
        data = file.read_bytes()
        etag = f'"{sha256(data).hexdigest()[:32]}"'
        headers = SECURE | {"content-type": f"{media}; charset=utf-8", "cache-control": "no-cache", "etag": etag}
        found[file.name] = (data, headers)
    return found


__all__ = ["POLICY", "Page", "static_files"]
