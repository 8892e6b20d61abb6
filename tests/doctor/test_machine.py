"""What the doctor says of packages, attention backends and the model, and of a machine without room to look."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvd.attention.mlx_backend import MlxBackend
from kvd.attention.reference import ReferenceBackend
from kvd.doctor import Check, Options
from kvd.doctor.context import Context
from kvd.doctor.machine_checks import check_attention, check_model, check_versions, needed_packages
from kvd.doctor.model_state import model_state
from kvd.doctor.store_look import read_catalog
from kvd.model.errors import ModelCorrupt
from kvd.model.folder import MANIFEST, ModelFolder, check_files
from kvd.native import KernelUnavailable
from kvd.record import EngineRecord, write_record
from kvd.store.fs import RealFileSystem
from tests.doctor.folders import look_at, named, statuses, tree

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def context_of(data: Path, model: str, model_dir: Path) -> Context:
    """A look at a folder and a model."""
    return Context(Options(data_dir=data, socket=data / "kvd.sock", model_dir=model_dir, model=model))


@pytest.mark.parametrize(
    ("system", "machine"), [("linux", "x86_64"), ("linux", "aarch64"), ("linux", "riscv64"), ("darwin", "arm64")]
)
def test_the_packages_looked_for_are_those_that_are_installed(system: str, machine: str) -> None:
    """The table is that of the project's metadata on every platform; a dependency that is added fails this."""
    wanted = [Requirement(line) for line in tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]]
    environment = {"sys_platform": system, "platform_machine": machine}
    names = {each.name for each in wanted if each.marker is None or each.marker.evaluate(environment)}
    assert set(needed_packages(system, machine)) == names


def test_a_missing_package_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with the command that installs it."""
    from kvd.doctor import machine_checks

    real = machine_checks._version
    monkeypatch.setattr(
        machine_checks, "_version", lambda name: None if name == "huggingface_hub" else real(name) or "1"
    )
    monkeypatch.setattr(machine_checks, "_BACKENDS_OF_MLX", ())
    (check,) = check_versions(context_of(tmp_path, "none", tmp_path))
    assert (check.status, check.remedy) == ("problem", "pip install huggingface_hub")


@pytest.fixture
def attention(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str | None, bool], Check]:
    """The check of attention where compiled kernels cannot run: what is recorded, and whether they would be tried."""

    def refuse() -> MlxBackend:
        raise KernelUnavailable("llvmlite is not installed")

    def check(recorded: str | None, suitable: bool) -> Check:
        backends = {"cpu": refuse, "mlx": MlxBackend, "reference": ReferenceBackend}
        names = [name for name in backends if suitable or name != "cpu"]
        monkeypatch.setattr("kvd.attention.select.BACKENDS", backends)
        monkeypatch.setattr("kvd.attention.select.suitable_backends", lambda: names)
        write_record(tmp_path, RealFileSystem(), EngineRecord(recorded, 1, "n"))
        (found,) = check_attention(context_of(tmp_path, str(tiny_model_dir), tmp_path))
        return found

    return check


def test_kernels_that_cannot_run_here_are_no_alarm(attention: Callable[[str | None, bool], Check]) -> None:
    """A machine without the code generator has the other backends for that: a fact, not a difference to report."""
    found = attention("mlx", True)
    assert found.status == "ok"
    assert found.facts["backends"] == {"mlx": "ok", "reference": "ok"}
    assert found.facts["unavailable"] == {"cpu": "llvmlite is not installed"}
    assert found.text.endswith("; cpu is not available here (llvmlite is not installed)")


def test_backends_that_are_never_chosen_here_are_not_tried(attention: Callable[[str | None, bool], Check]) -> None:
    """Where MLX computes on a GPU nobody asks for kernels for CPUs, and their absence is not even a fact."""
    found = attention(None, False)
    assert (found.status, found.facts["unavailable"]) == ("ok", {})


@pytest.mark.parametrize("suitable", [True, False])
def test_a_recorded_backend_that_cannot_run_is_told(
    attention: Callable[[str | None, bool], Check], suitable: bool
) -> None:
    """A folder that was computed with it comes from another machine: continuations may differ."""
    found = attention("cpu", suitable)
    assert found.status == "notice"
    assert "computed with cpu, which cannot run here: llvmlite is not installed" in found.text


def test_a_wrong_backend_is_still_told(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that raises is passed over with its reason."""

    def broken() -> MlxBackend:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("kvd.attention.select.BACKENDS", {"mlx": broken, "reference": ReferenceBackend})
    (found,) = check_attention(context_of(tmp_path, str(tiny_model_dir), tmp_path))
    assert (found.status, "passed over: mlx: no kernel" in found.text) == ("notice", True)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("/nowhere/no model", "give --model a name that kvd model list shows"),
        ("nonsense", "give --model a name that kvd model list shows"),
        ("gemma3-270m", "kvd model pull gemma3-270m --model-dir {models}, or"),
        ("org/name", "kvd model pull org/name --model-dir {models}, or"),
    ],
)
def test_a_pull_is_advised_only_of_what_can_be_pulled(
    tmp_path: Path, name: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path, or a name that nobody knows, cannot be pulled."""
    from kvd.doctor import machine_checks

    monkeypatch.setattr(machine_checks, "CATALOGUE", {"gemma3-270m": None})
    (found,) = check_model(context_of(tmp_path, name, tmp_path / "the models"))
    models = f"'{tmp_path / 'the models'}'"
    assert found.status == "problem"
    assert str(found.remedy).startswith(remedy.format(models=models))


def test_a_damaged_model_is_removed_before_it_is_pulled(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A pull leaves alone what is installed, so by itself it heals nothing; other folders are not kvd's to remove."""
    for name in ("smollm2-135m", "mine"):
        model = Path(shutil.copytree(tiny_model_dir, tmp_path / name))
        os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1000)
        (model / MANIFEST).write_text("{}")
    where = f"--model-dir {tmp_path}"
    (found,) = check_model(context_of(tmp_path, "smollm2-135m", tmp_path))
    assert found.status == "problem"
    assert found.remedy == f"kvd model rm smollm2-135m {where} && kvd model pull smollm2-135m {where}"
    (found,) = check_model(context_of(tmp_path, "mine", tmp_path))
    assert found.remedy == f"kvd model rm mine {where} && kvd model import FILE"
    (found,) = check_model(context_of(tmp_path, str(tmp_path / "mine"), tmp_path))
    assert str(found.remedy).startswith("delete the file that is named")


def test_the_doctor_judges_a_model_as_the_daemon_does(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The same error with the same words: cut, too long, and without a tensor that the index names."""
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    weights = model / "model.safetensors"
    whole = weights.read_bytes()

    def verdicts() -> set[str]:
        found = set()
        for look in (
            lambda: check_files(ModelFolder("model", model)),
            lambda: model_state(str(model), tmp_path, tmp_path / "none"),
        ):
            with pytest.raises(ModelCorrupt) as caught:
                look()
            found.add(caught.value.message)
        return found

    for data in (whole[:-1], whole + b"ab"):
        weights.write_bytes(data)
        assert len(verdicts()) == 1
    weights.write_bytes(whole)
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"lost.weight": "model.safetensors"}}')
    assert verdicts() == {f"{weights} lacks the tensor lost.weight, which model.safetensors.index.json says is in it"}


def test_without_room_aside_the_rest_is_examined(
    data: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full temporary folder: the model names it once, the catalog is not judged, logs and pages are; no bytes change.

    Nothing advises to replace a catalog that nobody found fault with.
    """
    full = str(tmp_path / "full")
    monkeypatch.setattr(tempfile, "tempdir", full)
    tried = []
    real = model_state
    monkeypatch.setattr("kvd.doctor.context.model_state", lambda *given: (tried.append(given), real(*given))[1])
    before = tree(data, tiny_model_dir)
    report = look_at(data, tiny_model_dir, deep=True)
    assert tree(data, tiny_model_dir) == before
    assert statuses(report) == {"model": "problem", "catalog": "notice"}
    assert len(tried) == 1
    assert named(report, "model").text.startswith(f"the temporary folder ({full}) refuses")
    assert "TMPDIR" in str(named(report, "model").remedy)
    catalog = named(report, "catalog")
    assert (catalog.facts["judged"], catalog.facts["fault"]) == (False, "")
    assert "rebuild" not in str(catalog.remedy)
    assert named(report, "pages").facts["pages"] == 4
    assert named(report, "deep").facts["pages"] == 4


def test_a_copy_that_cannot_grow_says_nothing_of_the_catalog(
    data: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the copy but not for what SQLite writes beside it is no fault of the catalog either."""
    real = Path.write_bytes

    def refuse(path: Path, content: bytes) -> int:
        if path.name == "room":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, content)

    context = context_of(data, str(tiny_model_dir), tmp_path)
    (fingerprint,) = context.fingerprints
    assert read_catalog(context, fingerprint).contents is not None
    monkeypatch.setattr(Path, "write_bytes", refuse)
    found = read_catalog(context, fingerprint)
    assert (found.contents, found.fault) == (None, "")
    assert re.search("temporary folder .* refuses: No space left", found.unread)


def test_a_rebuild_says_that_counters_are_lost(
    data: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lifetime counters stand in the catalog alone: one that cannot be read loses them, with a line."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    report = look_at(data, tiny_model_dir, rebuild=True)
    assert any("lifetime counters begin at 0 again, the old catalog tells none" in line for line in report.repaired)
    monkeypatch.undo()
    report = look_at(data, tiny_model_dir, rebuild=True)
    assert not any("counters" in line for line in report.repaired)


def test_an_unreadable_model_folder_hides_no_other_check(
    data: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model's disk refuses is a line of the model, not of everything that asks for the model."""

    def refuse(*given: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tiny_model_dir))

    monkeypatch.setattr("kvd.doctor.context.model_state", refuse)
    report = look_at(data, tiny_model_dir)
    assert statuses(report) == {"model": "problem"}
    assert "Input/output error" in named(report, "model").text
    assert named(report, "model").remedy == "check the disk"


def test_a_header_without_dtypes_is_no_crash() -> None:
    """The dtype of a tensor is asked for only where the header states one."""
    from kvd.doctor.model_state import _stored_dtype

    assert _stored_dtype([{"model.norm.weight": {"data_offsets": [0, 0]}}]) == "float32"
    assert _stored_dtype([{"model.norm.weight": {"dtype": "BF16", "data_offsets": [0, 0]}}]) == "bfloat16"
