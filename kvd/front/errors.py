"""Errors of the front.

CallerError
├── MethodNotFound     the service has no such method
└── SocketRefused      the socket path cannot be used; `data` has the path and the limit it breaks
EnvironmentFault
└── SocketInUse        another daemon answers at the socket path
PeerError
├── PeerRefused        the peer is another user, or the platform does not tell who it is
└── SlowReader         the peer does not read what it asked for
"""

from __future__ import annotations

from kvd.errors import CallerError, EnvironmentFault, PeerError


class MethodNotFound(CallerError):
    """No method of that name."""

    name = "method_not_found"


class SocketRefused(CallerError):
    """The socket path is too long, in an open folder, or is something else than a socket. Nothing was changed."""

    name = "config_error"


class SocketInUse(EnvironmentFault):
    """A daemon answers at the socket path already. Nothing was changed."""


class PeerRefused(PeerError):
    """The connection was closed before a byte was read."""


class SlowReader(PeerError):
    """The peer's unread messages exceed the bound; the connection is closed and its calls are cancelled."""

    name = "slow_reader"
