"""Attention over pages in the memory of an NVIDIA GPU, through mlx's CUDA backend.

- `kernels`: the CUDA kernels (`paged_decode.cuh`, `pages.cuh`) and their launches on mlx arrays.
- `pool`: frames in device memory.
- `backend`: the attention backend `cuda`.
"""

from kvd.attention.cuda.backend import CudaBackend
from kvd.attention.cuda.kernels import Bits, Stream
from kvd.attention.cuda.pool import DevicePool

__all__ = ["Bits", "CudaBackend", "DevicePool", "Stream"]
