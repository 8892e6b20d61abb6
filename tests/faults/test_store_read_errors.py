"""P3 P8: reads that the disk refuses for a moment cost nothing; for longer, computing, and never a good file."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.model.tokenizer import TextCodec
from kvd.quant.spec import PAGE_TOKENS
from kvd.store.layout import DataFolder
from kvd.vm.page import PageState
from tests.scheduler.harness import ROOT, World
from tests.scheduler.test_turn import text_of
from tests.support.store_data import memory_folder


@pytest.fixture
def world(tiny_model_dir: Path) -> Iterator[World]:
    """Disk and engine, with an agent `a` of more than two pages a group and a tail, all of it on disk only."""
    for folder in memory_folder():
        made = World(folder, TextCodec.from_folder(tiny_model_dir))
        made.generate("a", text_of(60), max_tokens=2)
        made.settle()
        assert made.job("evict", "a").facts["resident_pages"] == 0
        yield made
        made.check()
        made.close()


def refuse_reads(world: World, times: int, what: Callable[[Path], bool], code: int) -> list[Path]:
    """The next `times` reads of each path that is meant fail; returns the refusals as they happen."""
    refused: list[Path] = []

    def fail(number: int, name: str, path: Path | None) -> int | None:
        if name != "read" or path is None or not what(path) or refused.count(path) >= times:
            return None
        refused.append(path)
        return code

    world.fs.fail = fail
    return refused


def is_page(path: Path) -> bool:
    """Whether it is a page's file."""
    return path.suffix == ".safetensors"


def is_log(path: Path) -> bool:
    """Whether it is an agent's log."""
    return path.suffix == ".log"


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ESTALE])
@pytest.mark.parametrize("times", [1, 2])
def test_a_read_refused_once_or_twice_costs_no_token(world: World, tally: Counter[str], code: int, times: int) -> None:
    """Read again at once, and once more after a tick: the turn has all its cached tokens, no file was touched."""
    tokens = len(world.agent("a").branch.tokens)
    refused = refuse_reads(world, times, is_page, code)
    turn = world.generate("a", world.text("a") + " on", max_tokens=1).turn
    assert len(refused) >= 2 * times
    assert turn.cached_tokens >= tokens - 1
    assert world.core.memory.statistics.load_failures == 0
    assert {event for event, _ in world.logged} >= {"page_read_refused"}
    tally["disk faults, reads refused"] += len(refused)


def test_a_tail_whose_read_was_refused_is_read_again(world: World) -> None:
    """The log is as good as the pages."""
    tokens = len(world.agent("a").branch.tokens)
    assert tokens % PAGE_TOKENS > 1
    refused = refuse_reads(world, 2, is_log, errno.EIO)
    assert world.generate("a", world.text("a") + " on", max_tokens=1).turn.cached_tokens >= tokens - 1
    assert len(refused) == 2


def test_a_file_that_stays_unreadable_is_computed_again_and_kept(world: World) -> None:
    """The request goes on without it; the file, which may be good, stays until a start finds that no log names it."""
    names = DataFolder(ROOT, world.fs)
    page = names.page_path(world.spec.fingerprint, world.page_ids("a")[1])
    good = world.fs.read(page)
    refused = refuse_reads(world, 10**6, lambda path: path == page, errno.EIO)
    turn = world.generate("a", world.text("a") + " on", max_tokens=1).turn
    assert refused == [page] * 3
    assert turn.cached_tokens == PAGE_TOKENS
    assert turn.durable
    world.heal()
    world.settle()
    world.tick()
    world.settle()
    assert world.fs.read(page) == good
    assert not world.fs.listdir(names.quarantine_folder(world.spec.fingerprint))
    assert world.generate("a", world.text("a"), max_tokens=1).turn.durable
    world.crash()
    assert world.fs.stat(page) is None, "no log names it any more"
    assert world.generate("a", world.text("a"), max_tokens=1).turn.cached_tokens > 2 * PAGE_TOKENS


def test_a_corrupt_file_is_lost_at_once(world: World) -> None:
    """P4: reading rot again does not help."""
    world.spoil_page(world.page_ids("a")[1])
    reads = refuse_reads(world, 0, is_page, errno.EIO)
    turn = world.generate("a", world.text("a") + " on", max_tokens=1).turn
    assert turn.cached_tokens == PAGE_TOKENS
    assert not reads
    assert "page_read_refused" not in {event for event, _ in world.logged}


def test_an_agent_deleted_while_its_page_waits_to_be_read_again_leaves_nothing(world: World) -> None:
    """The load ends as any other does; its frame and its file are freed."""
    refuse_reads(world, 2, is_page, errno.EIO)
    world.job("prefetch", "a")
    for _ in range(8):
        world.step_store()
    assert world.job("delete", "a").error is None
    world.heal()
    for _ in range(3):
        world.tick()
        world.settle()
    assert world.core.pager.statistics().resident_bytes == 0
    assert PageState.LOADING not in {page.state for page in world.core.pager._table}
    assert not [path for path in world.fs.live_files() if is_page(path)]
