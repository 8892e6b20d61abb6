"""Which page formats can be read and which one new agents get."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.config import ConfigError
from kvd.formats import UNCALIBRATED_FORMAT, choose_formats
from kvd.ids import Fingerprint
from kvd.model.spec import LayerSpec, ModelCacheSpec
from kvd.quant.calibration import Calibration, FormatScore, save_calibration
from kvd.quant.codec import CODEC_VERSION
from kvd.quant.conditioning import Conditioning, conditioning_path, save_conditioning
from kvd.quant.spec import NAMED_FORMATS

SPEC = ModelCacheSpec(
    model_name="m",
    fingerprint=Fingerprint("0" * 32),
    layers=(LayerSpec("full", 1, 32, 32), LayerSpec("full", 2, 64, 64), LayerSpec("full", 2, 64, 64)),
    query_heads=2,
    context_tokens=1024,
    vocab_tokens=300,
    scratch_bytes=1,
)


def constants(group: int, seed: int = 0) -> Conditioning:
    """Conditioning constants of one group."""
    layer, indices = SPEC.groups[group].layer, SPEC.groups[group].layer_indices
    shape = (len(indices), layer.kv_heads, layer.k_dim)
    rng = np.random.default_rng(seed)
    return Conditioning(rng.standard_normal(shape, dtype=np.float32), np.ones(shape, np.float32))


def calibrate(folder: Path, chosen: str, *, seed: int = 0, fingerprint: str = SPEC.fingerprint) -> Calibration:
    """Store a calibration beside the model."""
    score = FormatScore(chosen, 1.0, 1.01, 100.0)
    own = tuple(constants(group, seed) for group in range(len(SPEC.groups)))
    made = Calibration(fingerprint, CODEC_VERSION, chosen, 1.0, 10, (score,), own, 1.0)
    save_calibration(made, folder)
    return made


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    """A model in an empty folder."""
    (tmp_path / "model").mkdir()
    return SimpleNamespace(spec=SPEC, folder=SimpleNamespace(path=tmp_path / "model"))


def test_a_model_nobody_calibrated_gets_the_safe_format_and_a_notice(loaded: Any, tmp_path: Path) -> None:
    """`auto` never guesses a small format; the notice has the command."""
    choice = choose_formats(loaded, "auto", tmp_path / "conditioning")
    assert (choice.name, choice.reason) == (UNCALIBRATED_FORMAT, "not calibrated")
    assert "kvd calibrate m" in choice.notices[0]
    assert not (tmp_path / "conditioning").exists()


@pytest.mark.parametrize("name", [name for name in NAMED_FORMATS if name != "q4c"])
def test_a_format_can_be_forced_and_all_plain_ones_are_readable(loaded: Any, tmp_path: Path, name: str) -> None:
    """New agents take the flag's format; agents of other named formats go on in theirs."""
    choice = choose_formats(loaded, name, tmp_path / "conditioning")
    assert (choice.name, choice.reason) == (name, "chosen by a flag")
    assert [format_id.split("-")[0] for format_id in choice.book.default_ids] == [name, name]
    readable = {(group, format_id.split("-")[0]) for group, format_id in choice.book.layouts}
    assert readable == {(group, plain) for group in range(2) for plain in NAMED_FORMATS if plain != "q4c"}
    assert choice.notices == ()


def test_a_calibrated_model_gets_its_format_and_keeps_the_constants(loaded: Any, tmp_path: Path) -> None:
    """The constants lie beside the pages that use them, one operator per layer of each conditioned format."""
    made = calibrate(loaded.folder.path, "q4c")
    choice = choose_formats(loaded, "auto", tmp_path / "conditioning")
    assert choice.name == "q4c"
    assert len(set(choice.book.default_ids)) == 2
    for constant in made.conditioning:
        assert conditioning_path(tmp_path / "conditioning", constant.digest).exists()
    assert {layer for _, layer in choice.book.conditioning} == {0, 1, 2}
    for group, format_id in enumerate(choice.book.default_ids):
        layout = choice.book.layouts[group, format_id]
        assert layout.format_id == format_id
        assert all((format_id, layer) in choice.book.conditioning for layer in layout.layer_indices)


def test_pages_of_an_earlier_calibration_stay_readable(loaded: Any, tmp_path: Path) -> None:
    """A new calibration changes new agents only; the old constants are found in the data folder."""
    calibrate(loaded.folder.path, "q4c", seed=1)
    old = choose_formats(loaded, "auto", tmp_path / "conditioning").book
    calibrate(loaded.folder.path, "q4c", seed=2)
    new = choose_formats(loaded, "auto", tmp_path / "conditioning").book
    assert set(old.default_ids).isdisjoint(new.default_ids)
    for group, format_id in enumerate(old.default_ids):
        assert (group, format_id) in new.layouts
    (loaded.folder.path / "calibration.json").unlink()
    plain = choose_formats(loaded, "q8", tmp_path / "conditioning").book
    assert set(enumerate(old.default_ids)) <= set(plain.layouts)


def test_q4c_without_a_calibration_is_refused_with_the_command(loaded: Any, tmp_path: Path) -> None:
    """There are no constants to condition with; a calibration of other weights does not count (P7)."""
    for _ in range(2):
        with pytest.raises(ConfigError, match="kvd calibrate m"):
            choose_formats(loaded, "q4c", tmp_path / "conditioning")
        calibrate(loaded.folder.path, "q4c", fingerprint="1" * 32)


def test_damaged_constants_are_a_notice_and_are_replaced_when_they_can_be(loaded: Any, tmp_path: Path) -> None:
    """A flipped bit in kept constants makes their pages unreadable, never wrong (P4); good ones are written again."""
    folder = tmp_path / "conditioning"
    stray = save_conditioning(constants(0, seed=9), folder)
    stray.write_bytes(stray.read_bytes()[:-1] + b"\x55")
    made = calibrate(loaded.folder.path, "q4c")
    own = save_conditioning(made.conditioning[0], folder)
    own.write_bytes(b"damaged")
    choice = choose_formats(loaded, "auto", folder)
    assert len(choice.notices) == 1
    assert stray.name in choice.notices[0]
    again = choose_formats(loaded, "auto", folder)
    assert again.book.default_ids == choice.book.default_ids
    assert len(again.notices) == 1


def test_constants_of_another_shape_are_ignored(loaded: Any, tmp_path: Path) -> None:
    """The data folder may hold constants of other models; they are no formats of this one."""
    shape = (5, 3, 128)
    save_conditioning(Conditioning(np.zeros(shape, np.float32), np.ones(shape, np.float32)), tmp_path / "conditioning")
    choice = choose_formats(loaded, "q8", tmp_path / "conditioning")
    assert not choice.book.conditioning
    assert choice.notices == ()
