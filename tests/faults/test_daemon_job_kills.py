"""`kill -9` of a real daemon in fork, rollback and delete: before the reply either state, after it the new one."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from kvd_client import Client, ConnectionLost, DaemonUnreachable
from kvd_client.errors import AgentNotFound
from tests.support.daemon import Daemon, short_folder
from tests.support.prose import prose
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

CASES: dict[str, float | None] = {"fork": 0.001, "rollback": 0.002, "delete": 0.0, "delete-late": None}
"""Operations, and how many seconds after the request the kill comes; None: after the reply."""

TOKENS = 600
CUT = 300


def attempt(daemon: Daemon, operation: str, name: str, delay_s: float | None) -> bool:
    """Ask for the operation and kill the daemon a moment later; whether the reply came first."""
    timer = threading.Timer(delay_s or 0.0, daemon.process.kill)
    with daemon.new_client() as client:
        client.health()  # connects now, so that the delay counts from the request
        try:
            if delay_s is not None:
                timer.start()
            perform(client, operation, name)
        except (ConnectionLost, DaemonUnreachable):
            return False
        finally:
            if timer.ident is not None:
                timer.join()
            daemon.kill()
    return True


def perform(client: Client, operation: str, name: str) -> None:
    """One control operation."""
    match operation:
        case "fork":
            client.fork(name, f"{name}-fork", CUT)
        case "rollback":
            client.rollback(name, CUT)
        case _:
            client.delete(name)


def tokens_of(daemon: Daemon, name: str) -> int | None:
    """How long an agent is; None when there is none."""
    try:
        return daemon.client.agent_info(name).tokens
    except AgentNotFound:
        return None


def test_control_operations_survive_kills(tiny_model_dir: Path, zygote: Zygote | None, tally: Counter[str]) -> None:
    """P2 P5: nothing half done, nothing taken back, and forks keep the pages they share with a parent that is gone."""
    text = prose(TOKENS, "a")
    replies = 0
    with short_folder() as folder, Daemon(folder, tiny_model_dir, zygote=zygote) as daemon:
        for name in CASES:
            daemon.client.inject(name, text)
            daemon.client.fork(name, f"{name}-child")
        for name, delay_s in CASES.items():
            operation = name.partition("-")[0]
            replied = attempt(daemon, operation, name, delay_s)
            replies += replied
            daemon.start()
            new = {"fork": TOKENS, "rollback": CUT, "delete": None}[operation]
            assert tokens_of(daemon, name) in ((new,) if replied else (new, TOKENS)), (operation, replied)
            if operation == "fork":
                assert tokens_of(daemon, f"{name}-fork") in ((CUT,) if replied else (CUT, None))
            assert tokens_of(daemon, f"{name}-child") == TOKENS
            tally[f"kill -9, in {operation}"] += 1
        for name in CASES:
            child = daemon.client.generate(f"{name}-child", text + " on", max_tokens=1)
            assert (child.cached_tokens, child.durable) == (TOKENS, True), (name, child.match_reason)
        assert daemon.files("*/quarantine/*") == []
        troubles = [line for line in daemon.log_lines() if line["event"] in ("log_trouble", "pages_missing")]
        assert {line.get("kind") for line in troubles} <= {"torn"}
    assert replies >= 1, "the late one"
