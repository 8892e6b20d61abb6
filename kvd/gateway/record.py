"""What one HTTP request was and how it ended: its canonical log line, its metrics and kvd's own response headers.

May import kvd_client and siblings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from kvd.gateway.errors import ApiError
from kvd_client import GenerateResult
from kvd_client.stream import Matched


@dataclass(slots=True)
class Record:
    """Owner: the request. Fields that do not apply stay empty and are left out of the line.

    Attributes:
        request_id: as the client is told.
        method, path: of HTTP.
        namespace: whose pages it may share.
        endpoint: the route's path, for metrics; `unknown` where there is none.
        identity: what named the agent (`kvd.gateway.identity.SOURCES`).
        agent: whose turn it was.
        stream: it wanted events.
        rules: canonicalisation rules that changed something.
        outcome: `ok`, `disconnected`, `cancelled` by a stop of the gateway, or the kind of the error.
        status: of HTTP; 499 where the client left before it was sent.
        ttft_s: from arrival to the first sampled token.
        total_s: from arrival to the end of the response, once it is over.
        result: the daemon's figures, once there are any.
        show_divergence: the client may see the stored text where its prompt parts from it.
    """

    request_id: str
    method: str
    path: str
    clock: Callable[[], float] = time.monotonic
    namespace: str = ""
    endpoint: str = "unknown"
    identity: str = ""
    agent: str = ""
    stream: bool | None = None
    rules: tuple[str, ...] = ()
    outcome: str = "ok"
    status: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0
    result: GenerateResult | None = None
    show_divergence: bool = False
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def first_token(self) -> None:
        """The first token was sampled."""
        if self.ttft_s is None:
            self.ttft_s = self.clock() - self.started_s

    def over(self) -> None:
        """The response is sent, or nobody waits for it any more."""
        self.total_s = self.clock() - self.started_s

    def finish(self, result: GenerateResult) -> None:
        """The turn ended well."""
        self.result = result

    def failed(self, error: ApiError) -> None:
        """It ended with an error."""
        self.outcome = error.kind

    def headers(self, matched: Matched | None) -> dict[str, str]:
        """kvd's own response headers, in ASCII: whose turn it is, and how its prompt matched."""
        found = {"x-kvd-agent": quote(self.agent, safe=":/#@ ,;"), "x-kvd-identity": self.identity}
        if self.rules:
            found["x-kvd-rules"] = ", ".join(self.rules)
        facts: Matched | GenerateResult | None = self.result or matched
        if facts is not None:
            found["x-kvd-match"] = facts.match
            found["x-kvd-match-reason"] = _ascii(facts.match_reason)
            found["x-kvd-prompt-tokens"] = str(facts.prompt_tokens)
            found["x-kvd-cached-tokens"] = str(facts.cached_tokens)
        if self.result is not None:
            found["x-kvd-durable"] = str(self.result.durable).lower()
            # of a stranger's text nothing is told, not even where it goes on
            divergence = self.result.server.get("divergence")
            if isinstance(divergence, dict) and self.identity != "anonymous":
                told = divergence if self.show_divergence else _positions(divergence)
                found["x-kvd-divergence"] = json.dumps(told, ensure_ascii=True, default=str)
        return {name: value for name, value in found.items() if value}

    def line(self) -> dict[str, object]:
        """The canonical log line: figures and names, never text."""
        facts: dict[str, object] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "outcome": self.outcome,
            "total_s": round(self.total_s, 6),
            "namespace": self.namespace,
            "identity": self.identity,
            "agent": self.agent,
            "stream": self.stream,
            "rules": ", ".join(self.rules),
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 6),
        }
        if self.result is not None:
            facts |= {
                name: getattr(self.result, name)
                for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "finish_reason", "match", "durable")
            }
        return {name: value for name, value in facts.items() if value not in (None, "")}


def _positions(divergence: Mapping[str, object]) -> dict[str, object]:
    """Where texts part, without a character of them: whoever knows an agent's name need not have written its text."""
    return {name: divergence[name] for name in ("byte", "character", "token") if name in divergence}


def _ascii(text: str) -> str:
    """Text as one header can carry it."""
    return " ".join(text.split()).encode("ascii", "backslashreplace").decode()


__all__ = ["Record"]
