"""Every tensor type that the `gguf` package can dequantise is imported; the others are refused by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvd.model.errors import UnsupportedModel
from kvd.model.gguf_file import tensor_types
from kvd.model.gguf_import import import_gguf
from kvd.model.progress import SilentReporter
from tests.support.random_gguf import PIECES, write_random_gguf

WIDTH = 256
"""A multiple of every type's block."""


@pytest.fixture(autouse=True)
def any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of no blocks: nobody can run them, and the types of tensors are all that is looked at here."""
    monkeypatch.setattr("kvd.model.gguf_import.check_supported", lambda config: None)


def write(path: Path, kind: str) -> Path:
    """A model of no blocks whose embedding has the tensor type `kind`."""
    values = np.random.default_rng(3).standard_normal((len(PIECES), WIDTH)).astype(np.float32)
    tensors = {"token_embd.weight": values, "output_norm.weight": np.ones(WIDTH, np.float32)}
    metadata = {"embedding_length": WIDTH, "attention.key_length": 64, "attention.value_length": 64}
    return write_random_gguf(path, kind=kind, layers=0, tokenizer="llama", tensors=tensors, metadata=metadata)


def imported(path: Path, folder: Path) -> np.ndarray:
    """The embedding after an import."""
    folder.mkdir()
    found = import_gguf(path, folder, dtype="float32", reporter=SilentReporter())
    assert found.parameters == (len(PIECES) + 1) * WIDTH
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


@pytest.mark.parametrize("kind", tensor_types())
def test_a_type_is_imported_as_the_package_reads_it(kind: str, tmp_path: Path) -> None:
    """The same floats, bit for bit; types the package cannot make come from random blocks."""
    path = write(tmp_path / "m.gguf", kind)
    found = imported(path, tmp_path / "m")
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    assert tensor.tensor_type.name == kind
    expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    assert np.isfinite(found).all()
    assert len(np.unique(found)) > 2
    np.testing.assert_array_equal(found, expected.reshape(found.shape))


@pytest.mark.parametrize(
    ("kind", "step"), [("F16", 2**-10), ("BF16", 2**-7), ("Q8_0", 2**-7), ("Q5_1", 2**-5), ("Q4_0", 2**-3)]
)
def test_types_that_can_be_made_keep_the_values(kind: str, step: float, tmp_path: Path) -> None:
    """At most one step of the largest value off: the blocks are not merely read alike, they mean the weights."""
    values = np.random.default_rng(3).standard_normal((len(PIECES), WIDTH)).astype(np.float32)
    found = imported(write(tmp_path / "m.gguf", kind), tmp_path / "m")
    assert 0 < np.abs(found - values).max() <= step * np.abs(values).max()


def test_the_common_types_are_among_them() -> None:
    """What published files are made of; asked of the package, not listed in kvd."""
    common = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "MXFP4"}
    assert common | {f"Q{bits}_K" for bits in range(2, 7)} <= set(tensor_types())


def test_a_type_nobody_can_read_is_refused_before_weights_are_written(tmp_path: Path) -> None:
    """The message names the tensor, its type and the types that can be imported."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for key in ("embedding_length", "feed_forward_length", "attention.head_count", "context_length"):
        writer.add_uint32(f"llama.{key}", 2)
    writer.add_uint32("llama.block_count", 0)
    writer.add_uint32("llama.attention.key_length", 32)
    writer.add_tensor("token_embd.weight", np.zeros((3, 2), np.float64))
    writer.add_tensor("output_norm.weight", np.zeros(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsupportedModel, match=r"type F64 of token_embd\.weight.*supported: F32, F16.*Q6_K"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out", dtype="float32", reporter=SilentReporter())
    assert list((tmp_path / "out").iterdir()) == []
