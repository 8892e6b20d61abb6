"""Progress of long work: a bar on a terminal, plain lines elsewhere, nothing in a library call.

May import rich only.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Reporter(Protocol):
    """Told about stages in order; a new stage ends the one before."""

    def stage(self, title: str, total: int | None = None) -> None:
        """A stage starts; `total` units of work are known to be ahead, or None."""

    def advance(self, units: int) -> None:
        """`units` of the stage's work are done."""

    def close(self) -> None:
        """No more reports."""


class SilentReporter:
    """Reports nothing."""

    def stage(self, title: str, total: int | None = None) -> None:
        """Ignored."""

    def advance(self, units: int) -> None:
        """Ignored."""

    def close(self) -> None:
        """Nothing to do."""


class PlainReporter:
    """One line a stage and one each quarter of it, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._title = ""
        self._total: int | None = None
        self._done = 0

    def stage(self, title: str, total: int | None = None) -> None:
        """Print the title."""
        self._title, self._total, self._done = title, total, 0
        print(title, file=self._out, flush=True)

    def advance(self, units: int) -> None:
        """Print a line when another quarter is done."""
        before, self._done = self._done, self._done + units
        if self._total and before * 4 // self._total != self._done * 4 // self._total:
            print(f"{self._title}: {self._done * 100 // self._total} %", file=self._out, flush=True)

    def close(self) -> None:
        """Nothing to do."""


class BarReporter:
    """A rich progress bar on standard error."""

    def __init__(self) -> None:
        from rich.console import Console  # imported late: a pipe never needs it
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress: Progress = Progress(*columns, console=Console(stderr=True))
        self._task: TaskID | None = None
        self._total: int | None = None
        self._progress.start()

    def stage(self, title: str, total: int | None = None) -> None:
        """End the running bar and start one for the stage."""
        self._finish()
        self._total = total
        self._task = self._progress.add_task(title, total=total)

    def advance(self, units: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.advance(self._task, units)

    def close(self) -> None:
        """Leave the finished bars on the screen."""
        self._finish()
        self._progress.stop()

    def _finish(self) -> None:
        if self._task is not None:
            total = self._total or 1
            self._progress.update(self._task, total=total, completed=total)


def reporter_for(stream: TextIO | None = None) -> Reporter:
    """A bar when `stream` (standard error by default) is a terminal, else plain lines on it."""
    out = sys.stderr if stream is None else stream
    return BarReporter() if out.isatty() else PlainReporter(out)
