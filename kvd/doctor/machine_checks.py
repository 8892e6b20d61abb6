"""Checks of the machine and the model: versions, device, BLAS, the model's files, attention backends.

Import kvd.config, kvd.cores, kvd.errors, kvd.launcher, kvd.record, kvd.store, kvd.model, kvd.attention, kvd.native,
kvd.ops and this package; mlx and what needs it inside functions.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Final

from kvd import __version__, launcher
from kvd.config import DEFAULT_BUDGET_BYTES, DEFAULT_MODEL
from kvd.cores import available_cores
from kvd.doctor import aside
from kvd.doctor.aside import NoRoomAside
from kvd.doctor.context import Context
from kvd.doctor.findings import Check, notice, ok, problem
from kvd.doctor.model_state import ModelState
from kvd.errors import EnvironmentFault, KvdError
from kvd.model.errors import ModelCorrupt, ModelNotFound
from kvd.model.folder import MANIFEST
from kvd.model.hub import is_hub_id
from kvd.model.registry import is_name
from kvd.model.sources import CATALOGUE
from kvd.ops.device import clamp_budget, device_facts, device_limit
from kvd.ops.sizes import format_size
from kvd.record import read_record

PACKAGES: Final = (
    "mlx",
    "mlx-lm",
    "click",
    "gguf",
    "h11",
    "httptools",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "msgpack",
    "numpy",
    "platformdirs",
    "prometheus-client",
    "rich",
    "safetensors",
    "starlette",
    "structlog",
    "tokenizers",
    "uvicorn",
    "uvloop",
    "watchdog",
    "xxhash",
)
"""Distributions kvd is built on everywhere, as its metadata has them: of a source tree there is none to ask."""

LINUX_PACKAGES: Final = ("llvmlite",)
"""Those it has besides on Linux."""

BLAS_PACKAGE: Final = "scipy-openblas32"
"""The BLAS it has besides on Linux, for the processors of `BLAS_MACHINES`."""

BLAS_MACHINES: Final = ("x86_64", "aarch64")

_BACKENDS_OF_MLX: Final = ("mlx-cpu", "mlx-cuda-13", "mlx-cuda-12", "mlx-metal")
_PIN: Final = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*])?==([^;\s]+)")


def needed_packages(system: str, machine: str) -> tuple[str, ...]:
    """Distributions that an installation has on a platform.

    Args:
        system: as `sys.platform`.
        machine: as `platform.machine()`.
    """
    if system != "linux":
        return PACKAGES
    return (*PACKAGES, *LINUX_PACKAGES, *((BLAS_PACKAGE,) if machine in BLAS_MACHINES else ()))


def check_versions(context: Context) -> Iterator[Check]:
    """Python, kvd and what it is built on; mlx and mlx-lm must be the versions that page bytes are promised for."""
    needed = needed_packages(sys.platform, platform.machine())
    found = {name: _version(name) for name in (*needed, *_BACKENDS_OF_MLX)}
    versions = {name: version for name, version in found.items() if version is not None}
    facts: dict[str, object] = {"kvd": __version__, "python": platform.python_version(), "packages": versions}
    text = f"kvd {__version__}, Python {platform.python_version()}, mlx {found['mlx']}, mlx-lm {found['mlx-lm']}"
    absent = [name for name in needed if found[name] is None]
    both = [name for name in _BACKENDS_OF_MLX if found[name] is not None]
    pins = _pins()
    others = [f"{name} {found[name]}" for name, pin in pins.items() if found.get(name) not in (None, pin)]
    if absent:
        yield problem("versions", f"{text}; missing: {', '.join(absent)}", f"pip install {' '.join(absent)}", **facts)
    elif len(both) > 1:
        yield problem(
            "versions",
            f"{text}; {' and '.join(both)} ship the same file and are both installed",
            f"pip uninstall -y {' '.join(both)}, then install the one that fits (docs/operations.md)",
            **facts,
        )
    elif others:
        wanted = " ".join(f"{name}=={pin}" for name, pin in pins.items() if found.get(name) not in (None, pin))
        yield problem(
            "versions", f"page bytes are not promised with {', '.join(others)}", f"pip install {wanted}", **facts
        )
    else:
        yield ok("versions", text, **facts)


def check_device(context: Context) -> Iterator[Check]:
    """GPU or CPU, its memory, and what of the default budget fits beside the model."""
    import mlx.core as mx

    machine = device_facts(context.options.data_dir)
    kind = str(mx.default_device().type).rsplit(".", 1)[-1]
    info = mx.device_info()
    limit = device_limit(info) if kind != "cpu" else None
    model = context.model
    reserved_bytes = 0 if model is None else model.weights_bytes + model.spec.scratch_bytes
    budget = clamp_budget(DEFAULT_BUDGET_BYTES, machine, reserved_bytes=reserved_bytes, device=limit)
    facts: dict[str, object] = {
        "device": kind,
        "device_name": str(info.get("device_name", "")),
        "cores": available_cores(),
        "memory_bytes": machine.memory_bytes,
        "device_limit_bytes": None if limit is None else limit.limit_bytes,
        "reserved_bytes": reserved_bytes,
        "budget_bytes": budget.granted_bytes,
    }
    memory = format_size(machine.memory_bytes)
    text = f"{kind.upper()} {facts['device_name']}, {facts['cores']} cores, {memory} memory"
    if budget.granted_bytes < 1:
        yield problem(
            "device", f"{text}: no room for pages beside the model", "choose a smaller model or add memory", **facts
        )
    else:
        yield ok("device", f"{text}; room for {format_size(budget.granted_bytes)} of pages", **facts)


def check_blas(context: Context) -> Iterator[Check]:
    """Which BLAS computes, with how many threads, and whether the data folder recorded another count."""
    launch = launcher.report()
    if launch is None:
        yield notice("blas", "the launcher has not run in this process", "run `kvd doctor`", kind=None)
        return
    recorded = read_record(context.options.data_dir).threads if context.state.may_be_searched else None
    facts: dict[str, object] = {
        "kind": launch.kind,
        "path": launch.path,
        "threads": launch.threads,
        "recorded_threads": recorded,
        "cores": available_cores(),
    }
    text = launch.describe()
    if launch.warning:
        yield notice("blas", launch.warning, launcher.REMEDY, **facts)
    elif recorded in (None, launch.threads):
        yield ok("blas", text, **facts)
    elif os.environ.get("KVD_THREADS", "").strip():
        yield notice(
            "blas",
            f"{text}, asked for by KVD_THREADS; the data folder was computed with {recorded}: greedy continuations of "
            "older agents may differ",
            f"unset KVD_THREADS, or set KVD_THREADS={recorded}",
            **facts,
        )
    elif launch.path is None or (recorded or 0) > available_cores():
        yield notice(
            "blas",
            f"{text}; the data folder was computed with {recorded} threads, which cannot be followed here: greedy "
            "continuations of older agents may differ",
            f"give kvd {recorded} cores, or accept it",
            **facts,
        )
    else:
        yield ok("blas", f"{text}; kvd serve takes the {recorded} that the data folder recorded", **facts)


def check_model(context: Context) -> Iterator[Check]:
    """The model is installed, its files are whole, it is calibrated; what a token of its KV takes."""
    found = context.model_or_error
    if isinstance(found, KvdError):
        yield _model_refused(context, found)
        return
    facts = _model_facts(found)
    text = (
        f"{found.spec.model_name}: {found.tensors} tensors, {format_size(found.weights_bytes)}, "
        f"pages {found.formats.name} ({found.formats.reason}), {facts['token_bytes']} bytes a token"
    )
    if not found.calibrated:
        yield notice(
            "model",
            f"{text}; not calibrated: pages may be larger than needed",
            f"kvd calibrate {shlex.quote(context.options.model)}",
            **facts,
        )
    else:
        yield ok("model", text, **facts)


def check_attention(context: Context) -> Iterator[Check]:
    """Each attention backend that could be chosen here against the reference, on this device and the model's shapes."""
    model = context.model
    if model is None:
        yield notice("attention", "not tried: the model's shapes are not known", "see the check `model`", backends={})
        return
    from kvd.attention.select import BACKENDS, self_test, suitable_backends
    from kvd.model.probes import probes_for
    from kvd.native import KernelUnavailable

    layouts = [(number, format_id) for number, format_id in enumerate(model.formats.book.default_ids)]
    layouts += [key for key in _formats_on_disk(context, model) if key not in layouts]
    probes = probes_for(
        model.spec,
        [(model.spec.groups[group], model.formats.book.layouts[group, key].page_format) for group, key in layouts],
        dtype=model.dtype,
    )
    recorded = read_record(context.options.data_dir).attention if context.state.may_be_searched else None
    suitable = suitable_backends()
    results: dict[str, str] = {}
    unavailable: dict[str, str] = {}
    for name in [name for name in BACKENDS if name in suitable or name == recorded]:
        try:
            backend = BACKENDS[name]()
            for probe in probes:
                self_test(backend, probe)
            results[name] = "ok"
        except KernelUnavailable as error:  # nothing wrong: the others are there for that
            unavailable[name] = error.message
        except Exception as error:  # a kernel may fail in any way; each means: not this one
            results[name] = str(error) or repr(error)
    right = [name for name, result in results.items() if result == "ok"]
    wrong = {name: result for name, result in results.items() if result != "ok"}
    facts: dict[str, object] = {
        "backends": results,
        "unavailable": unavailable,
        "probes": len(probes),
        "recorded": recorded,
    }
    if wrong:
        words = "; ".join(f"{name}: {result}" for name, result in wrong.items())
        yield notice(
            "attention",
            f"right on this device: {', '.join(right) or 'none'}; passed over: {words}",
            f"kvd takes {right[0] if right else 'the reference'} by itself; report the difference",
            **facts,
        )
    elif recorded is not None and recorded not in results:
        why = f"cannot run here: {unavailable[recorded]}" if recorded in unavailable else "this kvd does not have"
        yield notice(
            "attention",
            f"the data folder was computed with {recorded}, which {why}",
            "kvd takes another one and says so; greedy continuations of older agents may differ",
            **facts,
        )
    else:
        without = "".join(f"; {name} is not available here ({why})" for name, why in unavailable.items())
        yield ok("attention", f"{', '.join(right)} agree on every shape in use ({len(probes)}){without}", **facts)


def _formats_on_disk(context: Context, model: ModelState) -> list[tuple[int, str]]:
    """Known formats of pages of the model in the data folder, as the first page of each folder of pages tells."""
    from kvd.store.page_file import parse_header

    found: dict[tuple[int, str], None] = {}
    seen: set[object] = set()
    for entry in context.inventory.of_kind("swap"):
        if entry.path.parent in seen or model.spec.fingerprint not in entry.path.parts:
            continue
        seen.add(entry.path.parent)
        try:
            parsed = parse_header(context.fs.read(entry.path, limit=1 << 20))
        except OSError:
            continue
        if parsed is not None and model.layout(parsed[0].group, parsed[0].format_id) is not None:
            found[parsed[0].group, parsed[0].format_id] = None
    return list(found)


def _model_facts(model: ModelState) -> dict[str, object]:
    spec, book = model.spec, model.formats.book
    token_bytes = sum(book.layouts[group, key].token_bytes for group, key in enumerate(book.default_ids))
    return {
        "model": spec.model_name,
        "path": str(model.folder.path),
        "fingerprint": spec.fingerprint,
        "tensors": model.tensors,
        "weights_bytes": model.weights_bytes,
        "dtype": model.dtype,
        "calibrated": model.calibrated,
        "kv_format": model.formats.name,
        "kv_format_reason": model.formats.reason,
        "token_bytes": token_bytes,
        "fp16_token_bytes": sum(group.fp16_token_bytes for group in spec.groups),
        "context_tokens": spec.context_tokens,
    }


def _model_refused(context: Context, error: KvdError) -> Check:
    name = context.options.model
    facts: dict[str, object] = {"model": name, "error": error.name}
    pull = context.options.model_command("pull")
    if isinstance(error, ModelNotFound) and name == DEFAULT_MODEL:
        return notice("model", f"{name} is not installed; kvd serve pulls it", pull, **facts)
    if isinstance(error, ModelNotFound) and (name in CATALOGUE or is_hub_id(name)):
        remedy = f"{pull}, or give --model another name"
    elif isinstance(error, ModelNotFound):
        remedy = "give --model a name that kvd model list shows, or the path of a folder in mlx-lm's layout"
    elif isinstance(error, ModelCorrupt):
        remedy = _refetch(context)
    elif isinstance(error, NoRoomAside):
        remedy = aside.REMEDY
    else:
        remedy = "check the disk" if isinstance(error, EnvironmentFault) else "choose a model that kvd supports"
    return problem("model", error.message, remedy, **facts)


def _refetch(context: Context) -> str:
    """How to get the files of a damaged model anew: what is installed has to go first, or a pull leaves it as it is."""
    name, folder = context.options.model, context.options.model_dir
    if not is_name(name) or not (folder / name / MANIFEST).is_file():
        return "delete the file that is named, then get it anew from where it came"
    again = context.options.model_command("pull") if name in CATALOGUE else "kvd model import FILE"
    return f"{context.options.model_command('rm')} && {again}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pins() -> dict[str, str]:
    """Exact versions that kvd's own metadata asks for; empty when it runs from a source tree that is not installed."""
    try:
        wanted = importlib.metadata.requires("kvd") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    matches = [_PIN.match(line) for line in wanted]
    return {match[1]: match[2] for match in matches if match is not None and match[1] in ("mlx", "mlx-lm")}


__all__ = ["check_attention", "check_blas", "check_device", "check_model", "check_versions", "needed_packages"]
