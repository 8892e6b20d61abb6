"""The network guard: sockets that refuse to leave this machine. A look-up by name is refused like a connection."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Any


def refuse_foreign(family: int, address: object) -> None:
    """Raise PermissionError unless an address is on this machine."""
    if family not in (socket.AF_INET, socket.AF_INET6) or not isinstance(address, tuple):
        return
    host = str(address[0]).partition("%")[0]
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        raise PermissionError(f"tests may not open a connection to {host}")


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, a socket's method whose last argument is an address, behind the guard."""

    def method(self: socket.socket, *arguments: Any) -> Any:
        refuse_foreign(self.family, arguments[-1])
        return original(self, *arguments)

    return method


GUARDED_METHODS = {name: _guarded(getattr(socket.socket, name)) for name in ("connect", "connect_ex", "sendto")}
"""Replacements for `socket.socket`'s methods."""
