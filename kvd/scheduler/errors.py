"""Errors of the service: what is asked for does not exist, is not there yet, or cannot be done.

CallerError
├── MethodNotFound
└── Unsupported
EnvironmentFault
└── NotReady
InternalError
└── NonFiniteLogits
"""

from __future__ import annotations

from kvd.errors import CallerError, EnvironmentFault, InternalError


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
