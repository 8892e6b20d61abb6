"""Errors of attention, split by fault.

    KvdError
    ├── CallerError      ── BackendUnavailable   the backend named by --attention cannot run here
    └── InternalError
        ├── BackendDisagrees     a backend's result differs from the reference
        └── UnsupportedMask      a model asks for a mask that is not causal with an optional window

May import kvd.errors only.
"""

from __future__ import annotations

from typing import ClassVar

from kvd.errors import CallerError, InternalError


class BackendUnavailable(CallerError):
    """The requested attention backend is unknown or cannot run on this machine; the message lists those that can."""

    name: ClassVar[str] = "backend_unavailable"


class BackendDisagrees(InternalError):
    """A backend's output differs from the reference beyond rounding; it must not serve text."""

    name: ClassVar[str] = "backend_disagrees"


class UnsupportedMask(InternalError):
    """The model's attention mask is not the one its cache made."""

    name: ClassVar[str] = "unsupported_mask"
