"""Errors of the service: what is asked for does not exist, is not there yet, or cannot be done.

CallerError
├── MethodNotFound
├── NotResumable
└── Unsupported
EnvironmentFault
├── Busy
│   └── MemoryPressure    the process takes more of the machine's memory than it may
├── NotDeleted
└── NotReady
InternalError
└── NonFiniteLogits
BaseException
└── EngineBroken    nobody may handle it but the engine's loop
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import islice

from kvd.errors import AgentNotFound, Busy, CallerError, EnvironmentFault, InternalError

MAX_CLOSE_NAMES = 3
MAX_COMPARED_NAMES = 200
"""Two long names take a millisecond to compare; among more names nobody is helped by three."""


class EngineBroken(BaseException):
    """Books and memory do not agree any more: an instruction was lost half way, or a page table move was illegal.

    Not an Exception, so that no request can take it for its own fault and go on.
    """


class MemoryPressure(Busy):
    """The process takes more of the machine's memory than it may; what runs goes on, what is new comes again later."""

    name = "memory_pressure"


class MethodNotFound(CallerError):
    """No such method."""

    name = "method_not_found"


class NonFiniteLogits(InternalError):
    """Nothing can be sampled from the logits: NaN, plus infinity, or every token masked."""


class NotDeleted(EnvironmentFault):
    """The disk refused to let go of an agent's log; the agent is still there, and the call may be tried again."""

    name = "not_deleted"


class NotResumable(CallerError):
    """A broken stream cannot go on: its prompt is not the one it began with."""

    name = "not_resumable"


class NotReady(EnvironmentFault):
    """The model is still loading."""

    name = "not_ready"


class Unsupported(CallerError):
    """Asked for something this model or this version cannot do."""

    name = "unsupported"


def with_close_names(error: AgentNotFound, asked: str, names: Sequence[str]) -> AgentNotFound:
    """The same error with up to three of `names` that resemble what was asked for, as `did_you_mean`.

    Takes up to a fifth of a second: not for the event loop. Names beyond `MAX_COMPARED_NAMES` are not looked at.
    """
    close = get_close_matches(asked, islice(names, MAX_COMPARED_NAMES), n=MAX_CLOSE_NAMES)
    if not close:
        return error
    meant = ", ".join(repr(name) for name in close)
    found = AgentNotFound(f"{error.message}; did you mean {meant}?", did_you_mean=close)
    found.data.update(error.data)
    return found
