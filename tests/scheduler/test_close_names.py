"""Names like the one that was asked for: found without holding up anybody else's call."""

from __future__ import annotations

import asyncio
import difflib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd.errors import AgentNotFound
from kvd.scheduler import errors
from kvd.scheduler.engine import Engine
from kvd.scheduler.service import KvdService


class NoAgent:
    """An engine whose first call finds no agent; the second one is asked for the names that there are."""

    def __init__(self, names: list[str]) -> None:
        self._core = SimpleNamespace(agents=SimpleNamespace(names=lambda namespace: names))
        self.calls = 0

    def call(self, function: Callable[[Any], object]) -> Future[object]:
        """`Engine.call`."""
        self.calls += 1
        answer: Future[object] = Future()
        if self.calls == 1:
            answer.set_exception(AgentNotFound("no agent 'plan'", agent="plan", namespace="default"))
        else:
            answer.set_result(function(self._core))
        return answer


def test_names_are_compared_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing takes milliseconds a name: another thread does it, and the answer has the names all the same."""
    threads: list[int] = []

    def compare(*arguments: Any, **options: Any) -> list[str]:
        threads.append(threading.get_ident())
        return difflib.get_close_matches(*arguments, **options)

    monkeypatch.setattr(errors, "get_close_matches", compare)

    async def ask() -> AgentNotFound:
        service = KvdService(cast("Engine", NoAgent(["plane", "other"])), facts={}, request_shutdown=lambda: None)
        service._ready.set()  # no model is needed to look for an agent
        with pytest.raises(AgentNotFound) as refused:
            await service.call("agent.info", {"agent": "plan"}, cast("Any", None))
        return refused.value

    error = asyncio.run(ask())
    assert error.data == {"agent": "plan", "namespace": "default", "did_you_mean": ["plane"]}
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_only_so_many_names_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among ten thousand agents a wrong name costs two hundred comparisons, not ten thousand."""
    compared: list[str] = []

    def compare(word: str, names: Any, n: int) -> list[str]:
        compared.extend(names)
        return []

    monkeypatch.setattr(errors, "get_close_matches", compare)
    error = AgentNotFound("no agent")
    assert errors.with_close_names(error, "a", [f"a{number}" for number in range(10_000)]) is error
    assert compared == [f"a{number}" for number in range(200)]
