"""The gateway as an ASGI application: routes, and the upkeep of agents.

Routes only translate. May import starlette, kvd_client and siblings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from contextlib import asynccontextmanager, suppress
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from kvd.gateway import anthropic_messages, openai_chat, openai_completions, openai_responses
from kvd.gateway.around import Around, Log, dialect_of
from kvd.gateway.auth import KeyKeeper
from kvd.gateway.backend import Backend, ModelFacts, daemon_client
from kvd.gateway.canonical import Canonical, header_rules
from kvd.gateway.conversations import Conversations, Uses
from kvd.gateway.errors import ApiError, ClientGone, from_daemon
from kvd.gateway.fields import Fields, parse_body
from kvd.gateway.identity import ANONYMOUS_PREFIX, PREFIX
from kvd.gateway.metrics import CONTENT_TYPE, LOOK_S, Metrics
from kvd.gateway.monitor import Monitor
from kvd.gateway.page import Page
from kvd.gateway.responses_stream import ResponseWriter
from kvd.gateway.settings import GatewaySettings
from kvd.gateway.sse import JsonReply
from kvd.gateway.streams import unless_gone
from kvd.gateway.turns import Plan, Turns, Writer
from kvd.gateway.watch import Watch
from kvd_client import AgentInfo, KvdClientError

REAP_EVERY_S = 60.0


Handler = Callable[[Request], Awaitable[Response]]


class Gateway:
    """One gateway: settings, the connection to the daemon, and the application. Owner: the event loop.

    Args:
        settings: validated.
        log: gets one line a request.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        log: Log,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.client = daemon_client(settings.socket)
        self.log = log
        self.clock = clock
        self.conversations = Conversations(ttl_s=settings.anonymous_ttl_s, most=settings.max_anonymous)
        self.groups = Uses(ttl_s=settings.group_ttl_s)
        self.watch = self._watched(settings, log)
        self.page = (
            Page(self.watch, ping_s=settings.ping_s, shared=bool(settings.keys)) if settings.page != "off" else None
        )
        self.metrics = Metrics(self.conversations, lambda: self.watch.viewers)
        self._backend = Backend(self.client, settings.aliases, clock=clock)
        self._turns = Turns(self._backend, self.conversations, self.groups, settings, clock=clock)
        self._keys = KeyKeeper(settings.keys, settings.key_file, log, clock)
        self.app = Around(self._routes(), settings, log, self.metrics, clock, self._keys)

    @staticmethod
    def _watched(settings: GatewaySettings, log: Log) -> Watch:
        """What the page shows. Whoever has a key may see its namespace's prompts; without keys they are everybody's."""
        everything = settings.page == "all"
        monitor = Monitor(show_text=bool(settings.keys) or settings.show_divergence, every_namespace=everything)
        only = None if everything or settings.keys else settings.namespace  # keys of more namespaces may come
        return Watch(lambda: daemon_client(settings.socket), monitor, namespace=only, log=log)

    def stop(self) -> None:
        """End what has no end of its own."""
        if self.page is not None:
            self.page.stop()

    def _routes(self) -> ASGIApp:
        chat = self._turn(openai_chat.plan, openai_chat.ChatWriter.of)
        completions = self._turn(
            lambda fields, *_: openai_completions.plan(fields), openai_completions.CompletionWriter.of
        )
        responses = self._turn(openai_responses.plan, ResponseWriter.of)
        messages = self._turn(
            lambda fields, rules, _: anthropic_messages.plan(fields, rules), anthropic_messages.MessageWriter.of
        )
        handlers: tuple[tuple[str, str, Handler], ...] = (
            ("POST", "/v1/chat/completions", chat),
            ("POST", "/v1/completions", completions),
            ("POST", "/v1/responses", responses),
            ("POST", "/v1/messages", messages),
            ("POST", "/v1/messages/count_tokens", self._count_tokens),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._model),
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
        )
        if self.page is not None:
            handlers += (
                ("GET", "/", self.page.file),
                ("GET", "/static/{name}", self.page.file),
                ("GET", "/monitor", self.page.picture),
                ("GET", "/monitor/stream", self.page.stream),
            )
        routes = [Route(path, _named(path, handler), methods=[method]) for method, path, handler in handlers]
        exact = {(method, path): handler for method, path, handler in handlers if "{" not in path}
        # not `Starlette`, whose own middleware answers every error as 500 before anybody can say it in a dialect
        return _Routes(exact, Router(routes, lifespan=self._lifespan))

    # ---- turns ------------------------------------------------------------------------------------------------------

    def _turn(self, plan: Callable[[Fields, Canonical, int], Plan], writer: Callable[[Fields, str], Writer]) -> Handler:
        """The handler of a dialect's turns."""
        return partial(self._answer, plan, writer)

    async def _answer(
        self,
        plan: Callable[[Fields, Canonical, int], Plan],
        writer: Callable[[Fields, str], Writer],
        request: Request,
    ) -> Response:
        fields = await self._fields(request)
        canonical = Canonical(header_rules(request.headers.get("x-kvd-rules"), self.settings.rules))
        planned = plan(fields, canonical, self.settings.default_max_tokens)
        request.state.record.rules = tuple(sorted(canonical.fired))
        name = fields.text("model")
        facts = self._backend.served_as_known(name)
        if facts is None:
            facts = await unless_gone(request, self._served(name))
        return await self._turns.answer(request, planned, writer(fields, facts.name))

    async def _count_tokens(self, request: Request) -> Response:
        fields = await self._fields(request)
        canonical = Canonical(header_rules(request.headers.get("x-kvd-rules"), self.settings.rules))
        parameters = anthropic_messages.counted(fields, canonical)
        await unless_gone(request, self._served(fields.text("model")))
        try:
            result = await unless_gone(request, self.client.call("tokenize", parameters))
        except KvdClientError as error:
            raise from_daemon(error) from error
        return JsonReply({"input_tokens": result["count"]})

    async def _served(self, name: str | None) -> ModelFacts:
        """The loaded model, if that is what a request means by a name."""
        try:
            return await (self._backend.model() if name is None else self._backend.served(name))
        except KvdClientError as error:
            raise from_daemon(error) from error

    async def _fields(self, request: Request) -> Fields:
        """The request's body, bounded.

        Raises:
            ApiError: too large, or no JSON object.
        """
        limit = self.settings.max_body_bytes
        too_large = ApiError("too_large", f"the request's body may have {limit} bytes (kvd gateway --max-body)")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise too_large
        pieces, data_bytes = list[bytes](), 0
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            pieces.append(message.get("body", b""))
            data_bytes += len(pieces[-1])
            if data_bytes > limit:
                raise too_large
            if not message.get("more_body", False):
                return parse_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    # ---- the model and the service ----------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        entry = await self._model_entry(request)
        if dialect_of(request.url.path, request.headers) == "anthropic":
            return JsonReply({"data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]})
        return JsonReply({"object": "list", "data": [entry]})

    async def _model(self, request: Request) -> Response:
        return JsonReply(await self._model_entry(request, request.path_params["name"]))

    async def _model_entry(self, request: Request, name: str | None = None) -> dict[str, object]:
        facts = await unless_gone(request, self._served(name))
        if dialect_of(request.url.path, request.headers) == "anthropic":
            return {
                "type": "model",
                "id": facts.name,
                "display_name": facts.name,
                "created_at": "1970-01-01T00:00:00Z",
                "lifecycle": "active",
                "max_input_tokens": facts.context_tokens,
                "max_tokens": facts.context_tokens,
            }
        return {
            "id": facts.name,
            "object": "model",
            "created": 0,
            "owned_by": "kvd",
            "context_length": facts.context_tokens,
        }

    async def _health(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(LOOK_S):
                health = await self.client.health()
        except TimeoutError:
            body = {"status": "daemon does not answer"}
        except KvdClientError as error:
            body = {"status": "daemon unreachable", "message": error.message}
        else:
            if health.ready:
                return JsonReply({"status": "ok"})
            body = {"status": health.status}
        request.state.record.outcome = "unavailable"
        return JsonReply(body, status_code=503)

    async def _metrics(self, request: Request) -> Response:
        self.app.tell()
        return Response(await self.metrics.scrape(self.client), media_type=CONTENT_TYPE)

    # ---- agents whose time is over ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        reaper = asyncio.create_task(self._reap_for_ever())
        try:
            yield
        finally:
            reaper.cancel()
            try:
                await asyncio.gather(reaper, return_exceptions=True)
                await self.settled()
                await self.watch.close()
                await self.client.close()
            finally:  # what was answered is told, whatever failed
                self.app.close()

    async def _reap_for_ever(self) -> None:
        adopted: frozenset[str] = frozenset()
        while True:
            with suppress(KvdClientError):  # a daemon that is away now is asked again later
                if new := self._namespaces() - adopted:  # at first all, then those of keys that have come
                    await self.adopt(new)
                    adopted |= new
                await self.reap()
            await asyncio.sleep(REAP_EVERY_S)

    async def settled(self) -> None:
        """Wait for what is done behind answers that were given."""
        await self._turns.close()

    def _namespaces(self) -> frozenset[str]:
        """Whose agents are this gateway's, by the keys in force now."""
        return self._keys.ring.namespaces() or frozenset({self.settings.namespace})

    async def adopt(self, namespaces: Set[str] | None = None) -> None:
        """Take over the agents of an earlier run, unused as long as the daemon says; now where it does not say.

        The daemon tells a difference of its own clock: wall clocks of two processes differ by what was set in between.

        Args:
            namespaces: whose; None: all of this gateway.
        """
        now_s = self.clock()
        namespaces = self._namespaces() if namespaces is None else namespaces
        ages: list[tuple[float, AgentInfo]] = []
        for agent in await self.client.agents():
            if agent.namespace in namespaces and agent.agent.startswith(PREFIX):
                idle_s = agent.server.get("idle_s")
                ages.append((idle_s if isinstance(idle_s, int | float) else 0.0, agent))
        for age_s, agent in sorted(ages, key=lambda each: -each[0]):
            held = self.conversations if agent.agent.startswith(ANONYMOUS_PREFIX) else self.groups
            held.adopt(agent.namespace, agent.agent, now_s - age_s)

    async def reap(self) -> None:
        """Delete the agents whose time is over; those that the daemon does not delete now are tried again."""
        for held in (self.conversations, self.groups):
            for namespace, agent in held.due(self.clock()):
                if await self._backend.deleted(namespace, agent):
                    held.forget(namespace, agent)


class _Routes:
    """Paths without variable parts, which are looked up, before a router, which tries one pattern after the other.

    Args:
        exact: by method and path.
        router: for everything else.
    """

    def __init__(self, exact: Mapping[tuple[str, str], Handler], router: ASGIApp) -> None:
        self._exact = exact
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        handler = self._exact.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._router(scope, receive, send)
            return
        scope["state"]["record"].endpoint = scope["path"]
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)


def _named(path: str, handler: Handler) -> Handler:
    """A handler that tells the record which route it is."""

    async def named(request: Request) -> Response:
        request.state.record.endpoint = path
        return await handler(request)

    return named


__all__ = ["Gateway"]
