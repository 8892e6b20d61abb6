"""Page files that went or changed by somebody else's doing: rewritten from RAM, or computed again, and always said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvd.ids import PageId
from kvd.scheduler.views import statistics
from kvd.store.swap_ops import CheckPagesOp
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of


def look(world: World, pages: Sequence[PageId], folders: frozenset[str] = frozenset()) -> None:
    """What the watch does when it was told of changes."""
    world.swap.submit(CheckPagesOp(frozenset(pages), folders))
    while world.step_store():
        pass


def spoil(world: World, page: PageId, how: str) -> None:
    """Somebody's doing."""
    if how == "removed":
        world.fs.unlink(world.page_path(page))
    elif how == "cut":
        world.fs.poke(world.page_path(page), world.fs.read(world.page_path(page))[:-1])
    else:
        world.spoil_page(page)


@pytest.mark.parametrize("how", ["removed", "cut", "flipped"])
def test_a_resident_page_is_written_again(world: World, how: str) -> None:
    """P4 P8: a clean copy is in RAM, so nothing is lost: not now, not after a crash; it is logged and counted."""
    world.generate("a", text_of(40))
    world.settle()
    text, pages = world.text("a"), world.page_ids("a")
    spoil(world, pages[0], how)
    look(world, pages)
    assert world.events("page_files_lost") == [{"pages": 1, "first": [pages[0]]}]
    figures = statistics(world.core)
    assert (figures["page_files_lost"], figures["page_files_rewritten"]) == (1, 1)
    world.crash()
    turn = world.generate("a", text).turn
    assert turn.cached_tokens == turn.prompt_tokens - 1, turn.match_reason


@pytest.mark.parametrize("how", ["removed", "flipped"])
def test_a_page_that_is_on_disk_only_is_computed_again(world: World, how: str) -> None:
    """P4: the next turn says from which token on; the agent is durable again after it."""
    world.generate("a", text_of(40))
    world.job("evict", "a")
    text, pages = world.text("a"), world.page_ids("a")
    spoil(world, pages[0], how)
    look(world, pages)
    assert statistics(world.core)["page_files_lost"] == 1
    turn = world.generate("a", text).turn
    assert "page lost at token 0" in turn.match_reason
    assert turn.durable
    world.check()
    world.crash()
    assert world.generate("a", text).turn.cached_tokens > 0


def test_own_writes_and_unchanged_files_cost_no_reading(world: World) -> None:
    """P26: each page that kvd writes is told of, too; a look at its length and time is all it gets."""
    world.generate("a", text_of(40))
    world.settle()
    before = statistics(world.core)["bytes_read"]
    look(world, world.page_ids("a"), frozenset(page[:2] for page in world.page_ids("a", 1)))
    assert statistics(world.core)["bytes_read"] == before
    assert not world.events("page_files_lost")


def test_after_a_restart_a_touched_page_is_verified_once(make_world: Callable[..., World]) -> None:
    """Of files found at start only their length is known: the first notification has them read, and no more."""
    world = make_world()
    world.generate("a", text_of(40))
    world.settle()
    world.crash(lossy=False)
    pages = world.page_ids("a")
    look(world, pages)
    read = int(str(statistics(world.core)["bytes_read"]))
    assert read > 0
    look(world, pages)
    assert statistics(world.core)["bytes_read"] == read
    assert not world.events("page_files_lost")


def test_a_page_of_nobody_is_passed_over(world: World) -> None:
    """Pages that were deleted, and names that never were a page of ours."""
    world.generate("a", text_of(40))
    pages = world.page_ids("a")
    world.job("delete", "a")
    world.settle()
    look(world, [*pages, PageId("f" * 32)])
    assert not world.events("page_files_lost")
