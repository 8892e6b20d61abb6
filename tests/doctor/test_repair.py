"""What `--repair` and `--rebuild` heal: afterwards a look finds no problem, and nothing that was good is lost."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.doctor.context import Context, Options
from kvd.doctor.store_look import read_catalog
from kvd.store.catalog import CatalogContents
from kvd.store.fs import RealFileSystem
from kvd.store.layout import DataFolder
from tests.doctor import test_findings_on_disk as damages
from tests.doctor.folders import flip, look_at, named, pages, statuses, tree, unknown_model

HEALED: list[tuple[Callable[[Path], None], bool, str]] = [
    (damages.flip_page_header, False, "aside (header"),
    (damages.flip_page_payload, True, "aside (wrong checksum)"),
    (damages.cut_page, False, "bytes): "),
    (damages.remove_page, False, "1 page lost"),
    (damages.flip_log, False, "(corrupt, wrong checksum) from the log of"),
    (damages.flip_last_record, False, "(corrupt, wrong checksum) from the log of"),
    (damages.tear_log, False, "cut 6 bytes (torn"),
    (damages.remove_log, False, "it is gone"),
    (damages.orphan, False, "deleted 1 page that no log names"),
    (damages.temp_file, False, "deleted 1 unfinished file"),
    (damages.stale_catalog, False, "added 4 pages to the catalog"),
    (damages.broken_catalog, False, "catalog made anew: 4 rows have wrong checksums"),
    (damages.remove_catalog, False, "catalog made anew: there is none"),
    (damages.open_modes, False, "0644 to 0600"),
    (damages.remove_version, False, "wrote VERSION"),
    (damages.open_root, False, "closed"),
    (damages.page_as_link, False, "aside (in the place of the file is a link)"),
    (damages.page_as_link, True, "aside (in the place of the file is a link)"),
    (damages.catalog_as_link, False, "catalog made anew: it is no regular file"),
]


def catalog_of(data: Path, model: Path) -> CatalogContents:
    """The catalog's rows without their times."""
    from dataclasses import replace

    context = Context(Options(data_dir=data, socket=data / "kvd.sock", model_dir=model.parent, model=str(model)))
    (fingerprint,) = context.fingerprints
    found = read_catalog(context, fingerprint)
    contents = found.contents
    assert contents is not None, found
    return CatalogContents(
        {key: replace(row, created_s=0.0) for key, row in contents.pages.items()},
        {key: replace(row, updated_s=0.0) for key, row in contents.agents.items()},
        contents.counters,
        contents.bad_rows,
    )


@pytest.mark.parametrize(("damage", "deep", "words"), HEALED, ids=[each[0].__name__ for each in HEALED])
def test_a_repair_heals_and_says_what_it_did(
    data: Path, tiny_model_dir: Path, damage: Callable[[Path], None], deep: bool, words: str
) -> None:
    """Each thing done is a line; a second look finds no problem, and a second repair has nothing left to do."""
    damage(data)
    report = look_at(data, tiny_model_dir, deep=deep, repair=True)
    assert report.refused is None
    assert any(words in line for line in report.repaired), report.repaired
    assert report.problems == 0, statuses(report)
    again = look_at(data, tiny_model_dir, deep=True, repair=True)
    # a page that is gone for good is told again; nothing else is
    assert [line for line in again.repaired if " lost; the tokens" not in line] == []
    assert set(statuses(again)) <= {"model", "quarantine", "pages", "foreign files"}
    modes = {stat.S_IMODE(path.stat().st_mode) for path in data.rglob("*") if path.is_file()}
    assert modes == {0o600}


def test_a_repair_of_a_healthy_folder_does_nothing(data: Path, tiny_model_dir: Path) -> None:
    """No line, and pages, logs and catalog rows are as they were."""
    rows = catalog_of(data, tiny_model_dir)
    kept = {path: path.read_bytes() for path in (*pages(data), *damages.logs(data))}
    report = look_at(data, tiny_model_dir, deep=True, repair=True)
    assert report.repaired == ()
    assert {path: path.read_bytes() for path in kept} == kept
    assert catalog_of(data, tiny_model_dir) == rows


def test_what_is_put_aside_is_kept(data: Path, tiny_model_dir: Path) -> None:
    """A corrupt page's bytes lie in quarantine as they were; the other pages stay."""
    damages.flip_page_payload(data)
    bad = pages(data)[0].read_bytes()
    look_at(data, tiny_model_dir, deep=True, repair=True)
    (aside,) = [path for path in data.glob("*/quarantine/*") if path.suffix == ".safetensors"]
    assert aside.read_bytes() == bad
    assert len(pages(data)) == 3


def test_a_rebuild_equals_what_was_there(data: Path, tiny_model_dir: Path) -> None:
    """Agents, pages and lifetime counters come back from logs and headers; the old catalog lies aside (P5)."""
    before = catalog_of(data, tiny_model_dir)
    assert len(before.pages) == 4
    assert before.counters["bytes_written"] > 0
    old = next(data.glob("*/catalog.sqlite3")).read_bytes()
    report = look_at(data, tiny_model_dir, rebuild=True)
    assert report.problems == 0
    assert any("rebuilt the catalog: 2 agents, 4 pages" in line for line in report.repaired)
    assert catalog_of(data, tiny_model_dir) == before
    (aside,) = data.glob("*/quarantine/catalog-0.replaced.sqlite3")
    assert aside.read_bytes() == old
    assert statuses(report) == {"model": "notice"}  # a catalog that was well is not called bad afterwards
    look_at(data, tiny_model_dir, rebuild=True)
    assert [path.name for path in sorted(data.glob("*/quarantine/*.sqlite3"))] == [
        "catalog-0.replaced.sqlite3",
        "catalog-1.replaced.sqlite3",
    ]


def test_a_rebuild_of_a_catalog_that_cannot_be_read(data: Path, tiny_model_dir: Path) -> None:
    """Rows come back although not one could be read."""
    before = catalog_of(data, tiny_model_dir)
    next(data.glob("*/catalog.sqlite3")).write_bytes(b"no database" * 100)
    assert statuses(look_at(data, tiny_model_dir))["catalog"] == "problem"
    report = look_at(data, tiny_model_dir, rebuild=True)
    assert report.problems == 0
    after = catalog_of(data, tiny_model_dir)
    assert (after.pages, after.agents) == (before.pages, before.agents)


@pytest.mark.parametrize("damage", [damages.catalog_as_folder, damages.index_as_folder])
def test_a_rebuild_closes_what_it_moves(data: Path, tiny_model_dir: Path, damage: Callable[[Path], None]) -> None:
    """A folder in the catalog's place goes to quarantine as everything there is: closed to other users (P37)."""
    damage(data)
    next(path for path in data.glob("*/catalog.sqlite3*") if path.is_dir()).joinpath("x").write_bytes(b"x")
    report = look_at(data, tiny_model_dir, rebuild=True)
    assert (report.refused, report.problems) == (None, 0), statuses(report)
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in data.glob("*/quarantine/**/*")}
    assert modes == {True: 0o700, False: 0o600}


def test_a_link_in_a_logs_place_is_left_alone(data: Path, tiny_model_dir: Path) -> None:
    """A repair cannot know where the log is: it says what lies there, deletes nothing, and heals once it is back."""
    damages.log_as_link(data)
    report = look_at(data, tiny_model_dir, repair=True)
    assert any("unreadable: in the place of the file is a link" in line for line in report.repaired), report.repaired
    assert len(pages(data)) == 4
    (link,) = [path for path in damages.logs(data) if path.is_symlink()]
    link.with_suffix(".moved").rename(link)
    assert look_at(data, tiny_model_dir, repair=True).problems == 0


def test_a_repair_for_a_model_that_is_not_there(data: Path, tmp_path: Path) -> None:
    """A name that is no model's is a slip: nothing is repaired or rebuilt, and the name is said."""
    damages.open_modes(data)
    before = tree(data)
    report = look_at(data, tmp_path / "nosuch", rebuild=True)
    assert tree(data) == before
    assert report.repaired == ()
    assert "nosuch" in str(report.refused)
    assert named(report, "repair").status == "problem"


def test_another_models_folder_is_repaired_without_its_layouts(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Nothing of a model that is not installed is lost by a repair: its pages and logs stay as they are (P9)."""
    folder = unknown_model(tmp_path / "data")
    kept = {path: path.read_bytes() for path in (*pages(folder.root), *damages.logs(folder.root))}
    assert len(kept) == 8
    report = look_at(folder.root, tiny_model_dir, deep=True, repair=True)
    assert (report.repaired, report.problems) == ((), 0)
    assert {path: path.read_bytes() for path in kept} == kept
    flip(pages(folder.root)[0], pages(folder.root)[0].stat().st_size - 100)
    assert look_at(folder.root, tiny_model_dir, deep=True, repair=True).problems == 0
    assert len(pages(folder.root)) == 5


def test_a_repair_needs_the_lock(data: Path, tiny_model_dir: Path) -> None:
    """While another process holds the folder nothing is touched, and its pid and the way out are said."""
    damages.open_modes(data)
    owner = DataFolder(data, RealFileSystem())
    owner.open()
    try:
        before = tree(data)
        report = look_at(data, tiny_model_dir, rebuild=True)
        assert tree(data) == before
    finally:
        owner.close()
    assert report.repaired == ()
    assert f"process {os.getpid()}" in str(report.refused)
    assert "kvd-client shutdown" in str(report.refused)
    assert named(report, "repair").status == "problem"


def test_a_stale_socket_is_removed_and_a_live_one_is_not(data: Path, tiny_model_dir: Path, short_tmp: Path) -> None:
    """Only a socket at which nobody listens goes."""
    path = short_tmp / "kvd.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as impatient:
            impatient.connect(str(path))  # fills the queue, so that nobody waits for an answer
        from kvd.doctor.socket_state import remove_stale, socket_state

        assert socket_state(path) == "answered"
        assert not remove_stale(path)
    report = look_at(data, tiny_model_dir, repair=True, socket=path)
    assert report.repaired == (f"removed the stale socket {path}",)
    assert not path.exists()
    assert statuses(report) == {"model": "notice"}


def test_a_foreign_folder_is_not_made_kvds(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A repair pointed at somebody's own files changes nothing: no mode, no VERSION, no lock."""
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "home" / "letter.txt").write_text("dear")
    before = tree(tmp_path)
    report = look_at(tmp_path / "home", tiny_model_dir, repair=True)
    assert tree(tmp_path) == before
    assert "not kvd's and is open to others" in named(report, "data folder").text


def test_links_are_not_followed(data: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    """A link in the folder is foreign: what it leads to keeps its mode."""
    target = tmp_path / "elsewhere.txt"
    target.write_text("mine")
    target.chmod(0o644)
    (data / "engine.json").unlink()
    (data / "engine.json").symlink_to(target)
    look_at(data, tiny_model_dir, repair=True)
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert target.read_text() == "mine"


def test_damaged_constants_come_back_from_the_calibration(data: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Conditioning constants that rotted are written anew where the model still has them; unknown ones stay."""
    import numpy as np

    from kvd.doctor.model_state import model_state
    from kvd.quant.calibration import Calibration, FormatScore, save_calibration
    from kvd.quant.codec import CODEC_VERSION
    from kvd.quant.conditioning import Conditioning, load_conditioning, save_conditioning

    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    found = model_state(str(model), tmp_path, tmp_path / "none")
    (group,) = found.spec.groups
    shape = (len(group.layer_indices), group.layer.kv_heads, group.layer.k_dim)
    constants = Conditioning(np.ones(shape, np.float32), np.ones(shape, np.float32))
    scores = (FormatScore("q4c", 1.0, 1.0, 100.0),)
    save_calibration(
        Calibration(found.spec.fingerprint, CODEC_VERSION, "q4c", 1.0, 10, scores, (constants,), 1.0), model
    )
    path = save_conditioning(constants, data / "conditioning")
    good = path.read_bytes()
    flip(path, len(good) - 1)
    assert statuses(look_at(data, model)) == {"constants": "problem"}
    report = look_at(data, model, repair=True)
    assert report.repaired == (f"wrote the conditioning constants {path.name} anew",)
    assert statuses(report) == {}
    assert load_conditioning(path).digest == constants.digest
