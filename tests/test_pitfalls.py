"""The table of pitfalls in `docs/reliability.md` is true: every one has a row, and every test named there names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = re.findall(
    r"^\| P(\d+) \| (.+?) \| (.+?) \| ?(.*?) ?\|$", (ROOT / "docs/reliability.md").read_text(), re.MULTILINE
)


def docstrings(path: Path) -> str:
    """All docstrings of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))


def test_every_pitfall_has_a_row() -> None:
    """P1 to P40, each once, in order."""
    assert [int(number) for number, *_ in ROWS] == list(range(1, 41))


def test_the_tests_named_there_name_their_pitfall() -> None:
    """In a docstring of the file; a row without tests must say why it is open."""
    for number, _, tests, is_open in ROWS:
        files = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        assert files or is_open, f"P{number} has neither tests nor a reason"
        for name in files:
            assert (ROOT / name).is_file(), f"P{number}: {name} is not there"
            assert re.search(rf"\bP{number}\b", docstrings(ROOT / name)), f"{name} does not name P{number}"
