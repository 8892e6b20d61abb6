"""Fixtures of the model tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvd.model.errors import DownloadFailed
from kvd.model.registry import ModelFolder
from kvd.model.tokenizer import TextCodec
from tests.support.smollm2 import smollm2_folder, smollm2_gguf
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model; tests must not change it."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The tiny model as GGUF, float32."""
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_folder)


@pytest.fixture(scope="session")
def tiny_codec(tiny_folder: Path) -> TextCodec:
    """The tiny model's codec."""
    return TextCodec.from_folder(tiny_folder)


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    """SmolLM2's GGUF file."""
    try:
        return smollm2_gguf()
    except DownloadFailed as error:
        if os.environ.get("CI"):
            raise  # the proofs on a real model are not optional there
        pytest.skip(f"SmolLM2 is not here and cannot be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2() -> ModelFolder:
    """SmolLM2, installed."""
    try:
        return smollm2_folder()
    except DownloadFailed as error:
        if os.environ.get("CI"):
            raise  # the proofs on a real model are not optional there
        pytest.skip(f"SmolLM2 is not here and cannot be fetched: {error}")
