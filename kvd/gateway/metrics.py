"""Figures for Prometheus: the gateway's own, counted per request, and the daemon's, asked for at each scrape.

Names are listed in docs/gateway.md. May import prometheus_client, kvd_client and siblings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvd.gateway.conversations import Conversations
from kvd.gateway.record import Record
from kvd_client import AsyncClient, KvdClientError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
LOOK_S = 2.0
"""How long a daemon is waited for by those who only look at it: scrapes and health checks."""
DAEMON_FIGURES = ("running", "queued", "preempted", "max_batch")
"""Of `health`; from `statistics` every number is told."""


class Metrics:
    """Owner: the event loop.

    Args:
        conversations: anonymous ones, which are counted.
        viewers: counts those of the page.
    """

    def __init__(self, conversations: Conversations, viewers: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter(
            "kvd_gateway_requests",
            "Requests by endpoint, status and outcome.",
            ("endpoint", "status", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "kvd_gateway_request_seconds",
            "From arrival to the last byte.",
            ("endpoint",),
            buckets=SECONDS,
            registry=registry,
        )
        self._ttft = Histogram(
            "kvd_gateway_first_token_seconds",
            "From arrival to the first sampled token.",
            ("endpoint",),
            buckets=SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "kvd_gateway_tokens",
            "Tokens by kind: prompt (cached ones included), cached, completion.",
            ("kind",),
            registry=registry,
        )
        self._identities = Counter(
            "kvd_gateway_identities", "Turns by what named the agent.", ("source",), registry=registry
        )
        self._rules = Counter(
            "kvd_gateway_rules", "Requests that a canonicalisation rule changed.", ("rule",), registry=registry
        )
        self._running = 0
        running = Gauge("kvd_gateway_running_requests", "Requests that are being answered.", registry=registry)
        running.set_function(lambda: self._running)
        self._up = Gauge("kvd_gateway_daemon_up", "1 if the daemon answered the scrape.", registry=registry)
        self._daemon = Gauge(
            "kvd_gateway_daemon", "Figures of the daemon, under its own names.", ("figure",), registry=registry
        )
        self._parts = Gauge(
            "kvd_gateway_daemon_part",
            "Figures of the daemon that have parts, such as pages by state.",
            ("figure", "part"),
            registry=registry,
        )
        anonymous = Gauge("kvd_gateway_anonymous_agents", "Agents of requests that named none.", registry=registry)
        anonymous.set_function(lambda: len(conversations))
        watching = Gauge("kvd_gateway_page_viewers", "Viewers of the page now.", registry=registry)
        watching.set_function(viewers)

    def begin(self) -> None:
        """A request came."""
        self._running += 1

    def over(self) -> None:
        """It is no longer being answered; `end` counts it, later perhaps."""
        self._running -= 1

    def end(self, record: Record) -> None:
        """Count a request that is over."""
        self._requests.labels(record.endpoint, str(record.status), record.outcome).inc()
        self._seconds.labels(record.endpoint).observe(record.total_s)
        if record.identity:
            self._identities.labels(record.identity).inc()
        for rule in record.rules:
            self._rules.labels(rule).inc()
        if record.ttft_s is not None:
            self._ttft.labels(record.endpoint).observe(record.ttft_s)
        if record.result is not None:
            self._tokens.labels("prompt").inc(record.result.prompt_tokens)
            self._tokens.labels("cached").inc(record.result.cached_tokens)
            self._tokens.labels("completion").inc(record.result.completion_tokens)

    async def scrape(self, client: AsyncClient) -> bytes:
        """All figures as text; without the daemon's when it does not answer."""
        try:
            async with asyncio.timeout(LOOK_S):
                health = (await client.health()).server
                figures: Mapping[str, object] = await client.call("statistics")
        except (KvdClientError, TimeoutError):
            self._up.set(0)
            self._daemon.clear()
            self._parts.clear()
        else:
            self._up.set(1)
            told = {name: health.get(name) for name in DAEMON_FIGURES} | dict(figures)
            for name, value in told.items():
                if isinstance(value, int | float):
                    self._daemon.labels(name).set(value)
                elif isinstance(value, Mapping):
                    for part, number in value.items():
                        if isinstance(number, int | float):  # figures of namespaces are maps: theirs alone
                            self._parts.labels(name, part).set(number)
        return generate_latest(self.registry)


__all__ = ["CONTENT_TYPE", "LOOK_S", "Metrics"]
