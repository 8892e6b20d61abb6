"""What can go wrong with compiled kernels. May import kvd.errors only."""

from __future__ import annotations

from kvd.errors import EnvironmentFault


class KernelUnavailable(EnvironmentFault):
    """This machine cannot run kvd's kernels, or the code generator failed; something slower is used instead."""


__all__ = ["KernelUnavailable"]
