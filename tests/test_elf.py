"""Libraries under other names: what is exported, what is refused, and that nothing stays on disk."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.elf import load_image, without_prefix


def wheel_library() -> Path:
    """SciPy's OpenBLAS; the test is skipped where kvd does not depend on it."""
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or not sys.platform.startswith("linux"):
        pytest.skip("the OpenBLAS wheel is a dependency on Linux alone")
    (folder,) = spec.submodule_search_locations or [""]
    return Path(folder) / "lib/libscipy_openblas.so"


@pytest.fixture(scope="module")
def renamed() -> ctypes.CDLL:
    """The library without its prefix, loaded."""
    return load_image(without_prefix(wheel_library().read_bytes(), b"scipy_"), "libtest.so")


@pytest.fixture(scope="module")
def unchanged() -> ctypes.CDLL:
    """The library with a prefix taken away that no symbol has, loaded."""
    return load_image(without_prefix(wheel_library().read_bytes(), b"no_such_prefix_"), "libsame.so")


def test_every_prefixed_symbol_is_found_without_its_prefix(renamed: ctypes.CDLL) -> None:
    """The hash table made anew finds all of them, and none by its old name."""
    names = ("cblas_sgemm", "cblas_dgemm", "cblas_sgemv", "openblas_set_num_threads", "sgesdd_", "dsyevd_")
    assert [name for name in names if not hasattr(renamed, name)] == []
    assert not hasattr(renamed, "scipy_cblas_sgemm")
    assert not hasattr(renamed, "cblas_no_such_thing")


def test_a_function_under_its_new_name_computes(renamed: ctypes.CDLL) -> None:
    """sdot of 1, 2, 3 with itself: the symbol points where it did."""
    values = (ctypes.c_float * 3)(1.0, 2.0, 3.0)
    renamed.cblas_sdot.restype = ctypes.c_float
    assert renamed.cblas_sdot(3, values, 1, values, 1) == 14.0


def test_only_names_and_hashes_differ() -> None:
    """Code and data of the copy are the file's, byte for byte."""
    original = wheel_library().read_bytes()
    copy = without_prefix(original, b"scipy_")
    assert len(copy) == len(original)
    changed = [
        block for block in range(0, len(copy), 4096) if copy[block : block + 4096] != original[block : block + 4096]
    ]
    assert changed
    assert max(changed) < 0x80000  # tables come first; code starts behind them


def test_a_prefix_nothing_has_changes_no_name(unchanged: ctypes.CDLL) -> None:
    """The new hash table alone still finds everything, so it is right for names that keep theirs as well."""
    assert hasattr(unchanged, "scipy_cblas_sgemm")
    assert not hasattr(unchanged, "scipy_cblas_no_such_thing")


def test_loading_leaves_no_file_behind(tmp_path: Path) -> None:
    """The copy comes from memory, or from a folder that is gone afterwards."""
    script = f"""
import os
from kvd.elf import load_image, without_prefix
def refuse(name): raise OSError("refused")
image = without_prefix(open({str(wheel_library())!r}, "rb").read(), b"scipy_")
first = load_image(image, "libfirst.so")
os.memfd_create = refuse
second = load_image(image, "libsecond.so")
assert first._handle != second._handle and second.cblas_sgemm
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "image", [b"", b"no library", b"\x7fELF\x02\x01", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x01" + bytes(200)]
)
def test_a_file_that_is_no_library_is_an_os_error(image: bytes) -> None:
    """Garbage in the wheel's folder ends in the launcher's warning, never in a crash."""
    with pytest.raises(OSError, match="ELF"):
        without_prefix(image, b"scipy_")
