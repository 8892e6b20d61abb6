"""Fixtures of the store's tests: an empty lossy disk, and a store on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import ModelAgent, memory_folder, open_store
from tests.support.store_turns import good


@pytest.fixture
def fs() -> Iterator[LossyFileSystem]:
    """An empty disk."""
    for folder in memory_folder():
        yield LossyFileSystem(folder / "side")


@pytest.fixture
def store(fs: LossyFileSystem) -> Iterator[SwapStore]:
    """A store on it."""
    _, _, made = open_store(fs)
    yield made
    made.close()


@pytest.fixture
def ada(store: SwapStore) -> ModelAgent:
    """An agent with a sealed page and an open one, in the store."""
    return good(store, good(store, ModelAgent("ada"), 300), 41)


@pytest.fixture
def disks() -> Iterator[Path]:
    """A folder for disks."""
    yield from memory_folder()
