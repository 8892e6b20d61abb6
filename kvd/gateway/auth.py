"""Who may use the gateway: API keys from a private file, and the Host header against DNS rebinding.

Keys are compared in constant time, all of them, so that neither content nor number shows in how long a refusal takes.
A page of some web site that the user looks at could reach a loopback port: it does so under a name of its own, which
the Host header tells, so names that are not known are refused; IP addresses and `localhost` cannot be rebound. May
import kvd.gateway.errors.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from kvd.gateway.errors import ApiError, GatewayConfigError

MIN_KEY_CHARACTERS = 16
LOOK_S = 1.0
KEY_NAMESPACE_PREFIX = "key-"
"""And 16 hex digits: the namespace of a key that names none."""


class KeyFileError(GatewayConfigError):
    """The file of API keys cannot be used; the message says why and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message, setting="api-key-file")


@dataclass(frozen=True, slots=True)
class KeyRing:
    """API keys and their namespaces. Empty: nobody needs one.

    Attributes:
        digests: SHA-256 of a key -> its namespace.
    """

    digests: tuple[tuple[bytes, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.digests)

    def namespaces(self) -> frozenset[str]:
        """Namespaces of the keys."""
        return frozenset(namespace for _, namespace in self.digests)

    def namespace_of(self, key: str) -> str | None:
        """A key's namespace; None of a key that is not known."""
        given = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        found = None
        for digest, namespace in self.digests:  # to the end, always
            if hmac.compare_digest(given, digest):
                found = namespace
        return found


def read_key_file(path: Path) -> KeyRing:
    """Keys of a file: one a line, `KEY` or `KEY NAMESPACE`; empty lines and lines with `#` in front are skipped.

    A key without a namespace has one of its own, named after its digest: two people's keys share nothing unless the
    file says so.

    Raises:
        KeyFileError: absent, readable by others, a key that is short or that no header carries, no key, or a key that
            stands there twice.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise KeyFileError(f"{path} can be used by others (mode {mode:04o}): chmod 600 {path}")
            lines = file.read().splitlines()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise KeyFileError(f"{path} is no text: one key a line is wanted") from None
    found: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or len(words[0]) < MIN_KEY_CHARACTERS:
            raise KeyFileError(
                f"{path}, line {number}: KEY or KEY NAMESPACE is wanted, with a key of {MIN_KEY_CHARACTERS} "
                "characters or more"
            )
        if not (words[0].isascii() and words[0].isprintable()):
            raise KeyFileError(f"{path}, line {number}: a key has ASCII characters only: headers carry no others")
        digest = hashlib.sha256(words[0].encode()).digest()
        if digest in found:
            raise KeyFileError(f"{path}, line {number}: this key stands there twice")
        found[digest] = words[1] if len(words) == 2 else KEY_NAMESPACE_PREFIX + digest.hex()[:16]
    if not found:
        raise KeyFileError(f"{path} has no key: write one a line, for example from: openssl rand -hex 24")
    return KeyRing(tuple(found.items()))


class KeyLog(Protocol):
    """Where it is said that keys changed, or could not."""

    def info(self, event: str, **facts: object) -> object:
        """New keys are in force."""

    def error(self, event: str, **facts: object) -> object:
        """A changed file is no use."""


class KeyKeeper:
    """The keys in force: those of a file as it is now, looked at every `LOOK_S` at most. Owner: the event loop.

    A file that is changed to something that cannot be used, or taken away, leaves the keys as they were and is logged:
    nobody who may come in is locked out by a slip of an editor, and nobody else gets in by it.

    Args:
        ring: the keys at the start.
        path: their file; None: they never change.
        log: hears of changes.
        clock: monotonic seconds.
    """

    def __init__(self, ring: KeyRing, path: Path | None, log: KeyLog, clock: Callable[[], float]) -> None:
        self._ring = ring
        self._path = path
        self._log = log
        self._clock = clock
        self._looked_s = -math.inf
        self._seen: tuple[int, ...] | None = None

    @property
    def ring(self) -> KeyRing:
        """The keys in force now."""
        if self._path is not None and self._clock() - self._looked_s >= LOOK_S:
            self._looked_s = self._clock()
            self._look(self._path)
        return self._ring

    def _look(self, path: Path) -> None:
        before = _stamp(path)
        if before == self._seen:
            return
        if path.exists() and not path.is_file():  # opening a pipe would wait for whoever writes to it
            self._seen = before
            self._log.error("api_keys_kept", file=str(path), reason=f"{path} is no file", keys=len(self._ring.digests))
            return
        # seen is what was there before the reading: what is written meanwhile is read the next time
        self._seen = before
        try:
            found = read_key_file(path)
        except KeyFileError as error:
            self._log.error("api_keys_kept", file=str(path), reason=str(error), keys=len(self._ring.digests))
            return
        if found != self._ring:
            self._ring = found
            self._log.info("api_keys_changed", file=str(path), keys=len(found.digests))


def _stamp(path: Path) -> tuple[int, ...]:
    """What differs between two states of a file; empty where there is none."""
    try:
        facts = path.stat()
    except OSError:
        return ()
    return (facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size)


def check_key(keys: KeyRing, headers: Mapping[str, str], default_namespace: str) -> str:
    """The namespace of a request.

    Args:
        keys: those that are known.
        headers: by lower-case name.
        default_namespace: of everybody when there are no keys.

    Raises:
        ApiError: no key, or an unknown one.
    """
    if not keys:
        return default_namespace
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    key = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
    if not key:
        raise ApiError(
            "authentication",
            "no API key: send it as Authorization: Bearer KEY or x-api-key: KEY",
            code="missing_api_key",
        )
    namespace = keys.namespace_of(key)
    if namespace is None:
        raise ApiError("authentication", "incorrect API key; the keys that are known stand in the gateway's key file")
    return namespace


def check_host(host: str | None, allowed: frozenset[str]) -> None:
    """Refuse a Host header with a name that is not known.

    Raises:
        ApiError: it is absent or foreign.
    """
    name = host_name(host or "")
    if name == "localhost" or name in allowed or _is_address(name):
        return
    raise ApiError(
        "permission",
        f"the host {name[:80]!r} is not served here; IP addresses and localhost are, and names given with --allow-host",
        code="host_not_allowed",
    )


@lru_cache(maxsize=64)
def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


@lru_cache(maxsize=64)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


__all__ = ["LOOK_S", "KeyFileError", "KeyKeeper", "KeyRing", "check_host", "check_key", "read_key_file"]
