"""Daemons for the end-to-end tests: one shared by a module, and a factory for tests that kill theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvd.model.errors import DownloadFailed
from tests.support.daemon import Daemon, MakeDaemon, short_folder
from tests.support.smollm2 import smollm2_folder
from tests.support.zygote import Zygote


@pytest.fixture(scope="module")
def daemon(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Daemon]:
    """A running daemon that the module's tests share; each uses agents of its own. `--check` is on."""
    with short_folder() as folder, Daemon(folder, tiny_model_dir, zygote=zygote) as running:
        yield running


@pytest.fixture
def make_daemon(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[MakeDaemon]:
    """A factory of daemons, each on a folder of its own."""
    with ExitStack() as stack:

        def make(*options: str, model: Path | None = None, umask: int = 0o022) -> Daemon:
            folder = stack.enter_context(short_folder())
            made = Daemon(folder, model or tiny_model_dir, ("--check", *options), umask=umask, zygote=zygote)
            stack.callback(made.kill)
            return made

        yield make


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2 as an installed, calibrated model: the user's, or pulled once into the tests' cache."""
    try:
        return smollm2_folder().path
    except DownloadFailed as error:
        if os.environ.get("CI"):
            raise  # the proofs on a real model are not optional there
        pytest.skip(f"SmolLM2 is not here and cannot be fetched: {error}")
