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
    """P26: files are as the start found them until somebody touches one: that one is read, once; the others never."""
    world = make_world()
    world.generate("a", text_of(40))
    world.settle()
    world.crash(lossy=False)
    pages, everything = world.page_ids("a"), frozenset(f"{number:02x}" for number in range(256))
    look(world, pages, everything)
    assert statistics(world.core)["bytes_read"] == 0
    path = world.page_path(pages[0])
    data = world.fs.read(path)
    world.fs.poke(path, data)
    for _ in range(2):
        look(world, pages, everything)
        assert statistics(world.core)["bytes_read"] == len(data)
    assert not world.events("page_files_lost")


def test_a_swap_folder_that_is_away_for_a_moment_costs_nothing(world: World) -> None:
    """P4: a disk that is not mounted says nothing of pages, in RAM or not; with the folder everything is back."""
    world.generate("a", text_of(40))
    world.job("evict", "a")
    text, computed = world.text("a"), world.agent("a").branch.computed
    folder = world.folder.swap_folder(world.spec.fingerprint)
    away = folder.with_name("away")
    world.fs.rename(folder, away)
    look(world, world.page_ids("a"), frozenset(f"{number:02x}" for number in range(256)))
    assert not world.events("page_files_lost")
    assert any("away" in str(facts["fact"]) for facts in world.events("store"))
    world.fs.rename(away, folder)
    turn = world.generate("a", text + " on", max_tokens=1).turn
    assert turn.cached_tokens == computed
    assert "lost" not in turn.match_reason


def test_pages_that_went_with_the_folder_are_written_again_once_there_is_another(world: World) -> None:
    """P4 P8: the next write makes the folder anew; the look that a new folder causes finds what went with the old."""
    world.generate("a", text_of(40), max_tokens=1)
    world.settle()
    pages = world.page_ids("a")
    world.fs.remove_tree(world.folder.swap_folder(world.spec.fingerprint))
    world.generate("b", "other " + text_of(33), max_tokens=1)
    look(world, (), frozenset(f"{number:02x}" for number in range(256)))
    (event,) = world.events("page_files_lost")
    assert event["pages"] >= len(pages)
    world.settle()
    assert all(world.fs.stat(world.page_path(page)) is not None for page in pages)


def test_a_page_of_nobody_is_passed_over(world: World) -> None:
    """Pages that were deleted, and names that never were a page of ours."""
    world.generate("a", text_of(40))
    pages = world.page_ids("a")
    world.job("delete", "a")
    world.settle()
    look(world, [*pages, PageId("f" * 32)])
    assert not world.events("page_files_lost")
