"""The HTTP gateway: OpenAI's and Anthropic's APIs in front of a kvd daemon. A process of its own that only translates.

It speaks to the daemon through `kvd_client` alone and holds no attention state: a crash here costs no cache.

- `app`: routes; `around`: host check, keys, errors, one log line a request; `bodies`: what requests may hold;
  `serve`: listening; `connections` with `swift`: HTTP, and clients that are slow.
- `turns`: one request's turn in the daemon; `streams`: its events, pings, clients that leave; `answers`: a finished
  turn; `backend`: the daemon.
- `openai_chat`, `openai_completions`, `openai_responses` with `responses_stream`, `anthropic_messages`: the dialects;
  `openai_params`: what OpenAI's have in common; `sse`: events and JSON as bytes.
- `identity`: whose address space a request continues. `conversations`: those of requests that name nobody.
- `canonical`: volatile spans that are removed before anything is matched.
- `fields`: reading JSON with errors that name what is allowed. `errors`: faults in both dialects.
- `page`: the page at `/`, its files in `static`; `monitor`: what its viewers are shown, in versions; `watch` keeps that
  true.
- `auth`: API keys and the Host header. `settings`: what `kvd gateway` can be told.
- `record`: what a request was, for its log line; `metrics`: figures for Prometheus.

May import kvd_client, kvd.ops.loops, starlette, uvicorn, h11 and prometheus_client.
"""

from __future__ import annotations

from kvd.gateway.auth import KeyFileError, KeyRing, read_key_file
from kvd.gateway.canonical import RULES, chosen_rules
from kvd.gateway.errors import CannotListen, GatewayConfigError
from kvd.gateway.settings import GatewaySettings, parse_address

__all__ = [
    "RULES",
    "CannotListen",
    "GatewayConfigError",
    "GatewaySettings",
    "KeyFileError",
    "KeyRing",
    "chosen_rules",
    "parse_address",
    "read_key_file",
]
