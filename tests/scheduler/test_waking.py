"""Agents that sleep since the start, as whoever uses them sees it: not at all."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import AgentExists, Cancelled
from kvd.scheduler.chat import held_texts
from kvd.scheduler.importing import warm_first
from kvd.scheduler.upkeep import Upkeep
from kvd.scheduler.views import agent_list, residency, statistics
from kvd.scheduler.waiting import Wait
from kvd.store.errors import DiskFault
from tests.scheduler.harness import World, ref_of
from tests.scheduler.test_engine import WAIT_S, Runner, make_runner  # noqa: F401
from tests.scheduler.test_turn import text_of

AGENTS = ("a", "b", "c")
LENGTHS = {"a": 40, "b": 60, "c": 20}


@pytest.fixture
def started(make_runner: Callable[..., Runner]) -> Callable[..., Runner]:  # noqa: F811
    """Starts an engine on a folder of three agents, none of which is read; `sharing` of that engine."""
    first = make_runner(sharing="agent")
    for name in AGENTS:
        first.turn(name, name + text_of(LENGTHS[name])).wait()
    listed = first.look(lambda core: agent_list(core, None))
    first.stop()

    def start(sharing: str = "agent") -> Runner:
        second = make_runner(sharing=sharing, read_agents=0)
        second.listed = listed  # type: ignore[attr-defined]
        assert second.look(lambda core: len(core.agents.asleep)) == len(AGENTS)
        return second

    return start


def asleep(engine: Runner) -> set[str]:
    """Who sleeps."""
    return {ref.agent for ref in engine.look(lambda core: list(core.agents.asleep))}


def test_a_list_shows_sleepers_as_they_are(started: Callable[..., Runner]) -> None:
    """P40: the same figures as before the restart, but for what was in RAM; and nobody is woken for it."""
    engine = started()
    shown = engine.look(lambda core: agent_list(core, None))
    on_disk = ("resident_pages", "swapped_pages", "resident_bytes", "used_s", "idle_s")
    for was, now in zip(engine.listed, shown, strict=True):  # type: ignore[attr-defined]
        assert now["used_s"] == pytest.approx(was["used_s"], abs=5.0)  # of the record, which is a moment older
        assert {k: v for k, v in was.items() if k not in on_disk} == {k: v for k, v in now.items() if k not in on_disk}
        assert (now["resident_pages"], now["resident_bytes"]) == (0, 0)
        assert now["swapped_pages"] == was["resident_pages"] + was["swapped_pages"]
    figures = engine.look(statistics)
    assert (figures["agents"], figures["agents_asleep"]) == (3, 3)
    assert engine.look(lambda core: residency(core, None))["asleep"] == 3
    assert asleep(engine) == set(AGENTS)


def test_a_turn_wakes_its_agent_and_no_other(started: Callable[..., Runner]) -> None:
    """P14: it goes on at the exact token, durably."""
    engine = started()
    text = "b" + text_of(LENGTHS["b"])
    before = next(each for each in engine.listed if each["agent"] == "b")  # type: ignore[attr-defined]
    turn = engine.turn("b", text).result
    assert turn["durable"]
    assert turn["match"] == "diverge", "the prompt is the text without its answer"
    assert turn["cached_tokens"] == turn["prompt_tokens"] - 1
    assert turn["prompt_tokens"] < before["tokens"]
    assert asleep(engine) == {"a", "c"}


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("fork", {"new_agent": "d"}),
        ("rollback", {"tokens": 5}),
        ("delete", {}),
        ("pin", {}),
        ("evict", {}),
        ("wake", {}),
    ],
)
def test_every_operation_wakes_its_agent(
    started: Callable[..., Runner], operation: str, arguments: dict[str, Any]
) -> None:
    """P10: none takes a sleeping agent for one that does not exist."""
    engine = started()
    assert engine.job(operation, "a", **arguments).wait()[1] is None
    assert "a" not in asleep(engine)
    exists = engine.look(lambda core: core.agents.find(ref_of("a")) is not None)
    assert exists == (operation != "delete")


def test_a_chat_reads_what_a_sleeper_said_first(started: Callable[..., Runner]) -> None:
    """P17: its history is matched with what the agent holds, so the agent is woken before, not taken for empty."""
    engine = started()
    assert engine.look(lambda core: held_texts(core, ref_of("a"), with_tokens=True)) is None
    assert engine.job("prefetch", "a").wait()[1] is None
    held = engine.look(lambda core: held_texts(core, ref_of("a"), with_tokens=True))
    assert held is not None
    assert len(held) == 1
    assert held[0].typed.data.startswith(b"a")


def test_the_name_of_a_sleeper_is_taken(started: Callable[..., Runner]) -> None:
    """P10: nobody can fork onto it."""
    engine = started()
    assert isinstance(engine.job("fork", "a", new_agent="b").error, AgentExists)


def test_a_log_that_cannot_be_read_now_is_asked_for_again(
    started: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P8: whoever asked is told, the agent goes on sleeping, and the next request has it."""
    engine = started()

    def refuse(path: Path, **options: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(engine.fs, "read", refuse)
        assert isinstance(engine.turn("a", "a" + text_of(LENGTHS["a"])).error, DiskFault)
    assert "a" in asleep(engine)
    assert engine.turn("a", "a" + text_of(LENGTHS["a"])).result["match"] == "diverge"


def test_sleepers_of_a_namespace_in_use_wake_when_nothing_else_is_to_do(started: Callable[..., Runner]) -> None:
    """P18: what they have computed can be shared again; without sharing nobody is woken for it."""
    engine = started(sharing="namespace")
    assert asleep(engine) == set(AGENTS)
    engine.turn("new", "q" + text_of(5)).wait()
    deadline_s = time.monotonic() + WAIT_S
    while asleep(engine):
        assert time.monotonic() < deadline_s
    assert engine.look(lambda core: len(core.agents)) == len(AGENTS) + 1


def test_waking_unasked_is_bounded_and_stops_while_memory_is_short(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P21: texts and ids are outside the budget; those used last come first, those with nothing to share never."""
    world = make_world()
    for name, lines in {"a": 40, "short": 2, "b": 45, "c": 50}.items():
        world.generate(name, name + text_of(lines), max_tokens=1)
    world.settle()
    world.read_agents = 0
    world.crash(lossy=False)
    core, sleepers = world.core, world.core.agents.asleep
    tokens = {ref.agent: agent.row.tokens for ref, agent in sleepers.items()}
    for second, name in enumerate(("a", "short", "b", "c")):
        row = replace(sleepers[ref_of(name)].row, updated_s=float(second))
        sleepers[ref_of(name)] = replace(sleepers[ref_of(name)], row=row)
    core.agents.in_use.add(ref_of("a").namespace)
    monkeypatch.setattr("kvd.scheduler.upkeep.MAX_WOKEN_TOKENS", tokens["a"] + tokens["c"])
    upkeep = Upkeep(core, lambda: world.now_s, 1.0)
    core.pressure.level = "soft"
    assert upkeep.next_job(idle=True) is None
    core.pressure.level = "none"
    assert upkeep.next_job(idle=False) is None
    assert upkeep.next_job(idle=True) == (ref_of("c"), "wake")
    assert upkeep.next_job(idle=True) == (ref_of("a"), "wake"), "b is one too many"
    assert upkeep.next_job(idle=True) is None


def test_a_sleeper_whose_folder_vanished_is_gone(started: Callable[..., Runner]) -> None:
    """P8: its name is new again, and the log says what went; whoever turns up next is served."""
    engine = started()
    shutil.rmtree(next(engine.root.glob("*/agents")))
    assert engine.turn("b", "b" + text_of(LENGTHS["b"])).result["match"] == "new"
    for name in ("a", "c"):
        assert engine.turn(name, name + text_of(LENGTHS[name])).result["durable"]
    assert asleep(engine) == set()
    assert sum(event == "log_trouble" for event, _ in engine.logged) == len(AGENTS)


def test_a_request_can_be_cancelled_while_its_agent_wakes(world: World) -> None:
    """It ends at once with its reason; the log is read all the same, and whoever comes next finds the agent awake.

    A timeout ends a request the same way.
    """
    assert world.generate("a", text_of(40), max_tokens=1).turn.durable
    world.settle()
    world.close()
    world.read_agents = 0
    world.start()
    reason: list[str] = []
    began: list[bool] = []

    def work() -> Generator[Wait, None, object]:
        began.append(True)
        yield None

    waiting = warm_first(world.core, [ref_of("a")], lambda: reason[0] if reason else None, work())
    wait = next(waiting)
    assert callable(wait)
    assert not wait()
    reason.append("timeout")
    assert wait()
    with pytest.raises(Cancelled, match="timeout"):
        next(waiting)
    assert not began
    assert ref_of("a") in world.core.agents.waking
    assert world.step_store()
    assert world.has("a")
    assert not world.core.agents.waking
