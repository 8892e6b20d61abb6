"""Compiled kernels for CPUs: written with llvmlite, compiled for the processor at hand, kept between starts.

- `emit`: loops, vectors and arithmetic over llvmlite's IR builder.
- `mathematics`: what kernels share: exponentials, bf16, packed codes.
- `build`: compile, keep, link, call.
- `products`: a few rows times a matrix, at the speed of memory.
- `blas`: the process's BLAS, for kernels to call.
- `errors`: the package's error.

May import kvd.errors, kvd.launcher, llvmlite, numpy, platformdirs. This file imports no module that needs llvmlite:
where it is not installed, importing such a module fails, and whoever wants one asks through `try`.
"""

from kvd.native.errors import KernelUnavailable

__all__ = ["KernelUnavailable"]
