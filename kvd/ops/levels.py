"""Names of log levels, apart from `logs` so that a command can list them without loading structlog. Imports nothing."""

from __future__ import annotations

from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error")
