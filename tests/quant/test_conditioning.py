"""Key conditioning: scores stay the same, constants are named by their digest and verified."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kvd.errors import InvalidParams
from kvd.quant.codec import decode, encode
from kvd.quant.conditioning import Conditioning, hadamard, load_conditioning, save_conditioning
from kvd.quant.errors import ConditioningDamaged
from kvd.quant.spec import SideFormat

HEADS, KV_HEADS = 6, 2


def constants(dim: int = 64, layers: int = 3, seed: int = 0) -> Conditioning:
    """Random constants."""
    rng = np.random.default_rng(seed)
    centre = rng.standard_normal((layers, KV_HEADS, dim), dtype=np.float32)
    return Conditioning(centre, np.exp(rng.standard_normal((layers, KV_HEADS, dim), dtype=np.float32)))


@pytest.mark.parametrize("dim", [32, 64, 96, 192, 256])
def test_conditioned_scores_differ_by_one_number_per_query(dim: int) -> None:
    """Q'.K' + Q.c = Q.K for every key, GQA included, at every head width."""
    rng = np.random.default_rng(1)
    layer = constants(dim).layers[1]
    q = mx.array(rng.standard_normal((1, HEADS, 5, dim), dtype=np.float32))
    k = mx.array(rng.standard_normal((1, KV_HEADS, 9, dim), dtype=np.float32))
    repeated = mx.repeat(layer.condition_keys(k), HEADS // KV_HEADS, axis=1)
    mine = layer.condition_queries(q) @ repeated.swapaxes(-1, -2) + layer.centre_term(q)[..., None]
    right = q @ mx.repeat(k, HEADS // KV_HEADS, axis=1).swapaxes(-1, -2)
    np.testing.assert_allclose(np.array(mine), np.array(right), atol=3e-4 * dim**0.5)


@pytest.mark.parametrize("dim", [32, 96, 128])
def test_the_rotation_is_orthonormal_and_its_own_inverse(dim: int) -> None:
    """H H = 1, lengths are kept, and keys come back."""
    x = mx.array(np.random.default_rng(2).standard_normal((1, KV_HEADS, 7, dim), dtype=np.float32))
    np.testing.assert_allclose(np.array(hadamard(hadamard(x))), np.array(x), atol=1e-5)
    np.testing.assert_allclose(np.square(np.array(hadamard(x))).sum(), np.square(np.array(x)).sum(), rtol=1e-5)
    layer = constants(dim).layers[0]
    np.testing.assert_allclose(np.array(layer.restore_keys(layer.condition_keys(x))), np.array(x), atol=1e-4)


def test_rows_are_rotated_one_by_one() -> None:
    """The number of tokens in a call does not change one bit of any of them."""
    x = mx.array(np.random.default_rng(3).standard_normal((1, KV_HEADS, 33, 64), dtype=np.float32))
    layer = constants().layers[0]
    whole = np.array(layer.condition_keys(x))
    for cut in (1, 16, 32):
        parts = [np.array(layer.condition_keys(part)) for part in (x[:, :, :cut], x[:, :, cut:])]
        np.testing.assert_array_equal(np.concatenate(parts, axis=2), whole)


def test_constants_from_the_range_tame_outliers() -> None:
    """Mid-range and the root of the half range: 4-bit keys with outlier channels lose less than half the error."""
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((1, KV_HEADS, 400, 64), dtype=np.float32)
    keys[..., 5] = keys[..., 5] * 0.5 + 12
    keys[..., 40] *= 8
    made = Conditioning.from_range(keys.min(axis=2), keys.max(axis=2))
    np.testing.assert_allclose(made.centre[0, 0, 5], (keys[0, 0, :, 5].min() + keys[0, 0, :, 5].max()) / 2, rtol=1e-5)
    layer, side = made.layers[0], SideFormat(4)
    through = decode(*encode(np.array(layer.condition_keys(mx.array(keys)))[0], side), side)
    conditioned = np.array(layer.restore_keys(mx.array(through[None])))[0]
    plain = decode(*encode(keys[0], side), side)
    assert np.square(conditioned - keys[0]).mean() < 0.5 * np.square(plain - keys[0]).mean()


def test_the_digest_names_the_content() -> None:
    """Equal constants have equal digests of 12 hex digits; any other value or shape has another."""
    one = constants()
    assert one.digest == constants().digest
    assert len(one.digest) == 12
    assert int(one.digest, 16) >= 0
    changed = one.centre.copy()
    changed[0, 0, 0] += 1e-3
    others = {
        Conditioning(changed, one.scale).digest,
        Conditioning(one.scale, one.scale).digest,
        constants(seed=1).digest,
    }
    assert one.digest not in others


def test_constants_survive_the_disk(tmp_path: Path) -> None:
    """Saved constants load with the same bytes; saving again changes nothing; files are private (P37)."""
    one = constants()
    path = save_conditioning(one, tmp_path / "conditioning")
    assert path.name == f"{one.digest}.safetensors"
    before = path.stat().st_mtime_ns
    assert save_conditioning(one, tmp_path / "conditioning") == path
    assert path.stat().st_mtime_ns == before
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    loaded = load_conditioning(path)
    np.testing.assert_array_equal(loaded.centre, one.centre)
    np.testing.assert_array_equal(loaded.scale, one.scale)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", [b"", b"x", None])
def test_a_damaged_file_is_written_again(tmp_path: Path, damage: bytes | None) -> None:
    """P4: as long as the constants are known, the pages that need them stay readable; what is good is left alone."""
    one = constants()
    path = save_conditioning(one, tmp_path)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]) if damage is None else damage)
    assert save_conditioning(one, tmp_path) == path
    assert path.read_bytes() == good


def test_the_writer_is_the_callers(tmp_path: Path) -> None:
    """Data folders have their own way to write; it is used for what is missing or damaged, and for nothing else."""
    one, written = constants(), []

    def write(path: Path, data: bytes) -> None:
        written.append(path)
        path.write_bytes(data)

    for _ in range(2):
        assert save_conditioning(one, tmp_path, write) == tmp_path / f"{one.digest}.safetensors"
    assert written == [tmp_path / f"{one.digest}.safetensors"]
    assert load_conditioning(written[0]).digest == one.digest

    def refuse(path: Path, data: bytes) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        save_conditioning(constants(seed=9), tmp_path, refuse)


@pytest.mark.parametrize("offset", [-1, -700, 20, 40, 70, 90])
def test_a_flipped_bit_is_noticed(tmp_path: Path, offset: int) -> None:
    """P4: damage in data or header raises; constants are never used unverified."""
    path = save_conditioning(constants(), tmp_path)
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(ConditioningDamaged):
        load_conditioning(path)


def test_missing_and_swapped_files_are_refused(tmp_path: Path) -> None:
    """A missing file and constants under another's name raise, with the digest that was needed."""
    one, other = constants(seed=1), constants(seed=2)
    with pytest.raises(ConditioningDamaged) as missing:
        load_conditioning(tmp_path / f"{one.digest}.safetensors")
    assert missing.value.data["digest"] == one.digest
    save_conditioning(other, tmp_path).rename(tmp_path / f"{one.digest}.safetensors")
    with pytest.raises(ConditioningDamaged):
        load_conditioning(tmp_path / f"{one.digest}.safetensors")


def test_impossible_constants_are_refused() -> None:
    """Shapes must agree; scales must be positive and everything finite."""
    good = np.ones((1, 2, 64), np.float32)
    for centre, scale in ((good, good[0]), (good, -good), (good, 0 * good), (good * np.nan, good)):
        with pytest.raises(InvalidParams):
            Conditioning(centre, scale)


def test_a_pipe_in_place_of_constants_is_damage_and_blocks_nobody(tmp_path: Path) -> None:
    """Opening a pipe waits for a writer: a start must not wait for one."""
    path = tmp_path / "0123456789ab.safetensors"
    os.mkfifo(path)
    with pytest.raises(ConditioningDamaged, match="not a regular file"):
        load_conditioning(path)
