"""The asyncio client: the same methods as `Client`, awaited.

Long because each method of the protocol has one here, with its types, next to the stream that two of them return.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar, Unpack

from kvd_client import calls
from kvd_client.async_subscription import AsyncSubscription
from kvd_client.async_transport import AsyncTransport, connect
from kvd_client.calls import Call, ChatOptions, InjectOptions, Options, Progress
from kvd_client.errors import CLOSED_HERE, Cancelled, KvdClientError, connection_lost
from kvd_client.paths import resolve_socket, start_command
from kvd_client.results import AgentInfo, ExportResult, GenerateResult, Health, InjectResult, Limits, Statistics
from kvd_client.resume import RESUME_S, Told
from kvd_client.stream import Reconnected, StreamEvent
from kvd_client.wire import StreamReceived

T = TypeVar("T")


class AsyncGenerateStream:
    """A `generate` or `chat` that is sent when it is first iterated or entered. Made by `AsyncClient` only.

    Leaving early, by `close`, the end of an `async with` block, an exception in or a cancellation of the task that
    iterates, cancels the call in the daemon, which keeps what it computed. After `break` out of an `async for` that
    happens in the next turn of the event loop.

    When the connection breaks, since the daemon was restarted or for any other reason, the stream goes on over a new
    one behind its last token; a `Reconnected` event says so (see `AsyncClient`).
    """

    def __init__(self, client: AsyncClient, call: Call[GenerateResult], resume_s: float) -> None:
        self._client, self._call, self._resume_s = client, call, resume_s
        self._closings = client.closings
        self._transport: AsyncTransport | None = None
        self._progress: Progress[GenerateResult] | None = None
        self._told: Told[GenerateResult] | None = None
        self._id = 0
        self._done = False
        self._is_cancelled = False
        self._result: GenerateResult | None = None

    async def _start(self) -> tuple[Told[GenerateResult], Progress[GenerateResult]]:
        if self._told is None or self._progress is None:
            self._closings = self._client.closings
            transport = self._client.connected or await self._client.connect()
            self._told, self._progress = Told(self._call, self._resume_s), Progress(self._call)
            self._send(transport, self._told)
        return self._told, self._progress

    def _send(self, transport: AsyncTransport, told: Told[GenerateResult]) -> None:
        call = told.call()
        self._id = transport.send_request(call.method, call.params)
        self._transport = transport

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is something to take, without taking it: an event, the end, or a connection that broke.

        Sends the call if that was not done yet. Nothing else may iterate meanwhile.

        Returns:
            False when nothing came within `timeout_s` seconds (None: however long); the call goes on.

        Raises:
            KvdClientError: the call could not be sent.
        """
        if self._done:
            return True
        if self._transport is None:
            await self._start()
        assert self._transport is not None
        return await self._transport.wait(self._id, timeout_s)

    @property
    def has_event(self) -> bool:
        """Whether an event of the daemon is here that nobody has taken."""
        if self._transport is None or self._done:
            return False
        waiting = self._transport.waiting(self._id)
        return bool(waiting) and isinstance(waiting[0], StreamReceived)

    async def result(self) -> GenerateResult:
        """The result; waits for it, dropping events that were not taken.

        Raises:
            RemoteError: the call failed or was left early.
        """
        async for _ in self:
            pass
        if self._result is None:
            raise calls.given_up()
        return self._result

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        try:
            if self._done:
                return
            told, progress = await self._start()
            while not self._done:
                transport = self._transport
                assert transport is not None
                again: Reconnected | None = None
                try:
                    message = await transport.next_message(self._id, self._client.timeout_s)
                    if told.is_broken or not isinstance(message, StreamReceived):
                        again = told.look(message, is_wanted=not self._is_cancelled)
                except KvdClientError as error:
                    if transport.is_closed_here or self._has_ended():
                        raise
                    await self._resume(told, transport, error)
                    continue
                if again is not None:
                    yield again
                    if self._has_ended():
                        return
                if not isinstance(message, StreamReceived):
                    self._done = True
                    transport.forget(self._id)
                    self._result = progress.result(message)
                    return
                waiting = transport.waiting(self._id)
                while isinstance(message, StreamReceived):
                    event = told.take(message.event)
                    if event is not None:
                        if event.type == "first_token":
                            progress.first_token()
                        yield event
                        if self._has_ended():
                            return
                    if not waiting or not isinstance(waiting[0], StreamReceived):
                        break
                    message = waiting.popleft()  # what came with it takes no waiting
        finally:
            self.close()

    async def _resume(self, told: Told[GenerateResult], broken: AsyncTransport, error: KvdClientError) -> None:
        """Send the call again, behind what it has told, as soon as there is a daemon."""
        broken.forget(self._id)
        while True:
            wait_s = told.broke(error)
            if self._is_unwanted():
                raise calls.given_up()
            await asyncio.sleep(wait_s)
            try:
                transport = await self._client.connect(self._closings)
                if self._is_unwanted():
                    raise calls.given_up()
                self._send(transport, told)
            except Cancelled:
                raise
            except KvdClientError as caught:
                self._client.check_open(self._closings)
                error = caught
                continue
            told.sent_again()
            return

    def cancel(self) -> None:
        """Ask the daemon to stop at its next step; returns at once. The iteration goes on to its end."""
        self._is_cancelled = True
        if self._transport is not None and not self._done:
            self._transport.cancel(self._id)

    def _is_unwanted(self) -> bool:
        return self._is_cancelled or self._done

    def _has_ended(self) -> bool:
        """Whether the stream was left, by another task perhaps."""
        return self._done

    def close(self) -> None:
        """Leave: cancels the call unless it is done."""
        self.cancel()
        if self._transport is not None and not self._done:
            self._transport.forget(self._id)
        self._done = True

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


class AsyncClient:
    """A connection to a kvd daemon, made at the first call and made anew when the daemon was restarted in between.

    Any number of tasks of one event loop may call at a time. Cancelling a task that waits cancels its call in the
    daemon. A call that was under way when the daemon went away raises `ConnectionLost` and is not repeated, but for
    streams: `generate_stream` and `chat_stream` look for the daemon for `resume_s` seconds and go on at the exact
    token, with the text that they would have had (greedy or with a seed; without one the stream draws its own). Where
    that cannot be, since the agent or the model is another one now, they raise `NotResumable`.

    Args:
        socket: path of the daemon's socket; else `KVD_SOCKET`, else `kvd.sock` in `KVD_DATA_DIR`, else the platform's
            default.
        namespace: the sharing domain of agents named in calls that give none.
        timeout_s: seconds to wait for the connection and for each next message of a call; None waits.
        resume_s: seconds for which a broken stream looks for the daemon; 0: it raises `ConnectionLost`.

    Attributes:
        closings: how often it was closed; what was begun before a closing makes no connection after it.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        namespace: str = "default",
        timeout_s: float | None = None,
        *,
        resume_s: float = RESUME_S,
    ) -> None:
        self.socket = resolve_socket(socket)
        self.resume_s = resume_s
        self.namespace = namespace
        self.timeout_s = timeout_s
        self.closings = 0
        self._transport: AsyncTransport | None = None
        self._connecting = asyncio.Lock()

    # ---- text ----

    async def generate(
        self, agent: str, text: str, *, namespace: str | None = None, **options: Unpack[Options]
    ) -> GenerateResult:
        """Continue `text`, the agent's whole text so far with its bytes unchanged.

        Raises:
            RemoteError: the daemon refused; see `kvd_client.errors`.
            DaemonUnreachable: nobody answers.
        """
        return await self._run(calls.generate(agent, text, namespace or self.namespace, options))

    def generate_stream(
        self, agent: str, text: str, *, namespace: str | None = None, **options: Unpack[Options]
    ) -> AsyncGenerateStream:
        """As `generate`, as it is made: yields events, then has `await stream.result()`."""
        call = calls.generate(agent, text, namespace or self.namespace, options)
        return AsyncGenerateStream(self, call, self.resume_s)

    async def chat(
        self,
        agent: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        namespace: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> GenerateResult:
        """Answer the last of `messages`, the agent's whole conversation; raises as `generate`."""
        return await self._run(calls.chat(agent, messages, namespace or self.namespace, options))

    def chat_stream(
        self,
        agent: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        namespace: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerateStream:
        """As `chat`, as it is made: yields events, then has `await stream.result()`."""
        call = calls.chat(agent, messages, namespace or self.namespace, options)
        return AsyncGenerateStream(self, call, self.resume_s)

    async def inject(
        self,
        agent: str,
        text: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        *,
        namespace: str | None = None,
        **options: Unpack[InjectOptions],
    ) -> InjectResult:
        """Append text or messages to the agent and compute their KV without generating, in the background."""
        return await self._run(calls.inject(agent, text, messages, namespace or self.namespace, options))

    async def inject_into(
        self,
        agents: Sequence[str],
        text: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        *,
        namespace: str | None = None,
        **options: Unpack[InjectOptions],
    ) -> list[InjectResult]:
        """As `inject`, to several agents; one result for each, whose `error` says why it failed."""
        return await self._run(calls.inject_into(agents, text, messages, namespace or self.namespace, options))

    async def tokenize(self, text: str) -> list[int]:
        """The model's token ids of `text`."""
        return await self._run(calls.tokenize(text))

    # ---- agents ----

    async def agents(self, namespace: str | None = None) -> list[AgentInfo]:
        """All agents, or those of one namespace."""
        return await self._run(calls.list_agents(namespace))

    async def agent_info(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """One agent."""
        return await self._run(calls.on_agent("info", agent, namespace or self.namespace))

    async def fork(
        self,
        agent: str,
        new_agent: str,
        tokens: int | None = None,
        *,
        ttl_s: float | None = None,
        namespace: str | None = None,
    ) -> AgentInfo:
        """Make `new_agent` share the first `tokens` tokens (all) of `agent`; returns the new one.

        It is kept, or deleted `ttl_s` seconds after its last use.
        """
        given = {"new_agent": new_agent, "tokens": tokens, "ttl_s": ttl_s}
        return await self._run(calls.on_agent("fork", agent, namespace or self.namespace, **given))

    async def rollback(self, agent: str, tokens: int, *, namespace: str | None = None) -> AgentInfo:
        """Cut the agent to its first `tokens` tokens."""
        return await self._run(calls.on_agent("rollback", agent, namespace or self.namespace, tokens=tokens))

    async def pin(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """Load the agent's pages and keep them in RAM."""
        return await self._run(calls.on_agent("pin", agent, namespace or self.namespace))

    async def unpin(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """Take the pin back."""
        return await self._run(calls.on_agent("unpin", agent, namespace or self.namespace))

    async def prefetch(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """Load the agent's pages while there is room: a hint before a call."""
        return await self._run(calls.on_agent("prefetch", agent, namespace or self.namespace))

    async def evict(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """Write the agent's pages to disk and free their RAM."""
        return await self._run(calls.on_agent("evict", agent, namespace or self.namespace))

    async def verify(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """Have the agent's page files verified; bad ones are written anew from RAM. Figures are in `server`."""
        return await self._run(calls.on_agent("verify", agent, namespace or self.namespace))

    async def delete(self, agent: str, *, namespace: str | None = None) -> None:
        """Forget the agent, in RAM and on disk."""
        await self._run(calls.delete(agent, namespace or self.namespace))

    async def export_agent(
        self, agent: str, path: calls.PathLike, *, force: bool = False, namespace: str | None = None
    ) -> ExportResult:
        """Write the agent's present state to a file on the daemon's machine; `force` replaces one that is there."""
        return await self._run(calls.export_agent(agent, path, force, namespace or self.namespace))

    async def import_agent(
        self,
        path: calls.PathLike,
        *,
        agent: str | None = None,
        namespace: str | None = None,
        replace: bool = False,
    ) -> AgentInfo:
        """Make an agent from an exported file; without names those in the file. `replace` overwrites one."""
        return await self._run(calls.import_agent(path, agent, replace, namespace))

    # ---- the daemon ----

    async def hello(self, client: str = "kvd-client") -> dict[str, Any]:
        """Say who calls; returns the daemon's versions and recorded choices."""
        return await self._run(calls.hello(client))

    async def residency(self, agent: str | None = None, *, namespace: str | None = None) -> dict[str, Any]:
        """Which pages are in RAM, on disk or under way, of one agent or of all."""
        return await self._run(calls.residency(agent, namespace or self.namespace))

    async def monitor(self, since: int | None = None, *, namespace: str | None = None) -> dict[str, Any]:
        """Where all pages are, what each agent does, and figures; may be asked twice a second.

        Args:
            since: `version` of an earlier answer: then only agents that changed are told (see `MonitorPicture`).
            namespace: its agents alone; None for all.
        """
        return await self._run(calls.monitor(since, namespace))

    def subscribe(
        self,
        *,
        kinds: Sequence[str] | None = None,
        agent: str | None = None,
        namespace: str | None = None,
        since: int | None = None,
        reconnect: bool = False,
    ) -> AsyncSubscription:
        """What happens in the daemon from now on, as it happens: evictions, faults, misses with their reasons, turns.

        Args:
            kinds: of these kinds alone (`kvd_client.events.EVENT_KINDS`); None for all.
            agent: of this agent (of `namespace`, or this client's) and of the daemon as a whole alone.
            namespace: of this namespace's agents and of the daemon as a whole alone.
            since: begin after the event of this number, as far as it is remembered; 0 for all that is.
            reconnect: when the daemon goes away, say so (`away`) and go on with the next one.
        """
        whose = namespace or (None if agent is None else self.namespace)
        params = calls.subscription(kinds, agent, whose, since)
        return AsyncSubscription(lambda: connect(self.socket, self.timeout_s), params, reconnect=reconnect)

    async def statistics(self) -> Statistics:
        """Figures since the daemon's start."""
        return await self._run(calls.statistics())

    async def configure(
        self,
        *,
        budget: int | str | None = None,
        namespace_quotas: Mapping[str, int | str | None] | None = None,
        namespace_disk_quotas: Mapping[str, int | str | None] | None = None,
    ) -> Limits:
        """Change limits until the daemon's next start; returns those in force. Without any it changes nothing.

        Args:
            budget: memory for pages, in bytes or as `kvd serve --budget` takes it.
            namespace_quotas: of these namespaces, what their agents' pages should take of it at most; None for any.
            namespace_disk_quotas: of these namespaces, what their agents' files may take of the disk; None for any.

        Raises:
            InvalidParams: naming the allowed values; nothing changed.
        """
        return await self._run(calls.configure(budget, namespace_quotas, namespace_disk_quotas))

    async def model_info(self) -> dict[str, Any]:
        """The model the daemon has loaded."""
        return await self._run(calls.mapping("model.info"))

    async def health(self) -> Health:
        """Whether the daemon can generate now."""
        return await self._run(calls.health())

    async def drain(self) -> dict[str, Any]:
        """Let the daemon finish what runs and take no new work."""
        return await self._run(calls.mapping("drain"))

    async def shutdown(self) -> dict[str, Any]:
        """Stop the daemon; what is committed stays."""
        return await self._run(calls.mapping("shutdown"))

    async def call(self, method: str, params: Mapping[str, object] | None = None) -> Any:  # noqa: ANN401  (any result)
        """Any method by its name; its stream events are dropped."""
        return await self._run(calls.raw(method, params or {}))

    # ---- the connection ----

    async def close(self) -> None:
        """Close the connection, which cancels what is in flight; a later call connects again.

        A stream that looks for its daemon ends with `ConnectionLost`, within a second.
        """
        self.closings += 1
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def connected(self) -> AsyncTransport | None:
        """The connection, if there is one that can be used."""
        transport = self._transport
        return transport if transport is not None and transport.is_usable else None

    async def connect(self, closings: int | None = None) -> AsyncTransport:
        """The connection, made when there is none; calls do this by themselves.

        Args:
            closings: as they were when what needs it began; None: it begins now.

        Raises:
            ConnectionLost: the client was closed since, or meanwhile.
            DaemonUnreachable: nobody answers.
        """
        began = self.closings if closings is None else closings
        if began == self.closings and (transport := self.connected) is not None:
            return transport
        async with self._connecting:
            self.check_open(began)
            if self._transport is None or not self._transport.is_usable:
                transport = await connect(self.socket, self.timeout_s)
                if began != self.closings:  # meanwhile, when there was nothing to close
                    await transport.close()
                    self.check_open(began)
                self._transport = transport
            return self._transport

    def check_open(self, closings: int) -> None:
        """For what began when the client had been closed so often, and is not to connect after another closing.

        Raises:
            ConnectionLost: it was closed since.
        """
        if closings != self.closings:
            raise connection_lost(os.fspath(self.socket), CLOSED_HERE, start_command(self.socket))

    async def _run(self, call: Call[T]) -> T:
        transport = self.connected or await self.connect()
        progress = Progress(call)
        request_id = transport.send_request(call.method, call.params)
        done = False
        try:
            while isinstance(message := await transport.next_message(request_id, self.timeout_s), StreamReceived):
                progress.event(message.event)
            done = True
            return progress.result(message)
        finally:
            if not done:
                transport.cancel(request_id)
            transport.forget(request_id)
