"""Makes the model files of mlx-lm importable without all that `import mlx_lm` brings.

Theory of operation. The package's `__init__` imports generation, tokenizers and with them `transformers` and
`huggingface_hub`: two seconds of a start, of which kvd uses nothing, since it has its own text codec and loop.
Importing a submodule runs that `__init__` first. So a package object is put in its place that knows only where its
files are, and runs the real `__init__` in itself at the first attribute it does not have. Nobody can tell the
difference but by time: `import mlx_lm.models.llama` is quick, and `from mlx_lm import load` works as ever.

May import nothing of kvd.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "mlx_lm"


class _LatePackage(ModuleType):
    """A package whose `__init__` has not run yet."""

    _init_lock = threading.RLock()
    _has_run = False

    def __getattr__(self, name: str) -> object:
        # what the import system asks for by itself must not count as use
        if name.startswith("__") and name not in ("__version__", "__all__"):
            raise AttributeError(name)
        with self._init_lock:
            if not self._has_run:
                self._has_run = True
                spec = self.__spec__
                assert spec is not None
                assert spec.loader is not None
                try:
                    spec.loader.exec_module(self)
                except BaseException:
                    self._has_run = False
                    raise
        if name in self.__dict__:
            return self.__dict__[name]
        raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")


def prepare() -> None:
    """Let model files be imported by themselves. Harmless when called again, or after the package was imported."""
    if PACKAGE in sys.modules:
        return
    spec: ModuleSpec | None = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.loader is None or spec.submodule_search_locations is None:
        return  # the import that follows says what is missing
    package = _LatePackage(PACKAGE, None)
    package.__spec__, package.__loader__, package.__file__ = spec, spec.loader, spec.origin
    package.__package__, package.__path__ = PACKAGE, spec.submodule_search_locations
    sys.modules[PACKAGE] = package


__all__ = ["prepare"]
