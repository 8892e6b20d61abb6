"""A report for people. Imports rich and this package."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from kvd.doctor.findings import Report, counted

_STYLES: Final = {"ok": "green", "notice": "yellow", "problem": "bold red"}


def render(report: Report, console: Console) -> None:
    """Print a report: what was repaired, one line a check, its remedy below, and the sum."""
    for line in report.repaired:
        console.print(Text.assemble(("repaired ", "cyan"), line))
    width = max(len(check.name) for check in report.checks)
    for check in report.checks:
        console.print(
            Text.assemble((f"{check.status:<8}", _STYLES[check.status]), f"{check.name:<{width}}  {check.text}")
        )
        if check.remedy is not None:
            console.print(Text.assemble(" " * (8 + width + 2), ("→ ", "cyan"), check.remedy))
    console.print(f"{counted(report.problems, 'problem')}, {counted(report.notices, 'notice')}")


__all__ = ["render"]
