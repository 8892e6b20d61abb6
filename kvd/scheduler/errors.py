"""Errors of the service: what is asked for does not exist, is not there yet, or cannot be done.

CallerError
├── MethodNotFound
└── Unsupported
EnvironmentFault
└── NotReady
InternalError
└── NonFiniteLogits
BaseException
└── EngineBroken    nobody may handle it but the engine's loop
"""

from __future__ import annotations

from kvd.errors import CallerError, EnvironmentFault, InternalError


class EngineBroken(BaseException):
    """Books and memory do not agree any more: an instruction was lost half way, or a page table move was illegal.

    Not an Exception, so that no request can take it for its own fault and go on.
    """


class MethodNotFound(CallerError):
    """No such method."""

    name = "method_not_found"


class NonFiniteLogits(InternalError):
    """Nothing can be sampled from the logits: NaN, plus infinity, or every token masked."""


class NotReady(EnvironmentFault):
    """The model is still loading."""

    name = "not_ready"


class Unsupported(CallerError):
    """Asked for something this model or this version cannot do."""

    name = "unsupported"
