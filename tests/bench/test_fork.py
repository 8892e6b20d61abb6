"""`kvd bench fork`: figures from a real daemon, and what a fork adds to RAM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.bench.cli import bench


@pytest.mark.daemon
def test_the_command_reports_forks_and_flips(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: one JSON object; a fork adds the open page's tokens to RAM and no page, going back reuses all."""
    monkeypatch.setenv("KVD_THREADS", "1")
    arguments = ["fork", "--tokens", "300", "--repeats", "1", "--model", str(tiny_model_dir), "--json"]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    (row,) = report["rows"]
    for name in ("fork", "packed_fork", "rollback"):
        assert row[f"{name}_ms"] >= row[f"{name}_own_ms"] > 0
    assert row["copied_pages"] == 0
    assert row["child_bytes"] == row["tokens"] % 256 * report["token_bytes"]
    assert row["back_cached_tokens"] == row["tokens"]
    assert min(row["away_ms"], row["back_ms"]) > 0


def test_wrong_usage_is_exit_code_2(tmp_path: Path) -> None:
    """As for every other command."""
    assert CliRunner().invoke(bench, ["fork", "--tokens", "0", "--model-dir", str(tmp_path)]).exit_code == 2
