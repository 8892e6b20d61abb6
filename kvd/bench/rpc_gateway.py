"""The gateway's part of `kvd bench rpc`: what it adds to the time to the first text.

Theory of operation. The same short chat, whose prompt is cached, goes to the daemon through `kvd_client` and through a
gateway of its own, over a plain HTTP connection that is kept; in pairs, whose order alternates, each way with an agent
of its own that has seen the same. What is measured is the time from the call to its first text; what is told is the
median of the pairs' differences. The smaller the model, the less its own time scatters: the figure is the gateway's,
whatever the model.

May import kvd.bench, kvd.errors and kvd_client.
"""

from __future__ import annotations

import http.client
import json
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

from kvd.errors import EnvironmentFault
from kvd_client import Client
from kvd_client.stream import Text

BAR_MS = 2.0
"""Most that the gateway may add."""

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Say a few words about the weather of today."}]
OPTIONS: Mapping[str, Any] = {"max_tokens": 8, "temperature": 0.0}
CALL_S = 60.0


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
def serving_gateway(socket: Path) -> Iterator[tuple[str, int]]:
    """A gateway in front of the daemon; host and port.

    Raises:
        EnvironmentFault: it did not start.
    """
    command = [sys.executable, "-m", "kvd", "gateway", "--socket", str(socket), "--listen", "127.0.0.1:0"]
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


def _gateway_ms(connection: http.client.HTTPConnection, model: str) -> float:
    body = json.dumps({"model": model, "messages": MESSAGES, "stream": True, **OPTIONS})
    headers = {"content-type": "application/json", "x-kvd-agent": "ttft-gateway"}
    began_s = time.perf_counter()
    first_s = None
    connection.request("POST", "/v1/chat/completions", body, headers)
    with connection.getresponse() as response:
        if response.status != 200:
            raise EnvironmentFault(f"the gateway answers {response.status}: {response.read(400)!r}")
        for line in response:
            if first_s is None and line.startswith(b"data: {") and _has_text(line):
                first_s = time.perf_counter()
    return _since(began_s, first_s)


def _has_text(line: bytes) -> bool:
    choices = json.loads(line.removeprefix(b"data: ")).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content"))


def _since(began_s: float, first_s: float | None) -> float:
    if first_s is None:
        raise EnvironmentFault("the model said nothing to time; take another one")
    return (first_s - began_s) * 1e3


def gateway_ttft(socket: Path, pairs: int) -> GatewayTtft:
    """Measure.

    Args:
        socket: of a running daemon.
        pairs: calls each way.

    Raises:
        EnvironmentFault: the gateway does not start, or the model says nothing.
    """
    direct, gateway = list[float](), list[float]()
    with (
        serving_gateway(socket) as (host, port),
        Client(socket, timeout_s=CALL_S, resume_s=0.0) as client,
        closing(http.client.HTTPConnection(host, port, timeout=CALL_S)) as connection,
    ):
        model = str(client.model_info().get("model"))
        for number in range(pairs + 2):
            for way in ("direct", "gateway") if number % 2 else ("gateway", "direct"):
                took_ms = _direct_ms(client) if way == "direct" else _gateway_ms(connection, model)
                if number >= 2:  # the first ones compute the prompt and warm up
                    (direct if way == "direct" else gateway).append(took_ms)
    added = [theirs - ours for ours, theirs in zip(direct, gateway, strict=True)]
    return GatewayTtft(
        round(statistics.median(direct), 3), round(statistics.median(gateway), 3), round(statistics.median(added), 3)
    )


__all__ = ["BAR_MS", "GatewayTtft", "gateway_ttft", "serving_gateway"]
