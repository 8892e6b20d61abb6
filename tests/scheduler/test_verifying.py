"""Page files that rot while their pages are in RAM: found by `verify`, written anew from the clean copies there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from kvd.store.layout import page_of_file
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of

WHOLE = {"rewritten_pages": 0, "bad_pages": 0, "unread_pages": 0}


def figures(facts: dict[str, object]) -> dict[str, object]:
    """What verify counted, without how many files it read."""
    return {name: facts[name] for name in WHOLE}


def agent(world: World) -> int:
    """An agent with sealed pages that are in RAM and on disk; returns how many."""
    world.generate("a", text_of(60), max_tokens=1)
    world.settle()
    return len(world.page_ids("a", 0)) + len(world.page_ids("a", 1))


def page_path(world: World, page: str) -> Path:
    """Its file."""
    return next(path for path in world.fs.live_files() if page_of_file(path.name) == page)


def test_good_files_are_left_alone(world: World) -> None:
    """P26: every page is read, none is written."""
    pages = agent(world)
    written = world.swap.statistics().pages_written
    facts = world.job("verify", "a").facts
    assert facts["checked_pages"] == pages > 0
    assert figures(facts) == WHOLE
    assert world.swap.statistics().pages_written == written


def test_bad_files_of_resident_pages_are_written_anew(world: World) -> None:
    """P4: one flipped bit and one file that is gone; afterwards the agent resumes from disk at its exact token."""
    agent(world)
    spoilt, gone = world.page_ids("a")[:2]
    good = {page: world.fs.read(page_path(world, page)) for page in (spoilt, gone)}
    world.spoil_page(spoilt)
    world.fs.unlink(page_path(world, gone))
    facts = world.job("verify", "a").facts
    assert figures(facts) == WHOLE | {"rewritten_pages": 2}
    assert {page: world.fs.read(page_path(world, page)) for page in (spoilt, gone)} == good
    assert len([path for path in world.fs.live_files() if "quarantine" in path.parts]) == 1
    assert len(world.events("page_file_bad")) == 2
    assert figures(world.job("verify", "a").facts) == WHOLE
    computed = world.agent("a").branch.computed
    world.job("evict", "a")
    turn = world.generate("a", world.text("a") + "!", max_tokens=1).turn
    assert (turn.cached_tokens, turn.durable) == (computed, True)
    assert not world.events("page_lost")


def test_a_repair_survives_a_kill(world: World) -> None:
    """P2 P4: what verify said is good again is good after a crash, too."""
    agent(world)
    world.spoil_page(world.page_ids("a")[0])
    assert world.job("verify", "a").facts["rewritten_pages"] == 1
    computed, text = world.agent("a").branch.computed, world.text("a")
    world.crash()
    assert not world.report.missing_pages
    assert world.generate("a", text + "!", max_tokens=1).turn.cached_tokens == computed


def test_a_bad_file_of_a_page_on_disk_only_is_told_and_computed_again(world: World) -> None:
    """P4 P8: there is no good copy anywhere; the next turn says from where on it computes again."""
    agent(world)
    world.job("evict", "a")
    world.spoil_page(world.page_ids("a")[1])
    facts = world.job("verify", "a").facts
    assert figures(facts) == WHOLE | {"bad_pages": 1}
    turn = world.generate("a", world.text("a") + "!", max_tokens=1).turn
    assert "page lost at token 256" in turn.match_reason
    assert turn.durable


def test_a_disk_that_refuses_is_not_a_bad_page(world: World) -> None:
    """P8: what cannot be read is neither quarantined nor rewritten."""
    pages = agent(world)
    world.fs.fail = lambda number, name, path: errno.EIO if name == "read" else None
    facts = world.job("verify", "a").facts
    world.fs.fail = lambda number, name, path: None
    assert figures(facts) == WHOLE | {"unread_pages": pages}
    assert not [path for path in world.fs.live_files() if "quarantine" in path.parts]
    assert figures(world.job("verify", "a").facts) == WHOLE


def test_shared_pages_are_repaired_for_all_who_map_them(make_world: Callable[..., World]) -> None:
    """P4 P18: a fork's page is its parent's; repaired through one, it serves both."""
    world = make_world()
    agent(world)
    world.job("fork", "a", new_agent="b")
    world.spoil_page(world.page_ids("a")[0])
    assert world.job("verify", "b").facts["rewritten_pages"] == 1
    for name in ("a", "b"):
        world.job("evict", name)
        computed = world.agent(name).branch.computed
        assert world.generate(name, world.text(name) + "!", max_tokens=1).turn.cached_tokens == computed
