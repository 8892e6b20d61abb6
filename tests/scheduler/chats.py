"""The service before an engine in this process: calls as the daemon gets them, and a model that writes what it is told.

The engine is real, with its thread, store and fake model; only sockets are missing. A script is a logits hook that runs
before the masks, so what it wants is still held to the form that a call asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvd.model.template import ChatTemplate
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.requests import JobRequest, Reply, TurnRequest
from kvd.scheduler.sampling import Logits
from kvd.scheduler.service import KvdService
from tests.scheduler.test_engine import Runner


@dataclass
class Said:
    """A call's result and events."""

    result: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of a type."""
        return [event for event in self.events if event["type"] == kind]

    @property
    def message(self) -> dict[str, Any]:
        """The answer."""
        message: dict[str, Any] = self.result["message"]
        return message


class Script:
    """Wants the ids of a text, then the end. Owner: one turn."""

    def __init__(self, ids: Sequence[int], end: int) -> None:
        self._ids = [*ids, end]
        self._start: int | None = None

    def __call__(self, ids: Sequence[int], logits: Logits) -> Logits:
        """Far above all else, the next id."""
        if self._start is None:
            self._start = len(ids)
        at = len(ids) - self._start
        if at < len(self._ids):
            logits[self._ids[at]] += np.float32(1e4)
        return logits


class ScriptedEngine:
    """An engine whose next turns follow scripts. Owner: one test."""

    def __init__(self, runner: Runner) -> None:
        self._engine = runner.engine
        self.scripts: list[Script] = []
        self.taken: list[TurnRequest] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: TurnRequest | JobRequest, reply: Reply) -> None:
        """Submit, with the next script."""
        if isinstance(request, TurnRequest):
            if self.scripts:
                request = replace(request, hooks=(self.scripts.pop(0), *request.hooks))
            self.taken.append(request)
        self._engine.submit(request, reply)


class Chats:
    """Calls of one daemon. Owner: one test.

    Args:
        runner: its engine.
        codec: its vocabulary.
        source: its model's chat template.
    """

    def __init__(self, runner: Runner, codec: TextCodec, source: str) -> None:
        self.codec = codec
        self.template = ChatTemplate(source, codec)
        self.engine = ScriptedEngine(runner)

    def script(self, *pieces: str | int) -> None:
        """What the next turn's model wants to say; ids are control tokens."""
        ids: list[int] = []
        for piece in pieces:
            ids += self.codec.encode_content(piece) if isinstance(piece, str) else [piece]
        self.engine.scripts.append(Script(ids, min(self.codec.eos_ids)))

    def call(self, method: str, **params: Any) -> Said:
        """One call."""
        return self.calls((method, params))[0]

    def calls(self, *calls: tuple[str, Mapping[str, Any]]) -> list[Said]:
        """Several calls at a time.

        Raises:
            KvdError: the first that failed.
        """
        return asyncio.run(self._all(calls))

    async def _all(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Said]:
        service = KvdService(self.engine, facts={}, request_shutdown=lambda: None)  # type: ignore[arg-type]
        service.set_ready(self.codec, self.template)
        said = [Said({}) for _ in calls]

        async def one(method: str, params: Mapping[str, Any], answer: Said) -> None:
            def take(event: Mapping[str, Any]) -> None:
                answer.events.append(dict(event))

            peer = SimpleNamespace(connection=1, pid=1)
            context: Any = SimpleNamespace(
                peer=peer, cancelled=False, emit=take, on_cancel=lambda callback: None, error_map=lambda error: {}
            )
            result = await service.call(method, params, context)
            assert isinstance(result, dict)
            answer.result = result

        await asyncio.gather(
            *(one(method, params, answer) for (method, params), answer in zip(calls, said, strict=True))
        )
        return said
