"""Fixtures of the store's tests: an empty lossy disk, and a store on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import memory_folder, open_store


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
