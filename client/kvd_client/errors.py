"""Errors of the client, split by fault.

    KvdClientError
    ├── DaemonUnreachable        environment: nobody answers at the socket; names the command that starts the daemon
    │   └── ConnectionLost       it went away while a call was in flight
    ├── CallTimeout              environment: no message within `timeout_s`; the call was cancelled
    └── RemoteError              the daemon's answer; `name`, `code`, `data`, `retry_after_s` as on the wire
        ├── RequestError         caller: InvalidRequest, InvalidParams, InvalidText, MethodNotFound, Unsupported,
        │                        AgentNotFound, AgentExists, AgentBusy, NotResumable, ContextFull, BudgetExceeded
        ├── Cancelled            the caller's own wish
        ├── ServiceError         environment: Busy, Draining, NotReady, EnvironmentFault, StorageError, ModelError,
        │                        ConfigError
        ├── ConnectionFault      peer: ProtocolViolation, SlowReader
        └── DaemonBug            the daemon's bug (`internal`)

One leaf for each name of `wire.codes.CODES`; an answer with a name this client does not know is a plain RemoteError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from kvd_client.wire.codes import CODES, ErrorObject


class KvdClientError(Exception):
    """Base of every error the client raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class DaemonUnreachable(KvdClientError):
    """Nobody answers at the socket.

    Args:
        message: what was tried, why it failed, and the command that starts the daemon.
        socket: the path that was tried.
        command: the command that starts the daemon which would answer there.
    """

    def __init__(self, message: str, *, socket: str, command: str) -> None:
        super().__init__(message)
        self.socket = socket
        self.command = command


class ConnectionLost(DaemonUnreachable):
    """The daemon went away during a call. What it had committed survives; the call may be sent again."""


class CallTimeout(KvdClientError):
    """The daemon sent nothing for `timeout_s` seconds; the call was cancelled, what it computed is kept.

    Args:
        message: what was waited for.
        timeout_s: how long.
    """

    def __init__(self, message: str, *, timeout_s: float) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class RemoteError(KvdClientError):
    """The daemon answered with an error.

    Attributes:
        name: stable word.
        code: its integer.
        data: plain facts.
        retry_after_s: seconds after which the same call may succeed; None when waiting does not help.
    """

    wire_name: ClassVar[str] = ""

    def __init__(self, error: ErrorObject) -> None:
        super().__init__(error.message)
        self.name = error.name
        self.code = error.code
        self.data: Mapping[str, object] = error.data
        self.retry_after_s = error.retry_after_s


class RequestError(RemoteError):
    """The request is wrong; sending it again unchanged cannot help."""


class InvalidRequest(RequestError):
    """The request makes no sense in this state."""

    wire_name = "invalid_request"


class InvalidParams(RequestError):
    """A parameter is missing, of the wrong type or outside its range."""

    wire_name = "invalid_params"


class InvalidText(RequestError):
    """Text that UTF-8 cannot carry (lone surrogates)."""

    wire_name = "invalid_text"


class MethodNotFound(RequestError):
    """The daemon has no such method."""

    wire_name = "method_not_found"


class Unsupported(RequestError):
    """The daemon's model or backend cannot do this."""

    wire_name = "unsupported"


class AgentNotFound(RequestError):
    """No agent of that name in that namespace."""

    wire_name = "agent_not_found"


class AgentExists(RequestError):
    """An agent of that name exists already."""

    wire_name = "agent_exists"


class AgentBusy(RequestError):
    """The agent has a request in flight that the call would disturb."""

    wire_name = "agent_busy"


class NotResumable(RequestError):
    """A broken stream cannot go on where it broke: its prompt is not the one it began with."""

    wire_name = "not_resumable"


class ContextFull(RequestError):
    """Prompt and requested tokens exceed the model's context; `data` has the figures."""

    wire_name = "context_full"


class BudgetExceeded(RequestError):
    """The request can never fit the memory budget; `data` has the figures."""

    wire_name = "budget_exceeded"


class Cancelled(RemoteError):
    """The call was cancelled; what was computed is kept."""

    wire_name = "cancelled"


class ServiceError(RemoteError):
    """The machine or the daemon cannot do it now."""


class Busy(ServiceError):
    """A queue is full; try again after `retry_after_s`."""

    wire_name = "busy"


class Draining(ServiceError):
    """The daemon is going down and takes no new work."""

    wire_name = "draining"


class NotReady(ServiceError):
    """The daemon is starting."""

    wire_name = "not_ready"


class EnvironmentFault(ServiceError):
    """Disk, memory, device or another process refused."""

    wire_name = "environment"


class StorageError(ServiceError):
    """The data folder cannot be read or written."""

    wire_name = "storage_error"


class ModelError(ServiceError):
    """The model cannot be loaded or run."""

    wire_name = "model_error"


class ConfigError(ServiceError):
    """The daemon's configuration is wrong."""

    wire_name = "config_error"


class ConnectionFault(RemoteError):
    """The connection is of no further use."""


class ProtocolViolation(ConnectionFault):
    """One end broke the protocol."""

    wire_name = "protocol"


class SlowReader(ConnectionFault):
    """The daemon closed the connection because this end did not read its messages."""

    wire_name = "slow_reader"


class DaemonBug(RemoteError):
    """The daemon failed in a way it should not; its log has the details."""

    wire_name = "internal"


def _leaves(root: type[RemoteError]) -> Iterator[type[RemoteError]]:
    for sub in root.__subclasses__():
        if sub.wire_name:
            yield sub
        yield from _leaves(sub)


ERROR_CLASSES: Mapping[str, type[RemoteError]] = {leaf.wire_name: leaf for leaf in _leaves(RemoteError)}
"""Wire name -> exception class; has every name of `CODES`."""


def remote_error(error: ErrorObject) -> RemoteError:
    """The exception for an error of the wire."""
    return ERROR_CLASSES.get(error.name, RemoteError)(error)


def local_error(name: str, message: str) -> RemoteError:
    """The exception the daemon would have answered with, for what this end refuses to send or to accept."""
    return remote_error(ErrorObject(CODES[name], name, message))


def unreachable(socket: str, reason: str, command: str) -> DaemonUnreachable:
    """Nobody answered at `socket`."""
    text = f"no kvd daemon answers at {socket} ({reason}); start it with: {command}"
    return DaemonUnreachable(text, socket=socket, command=command)


def no_socket(path: str) -> DaemonUnreachable:
    """What is at `path` is no socket: no daemon can be there, nor be started there."""
    text = f"{path} is not a socket; give the daemon's with --socket, or its data folder with --data-dir"
    return DaemonUnreachable(text, socket=path, command="kvd serve")


CLOSED_HERE = "the client closed the connection"


def connection_lost(socket: str, reason: str, command: str) -> ConnectionLost:
    """The daemon at `socket` went away."""
    text = f"the kvd daemon at {socket} went away ({reason}); if it does not come back, start it with: {command}"
    return ConnectionLost(text, socket=socket, command=command)
