"""Where daemon and client look, computed without a dependency."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from kvd_client import paths


def test_the_default_folder_is_platformdirs_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The client's own computation equals platformdirs' with and without XDG_DATA_HOME."""
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.setenv("HOME", str(tmp_path))
    for xdg in (None, "", "relative/folder", *([] if sys.platform == "darwin" else [str(tmp_path / "xdg")])):
        if xdg is None:
            monkeypatch.delenv("XDG_DATA_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_DATA_HOME", xdg)
        assert str(paths.default_data_dir()) == platformdirs.user_data_dir("kvd", appauthor=False)


def test_the_macos_folder() -> None:
    """macOS keeps application data in the Library, whatever XDG says."""
    folder = paths.default_data_dir({"XDG_DATA_HOME": "/x"}, platform="darwin")
    assert folder == Path("~/Library/Application Support/kvd").expanduser()


def test_what_is_said_on_the_spot_wins(tmp_path: Path) -> None:
    """Order: socket argument, data folder argument, KVD_SOCKET, KVD_DATA_DIR, default."""
    environ = {"KVD_SOCKET": "/e/s.sock", "KVD_DATA_DIR": "/e/data"}
    assert paths.resolve_socket("/a/s.sock", "/a/data", environ) == Path("/a/s.sock")
    assert paths.resolve_socket(None, "/a/data", environ) == Path("/a/data/kvd.sock")
    assert paths.resolve_socket(None, None, environ) == Path("/e/s.sock")
    assert paths.resolve_socket(None, None, {"KVD_DATA_DIR": "/e/data"}) == Path("/e/data/kvd.sock")
    assert paths.resolve_socket(None, None, {"XDG_DATA_HOME": "/x"}).name == "kvd.sock"


def test_relative_folders_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative folder means the present working folder, for the path and for its hash."""
    monkeypatch.chdir(tmp_path)
    assert paths.default_socket("d") == paths.default_socket(tmp_path / "d")
    assert paths.resolve_data_dir("~/x") == Path("~/x").expanduser()


def test_a_path_over_the_limit_gets_a_short_one_of_its_own() -> None:
    """Too long a folder gives a short path in a per-user folder, another one for another folder."""
    limit = paths.socket_path_limit_bytes()
    fits = "/" + "d" * (limit - len("/kvd.sock") - 1)
    assert paths.default_socket(fits) == Path(fits, "kvd.sock")
    long = paths.default_socket(fits + "d")
    assert long != Path(fits + "d", "kvd.sock")
    assert len(str(long).encode()) <= limit
    assert long.parent.parent in (Path(tempfile.gettempdir()), Path("/tmp"))
    assert long == paths.default_socket(fits + "d")
    assert long != paths.default_socket(fits + "e")
    wide = "/" + "ü" * (limit // 2)
    assert paths.default_socket(wide) != Path(wide, "kvd.sock")


def test_limits_leave_room_for_the_zero() -> None:
    """The limit is that of `sun_path` less its terminating zero."""
    assert paths.socket_path_limit_bytes("linux") == 107
    assert paths.socket_path_limit_bytes("darwin") == 103


def test_the_start_command_names_what_is_not_default(tmp_path: Path) -> None:
    """The command of an error message starts the daemon that would answer there."""
    assert paths.start_command(paths.default_socket()) == "kvd serve"
    assert paths.start_command(tmp_path / "kvd.sock") == f"kvd serve --data-dir {tmp_path}"
    assert paths.start_command(Path("/a b/s.sock")) == "kvd serve --socket '/a b/s.sock'"
