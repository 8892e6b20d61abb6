"""`kvd bench attention` on the tiny model: both sides run, ratios and floors are what their parts say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.bench.attention import attention


def test_both_sides_are_measured(tiny_model_dir: Path) -> None:
    """Every figure is positive, ratios are of this run's figures, no floor is beaten by more than measuring allows."""
    done = CliRunner().invoke(
        attention, ["--model", str(tiny_model_dir), "--tokens", "300", "--repeats", "1", "--kv-format", "q8", "--json"]
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    (row,) = report["rows"]
    assert (report["kv_format"], row["tokens"]) == ("q8", 300)
    assert all(value > 0 for value in row.values())
    assert row["prefill_ratio"] == pytest.approx(row["prefill_tokens_s"] / row["mlx_lm_prefill_tokens_s"], rel=0.02)
    assert row["decode_ratio"] == pytest.approx(row["decode_tokens_s"] / row["mlx_lm_decode_tokens_s"], rel=0.02)
    assert report["read_gigabytes_s"] > 0.5


@pytest.mark.parametrize("arguments", [("--tokens", "many"), ("--tokens", "0"), ("--kv-format", "q3")])
def test_wrong_arguments_are_wrong_usage(tiny_model_dir: Path, arguments: tuple[str, str]) -> None:
    """Exit code 2, and the message names what is allowed."""
    done = CliRunner().invoke(attention, ["--model", str(tiny_model_dir), *arguments])
    assert done.exit_code == 2
    assert "1024,4096" in done.output or "q8" in done.output
