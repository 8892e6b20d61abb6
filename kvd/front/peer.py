"""Who is at the other end of a Unix socket, as the kernel tells: Linux SO_PEERCRED, macOS and BSD LOCAL_PEERCRED."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

from kvd.front.errors import PeerRefused

# <sys/un.h> of macOS; Python's socket module does not name all of them in every version.
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
_LOCAL_PEERPID = 2
_XUCRED = struct.Struct("=IIh2x16I")  # cr_version, cr_uid, cr_ngroups, (padding), cr_groups
_UCRED = struct.Struct("=iII")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """User id of the peer at the time it connected, and its process id where the platform tells."""

    uid: int
    pid: int | None


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Ask the kernel.

    Raises:
        PeerRefused: the platform does not tell; such a peer is not to be served.
    """
    try:
        if sys.platform == "linux":
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, uid, _gid = _UCRED.unpack(raw)
            return PeerCredentials(uid, pid or None)
        raw = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
        uid = parse_xucred(raw)
        pid_of_peer: int | None = None
        if sys.platform == "darwin":
            with suppress(OSError):  # the peer may be gone already; its user id was still told
                pid_of_peer = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
        return PeerCredentials(uid, pid_of_peer)
    except (OSError, struct.error) as error:
        raise PeerRefused(f"the platform does not tell who connected: {error}") from error


def parse_xucred(raw: bytes) -> int:
    """The user id in a `struct xucred` (macOS, BSD).

    Raises:
        struct.error: too short for its header.
    """
    _version, uid = struct.unpack_from("=II", raw)
    return int(uid)
