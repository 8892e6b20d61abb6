"""Errors of kvd.ops.

CallerError
└── InvalidParams
    └── InvalidSize        a text that is no size
EnvironmentFault
├── InheritedSocketUnusable    systemd or launchd handed over something that is no listening Unix socket
└── ServiceRefused             systemd or launchd does not answer or refuses, or a service file is somebody else's
"""

from __future__ import annotations

from kvd.errors import EnvironmentFault, InvalidParams

__all__ = ["InheritedSocketUnusable", "InvalidSize", "ServiceRefused"]


class InvalidSize(InvalidParams):
    """A text that is no size; the message lists the forms that are."""


class InheritedSocketUnusable(EnvironmentFault):
    """The service manager handed over a descriptor that is no listening Unix stream socket."""


class ServiceRefused(EnvironmentFault):
    """The service manager does not answer or refuses, or a file in the service's place is somebody else's."""
