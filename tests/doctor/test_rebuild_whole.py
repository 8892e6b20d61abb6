"""P5 P8: catalog, VERSION and every side file are lost; what an engine left comes back from logs and page headers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.ids import AgentId, Namespace
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.requests import AgentRef, TurnRequest
from kvd.scheduler.views import agent_list
from tests.doctor.folders import look_at, pages
from tests.scheduler.harness import content
from tests.scheduler.test_engine import Answer, Runner, make_runner  # noqa: F401
from tests.scheduler.test_turn import text_of

ON_DISK = ("resident_pages", "swapped_pages", "resident_bytes")
"""What a restart changes: everything is on disk."""

IN_RAM = ("used_s", "idle_s", "expires_s", "expires_in_s")
"""What a log tells of the last record alone: being forked or evicted makes none."""


@pytest.fixture(scope="module")
def codec(tiny_model_dir: Path) -> TextCodec:
    """The tiny model's byte-level codec."""
    return TextCodec.from_folder(tiny_model_dir)


def fill(runner: Runner) -> list[dict[str, Any]]:
    """Two namespaces, a fork that shares pages, a branch beside the current one, a pin, an agent of one token."""
    runner.turn("a", "a" + text_of(60)).wait()
    assert runner.job("fork", "a", new_agent="child").wait()[1] is None
    runner.turn("a", "a" + text_of(50) + "another way").wait()
    runner.turn("short", "s", max_tokens=1).wait()
    other = AgentRef(Namespace("other"), AgentId("a"))
    answer = Answer()
    runner._submit(TurnRequest(runner.engine.new_request_id(), other, content(text_of(30)), max_tokens=2), answer)
    answer.wait()
    assert runner.job("pin", "child").wait()[1] is None
    for name in ("a", "short"):
        assert runner.job("evict", name).wait()[1] is None
    return state(runner)


def state(runner: Runner) -> list[dict[str, Any]]:
    """Everything that must come back: lists, every branch's text and ids, which pages are mapped by whom."""
    for name in ("a", "short", "child"):
        runner.job("wake", name).wait()
    listed = runner.look(lambda core: agent_list(core, None))
    branches = runner.look(
        lambda core: {
            (str(agent.ref), number): (
                bytes(branch.text),
                tuple(branch.tokens),
                branch.computed,
                tuple(ref.page_id for segment in core.pager.segments(branch.space) for ref in segment.refs),
            )
            for agent in core.agents
            for number, branch in agent.branches.items()
        }
    )
    return [{k: v for k, v in agent.items() if k not in ON_DISK + IN_RAM} for agent in listed] + [branches]


def lose(root: Path) -> None:
    """Everything but logs and page files."""
    for name in ("VERSION", "CACHEDIR.TAG", "engine.json"):
        (root / name).unlink(missing_ok=True)
    for path in root.glob("*/catalog.sqlite3*"):
        path.unlink()


def test_everything_an_engine_left_comes_back(
    make_runner: Callable[..., Runner],  # noqa: F811
    tiny_model_dir: Path,
) -> None:
    """Agents, namespaces, branches, forks with the pages they share, pins; and every agent goes on at its token."""
    first = make_runner()
    left = fill(first)
    first.stop()
    root = first.root
    files = {path: path.read_bytes() for path in (*pages(root), *root.glob("*/agents/*"))}
    lose(root)
    report = look_at(root, tiny_model_dir, rebuild=True)
    assert report.refused is None
    assert any("rebuilt the catalog: 4 agents" in line for line in report.repaired)
    assert {path: path.read_bytes() for path in files} == files
    second = make_runner()
    assert state(second) == left
    for name in ("a", "child", "short"):
        text = second.look(
            lambda core, name=name: core.agents.get(AgentRef(Namespace("default"), AgentId(name))).branch
        )
        result = second.turn(name, bytes(text.text).decode() + " on").result
        assert result["durable"]
        assert "lost" not in result["match_reason"]


def test_pages_whose_logs_are_gone_too_are_set_aside(
    make_runner: Callable[..., Runner],  # noqa: F811
    tiny_model_dir: Path,
) -> None:
    """What cannot come back is not destroyed: without logs there is no text, and pages go to quarantine."""
    first = make_runner()
    fill(first)
    first.stop()
    root = first.root
    kept = sorted(path.read_bytes() for path in pages(root))
    lose(root)
    for path in root.glob("*/agents/*"):
        path.unlink()
    report = look_at(root, tiny_model_dir, rebuild=True)
    assert pages(root) == []
    assert sorted(path.read_bytes() for path in root.glob("*/quarantine/*.safetensors")) == kept
    assert any(f"put {len(kept)} files into quarantine" in line for line in report.repaired)
