"""What `health` says of a disk that is full, read-only, failing or slow, and that it stops saying so by itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from kvd.scheduler.disk_health import SLOW_S, DiskHealth
from kvd.scheduler.views import disk_facts, statistics
from kvd.store.errors import DiskFault, QuotaExceeded
from kvd.store.swap_ops import FlushOp, SwapResult
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of
from tests.store.test_swap_thread import page_op, read_op


def fault(code: int = errno.ENOSPC) -> DiskFault:
    """What the store makes of an OSError."""
    return DiskFault("Writing a page", "/data", OSError(code, "no"))


def test_a_success_of_the_same_kind_ends_a_refusal() -> None:
    """A full disk can be read: reading says nothing about writing."""
    health, write = DiskHealth(), page_op("a")
    assert health.facts() == {"disk": "ok", "disk_reason": None}
    health.note(SwapResult(write, fault(), 0.1))
    health.note(SwapResult(read_op(write), None, 0.1))
    assert health.state == "refuses"
    assert "No space left" in str(health.reason)
    health.note(SwapResult(write, None, 0.1))
    assert health.facts() == {"disk": "ok", "disk_reason": None}
    health.note(SwapResult(read_op(write), fault(errno.EIO), 0.1))
    assert health.state == "refuses"
    assert health.episodes == 2


def test_a_full_quota_refuses_and_a_long_wait_is_slow() -> None:
    """Both are told apart; what is neither page nor record says nothing."""
    health, write = DiskHealth(), page_op("a")
    health.note(SwapResult(write, None, SLOW_S + 1))
    assert health.facts()["disk"] == "slow"
    health.note(SwapResult(FlushOp.__new__(FlushOp), None, 0.0))
    assert health.state == "slow"
    health.note(SwapResult(write, QuotaExceeded(used_bytes=9, wanted_bytes=2, quota_bytes=10, reserved_bytes=0), 0.1))
    assert health.state == "refuses"


@pytest.mark.parametrize("code", [errno.ENOSPC, 0])
def test_the_reason_says_why_and_not_whose(code: int) -> None:
    """P19: health and events go to everybody: the record that failed is not said to be of somebody's agent."""
    health = DiskHealth()
    refused = DiskFault("Committing record 3 of agent 'secret'", "/data/secret", OSError(code, "secret"))
    assert "secret" in refused.message
    health.note(SwapResult(read_op(page_op("a")), refused, 0.1))
    told = os.strerror(code) if code else "it failed"
    assert health.reason == f"reads: {told}. Check the disk that holds the data folder; it is retried."


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_shows_in_health_until_it_heals(make_world: Callable[..., World], code: int) -> None:
    """P2 P38: the turn is served from RAM, health names the reason, one line says so; nobody need do anything after."""
    world = make_world()
    assert disk_facts(world.core) == {
        "swap": "on",
        "disk": "ok",
        "disk_reason": None,
        "disk_quotas_full": [],
        "disk_quotas_too_small": [],
    }
    world.refuse_writes(code)
    outcome = world.generate("a", text_of(30))
    assert not outcome.turn.durable
    facts = disk_facts(world.core)
    assert facts["disk"] == "refuses"
    assert str(facts["disk_reason"])
    world.generate("a", text_of(30) + "more")
    assert len(world.events("disk_health")) == 1
    world.heal()
    for _ in range(40):
        world.tick()
        while world.step_store():
            pass
        world.save_unsaved()
    assert disk_facts(world.core)["disk"] == "ok"
    assert world.agent("a").unsaved is None
    assert [facts["disk"] for facts in world.events("disk_health")] == ["refuses", "ok"]
    assert statistics(world.core)["disk_refusals"] == 1
