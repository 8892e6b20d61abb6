"""The RPC server: Unix socket, sessions, cancellation and back-pressure. Knows nothing of models; the service does.

- `api`: what the server asks of the daemon (`Service`) and what a call may do (`CallContext`).
- `errors`: what can go wrong with a socket or a peer.
- `limits`: every bound of the server in one frozen value.
- `listen`: makes the socket: mode 0600 in a folder of mode 0700, stale ones replaced, live ones refused.
- `outbox`: one connection's messages that wait for its reader, bounded, text coalesced.
- `peer`: who is at the other end, as the kernel tells.
- `server`: `RpcServer`, the listening socket and its sessions.
- `session`: one connection and its calls in flight.
- `wire_errors`: kvd's exceptions as errors of the wire.

May import kvd.errors, kvd_client.wire, kvd_client.paths and structlog; never mlx, never another package of kvd.
"""

from kvd.front.api import CallContext, PeerInfo, Service
from kvd.front.errors import MethodNotFound, PeerRefused, SlowReader, SocketInUse, SocketRefused
from kvd.front.limits import FrontLimits
from kvd.front.peer import PeerCredentials, peer_credentials
from kvd.front.server import FrontStatistics, RpcServer
from kvd.front.wire_errors import to_error_object

__all__ = [
    "CallContext",
    "FrontLimits",
    "FrontStatistics",
    "MethodNotFound",
    "PeerCredentials",
    "PeerInfo",
    "PeerRefused",
    "RpcServer",
    "Service",
    "SlowReader",
    "SocketInUse",
    "SocketRefused",
    "peer_credentials",
    "to_error_object",
]
