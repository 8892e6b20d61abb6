"""What the two distributions promise: exact pins, both commands, a client that needs almost nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvd

ROOT = Path(__file__).resolve().parents[1]


def project(path: Path) -> dict[str, Any]:
    """The `[project]` table of a pyproject.toml."""
    table: dict[str, Any] = tomllib.loads(path.read_text())["project"]
    return table


DAEMON = project(ROOT / "pyproject.toml")


def client() -> dict[str, Any]:
    """The client's table."""
    return project(ROOT / "client" / "pyproject.toml")


def names(requirements: list[str]) -> set[str]:
    """Distribution names of requirements."""
    return {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in requirements}


def test_mlx_and_mlx_lm_are_pinned_exactly() -> None:
    """Page bytes and greedy text are promised for one version of each; Linux gets the CPU wheel, a BLAS and kernels."""
    pins = [each for each in DAEMON["dependencies"] if each.startswith("mlx")]
    assert all(re.match(r"mlx(-lm|\[cpu\])?==\d+\.\d+\.\d+(;|$)", pin) for pin in pins), pins
    assert names(pins) == {"mlx", "mlx-lm"}
    on_linux = [each for each in DAEMON["dependencies"] if "linux" in each]
    assert names(on_linux) == {"mlx", "scipy-openblas32", "llvmlite"}


def test_the_cuda_switch_names_the_pinned_version() -> None:
    """The two documented lines take out the CPU wheel and bring the CUDA wheel of the same version."""
    version = next(re.search(r"==([\d.]+)", each)[1] for each in DAEMON["dependencies"] if each.startswith("mlx["))  # type: ignore[index]
    text = (ROOT / "docs" / "operations.md").read_text()
    assert f"pip uninstall -y mlx-cpu\npip install mlx-cuda-13=={version}\n" in text


def test_both_commands_come_with_the_daemon_and_one_with_the_client() -> None:
    """`kvd` and `kvd-client`; the client alone has only its own."""
    assert set(DAEMON["scripts"]) == {"kvd", "kvd-client"}
    assert client()["scripts"] == {"kvd-client": DAEMON["scripts"]["kvd-client"]}


def test_the_client_alone_needs_msgpack_and_click() -> None:
    """No mlx, no numpy, for the same versions of Python as the daemon."""
    assert names(client()["dependencies"]) == {"msgpack", "click"}
    assert client()["requires-python"] == DAEMON["requires-python"]


def test_versions_agree() -> None:
    """Package, daemon and client are released together."""
    import kvd_client

    assert DAEMON["version"] == client()["version"] == kvd.__version__ == kvd_client.__version__


@pytest.mark.parametrize("target", ["demo", "test", "check", "format", "bench"])
def test_make_targets_make_the_venv_first(tmp_path: Path, target: str) -> None:
    """Where there is no `.venv`, each target starts with its installation; `make clean` never installs."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}

    def plan(goal: str) -> str:
        """What make would do in an empty folder."""
        command = ["make", "-n", "-f", str(ROOT / "Makefile"), "-C", str(tmp_path), goal]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=30).stdout

    (tmp_path / "pyproject.toml").write_text("")
    assert "-m venv" in plan(target)
    assert "pip install" in plan(target)
    assert "pip install" not in plan("clean")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").write_text("")
    assert "pip install" not in plan(target)
    later = (tmp_path / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(tmp_path / "pyproject.toml", (later, later))
    assert "pip install" in plan(target)


def test_ci_runs_the_tests() -> None:
    """`.ci/run` is executable and calls `make test`."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text().splitlines()
