"""`tools/browser_deps.sh`: installs a browser where that can be done, says why where it cannot, and never fails."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import chromium

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "browser_deps.sh"
TOOLS = ("sh", "cat", "dirname", "grep", "mkdir", "rm", "tail", "chmod")

pytestmark = pytest.mark.skipif(shutil.which("sh") is None, reason="there is no sh")


class Machine:
    """A machine as the script sees it: a folder of commands, some of them made up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.note = folder / "note"
        self.release = folder / "os-release"
        self.release.write_text("NAME=Debian\nID=debian\n")
        for name in TOOLS:
            os.symlink(shutil.which(name) or f"/bin/{name}", self.bin / name)
        self.command("id", "echo 0")
        self.command("timeout", 'shift; exec "$@"')
        self.command("apt-get", "exit 0")

    def command(self, name: str, script: str) -> None:
        """A command of this machine."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self) -> str:
        """Run the script; returns the note, empty when there is none."""
        environment = {"PATH": str(self.bin), "OS_RELEASE": str(self.release)}
        done = subprocess.run(
            ["/bin/sh", str(SCRIPT), str(self.note)], env=environment, check=True, capture_output=True
        )
        if self.note.exists():
            assert b"skipped" in done.stderr
            return self.note.read_text()
        return ""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Debian, root, apt, no browser."""
    if any(Path(path).exists() for path in ("/Applications/Chromium.app", "/Applications/Google Chrome.app")):
        pytest.skip("this machine has a browser in a place that cannot be made up")
    return Machine(tmp_path)


def test_a_browser_is_installed_once(machine: Machine) -> None:
    """As root on Debian; afterwards nothing is asked of apt."""
    machine.command("apt-get", f"echo '#!/bin/sh' >{machine.bin}/chromium; chmod +x {machine.bin}/chromium")
    assert machine.run() == ""
    machine.command("apt-get", f"echo again >{machine.folder}/asked")
    assert machine.run() == ""
    assert not (machine.folder / "asked").exists()


def test_a_fresh_image_fetches_the_lists_first(machine: Machine) -> None:
    """apt knows no package before `update`."""
    known = machine.folder / "lists"
    install = f"[ -e {known} ] || exit 100; echo '#!/bin/sh' >{machine.bin}/chromium; chmod +x {machine.bin}/chromium"
    machine.command("apt-get", f'if [ "$1" = update ]; then echo >{known}; else {install}; fi')
    assert machine.run() == ""


def test_the_reason_is_told_where_it_cannot_be(machine: Machine) -> None:
    """Not root, not Debian, apt fails: exit code 0 and a note with the reason."""
    machine.command("apt-get", "echo 'E: no network' >&2; exit 100")
    assert machine.run() == "apt install chromium failed: E: no network\n"
    machine.command("id", "echo 1000")
    assert machine.run() == "apt install chromium needs root\n"
    machine.release.write_text("ID=ubuntu\nID_LIKE=debian\n")
    assert "no Debian" in machine.run()
    machine.command("google-chrome", "exit 0")
    assert machine.run() == ""


def test_tests_wait_for_an_install_that_runs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a browser is none: the lock is the script's while it runs, and nobody's when it never ran."""
    lock = Path(f"{machine.note}.lock")
    monkeypatch.setattr(chromium, "LOCK", lock)
    assert chromium.installed(timeout_s=0.0)
    with lock.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not chromium.installed(timeout_s=0.0)
    assert chromium.installed(timeout_s=0.0)
