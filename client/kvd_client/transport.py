"""One blocking connection that several threads may use at a time.

Theory of operation. There is no background thread. Of the threads that wait for a message, one *leads*: it polls the
socket, reads, and puts every message into the inbox of the call it belongs to; the others sleep on a condition. A
leader that finds its own message steps down and wakes the rest, so leadership passes on. Sending has a lock of its
own: a cancellation from another thread never waits for a reader. It is re-entrant, since the garbage collector may
close a forgotten stream in the middle of a send; such a cancellation is written after the message it interrupted.

An exception may come between any two instructions of the main thread (Ctrl-C). While polling it loses nothing. In the
few instructions between reading bytes and having understood them it could lose a part of a message, so the connection
is marked before and unmarked after, and a marked connection is closed, never used with a hole in its stream. The same
holds for sending.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvd_client.errors import (
    CLOSED_HERE,
    CallTimeout,
    ConnectionLost,
    KvdClientError,
    RemoteError,
    connection_lost,
    local_error,
    no_socket,
    remote_error,
    unreachable,
)
from kvd_client.wire import (
    Connection,
    ErrorNotified,
    MessageTooLarge,
    ProtocolError,
    ResponseReceived,
    StreamReceived,
    TextNotEncodable,
)
from kvd_client.wire.errors import EncodeError

Message = StreamReceived | ResponseReceived
Failure = Callable[[], KvdClientError]
"""Makes the exception of a broken connection; each caller raises one of its own, with its own traceback."""

_READ_BYTES = 1 << 18


class Transport:
    """A connected socket and the calls in flight on it. Owner: `Client`; thread safe.

    Args:
        path: the daemon's socket.
        command: what starts the daemon, for error messages.
        timeout_s: seconds to wait for the connection; None waits.

    Attributes:
        is_closed_here: `close` ended it, not the daemon.

    Raises:
        DaemonUnreachable: nobody answers there, or the socket is another user's.
    """

    def __init__(self, path: Path, *, command: str, timeout_s: float | None) -> None:
        self._path, self._command = path, command
        self._wire = Connection()
        self._inboxes: dict[int, deque[Message]] = {}
        self._state = threading.Condition()  # guards _wire, _inboxes, _leading, _failure
        self._sending = threading.RLock()
        self._postponed: list[bytes] = []
        self._leading = False
        self._half_read = self._half_sent = False
        self._failure: Failure | None = None
        self.is_closed_here = False
        self._socket = self._connect(timeout_s)

    def _connect(self, timeout_s: float | None) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            check_owner(self._path)
            connection.settimeout(timeout_s)
            while True:
                try:
                    connection.connect(os.fspath(self._path))
                    break
                except BlockingIOError:  # the listen queue is full; only without a timeout does the kernel wait
                    if deadline_s is not None and time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.01)
            connection.setblocking(False)
        except OSError as error:
            connection.close()
            raise unreachable(os.fspath(self._path), error.strerror or str(error), self._command) from error
        except BaseException:
            connection.close()
            raise
        return connection

    # ---- what the client uses ----

    def is_usable(self) -> bool:
        """False when the connection is broken or the daemon has closed it; asked before a call is sent."""
        with self._sending, self._state:  # nobody else sends or reads now: a mark that is set was left behind
            if self._failure is not None or self._half_read or self._half_sent:
                return False
            if self._leading or self._inboxes:
                return True
            self._drain()
            return self._failure is None

    def send_request(self, method: str, params: Mapping[str, object], timeout_s: float | None) -> int:
        """Send a request; its messages are then to be taken with `next_message` until the response came.

        Raises:
            InvalidText, InvalidParams: the parameters cannot be sent; nothing was.
            ConnectionLost, CallTimeout: the daemon is gone or does not read.
        """
        with self._sending:
            with self._state:
                request_id, data = encode_request(self._wire, method, params)
                self._inboxes[request_id] = deque()
            try:
                self._send(data, timeout_s)
            except BaseException:
                self.forget(request_id)
                raise
        return request_id

    def cancel(self, request_id: int) -> None:
        """Tell the daemon that the call is not wanted any more; never raises, a lost connection cancels by itself."""
        with self._sending, suppress(ConnectionLost, CallTimeout, RemoteError):
            with self._state:
                data = self._wire.send_cancel(request_id) if self._failure is None else b""
            if self._half_sent:
                self._postponed.append(data)
            elif data:
                self._send(data, 1.0)

    def forget(self, request_id: int) -> None:
        """Nobody waits for the call any more: its messages are dropped when they come."""
        with self._state:
            self._inboxes.pop(request_id, None)

    def next_message(self, request_id: int, timeout_s: float | None) -> Message:
        """The call's next stream event or its response, waiting for it.

        Raises:
            CallTimeout: nothing came in time; the call is still in flight.
            ConnectionLost, RemoteError: the connection is of no further use.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._state:
            while True:
                inbox = self._inboxes.get(request_id)
                if inbox:
                    return inbox.popleft()
                if self._failure is not None:
                    raise self._failure()
                if inbox is None:
                    raise self._lost("the call was given up")()
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise CallTimeout(f"no message of the daemon within {timeout_s:g} s", timeout_s=timeout_s or 0.0)
                if self._leading:
                    self._state.wait(left_s)
                else:
                    self._lead(left_s)

    def close(self) -> None:
        """Close the connection; the daemon cancels what is in flight. May be called from any thread, repeatedly."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a leader in poll, which closing alone would not
        with self._state:
            self.is_closed_here |= self._failure is None
            self._fail(self._lost(CLOSED_HERE))
            while self._leading:
                self._state.wait()
            self._socket.close()

    # ---- inside ----

    def _lead(self, timeout_s: float | None) -> None:
        """Wait for bytes without holding the lock, then read; called with the lock held, once for all threads."""
        self._leading = True
        failure: Failure | None = None
        try:
            self._state.release()
            try:
                ready = self._socket_ready(select.POLLIN, timeout_s)
            except OSError as error:
                failure = self._lost(error.strerror or str(error))
                ready = False
            finally:
                self._state.acquire()
            if failure is not None:
                self._fail(failure)
            if ready:
                self._read()
        finally:
            self._leading = False
            self._state.notify_all()

    def _read(self) -> None:
        """Read once and hand out what it says; with the lock held."""
        self._half_read = True
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            self._half_read = False
            return
        except OSError as error:
            self._fail(self._lost(error.strerror or str(error)))
            return
        if not data:
            self._fail(self._lost("it closed the connection"))
            return
        try:
            self._wire.feed(data)
            self._take_texts()
            while (event := self._wire.next_event()) is not None:
                if isinstance(event, StreamReceived | ResponseReceived):
                    inbox = self._inboxes.get(event.request_id)
                    if inbox is not None:
                        inbox.append(event)
                    if isinstance(event, StreamReceived):  # where there is one there may be many
                        self._take_texts()
                elif isinstance(event, ErrorNotified):
                    self._fail(partial(remote_error, event.error))
        except ProtocolError as error:
            text = f"the daemon broke the protocol: {error.message}"
            self._fail(partial(local_error, "protocol", text))
        self._half_read = False

    def _take_texts(self) -> None:
        """Hand out the text events that come next; with the lock held."""
        for said in self._wire.text_events():
            inbox = self._inboxes.get(said.request_id)
            if inbox is not None:
                inbox.append(said)

    def _send(self, data: bytes, timeout_s: float | None) -> None:
        """Write all of `data`; with the send lock held."""
        if self._failure is not None:
            raise self._failure()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        view = memoryview(data)
        self._half_sent = True
        while view or self._postponed:
            if not view:
                view = memoryview(self._postponed.pop(0))
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            try:
                if (left_s is not None and left_s <= 0) or not self._socket_ready(select.POLLOUT, left_s):
                    raise CallTimeout("the daemon does not read", timeout_s=timeout_s or 0.0)
                view = view[self._socket.send(view) :]
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                with self._state:
                    self._drain()
                    failure = self._fail(self._lost(error.strerror or str(error)))
                raise failure() from error
        self._half_sent = False

    def _drain(self) -> None:
        """Read what is there already, the reason of a daemon that closed the connection perhaps; lock held."""
        with suppress(OSError):
            while not self._leading and self._failure is None and self._socket_ready(select.POLLIN, 0):
                self._read()

    def _socket_ready(self, events: int, timeout_s: float | None) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, events)
        except ValueError as error:  # closed by another thread
            raise OSError(errno.EBADF, CLOSED_HERE) from error
        return bool(poll.poll(None if timeout_s is None else max(0, round(timeout_s * 1000))))

    def _fail(self, failure: Failure) -> Failure:
        """The connection is over: the first reason stays, and every waiting call gets it."""
        if self._failure is None:
            self._failure = failure
            self._state.notify_all()
        return self._failure

    def _lost(self, reason: str) -> Failure:
        return partial(connection_lost, os.fspath(self._path), reason, self._command)


def check_owner(path: Path) -> None:
    """Refuse a socket that another user (root excepted) made: prompts would go to a stranger.

    Raises:
        DaemonUnreachable: what is there is no socket, so that no daemon could be started on it either.
        PermissionError: it is somebody else's.
        FileNotFoundError: there is none.
    """
    found = os.stat(path)
    if not stat.S_ISSOCK(found.st_mode):
        raise no_socket(os.fspath(path))
    owner = found.st_uid
    if owner not in (os.getuid(), 0):
        raise PermissionError(errno.EPERM, f"the socket belongs to user {owner}")


def encode_request(wire: Connection, method: str, params: Mapping[str, object]) -> tuple[int, bytes]:
    """Encode a request; what cannot be sent is refused with the error the daemon would have given."""
    try:
        return wire.send_request(method, params)
    except TextNotEncodable as error:
        raise local_error("invalid_text", error.message) from error
    except MessageTooLarge as error:
        raise local_error("invalid_request", error.message) from error
    except EncodeError as error:
        raise local_error("invalid_params", error.message) from error
