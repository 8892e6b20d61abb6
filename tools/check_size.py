"""Fails when a Python file has more than 500 lines, unless its docstring gives a reason (`Long because ...`)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

LIMIT_LINES = 500
FOLDERS = ("kvd", "client", "tests", "tools")


def too_long(path: Path) -> str | None:
    """The complaint about one file, None if it is fine."""
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines <= LIMIT_LINES:
        return None
    reason = ast.get_docstring(ast.parse(text)) or ""
    if "Long because " in reason:
        return None
    return f"{path}: {lines} lines (limit {LIMIT_LINES}): split it, or say 'Long because ...' in its docstring"


def main() -> int:
    """Check every Python file of the project; return the exit code."""
    files = sorted(path for folder in FOLDERS for path in Path(folder).rglob("*.py") if "build" not in path.parts)
    complaints = [complaint for path in files if (complaint := too_long(path))]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
