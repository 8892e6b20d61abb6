"""GGUF import: the folder it writes is the model that was exported, or the import is refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvd.model.errors import ModelCorrupt, UnsupportedModel
from kvd.model.gguf_families import build_config
from kvd.model.gguf_file import GgufFile
from kvd.model.gguf_import import import_gguf, unpermute
from kvd.model.progress import SilentReporter
from kvd.model.template import ChatTemplate
from kvd.model.tokenizer import TextCodec
from kvd.model.weights_file import to_bytes
from tests.support.random_gguf import write_random_gguf
from tests.support.tiny_gguf import interleave, write_tiny_gguf
from tests.support.tiny_model import CHAT_TEMPLATE


def imported(source: Path, folder: Path, dtype: Any = "float32") -> Path:
    """The folder made from `source`."""
    folder.mkdir()
    import_gguf(source, folder, dtype=dtype, reporter=SilentReporter())
    return folder


def test_a_float32_file_comes_back_bit_for_bit(tiny_gguf: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Weights, figures, tokenizer and template of the exported model, with q and k rows in their own order again."""
    folder = imported(tiny_gguf, tmp_path / "out")
    expected, found = load_file(tiny_folder / "model.safetensors"), load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    own, source = (json.loads((path / "config.json").read_text()) for path in (folder, tiny_folder))
    for key in source.keys() - {"rms_norm_eps"}:
        assert own[key] == source[key], key
    assert own["rms_norm_eps"] == pytest.approx(source["rms_norm_eps"])
    codec, original = TextCodec.from_folder(folder), TextCodec.from_folder(tiny_folder)
    text = "the water 12 <|im_end|> 世界"
    assert codec.encode_content(text) == original.encode_content(text)
    assert codec.encode_control(text) == original.encode_control(text)
    assert codec.eos_ids == original.eos_ids
    template = ChatTemplate.from_folder(folder, codec)
    assert template is not None
    assert template.source == CHAT_TEMPLATE


@pytest.mark.parametrize(("kind", "levels"), [("F16", 2**11), ("Q8_0", 2**7), ("Q4_1", 2**4)])
def test_quantised_files_differ_by_their_rounding_only(
    tiny_folder: Path, tmp_path: Path, kind: str, levels: int
) -> None:
    """Every value is within one step of its type: the largest value of its row, divided by the type's levels."""
    source = write_tiny_gguf(tmp_path / "q.gguf", tiny_folder, quantised=kind)
    found = load_file(imported(source, tmp_path / "out") / "model.safetensors")
    for name, values in load_file(tiny_folder / "model.safetensors").items():
        step = 2 * np.abs(values).max() / levels
        assert np.abs(found[name] - values).max() <= step, name


def test_unpermute_inverts_the_converters_permutation() -> None:
    """Each head has its even rows first, then its odd rows."""
    rows = np.arange(2 * 8, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(unpermute(rows, 2)[:8, 0], [0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(unpermute(interleave(rows, 2), 2), rows)


def test_bfloat16_rounds_as_mlx_does(tiny_gguf: Path, tmp_path: Path) -> None:
    """Stored bfloat16 is what MLX makes of the float32 values, ties included, and half the bytes."""
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    values[:4] = np.array([0x3F808000, 0x3F818000, 0x80000000, 0x7F7F0000], np.uint32).view(np.float32)
    own = np.frombuffer(to_bytes(values, "bfloat16"), np.uint16)
    theirs = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    np.testing.assert_array_equal(own, theirs)
    folder = imported(tiny_gguf, tmp_path / "out", "bfloat16")
    loaded = mx.load(str(folder / "model.safetensors"))
    assert {array.dtype for array in loaded.values()} == {mx.bfloat16}


def test_another_architecture_is_refused_before_weights_are_written(tiny_folder: Path, tmp_path: Path) -> None:
    """The error names the architecture and the supported ones."""
    source = write_tiny_gguf(tmp_path / "x.gguf", tiny_folder, architecture="starcoder2")
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsupportedModel, match=r"'starcoder2'.*supported: llama, qwen2"):
        import_gguf(source, tmp_path / "out", dtype="float32", reporter=SilentReporter())
    assert list((tmp_path / "out").iterdir()) == []


def test_a_damaged_file_is_corrupt(tiny_gguf: Path, tmp_path: Path) -> None:
    """No GGUF, and half a GGUF, name the file."""
    for n_bytes in (0, 100, 5000, 200_000):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(tiny_gguf.read_bytes()[:n_bytes])
        with pytest.raises(ModelCorrupt, match=r"broken\.gguf"):
            GgufFile(broken)


def write_metadata(path: Path, facts: dict[str, int | str]) -> GgufFile:
    """A GGUF file with llama metadata `facts` and an embedding of 10 tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in facts.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"llama.{key}", value)  # type: ignore[arg-type]
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


REQUIRED = {
    "embedding_length": 64,
    "attention.head_count": 2,
    "feed_forward_length": 128,
    "block_count": 0,
    "context_length": 99,
}


def test_absent_metadata_gets_the_stated_defaults(tmp_path: Path) -> None:
    """KV heads as query heads, head width, rotary base, epsilon, tied embeddings."""
    config = build_config(write_metadata(tmp_path / "m.gguf", REQUIRED))
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 32
    assert config["rope_theta"] == 10000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == 10


@pytest.mark.parametrize("key", sorted(REQUIRED))
def test_a_missing_required_figure_is_named(tmp_path: Path, key: str) -> None:
    """Figures without a sensible default are required."""
    facts = {name: value for name, value in REQUIRED.items() if name != key}
    with pytest.raises(ModelCorrupt, match=key.replace(".", r"\.")):
        build_config(write_metadata(tmp_path / "m.gguf", facts))


@pytest.mark.parametrize(
    "facts", [{"rope.scaling.type": "yarn"}, {"rope.dimension_count": 16}, {"expert_count": 8}], ids=str
)
def test_what_cannot_be_expressed_is_refused(tmp_path: Path, facts: dict[str, int | str]) -> None:
    """Other rotary scalings, partial rotary embedding and experts would run and be wrong."""
    with pytest.raises(UnsupportedModel):
        build_config(write_metadata(tmp_path / "m.gguf", {**REQUIRED, **facts}))


def test_the_metadata_digest_ignores_weights(tiny_gguf: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Equal metadata, other tensor types: same digest; another template: another digest."""
    half = GgufFile(write_tiny_gguf(tmp_path / "h.gguf", tiny_folder, quantised="F16"))
    assert half.metadata_digest() == GgufFile(tiny_gguf).metadata_digest()
    changed = tmp_path / "changed"
    shutil.copytree(tiny_folder, changed)
    settings = json.loads((changed / "tokenizer_config.json").read_text())
    (changed / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "other"}))
    other = GgufFile(write_tiny_gguf(tmp_path / "o.gguf", changed))
    assert other.metadata_digest() != half.metadata_digest()


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (UnsupportedModel, {"head_dim": 48}, "head width 48"),
        (ModelCorrupt, {"layers": 0}, "0"),
        (ModelCorrupt, {"metadata": {"tokenizer.chat_template": "{% for %}"}}, "template does not parse"),
    ],
    ids=str,
)
def test_what_serving_would_refuse_is_refused_before_anything_is_written(
    tmp_path: Path, error: type[Exception], options: dict[str, Any], match: str
) -> None:
    """A head width, a depth or a template kvd cannot run: the import says so, not the calibration or the daemon."""
    source = write_random_gguf(tmp_path / "m.gguf", **options)
    (tmp_path / "out").mkdir()
    with pytest.raises(error, match=match):
        import_gguf(source, tmp_path / "out", dtype="float32", reporter=SilentReporter())
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (np.inf, "bfloat16"), (1e5, "float16")])
def test_weights_that_are_no_numbers_are_corrupt(tmp_path: Path, value: float, dtype: Any) -> None:
    """NaN, infinity, and what the asked dtype makes infinite; the message names the tensor."""
    weights = np.zeros((64, 64), np.float32)
    weights[3, 5] = value
    source = write_random_gguf(tmp_path / "m.gguf", tensors={"blk.1.attn_output.weight": weights})
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelCorrupt, match=r"blk\.1\.attn_output\.weight holds values"):
        import_gguf(source, tmp_path / "out", dtype=dtype, reporter=SilentReporter())
