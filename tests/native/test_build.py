"""Compiling kernels: kept code is used when it is whole, made anew when not, never trusted from strangers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="compiled kernels need llvmlite")

from kvd.native import KernelUnavailable, build, emit
from kvd.native.build import CACHE_VARIABLE, Address, Integer, Number, cache_folder, compile_kernel, processor

pytestmark = pytest.mark.skipif(not processor().has_fma, reason="this processor has no fused multiply-add")

ARGUMENTS = {"x": Address, "count": Integer, "factor": Number}


class Compiled:
    """A kernel that multiplies, and how often its body was written."""

    def __init__(self, folder: Path | None, parameter: object = 1) -> None:
        self.written = 0
        self.kernel: Callable[..., None] = compile_kernel(
            "scale", self._write, ARGUMENTS, parameters=(parameter,), sources=(__name__,), cache=folder
        )

    def _write(self, e: emit.Emitter) -> None:
        self.written += 1
        x, count, factor = (e.arguments[name] for name in ARGUMENTS)
        with e.loop(0, count) as i:
            e.store(e.load(x, i, emit.F32) * factor, x, i)

    def check(self) -> None:
        """It does what it says."""
        x = np.arange(5, dtype=np.float32)
        self.kernel(x.ctypes.data, 4, 2.5)
        np.testing.assert_array_equal(x, [0, 2.5, 5, 7.5, 4])


def test_a_kept_kernel_is_not_written_again(tmp_path: Path) -> None:
    """The second process-wide use takes the file; other parameters are another kernel."""
    first, second, other = Compiled(tmp_path), Compiled(tmp_path), Compiled(tmp_path, parameter=2)
    assert (first.written, second.written, other.written) == (1, 0, 1)
    for each in (first, second, other):
        each.check()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    """A kernel runs only when its checksum is right; the file is whole again afterwards."""
    Compiled(tmp_path)
    path = next(tmp_path.iterdir())
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 4
    path.write_bytes({"flip": bytes(flipped), "cut": good[:-7], "empty": b"", "foreign": b"x" * 999}[damage])
    again = Compiled(tmp_path)
    again.check()
    assert again.written == 1
    assert path.read_bytes() == good


def test_code_of_another_kernel_and_pipes_are_made_anew(tmp_path: Path) -> None:
    """An intact file under a wrong name is no kernel of that name; a pipe must not be waited for."""
    Compiled(tmp_path)
    first = next(tmp_path.iterdir())
    Compiled(tmp_path, parameter=2)
    second = next(path for path in tmp_path.iterdir() if path != first)
    first.write_bytes(second.read_bytes())
    again = Compiled(tmp_path)
    again.check()
    assert again.written == 1
    second.unlink()
    os.mkfifo(second)
    piped = Compiled(tmp_path, parameter=2)
    piped.check()
    assert piped.written == 1
    assert second.is_file()


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is a file, or is gone: kernels are compiled and run all the same."""
    path = tmp_path / "file"
    path.write_text("in the way")
    monkeypatch.setenv(CACHE_VARIABLE, "")  # None takes the user's folder, of which there is none then
    for folder in (path, tmp_path / "gone", None):
        made = Compiled(folder)
        made.check()
        assert made.written == 1


def test_only_a_folder_of_our_own_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P37: machine code is loaded from a folder that nobody else can write to, or from nowhere."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    assert cache_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    assert cache_folder() is None
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert cache_folder() is None
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_folder() is None


def test_a_processor_without_fused_multiply_add_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels would call a library function for each multiplication there."""
    here = processor()
    poor = build.Processor(here.name, here.features, here.lanes, has_fma=False)
    monkeypatch.setattr(build, "processor", lambda: poor)
    with pytest.raises(KernelUnavailable, match="fused multiply-add"):
        Compiled(None)


def test_another_processor_is_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder shared by machines, or a machine that was replaced: the key names the processor."""
    Compiled(tmp_path)
    here = processor()
    other = build.Processor(here.name, here.features, here.lanes * 2, has_fma=True)
    monkeypatch.setattr(build, "processor", lambda: other)
    assert Compiled(tmp_path).written == 1


def test_code_and_its_constants_lie_within_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of many gigabytes scatters the address space; a kernel that is linked then must find its constants."""
    monkeypatch.setenv(CACHE_VARIABLE, "")
    command = [sys.executable, "-m", "tests.native.scattered"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "[0.0, 2.5, 5.0, 7.5]\n"), ran.stderr
