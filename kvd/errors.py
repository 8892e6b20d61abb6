"""The root of kvd's errors. One subtree a package; each leaf is one fault with its fields.

    KvdError
    ├── CallerError        the request is wrong; retrying it unchanged cannot help
    ├── EnvironmentFault   disk, memory, device, another process: may heal, may be retried
    ├── PeerError          the other end of a connection broke the protocol
    └── InternalError      our bug

Each class carries `name`, the stable word clients see (`kvd.front` maps names to wire codes one to one), `data`,
plain facts for programs, and `retry_after_s` when waiting can help. The message is for people: it names the allowed
values and what to do. May import nothing from kvd.
"""

from __future__ import annotations

from typing import ClassVar


class KvdError(Exception):
    """Base of every error kvd raises on purpose.

    Args:
        message: what went wrong and what to do, one sentence each.
        data: plain msgpack-able facts (figures with their unit in the key).
        retry_after_s: seconds after which the same call may succeed; None when waiting does not help.
    """

    name: ClassVar[str] = "internal"

    def __init__(self, message: str, *, retry_after_s: float | None = None, **data: object) -> None:
        super().__init__(message)
        self.message = message
        self.data: dict[str, object] = data
        self.retry_after_s = retry_after_s


class CallerError(KvdError):
    """The request is wrong."""

    name = "invalid_request"


class EnvironmentFault(KvdError):
    """The machine refused: disk, memory, device, another process."""

    name = "environment"


class PeerError(KvdError):
    """The other end of a connection broke the protocol."""

    name = "protocol"


class InternalError(KvdError):
    """Our bug. State is checked and kept; please report it."""

    name = "internal"


class InvalidParams(CallerError):
    """A parameter is missing, of the wrong type or outside its range."""

    name = "invalid_params"


class InvalidText(CallerError):
    """Text that cannot be encoded as UTF-8 (lone surrogates)."""

    name = "invalid_text"


class AgentNotFound(CallerError):
    """No agent of that name in that namespace."""

    name = "agent_not_found"


class AgentExists(CallerError):
    """An agent of that name exists already."""

    name = "agent_exists"


class AgentBusy(CallerError):
    """The agent has a queued or running request that the call would disturb."""

    name = "agent_busy"


class ContextFull(CallerError):
    """The prompt and the tokens asked for exceed the model's context; `data` has both figures."""

    name = "context_full"


class BudgetExceeded(CallerError):
    """The request can never fit the budget; `data` has both figures."""

    name = "budget_exceeded"


class Cancelled(KvdError):
    """The client cancelled the request; KV that was computed is kept and committed."""

    name = "cancelled"


class Busy(EnvironmentFault):
    """The queue is full; retry after `retry_after_s`."""

    name = "busy"


class Draining(EnvironmentFault):
    """The daemon is going down and takes no new work."""

    name = "draining"
