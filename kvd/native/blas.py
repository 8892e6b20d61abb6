"""The BLAS that `kvd.launcher` loaded, as an address that kernels call, and control over its threads.

May import kvd.launcher and kvd.native.errors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvd import launcher
from kvd.native.errors import KernelUnavailable


@dataclass(frozen=True, slots=True)
class Blas:
    """A BLAS in this process.

    Attributes:
        sgemm: address of `cblas_sgemm`.
        threads: threads it uses for one product.
    """

    sgemm: int
    threads: int
    _set_threads: Any

    @property
    def can_change_threads(self) -> bool:
        """Whether `one_thread` has an effect."""
        return self._set_threads is not None

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Products inside the block use the thread that asks for them; several threads may ask at once."""
        if self._set_threads is None or self.threads == 1:
            yield
            return
        self._set_threads(1)
        try:
            yield
        finally:
            self._set_threads(self.threads)


@functools.cache
def blas() -> Blas:
    """The process's BLAS.

    Raises:
        KernelUnavailable: the launcher loaded none (macOS and CUDA bring their own, which is not called from here).
    """
    launch = launcher.report()
    if launch is None or launch.path is None:
        raise KernelUnavailable("no BLAS was loaded for this process")
    library = ctypes.CDLL(launch.path, handle=launch.handle)
    try:
        sgemm = ctypes.cast(library.cblas_sgemm, ctypes.c_void_p)
    except AttributeError as error:
        raise KernelUnavailable(f"{launch.path} lacks a function: {error}") from None
    setter = getattr(library, "openblas_set_num_threads", None)
    if setter is not None:
        setter.argtypes, setter.restype = [ctypes.c_int], None
    assert sgemm.value is not None
    return Blas(sgemm.value, launch.threads, setter)


__all__ = ["Blas", "blas"]
