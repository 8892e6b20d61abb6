"""The thin client of the kvd daemon: speaks its Unix-socket protocol, needs msgpack (and click for the commands).

- `client`, `async_client`: `Client` and `AsyncClient`, one method for each method of the daemon.
- `calls`: the methods as values, shared by both clients, no I/O.
- `transport`, `async_transport`: one connection each, used by any number of calls at a time.
- `subscription`, `async_subscription`, `events`: the daemon's events as an iterator, with a connection of its own.
- `monitor`: all agents and pages, put together from answers that tell what changed.
- `results`, `stream`, `logprobs`: typed results and stream events, and what both say of tokens' probabilities.
- `resume`: what a stream has told, and how it goes on when its connection breaks, no I/O.
- `errors`: one exception class for each error of the protocol, and those of this end.
- `paths`, `config_file`: where daemon and client look for the data folder and the socket, and the file that says so.
- `wire`: the protocol without I/O, used by the daemon too.
- `residency`: page maps as pictures, one mark a page.
- `top`: what `kvd-client top` does; `top_view` what it shows, `top_rates` what goes on per second, `top_screen` the
  terminal; `event_text`: events as lines.
- `cli`, `cli_text`, `cli_agents`, `cli_watch`, `cli_common`: the `kvd-client` commands; `cli_show`: what they print for
  people; `cli_wait`: what they say while nothing has come yet; `cli_words`: the daemon's refusals in their words;
  `cli_lazy`: groups that import their commands on use; `cli_completion`: completion in shells.

May import msgpack, click (the commands only) and the standard library; never kvd, mlx or numpy. Importing the package
loads none of its modules: each public name comes when it is first asked for, `AsyncClient` with asyncio alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvd_client.async_client import AsyncClient, AsyncGenerateStream
    from kvd_client.async_subscription import AsyncSubscription
    from kvd_client.client import Client, GenerateStream
    from kvd_client.errors import (
        CallTimeout,
        Cancelled,
        ConnectionLost,
        DaemonUnreachable,
        KvdClientError,
        RemoteError,
    )
    from kvd_client.events import DaemonEvent
    from kvd_client.monitor import MonitorPicture
    from kvd_client.results import AgentInfo, ExportResult, GenerateResult, Health, InjectResult, Limits, Statistics
    from kvd_client.subscription import Subscription

__all__ = [
    "AgentInfo",
    "AsyncClient",
    "AsyncGenerateStream",
    "AsyncSubscription",
    "CallTimeout",
    "Cancelled",
    "Client",
    "ConnectionLost",
    "DaemonEvent",
    "DaemonUnreachable",
    "ExportResult",
    "GenerateResult",
    "GenerateStream",
    "Health",
    "InjectResult",
    "KvdClientError",
    "Limits",
    "MonitorPicture",
    "RemoteError",
    "Statistics",
    "Subscription",
]

__version__ = "0.1.0"


_HOMES: Final = {
    "async_client": "AsyncClient AsyncGenerateStream",
    "async_subscription": "AsyncSubscription",
    "client": "Client GenerateStream",
    "errors": "CallTimeout Cancelled ConnectionLost DaemonUnreachable KvdClientError RemoteError",
    "events": "DaemonEvent",
    "monitor": "MonitorPicture",
    "results": "AgentInfo ExportResult GenerateResult Health InjectResult Limits Statistics",
    "subscription": "Subscription",
}
"""The module of each public name."""


def __getattr__(name: str) -> object:
    if name in __all__:
        import importlib

        home = next(module for module, names in _HOMES.items() if name in names.split())
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
