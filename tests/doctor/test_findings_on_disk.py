"""What the doctor says of a data folder: healthy, and with each kind of damage. It changes nothing in any case."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.store.agent_log import log_seed, scan_log
from kvd.store.fork_notes import ForkNote, keep_notes
from kvd.store.fs import RealFileSystem
from kvd.store.layout import DataFolder
from kvd.store.record_codec import decode_record
from tests.doctor.folders import flip, log_of, logs, look_at, named, pages, statuses, tree, unknown_model

CALIBRATE = {"model": "notice"}
"""The tiny model is not calibrated; nothing else is said of a healthy folder."""


def flip_page_header(data: Path) -> None:
    """A page file that says it is another page."""
    flip(pages(data)[0], 40)


def flip_page_payload(data: Path) -> None:
    """A page file with one wrong value."""
    flip(pages(data)[0], pages(data)[0].stat().st_size // 2)


def cut_page(data: Path) -> None:
    """A page file without its end."""
    pages(data)[0].write_bytes(pages(data)[0].read_bytes()[:-5])


def remove_page(data: Path) -> None:
    """A page file that somebody deleted."""
    pages(data)[0].unlink()


def flip_log(data: Path) -> None:
    """A committed record with a wrong bit, another one after it."""
    flip(log_of(data, "ada"), 60)


def flip_last_record(data: Path) -> None:
    """A last record with a wrong bit: only the catalog knows that it was no unfinished append."""
    flip(log_of(data, "bob"), 60)


def leave_forks(data: Path) -> None:
    """Forks whose logs were still to be made when the daemon was killed; of one the parent is gone."""
    folder = DataFolder(data, RealFileSystem())
    fingerprint = log_of(data, "ada").parents[1].name
    last = scan_log(log_of(data, "ada").read_bytes(), log_seed(fingerprint, log_of(data, "ada").name)).frames[-1]
    note = ForkNote("default", "ada", "eve", decode_record(last.payload).branch, 0, 1, 1.0, {}, last.seq, last.checksum)
    keep_notes(RealFileSystem(), folder, fingerprint, [note, replace(note, parent="zed", child="fay")])


def tear_log(data: Path) -> None:
    """An append that a crash cut short."""
    path = logs(data)[0]
    path.write_bytes(path.read_bytes() + b"\xffKVL\x40\x00")


def remove_log(data: Path) -> None:
    """A log that somebody deleted."""
    logs(data)[0].unlink()


def orphan(data: Path) -> None:
    """A page that no log names."""
    name = "ab" * 16
    folder = pages(data)[0].parents[1] / "ab"
    folder.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(pages(data)[0], folder / f"{name}.safetensors")


def temp_file(data: Path) -> None:
    """A file that was being written."""
    path = pages(data)[0].parent / f".{'cd' * 16}.safetensors.0123456789ab.tmp"
    path.write_bytes(b"half")
    path.chmod(0o600)


def stale_catalog(data: Path) -> None:
    """A catalog that lost its rows."""
    import sqlite3

    with sqlite3.connect(next(data.glob("*/catalog.sqlite3"))) as database:
        database.execute("DELETE FROM pages")
    database.close()


def broken_catalog(data: Path) -> None:
    """A catalog whose rows have a wrong bit."""
    import sqlite3

    with sqlite3.connect(next(data.glob("*/catalog.sqlite3"))) as database:
        database.execute("UPDATE pages SET file_bytes = file_bytes + 1")
    database.close()


def remove_catalog(data: Path) -> None:
    """No catalog at all."""
    for path in data.glob("*/catalog.sqlite3*"):
        path.unlink()


def open_modes(data: Path) -> None:
    """Prompts that anybody may read (P37)."""
    logs(data)[0].chmod(0o644)
    pages(data)[0].parent.chmod(0o755)


def open_root(data: Path) -> None:
    """A data folder that anybody may list (P37)."""
    data.chmod(0o755)


def remove_version(data: Path) -> None:
    """A folder whose version somebody deleted."""
    (data / "VERSION").unlink()


def foreign_file(data: Path) -> None:
    """Something that is not kvd's."""
    (data / "notes.txt").write_bytes(b"mine")


def bad_record(data: Path) -> None:
    """An engine record that is no JSON."""
    (data / "engine.json").write_bytes(b"{")


def nested_record(data: Path) -> None:
    """An engine record that nests deeper than a parser goes."""
    (data / "engine.json").write_bytes(b"[" * 100_000)


def odd_record(data: Path) -> None:
    """An engine record with a thread count that is none."""
    (data / "engine.json").write_bytes(b'{"attention": "mlx", "threads": true, "numerics": null}')


def quarantined(data: Path) -> None:
    """A file that was put aside."""
    path = next(data.glob("*/quarantine")) / "x-0.log"
    path.write_bytes(b"bad")
    path.chmod(0o600)


def page_as_link(data: Path) -> None:
    """A page that somebody moved elsewhere and linked back: links are never followed."""
    page = pages(data)[0]
    page.symlink_to(page.rename(page.with_suffix(".moved")))


def log_as_link(data: Path) -> None:
    """A log that somebody moved elsewhere and linked back."""
    log = log_of(data, "ada")
    log.symlink_to(log.rename(log.with_suffix(".moved")))


def log_as_folder(data: Path) -> None:
    """A folder with the name of a log."""
    log = log_of(data, "ada")
    log.unlink()
    log.mkdir(mode=0o700)


def catalog_as_folder(data: Path) -> None:
    """A folder with the name of the catalog, open to others."""
    path = next(data.glob("*/catalog.sqlite3"))
    path.unlink()
    path.mkdir(mode=0o755)


def index_as_folder(data: Path) -> None:
    """A folder with the name of the catalog's index."""
    path = next(data.glob("*/catalog.sqlite3")).with_name("catalog.sqlite3-shm")
    path.unlink(missing_ok=True)
    path.mkdir(mode=0o755)


def catalog_as_link(data: Path) -> None:
    """A catalog that somebody moved elsewhere and linked back."""
    path = next(data.glob("*/catalog.sqlite3"))
    path.symlink_to(path.rename(path.with_suffix(".moved")))


def record_as_link(data: Path) -> None:
    """An engine record that somebody moved elsewhere and linked back."""
    path = data / "engine.json"
    path.symlink_to(path.rename(path.with_suffix(".moved")))


def replaced(data: Path) -> None:
    """A catalog that `--rebuild` replaced."""
    path = next(data.glob("*/quarantine")) / "catalog-0.replaced.sqlite3"
    path.write_bytes(b"good")
    path.chmod(0o600)


DAMAGE: list[tuple[Callable[[Path], None], bool, dict[str, str], str]] = [
    (flip_page_header, False, {"pages": "problem"}, "header"),
    (flip_page_payload, True, {"deep": "problem"}, "wrong checksum"),
    (cut_page, False, {"pages": "problem"}, "bytes"),
    (remove_page, False, {"pages": "problem"}, "1 page file gone"),
    (flip_log, False, {"logs": "problem"}, "committed records changed"),
    (flip_last_record, False, {"logs": "problem"}, "committed records changed: default/bob"),
    (tear_log, False, {"logs": "notice"}, "append that never finished"),
    (leave_forks, False, {"logs": "notice"}, "fork 'eve' of 'ada' is finished at the next start; fork 'fay'"),
    (remove_log, False, {"logs": "problem"}, "its log is gone"),
    (orphan, False, {"leftovers": "notice"}, "1 page that no log names"),
    (temp_file, False, {"leftovers": "notice"}, "1 unfinished file"),
    (stale_catalog, False, {"catalog": "notice"}, "4 rows missing or old"),
    (broken_catalog, False, {"catalog": "problem"}, "wrong checksums"),
    (remove_catalog, False, {"catalog": "notice"}, "there is none"),
    (open_modes, False, {"modes": "problem"}, "open to other users"),
    (open_root, False, {"modes": "problem"}, "open to other users"),
    (remove_version, False, {"data folder": "notice"}, "VERSION is missing"),
    (foreign_file, False, {"foreign files": "notice"}, "notes.txt"),
    (bad_record, False, {"engine record": "notice"}, "engine.json is damaged"),
    (nested_record, False, {"engine record": "notice"}, "engine.json is damaged"),
    (odd_record, False, {"engine record": "notice"}, "engine.json is damaged"),
    (page_as_link, False, {"pages": "problem"}, "in the place of the file is a link"),
    (page_as_link, True, {"deep": "problem", "pages": "problem"}, "in the place of the file is a link"),
    (log_as_link, False, {"logs": "problem"}, "in the place of the file is a link"),
    (log_as_folder, True, {"logs": "problem", "deep": "problem"}, "in the place of the file is a folder"),
    (catalog_as_folder, False, {"catalog": "problem"}, "catalog.sqlite3 is a folder"),
    (index_as_folder, False, {"catalog": "problem"}, "catalog.sqlite3-shm is a folder"),
    (catalog_as_link, False, {"catalog": "problem"}, "catalog.sqlite3 is a link"),
    (record_as_link, False, {"engine record": "problem"}, "engine.json is a link, not a file"),
    (quarantined, False, {"quarantine": "notice"}, "x-0.log"),
]


def test_a_healthy_folder_has_nothing_to_heal(data: Path, tiny_model_dir: Path) -> None:
    """Every check is well, deep ones too; the figures are those of the folder, and not a byte changes (P8)."""
    before = tree(data, tiny_model_dir)
    report = look_at(data, tiny_model_dir, deep=True, everything=True)
    assert statuses(report) == CALIBRATE
    assert report.problems == 0
    assert tree(data, tiny_model_dir) == before
    found = named(report, "pages").facts
    assert found["pages"] == len(pages(data)) == 4
    assert found["layouts_known"] is True
    assert found["swap_bytes"] == sum(path.stat().st_size for path in pages(data))
    assert named(report, "logs").facts["agents"] == 2
    assert named(report, "deep").facts["pages"] == 4
    assert named(report, "deep").facts["records"] == 3
    every_byte = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
    assert named(report, "disk").facts["used_bytes"] == every_byte
    backends = named(report, "attention").facts["backends"]
    assert isinstance(backends, dict)
    assert backends["reference"] == "ok"
    assert set(backends.values()) == {"ok"}


def test_the_empty_file_of_notes_is_kvds_own(data: Path, tiny_model_dir: Path) -> None:
    """P8 P37: nobody is told that it is not kvd's; one that others may read is said to be so."""
    path = logs(data)[0].parents[1] / "forks.log"
    path.touch(mode=0o600)
    assert statuses(look_at(data, tiny_model_dir)) == CALIBRATE
    path.chmod(0o644)
    assert statuses(look_at(data, tiny_model_dir)) == CALIBRATE | {"modes": "problem"}


@pytest.mark.parametrize(("damage", "deep", "expected", "words"), DAMAGE, ids=[each[0].__name__ for each in DAMAGE])
def test_damage_is_named_and_left_alone(
    data: Path,
    tiny_model_dir: Path,
    damage: Callable[[Path], None],
    deep: bool,
    expected: dict[str, str],
    words: str,
) -> None:
    """The check that is concerned says it with a remedy; others say nothing; nothing on disk changes (P8)."""
    damage(data)
    before = tree(data, tiny_model_dir)
    report = look_at(data, tiny_model_dir, deep=deep)
    assert tree(data, tiny_model_dir) == before
    found = statuses(report)
    assert expected.items() <= found.items()
    # lost records leave their pages without a name; a daemon's log file lost is no matter of others
    assert set(found) - set(expected) - set(CALIBRATE) <= {"leftovers", "catalog", "deep", "foreign files"}
    assert report.problems == list(expected.values()).count("problem")
    for name in expected:
        check = named(report, name)
        assert check.status == expected[name]
        assert words in check.text
        assert check.remedy


def test_a_page_flip_is_invisible_without_deep(data: Path, tiny_model_dir: Path) -> None:
    """Contents are read only when asked for: the quick look is quick."""
    flip_page_payload(data)
    report = look_at(data, tiny_model_dir)
    assert statuses(report) == CALIBRATE
    assert "deep" not in {check.name for check in report.checks}


def test_a_misplaced_log_is_no_fault_of_the_disk(data: Path, tiny_model_dir: Path) -> None:
    """A link or folder in a log's place: its type is said, and that the file has to come back; the disk is well."""
    log_as_link(data)
    check = named(look_at(data, tiny_model_dir), "logs")
    assert "disk" not in f"{check.text} {check.remedy}"
    assert "put the file itself back" in str(check.remedy)


def test_a_page_that_the_disk_refuses(data: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be good: no repair is advised, since none would touch it; the disk is named."""
    real = RealFileSystem.read
    bad = pages(data)[0]

    def read(self: RealFileSystem, path: Path, *, offset: int = 0, limit: int = -1, drop_cache: bool = False) -> bytes:
        if path == bad:
            raise OSError(5, "Input/output error", str(path))
        return real(self, path, offset=offset, limit=limit, drop_cache=drop_cache)

    monkeypatch.setattr(RealFileSystem, "read", read)
    check = named(look_at(data, tiny_model_dir), "pages")
    assert (check.status, "Input/output error" in check.text) == ("problem", True)
    assert "--repair" not in str(check.remedy)
    assert "check the disk" in str(check.remedy)


def test_replaced_catalogs_are_not_called_bad(data: Path, tiny_model_dir: Path) -> None:
    """What `--rebuild` left in quarantine is said and nothing to act on; a bad file beside it still is a notice."""
    replaced(data)
    report = look_at(data, tiny_model_dir)
    assert statuses(report) == CALIBRATE
    assert "1 file of catalogs replaced by --rebuild" in named(report, "quarantine").text
    quarantined(data)
    check = named(look_at(data, tiny_model_dir), "quarantine")
    assert check.status == "notice"
    assert ("x-0.log" in check.text, "catalog-0" in check.text) == (True, False)


def test_a_version_that_is_a_link(data: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    """Its type is said; nothing is followed or changed."""
    (tmp_path / "VERSION").write_bytes((data / "VERSION").read_bytes())
    (data / "VERSION").unlink()
    (data / "VERSION").symlink_to(tmp_path / "VERSION")
    check = named(look_at(data, tiny_model_dir), "data folder")
    assert (check.status, "VERSION is a link, not a file" in check.text) == ("problem", True)
    assert "restore VERSION" in str(check.remedy)


def test_another_models_pages_are_checked_as_far_as_they_can_be(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Layouts of a model that is not there are unknown: said, no problem; headers, names and checksums still count."""
    folder = unknown_model(tmp_path / "data")
    report = look_at(folder.root, tiny_model_dir, deep=True)
    assert statuses(report) == CALIBRATE
    assert "layouts are not known" in named(report, "pages").text
    flip(pages(folder.root)[0], pages(folder.root)[0].stat().st_size - 100)
    assert statuses(look_at(folder.root, tiny_model_dir, deep=True)) == CALIBRATE | {"deep": "problem"}
    flip(pages(folder.root)[1], 40)
    assert statuses(look_at(folder.root, tiny_model_dir)) == CALIBRATE | {"pages": "problem"}


def test_a_wrong_model_is_a_problem_of_the_model_only(data: Path, tmp_path: Path) -> None:
    """A model that is not there: said with what is; the data folder is examined all the same (P9)."""
    report = look_at(data, tmp_path / "nowhere")
    assert statuses(report) == {"model": "problem"}
    assert "kvd model list" in str(named(report, "model").remedy)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_model_that_is_not_whole(data: Path, tmp_path: Path, tiny_model_dir: Path, name: str) -> None:
    """A file that ends early or is missing is found without loading the model."""
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    if name == "model.safetensors":
        os.truncate(model / name, (model / name).stat().st_size - 1)
    elif name == "tokenizer.json":
        (model / name).unlink()
    else:
        (model / name).write_text("{")
    report = look_at(data, model)
    assert statuses(report) == {"model": "problem"}
    assert name in named(report, "model").text


def test_a_look_leaves_no_digests_beside_the_model(data: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    """The fingerprint is the daemon's, also when it has to be computed; what it remembers is not written (P7, P8)."""
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model", ignore=shutil.ignore_patterns(".kvd*")))
    before = tree(model)
    report = look_at(data, model)
    assert statuses(report) == CALIBRATE
    assert named(report, "pages").facts["layouts_known"] is True
    assert tree(model) == before


def test_a_stale_socket_is_noticed(data: Path, tiny_model_dir: Path, short_tmp: Path) -> None:
    """A socket nobody listens at, a file in its place, and an open folder each have their line."""
    path = short_tmp / "kvd.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    report = look_at(data, tiny_model_dir, socket=path)
    assert statuses(report) == CALIBRATE | {"socket": "notice"}
    assert path.exists()
    path.unlink()
    path.write_bytes(b"")
    assert named(look_at(data, tiny_model_dir, socket=path), "socket").text == f"{path} exists and is no socket"
    short_tmp.chmod(0o755)
    assert "lets other users in" in named(look_at(data, tiny_model_dir, socket=path), "socket").text


def test_a_socket_path_that_is_too_long(data: Path, tiny_model_dir: Path) -> None:
    """The platform's limit is said, not an error of the system."""
    check = named(look_at(data, tiny_model_dir, socket=data / ("x" * 200)), "socket")
    assert check.status == "problem"
    assert "bytes, this platform takes" in check.text


def test_folders_that_cannot_be_examined(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Not made yet, a file, inside a file, a newer format, a damaged version: a clear line each, never a traceback."""
    missing = look_at(tmp_path / "none", tiny_model_dir)
    assert statuses(missing) == CALIBRATE | {"data folder": "notice"}
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "newer").mkdir(mode=0o700)
    (tmp_path / "newer" / "VERSION").write_text("99\n")
    (tmp_path / "odd").mkdir(mode=0o700)
    (tmp_path / "odd" / "VERSION").write_text("one")
    for name, words in (
        ("file", "is not a folder"),
        ("file/inside", "not a folder"),
        ("newer", "has format 99; this kvd reads up to 1"),
        ("odd", "does not hold a format number"),
    ):
        before = tree(tmp_path)
        for repair in (False, True):
            report = look_at(tmp_path / name, tiny_model_dir, repair=repair)
            check = named(report, "data folder")
            assert (check.status, words in check.text) == ("problem", True), check.text
            assert check.remedy
            assert report.repaired == ()
        assert tree(tmp_path) == before


def test_an_unreadable_folder(data: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that may not be listed is said to be one."""
    real = os.listdir

    def refuse(path: Path) -> list[str]:
        if Path(path) == data:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    check = named(look_at(data, tiny_model_dir, repair=True), "data folder")
    assert (check.status, "cannot be read" in check.text) == ("problem", True)


def test_somebody_elses_folder(data: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of another user are a problem, and a repair leaves them alone."""
    before = tree(data)
    monkeypatch.setattr(os, "getuid", lambda: data.stat().st_uid + 1)
    report = look_at(data, tiny_model_dir, repair=True)
    assert statuses(report) == CALIBRATE | {
        "data folder": "problem",
        "modes": "problem",
        "socket": "problem",
        "repair": "problem",
    }
    assert "run the repair as that user" in str(report.refused)
    assert tree(data) == before


def test_a_failing_check_hides_no_other(data: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that raises becomes a problem of its own, and all others still run."""
    whole = {check.name for check in look_at(data, tiny_model_dir).checks}

    def refuse(folder: DataFolder, *args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvd.doctor.store_look.recover", refuse)
    report = look_at(data, tiny_model_dir)
    assert named(report, "store").text == "cannot be examined: RuntimeError: a bug"
    assert whole - {check.name for check in report.checks} == {"logs", "pages", "catalog", "leftovers"}


def test_a_pipe_in_a_files_place_is_not_waited_for(data: Path, tiny_model_dir: Path) -> None:
    """Pipes named like constants, logs, pages, lock and version are foreign files; the look ends."""
    (data / "conditioning").mkdir(mode=0o700, exist_ok=True)
    os.mkfifo(data / "conditioning" / "0123456789ab.safetensors", 0o600)
    os.mkfifo(next(data.glob("*/agents")) / f"{'0' * 32}.log", 0o600)
    (data / "daemon.lock").unlink()
    os.mkfifo(data / "daemon.lock", 0o600)
    report = look_at(data, tiny_model_dir, deep=True)
    assert statuses(report) == CALIBRATE | {"foreign files": "notice"}
    assert len(named(report, "foreign files").facts["paths"]) == 3  # type: ignore[arg-type]
