"""Who may import whom: the table of the architecture, enforced on every import statement of the sources.

A row names a package or module and holds for everything under it that has no row of its own. A module that no row
covers fails: a new package starts with its row. Imports for type checking count like any other, and so do imports
inside functions and literal `import_module` calls.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PURE = (
    "__future__ abc array base64 binascii bisect codecs collections copy dataclasses decimal enum fractions functools "
    "hashlib heapq hmac itertools json math numbers operator re string struct textwrap types typing unicodedata"
)
"""The standard library without input, output, threads, processes and clocks."""


@dataclass(frozen=True)
class Row:
    """What one package may import besides itself.

    Attributes:
        ours: packages and modules of kvd and kvd_client; a package means everything under it.
        others: distributions from outside, by import name.
        pure: of the standard library, only `PURE`.
    """

    ours: str = ""
    others: str = ""
    pure: bool = False

    def allows(self, module: str) -> bool:
        """Whether a module may be imported."""
        root = module.partition(".")[0]
        if root in ("kvd", "kvd_client"):  # `kvd` alone is its version number
            return module == "kvd" or any(covers(name, module) for name in self.ours.split())
        if root in sys.stdlib_module_names:
            return not self.pure or root in PURE.split()
        return root in self.others.split()


def covers(name: str, module: str) -> bool:
    """Whether `module` is `name` or inside it."""
    return module == name or module.startswith(f"{name}.")


LAYERS = {
    # Names, faults and settings: everybody may use them, they use nobody.
    "kvd": Row(pure=True),
    "kvd.ids": Row(pure=True),
    "kvd.errors": Row(pure=True),
    "kvd.cores": Row(),
    "kvd.elf": Row(),
    "kvd.launcher": Row("kvd.cores kvd.elf"),
    "kvd.config": Row("kvd.errors kvd.ops.levels kvd.quant.spec"),
    # Policy: no mlx, no numpy, no input or output, no threads, no clock.
    "kvd.vm": Row("kvd.ids kvd.errors kvd.quant.spec", pure=True),
    # Mechanism. Only frames and fragments of them touch arrays, and those are numpy's.
    "kvd.store": Row("kvd.ids kvd.errors kvd.vm.text kvd.quant.spec", "msgpack safetensors xxhash"),
    "kvd.store.frame_pool": Row("kvd.ids kvd.errors kvd.quant kvd.store.fragment", "numpy"),
    "kvd.store.fragment": Row("kvd.errors kvd.quant.spec", "numpy"),
    "kvd.store.folder_watch": Row("kvd.store.layout", "watchdog"),
    "kvd.store.frame_memory": Row("kvd.store.fragment kvd.store.frame_pool", "numpy"),
    "kvd.quant": Row("kvd.ids kvd.errors", "mlx numpy safetensors"),
    "kvd.quant.native_codec": Row("kvd.native kvd.quant", "numpy"),
    # Calibration runs a model; it is the one place where quant looks up to kvd.model.
    "kvd.quant.calibration": Row("kvd.errors kvd.ids kvd.quant kvd.model.spec", "numpy safetensors"),
    "kvd.quant.calibrate": Row("kvd.errors kvd.ids kvd.quant kvd.model", "mlx numpy"),
    "kvd.quant.spec": Row("kvd.ids kvd.errors", pure=True),
    # Machine code for CPUs; knows numbers and addresses, nothing of pages.
    "kvd.native": Row("kvd.errors kvd.launcher", "llvmlite numpy platformdirs"),
    "kvd.attention": Row(
        "kvd.ids kvd.errors kvd.native kvd.quant kvd.store.fragment kvd.store.frame_memory kvd.store.frame_pool",
        "mlx numpy",
    ),
    # The only door to mlx_lm.
    "kvd.model": Row(
        "kvd.ids kvd.errors kvd.native kvd.quant kvd.vm.text kvd.attention kvd.store.frame_pool",
        "gguf huggingface_hub jinja2 llguidance mlx mlx_lm numpy platformdirs rich safetensors tokenizers transformers",
    ),
    "kvd.model.spec": Row("kvd.ids kvd.errors kvd.quant.spec", pure=True),
    # Drives policy and mechanism; asks the model for everything that needs mlx.
    "kvd.scheduler": Row(
        "kvd.ids kvd.errors kvd.config kvd.vm kvd.store kvd.quant kvd.attention kvd.model kvd.ops kvd.front.api",
        "numpy",
    ),
    "kvd.scheduler.state": Row("kvd.ids kvd.errors kvd.scheduler", pure=True),
    "kvd.scheduler.prediction": Row(pure=True),
    "kvd.scheduler.thrashing": Row(pure=True),
    # Clients' side: sockets, and the service behind one protocol.
    "kvd.front": Row("kvd.ids kvd.errors kvd.ops kvd_client.wire kvd_client.paths", "structlog"),
    "kvd.front.api": Row("kvd.errors", pure=True),
    "kvd.gateway": Row("kvd_client kvd.ops.loops", "h11 prometheus_client starlette uvicorn"),
    "kvd.gateway.canonical": Row("kvd.gateway.errors", pure=True),
    "kvd.gateway.conversations": Row(pure=True),
    "kvd.gateway.fields": Row("kvd.gateway.errors", pure=True),
    "kvd.gateway.identity": Row("kvd.gateway.errors", pure=True),
    "kvd.ops": Row("kvd.errors", "structlog"),
    "kvd.ops.levels": Row(pure=True),
    "kvd.ops.loops": Row("", "uvloop"),
    "kvd.ops.file_watch": Row("", "watchdog"),
    # What people run. `cli` and `daemon` (with `assembly` and `formats`) are the only ones that wire everything.
    "kvd.bench": Row("kvd kvd_client", "click mlx numpy rich xxhash"),
    "kvd.bench.rpc": Row("kvd kvd_client", "click msgpack"),
    "kvd.bench.rpc_peers": Row("kvd.front kvd.ops kvd_client", "msgpack"),
    "kvd.bench.gpu_model": Row("kvd", "mlx mlx_lm numpy"),
    # mlx-lm by itself, in a process of its own, to compare with.
    "kvd.bench.reference": Row("kvd", "mlx mlx_lm"),
    "kvd.bench.serve_reference": Row("kvd", "mlx mlx_lm"),
    "kvd.bench.serve_figures": Row(),
    "kvd.demo": Row("kvd kvd_client", "click rich"),
    "kvd.cli": Row("kvd.cli_config kvd_client.cli_lazy", "click"),
    "kvd.cli_common": Row("kvd.config kvd.errors kvd.model", "click"),
    "kvd.cli_demo": Row("kvd kvd_client", "click rich"),
    "kvd.cli_serve": Row("kvd kvd_client", "click"),
    "kvd.reloading": Row("kvd.config kvd.errors kvd.ids kvd.scheduler.limits"),
    "kvd.cli_config": Row("kvd.cli_types kvd.config kvd.errors kvd.model.paths kvd.ops.sizes kvd_client", "click"),
    "kvd.cli_service": Row("kvd.cli_common kvd.cli_config kvd.cli_options kvd.errors kvd.ops kvd_client", "click"),
    "kvd.cli_gateway": Row(
        "kvd.cli_config kvd.cli_options kvd.cli_types kvd.config kvd.ops kvd.gateway kvd_client.paths", "click"
    ),
    "kvd.cli_types": Row("kvd.errors kvd.ops.sizes", "click"),
    "kvd.cli_options": Row(
        "kvd.cli_types kvd.config kvd.model.paths kvd.model.sources kvd.ops.levels kvd.quant.spec", "click"
    ),
    "kvd.cli_model": Row("kvd kvd_client", "click rich"),
    "kvd.cli_doctor": Row("kvd kvd_client", "click rich"),
    # Examines everything, so it may look at everything.
    "kvd.doctor": Row("kvd kvd_client", "mlx rich"),
    "kvd.assembly": Row("kvd kvd_client"),
    "kvd.record": Row("kvd.launcher kvd.cores kvd.store.fs kvd.store.side_files"),
    "kvd.formats": Row("kvd kvd_client"),
    "kvd.daemon": Row("kvd kvd_client"),
    "kvd.__main__": Row("kvd.launcher kvd.cli"),
    # The client: never kvd, never mlx or numpy; the wire is bytes in, events out.
    "kvd_client": Row("kvd_client", "click msgpack"),
    "kvd_client.wire": Row("kvd_client.wire", "msgpack", pure=True),
}


def sources() -> list[tuple[str, Path]]:
    """Every module of the two packages with its file."""
    found = []
    for base, package in ((ROOT, "kvd"), (ROOT / "client", "kvd_client")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def row_of(module: str) -> str | None:
    """The name of the most specific row that covers a module; `kvd` covers only itself."""
    rows = (name for name in LAYERS if module == name or (name != "kvd" and covers(name, module)))
    return max(rows, key=len, default=None)


def imported(module: str, path: Path, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports; `from package import module` counts as the module."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])])
            name = base if node.level else node.module or ""
            for alias in node.names:
                inner = f"{name}.{alias.name}"
                yield node.lineno, inner if inner in known else name
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value)


def refused(module: str, path: Path) -> list[str]:
    """Imports of a file that the row of its module does not allow, with the line."""
    name = row_of(module)
    assert name is not None, f"{module} has no row in LAYERS: say what it may import"
    found = imported(module, path, KNOWN)
    return [f"line {line}: {to}" for line, to in found if not covers(name, to) and not LAYERS[name].allows(to)]


SOURCES = sources()
KNOWN = frozenset(module for module, _ in SOURCES)


@pytest.mark.parametrize(("module", "path"), SOURCES, ids=[module for module, _ in SOURCES])
def test_a_module_imports_what_its_row_allows(module: str, path: Path) -> None:
    """Each import statement is covered by the row of the module; there is a row."""
    assert refused(module, path) == []


def test_every_package_has_a_row_of_its_own() -> None:
    """A new package directly under `kvd` fails until the table knows it."""
    tops = {".".join(module.split(".")[:2]) for module in KNOWN if module.startswith("kvd.")}
    assert tops - set(LAYERS) == set()


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("kvd.vm.pager", "import threading", {"threading"}),
        ("kvd.vm.pager", "def f():\n    import numpy.typing as npt", {"numpy.typing"}),
        ("kvd.vm.pager", "from time import monotonic", {"time"}),
        ("kvd.vm.pager", "from kvd.quant import codec", {"kvd.quant.codec"}),
        ("kvd.vm.pager", "from importlib import import_module\nimport_module('mlx.core')", {"importlib", "mlx.core"}),
        (
            "kvd.vm.pager",
            "from . import page\nfrom .page import Page\nfrom ..store import layout",
            {"kvd.store.layout"},
        ),
        ("kvd.store.catalog", "import numpy, sqlite3", {"numpy"}),
        ("kvd.scheduler.core", "import mlx.core as mx", {"mlx.core"}),
        ("kvd.attention.reference", "import mlx_lm", {"mlx_lm"}),
        ("kvd.front.server", "from kvd_client.wire import codes\nfrom kvd_client import Client", {"kvd_client"}),
        ("kvd_client.client", "from kvd import errors\nimport numpy", {"kvd.errors", "numpy"}),
        ("kvd_client.wire.framing", "import socket\nimport msgpack", {"socket"}),
    ],
)
def test_the_table_refuses(tmp_path: Path, module: str, source: str, expected: set[str]) -> None:
    """The checker itself sees imports of every shape and refuses those that cross a layer."""
    path = tmp_path / "module.py"
    path.write_text(source)
    assert {each.partition(": ")[2] for each in refused(module, path)} == expected


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("kvd_client", "kvd mlx mlx_lm numpy"),
        ("kvd_client.wire", "kvd mlx mlx_lm numpy"),
        ("kvd.vm", "mlx mlx_lm"),
        ("kvd.store", "mlx mlx_lm"),
        ("kvd.front", "mlx mlx_lm"),
        ("kvd.gateway.serve", "kvd.front kvd.scheduler kvd.store kvd.vm mlx mlx_lm numpy"),
        ("kvd.ops", "mlx mlx_lm numpy"),
        ("kvd.launcher", "mlx mlx_lm numpy"),
    ],
)
def test_what_a_package_brings_along(package: str, absent: str) -> None:
    """Indirect imports too: a fresh interpreter that imports the package has loaded none of these."""
    script = f"import sys, {package}\nprint(*sorted(set({absent.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
