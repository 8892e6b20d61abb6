"""The gateway's part of `kvd bench rpc`: what it adds to the time to the first text.

Theory of operation. The same short chat, whose prompt is cached, goes to the daemon through `kvd_client` and through a
gateway of its own, over a bare HTTP connection that is kept; in pairs, whose order alternates, each way with an agent
of its own that has seen the same. What is measured is the time from the call to its first text; what is told is the
median of the pairs' differences. The direct call is timed as users of `kvd_client` have it, which takes some 0.3 ms
before it sends, the other from the first byte of a request that was made before. The smaller the model, the less its
own time scatters: the figure is the gateway's, whatever the model.

May import kvd.bench, kvd.errors and kvd_client.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvd.bench.rpc_peers import READ_BYTES
from kvd.errors import EnvironmentFault
from kvd_client import Client
from kvd_client.stream import Text

BAR_MS = 2.0
"""Most that the gateway may add."""

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Say a few words about the weather of today."}]
OPTIONS: Mapping[str, Any] = {"max_tokens": 8, "temperature": 0.0}
CALL_S = 60.0
OK = b"HTTP/1.1 200 "
CONTENT = b'"content":"'
LAST_CHUNK = b"\r\n0\r\n\r\n"
"""Of a body in chunks."""


@dataclass(frozen=True, slots=True)
class GatewayTtft:
    """Medians over all pairs, milliseconds to the first text.

    Attributes:
        direct_ms: through `kvd_client`.
        gateway_ms: through the gateway.
        added_ms: of the differences in each pair.
    """

    direct_ms: float
    gateway_ms: float
    added_ms: float


@contextmanager
def serving_gateway(daemon: Path) -> Iterator[tuple[str, int]]:
    """A gateway in front of the daemon; host and port.

    Raises:
        EnvironmentFault: it did not start.
    """
    command = [sys.executable, "-m", "kvd", "gateway", "--socket", str(daemon), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise EnvironmentFault(f"the gateway did not start (code {process.wait()})")
        url = urlsplit(str(json.loads(line)["url"]))
        yield str(url.hostname), int(url.port or 0)
    finally:
        process.kill()
        process.communicate()


def _direct_ms(client: Client) -> float:
    began_s = time.perf_counter()
    first_s = None
    with client.chat_stream("ttft-direct", MESSAGES, **OPTIONS) as stream:
        for event in stream:
            if first_s is None and isinstance(event, Text):
                first_s = time.perf_counter()
    return _since(began_s, first_s)


class _Http:
    """A connection to the gateway, as thin as can be: what is measured is the gateway, not a library for HTTP.

    Args:
        host, port: where it listens.
        model: its name there.
    """

    def __init__(self, host: str, port: int, model: str) -> None:
        body = json.dumps({"model": model, "messages": MESSAGES, "stream": True, **OPTIONS}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
            f"x-kvd-agent: ttft-gateway\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._socket = socket.create_connection((host, port), timeout=CALL_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ttft_ms(self) -> float:
        """One call: milliseconds from sending it to its first text.

        Raises:
            EnvironmentFault: the gateway refuses, or ends the connection.
        """
        began_s = time.perf_counter()
        first_s = None
        self._socket.sendall(self._request)
        seen = b""
        while not seen.endswith(LAST_CHUNK):
            data = self._socket.recv(READ_BYTES)
            seen += data
            if first_s is None and _has_text(seen):
                first_s = time.perf_counter()
            if not data or not seen.startswith(OK[: len(seen)]):
                raise EnvironmentFault(f"the gateway answers {seen[:400]!r}")
        return _since(began_s, first_s)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _has_text(seen: bytes) -> bool:
    """Whether the last chunk with a content has text in it; that of the first is empty."""
    at = seen.rfind(CONTENT)
    return at >= 0 and seen[at + len(CONTENT) :][:1] not in (b"", b'"')


def _since(began_s: float, first_s: float | None) -> float:
    if first_s is None:
        raise EnvironmentFault("the model said nothing to time; take another one")
    return (first_s - began_s) * 1e3


def gateway_ttft(daemon: Path, pairs: int) -> GatewayTtft:
    """Measure.

    Args:
        daemon: socket of a running one.
        pairs: calls each way.

    Raises:
        EnvironmentFault: the gateway does not start, or the model says nothing.
    """
    direct, gateway = list[float](), list[float]()
    with (
        serving_gateway(daemon) as (host, port),
        Client(daemon, timeout_s=CALL_S, resume_s=0.0) as client,
        closing(_Http(host, port, str(client.model_info().get("model")))) as http,
    ):
        for number in range(pairs + 2):
            for way in ("direct", "gateway") if number % 2 else ("gateway", "direct"):
                took_ms = _direct_ms(client) if way == "direct" else http.ttft_ms()
                if number >= 2:  # the first ones compute the prompt and warm up
                    (direct if way == "direct" else gateway).append(took_ms)
    added = [theirs - ours for ours, theirs in zip(direct, gateway, strict=True)]
    return GatewayTtft(
        round(statistics.median(direct), 3), round(statistics.median(gateway), 3), round(statistics.median(added), 3)
    )


__all__ = ["BAR_MS", "GatewayTtft", "gateway_ttft", "serving_gateway"]
