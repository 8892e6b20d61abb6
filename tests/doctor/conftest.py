"""A data folder that a daemon with the tiny model left, made once and copied for each test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, short_folder
from tests.support.prose import prose
from tests.support.store_data import memory_folder
from tests.support.zygote import Zygote


@pytest.fixture(scope="session")
def served(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Path]:
    """What a stopped daemon left: agents `ada` (two turns) and `bob` (one), each with two sealed pages and a tail."""
    with short_folder() as folder:
        with Daemon(folder, tiny_model_dir, zygote=zygote) as daemon:
            for name in ("ada", "bob"):
                daemon.client.generate(name, prose(600, name), max_tokens=4, temperature=0)
            daemon.client.generate("ada", prose(700, "ada"), max_tokens=4, temperature=0)
            daemon.terminate()
        yield daemon.data_dir


@pytest.fixture
def data(served: Path) -> Iterator[Path]:
    """A healthy data folder of the test's own."""
    for folder in memory_folder():
        yield Path(shutil.copytree(served, folder / "data"))
