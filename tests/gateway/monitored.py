# ruff: noqa: D102  (the handlers are the documented methods)
"""A daemon without a model that a page can watch: made-up agents with as many pages as wanted, and events.

Its answers have the form of the daemon's `monitor` and `events.subscribe` (docs/protocol.md); what they say is drawn
from a seed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from random import Random
from typing import Any

from kvd.front import CallContext
from tests.front.service import FakeService

STATES = [
    "filling",
    "packed",
    "stashed",
    "loading_tail",
    "sealed_dirty",
    "writing",
    "clean",
    "evicted",
    "loading",
    "lost",
]
CODE = {name: code for code, name in enumerate(STATES)}
SHARED, BEHIND, PINNED = 16, 32, 64
PAGE_BYTES = 1_474_560
PAGE_TOKENS = 256
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
BUDGET_BYTES = 10_200_000_000


class MonitoredDaemon(FakeService):
    """Owner: the thread it serves on.

    Args:
        agents, pages: how many, and of each.
        seed: of everything that is drawn.
        namespaces: agents belong to them in turn.
    """

    def __init__(
        self, *, agents: int = 3, pages: int = 20, seed: int = 1, namespaces: tuple[str, ...] = ("default",)
    ) -> None:
        super().__init__()
        self._random = Random(seed)
        self.is_loading = False
        self.version = 1
        self.seq = 0
        self.events: list[dict[str, object]] = []
        self.wake = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.figures: dict[str, Any] = dict.fromkeys(_FIGURES, 0) | {"budget_bytes": BUDGET_BYTES, "disk": "ok"}
        self.figures["disk_quotas_full"] = list(namespaces)
        self.figures["namespaces"] = {name: {"resident_bytes": 1, "quota_bytes": 2} for name in namespaces}
        self.agents: dict[tuple[str, str], dict[str, Any]] = {}
        self.changed: dict[tuple[str, str], int] = {}
        for number in range(agents):
            self.add(f"agent-{number:03}", pages, namespaces[number % len(namespaces)])

    def do(self, work: Callable[[], None]) -> None:
        """Have something done on the daemon's thread; returns when it is."""
        assert self.loop is not None, "nobody has called yet"
        done = Future[None]()

        def doing() -> None:
            work()
            done.set_result(None)

        self.loop.call_soon_threadsafe(doing)
        done.result(10)

    async def call(self, method: str, params: Mapping[str, object], context: CallContext) -> object:
        self.loop = asyncio.get_running_loop()
        return await super().call(method, params, context)

    def add(self, agent: str, pages: int, namespace: str = "default") -> None:
        """One more agent."""
        shared = min(pages, self._random.choice((0, 0, 4, 8)))
        resident = self._random.randint(0, pages - 1)
        runs = [
            [CODE["clean"] | SHARED, shared],
            [CODE["clean"], max(0, resident - shared)],
            [CODE["evicted"], max(0, pages - 1 - max(resident, shared))],
            [CODE["filling"], 1],
        ]
        prompt = pages * PAGE_TOKENS
        self.agents[namespace, agent] = {
            "agent": agent,
            "namespace": namespace,
            "state": "idle",
            "tokens": prompt,
            "computed_tokens": prompt - 1,
            "pinned": False,
            "durable": True,
            "cells": [code for code, count in runs for _ in range(count)],
            "turns": 3,
            "prompt_tokens": prompt,
            "cached_tokens": int(prompt * self._random.random()),
            "completion_tokens": 90,
            "generated_tokens": 90,
            "last_turn": None,
        }
        self.touch((namespace, agent))

    def touch(self, key: tuple[str, str]) -> None:
        """This agent changed."""
        self.version += 1
        self.changed[key] = self.version

    def say(self, kind: str, **fields: object) -> None:
        """One event; to be called on the daemon's thread."""
        self.seq += 1
        self.events.append({"type": kind, "seq": self.seq, "time_s": time.time(), **fields})
        self.wake.set()
        self.wake = asyncio.Event()

    def churn(self, agents: int) -> None:
        """Some agents lose pages, others get theirs back, and one adds a page now and then."""
        for key in self._random.sample(list(self.agents), min(agents, len(self.agents))):
            agent = self.agents[key]
            cells = agent["cells"]
            at = self._random.randrange(len(cells))
            count = min(len(cells) - at, self._random.randint(1, 40))
            out = cells[at] & 15 == CODE["clean"]
            cells[at : at + count] = [CODE["evicted" if out else "clean"]] * count
            agent["state"] = self._random.choice(("idle", "running", "queued"))
            who = {"agent": key[1], "namespace": key[0], "pages": count, "bytes": count * PAGE_BYTES}
            if out:
                self.say("eviction", reason="room", **who)
            else:
                self.say("fault", **who)
            self.figures["evictions" if out else "faults"] += count
            self.figures["bytes_written" if out else "bytes_read"] += count * PAGE_BYTES
            self.touch(key)
        self.figures["decode_rows"] += agents

    def turn(self, agent: str, request: int, match: str, *, namespace: str = "default", **fields: object) -> None:
        """A turn that matched so, from its match to its end."""
        who = {"agent": agent, "namespace": namespace, "request": request}
        figures = {"prompt_tokens": 900, "cached_tokens": 640}
        kind = "miss" if match == "diverge" else "hit"
        told: dict[str, object] = {"match": match, "match_reason": "made up", "divergence": None, **figures, **fields}
        self.say(kind, **who, **told)
        self.say("turn_ended", **who, **figures, outcome="ok", completion_tokens=12, ttft_s=0.1)

    async def do_monitor(self, params: Mapping[str, Any], context: CallContext) -> object:
        since = params.get("since", 0)
        known = 0 < since <= self.version
        wanted = params.get("namespace")
        keys = [key for key in self.agents if wanted is None or key[0] == wanted]
        agents = [self._entry(self.agents[key]) for key in keys if not known or self.changed[key] > since]
        resident = sum(cell & 15 in _IN_RAM for agent in self.agents.values() for cell in agent["cells"])
        totals = {
            "time_s": time.time(),
            "resident_bytes": min(BUDGET_BYTES, resident * PAGE_BYTES),
            "frames": resident,
            "running": sum(agent["state"] == "running" for agent in self.agents.values()),
            "queued": sum(agent["state"] == "queued" for agent in self.agents.values()),
            "agents": len(self.agents),
            "disk_used_bytes": len(self.agents) * 10**8,
            "quota_bytes": 10**11,
            "memory_pressure": "none",
            "swap": "on",
            "disk_reason": None,
        }
        return {
            "version": self.version,
            "full": not known,
            "states": STATES,
            "page_tokens": PAGE_TOKENS,
            "windows": [None],
            "agents": agents,
            "gone": [],
            "figures": self.figures | totals,
        }

    def _entry(self, agent: dict[str, Any]) -> dict[str, Any]:
        cells = agent["cells"]
        runs: list[int] = []
        for cell in cells:
            if runs and runs[-2] == cell:
                runs[-1] += 1
            else:
                runs += [cell, 1]
        resident = sum(cell & 15 in _IN_RAM for cell in cells)
        segment = {"group": 0, "page_bytes": PAGE_BYTES, "first_page": 0, "runs": runs}
        return {name: value for name, value in agent.items() if name != "cells"} | {
            "branches": [{"branch": 0, "tokens": agent["tokens"], "segments": [segment]}],
            "pages": len(cells),
            "resident_pages": resident,
            "swapped_pages": len(cells) - resident,
            "lost_pages": 0,
            "shared_pages": sum(bool(cell & SHARED) for cell in cells),
            "behind_window_pages": 0,
            "resident_bytes": resident * PAGE_BYTES,
        }

    async def do_events_subscribe(self, params: Mapping[str, Any], context: CallContext) -> object:
        stopped = asyncio.get_running_loop().create_future()
        context.on_cancel(lambda: stopped.done() or stopped.set_result(None))
        context.emit({"type": "subscribed", "seq": self.seq, "time_s": time.time(), "first_seq": 1})
        at = params.get("since", self.seq)
        wanted = params.get("namespace")
        while not context.cancelled:
            for event in self.events[at:]:
                if wanted is None or event.get("namespace", wanted) == wanted:
                    context.emit(event)
            at = len(self.events)
            woken = asyncio.ensure_future(self.wake.wait())
            await asyncio.wait({woken, stopped}, return_when=asyncio.FIRST_COMPLETED)
            woken.cancel()
        return {"reason": "stopping"}

    async def do_model_info(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"model": "tiny", "context_tokens": 32768, "kv_format": "q4", "sharing": "namespace"}

    async def do_health(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"ready": not self.is_loading, "status": "loading" if self.is_loading else "ready"}


_IN_RAM = frozenset(CODE[name] for name in ("filling", "packed", "sealed_dirty", "writing", "clean"))
_COUNTERS = """
bytes_read bytes_written decode_rows evictions faults preempted prompt_tokens cached_tokens turns swap_bytes max_batch
"""
_FIGURES = _COUNTERS.split()

__all__ = ["BEHIND", "CODE", "HOSTILE", "PINNED", "SHARED", "STATES", "MonitoredDaemon"]
