"""The data folder: names, version, lock, modes, backups."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import kvd.store.layout as layout_module
from kvd.errors import InvalidParams
from kvd.store.errors import DataFolderExposed, DataFolderLocked, DataFolderMalformed, DataFolderTooNew
from kvd.store.fs import RealFileSystem
from kvd.store.layout import FORMAT_VERSION, DataFolder, is_log_name, log_name, page_of_file
from tests.support.store_data import FINGERPRINT


def data_folder(root: Path) -> DataFolder:
    """A folder on the machine's disk."""
    return DataFolder(root, RealFileSystem())


def test_a_private_folder_is_initialised_even_among_foreign_files(tmp_path: Path) -> None:
    """No VERSION means not ours yet: it gets one, foreign files stay."""
    root = tmp_path / "deep" / "data"
    root.mkdir(mode=0o700, parents=True)
    (root / "notes.txt").write_text("mine")
    folder = data_folder(root)
    folder.open()
    assert (root / "VERSION").read_text() == f"{FORMAT_VERSION}\n"
    assert (root / "notes.txt").read_text() == "mine"
    assert (root / "daemon.lock").read_text() == f"{os.getpid()}\n"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    folder.close()
    folder.close()
    again = data_folder(root)
    again.open()
    again.close()


def test_a_folder_with_files_that_others_may_read_is_refused_untouched(tmp_path: Path) -> None:
    """P37: making somebody's documents, or /tmp, private is not for us; the error says what to do instead."""
    root = tmp_path / "documents"
    root.mkdir()
    root.chmod(0o755)
    (root / "notes.txt").write_text("mine")
    with pytest.raises(DataFolderExposed) as caught:
        data_folder(root).open()
    assert f"chmod 700 {root}" in caught.value.message
    assert f"{root}/kvd" in caught.value.message
    assert caught.value.data["mode"] == "755"
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    assert os.listdir(root) == ["notes.txt"]
    root.chmod(0o700)
    folder = data_folder(root)
    folder.open()
    folder.close()


def test_an_empty_folder_and_one_of_ours_become_private(tmp_path: Path) -> None:
    """P37: nobody else's files are in them."""
    root = tmp_path / "data"
    root.mkdir()
    for _ in range(2):
        root.chmod(0o755)
        folder = data_folder(root)
        folder.open()
        folder.close()
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert (root / "VERSION").exists()


def test_a_foreign_folder_in_the_place_of_a_removed_one_is_not_taken(tmp_path: Path) -> None:
    """What happens under a running daemon changes nothing about whose folder it is."""
    root = tmp_path / "data"
    folder = data_folder(root)
    folder.open()
    shutil.rmtree(root)
    root.mkdir()
    (root / "film.mov").write_bytes(b"x")
    root.chmod(0o755)
    with pytest.raises(DataFolderExposed):
        folder.restore()
    assert os.listdir(root) == ["film.mov"]
    (root / "film.mov").unlink()
    folder.restore()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    folder.close()


def test_a_newer_folder_is_refused_untouched(tmp_path: Path) -> None:
    """Both versions are in the error, nothing was written."""
    (tmp_path / "VERSION").write_text("2\n")
    with pytest.raises(DataFolderTooNew) as caught:
        data_folder(tmp_path).open()
    assert (caught.value.data["found"], caught.value.data["supported"]) == (2, FORMAT_VERSION)
    assert os.listdir(tmp_path) == ["VERSION"]


@pytest.mark.parametrize("content", [b"", b"\0\0", b"one", b"-1", b"0", b"1.5", b"9" * 40, "１".encode()])
def test_a_malformed_version_is_refused_untouched(tmp_path: Path, content: bytes) -> None:
    """Rather than guess, say so."""
    (tmp_path / "VERSION").write_bytes(content)
    with pytest.raises(DataFolderMalformed):
        data_folder(tmp_path).open()
    assert os.listdir(tmp_path) == ["VERSION"]


def test_a_second_daemon_is_told_the_first_ones_pid(tmp_path: Path) -> None:
    """The lock is held by the open file, so it goes with its process, however that ends."""
    folder = data_folder(tmp_path)
    folder.open()
    script = (
        "import sys; from pathlib import Path\n"
        "from kvd.store import DataFolder, RealFileSystem\n"
        "from kvd.store.errors import DataFolderLocked\n"
        "folder = DataFolder(Path(sys.argv[1]), RealFileSystem())\n"
        "try:\n    folder.open()\nexcept DataFolderLocked as error:\n    print(error.pid)\nelse:\n    print('open')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    try:
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{os.getpid()}\n"
        with pytest.raises(DataFolderLocked):
            data_folder(tmp_path).open()
    finally:
        folder.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "open\n"


def test_wider_modes_of_existing_folders_are_tightened(tmp_path: Path) -> None:
    """P37: prompts are in there."""
    folder = data_folder(tmp_path / "data")
    folder.open()
    folder.make_model_folders(FINGERPRINT)
    folders = [path for path in (tmp_path / "data").rglob("*") if path.is_dir()]
    assert {path.name for path in folders} == {FINGERPRINT, "swap", "agents", "quarantine"}
    for path in (tmp_path / "data", *folders):
        path.chmod(0o755)
    folder.make_model_folders(FINGERPRINT)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data", *folders)} == {0o700}
    folder.close()


def test_names_are_as_documented() -> None:
    """docs/formats.md says where a file is; digests are checked against fixed values."""
    folder = DataFolder(Path("/r"), RealFileSystem())
    page = "ab" + "0" * 30
    assert folder.page_path(FINGERPRINT, page) == Path(f"/r/{FINGERPRINT}/swap/ab/{page}.safetensors")
    assert log_name("a", "b") != log_name("a\0b", "") != log_name("", "a\0b")
    assert is_log_name(log_name("ns", "../../etc"))
    assert page_of_file(f"{page}.safetensors") == page
    assert page_of_file(f"{page.upper()}.safetensors") is None
    assert page_of_file("model.safetensors") is None


@pytest.mark.parametrize("bad", ["", "..", "a/b", "A" * 32, "0" * 31, "0" * 32 + "\n"])
def test_ids_cannot_leave_the_folder(bad: str) -> None:
    """Ids that are not 32 hex digits never become paths."""
    folder = DataFolder(Path("/r"), RealFileSystem())
    with pytest.raises(InvalidParams):
        folder.page_path(FINGERPRINT, bad)
    with pytest.raises(InvalidParams):
        folder.model_folder(bad)


def test_the_folder_is_left_out_of_backups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache tag everywhere, and Time Machine's attribute on macOS; failing to set it is no reason not to start."""
    calls: list[tuple[Path, str, bytes]] = []
    monkeypatch.setattr(layout_module.sys, "platform", "darwin")
    monkeypatch.setattr(layout_module, "_set_xattr", lambda path, name, value: calls.append((path, name, value)))
    folder = data_folder(tmp_path)
    folder.open()
    folder.close()
    assert (tmp_path / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")
    (path, name, value) = calls[0]
    assert (path, name) == (tmp_path, "com.apple.metadata:com_apple_backup_excludeItem")
    assert value.startswith(b"bplist00")
    assert b"com.apple.backupd" in value


def test_setting_an_attribute_never_raises(tmp_path: Path) -> None:
    """Best effort, also where the C library's function has other arguments or is missing."""
    layout_module._set_xattr(tmp_path / "missing", "com.example", b"x")


def test_used_bytes_count_every_file(tmp_path: Path) -> None:
    """P25: foreign files count."""
    folder = data_folder(tmp_path)
    folder.open()
    before = folder.used_bytes()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "film.mov").write_bytes(bytes(1000))
    assert folder.used_bytes() == before + 1000
    folder.close()
