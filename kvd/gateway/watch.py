"""Keeps a `Monitor` true while somebody looks: one subscription to the daemon's events, and its `monitor` asked again.

It begins with the first viewer and ends `LINGER_S` after the last one, on a connection of its own: a subscription has
no end, and requests are not to share a fate with it. A daemon that went away is looked for again, ever more slowly.
May import kvd_client and siblings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvd.gateway.around import Log
from kvd.gateway.errors import ApiError
from kvd.gateway.monitor import Monitor
from kvd_client import AsyncClient, KvdClientError

MAX_VIEWERS = 64
LINGER_S = 30.0
"""A page that is loaded again, or a phone that wakes up, finds the watch still going."""
ASK_EVERY_S = 0.5
HEALTH_EVERY_S = 2.0
ANSWER_S = 10.0
"""A daemon that has not answered for so long is shown as away."""
FIRST_RETRY_S, LAST_RETRY_S = 0.25, 5.0
FRESH_S = 1.0
"""The first viewer waits so long for the first answer: an empty picture is shown only when there is none."""


class Watch:
    """Owner: the event loop.

    Args:
        connect: makes the connection to the daemon.
        monitor: is kept true.
        namespace: whose agents are watched; None for all.
        log: told of bugs.
    """

    def __init__(
        self, connect: Callable[[], AsyncClient], monitor: Monitor, *, namespace: str | None, log: Log
    ) -> None:
        self.monitor = monitor
        self.viewers = 0
        self._connect = connect
        self._namespace = namespace
        self._log = log
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._lingering: asyncio.TimerHandle | None = None
        self._fresh = asyncio.Event()
        self._seq = 0  # at first: all that the daemon remembers
        self._answered = False
        """The present connection, or the last one, brought an answer."""

    def enter(self) -> None:
        """Somebody looks; `leave` is due.

        Raises:
            ApiError: too many do.
        """
        if self.viewers >= MAX_VIEWERS:
            raise ApiError(
                "rate_limit", f"{MAX_VIEWERS} viewers of the page are served; come back later", retry_after_s=10.0
            )
        self.viewers += 1
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._task is None:
            self._fresh.clear()
            self._task = asyncio.create_task(self._watch())

    def leave(self) -> None:
        """Whoever entered looks no more."""
        self.viewers -= 1
        if not self.viewers:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self._stop)

    async def fresh(self) -> None:
        """Wait until the daemon was asked once, but not for long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FRESH_S):
                await self._fresh.wait()

    def _stop(self) -> None:
        self._lingering = None
        task, self._task = self._task, None  # whoever enters while it ends begins another one
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Stop watching."""
        if self._lingering is not None:
            self._lingering.cancel()
        self._stop()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _watch(self) -> None:
        wait_s = FIRST_RETRY_S
        while True:
            client, is_ready = self._connect(), asyncio.Event()
            self._answered = False
            try:
                async with asyncio.TaskGroup() as together:
                    together.create_task(self._ask_for_ever(client, is_ready))
                    together.create_task(self._listen(client, is_ready))
            except* (KvdClientError, TimeoutError) as errors:
                self.monitor.away(_reason(errors))
                self._fresh.set()
            except* Exception as errors:
                self._log.exception("bug", where="the page's watch", error=repr(errors.exceptions[0]))
                self.monitor.away("the gateway has a bug; its log has the details")
                self._answered, wait_s = False, LAST_RETRY_S
            finally:
                await client.close()
            wait_s = FIRST_RETRY_S if self._answered else min(LAST_RETRY_S, 2 * wait_s)
            await asyncio.sleep(wait_s)

    async def _ask_for_ever(self, client: AsyncClient, is_ready: asyncio.Event) -> None:
        clock = asyncio.get_running_loop().time
        since: int | None = None
        model_known, health_due_s = False, 0.0
        while True:
            if clock() >= health_due_s:
                async with asyncio.timeout(ANSWER_S):
                    health = await client.health()
                self.monitor.tell(status=health.status)
                self.monitor.back()
                health_due_s = clock() + HEALTH_EVERY_S
                if not health.ready and not model_known:  # loading, which may take minutes
                    self._fresh.set()
                    await asyncio.sleep(ASK_EVERY_S)
                    health_due_s = 0.0
                    continue
            async with asyncio.timeout(ANSWER_S):
                if not model_known:
                    info = await client.model_info()
                    self.monitor.tell(model=info.get("model") or info.get("name"), kv_format=info.get("kv_format"))
                    model_known = True
                    is_ready.set()
                answer = await client.monitor(since, namespace=self._namespace)
            self.monitor.answered(answer)
            since = answer["version"]
            self._answered = True
            self._fresh.set()
            await asyncio.sleep(ASK_EVERY_S)

    async def _listen(self, client: AsyncClient, is_ready: asyncio.Event) -> None:
        await is_ready.wait()
        async with client.subscribe(namespace=self._namespace, since=self._seq) as events:
            async for event in events:
                self._seq = events.seq
                self.monitor.happened(event.to_map())
        raise KvdClientError("the daemon stops")


def _reason(errors: BaseExceptionGroup[Any]) -> str:
    first = errors.exceptions[0]
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return getattr(first, "message", "") or "the daemon does not answer"


__all__ = ["MAX_VIEWERS", "Watch"]
