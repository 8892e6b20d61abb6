"""Gives mlx a fast BLAS on a Linux CPU, before mlx is imported. Run as a module it runs other Python under it.

Theory of operation. The `mlx-cpu` wheel links the reference BLAS (a few GFLOP/s). The dynamic linker resolves a symbol
in the *global scope* first, so an optimised BLAS that is loaded there before `libmlx.so` takes the reference one's
place, thirty to sixty times faster. That needs no environment variable for the linker and no second process.

The OpenBLAS of the `scipy-openblas32` wheel carries kernels for every processor and chooses among them at run time, but
its symbols have the prefix `scipy_`: a copy without it is loaded from memory (`kvd.elf`). Rejected: `cmeel-openblas`,
which is built for AVX-512 alone and ends the process on any other processor; running the interpreter again with
LD_LIBRARY_PATH (costs a start, leaks the variable to every child, and fights with whoever captured our output).

On macOS and with the CUDA wheel there is nothing to do: they bring their own. Must not import mlx or numpy; imports the
standard library, kvd.cores and kvd.elf only. Call `prepare()` first thing in every entry point: daemon, demo, tests,
benchmarks.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.cores import available_cores
from kvd.elf import load_image, without_prefix

__all__ = ["LaunchReport", "main", "prepare", "report"]

REMEDY = "pip install scipy-openblas32 (or: apt install libopenblas0-pthread), or set KVD_BLAS to a BLAS library"
PREFIXED = "libscipy_openblas.so"
MB_PER_GRAPH = "100000"
"""With CUDA, megabytes of inputs after which mlx hands a graph of kernels over: never for that reason."""
_OURS = "KVD_LAUNCHER_SET"
"""Names the variables that a launcher set, so that a child process with other cores computes them anew."""


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """What `prepare` did.

    Attributes:
        kind: `openblas`, `mkl` or `other`; `builtin` where mlx brings a fast BLAS itself (macOS, CUDA); `reference`
            where only the slow one is left.
        path: the library that answers for `cblas_sgemm`, None if we loaded none.
        threads: BLAS threads asked for.
        warning: what is slow and the remedy, None when all is well.
        handle: of the library, for `ctypes.CDLL(path, handle=handle)`: the path may be of a file that another was made
            of.
    """

    kind: str
    path: str | None
    threads: int
    warning: str | None = None
    handle: int | None = None

    def describe(self) -> str:
        """One line for logs and test headers."""
        where = f" {self.path}" if self.path else ""
        return f"BLAS {self.kind}{where}, {self.threads} thread{'s' if self.threads != 1 else ''}"


_report: LaunchReport | None = None


def report() -> LaunchReport | None:
    """What `prepare` did in this process; None when it was not called."""
    return _report


def prepare() -> LaunchReport:
    """Load the best BLAS there is into the global symbol scope and set its thread count. Idempotent.

    Honours `KVD_BLAS` (a library's path, or `none`), `KVD_THREADS`, and variables of the BLAS that the user set
    himself. Never raises for want of a BLAS: kvd then goes on slowly and the report's `warning` says how to heal it.

    Returns:
        The report, also from `report()` later.
    """
    global _report
    if _report is None:
        _report = _prepare()
    return _report


def _prepare() -> LaunchReport:
    threads, complaint = _thread_count(os.environ)
    if not _has_mlx_cpu():
        if _has_wheel("mlx_cuda_*.libs"):
            # weights count as inputs, so with its default mlx ends a graph after every few layers
            os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", MB_PER_GRAPH)
        return LaunchReport("builtin", None, threads, warning=complaint)
    _set_environment(threads)
    wanted = os.environ.get("KVD_BLAS", "").strip()
    if wanted.lower() == "none":
        return LaunchReport("reference", None, threads, warning=complaint)
    if "mlx.core" in sys.modules:
        late = "mlx was imported before kvd.launcher.prepare(): it keeps its slow reference BLAS"
        return LaunchReport("reference", None, threads, warning=late)
    failures: list[str] = []
    for candidate in [wanted] if wanted else _candidates():
        try:
            path, handle = _load(candidate)
        except OSError as error:
            failures.append(f"{candidate}: {error}")
            continue
        return LaunchReport(_kind(path), path, threads, warning=complaint, handle=handle)
    tried = "; ".join(failures) or "none found"
    slow = f"no optimised BLAS could be loaded, mlx computes 30 times slower than it could. Remedy: {REMEDY}."
    return LaunchReport("reference", None, threads, warning=f"{slow} Tried: {tried}")


def _thread_count(environ: Mapping[str, str]) -> tuple[int, str | None]:
    """BLAS threads and a complaint about a bad KVD_THREADS. A user's own OPENBLAS_NUM_THREADS counts too."""
    ours = environ.get(_OURS, "").split(",")
    user_blas = "" if "OPENBLAS_NUM_THREADS" in ours else environ.get("OPENBLAS_NUM_THREADS", "")
    wanted = environ.get("KVD_THREADS", "").strip()
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted), None
    complaint = f"KVD_THREADS={wanted!r} is ignored: give a whole number of 1 or more" if wanted else None
    if user_blas.isdigit() and int(user_blas) > 0:
        return int(user_blas), complaint
    return available_cores(), complaint


def _set_environment(threads: int) -> None:
    """Set what the libraries read when they are loaded.

    `OPENBLAS_THREAD_TIMEOUT=4`: idle workers sleep soon instead of spinning on a core the model needs.
    `MLX_DISABLE_COMPILE=1`: on CPU mlx's compile runs a C++ compiler into a shared folder, at no gain in speed.
    """
    explicit = bool(os.environ.get("KVD_THREADS", "").strip())
    ours = set(filter(None, os.environ.get(_OURS, "").split(",")))
    wanted = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), str(threads))
    for name, value in (wanted | {"OPENBLAS_THREAD_TIMEOUT": "4", "MLX_DISABLE_COMPILE": "1"}).items():
        if name not in os.environ or name in ours or (explicit and name in wanted):
            os.environ[name] = value
            ours.add(name)
    os.environ[_OURS] = ",".join(sorted(ours))


def _has_mlx_cpu() -> bool:
    """Whether the mlx that would be imported is the CPU wheel with its reference BLAS (never on macOS or with CUDA)."""
    return sys.platform.startswith("linux") and _has_wheel("mlx_cpu.libs")


def _has_wheel(pattern: str) -> bool:
    """Whether a folder of that name lies beside the mlx that would be imported."""
    spec = importlib.util.find_spec("mlx")
    locations = (spec.submodule_search_locations or []) if spec else []
    return any(True for location in locations for _ in Path(location).parent.glob(pattern))


def _candidates() -> list[str]:
    """Libraries to try, best first: the wheel kvd depends on, the system's, Intel's."""
    found = [Path(entry or ".") / "scipy_openblas32/lib" / PREFIXED for entry in sys.path]
    mkl = [Path(sys.prefix) / "lib" / name for name in ("libmkl_rt.so.2", "libmkl_rt.so.3", "libmkl_rt.so.1")]
    wheel = [str(path) for path in found if path.is_file()]
    return [*dict.fromkeys(wheel), "libopenblas.so.0", *(str(path) for path in mkl if path.is_file())]


def _load(candidate: str) -> tuple[str, int]:
    """Load `candidate` globally and check that `cblas_sgemm` now comes from it.

    Returns:
        The path of the library that answers for `cblas_sgemm`, and its handle.

    Raises:
        OSError: it cannot be loaded, or it is not the one that answers.
    """
    if "mkl" in Path(candidate).name:
        _prepare_mkl(Path(candidate))
    if Path(candidate).name == PREFIXED:
        library = load_image(without_prefix(Path(candidate).read_bytes(), b"scipy_"), "libopenblas.so.0")
    else:
        library = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
    if not hasattr(library, "cblas_sgemm"):
        raise OSError("it has no cblas_sgemm")
    address, path = _global_symbol("cblas_sgemm")
    if address != ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value:
        raise OSError(f"{path} was loaded first and answers for cblas_sgemm")
    return candidate if Path(candidate).name == PREFIXED else path, library._handle


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def _global_symbol(name: str) -> tuple[int, str]:
    """Address of a symbol in the global scope and the file it comes from.

    Raises:
        OSError: no loaded library has it.
    """
    everything = ctypes.CDLL(None)
    try:
        address = ctypes.cast(getattr(everything, name), ctypes.c_void_p).value
    except AttributeError as error:
        raise OSError(f"no library in the global scope has {name}") from error
    info = _DlInfo()
    everything.dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_DlInfo))
    if address is None or not everything.dladdr(address, ctypes.byref(info)):
        raise OSError(f"cannot tell where {name} comes from")
    return address, os.fsdecode(info.dli_fname or b"")


def _kind(path: str) -> str:
    name = Path(path).resolve().name
    return next((kind for kind in ("openblas", "mkl") if kind in name), "other")


def _prepare_mkl(path: Path) -> None:
    """MKL loads its OpenMP runtime by bare name when first used: have it loaded, or do without threads."""
    runtime = path.parent / "libiomp5.so"
    if runtime.is_file():
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    else:
        os.environ.setdefault("MKL_THREADING_LAYER", "SEQUENTIAL")


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m kvd.launcher [-- COMMAND ARGS...]`: run Python under the fast BLAS, or print the report.

    COMMAND is a Python file, a module (`pytest`), or a command of this environment written in Python (`kvd`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    outcome = prepare()
    if outcome.warning:
        print(f"kvd: warning: {outcome.warning}", file=sys.stderr)
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments:
        print(outcome.describe())
        return
    command = arguments[0]
    sys.argv = arguments
    script = Path(sys.executable).parent / command
    if Path(command).is_file():
        sys.path[0] = str(Path(command).resolve().parent)
        runpy.run_path(command, run_name="__main__")
    elif importlib.util.find_spec(command.partition(".")[0]) is not None and importlib.util.find_spec(command):
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    elif script.is_file():
        runpy.run_path(str(script), run_name="__main__")
    else:
        sys.exit(f"kvd.launcher: {command!r} is no Python file, module or command of this environment")


if __name__ == "__main__":
    # This file now runs as `__main__`; the report must be where `kvd.launcher.report()` finds it.
    importlib.import_module("kvd.launcher").main()
