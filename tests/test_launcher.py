"""The launcher: mlx really computes with the fast BLAS, with the threads there really are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kvd import __main__ as entry
from kvd import launcher
from kvd.cores import available_cores

LINUX_CPU = launcher._has_mlx_cpu()
needs_linux_cpu = pytest.mark.skipif(not LINUX_CPU, reason="mlx brings its own BLAS here")

PROBE = """
import ctypes, dataclasses, json, os
from kvd import launcher
report = launcher.prepare()
assert launcher.report() is report and launcher.prepare() is report
import mlx.core as mx
a = mx.ones((64, 64))
assert (a @ a)[0, 0].item() == 64.0
address, path = (0, "") if report.path is None else launcher._global_symbol("cblas_sgemm")
facts = dataclasses.asdict(report) | {"answers": path, "compile": os.environ.get("MLX_DISABLE_COMPILE")}
if report.kind == "openblas":
    facts["blas_threads"] = ctypes.CDLL(report.path, handle=report.handle).openblas_get_num_threads()
print(json.dumps(facts))
"""


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python afresh: no variable of the launcher in this process reaches it but those given."""
    ours = os.environ.get("KVD_LAUNCHER_SET", "").split(",")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVD_") and name not in ours}
    return subprocess.run(
        [sys.executable, *arguments], env=clean | variables, capture_output=True, text=True, check=False, timeout=60
    )


def probe(**variables: str) -> dict[str, object]:
    """What the launcher did in a fresh process."""
    done = run_python("-c", PROBE, **variables)
    assert done.returncode == 0, done.stderr
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


@needs_linux_cpu
def test_the_global_cblas_sgemm_comes_from_the_loaded_library() -> None:
    """The symbol mlx will call resolves into the wheel's BLAS under its plain names, and products come out right."""
    facts = probe()
    assert facts["kind"] == "openblas"
    assert str(facts["path"]).endswith("libscipy_openblas.so")
    assert "openblas" in str(facts["answers"]) or "/proc/self/fd/" in str(facts["answers"])
    assert facts["warning"] is None
    assert facts["compile"] == "1"


@needs_linux_cpu
def test_this_test_run_has_the_fast_blas() -> None:
    """`conftest.py` prepared the BLAS before anything imported mlx."""
    outcome = launcher.report()
    assert outcome is not None
    assert outcome.kind in ("openblas", "mkl", "other")


@needs_linux_cpu
def test_threads_are_the_cores_we_may_use() -> None:
    """The library itself runs with as many threads as the affinity mask and the quota allow."""
    facts = probe()
    assert facts["threads"] == facts["blas_threads"] == available_cores()


@needs_linux_cpu
def test_kvd_threads_overrides_and_a_child_counts_anew() -> None:
    """KVD_THREADS wins; a child that inherits what its parent's launcher set is not bound to it."""
    assert probe(KVD_THREADS="1")["blas_threads"] == 1
    inherited = {"OPENBLAS_NUM_THREADS": "64", "KVD_LAUNCHER_SET": "OPENBLAS_NUM_THREADS"}
    assert probe(**inherited)["threads"] == available_cores()
    assert probe(OPENBLAS_NUM_THREADS="1")["blas_threads"] == 1


@needs_linux_cpu
def test_a_bad_thread_count_is_said_and_ignored() -> None:
    """KVD_THREADS=many does not stop the daemon."""
    facts = probe(KVD_THREADS="many")
    assert "KVD_THREADS='many'" in str(facts["warning"])
    assert facts["threads"] == available_cores()


@needs_linux_cpu
def test_no_blas_goes_on_slowly_with_the_remedy() -> None:
    """A BLAS that cannot be loaded gives a warning that says what to do; `none` is a choice and gives none."""
    failed = probe(KVD_BLAS="/nonexistent/libblas.so")
    assert failed["kind"] == "reference"
    assert "pip install scipy-openblas32" in str(failed["warning"])
    assert "/nonexistent/libblas.so" in str(failed["warning"])
    chosen = probe(KVD_BLAS="none")
    assert (chosen["kind"], chosen["warning"]) == ("reference", None)


@needs_linux_cpu
def test_a_library_that_is_no_blas_is_refused(tmp_path: Path) -> None:
    """KVD_BLAS pointing at the C library changes nothing and is said."""
    assert "no cblas_sgemm" in str(probe(KVD_BLAS="libc.so.6")["warning"])
    text = tmp_path / "libblas.so"
    text.write_text("no library")
    assert probe(KVD_BLAS=str(text))["kind"] == "reference"


@needs_linux_cpu
def test_too_late_is_said() -> None:
    """After mlx is imported a BLAS cannot help any more: the report says so instead of claiming speed."""
    done = run_python("-c", "import mlx.core\nfrom kvd import launcher\nprint(launcher.prepare().warning)")
    assert "mlx was imported before" in done.stdout


def test_nothing_to_do_where_mlx_brings_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS no library is loaded and no variable set."""
    monkeypatch.setattr(launcher, "_has_mlx_cpu", lambda: False)
    monkeypatch.setattr(launcher, "_has_wheel", lambda pattern: False)
    before = dict(os.environ)
    outcome = launcher._prepare()
    assert (outcome.kind, outcome.path, outcome.warning) == ("builtin", None, None)
    assert dict(os.environ) == before


@pytest.mark.parametrize(("set_before", "after"), [(None, launcher.MB_PER_GRAPH), ("7", "7")])
def test_with_cuda_weights_do_not_end_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, set_before: str | None, after: str
) -> None:
    """With the CUDA wheel's mlx the limit of bytes a graph is lifted before mlx reads it; a user's own value stays."""
    (tmp_path / "mlx_cuda_13.libs").mkdir()
    (tmp_path / "mlx").mkdir()
    monkeypatch.setattr(launcher, "_has_mlx_cpu", lambda: False)
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: _Found([str(tmp_path / "mlx")]))
    environ = {} if set_before is None else {"MLX_MAX_MB_PER_BUFFER": set_before}
    monkeypatch.setattr(os, "environ", environ)
    assert launcher._prepare().kind == "builtin"
    assert os.environ["MLX_MAX_MB_PER_BUFFER"] == after


class _Found(NamedTuple):
    """What `find_spec` says of a package, as far as the launcher asks."""

    submodule_search_locations: list[str]


def test_pytest_runs_under_the_launcher(tmp_path: Path) -> None:
    """`python -m kvd.launcher -- pytest` runs pytest in the prepared process, with its output and exit code."""
    test = tmp_path / "test_it.py"
    test.write_text("def test_it():\n    from kvd import launcher\n    assert launcher.report() is not None\n")
    done = run_python("-m", "kvd.launcher", "--", "pytest", "-q", "-p", "no:randomly", "-c", "/dev/null", str(test))
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    test.write_text("def test_it():\n    assert False\n")
    assert run_python("-m", "kvd.launcher", "--", "pytest", "-c", "/dev/null", str(test)).returncode == 1


def test_a_script_runs_under_the_launcher(tmp_path: Path) -> None:
    """A file sees its own arguments; something that is neither file nor module is refused by name."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom kvd import launcher\nprint(sys.argv[1:], launcher.report() is not None)\n")
    assert run_python("-m", "kvd.launcher", "--", str(script), "--json", "x").stdout == "['--json', 'x'] True\n"
    refused = run_python("-m", "kvd.launcher", "--", "no-such-command")
    assert refused.returncode == 1
    assert "no-such-command" in refused.stderr
    assert run_python("-m", "kvd.launcher").stdout.startswith("BLAS ")


def test_launcher_imports_neither_mlx_nor_numpy() -> None:
    """Whoever imports them first would get the slow BLAS."""
    done = run_python(
        "-c", "import sys, kvd.launcher\nprint({'mlx', 'numpy', 'mlx.core'} & set(sys.modules))", PYTHONWARNINGS="error"
    )
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve"], True),
        (["--data-dir", "/x", "serve", "--budget", "40MB"], True),
        (["bench", "ppl"], True),
        (["--help"], False),
        (["serve", "--help"], False),
        (["config", "show"], False),
        ([], False),
    ],
)
def test_only_commands_that_need_mlx_load_a_blas(arguments: list[str], expected: bool) -> None:
    """`kvd --help` starts at once."""
    assert entry.needs_mlx(arguments) is expected


def group_files(root: Path, files: dict[str, str]) -> Path:
    """A file system with the given files under it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n1:name=systemd:/job\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_cores_honour_quotas_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    """Version 1 and 2, our group and those above it; a part of a core never makes a thread too many."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert available_cores(group_files(tmp_path, files)) == expected


def test_cores_without_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an affinity mask (macOS) the machine's cores count."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert available_cores(tmp_path) == 10


def test_closed_standard_streams_are_opened_before_anything_else(tmp_path: Path) -> None:
    """A program started with `2>&-` has no `sys.stderr`, and the next file that it opens would be standard error."""
    found = tmp_path / "found"
    script = (
        "import os, sys; from kvd.__main__ import open_standard_streams; open_standard_streams(); "
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); print('lost', file=sys.stderr); print('lost'); "
        "os.write(fd, f'{fd > 2} {[s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)]}'.encode())"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" "$2" 0<&- 1>&- 2>&-', sys.executable, script, str(found)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
    assert found.read_text() == "True [False, False, False]"
