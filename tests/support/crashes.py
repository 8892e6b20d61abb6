"""Says where a test process was when it ended by a signal, which pytest-xdist reports as "worker crashed" and no more.

Each worker lets `faulthandler` write into a file of its own: what is written to stderr in the middle of a
test goes into pytest's capture and is gone with the process. The controller prints the files at the end.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Any

FOLDER_VARIABLE = "PYTEST_CRASHES"
MAX_CHARACTERS = 6000

_open: list[IO[str]] = []


def begin(config: Any) -> None:
    """Before the tests. The controller makes the folder; workers inherit its name."""
    if not hasattr(config, "workerinput"):
        os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="pytest-crashes-")
        return
    file = (Path(os.environ[FOLDER_VARIABLE]) / f"{config.workerinput['workerid']}.txt").open("w", encoding="utf-8")
    _open.append(file)
    faulthandler.enable(file)


def show(config: Any, reporter: Any) -> None:
    """Print what processes wrote when they ended."""
    if hasattr(config, "workerinput"):
        return
    for path in sorted(Path(os.environ[FOLDER_VARIABLE]).glob("*.txt")):
        if text := path.read_text(encoding="utf-8", errors="replace"):
            reporter.section(f"where {path.stem} ended")
            reporter.write_line(text[:MAX_CHARACTERS])


def end(config: Any) -> None:
    """After everything."""
    if _open:
        faulthandler.disable()
        _open.pop().close()
    if not hasattr(config, "workerinput") and (folder := os.environ.pop(FOLDER_VARIABLE, None)):
        shutil.rmtree(folder, ignore_errors=True)
