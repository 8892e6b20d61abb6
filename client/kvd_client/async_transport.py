"""One asyncio connection. Messages wait in a queue per call; nothing here blocks and no task runs in the background."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

from kvd_client.errors import CLOSED_HERE, CallTimeout, connection_lost, local_error, remote_error, unreachable
from kvd_client.paths import start_command
from kvd_client.transport import Failure, Message, check_owner, encode_request
from kvd_client.wire import Connection, ErrorNotified, ProtocolError, ResponseReceived, StreamReceived

_READ_BYTES = 1 << 16
_OF_CALLS = (StreamReceived, ResponseReceived)


class _Inbox:
    """Messages of one call that nobody has taken, and whoever waits for the next. Owner: the transport.

    A queue and a timeout for each message would cost several times what reading it does.
    """

    __slots__ = ("_waiter", "messages")

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self._waiter: asyncio.Future[bool] | None = None

    def put(self, message: Message) -> None:
        """Add the next message."""
        self.messages.append(message)
        if self._waiter is not None:
            self.wake()

    def wake(self) -> None:
        """Let whoever waits look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            _settle(waiter, True)

    def wait(self, timeout_s: float | None) -> asyncio.Future[bool]:
        """What `wake` sets to true, or the time to false; to be awaited at once, by one task at a time."""
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        if timeout_s is not None:
            timer = loop.call_later(timeout_s, _settle, waiter, False)  # this one: it may outlive a cancelled wait
            waiter.add_done_callback(lambda _: timer.cancel())  # before whoever waits goes on
        return waiter


def _settle(waiter: asyncio.Future[bool], is_there: bool) -> None:
    """Let a waiter go on, unless something else did or it was cancelled."""
    if not waiter.done():
        waiter.set_result(is_there)


class AsyncTransport(asyncio.BufferedProtocol):
    """A connection and the calls in flight on it. Owner: `AsyncClient`; to be used on its event loop only.

    Attributes:
        is_closed_here: `close` ended it, not the daemon.
        most_waiting: messages of a call that wait before the connection is not read any more; None: any number.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wire = Connection()
        self._inboxes: dict[int, _Inbox] = {}
        self._failure: Failure | None = None
        self.is_closed_here = False
        self._socket: asyncio.Transport | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self.most_waiting: int | None = None
        self._is_held_up = False
        self._received = memoryview(bytearray(_READ_BYTES))

    # ---- asyncio calls these ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._socket = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: a buffer for each read costs more than reading a small message."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """So many came."""
        self._data_received(self._received[:nbytes])

    def _data_received(self, data: memoryview) -> None:
        """Hand out what the bytes say; they are copied."""
        try:
            self._wire.feed(data)
            self._take_texts()
            while (event := self._wire.next_event()) is not None:
                if isinstance(event, _OF_CALLS):
                    inbox = self._inboxes.get(event.request_id)
                    if inbox is not None:
                        inbox.put(event)
                        if self.most_waiting is not None:
                            self._hold_up(inbox)
                    if isinstance(event, StreamReceived):  # where there is one there may be many
                        self._take_texts()
                elif isinstance(event, ErrorNotified):
                    self._fail(partial(remote_error, event.error))
        except ProtocolError as error:
            text = f"the daemon broke the protocol: {error.message}"
            self._fail(partial(local_error, "protocol", text))
            self._abort()

    def _take_texts(self) -> None:
        """Hand out the text events that come next."""
        inbox, of = None, -1
        for said in self._wire.text_events():
            if said[0] != of:
                of = said[0]
                inbox = self._inboxes.get(of)
                if inbox is not None:
                    inbox.wake()  # whoever waits goes on after this, when all is in
            if inbox is not None:
                inbox.messages.append(said)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._fail(self._lost(str(exc) if exc is not None else "it closed the connection"))
        if not self._closed.done():
            self._closed.set_result(None)

    # ---- what the client uses ----

    @property
    def is_usable(self) -> bool:
        """False when the connection is broken or closed."""
        return self._failure is None and self._socket is not None and not self._socket.is_closing()

    def send_request(self, method: str, params: Mapping[str, object]) -> int:
        """Send a request; its messages are then to be taken with `next_message` until the response came.

        Raises:
            InvalidText, InvalidParams: the parameters cannot be sent; nothing was.
            ConnectionLost: the daemon is gone.
        """
        if self._failure is not None:
            raise self._failure()
        request_id, data = encode_request(self._wire, method, params)
        self._inboxes[request_id] = _Inbox()
        self._write(data)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Tell the daemon that the call is not wanted any more; never raises."""
        if self.is_usable:
            self._write(self._wire.send_cancel(request_id))

    def forget(self, request_id: int) -> None:
        """Nobody waits for the call any more: its messages are dropped when they come."""
        self._inboxes.pop(request_id, None)

    def waiting(self, request_id: int) -> deque[Message]:
        """The call's messages that nobody has taken, to be taken from the left; not where reading may be held up."""
        inbox = self._inboxes.get(request_id)
        return deque() if inbox is None else inbox.messages

    async def next_message(self, request_id: int, timeout_s: float | None) -> Message:
        """The call's next stream event or its response, waiting for it.

        Raises:
            CallTimeout: nothing came in time; the call is still in flight.
            ConnectionLost, RemoteError: the connection is of no further use.
        """
        inbox = self._inboxes.get(request_id)
        if inbox is None:
            raise (self._failure or self._lost("the call was given up"))()
        messages = inbox.messages
        while not messages:
            if self._failure is not None:
                raise self._failure()
            if not await inbox.wait(timeout_s):
                text = f"no message of the daemon within {timeout_s:g} s"
                raise CallTimeout(text, timeout_s=timeout_s or 0.0)
        message = messages.popleft()
        if self._is_held_up:
            self._hold_up(inbox)
        return message

    async def wait(self, request_id: int, timeout_s: float | None) -> bool:
        """Wait until `next_message` has something to return or to raise; False when it has not within `timeout_s`."""
        inbox = self._inboxes.get(request_id)
        if inbox is None or inbox.messages or self._failure is not None:
            return True
        return await inbox.wait(timeout_s)

    async def close(self) -> None:
        """Close the connection; the daemon cancels what is in flight."""
        self.is_closed_here |= self._failure is None
        self._fail(self._lost(CLOSED_HERE))
        if self._socket is not None:
            self._socket.close()
            await asyncio.shield(self._closed)

    # ---- inside ----

    def _hold_up(self, inbox: _Inbox) -> None:
        """Read no more while too much waits, and on again when half of it is taken."""
        if self.most_waiting is None or self._socket is None or self._failure is not None:
            return
        waiting = len(inbox.messages)
        if not self._is_held_up and waiting > self.most_waiting:
            self._is_held_up = True
            self._socket.pause_reading()
        elif self._is_held_up and waiting <= self.most_waiting // 2:
            self._is_held_up = False
            self._socket.resume_reading()

    def _write(self, data: bytes) -> None:
        if self._socket is not None and data:
            self._socket.write(data)

    def _abort(self) -> None:
        if self._socket is not None:
            self._socket.abort()

    def _fail(self, failure: Failure) -> None:
        """The connection is over: the first reason stays; every waiting call is woken after what it has received."""
        if self._failure is None:
            self._failure = failure
            for inbox in self._inboxes.values():
                inbox.wake()

    def _lost(self, reason: str) -> Failure:
        return partial(connection_lost, os.fspath(self._path), reason, start_command(self._path))


async def connect(path: Path, timeout_s: float | None) -> AsyncTransport:
    """Connect to the daemon at `path`.

    Raises:
        DaemonUnreachable: nobody answers there, or the socket is another user's.
    """
    loop = asyncio.get_running_loop()
    try:
        check_owner(path)
        connecting = loop.create_unix_connection(lambda: AsyncTransport(path), os.fspath(path))
        _, protocol = await asyncio.wait_for(connecting, timeout_s)
    except TimeoutError as error:
        raise unreachable(os.fspath(path), f"no answer within {timeout_s:g} s", start_command(path)) from error
    except OSError as error:
        raise unreachable(os.fspath(path), error.strerror or str(error), start_command(path)) from error
    return protocol
