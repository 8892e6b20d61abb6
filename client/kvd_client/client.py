"""The blocking client."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from kvd_client import calls
from kvd_client.calls import Call, ChatOptions, InjectOptions, Options, Progress
from kvd_client.errors import CLOSED_HERE, KvdClientError, connection_lost
from kvd_client.paths import resolve_socket, start_command
from kvd_client.results import AgentInfo, ExportResult, GenerateResult, Health, InjectResult, Limits, Statistics
from kvd_client.resume import RESUME_S, Told
from kvd_client.stream import Reconnected, StreamEvent
from kvd_client.subscription import Subscription
from kvd_client.transport import Transport
from kvd_client.wire import StreamReceived

T = TypeVar("T")


class GenerateStream:
    """A running `generate` or `chat`: iterate it for events, then read `result`. Made by `Client` only.

    Leaving the `for` loop early, by `break`, `return` or any exception, cancels the call in the daemon, which keeps
    what it computed; so do `close`, the end of a `with` block and garbage collection.

    `cancel` may be called from another thread; the iteration then ends with `Cancelled`, or with the result when the
    end crossed the cancellation.

    When the connection breaks, since the daemon was restarted or for any other reason, the stream goes on over a new
    one behind its last token; a `Reconnected` event says so (see `Client`).
    """

    def __init__(self, client: Client, call: Call[GenerateResult], resume_s: float) -> None:
        self._client = client
        self._result: GenerateResult | None = None
        self._open = False
        self._left = threading.Event()
        self._closings = client.closings
        self._told = Told(call, resume_s)
        self._progress = Progress(call)
        self._at = self._send()
        self._open = True

    def _send(self) -> tuple[Transport, int]:
        transport, call = self._client.transport(self._closings), self._told.call()
        return transport, transport.send_request(call.method, call.params, self._client.timeout_s)

    @property
    def result(self) -> GenerateResult:
        """The result; waits for it, dropping events that were not taken.

        Raises:
            RemoteError: the call failed or was left early.
        """
        for _ in self:
            pass
        if self._result is None:
            raise calls.given_up()
        return self._result

    def __iter__(self) -> Iterator[StreamEvent]:
        # A generator: only the `for` statement holds it, so that `break` closes it at once, whoever holds the stream.
        try:
            while self._open:
                transport, request_id = self._at
                again: Reconnected | None = None
                try:
                    message = transport.next_message(request_id, self._client.timeout_s)
                    if self._told.is_broken or not isinstance(message, StreamReceived):
                        again = self._told.look(message, is_wanted=not self._left.is_set())
                except KvdClientError as error:
                    if transport.is_closed_here or not self._open:
                        raise
                    self._resume(error)
                    continue
                if again is not None:
                    yield again
                    if not self._open:
                        break
                if isinstance(message, StreamReceived):
                    event = self._told.take(message.event)
                    if event is not None:
                        if event.type == "first_token":
                            self._progress.first_token()
                        yield event
                else:
                    self._finish()
                    self._result = self._progress.result(message)
        finally:
            self.close()

    def _resume(self, error: KvdClientError) -> None:
        """Send the call again, behind what it has told, as soon as there is a daemon."""
        while True:
            if self._left.wait(self._told.broke(error)):
                raise calls.given_up()
            try:
                self._at[0].forget(self._at[1])
                self._at = self._send()
            except KvdClientError as caught:
                self._client.check_open(self._closings)
                error = caught
                continue
            if self._left.is_set():  # it came between the two connections
                self._at[0].cancel(self._at[1])
            self._told.sent_again()
            return

    def cancel(self) -> None:
        """Ask the daemon to stop at its next step; thread safe, returns at once."""
        if self._open:
            self._left.set()
            transport, request_id = self._at
            transport.cancel(request_id)

    def close(self) -> None:
        """Leave: cancels the call unless it is done."""
        if self._open:
            self.cancel()
            self._finish()

    def _finish(self) -> None:
        self._open = False
        transport, request_id = self._at
        transport.forget(request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


class Client:
    """A connection to a kvd daemon, made at the first call and made anew when the daemon was restarted in between.

    Thread safe: several threads may call at a time, each waits for its own answer. Closing it cancels what is in
    flight. A call that was under way when the daemon went away raises `ConnectionLost` and is not repeated, but for
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
        self._transport: Transport | None = None
        self._connecting = threading.Lock()

    # ---- text ----

    def generate(
        self, agent: str, text: str, *, namespace: str | None = None, **options: Unpack[Options]
    ) -> GenerateResult:
        """Continue `text`, the agent's whole text so far with its bytes unchanged.

        Raises:
            RemoteError: the daemon refused; see `kvd_client.errors`.
            DaemonUnreachable: nobody answers.
        """
        with GenerateStream(self, calls.generate(agent, text, namespace or self.namespace, options), 0.0) as stream:
            return stream.result

    def generate_stream(
        self, agent: str, text: str, *, namespace: str | None = None, **options: Unpack[Options]
    ) -> GenerateStream:
        """As `generate`, as it is made: yields events, then has `.result`."""
        return self._stream(calls.generate(agent, text, namespace or self.namespace, options))

    def chat(
        self,
        agent: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        namespace: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> GenerateResult:
        """Answer the last of `messages`, the agent's whole conversation; raises as `generate`."""
        with GenerateStream(self, calls.chat(agent, messages, namespace or self.namespace, options), 0.0) as stream:
            return stream.result

    def chat_stream(
        self,
        agent: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        namespace: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> GenerateStream:
        """As `chat`, as it is made: yields events, then has `.result`."""
        return self._stream(calls.chat(agent, messages, namespace or self.namespace, options))

    def inject(
        self,
        agent: str,
        text: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        *,
        namespace: str | None = None,
        **options: Unpack[InjectOptions],
    ) -> InjectResult:
        """Append text or messages to the agent and compute their KV without generating, in the background."""
        return self._run(calls.inject(agent, text, messages, namespace or self.namespace, options))

    def inject_into(
        self,
        agents: Sequence[str],
        text: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        *,
        namespace: str | None = None,
        **options: Unpack[InjectOptions],
    ) -> list[InjectResult]:
        """As `inject`, to several agents; one result for each, whose `error` says why it failed."""
        return self._run(calls.inject_into(agents, text, messages, namespace or self.namespace, options))

    def tokenize(self, text: str) -> list[int]:
        """The model's token ids of `text`."""
        return self._run(calls.tokenize(text))

    # ---- agents ----

    def agents(self, namespace: str | None = None) -> list[AgentInfo]:
        """All agents, or those of one namespace."""
        return self._run(calls.list_agents(namespace))

    def agent_info(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """One agent."""
        return self._run(calls.on_agent("info", agent, namespace or self.namespace))

    def fork(
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
        return self._run(calls.on_agent("fork", agent, namespace or self.namespace, **given))

    def rollback(self, agent: str, tokens: int, *, namespace: str | None = None) -> AgentInfo:
        """Cut the agent to its first `tokens` tokens."""
        return self._run(calls.on_agent("rollback", agent, namespace or self.namespace, tokens=tokens))

    def pin(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """Load the agent's pages and keep them in RAM."""
        return self._run(calls.on_agent("pin", agent, namespace or self.namespace))

    def unpin(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """Take the pin back."""
        return self._run(calls.on_agent("unpin", agent, namespace or self.namespace))

    def prefetch(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """Load the agent's pages while there is room: a hint before a call."""
        return self._run(calls.on_agent("prefetch", agent, namespace or self.namespace))

    def evict(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """Write the agent's pages to disk and free their RAM."""
        return self._run(calls.on_agent("evict", agent, namespace or self.namespace))

    def verify(self, agent: str, *, namespace: str | None = None) -> AgentInfo:
        """Have the agent's page files verified; bad ones are written anew from RAM. Figures are in `server`."""
        return self._run(calls.on_agent("verify", agent, namespace or self.namespace))

    def delete(self, agent: str, *, namespace: str | None = None) -> None:
        """Forget the agent, in RAM and on disk."""
        self._run(calls.delete(agent, namespace or self.namespace))

    def export_agent(
        self, agent: str, path: calls.PathLike, *, force: bool = False, namespace: str | None = None
    ) -> ExportResult:
        """Write the agent's present state to a file on the daemon's machine; `force` replaces one that is there."""
        return self._run(calls.export_agent(agent, path, force, namespace or self.namespace))

    def import_agent(
        self,
        path: calls.PathLike,
        *,
        agent: str | None = None,
        namespace: str | None = None,
        replace: bool = False,
    ) -> AgentInfo:
        """Make an agent from an exported file; without names those in the file. `replace` overwrites one."""
        return self._run(calls.import_agent(path, agent, replace, namespace))

    # ---- the daemon ----

    def hello(self, client: str = "kvd-client") -> dict[str, Any]:
        """Say who calls; returns the daemon's versions and recorded choices."""
        return self._run(calls.hello(client))

    def residency(self, agent: str | None = None, *, namespace: str | None = None) -> dict[str, Any]:
        """Which pages are in RAM, on disk or under way, of one agent or of all."""
        return self._run(calls.residency(agent, namespace or self.namespace))

    def monitor(self, since: int | None = None, *, namespace: str | None = None) -> dict[str, Any]:
        """Where all pages are, what each agent does, and figures; may be asked twice a second.

        Args:
            since: `version` of an earlier answer: then only agents that changed are told (see `MonitorPicture`).
            namespace: its agents alone; None for all.
        """
        return self._run(calls.monitor(since, namespace))

    def subscribe(
        self,
        *,
        kinds: Sequence[str] | None = None,
        agent: str | None = None,
        namespace: str | None = None,
        since: int | None = None,
        reconnect: bool = False,
    ) -> Subscription:
        """What happens in the daemon from now on, as it happens: evictions, faults, misses with their reasons, turns.

        Args:
            kinds: of these kinds alone (`kvd_client.events.EVENT_KINDS`); None for all.
            agent: of this agent (of `namespace`, or this client's) and of the daemon as a whole alone.
            namespace: of this namespace's agents and of the daemon as a whole alone.
            since: begin after the event of this number, as far as it is remembered; 0 for all that is.
            reconnect: when the daemon goes away, say so (`away`) and go on with the next one.

        Raises:
            DaemonUnreachable: nobody answers.
        """
        whose = namespace or (None if agent is None else self.namespace)
        params = calls.subscription(kinds, agent, whose, since)
        return Subscription(self._make_transport, params, reconnect=reconnect)

    def statistics(self) -> Statistics:
        """Figures since the daemon's start."""
        return self._run(calls.statistics())

    def configure(
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
        return self._run(calls.configure(budget, namespace_quotas, namespace_disk_quotas))

    def model_info(self) -> dict[str, Any]:
        """The model the daemon has loaded."""
        return self._run(calls.mapping("model.info"))

    def health(self) -> Health:
        """Whether the daemon can generate now."""
        return self._run(calls.health())

    def drain(self) -> dict[str, Any]:
        """Let the daemon finish what runs and take no new work."""
        return self._run(calls.mapping("drain"))

    def shutdown(self) -> dict[str, Any]:
        """Stop the daemon; what is committed stays."""
        return self._run(calls.mapping("shutdown"))

    def call(self, method: str, params: Mapping[str, object] | None = None) -> Any:  # noqa: ANN401  (whatever the method gives)
        """Any method by its name; its stream events are dropped."""
        return self._run(calls.raw(method, params or {}))

    # ---- the connection ----

    def close(self) -> None:
        """Close the connection, which cancels what is in flight; a later call connects again.

        A stream that looks for its daemon ends with `ConnectionLost`, within a second.
        """
        with self._connecting:
            self.closings += 1
            transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def transport(self, closings: int | None = None) -> Transport:
        """The connection, made when there is none; calls do this by themselves.

        Args:
            closings: as they were when what needs it began; None: it begins now.

        Raises:
            ConnectionLost: the client was closed since.
            DaemonUnreachable: nobody answers.
        """
        with self._connecting:
            if closings is not None:
                self.check_open(closings)
            if self._transport is not None and not self._transport.is_usable():
                self._transport.close()
                self._transport = None
            if self._transport is None:
                self._transport = self._make_transport()
            return self._transport

    def check_open(self, closings: int) -> None:
        """For what began when the client had been closed so often, and is not to connect after another closing.

        Raises:
            ConnectionLost: it was closed since.
        """
        if closings != self.closings:
            raise connection_lost(os.fspath(self.socket), CLOSED_HERE, start_command(self.socket))

    def _make_transport(self) -> Transport:
        return Transport(self.socket, command=start_command(self.socket), timeout_s=self.timeout_s)

    def _stream(self, call: Call[GenerateResult]) -> GenerateStream:
        return GenerateStream(self, call, self.resume_s)

    def _run(self, call: Call[T]) -> T:
        transport = self.transport()
        progress = Progress(call)
        request_id = transport.send_request(call.method, call.params, self.timeout_s)
        done = False
        try:
            while isinstance(message := transport.next_message(request_id, self.timeout_s), StreamReceived):
                progress.event(message.event)
            done = True
            return progress.result(message)
        finally:
            if not done:
                transport.cancel(request_id)
            transport.forget(request_id)
