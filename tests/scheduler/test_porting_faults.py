"""Exports and imports on disks that refuse, under limits, cancelled and killed: all or nothing."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvd.errors import BudgetExceeded, Cancelled
from kvd.store.agent_file import read_header
from kvd.store.errors import QuotaExceeded
from tests.scheduler.harness import ROOT, World
from tests.scheduler.porting import (
    FILE,
    MakeWorld,
    bring,
    carry,
    export,
    make_out,
    pages_of,
    swap_files,
    with_agent,
)
from tests.scheduler.test_turn import text_of


def test_a_full_disk_leaves_no_file_and_no_agent(world: World) -> None:
    """P3 P21: whichever write is refused, export or import; then both work."""
    text = with_agent(world)
    for only in (".tmp", "out"):
        world.refuse_writes(only=only)
        assert export(world).error is not None
        world.heal()
        world.settle()
        assert [path for path in world.fs.live_files() if path.parent == FILE.parent] == []
    export(world)
    before = swap_files(world)
    for only in (".safetensors", ".log"):
        world.refuse_writes(only=only)
        error = bring(world, "b").error
        assert error is not None
        assert "No space left" in error.message
        world.heal()
        world.settle()
        assert not world.has("b")
        assert swap_files(world) == before
    world.crash()
    assert not world.has("b")
    assert bring(world, "b").facts["durable"]
    assert world.text("b") == text


def test_a_disk_that_cannot_read_the_file(world: World) -> None:
    """The fault names the file, not the data folder."""
    with_agent(world)
    export(world)
    world.fs.fail = lambda number, name, path: errno.EIO if name == "read" and path == FILE else None
    error = bring(world, "b").error
    assert error is not None
    assert (error.name, error.data["errno_name"]) == ("file", "EIO")


def test_quota_budget_and_context_hold(make_world: MakeWorld) -> None:
    """P21 P22: with the figures, before anything is written."""
    here, there = make_world(), make_world(seed=6, budget_pages=10)
    with_agent(here, 110)
    export(here)
    carry(here, there)
    error = bring(there).error
    assert isinstance(error, BudgetExceeded)
    assert int(str(error.data["needed_bytes"])) > int(str(error.data["usable_bytes"]))
    here.quota_bytes = here.folder.used_bytes() + 200_000
    here.crash(lossy=False)
    before = swap_files(here)
    error = bring(here, "b").error
    assert isinstance(error, QuotaExceeded)
    assert int(str(error.data["wanted_bytes"])) >= read_header(here.fs, FILE)[0].pages_bytes
    assert swap_files(here) == before
    assert not here.has("b")


@pytest.mark.parametrize("calls", range(12))
def test_cancelled_anywhere_it_leaves_nothing(world: World, calls: int) -> None:
    """P34: what was written goes; an import that came to its record is done."""
    with_agent(world)
    if calls % 2:
        asked = iter(range(calls // 2))
        outcome = export(world, stop=lambda: None if next(asked, None) is not None else "enough")
        world.settle()
        if outcome.error is not None:
            assert isinstance(outcome.error, Cancelled)
            assert [path for path in world.fs.live_files() if path.parent == FILE.parent] == []
            assert [path for path in world.fs.live_files() if path.parent == ROOT / "exports"] == []
        return
    export(world)
    before = swap_files(world)
    asked = iter(range(calls // 2))
    outcome = bring(world, "b", stop=lambda: None if next(asked, None) is not None else "enough")
    world.settle()
    if outcome.error is not None:
        assert isinstance(outcome.error, Cancelled)
        assert not world.has("b")
        assert swap_files(world) == before


@pytest.mark.parametrize("operation", ["export", "import", "replace"])
@pytest.mark.parametrize("seed", range(3))
def test_a_crash_anywhere_leaves_all_or_nothing(make_world: MakeWorld, operation: str, seed: int) -> None:
    """P3 P5: kill -9 before each change of the disk: no half agent, no orphan, no unfinished file after the start."""

    class Killed(BaseException):
        """The process is gone."""

    world = make_world(seed=seed)
    text = with_agent(world)
    world.generate("b", text_of(10) + " old", max_tokens=1)
    old = world.text("b")
    make_out(world)
    if operation != "export":
        export(world)
    step = 0
    while True:
        world.settle()
        changes = 0

        def fail(number: int, name: str, path: Path | None, step: int = step) -> int | None:
            nonlocal changes
            if name != "read":
                changes += 1
                if changes > step:
                    raise Killed
            return None

        world.fs.fail = fail
        name = "c" if operation == "import" else "b"
        try:
            outcome = export(world) if operation == "export" else bring(world, name, replace=operation == "replace")
        except Killed:
            outcome = None
        world.swap.queue.clear()
        world.crash()
        assert world.text("a") == text
        files = world.fs.live_files()
        assert not [path for path in files if path.name.endswith(".tmp")]
        assert not [path for path in files if path.parent == ROOT / "exports"]
        named = {world.page_path(page) for each in ("a", "b", "c") if world.has(each) for page in pages_of(world, each)}
        assert swap_files(world) == named
        if operation == "export":
            if FILE in files:
                assert bring(world, "c").facts["durable"]
                world.job("delete", "c")
                world.fs.unlink(FILE)
        elif world.has("c"):
            assert world.text("c") == text
            world.job("delete", "c")
        assert world.text("b") in ((old, text) if operation == "replace" else (old,))
        if outcome is not None:
            assert outcome.facts
            break
        step += 1 + step // 3
    assert step > 4
