"""Pins beside turns: a pin takes no room that a turn was promised, and no turn is let in without room for the pins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import BudgetExceeded
from kvd.model.tokenizer import TextCodec
from tests.scheduler.test_engine import WAIT_S, Gate, Runner
from tests.scheduler.test_preempting import TIGHT_BYTES, check
from tests.support.prose import prose

MOST = {"max_tokens": 1050}
"""With a short prompt: five of the six pages per group that `TIGHT_BYTES` has room for; the pinned agent has three."""


@pytest.fixture
def runner(tmp_path: Path, codec: TextCodec) -> Iterator[Runner]:
    """A tight engine of four slots with an agent that may be pinned; its books are looked at at the end."""
    runner = Runner(tmp_path / "data", codec, max_queued=64, max_batch=4, budget_bytes=TIGHT_BYTES)
    runner.start()
    assert runner.turn("pinned", prose(600, "pinned"), max_tokens=1).result["durable"]
    yield runner
    check(runner)
    runner.stop()


@pytest.mark.parametrize("priority", ["interactive", "background"])
def test_a_pin_does_not_take_the_room_of_a_turn_that_runs(runner: Runner, priority: str) -> None:
    """P21: it waits for the turn; both end well, the turn with all its tokens. A second pin changes nothing."""
    gate = Gate(runner.model)
    turn = runner.turn("long", prose(100, "long"), priority=priority, **MOST)
    assert gate.entered.wait(WAIT_S)
    pin = runner.job("pin", "pinned")
    gate.go_on.set()
    assert turn.result["completion_tokens"] == MOST["max_tokens"]
    assert turn.result["preemptions"] == 0
    assert pin.result["pinned"]
    assert runner.job("pin", "pinned").result["pinned"]


def test_a_turn_that_waited_while_others_were_pinned_counts_the_pins(runner: Runner) -> None:
    """What fitted when it came and never will beside the pin is refused with the figures, not left to wait (P21)."""
    gate = Gate(runner.model)
    first = runner.turn("long", prose(100, "long"), **MOST)
    assert gate.entered.wait(WAIT_S)
    pin = runner.job("pin", "pinned")
    second = runner.turn("other", prose(100, "other"), priority="background", **MOST)
    gate.go_on.set()
    assert first.result["durable"]
    assert pin.result["pinned"]
    error = second.error
    assert isinstance(error, BudgetExceeded)
    assert error.data["pinned_bytes"] > 0
    assert runner.job("unpin", "pinned").result["pinned"] is False
    assert runner.turn("other", prose(100, "other"), **MOST).result["durable"]
