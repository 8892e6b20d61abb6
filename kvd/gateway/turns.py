"""One request's turn in the daemon, whatever the dialect: who it belongs to, its stream, its end, a client that leaves.

Theory of operation. A dialect makes a `Plan` of a request. `Turns.start` finds the agent (for anonymous requests: forks
one) and sends the call. Then either `whole` waits for the answer, or `EventStream` sends what the dialect's writer
makes of each event. Headers of a stream go out when the daemon has matched the prompt: what it refuses before that is
an HTTP status, not an error inside a stream. A stream that has written nothing for a while pings, however much the
daemon says that its client is not told.

A client that closes its connection ends its call at once, in both forms: the daemon stops at its next step and keeps
what it computed. May import kvd_client, starlette and siblings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from starlette.requests import Request
from starlette.responses import Response

from kvd.gateway.answers import Answer, answer_of, new_id
from kvd.gateway.backend import Backend
from kvd.gateway.conversations import Conversations, Found, Point, Uses, chain_of
from kvd.gateway.errors import ApiError, from_daemon
from kvd.gateway.identity import ANONYMOUS_PREFIX, PREFIX, identify
from kvd.gateway.record import Record
from kvd.gateway.settings import GatewaySettings
from kvd.gateway.sse import JsonReply
from kvd.gateway.streams import END, Attended, EventStream, Paced
from kvd_client import AsyncGenerateStream, KvdClientError, RemoteError
from kvd_client.errors import AgentNotFound
from kvd_client.stream import FirstToken, Matched, Queued, StreamEvent

BUG = "a bug of the gateway; its log has the details"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a dialect made of a request.

    Attributes:
        method: the daemon's.
        messages: the conversation, canonical; None for `generate`.
        text: the whole text, for `generate`.
        options: the daemon's parameters.
        body: the request as it came, for the identity.
        stream: whether the client wants events.
        names: the daemon's parameters -> the dialect's fields, where they differ.
    """

    method: Literal["chat", "generate"]
    options: Mapping[str, Any]
    body: Mapping[str, Any]
    stream: bool
    messages: Sequence[Mapping[str, Any]] | None = None
    text: str = ""
    names: Mapping[str, str] = field(default_factory=dict)


class Writer(Protocol):
    """A dialect's way to say a turn, for one request. Each method returns the bytes of zero or more SSE events."""

    def begin(self, matched: Matched | None) -> bytes:
        """Before anything else; `matched` is None where the daemon has not said yet."""

    def event(self, event: StreamEvent) -> bytes:
        """Something happened."""

    def end(self, answer: Answer) -> bytes:
        """The turn is over."""

    def error(self, error: ApiError) -> bytes:
        """It failed after it had begun."""

    def ping(self) -> bytes:
        """Nothing happened for a while."""

    def whole(self, answer: Answer) -> Mapping[str, Any]:
        """The whole answer, for clients that want no stream."""


class Turns:
    """Owner: the event loop.

    Args:
        backend: the daemon.
        conversations: anonymous ones.
        groups: of all others that the gateway named.
        settings: of the gateway.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        backend: Backend,
        conversations: Conversations,
        groups: Uses,
        settings: GatewaySettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._conversations = conversations
        self._groups = groups
        self._settings = settings
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, request: Request, plan: Plan, writer: Writer) -> Response:
        """Run a turn and answer the request, as a whole or as a stream.

        Raises:
            ApiError: the daemon refused before anything was sent.
            ClientGone: the client did not wait.
        """
        record: Record = request.state.record
        record.stream = plan.stream
        with Attended(request.receive):
            try:
                running = await self._begun(request, plan, record)
            except KvdClientError as error:
                raise from_daemon(error, plan.names) from error
            try:
                if plan.stream:
                    return await self._stream(running, writer, record)
                answer = await running.answer()
            except BaseException:
                running.close()
                raise
        return JsonReply(dict(writer.whole(answer)), headers=running.headers())

    async def _begun(self, request: Request, plan: Plan, record: Record) -> Running:
        identity = identify(request.headers, plan.body, plan.messages)
        record.identity, namespace, agent = identity.source, record.namespace, identity.agent
        ended: Callable[[Answer | None], None] = _nothing
        ttl_s: float | None = None
        record.show_divergence = self._settings.show_divergence
        if agent is None:
            agent = new_id(ANONYMOUS_PREFIX)
            # known before it is made: whatever becomes of this request, it has an end
            self._conversations.note(namespace, agent, (), self._clock())
            ended, ttl_s = await self._anonymous(namespace, agent, plan), self._settings.anonymous_ttl_s
        elif agent.startswith(PREFIX):
            self._groups.use(namespace, agent, self._clock())
            ttl_s = self._settings.group_ttl_s
        record.agent = agent
        # the daemon ends the agent when this process can do so no more
        client, options = self._backend.client, {**plan.options, "stream": plan.stream, "ttl_s": ttl_s}
        if plan.messages is None:
            stream = client.generate_stream(agent, plan.text, namespace=namespace, **options)
        else:
            stream = client.chat_stream(agent, plan.messages, namespace=namespace, **options)
        return Running(stream, plan, record, ended)

    async def _anonymous(self, namespace: str, agent: str, plan: Plan) -> Callable[[Answer | None], None]:
        """Make ready a turn of a request that names nobody; returns what is to be done at its end."""
        messages, tools = plan.messages, plan.options.get("tools")
        chain = [] if messages is None else chain_of(messages, tools)
        source: Found | None = None
        if chain and (await self._backend.model()).shares:
            source = await self._fork(namespace, agent, chain)

        def ended(answer: Answer | None) -> None:
            # after a failure it is known that there is an agent, not what it holds
            points: list[Point] = []
            if messages is not None and answer is not None:
                result = answer.result
                if source is not None:
                    # of a prompt that went on from the fork all are reached, though its last token's KV came only now
                    all_reached = result.match in ("extend", "exact")
                    points += [each for each in source.points if all_reached or each.tokens <= result.cached_tokens]
                points.append(Point(chain[-1], result.prompt_tokens))
                whole = chain_of([*messages, answer.message], tools)[-1]
                points.append(Point(whole, result.prompt_tokens + result.completion_tokens))
            self._conversations.note(namespace, agent, points, self._clock())
            if source is not None and self._conversations.is_superseded(namespace, source.agent, points):
                self._conversations.retire(namespace, source.agent)
                self._later(self._delete(namespace, source.agent))

        return ended

    async def _fork(self, namespace: str, agent: str, chain: Sequence[bytes]) -> Found | None:
        """Start an anonymous agent from the one that holds most of its conversation, if there is any."""
        source = self._conversations.best(namespace, chain, self._clock())
        if source is None:
            return None
        try:
            await self._backend.client.fork(
                source.agent, agent, source.tokens, ttl_s=self._settings.anonymous_ttl_s, namespace=namespace
            )
        except AgentNotFound:  # it was deleted: the turn starts from what the namespace shares
            self._conversations.forget(namespace, source.agent)
            return None
        except RemoteError:  # busy, or its pages are lost; it is still there, and still has an end
            return None
        return source

    async def _delete(self, namespace: str, agent: str) -> None:
        with suppress(KvdClientError):  # what is not deleted now stays due
            if await self._backend.deleted(namespace, agent):
                self._conversations.forget(namespace, agent)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what is done behind the answers."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stream(self, running: Running, writer: Writer, record: Record) -> Response:
        events = Paced(running.events(), running, self._settings.ping_s)
        try:
            first = await _prelude(events)
        except BaseException:
            await events.aclose()
            raise
        source = _written(running, events, writer, first, record)
        return EventStream(source, running.headers(), running.close)


def _nothing(answer: Answer | None) -> None:
    """A named agent stays as it is."""


class Running:
    """One call in flight. Owner: its request.

    Args:
        stream: of the client.
        plan: what was asked.
        record: of the request; gets the figures.
        ended: called once, with the answer, or with None if there was none.
    """

    def __init__(
        self, stream: AsyncGenerateStream, plan: Plan, record: Record, ended: Callable[[Answer | None], None]
    ) -> None:
        self._call = stream
        self._plan = plan
        self._record = record
        self._ended: Callable[[Answer | None], None] | None = ended
        self.matched: Matched | None = None

    async def answer(self) -> Answer:
        """Wait for the end; events that were not taken are dropped.

        Raises:
            ApiError: the daemon refused or failed.
        """
        try:
            async with aclosing(self.events()) as events:
                async for _ in events:
                    pass
            answer = answer_of(await self._call.result())
        except KvdClientError as error:
            raise from_daemon(error, self._plan.names) from error
        self._record.finish(answer.result)
        self._end(answer)
        return answer

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """The daemon's events; leaving early cancels the call.

        Raises:
            ApiError: the daemon refused or failed.
        """
        try:
            async for event in self._call:
                if isinstance(event, Matched):
                    self.matched = event
                elif isinstance(event, FirstToken):
                    self._record.first_token()
                yield event
        except KvdClientError as error:
            raise from_daemon(error, self._plan.names) from error
        finally:
            self._call.close()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until `events` has more, its end included; False when nothing came in so long.

        Raises:
            ApiError: there is no daemon to ask.
        """
        try:
            return await self._call.wait(timeout_s)
        except KvdClientError as error:
            raise from_daemon(error, self._plan.names) from error

    @property
    def has_event(self) -> bool:
        """Whether the next event is there already."""
        return self._call.has_event

    def close(self) -> None:
        """It is over: cancels the call unless it is done. Safe to call twice."""
        self._call.close()
        self._end(None)

    def headers(self) -> dict[str, str]:
        """What kvd says besides the body."""
        return self._record.headers(self.matched)

    def _end(self, answer: Answer | None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            if answer is None and self._record.outcome == "ok":
                self._record.outcome = "disconnected"
            ended(answer)


async def _prelude(events: Paced[StreamEvent]) -> StreamEvent | None:
    """The first event that says the turn has begun; None where that takes so long that the client must hear of it."""
    while isinstance(event := await events.next(), Queued):
        pass
    return None if event is END else event


async def _written(
    running: Running,
    events: Paced[StreamEvent],
    writer: Writer,
    first: StreamEvent | None,
    record: Record,
) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream, from its beginning to its end or its error."""
    try:
        async with aclosing(events):
            # what is there already goes out together: a write costs more than what it says
            said = writer.begin(running.matched)
            yield said if first is None else said + writer.event(first)
            events.spoke()
            while (event := await events.next()) is not END:
                said = writer.ping() if event is None else writer.event(event)
                while (event := await events.ready()) is not None:
                    said += writer.event(event)
                if said:
                    yield said
                    events.spoke()
            yield writer.end(await running.answer())
    except ApiError as error:
        record.failed(error)
        yield writer.error(error)
    except Exception:
        yield writer.error(ApiError("internal", BUG))
        raise
    finally:
        running.close()


__all__ = ["BUG", "Plan", "Running", "Turns", "Writer"]
