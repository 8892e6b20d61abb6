"""One connection: reads requests, runs a task for each, writes what they emit, and ends them when the peer goes.

What the service can answer at once is answered where it is read.

Theory of operation. Everything here runs on the event loop's thread. Reading never waits for writing, so that a
cancellation always gets through. Writing goes straight to the transport until asyncio says that the kernel's buffer is
full (`pause_writing`); from then on messages wait in the outbox, which is bounded. A peer that exceeds the bound is
told why, as far as it still reads, and closed. Calls of a peer that is gone are cancelled through their context: the
service ends them at its next step and keeps what they computed; their answers are dropped.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from kvd.errors import Busy, Cancelled, Draining, KvdError
from kvd.front.api import PeerInfo, Service
from kvd.front.errors import PeerRefused, SlowReader
from kvd.front.limits import FrontLimits
from kvd.front.outbox import Outbox
from kvd.front.wire_errors import to_error_object
from kvd_client.wire import (
    CancelReceived,
    Connection,
    EncodeError,
    ErrorObject,
    Event,
    ProtocolError,
    RequestReceived,
    RequestRefused,
)

_BATCH_BYTES = 1 << 16


class Log(Protocol):
    """What the front needs of a structured logger (structlog's fits)."""

    def debug(self, event: str, **fields: object) -> object:
        """Log for developers."""

    def warning(self, event: str, **fields: object) -> object:
        """Log what an operator may want to look at."""

    def error(self, event: str, **fields: object) -> object:
        """Log a bug."""


class Host(Protocol):
    """What a session needs of its server."""

    service: Service
    limits: FrontLimits
    log: Log
    is_closing: bool
    held_bytes: int
    """Of all sessions; each adds and takes off its own."""
    received: memoryview
    """Where bytes are read to: one place for all, since a buffer for each read costs more than a small message."""

    def admit(self, session: Session, connection: socket.socket) -> PeerInfo:
        """Register a session. Raises PeerRefused or Busy."""

    def left(self, session: Session) -> None:
        """The connection is gone."""

    def count(self, what: str) -> None:
        """Count an occurrence for the statistics."""


class Call:
    """One call in flight; the `CallContext` of the service. Owner: its session."""

    def __init__(self, session: Session, request: RequestReceived, request_bytes: int) -> None:
        self._session = session
        self.request = request
        self.request_bytes = request_bytes
        self.task: asyncio.Task[None] | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._cancelled = False
        self._read: asyncio.Future[None] | None = None
        self._only_first_token = request.params.get("stream") is False
        self.is_done = False

    @property
    def peer(self) -> PeerInfo:
        """The caller's process."""
        return self._session.peer

    @property
    def cancelled(self) -> bool:
        """True once the client cancelled the call or its connection is gone."""
        return self._cancelled

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Run `callback` once when the call is cancelled, at once if it is already."""
        if self._cancelled:
            callback()
        else:
            self._callbacks.append(callback)

    def emit(self, event: Mapping[str, object]) -> None:
        """Send a stream event; dropped when the call is done, its connection gone, or it wants no stream."""
        if not self.is_done and not (self._only_first_token and event.get("type") != "first_token"):
            self._session.send_event(self.request.request_id, event)

    async def until_read(self) -> None:
        """Wait until nothing waits for the peer, or the call is cancelled."""
        while not self._cancelled and self._session.is_behind:
            self._read = asyncio.get_running_loop().create_future()
            await self._read

    def peer_has_read(self) -> None:
        """Nothing waits for the peer any more, or the call is cancelled."""
        if self._read is not None and not self._read.done():
            self._read.set_result(None)

    def error_map(self, error: KvdError) -> dict[str, object]:
        """The error as the client sees it."""
        return to_error_object(error).to_wire()

    def cancel(self) -> None:
        """The client does not want the call any more; a second time does nothing."""
        if self._cancelled or self.is_done:
            return
        self._cancelled = True
        self.peer_has_read()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                self._session.log.error("cancel_callback_failed", method=self.request.method, exc_info=True)


class Session(asyncio.BufferedProtocol):
    """One connection. Owner: the event loop; made by `RpcServer` only."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._limits = host.limits
        self.log = host.log
        self._wire = Connection(host.limits.wire)
        self._outbox = Outbox(self._wire.send_stream)
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._is_reading = False
        self._is_ending = False
        self._unfinished_bytes = 0
        self._held_bytes = 0
        self._linger: asyncio.TimerHandle | None = None
        self.calls: dict[int, Call] = {}
        self.peer = PeerInfo(connection=0, pid=None, uid=-1)

    # ---- asyncio calls these ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Look at the peer before a byte is read (asyncio starts to read after this returns)."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        try:
            self.peer = self._host.admit(self, transport.get_extra_info("socket"))
        except PeerRefused as error:
            self.log.warning("peer_refused", reason=error.message, **error.data)
            self._is_ending = True
            self.abort()
        except KvdError as error:
            self.end(to_error_object(error))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go, of whichever session: they are taken over before the next ones are read."""
        return self._host.received

    def buffer_updated(self, nbytes: int) -> None:
        """So many came: handle every message that is complete now."""
        self._data_received(self._host.received[:nbytes])

    def _data_received(self, data: memoryview) -> None:
        if self._is_ending:
            return
        wire = self._wire
        wire.feed(data)
        self._is_reading = True
        try:
            buffered_bytes = wire.buffered_bytes
            while (event := wire.next_event()) is not None:
                left_bytes = wire.buffered_bytes
                self._handle(event, buffered_bytes - left_bytes)
                buffered_bytes = left_bytes
        except ProtocolError as error:
            self._violated(error)
            return
        finally:
            self._is_reading = False
            self._flush()
        unfinished_bytes = wire.buffered_bytes
        if unfinished_bytes or self._unfinished_bytes:
            self._hold(unfinished_bytes - self._unfinished_bytes)
            self._unfinished_bytes = unfinished_bytes
            if unfinished_bytes and self._holds_too_much(0):
                self.end(to_error_object(self._held_error()))

    def eof_received(self) -> bool:
        """The peer is gone or will send no more, which is the same: its calls are cancelled and the socket closed."""
        if not self._is_ending:
            try:
                self._wire.feed_eof()
            except ProtocolError as error:
                self._violated(error)
        self.end(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._is_ending = True
        if self._linger is not None:
            self._linger.cancel()
        self._outbox.clear()
        self._hold(-self._unfinished_bytes)
        self._unfinished_bytes = 0
        self._wire.drop_unfinished()
        self._cancel_all()
        self._host.left(self)

    def pause_writing(self) -> None:
        """The kernel's buffer is full: messages wait from now on."""
        self._paused = True

    def resume_writing(self) -> None:
        """The peer has read: send what waits, in batches, until it is full again."""
        self._paused = False
        while self._outbox and not self._paused and self._transport is not None:
            batch = bytearray(self._outbox.pop())
            while self._outbox and len(batch) < _BATCH_BYTES:
                batch += self._outbox.pop()
            self._transport.write(batch)
        if not self.is_behind:
            for call in self.calls.values():
                call.peer_has_read()
        if self._transport is not None and self._is_ending and not self._outbox:
            self._transport.close()

    # ---- requests ----

    def _handle(self, event: Event, message_bytes: int) -> None:
        if self._is_ending:  # an earlier message of the same bytes ended the connection
            return
        if isinstance(event, RequestReceived):
            self._begin(event, message_bytes)
        elif isinstance(event, RequestRefused):
            self._respond(event.request_id, event.error)
        elif isinstance(event, CancelReceived):
            call = self.calls.get(event.request_id)
            if call is not None:
                call.cancel()
        # Other notifications are for later versions: ignored, as the protocol says.

    def _begin(self, request: RequestReceived, request_bytes: int) -> None:
        if self._host.is_closing:
            self._respond(request.request_id, to_error_object(Draining("the daemon is going down")))
        elif len(self.calls) >= self._limits.max_calls:
            busy = Busy(
                f"{self._limits.max_calls} calls are in flight on this connection, which is the most it may have",
                retry_after_s=self._limits.busy_retry_after_s,
                max_calls=self._limits.max_calls,
            )
            self._respond(request.request_id, to_error_object(busy))
        elif self._holds_too_much(request_bytes):
            self._respond(request.request_id, to_error_object(self._held_error()))
        else:
            self._host.count("calls")
            at_once = self._host.service.at_once(request.method)
            if at_once is not None:
                self._answer_at_once(request, at_once)
                return
            self._hold(request_bytes)
            call = Call(self, request, request_bytes)
            self.calls[request.request_id] = call
            call.task = asyncio.get_running_loop().create_task(self._serve(call))

    def _answer_at_once(self, request: RequestReceived, handler: Callable[[Mapping[str, object]], object]) -> None:
        try:
            answer = handler(request.params)
        except KvdError as error:
            answer = to_error_object(error)
        except Exception:
            answer = self._bug(request.method)
        self._respond(request.request_id, answer)

    def _bug(self, method: str) -> ErrorObject:
        """What the caller gets of the exception that is being handled."""
        self._host.count("internal_errors")
        self.log.error("call_failed", method=method, connection=self.peer.connection, exc_info=True)
        return ErrorObject.of("internal", f"the daemon failed in `{method}`; its log has the details")

    async def _serve(self, call: Call) -> None:
        """Run one call to its answer; never raises."""
        began_s = time.monotonic()
        method = call.request.method
        answer: object = None
        try:
            answer = await self._host.service.call(method, call.request.params, call)
        except KvdError as error:
            answer = to_error_object(error)
        except asyncio.CancelledError:
            answer = to_error_object(Cancelled("the daemon is going down"))
        except Exception:
            answer = self._bug(method)
        call.is_done = True
        self._hold(-call.request_bytes)
        del self.calls[call.request.request_id]
        self._respond(call.request.request_id, answer)
        self.log.debug(
            "call",
            method=method,
            connection=self.peer.connection,
            pid=self.peer.pid,
            outcome=answer.name if isinstance(answer, ErrorObject) else "ok",
            cancelled=call.cancelled,
            duration_s=round(time.monotonic() - began_s, 6),
        )
        if self._host.is_closing and not self.calls:
            self.end(None)

    def _respond(self, request_id: int, answer: object) -> None:
        """Send the one answer of a request."""
        if self._is_ending:
            return
        # Waiting text of the call must become bytes before its id is free on the wire.
        if self._outbox.waiting_bytes:
            self._outbox.seal(request_id)
        if not isinstance(answer, ErrorObject):
            try:
                self._write(self._wire.send_response(request_id, answer))
            except EncodeError as error:
                self._host.count("internal_errors")
                self.log.error("result_not_encodable", request_id=request_id, reason=error.message)
                answer = ErrorObject.of("internal", f"the result cannot be sent: {error.message}")
            else:
                return
        self._write(self._wire.send_error(request_id, answer))

    # ---- what it holds ----

    def _hold(self, more_bytes: int) -> None:
        self._held_bytes += more_bytes
        self._host.held_bytes += more_bytes

    def _holds_too_much(self, more_bytes: int) -> bool:
        is_full = self._host.held_bytes + more_bytes > self._limits.max_held_bytes
        return is_full and self._held_bytes + more_bytes > self._limits.free_held_bytes

    def _held_error(self) -> Busy:
        return Busy(
            f"requests of {self._host.held_bytes} bytes are under way, of {self._limits.max_held_bytes} at most",
            retry_after_s=self._limits.busy_retry_after_s,
            held_bytes=self._host.held_bytes,
            max_held_bytes=self._limits.max_held_bytes,
        )

    # ---- writing ----

    @property
    def is_behind(self) -> bool:
        """Messages wait, since the peer does not read as fast as they come."""
        return self._paused or bool(self._outbox)

    def send_event(self, request_id: int, event: Mapping[str, object]) -> None:
        """Send a stream event of a call in flight, or let it wait."""
        if self._is_ending:
            return
        try:
            if self._paused:
                self._outbox.add_event(request_id, event)
                self._check_reader()
            else:
                self._write(self._wire.send_stream(request_id, event))
        except EncodeError as error:
            self._host.count("internal_errors")
            self.log.error("event_not_encodable", type=str(event.get("type")), reason=error.message)

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._paused:
            self._outbox.add(data)
            self._check_reader()
            return
        # messages of one turn of the loop go out together: a call of the system costs more than making a message
        if not self._unwritten and not self._is_reading:  # what is said while reading goes out at the end of that
            asyncio.get_running_loop().call_soon(self._flush)
        self._unwritten.append(data)
        self._unwritten_bytes += len(data)
        if self._unwritten_bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Hand what this turn of the loop has to say to the transport, which may pause us."""
        if self._unwritten and self._transport is not None:
            data, self._unwritten, self._unwritten_bytes = b"".join(self._unwritten), [], 0
            self._transport.write(data)

    def _check_reader(self) -> None:
        if self._outbox.waiting_bytes <= self._limits.max_unread_bytes:
            return
        slow = SlowReader(
            f"more than {self._limits.max_unread_bytes} bytes were not read",
            limit_bytes=self._limits.max_unread_bytes,
        )
        self._host.count("slow_readers")
        self.log.warning("slow_reader", connection=self.peer.connection, pid=self.peer.pid, **slow.data)
        self.end(to_error_object(slow))

    # ---- the end ----

    def _violated(self, error: ProtocolError) -> None:
        self._host.count("protocol_errors")
        self.log.warning("protocol_error", connection=self.peer.connection, pid=self.peer.pid, reason=error.message)
        data = {} if error.request_id is None else {"request_id": error.request_id}
        self.end(ErrorObject.of("protocol", error.message, data=data))

    def end(self, reason: ErrorObject | None) -> None:
        """Close the connection, after what the peer still reads within `linger_s`; its calls are cancelled.

        Args:
            reason: sent as the last message, in place of all that waits; None sends what waits and nothing more.
        """
        if self._is_ending or self._transport is None:
            return
        self._is_ending = True
        self._flush()
        if reason is not None:
            self._outbox.clear()
            self._transport.write(self._wire.send_fatal(reason))
        if not self._outbox:
            self._transport.close()
        loop = asyncio.get_running_loop()
        self._linger = loop.call_later(self._limits.linger_s, self._transport.abort)
        self._cancel_all()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _cancel_all(self) -> None:
        for call in list(self.calls.values()):
            call.cancel()
