"""Gives mlx a fast BLAS on a Linux CPU, before mlx is imported. Run as a module it runs other Python under it.

Theory of operation. The `mlx-cpu` wheel links the reference BLAS (a few GFLOP/s). The dynamic linker resolves a symbol
in the *global scope* first, so an optimised BLAS that is loaded there before `libmlx.so` takes the reference one's
place, thirty to sixty times faster. That needs no environment variable for the linker and no second process.

The BLAS of the `cmeel-openblas` wheel needs `libgfortran.so.5`, which a small system lacks. `mlx-cpu` carries a copy in
`mlx_cpu.libs/`, but under a mangled name (`libgfortran-f7379c93.so.5.0.0`) that satisfies nobody else. The linker
compares the name that a library asks for with the SONAMEs already loaded; so we load a copy of that file whose SONAME
is cut back to `libgfortran.so.5`, from memory (`memfd_create`) or, where that is refused, from a private folder that
is deleted at once. Rejected: running the interpreter again with LD_LIBRARY_PATH (costs a start, leaks the variable to
every child, and fights with whoever captured our output).

On macOS and with the CUDA wheel there is nothing to do: they bring their own. Must not import mlx or numpy; imports the
standard library and kvd.cores only. Call `prepare()` first thing in every entry point: daemon, demo, tests,
benchmarks.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.cores import available_cores

__all__ = ["LaunchReport", "main", "prepare", "report"]

REMEDY = "pip install cmeel-openblas (or: apt install libopenblas0-pthread), or set KVD_BLAS to a BLAS library"
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
        fortran_alias: True if the Fortran runtime had to come from mlx's own wheel.
        warning: what is slow and the remedy, None when all is well.
    """

    kind: str
    path: str | None
    threads: int
    fortran_alias: bool = False
    warning: str | None = None

    def describe(self) -> str:
        """One line for logs and test headers."""
        where = f" {self.path}" if self.path else ""
        alias = " (libgfortran from mlx_cpu.libs)" if self.fortran_alias else ""
        return f"BLAS {self.kind}{where}{alias}, {self.threads} thread{'s' if self.threads != 1 else ''}"


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
    wheel_libs = _mlx_cpu_libs()
    threads, complaint = _thread_count(os.environ)
    if wheel_libs is None:
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
            path, alias = _load(candidate, wheel_libs)
        except OSError as error:
            failures.append(f"{candidate}: {error}")
            continue
        return LaunchReport(_kind(path), path, threads, fortran_alias=alias, warning=complaint)
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


def _mlx_cpu_libs() -> Path | None:
    """`mlx_cpu.libs` beside the mlx that would be imported; None on macOS, with CUDA, and without mlx."""
    if not sys.platform.startswith("linux"):
        return None
    spec = importlib.util.find_spec("mlx")
    for location in (spec.submodule_search_locations or []) if spec else []:
        libs = Path(location).parent / "mlx_cpu.libs"
        if libs.is_dir():
            return libs
    return None


def _candidates() -> list[str]:
    """Libraries to try, best first: the wheel kvd depends on, the system's, Intel's."""
    found = [Path(entry or ".") / "cmeel.prefix/lib/libopenblas.so.0" for entry in sys.path]
    mkl = [Path(sys.prefix) / "lib" / name for name in ("libmkl_rt.so.2", "libmkl_rt.so.3", "libmkl_rt.so.1")]
    wheel = [str(path) for path in found if path.is_file()]
    return [*dict.fromkeys(wheel), "libopenblas.so.0", *(str(path) for path in mkl if path.is_file())]


def _load(candidate: str, wheel_libs: Path) -> tuple[str, bool]:
    """Load `candidate` globally and check that `cblas_sgemm` now comes from it.

    Returns:
        The path that answers for `cblas_sgemm`, and whether the Fortran runtime came from mlx's wheel.

    Raises:
        OSError: it cannot be loaded, or it is not the one that answers.
    """
    alias = False
    if "mkl" in Path(candidate).name:
        _prepare_mkl(Path(candidate))
    try:
        library = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if "libgfortran.so.5" not in str(error):
            raise
        _alias_fortran(wheel_libs)
        library = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        alias = True
    if not hasattr(library, "cblas_sgemm"):
        raise OSError("it has no cblas_sgemm")
    address, path = _global_symbol("cblas_sgemm")
    if address != ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value:
        raise OSError(f"{path} was loaded first and answers for cblas_sgemm")
    return path, alias


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


_PT_LOAD, _PT_DYNAMIC, _DT_STRTAB, _DT_SONAME = 1, 2, 5, 14
"""ELF constants (System V ABI, chapter 5)."""


def _alias_fortran(wheel_libs: Path) -> None:
    """Load mlx's copy of the Fortran runtime under its true name, `libgfortran.so.5`.

    Raises:
        OSError: mlx's wheel has no copy, or it cannot be loaded.
    """
    # On x86-64 the runtime needs libquadmath by its mangled name, which is not found from memory: load it first.
    for quadmath in wheel_libs.glob("libquadmath-*.so*"):
        ctypes.CDLL(str(quadmath))
    copies = sorted(wheel_libs.glob("libgfortran-*.so.5*"))
    if not copies:
        raise OSError("libgfortran.so.5 is missing (apt install libgfortran5)")
    _load_image(_with_soname(copies[0].read_bytes(), b"libgfortran.so.5"), "libgfortran.so.5")


def _with_soname(image: bytes, name: bytes) -> bytes:
    """A copy of a 64-bit little-endian ELF library whose SONAME is `name` (not longer than the old one).

    Raises:
        OSError: the file is not such a library.
    """
    try:
        position = _soname_position(image)
        end = image.index(b"\0", position)
    except (struct.error, ValueError, KeyError) as error:
        raise OSError("mlx's copy of libgfortran is not an ELF library as expected") from error
    if len(name) > end - position:
        raise OSError("the SONAME of mlx's libgfortran is shorter than libgfortran.so.5")
    return image[:position] + name.ljust(end - position, b"\0") + image[end:]


def _soname_position(image: bytes) -> int:
    """Where in the file the SONAME's text starts."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", image, 32)
    entry_bytes, entries = struct.unpack_from("<HH", image, 54)
    # Program header: type, flags, offset, address, physical address, bytes in the file, bytes in memory, alignment.
    headers = [struct.unpack_from("<IIQQQQQQ", image, table + index * entry_bytes) for index in range(entries)]
    dynamic = next(header for header in headers if header[0] == _PT_DYNAMIC)
    pairs = struct.iter_unpack("<qQ", image[dynamic[2] : dynamic[2] + dynamic[5] // 16 * 16])
    tags: dict[int, int] = dict(pairs)
    address = tags[_DT_STRTAB] + tags[_DT_SONAME]
    for kind, _, offset, start, _, length, _, _ in headers:
        if kind == _PT_LOAD and start <= address < start + length:
            return int(offset + address - start)
    raise ValueError("the string table is in no segment")


def _load_image(image: bytes, name: str) -> None:
    """Load a shared library from bytes; nothing is left on disk.

    Raises:
        OSError: the system refuses to map it.
    """
    try:
        fd = os.memfd_create(name)
    except (AttributeError, OSError):  # old kernels; sandboxes that forbid it
        fd = -1
    if fd >= 0:
        try:
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.write(image)
            ctypes.CDLL(f"/proc/self/fd/{fd}")
            return
        except OSError:  # vm.memfd_noexec, or no /proc
            pass
        finally:
            os.close(fd)
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        path = Path(folder) / name
        path.write_bytes(image)
        ctypes.CDLL(str(path))


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
