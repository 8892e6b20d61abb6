"""`tokenize` without a daemon: its bounds, what it counts, callers that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.errors import Cancelled, InvalidParams
from kvd.model.tokenizer import TextCodec
from kvd.scheduler import tokenizing
from kvd.scheduler.params import Params
from kvd.scheduler.tokenizing import Tokenizing
from kvd.vm.text import Span, TypedText


class Caller:
    """A call's context; it leaves when the test says so."""

    def __init__(self) -> None:
        self.leave: Callable[[], object] = lambda: None

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Keep it."""
        self.leave = callback


def ask(codec: TextCodec, caller: Caller, **params: object) -> Any:
    """One call; the template writes messages one after the other."""

    async def parts() -> Any:
        return codec, None

    async def render(context: object, make: Callable[[Any], TypedText]) -> TypedText:
        return make(SimpleNamespace(render=rendered))

    def rendered(messages: list[dict[str, str]], *, tools: object) -> TypedText:
        data = "".join(message["content"] for message in messages).encode()
        return TypedText(data, (Span("content", len(data)),))

    called = Tokenizing(parts, render).call(Params("tokenize", params), caller)  # type: ignore[arg-type]
    return asyncio.run(called)  # type: ignore[arg-type]


def test_counts_have_a_bound_of_their_own(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids must fit into a message; a count need not, and says the same."""
    monkeypatch.setattr(tokenizing, "MAX_TOKENIZE_BYTES", 1000)
    monkeypatch.setattr(tokenizing, "MAX_COUNT_BYTES", 20_000)
    text = "the time of " * 80
    ids = codec.encode_content(text)
    assert ask(codec, Caller(), text=text) == {"tokens": ids, "count": len(ids)}
    assert ask(codec, Caller(), text="") == {"tokens": [], "count": 0}
    many = {"count": len(codec.encode_content(text * 10))}
    assert ask(codec, Caller(), text=text * 10, count_only=True) == many
    said = [{"role": "user", "content": text * 5}] * 2
    assert ask(codec, Caller(), messages=said, count_only=True) == many
    with pytest.raises(InvalidParams, match="at most 1000 bytes here, not 9600; count_only takes more"):
        ask(codec, Caller(), messages=said)
    with pytest.raises(InvalidParams, match="at most 20000 bytes here, not 24000; send them in parts") as refused:
        ask(codec, Caller(), text="é" * 12_000, count_only=True)
    assert refused.value.data["parameter"] == "text"


def test_who_leaves_ends_his_count(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """P34: at the next piece, not at the end."""
    caller, pieces = Caller(), 0

    def count(*_: object, pause: Callable[[], None], **__: object) -> int:
        nonlocal pieces
        for pieces in range(1, 100):
            if pieces == 3:
                caller.leave()
            pause()
        return pieces

    monkeypatch.setattr(tokenizing, "count_tokens", count)
    with pytest.raises(Cancelled):
        ask(codec, caller, text="the", count_only=True)
    assert pieces == 3
