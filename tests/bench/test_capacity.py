"""`kvd bench capacity`: both accountings, from the functions that the daemon uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.bench.capacity import SHAPES, account, known_spec
from kvd.bench.cli import bench
from kvd.model.folder import ModelFolder
from kvd.model.spec import ModelCacheSpec
from kvd.quant.spec import PAGE_TOKENS
from tests.support.tiny_gemma import WINDOW, make_tiny_gemma

BUDGET_BYTES = 10_200_000_000


def q4_bytes(spec: ModelCacheSpec, layers: int) -> int:
    """Bytes of one token in so many layers of the spec, from the ratio of the format: 4.5 bits a value."""
    layer = spec.layers[0]
    return layers * layer.kv_heads * (layer.k_dim + layer.v_dim) * 9 // 16


def test_gemma_12b_counts_a_sixth_of_old_tokens() -> None:
    """Eight of 48 layers see all tokens; the other 40 keep the pages that 1,024 tokens lie in."""
    spec = known_spec("gemma3-12b")
    report = account(spec, "q4", (4096, 32_768), BUDGET_BYTES)
    assert report.token_bytes == q4_bytes(spec, 48) == 110_592
    assert report.sliding_token_bytes == q4_bytes(spec, 40)
    assert report.fp16_token_bytes == 48 * 8 * 512 * 2
    for row in report.rows:
        assert row.whole_bytes == row.tokens * report.token_bytes
        assert row.resident_bytes == row.tokens * q4_bytes(spec, 8) + 1024 * q4_bytes(spec, 40)
        assert row.running_bytes == row.tokens * q4_bytes(spec, 8) + 7 * PAGE_TOKENS * q4_bytes(spec, 40)
        assert row.agents_whole == BUDGET_BYTES // row.whole_bytes
        assert row.agents_resident > 2 * row.agents_whole
    assert [row.agents_fp16 for row in report.rows] == [6, 0], "the paper's figures"


def test_without_windows_both_accountings_agree() -> None:
    """Llama: the bytes are the same at page borders, the reserves of the budget cost at most one agent."""
    for row in account(known_spec("llama3.1-8b"), "q4", (4096, 8192), BUDGET_BYTES).rows:
        assert row.whole_bytes == row.resident_bytes == row.running_bytes
        assert row.agents_whole - 1 <= row.agents_resident <= row.agents_whole


def test_pages_are_counted_whole_and_a_budget_that_is_too_small_holds_none() -> None:
    """One token more than a page takes two pages; lengths beyond the context are left out."""
    spec = known_spec("smollm2-135m")
    report = account(spec, "q8", (256, 257, 8192, 8193), 1_000_000)
    assert [row.tokens for row in report.rows] == [256, 257, 8192]
    assert report.rows[1].resident_bytes == 2 * report.rows[0].resident_bytes
    assert [row.agents_resident for row in report.rows] == [0, 0, 0]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_known_shape_is_one_the_daemon_could_run(name: str) -> None:
    """Each passes the checks that a model folder does, and its context is the stated one."""
    spec = known_spec(name)
    assert spec.context_tokens == SHAPES[name]["max_position_embeddings"]
    assert len(spec.layers) == SHAPES[name]["num_hidden_layers"]


def test_the_command_prints_both_ways_for_shapes_and_folders(tmp_path: Path) -> None:
    """One JSON object for programs, a table for people; a folder's figures are those of its configuration."""
    folder = make_tiny_gemma(tmp_path / "tiny")
    arguments = ["capacity", "--model", str(folder), "--tokens", "300,2000", "--budget", "100MB", "--json"]
    (report,) = json.loads(CliRunner().invoke(bench, arguments).stdout)["models"]
    assert report["windows"] == [WINDOW, None]
    assert report["model"] == ModelFolder("tiny", folder).name
    assert report["budget_bytes"] == 100_000_000
    late = report["rows"][1]
    assert late["resident_bytes"] < late["running_bytes"] < late["whole_bytes"]
    shapes = ["--spec", "gemma3-12b", "--spec", "smollm2-135m", "--model-dir", str(tmp_path)]
    table = CliRunner().invoke(bench, ["capacity", *shapes], env={"KVD_MODEL": str(folder)})
    assert table.exit_code == 0
    assert "gemma3-12b, k8v4 (not calibrated), budget 10.2 GB" in table.stdout
    assert "tiny" not in table.stdout, "shapes named on the spot win over the environment's model"
    assert "smollm2-135m" in table.stdout
    assert "llama3.1-8b" not in table.stdout


def test_auto_is_what_the_calibration_found(tmp_path: Path) -> None:
    """As for `kvd serve`, with its variables: the model's calibration, else k8v4; a format that is named wins."""
    folder = make_tiny_gemma(tmp_path / "tiny")
    scores = [{"format": "q8", "ratio": 1.0, "bytes_per_token": 1.0}]
    (folder / "calibration.json").write_text(json.dumps({"chosen": "q8", "scores": scores}))
    env = {"KVD_MODEL": "tiny", "KVD_MODEL_DIR": str(tmp_path)}

    def chosen(*arguments: str, **more: str) -> tuple[str, str]:
        result = CliRunner().invoke(bench, ["capacity", "--tokens", "300", "--json", *arguments], env={**env, **more})
        assert result.exit_code == 0, result.output
        (report,) = json.loads(result.stdout)["models"]
        return report["kv_format"], report["kv_format_reason"]

    assert chosen() == ("q8", "calibrated")
    assert chosen("--kv-format", "auto", KVD_KV_FORMAT="q4") == ("q8", "calibrated")
    assert chosen(KVD_KV_FORMAT="q4") == ("q4", "chosen")
    assert chosen("--spec", "smollm2-135m") == ("k8v4", "not calibrated")


@pytest.mark.parametrize("arguments", [["--tokens", "x"], ["--budget", "much"], ["--spec", "none"]], ids=str)
def test_wrong_calls_are_exit_code_2(arguments: list[str]) -> None:
    """As for every other command."""
    assert CliRunner().invoke(bench, ["capacity", *arguments]).exit_code == 2
