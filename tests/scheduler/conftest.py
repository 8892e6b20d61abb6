"""A codec made once, and worlds to run turns in."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.model.tokenizer import TextCodec
from tests.scheduler.harness import World


@pytest.fixture(scope="session")
def codec(tiny_model_dir: Path) -> TextCodec:
    """The tiny model's byte-level codec."""
    return TextCodec.from_folder(tiny_model_dir)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory where the system has one: only the catalog's files are real, and its flushes cost time."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvd-world-", dir=base) as folder:
        yield Path(folder)


@pytest.fixture
def make_world(memory_folder: Path, codec: TextCodec) -> Iterator[Callable[..., World]]:
    """Makes worlds; each is checked and closed at the end."""
    worlds: list[World] = []

    def make(**options: int) -> World:
        world = World(memory_folder / str(len(worlds)), codec, **options)
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.check()
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A world with room for everything."""
    return make_world()
