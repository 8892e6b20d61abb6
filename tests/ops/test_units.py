"""The service managers' files: readable, and with the settings the daemon depends on."""

from __future__ import annotations

import configparser
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvd_client.paths import default_data_dir

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "systemd" / "kvd.service"
SOCKET = ROOT / "systemd" / "kvd.socket"
PLIST = ROOT / "launchd" / "io.kvd.daemon.plist"


def unit(path: Path) -> configparser.ConfigParser:
    """A unit file; these two name each setting once."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


def test_systemd_notifies_drains_and_comes_back() -> None:
    """Readiness by notification, time to drain, a restart after `kill -9`, a watchdog that a long chunk survives."""
    service = unit(SERVICE)["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"].endswith("/kvd serve")
    assert service["Restart"] == "on-failure"
    assert service["KillMode"] == "mixed"
    assert int(service["WatchdogSec"].removesuffix("s")) >= 60
    assert int(service["TimeoutStopSec"].removesuffix("s")) >= 120


def test_systemd_lets_kernels_compile_and_the_gpu_be_seen() -> None:
    """Hardening that breaks run-time compilation or hides devices is absent; what protects prompts is there."""
    service = unit(SERVICE)["Service"]
    assert "MemoryDenyWriteExecute" not in service
    assert "PrivateDevices" not in service
    assert service["UMask"] == "0077"
    assert service["NoNewPrivileges"] == "yes"


def test_systemd_socket_is_private_and_where_clients_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """P37: 0600 in a 0700 folder, at the client's default path, under the name the daemon asks for."""
    monkeypatch.setenv("HOME", "/home/somebody")
    socket = unit(SOCKET)["Socket"]
    assert (socket["SocketMode"], socket["DirectoryMode"]) == ("0600", "0700")
    assert socket["FileDescriptorName"] == "kvd"
    expected = default_data_dir({}, platform="linux") / "kvd.sock"
    assert socket["ListenStream"].replace("%h", "/home/somebody") == str(expected)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """`systemd-analyze verify` finds nothing to say (with a program that exists here in place of kvd)."""
    for path in (SERVICE, SOCKET):
        (tmp_path / path.name).write_text(path.read_text().replace("%h/.local/bin/kvd", sys.executable))
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", "./kvd.service", "./kvd.socket"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if "kvd." in line]
    assert (done.returncode, complaints) == (0, [])


def test_launchd_runs_it_unthrottled_and_privately(monkeypatch: pytest.MonkeyPatch) -> None:
    """P37: Interactive, 0600, umask 077, the socket where clients look and under the name the daemon asks for."""
    monkeypatch.setenv("HOME", "/Users/somebody")
    text = PLIST.read_text().replace("__HOME__", "/Users/somebody").replace("__KVD__", "/opt/kvd/bin/kvd")
    assert "__" not in text
    job = plistlib.loads(text.encode())
    assert job["Label"] == PLIST.stem
    assert job["ProgramArguments"][:2] == ["/opt/kvd/bin/kvd", "serve"]
    assert job["ProcessType"] == "Interactive"
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["Umask"] == 0o077
    assert job["ExitTimeOut"] >= 120
    assert job["Sockets"]["kvd"]["SockPathMode"] == 0o600
    assert job["Sockets"]["kvd"]["SockPathName"] == str(default_data_dir({}, platform="darwin") / "kvd.sock")


def test_readmes_use_the_files_that_exist() -> None:
    """Each README names its unit files and no other."""
    assert {path.name for path in (SERVICE, SOCKET) if path.name in (SERVICE.parent / "README.md").read_text()} == {
        "kvd.service",
        "kvd.socket",
    }
    launchd = (PLIST.parent / "README.md").read_text()
    assert launchd.count(f"launchd/{PLIST.name}") == 1
    for mark in ("__HOME__", "__KVD__"):
        assert mark in launchd
