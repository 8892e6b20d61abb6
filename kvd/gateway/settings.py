"""What `kvd gateway` can be told: validated once, here; frozen ever after. May import siblings."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvd.gateway.auth import KeyRing
from kvd.gateway.canonical import chosen_rules
from kvd.gateway.errors import GatewayConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8787
DEFAULT_MAX_BODY_BYTES = 8 * 2**20
LARGEST_BODY_BYTES = 15 * 2**20
"""The daemon accepts messages of 16 MiB; text and field names around a body fit into the rest."""
MAX_HELD_BYTES = 96 * 2**20
"""Bodies of all requests together: in the daemon's form, where a number may take twice its text, they stay below the
256 MiB that it holds for all connections."""
BODY_S = 60.0
DEFAULT_MAX_TOKENS = 4096
DEFAULT_ANONYMOUS_TTL_S = 86_400.0
DEFAULT_GROUP_TTL_S = 30 * 86_400.0
LONGEST_TTL_S = 10 * 366 * 86_400.0
"""The daemon's own."""
DEFAULT_PING_S = 15.0
MAX_ANONYMOUS = 1000
PAGES = ("own", "all", "off")
"""The page shows agents of the key's namespace (without keys: of the gateway's), those of all, or is not served."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Everything the gateway can be told.

    Attributes:
        socket: the daemon's socket.
        host, port: where to listen; port 0 takes a free one.
        keys: API keys; none lets every user of this machine in.
        key_file: where they are from, read again when it changes.
        allowed_hosts: names that a Host header may have besides IP addresses and `localhost`.
        namespace: of all requests when there are no keys.
        aliases: names (with `*`) under which the loaded model is served, too.
        rules: names of the canonicalisation rules in force.
        max_body_bytes: of a request.
        max_held_bytes: of the bodies of all requests together that are being answered.
        body_s: a request's body is there in so long.
        default_max_tokens: for requests that say none.
        anonymous_ttl_s: anonymous agents expire so long after their last use.
        max_anonymous: anonymous agents kept.
        group_ttl_s: agents of sessions, users and other groups expire so long after their last use.
        show_divergence: tell the text, not only the place, where a prompt and an agent's stored text part.
        page: whose agents the page at `/` shows (`PAGES`).
        ping_s: a stream that has nothing to say says so this often.
    """

    socket: Path
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    keys: KeyRing = KeyRing()  # noqa: RUF009  (frozen)
    key_file: Path | None = None
    allowed_hosts: frozenset[str] = frozenset()
    namespace: str = "default"
    aliases: tuple[str, ...] = ()
    rules: frozenset[str] = chosen_rules()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_held_bytes: int = MAX_HELD_BYTES
    body_s: float = BODY_S
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    anonymous_ttl_s: float = DEFAULT_ANONYMOUS_TTL_S
    max_anonymous: int = MAX_ANONYMOUS
    group_ttl_s: float = DEFAULT_GROUP_TTL_S
    show_divergence: bool = False
    page: str = "own"
    ping_s: float = DEFAULT_PING_S

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.keys:
            raise GatewayConfigError(
                f"{self.host} is not a loopback address: other machines could use the model; "
                "give --api-key-file, or listen on 127.0.0.1",
                setting="listen",
            )
        if self.page not in PAGES:
            raise GatewayConfigError(f"page must be one of {', '.join(PAGES)}, not {self.page!r}", setting="page")
        if self.page == "all" and self.keys:
            raise GatewayConfigError(
                "page all needs a gateway without keys: with keys each sees its own namespace", setting="page"
            )
        _within("port", self.port, 0, 65535)
        _within("max-body", self.max_body_bytes, 1024, LARGEST_BODY_BYTES)
        _within("default-max-tokens", self.default_max_tokens, 1, 1_000_000)
        _within("max-anonymous", self.max_anonymous, 1, 1_000_000)
        for name, value, most in (
            ("anonymous-ttl", self.anonymous_ttl_s, LONGEST_TTL_S),
            ("group-ttl", self.group_ttl_s, LONGEST_TTL_S),
            ("ping", self.ping_s, math.inf),
        ):
            if not 0 < value <= most:
                at_most = f" and at most {most:.0f}" if most < math.inf else ""
                raise GatewayConfigError(f"{name} must be above 0 seconds{at_most}, not {value:g}", setting=name)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[::1]:PORT` or a port alone.

    Raises:
        GatewayConfigError: it is none of them.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise GatewayConfigError(f"an address is HOST:PORT with a port from 0 to 65535, not {text!r}", setting="listen")
    return host.strip("[]") or DEFAULT_HOST, int(port)


def host_names(names: Iterable[str]) -> frozenset[str]:
    """Host names as they are compared."""
    return frozenset(name.strip().lower().rstrip(".") for name in names)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise GatewayConfigError(
            f"{name} must be from {low} to {high}, not {value}", setting="listen" if name == "port" else name
        )


__all__ = ["PAGES", "GatewaySettings", "host_names", "is_loopback", "parse_address"]
