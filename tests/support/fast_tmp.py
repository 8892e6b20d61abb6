"""A temporary folder in memory where there is one: for databases that a test may lose, as their fsyncs are slow."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_tmp() -> Iterator[Path]:
    """A private folder, on a memory disk where the machine has one."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="kvd-", dir=base))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
