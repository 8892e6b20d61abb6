"""Options that take more than click knows: what each accepts, and that a refusal names what is allowed."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from kvd.cli_types import SIZE, AutoOrCount, WriteLimit


def convert(kind: click.ParamType, text: str) -> object:
    """What an option of that type makes of a text."""
    seen: list[object] = []

    @click.command()
    @click.option("--it", type=kind)
    def command(it: object) -> None:
        seen.append(it)

    run = CliRunner().invoke(command, ["--it", text])
    if run.exit_code:
        raise ValueError(run.output)
    return seen[0]


@pytest.mark.parametrize(
    ("text", "limit_bytes"),
    [("off", None), ("OFF", None), ("500MB/min", 500_000_000), ("1.5 GB /min", 1_500_000_000), ("2MiB", 2 << 20)],
)
def test_a_write_limit_is_a_size_a_minute(text: str, limit_bytes: int | None) -> None:
    """P39: with or without `/min`; `off` is none."""
    assert convert(WriteLimit(), text) == limit_bytes


@pytest.mark.parametrize("text", ["fast", "5MB/s", "-1MB/min", "/min", ""])
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    """P39: one line, no traceback."""
    with pytest.raises(ValueError, match="or off"):
        convert(WriteLimit(), text)


def test_sizes_and_counts_are_what_they_were() -> None:
    """P39: one parser of sizes; a count names its range."""
    assert convert(SIZE, "100K") == 100_000
    assert convert(AutoOrCount(8), "auto") == "auto"
    assert convert(AutoOrCount(8), "8") == 8
    with pytest.raises(ValueError, match="from 1 to 8"):
        convert(AutoOrCount(8), "9")
