"""From written kernels to callable machine code: compiled once, kept on disk, loaded in milliseconds afterwards.

Theory of operation. A kernel is named by the source of the modules that write it, its parameters and the processor;
under that name its object code lies in the user's cache folder (0700), with a checksum in front. A good file is linked
into the process; anything else is compiled and the file replaced whole. Losing the folder costs a second at the next
start and nothing else.

Machine code that is loaded is trusted like the package itself, so a cache folder that somebody else could write to is
not used. May import kvd.errors, llvmlite, numpy, platformdirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import itertools
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir
from platformdirs import user_cache_path

from kvd.native import emit
from kvd.native.errors import KernelUnavailable

CACHE_VARIABLE: Final = "KVD_KERNEL_CACHE"
"""Folder of compiled kernels; empty for none."""

_DIGEST_BYTES: Final = 32

_linking: Final = threading.Lock()
"""There is one linker, whoever asks first: code in a second one would go with it."""

_numbers: Final = itertools.count()
"""Of linked libraries, whose names are used once."""

Address = ctypes.c_void_p
Integer = ctypes.c_int64
Number = ctypes.c_float
_TYPES: Final[Mapping[Any, ir.Type]] = {Address: emit.PTR, Integer: emit.I64, Number: emit.F32}


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor that kernels are compiled for.

    Attributes:
        name: LLVM's name of it.
        features: LLVM's feature string.
        lanes: float32 lanes of its widest vectors worth using.
        has_fma: whether a multiply-add with one rounding is an instruction.
    """

    name: str
    features: str
    lanes: int
    has_fma: bool


@functools.cache
def processor() -> Processor:
    """This machine's processor."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    found = llvm.get_host_cpu_features()
    triple = llvm.get_default_triple()
    if triple.startswith(("aarch64", "arm64")):
        return Processor(llvm.get_host_cpu_name(), found.flatten(), 4, True)
    lanes = 16 if found.get("avx512f") and found.get("avx512vl") else 8 if found.get("avx2") else 4
    return Processor(llvm.get_host_cpu_name(), found.flatten(), lanes, bool(found.get("fma")))


@functools.cache
def _machine() -> Any:  # noqa: ANN401  llvmlite has no types
    here = processor()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=here.name, features=here.features, opt=3, reloc="pic", codemodel="small")


@functools.cache
def _linker() -> Any:  # noqa: ANN401
    """What links object code into this process, for as long as it lives.

    Code reaches its constants by 32-bit offsets. JITLink maps the sections of an object together; LLVM's older linker
    (MCJIT) maps each where the system has room, and ends the process where one is out of reach of another, as it may be
    beside a pool of many gigabytes.
    """
    return llvm.create_lljit_compiler(_machine(), use_jit_link=True)


def _link(symbol: str, code: bytes) -> int:
    """The address of a function in object code, which is linked into this process and stays.

    Raises:
        RuntimeError: it is no object code, or lacks a symbol.
    """
    library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(symbol)
    with _linking:
        linked = library.link(_linker(), f"{symbol}_{next(_numbers)}")
    linked.detach()  # it is not unlinked when this object goes
    return int(linked[symbol])


def compile_kernel(
    name: str,
    write: Callable[[emit.Emitter], None],
    arguments: Mapping[str, Any],
    *,
    parameters: Sequence[object],
    sources: Sequence[str],
    cache: Path | None = None,
) -> Callable[..., None]:
    """A kernel as a Python function; while it runs, other Python threads run too.

    Args:
        name: of the kernel, for its symbol and file.
        write: writes the body into an emitter that has the arguments (called only when no compiled copy is kept).
        arguments: argument names and types: `Address`, `Integer` or `Number`.
        parameters: everything `write` depends on beside its source.
        sources: names of the modules whose source decides about the code.
        cache: folder of compiled kernels; None takes the user's.

    Raises:
        KernelUnavailable: no fused multiply-add, or compilation failed.
    """
    here = processor()
    if not here.has_fma:
        raise KernelUnavailable(f"the processor {here.name} has no fused multiply-add")
    key = _key(name, parameters, sources, here)
    symbol = f"{name}_{key[:16]}"
    folder = cache_folder() if cache is None else cache
    code = _kept(folder, key)
    try:
        if code is None:
            code = _compile(symbol, write, {each: _TYPES[kind] for each, kind in arguments.items()})
            _keep(folder, key, code)
        address = _link(symbol, code)
    except RuntimeError as error:
        raise KernelUnavailable(f"kernel {name} could not be compiled: {error}") from error
    return ctypes.CFUNCTYPE(None, *arguments.values())(address)


def cache_folder() -> Path | None:
    """The folder of compiled kernels, made if need be; None where there is none to be trusted."""
    wanted = os.environ.get(CACHE_VARIABLE)
    if wanted == "":
        return None
    folder = Path(wanted) if wanted else user_cache_path("kvd") / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    is_ours = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o022
    return folder if is_ours else None


def _key(name: str, parameters: Sequence[object], sources: Sequence[str], here: Processor) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for module in (emit.__name__, __name__, *sources):
        digest.update(_source_digest(module))
    facts = (name, *parameters, here.name, here.features, here.lanes, llvmlite.__version__, llvm.get_default_triple())
    digest.update("\0".join(map(str, facts)).encode())
    return digest.hexdigest()


@functools.cache
def _source_digest(module: str) -> bytes:
    return hashlib.blake2b(inspect.getsource(sys.modules[module]).encode(), digest_size=16).digest()


def _compile(symbol: str, write: Callable[[emit.Emitter], None], arguments: Mapping[str, ir.Type]) -> bytes:
    """Object code of one kernel."""
    module = ir.Module(symbol)
    module.triple = llvm.get_default_triple()
    emitter = emit.Emitter(module, symbol, arguments)
    write(emitter)
    emitter.finish()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False  # vectors are written, not guessed
    options.loop_unrolling = False
    llvm.create_pass_builder(_machine(), options).getModulePassManager().run(parsed, _pass_builder(options))
    return bytes(_machine().emit_object(parsed))


def _pass_builder(options: Any) -> Any:  # noqa: ANN401
    return llvm.create_pass_builder(_machine(), options)


def _kept(folder: Path | None, key: str) -> bytes | None:
    """The kept object code, if it is whole and this kernel's; a link or a pipe in its place is not looked into."""
    if folder is None:
        return None
    try:
        handle = os.open(folder / f"{key}.o", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            data = file.read() if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    except OSError:
        return None
    head, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if _checksum(key, code) == head else None


def _checksum(key: str, code: bytes) -> bytes:
    """Of a kernel's code under its key: intact code of another kernel does not pass."""
    return hashlib.blake2b(code, digest_size=_DIGEST_BYTES, key=key.encode()).digest()


def _keep(folder: Path | None, key: str, code: bytes) -> None:
    """Put object code in place, whole or not at all; a cache that cannot be written costs time, nothing else."""
    if folder is None:
        return
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(prefix=f".{key}-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_checksum(key, code) + code)
            Path(temporary).replace(folder / f"{key}.o")
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


__all__ = [
    "CACHE_VARIABLE",
    "Address",
    "Integer",
    "Number",
    "Processor",
    "cache_folder",
    "compile_kernel",
    "processor",
]
