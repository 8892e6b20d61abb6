# ruff: noqa: D102  (the handlers are the documented methods)
"""A service without a model: predictable answers, and doors through which a test steers a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Semaphore, Thread
from typing import Any

from kvd.errors import AgentNotFound, Busy, Cancelled, InvalidParams
from kvd.front import CallContext, FrontLimits, MethodNotFound, RpcServer
from kvd.front.session import Log

WORDS = ("Hel", "lo, ", "wörld", "!")


class RecordingLog:
    """Keeps what was logged; a `Log`."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, object]]] = []

    def debug(self, event: str, **fields: object) -> None:
        self.lines.append(("debug", event, fields))

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append(("warning", event, fields))

    def error(self, event: str, **fields: object) -> None:
        self.lines.append(("error", event, fields))

    def named(self, event: str) -> list[dict[str, object]]:
        return [fields for _level, name, fields in self.lines if name == event]


class FakeService:
    """What the tests call: the documented methods with made-up figures, and `test.*` for faults.

    `calls` has each (method, params) in order, `cancelled` the agents whose calls were cancelled. Threads of a test
    may wait on `was_cancelled`, on `has_begun`, and take `begun` once for each call that hangs.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.contexts: list[CallContext] = []
        self.cancelled: list[str] = []
        self.was_cancelled = Event()
        self.has_begun = Event()
        self.begun = Semaphore(0)
        self.ready = True
        self.poured = 0
        self.gate = asyncio.Event()

    def at_once(self, method: str) -> Callable[[Mapping[str, object]], object] | None:
        return getattr(self, "now_" + method.replace(".", "_"), None)

    async def call(self, method: str, params: Mapping[str, object], context: CallContext) -> object:
        self.calls.append((method, dict(params)))
        self.contexts.append(context)
        handler = getattr(self, "do_" + method.replace(".", "_"), None)
        if handler is None:
            raise MethodNotFound(f"no method {method!r}")
        return await handler(params, context)

    async def do_generate(self, params: Mapping[str, Any], context: CallContext) -> object:
        agent = params["agent"]
        if agent == "hangs":
            return await self.until_cancelled(agent, context, emit=bool(params.get("text")))
        if agent == "missing":
            raise AgentNotFound("no agent missing", agent=agent)
        if agent == "busy":
            raise Busy("the queue is full", retry_after_s=2.5, queued=7)
        prompt = len(params["text"])
        figures = {"prompt_tokens": prompt, "cached_tokens": max(prompt - 1, 0)}
        context.emit({"type": "queued", "position": 0})
        context.emit({"type": "matched", "match": "extend", "match_reason": "", **figures})
        context.emit({"type": "prefill", "done_tokens": 1, "total_tokens": 1})
        context.emit({"type": "first_token"})
        for word in WORDS:
            context.emit({"type": "text", "text": word})
        context.emit({"type": "from_the_future", "x": [1]})
        context.emit({"type": "usage", "completion_tokens": len(WORDS), **figures})
        context.emit({"type": "durable", "durable": True, "reason": None})
        return {
            "text": "".join(WORDS),
            "finish_reason": "stop",
            "completion_tokens": len(WORDS),
            "match": "extend",
            "match_reason": "",
            "durable": True,
            "durable_reason": None,
            "agent": agent,
            "branch": 3,
            **figures,
        }

    async def do_chat(self, params: Mapping[str, Any], context: CallContext) -> object:
        text = "".join(message["content"] for message in params["messages"])
        if params["agent"] == "calls":
            return self.calls_a_tool(context)
        return await self.do_generate({**params, "text": text}, context)

    def calls_a_tool(self, context: CallContext) -> object:
        function = {"name": "f", "arguments": '{"x": 1}'}
        context.emit({"type": "first_token"})
        context.emit({"type": "reasoning", "text": "hm"})
        context.emit({"type": "text", "text": "Wait."})
        context.emit({"type": "tool_call", "index": 0, "id": "1", **function})
        call = {"id": "1", "type": "function", "function": function}
        message = {"role": "assistant", "content": "Wait.", "reasoning_content": "hm", "tool_calls": [call]}
        return {"text": "raw", "finish_reason": "tool_calls", "agent": "calls", "durable": True, "message": message}

    async def until_cancelled(self, agent: str, context: CallContext, *, emit: bool) -> object:
        stopped = asyncio.get_running_loop().create_future()
        context.on_cancel(lambda: stopped.done() or stopped.set_result(None))
        if emit:
            context.emit({"type": "first_token"})
            context.emit({"type": "text", "text": "…"})
        self.has_begun.set()
        self.begun.release()
        await stopped
        self.cancelled.append(agent)
        self.was_cancelled.set()
        raise Cancelled("cancelled by the client")

    async def do_inject(self, params: Mapping[str, Any], context: CallContext) -> object:
        if "agent" in params:
            return {"agent": params["agent"], "tokens": 12, "appended_tokens": 5, "durable": True}
        entries: list[object] = []
        for agent in params["agents"]:
            try:
                if agent == "missing":
                    raise AgentNotFound("no agent missing", agent=agent)
                entries.append(await self.do_inject({"agent": agent}, context))
            except AgentNotFound as error:
                entries.append({"agent": agent, "error": context.error_map(error)})
        return {"agents": entries}

    async def do_tokenize(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"tokens": [ord(character) for character in params["text"]]}

    async def do_agent_list(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"agents": [_info("a", params.get("namespace", "default")), _info("b", "default")]}

    async def do_agent_info(self, params: Mapping[str, Any], context: CallContext) -> object:
        if params["agent"] == "missing":
            raise AgentNotFound("no agent missing", agent="missing")
        return _info(params["agent"], params["namespace"])

    async def do_agent_fork(self, params: Mapping[str, Any], context: CallContext) -> object:
        return _info(params["new_agent"], params["namespace"])

    async def do_agent_delete(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"agent": params["agent"], "deleted": True}

    do_agent_rollback = do_agent_pin = do_agent_unpin = do_agent_prefetch = do_agent_evict = do_agent_info
    do_agent_verify = do_agent_info

    async def do_agent_export(self, params: Mapping[str, Any], context: CallContext) -> object:
        lost = {"lost_tokens": 7, "lost_reason": "KV is lost"} if params["agent"] == "worn" else {}
        figures = {"file_bytes": 4096, "tokens": 300, "computed_tokens": 299, "lost_tokens": 0, "lost_reason": None}
        return {"agent": params["agent"], "namespace": params["namespace"], "path": params["path"]} | figures | lost

    async def do_agent_import(self, params: Mapping[str, Any], context: CallContext) -> object:
        return _info(params.get("agent", "from the file"), params.get("namespace", "its own"))

    async def do_residency(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"budget_bytes": 1000, "agents": [{"agent": params.get("agent", "a"), "resident_pages": 2}]}

    async def do_statistics(self, params: Mapping[str, Any], context: CallContext) -> object:
        figures = ("budget", "resident", "peak_resident", "swap")
        return {f"{name}_bytes": 10 for name in figures} | {
            "tokens_computed": 7,
            "tokens_reused": 3,
            "bytes_written": 1,
        }

    async def do_monitor(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"version": 8, "full": "since" not in params, "agents": [], "figures": {"asked": dict(params)}}

    async def do_events_subscribe(self, params: Mapping[str, Any], context: CallContext) -> object:
        """Three events, numbered from 11 on, then as `since` says nothing more until the daemon stops."""
        context.emit({"type": "subscribed", "seq": 13, "time_s": 1.0, "first_seq": 11})
        for seq in range(max(11, params.get("since", 0) + 1), 14):
            facts = {"pages": seq, "bytes": 10, "reason": "room"}
            context.emit({"type": "eviction", "seq": seq, "time_s": 1.5, "agent": "a", "namespace": "n", **facts})
        if "stopping" in params.get("kinds", ()):
            return {"reason": "stopping"}
        return await self.until_cancelled("subscriber", context, emit=False)

    async def do_test_pour(self, params: Mapping[str, Any], context: CallContext) -> object:
        """Events without an end, each when the peer has read the one before."""
        for number in count():
            if context.cancelled:
                self.was_cancelled.set()
                raise Cancelled("cancelled")
            context.emit({"type": "x", "number": number, "text": "x" * params["bytes"]})
            self.poured = number + 1
            await asyncio.sleep(0)
            await context.until_read()
        raise AssertionError

    async def do_configure(self, params: Mapping[str, Any], context: CallContext) -> object:
        limits = {"budget_bytes": 4_000_000_000, "largest_budget_bytes": None, "namespace_quotas": {"work": 5}}
        return limits | {"converging": ["budget"], "until_restart": ["budget"], "newer": 1}

    async def do_model_info(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"name": "tiny", "context_tokens": 512}

    async def do_health(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"ready": self.ready, "status": "serving" if self.ready else "loading the model"}

    async def do_hello(self, params: Mapping[str, Any], context: CallContext) -> object:
        if params.get("protocol") != 1:
            raise InvalidParams("protocol is 1")
        return {"protocol": 1, "server": "fake"}

    async def do_drain(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"draining": True}

    async def do_shutdown(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"stopping": True}

    # ---- faults and floods ----

    def now_test_now(self, params: Mapping[str, Any]) -> object:
        if "raise" in params:
            raise RuntimeError("secret detail") if params["raise"] == "bug" else InvalidParams("not that")
        return dict(params)

    async def do_test_crash(self, params: Mapping[str, Any], context: CallContext) -> object:
        raise RuntimeError("secret detail")

    async def do_test_unencodable(self, params: Mapping[str, Any], context: CallContext) -> object:
        context.emit({"type": "text", "text": "\ud800"})
        return {"object": object()}

    async def do_test_echo(self, params: Mapping[str, Any], context: CallContext) -> object:
        for _ in range(params.get("turns", 0)):
            await asyncio.sleep(0)
        return params["value"]

    async def do_test_gate(self, params: Mapping[str, Any], context: CallContext) -> object:
        await self.gate.wait()
        return "through"

    async def do_test_flood(self, params: Mapping[str, Any], context: CallContext) -> object:
        for number in range(params["events"]):
            context.emit({"type": params.get("type", "text"), "text": "x" * params["bytes"]})
            if number % 16 == 0:
                await asyncio.sleep(0)
            if context.cancelled:
                self.cancelled.append("flood")
                self.was_cancelled.set()
                raise Cancelled("cancelled")
        return {"text": "done"}


def _info(agent: str, namespace: object) -> dict[str, object]:
    return {
        "agent": agent,
        "namespace": namespace,
        "tokens": 300,
        "computed_tokens": 299,
        "text_bytes": 1200,
        "branches": 1,
        "resident_bytes": 4096,
        "swapped_pages": 1,
        "pinned": False,
        "durable": True,
        "kv_format": "q4",
        "created_s": 1.5,
    }


@contextmanager
def serving(
    path: Path, service: FakeService | None = None, *, limits: FrontLimits | None = None, log: Log | None = None
) -> Iterator[FakeService]:
    """A server on a thread with its own event loop, for blocking clients; closed and joined at the end."""
    service = service or FakeService()
    started, stop = Event(), asyncio.Event()
    failure: list[BaseException] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        server = RpcServer(service, socket_path=path, limits=limits, logger=log or RecordingLog())
        try:
            await server.start()
        finally:
            loops.append(asyncio.get_running_loop())
            started.set()
        await stop.wait()
        await server.close(0.0)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # shown in the test's own thread
            failure.append(error)

    thread = Thread(target=main, name="fake-kvd")
    thread.start()
    started.wait()
    try:
        if failure:
            raise failure[0]
        yield service
    finally:
        if not failure:
            loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()
        if failure:
            raise failure[0]
