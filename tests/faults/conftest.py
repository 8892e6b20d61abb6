"""What the fault tests share: a folder in memory, a codec, and the tally of everything that was tried.

A test says what it did with `tally["flips tried"] += 1` and asserts its own part of it; the end of the run prints the
sums, so that a suite that quietly stopped trying shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.model.tokenizer import TextCodec
from tests.scheduler.harness import World
from tests.support.store_data import memory_folder

TALLY = pytest.StashKey[Counter[str]]()


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Counter[str]:
    """Counts of what was tried and what came of it, over the whole run."""
    return request.config.stash.setdefault(TALLY, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tally, a line for each kind of fault (the part of a name before the comma)."""
    counts = config.stash.get(TALLY, Counter())
    if not counts:
        return
    terminalreporter.section("faults: what was tried, and what came of it")
    kinds: dict[str, list[str]] = {}
    for name, count in sorted(counts.items()):
        kind, _, what = name.partition(", ")
        kinds.setdefault(kind, []).append(f"{what} {count:,}")
    for kind, parts in kinds.items():
        terminalreporter.write_line(f"{kind:<16} {', '.join(parts)}")


@pytest.fixture
def fast_tmp() -> Iterator[Path]:
    """A folder in memory where the system has one: for catalogs, and for what a kill leaves in the page cache."""
    yield from memory_folder()


@pytest.fixture(scope="session")
def codec(tiny_model_dir: Path) -> TextCodec:
    """The tiny model's byte-level codec."""
    return TextCodec.from_folder(tiny_model_dir)


@pytest.fixture
def make_world(fast_tmp: Path, codec: TextCodec) -> Iterator[Callable[..., World]]:
    """Makes worlds, each on a disk of its own; every one is checked and closed at the end."""
    worlds: list[World] = []

    def make(**options: int) -> World:
        worlds.append(World(fast_tmp / str(len(worlds)), codec, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.check()
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A world with room for everything."""
    return make_world()
