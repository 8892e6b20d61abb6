"""Errors of kvd.ops.

CallerError
└── InvalidParams
    └── InvalidSize        a text that is no size
EnvironmentFault
└── InheritedSocketUnusable    systemd or launchd handed over something that is no listening Unix socket
"""

from __future__ import annotations

from kvd.errors import EnvironmentFault, InvalidParams

__all__ = ["InheritedSocketUnusable", "InvalidSize"]


class InvalidSize(InvalidParams):
    """A text that is no size; the message lists the forms that are."""


class InheritedSocketUnusable(EnvironmentFault):
    """The service manager handed over a descriptor that is no listening Unix stream socket."""
