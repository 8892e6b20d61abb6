# ruff: noqa: D102  (the handlers are the documented methods)
"""A daemon without a model whose answers a test writes: events and a result for each turn, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvd.errors import AgentNotFound, Cancelled, KvdError
from kvd.front import CallContext
from tests.front.service import FakeService


class ScriptedDaemon(FakeService):
    """Answers turns with `events` and `result`, or with `error`; `params` has what each turn was asked.

    A turn whose agent is `hangs` waits until it is cancelled; one whose agent begins with `echo` says that name, one
    that begins with `only` says events of that kind without end; `gone` are agents that cannot be forked, `refused`
    and `unforked` what `agent.delete` and `agent.fork` raise, by name, `listed` those it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: Sequence[Mapping[str, object]] = ()
        self.result: dict[str, object] = {}
        self.error: KvdError | None = None
        self.late_error: KvdError | None = None
        self.gone: set[str] = set()
        self.refused: dict[str, KvdError] = {}
        self.unforked: dict[str, KvdError] = {}
        self.on_fork: Callable[[], object] = lambda: None
        self.sharing = "namespace"
        self.listed: list[dict[str, object]] = []

    def of(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the calls of one method, in order."""
        return [params for name, params in self.calls if name == method]

    def script(self, *events: Mapping[str, object], **result: object) -> None:
        """What the next turns do."""
        self.events, self.result, self.error, self.late_error = events, result, None, None

    async def do_chat(self, params: Mapping[str, Any], context: CallContext) -> object:
        if params["agent"] == "hangs":
            return await self.until_cancelled("hangs", context, emit=True)
        if self.error is not None:
            raise self.error
        if params["agent"].startswith("only "):  # says how far it is, over and over, until it is cancelled
            while not context.cancelled:
                context.emit({"type": params["agent"].removeprefix("only "), "position": 1, "done_tokens": 1})
                await asyncio.sleep(0.001)
            raise Cancelled("cancelled by the client")
        if params["agent"].startswith("echo "):  # says its own name, letter by letter, among all others
            for letter in params["agent"]:
                context.emit({"type": "text", "text": letter})
                await asyncio.sleep(0)
            return {"text": params["agent"], "finish_reason": "stop", "match": "new", "agent": params["agent"]}
        figures = {"prompt_tokens": 10, "cached_tokens": 7}
        context.emit({"type": "matched", "match": "extend", "match_reason": "all stored text matched", **figures})
        context.emit({"type": "first_token"})
        for event in self.events:
            context.emit(event)
        if self.late_error is not None:
            raise self.late_error
        text = "".join(str(event["text"]) for event in self.events if event["type"] == "text")
        base: dict[str, object] = {
            "text": text,
            "finish_reason": "stop",
            "completion_tokens": 4,
            "match": "extend",
            "match_reason": "all stored text matched",
            "durable": True,
            "agent": params["agent"],
        }
        return base | figures | self.result

    do_generate = do_chat

    async def do_agent_fork(self, params: Mapping[str, Any], context: CallContext) -> object:
        self.on_fork()
        if (refusal := self.unforked.get(params["agent"])) is not None:
            raise refusal
        if params["agent"] in self.gone:
            raise AgentNotFound("no such agent", agent=params["agent"])
        return await super().do_agent_fork(params, context)

    async def do_agent_delete(self, params: Mapping[str, Any], context: CallContext) -> object:
        if (refusal := self.refused.get(params["agent"])) is not None:
            raise refusal
        return await super().do_agent_delete(params, context)

    async def do_agent_list(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"agents": self.listed}

    async def do_model_info(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"model": "tiny", "context_tokens": 512, "sharing": self.sharing}

    async def do_tokenize(self, params: Mapping[str, Any], context: CallContext) -> object:
        return {"count": 3} if params.get("count_only") else {"tokens": [1, 2, 3], "count": 3}


def text(value: str) -> dict[str, object]:
    """A `text` event."""
    return {"type": "text", "text": value}


__all__ = ["ScriptedDaemon", "text"]
