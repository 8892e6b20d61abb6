"""Data folders of another format: older ones are converted with a backup or set aside, newer ones are refused.

There is no format before 1 and none after it, so the formats here are the tests' own: 2 has logs in capitals, 3 has
them reversed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvd.store.errors import DataFolderTooNew
from kvd.store.fs import FileSystem
from kvd.store.layout import DataFolder
from kvd.store.migrate import Migration
from tests.support.lossy_disk import LossyFileSystem, SimulatedCrash
from tests.support.store_data import memory_folder

ROOT = Path("/data/kvd")
AGENTS = ROOT / "model" / "agents"
OLD = {AGENTS / "ada.log": b"ada's words", AGENTS / "bob.log": b"bob's words"}
OTHER = {ROOT / "engine.json": b"{}"}


def logs(fs: FileSystem, root: Path) -> list[Path]:
    """The files to convert."""
    folder = root / "model" / "agents"
    return [(folder / name).relative_to(root) for name in fs.listdir(folder) if name.endswith(".log")]


STEPS = {
    1: Migration(logs, lambda path, data: data.upper()),
    2: Migration(logs, lambda path, data: data[::-1]),
}


@dataclass
class Disk:
    """A folder of format 1 with two logs and another file."""

    fs: LossyFileSystem

    def folder(self, version: int, *, steps: dict[int, Migration] | None = None) -> DataFolder:
        """The folder as a kvd of that format sees it."""
        return DataFolder(ROOT, self.fs, format_version=version, migrations=STEPS if steps is None else steps)

    def content(self) -> dict[Path, bytes]:
        """Every file but the lock."""
        return {path: data for path, data in self.fs.live_files().items() if path.name != "daemon.lock"}


@pytest.fixture
def disk() -> Iterator[Disk]:
    """See `Disk`."""
    for side in memory_folder():
        yield make(LossyFileSystem(side / "side", seed=7))


def make(fs: LossyFileSystem) -> Disk:
    """Format 1, closed."""
    made = Disk(fs)
    folder = made.folder(1)
    folder.open()
    for path in (AGENTS.parent, AGENTS):
        fs.mkdir(path)
        fs.fsync_dir(path.parent)
    for path, data in (OLD | OTHER).items():
        fs.poke(path, data)
    folder.close()
    assert folder.facts == []
    return made


@pytest.mark.parametrize(("version", "expected"), [(2, lambda d: d.upper()), (3, lambda d: d.upper()[::-1])])
def test_an_older_folder_is_converted_and_backed_up(disk: Disk, version: int, expected: object) -> None:
    """Step by step; what was converted lies under its own path in the backup, other files are untouched."""
    folder = disk.folder(version)
    folder.open()
    assert callable(expected)
    found = disk.content()
    for path, data in OLD.items():
        assert found[path] == expected(data)
        assert found[ROOT / "backup-v1" / path.relative_to(ROOT)] == data
    assert found[ROOT / "engine.json"] == b"{}"
    assert found[ROOT / "VERSION"] == f"{version}\n".encode()
    assert ROOT / "MIGRATING" not in found
    assert len(folder.facts) == version - 1
    assert all("backup-v" in fact for fact in folder.facts)
    folder.close()
    again = disk.folder(version)
    again.open()
    assert (again.facts, disk.content()) == ([], found)
    again.close()


def test_a_conversion_killed_anywhere_ends_the_same(tmp_path: Path) -> None:
    """P3: at each operation, with everything unflushed lost or torn: the next start has what an undisturbed one has."""
    whole = make(LossyFileSystem(tmp_path / "whole", seed=1))
    folder = whole.folder(3)
    folder.open()
    folder.close()
    expected = whole.content()
    tried = 0
    for crash_at in range(1, 200):
        disk = make(LossyFileSystem(tmp_path / str(crash_at), seed=crash_at))
        disk.fs.operations = 0
        disk.fs.crash_at = crash_at
        try:
            disk.folder(3).open()
        except SimulatedCrash:
            tried += 1
        else:
            break
        disk.fs.crash()
        version = disk.folder(1).version()
        assert version in (1, 3)
        if version == 1:
            assert {path: disk.content()[path] for path in OLD} == OLD, "an older kvd may still open it"
        else:
            with pytest.raises(DataFolderTooNew):
                disk.folder(1).open()
        folder = disk.folder(3)
        folder.open()
        found = {path: data for path, data in disk.content().items() if not path.name.startswith(".")}
        assert found == expected, crash_at
        folder.close()
    assert tried > 30


def test_a_format_nobody_can_convert_is_set_aside(disk: Disk) -> None:
    """P8: nothing is deleted, the name says which format it is, and kvd begins anew."""
    folder = disk.folder(3, steps={1: STEPS[1]})
    folder.open()
    found = disk.content()
    for path, data in (OLD | OTHER).items():
        assert found[ROOT / "aside-v1" / path.relative_to(ROOT)] == data
        assert path not in found
    assert found[ROOT / "VERSION"] == b"3\n"
    assert "moved to" in folder.facts[0]
    folder.close()


def test_a_newer_format_is_refused_and_untouched(disk: Disk) -> None:
    """The message says both numbers and what to do."""
    before = disk.content()
    newer = disk.folder(2)
    newer.open()
    newer.close()
    after = disk.content()
    older = disk.folder(1)
    with pytest.raises(DataFolderTooNew) as refused:
        older.open()
    assert disk.content() == after != before
    for word in ("2", "1", str(ROOT), "pgrade"):
        assert word in refused.value.message


def go_back(disk: Disk, words: dict[Path, bytes]) -> None:
    """Somebody took the old kvd again without moving the backup away, and it wrote on."""
    disk.fs.poke(ROOT / "VERSION", b"1\n")
    for path, data in words.items():
        if disk.fs.stat(path.parent) is None:
            for folder in (AGENTS.parent, AGENTS):
                disk.fs.mkdir(folder)
        disk.fs.poke(path, data)


LATER = {AGENTS / "ada.log": b"ada's later words", AGENTS / "cyd.log": b"cyd's words"}


@pytest.mark.parametrize("left", [(), ("MIGRATING",)])
def test_a_backup_of_an_earlier_migration_is_not_trusted(disk: Disk, left: tuple[str, ...]) -> None:
    """P3: what the old kvd wrote since is converted, not what the copies say; those are kept under another name.

    Also when the earlier migration never ended.
    """
    for times in (1, 2):
        folder = disk.folder(3)
        folder.open()
        folder.close()
        go_back(disk, {path: data * times for path, data in (OLD | LATER).items()})
        for name in left:
            disk.fs.poke(ROOT / name, b"1\n")
    folder = disk.folder(3)
    folder.open()
    found = disk.content()
    relative = (AGENTS / "ada.log").relative_to(ROOT)
    assert found[AGENTS / "ada.log"] == (LATER[AGENTS / "ada.log"] * 2).upper()[::-1]
    assert found[AGENTS / "cyd.log"] == (LATER[AGENTS / "cyd.log"] * 2).upper()[::-1]
    assert found[ROOT / "backup-v1" / relative] == LATER[AGENTS / "ada.log"] * 2
    assert found[ROOT / "backup-v1-1" / relative] == OLD[AGENTS / "ada.log"]
    assert found[ROOT / "backup-v1-2" / relative] == LATER[AGENTS / "ada.log"]
    assert found[ROOT / "backup-v2-2" / relative] == LATER[AGENTS / "ada.log"].upper()
    assert sum("earlier migration" in fact for fact in folder.facts) == 2
    folder.close()


def test_what_was_set_aside_before_is_kept(disk: Disk) -> None:
    """P8: a second folder that is set aside gets a place of its own; no file of the first is replaced."""
    for words in (LATER, {}):
        folder = disk.folder(3, steps={})
        folder.open()
        folder.close()
        if words:
            go_back(disk, words)
    found = disk.content()
    relative = (AGENTS / "ada.log").relative_to(ROOT)
    assert found[ROOT / "aside-v1-1" / relative] == OLD[AGENTS / "ada.log"]
    assert found[ROOT / "aside-v1" / relative] == LATER[AGENTS / "ada.log"]


def test_beside_an_earlier_backup_a_kill_costs_nothing_either(tmp_path: Path) -> None:
    """P3: at each operation: the earlier copies keep their name or have the new one, and are never taken for these."""
    tried = 0
    for crash_at in range(1, 200):
        disk = make(LossyFileSystem(tmp_path / str(crash_at), seed=crash_at))
        folder = disk.folder(2)
        folder.open()
        folder.close()
        go_back(disk, OLD | LATER)
        disk.fs.operations = 0
        disk.fs.crash_at = crash_at
        try:
            disk.folder(2).open()
        except SimulatedCrash:
            tried += 1
        else:
            break
        disk.fs.crash()
        folder = disk.folder(2)
        folder.open()
        found = disk.content()
        for path, data in (OLD | LATER).items():
            assert found[path] == data.upper(), crash_at
            assert found[ROOT / "backup-v1" / path.relative_to(ROOT)] == data, crash_at
        for path, data in OLD.items():
            assert found[ROOT / "backup-v1-1" / path.relative_to(ROOT)] == data, crash_at
        folder.close()
    assert tried > 20
