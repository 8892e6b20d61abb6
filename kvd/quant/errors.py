"""Errors of quantisation, split by fault.

    KvdError
    ├── EnvironmentFault ── ConditioningDamaged   a constants file is missing, damaged or not what its name says
    └── InternalError    ── NonFiniteValues       keys or values with NaN or infinity reached the codec

May import kvd.errors only.
"""

from __future__ import annotations

from typing import ClassVar

from kvd.errors import EnvironmentFault, InternalError


class NonFiniteValues(InternalError):
    """Keys or values hold NaN or infinity (or overflow bf16); nothing was encoded or written."""

    name: ClassVar[str] = "non_finite_values"


class ConditioningDamaged(EnvironmentFault):
    """The file of conditioning constants cannot be used; pages of that format cannot be read without it."""

    name: ClassVar[str] = "conditioning_damaged"
