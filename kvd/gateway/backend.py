"""The gateway's connection to the daemon: one client for all requests, and what is known of the loaded model.

The daemon may be restarted, with another model too, while the gateway runs: facts are asked for again after
`FACTS_S`, and a call that finds nobody says so. May import kvd_client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvd.gateway.errors import ApiError
from kvd_client import AsyncClient, RemoteError
from kvd_client.errors import AgentNotFound

FACTS_S = 5.0
"""How long facts of the model are believed: a request costs no second call, and a changed model is seen soon."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The loaded model.

    Attributes:
        name: its id here.
        context_tokens: the longest prompt and answer together.
        shares: agents of a namespace share pages (`--sharing namespace`).
    """

    name: str
    context_tokens: int
    shares: bool


def daemon_client(socket: Path) -> AsyncClient:
    """The gateway's way to the daemon.

    A stream whose daemon goes away ends with an error that the client's SDK knows what to do with: to wait here for
    another daemon would be silence, and what resuming takes (ids of all tokens) a message more before each first text.
    """
    return AsyncClient(socket, resume_s=0.0)


class Backend:
    """Owner: the event loop.

    Args:
        client: to the daemon.
        aliases: further names of the model, with `*`.
        clock: monotonic seconds.
    """

    def __init__(
        self, client: AsyncClient, aliases: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.client = client
        self._aliases = tuple(aliases)
        self._clock = clock
        self._facts: ModelFacts | None = None
        self._asked_s = 0.0

    async def model(self) -> ModelFacts:
        """The loaded model; waits for a daemon that is loading it.

        Raises:
            KvdClientError: nobody answers, or not in time.
        """
        if self._facts is None or self._clock() - self._asked_s >= FACTS_S:
            self._facts = _facts(await self.client.model_info())
            self._asked_s = self._clock()
        return self._facts

    def served_as_known(self, name: str) -> ModelFacts | None:
        """The model that a request asks for, where that takes no question; None: ask `served`.

        Raises:
            ApiError: as `served`.
        """
        if self._facts is None or self._clock() - self._asked_s >= FACTS_S:
            return None
        return self._checked(name, self._facts)

    async def served(self, name: str) -> ModelFacts:
        """The model that a request asks for.

        Raises:
            ApiError: it is another one than the daemon has loaded.
        """
        return self._checked(name, await self.model())

    def _checked(self, name: str, facts: ModelFacts) -> ModelFacts:
        if name != facts.name and not any(fnmatchcase(name, alias) for alias in self._aliases):
            raise ApiError(
                "model_not_found",
                f"the model {name[:80]!r} does not exist here: {facts.name} is loaded; kvd gateway --alias lets other "
                "names mean it",
                param="model",
            )
        return facts

    async def deleted(self, namespace: str, agent: str) -> bool:
        """Delete an agent; False where the daemon refuses for now (a turn of it runs): it is to be tried again.

        Raises:
            DaemonUnreachable, ConnectionLost: nobody answers.
        """
        try:
            await self.client.delete(agent, namespace=namespace)
        except AgentNotFound:
            return True
        except RemoteError:
            return False
        return True


def _facts(info: Mapping[str, Any]) -> ModelFacts:
    name, context = info.get("model") or info.get("name"), info.get("context_tokens")
    return ModelFacts(
        str(name or "unknown"), context if isinstance(context, int) else 0, info.get("sharing") != "agent"
    )


__all__ = ["Backend", "ModelFacts", "daemon_client"]
